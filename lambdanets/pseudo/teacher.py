"""Teacher networks from lambdanets, timm and torchvision, used alone or averaged."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambdanets.data.class_names import listed_names
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.data.source import open_source
from lambdanets.data.transforms import Transform, evaluation, normalize
from lambdanets.models.memory_format import to_channels_last
from lambdanets.models.pretrained import read_card
from lambdanets.models.stored import read_state
from lambdanets.options import chosen_device
from lambdanets.train.inference.command import Using
from lambdanets.train.inference.trained import open_trained
from lambdanets.train.precision import autocast

LIBRARIES = ("timm", "torchvision")


@dataclass(frozen=True)
class Teacher:
    """A network in evaluation mode on its device.

    Attributes:
        what: the specification that it was opened with.
        network: the network; images [B, C, H, W] to logits [B, classes].
        preprocessing: size, crop, mean and standard deviation of its images.
        channels: 3 for colour images, 1 for grey ones.
        class_names: the classes in the order of the logits.
        weights: a hash of the weights, which identifies the teacher in manifests.
    """

    what: str
    network: nn.Module
    preprocessing: Preprocessing
    channels: int
    class_names: tuple[str, ...]
    weights: str

    @property
    def view(self) -> tuple[Preprocessing, int]:
        """The preprocessing without mean and std, which are applied on the device, and the number of channels."""
        return replace(self.preprocessing, mean=(0.0,), std=(1.0,)), self.channels

    def about(self) -> dict[str, Any]:
        """Return what identifies the teacher in a manifest: specification, hash of the weights and image size."""
        size = self.preprocessing.size
        about = {"what": self.what, "weights": self.weights, "size": size if isinstance(size, int) else list(size)}
        # Left out if False: older manifests do not have this field and must stay equal.
        return about | ({"exif_orientation": True} if self.preprocessing.exif_orientation else {})


class Ensemble:
    """The mean of the probabilities of several teachers, which must have the same classes in any order.

    Args:
        teachers: at least one. The classes are those of the first, in its order.
        precision: "float32", "bfloat16", "float16" or "float64", for the forward pass.
        device: where the teachers are.

    >>> from pathlib import Path
    >>> import torch
    >>> from lambdanets import create_model
    >>> from lambdanets.models import Card, Preprocessing, save_weights
    >>> from lambdanets.pseudo.teacher import open_teachers
    >>> from lambdanets.train.inference.command import Using
    >>> network = create_model("lambda_resnet_tiny", num_classes=2, image_size=32)
    >>> for name in ("a", "b"):
    ...     _ = save_weights(network, Path(f"{name}.safetensors"), Card(Preprocessing(size=32), ("cat", "dog")))
    >>> ensemble = open_teachers("a.safetensors,b.safetensors", Using(device="cpu"))
    >>> images = [torch.zeros(3, 3, 32, 32, dtype=torch.uint8) for _ in ensemble.views]
    >>> ensemble.probabilities(images).shape
    torch.Size([3, 2])
    """

    def __init__(self, teachers: Sequence[Teacher], precision: str, device: torch.device) -> None:
        if not teachers:
            raise ValueError("there is no teacher: name at least one")
        self.teachers, self.precision, self.device = tuple(teachers), precision, device
        self.class_names = teachers[0].class_names
        self.orders = [class_order(t, self.class_names, teachers[0].what).to(device) for t in teachers]
        self.views = list(dict.fromkeys(t.view for t in teachers))

    def transforms(self) -> list[Transform]:
        """Return the preprocessing of each of `views`: PIL images to uint8 arrays [H, W, C]."""
        return [evaluation(preprocessing, channels) for preprocessing, channels in self.views]

    @torch.inference_mode()
    def probabilities(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the mean probabilities, float32 [B, classes], on the device and without synchronising with it.

        Args:
            inputs: uint8 images [B, C, H, W], one tensor for each of `views`: teachers with the same preprocessing
                share a tensor. `transforms` returns how to make them.
        """
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        there = [images.to(self.device, non_blocking=True) for images in inputs]
        total: Tensor | None = None
        for teacher, order_C in zip(self.teachers, self.orders, strict=True):
            images = normalize(there[self.views.index(teacher.view)], teacher.preprocessing, dtype)
            with autocast(self.precision, self.device):  # type: ignore[arg-type]
                logits_BC = teacher.network(images.contiguous(memory_format=torch.channels_last))
            mine_BC = logits_BC.float().softmax(1)[:, order_C]
            total = mine_BC if total is None else total + mine_BC
        assert total is not None
        return total / len(self.teachers)

    def about(self) -> tuple[dict[str, Any], ...]:
        """Return what identifies each teacher in a manifest."""
        return tuple(t.about() for t in self.teachers)


def class_order(teacher: Teacher, class_names: tuple[str, ...], first: str) -> Tensor:
    """Return the index of each class among the teacher's outputs; raise a ValueError if the classes differ."""
    places = {name: i for i, name in enumerate(teacher.class_names)}
    if len(places) != len(teacher.class_names):
        raise ValueError(f"{teacher.what} has two classes with the same name")
    if set(places) != set(class_names):
        differs = next(iter(sorted(set(places) ^ set(class_names))))
        raise ValueError(
            f"{teacher.what} has {len(places)} classes and {first} has {len(class_names)}, and they differ: only one "
            f"of them has {differs!r}. All teachers of an ensemble must have the same classes"
        )
    return torch.tensor([places[name] for name in class_names])


def open_teachers(what: str, using: Using, class_names: str | None = None) -> Ensemble:
    """Load one or more teachers.

    Args:
        what: the teachers, separated by commas. Each is a run folder, a .safetensors file, a model folder,
            `NAME@WEIGHTS` for a network of `lambdanets models`, `timm:NAME@FILE`, or `torchvision:NAME@FILE`.
        using: device, precision, image size.
        class_names: for weights without class names: a .txt file with one name per line, a .safetensors file whose
            weights name their classes, a dataset, "imagenet" (WordNet ids) or "imagenet-words" (English names).

    >>> from pathlib import Path
    >>> from lambdanets import create_model
    >>> from lambdanets.models import Card, Preprocessing, save_weights
    >>> from lambdanets.pseudo.teacher import open_teachers
    >>> from lambdanets.train.inference.command import Using
    >>> network = create_model("lambda_resnet_tiny", num_classes=2, image_size=32)
    >>> for name in ("a", "b"):
    ...     _ = save_weights(network, Path(f"{name}.safetensors"), Card(Preprocessing(size=32), ("cat", "dog")))
    >>> ensemble = open_teachers("a.safetensors,b.safetensors", Using(device="cpu"))
    >>> len(ensemble.teachers), ensemble.class_names
    (2, ('cat', 'dog'))
    """
    device = chosen_device(using.device)
    named = None if class_names is None else read_names(class_names)
    teachers = [open_teacher(word.strip(), using, device) for word in what.split(",") if word.strip()]
    if named is not None:
        teachers = [renamed(teacher, named) for teacher in teachers]
    return Ensemble(teachers, using.precision, device)


def renamed(teacher: Teacher, names: tuple[str, ...]) -> Teacher:
    if len(names) != len(teacher.class_names):
        raise ValueError(
            f"--class-names has {len(names)} names, but {teacher.what} has {len(teacher.class_names)} classes"
        )
    own = teacher.class_names
    if own != tuple(map(str, range(len(own)))) and own != names:
        raise ValueError(
            f"{teacher.what} has class names of its own ({', '.join(own[:3])}, ...): remove --class-names, which is "
            f"for weights without them"
        )
    return replace(teacher, class_names=names)


def read_names(where: str) -> tuple[str, ...]:
    names = listed_names(where)
    if names is None and where.endswith(".safetensors"):
        names = read_card(Path(where).expanduser()).class_names
        if not names:
            raise ValueError(f"--class-names {where}: these weights do not name their classes")
    return open_source(where, split="train").class_names if names is None else names


def open_teacher(what: str, using: Using, device: torch.device) -> Teacher:
    library, colon, rest = what.partition(":")
    if colon and library in LIBRARIES:
        name, _, weights = rest.partition("@")
        if not weights:
            raise ValueError(
                f"{what} has no weights: write {library}:{name}@FILE, with a .safetensors or .pth file on this machine"
            )
        return open_foreign(library, name, Path(weights).expanduser(), using, device)
    name, at, weights = what.partition("@")
    if at and not Path(what).expanduser().exists():
        trained = open_trained(name, replace(using, pretrained=weights))
    else:
        trained = open_trained(what, using)
    return Teacher(
        what,
        trained.network,
        trained.card.preprocessing,
        trained.channels,
        trained.class_names,
        weights_hash(trained.network),
    )


def open_foreign(library: str, name: str, path: Path, using: Using, device: torch.device) -> Teacher:
    state = read_foreign(path)
    if library == "timm":
        network, preprocessing, channels, classes = from_timm(name, state)
    else:
        network, preprocessing, channels, classes = from_torchvision(name, state)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit {library}:{name}: {' '.join(str(error).split())[:300]}") from error
    if using.image_size is not None:
        preprocessing = replace(preprocessing, size=using.image_size)
    dtype = torch.float64 if using.precision == "float64" else torch.float32
    network = to_channels_last(network.eval().to(device, dtype))
    names = tuple(map(str, range(classes)))
    return Teacher(f"{library}:{name}@{path.name}", network, preprocessing, channels, names, weights_hash(network))


def read_foreign(path: Path) -> dict[str, Tensor]:
    """Load a state dict, without unpickling anything that could run code."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such weights file")
    return read_state(path)


def class_count(state: dict[str, Tensor], classifier: str | None) -> int | None:
    """Return the number of outputs of a classifier in a state dict, or None if the classifier is not in it."""
    found = [len(state[key]) for key in (f"{classifier}.weight", f"{classifier}.bias") if key in state]
    return found[0] if found else None


def from_timm(name: str, state: dict[str, Tensor]) -> tuple[nn.Module, Preprocessing, int, int]:
    import timm
    from timm.data.config import resolve_model_data_config

    if not timm.is_model(name):
        raise ValueError(f"timm has no network {name!r}")
    network: Any = timm.create_model(name, pretrained=False)
    classifier = network.pretrained_cfg.get("classifier")
    if isinstance(classifier, tuple | list):  # a distilled network has two classifiers of the same size
        classifier = classifier[0]
    classes = class_count(state, classifier) or network.num_classes
    if classes != network.num_classes:
        network = timm.create_model(name, pretrained=False, num_classes=classes)
    config = resolve_model_data_config(network)
    channels, height, width = config["input_size"]
    interpolation = config["interpolation"] if config["interpolation"] in ("bilinear", "nearest") else "bicubic"
    size = height if height == width else (height, width)
    preprocessing = Preprocessing(
        tuple(config["mean"]), tuple(config["std"]), size, float(config["crop_pct"]), interpolation
    )
    return network, preprocessing, channels, classes


def from_torchvision(name: str, state: dict[str, Tensor]) -> tuple[nn.Module, Preprocessing, int, int]:
    from torchvision import models

    if name not in models.list_models(module=models):
        raise ValueError(f"torchvision has no classifier {name!r}")
    options: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    network = models.get_model(name, weights=None, **options)
    # All of them define their classifier last: a linear layer, or a convolution in SqueezeNet. The order is taken from
    # the network because safetensors files are sorted by dtype and name.
    classifier = list(network.state_dict())[-1].rpartition(".")[0]
    by_default = class_count(network.state_dict(), classifier)
    assert by_default is not None
    classes = class_count(state, classifier) or by_default
    if classes != by_default:
        network = models.get_model(name, weights=None, num_classes=classes, **options)
    preset: Any = models.get_model_weights(name).DEFAULT.transforms()  # type: ignore[attr-defined]
    size, before = preset.crop_size[0], preset.resize_size[0]
    preprocessing = Preprocessing(
        tuple(preset.mean), tuple(preset.std), size, min(1.0, size / before), preset.interpolation.value
    )
    return network, preprocessing, 3, classes


def weights_hash(network: nn.Module) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(network.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
