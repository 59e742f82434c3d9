"""The command `lambdanets convert`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lambdanets.convert.files import chosen_names, read_card_file, read_own, read_source, save_converted
from lambdanets.convert.formats import FORMATS, OWN, Converted, convert_state
from lambdanets.models import Network
from lambdanets.models.compact import Bits, largest_error
from lambdanets.models.pretrained import stored_state
from lambdanets.models.stored import read_state
from lambdanets.options import optional


@dataclass(frozen=True)
class Convert:
    """Convert weights of other implementations to this package, with equal outputs, or our own to fewer bits.

    Supported are the lambda layers of lucidrains, timm and d-li14, d-li14's LambdaResNet, timm's lambda networks,
    ResNet and ResNet-RS of torchvision and timm, and torchvision's MobileNet-v2. Networks are recognised by their
    parameters, so variants without parameters of their own (blurred pooling, another activation) are converted to the
    standard network; Keras' ResNets with torchvision's names need --format resnet-keras. Pickle files are read safely:
    only tensors are loaded, and no code runs.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """File with a state dict: .safetensors, or .pt, .pth, .bin or .tar written by torch.save."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Output .safetensors file; for a network also a folder like those of save_pretrained."""
    format: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FORMAT",
            help_behavior_hint="",
            help=f"Source format: {', '.join(FORMATS)}. Default: detected from the names of the parameters.",
        ),
    ] = None
    class_names: Annotated[str | None, optional("NAMES")] = None
    """Class names of a network, stored with its weights: a .txt file with one name per line, imagenet
    (WordNet ids such as n01440764) or imagenet-words (English names)."""
    card: Annotated[Path | None, optional("FILE")] = None
    """JSON to be stored with the weights: any of metrics, examples, evaluated_on, training_data, teacher, license,
    recipe, class_names, preprocessing (see `lambdanets.models.Card`)."""
    bits: Annotated[Bits | None, optional("{8,16,32}")] = None
    """Store large tensors of a network in fewer bits: 8 (integers with one scale per output channel), 16 (half
    precision) or 32. By default the dtype of the weights is kept."""

    def run(self) -> int:
        changes = read_card_file(self.card)
        if names := chosen_names(self.class_names):
            changes["class_names"] = names
        converted = self.convert()
        written = save_converted(converted, self.target, self.source, changes, self.bits)
        print(f"converted {self.source} ({converted.source_format}) to {converted.description}, written to {written}")
        if self.bits is not None and isinstance(converted.module, Network):
            show_size(converted.module, self.source, written)
        return 0

    def convert(self) -> Converted:
        own = None if self.format else read_own(self.source)
        if own is not None:
            return Converted(own, OWN)
        state = read_source(self.source)
        try:
            return convert_state(state, self.format)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from error


def show_size(network: Network, source: Path, written: Path) -> None:
    """Print the sizes of both files and the largest error of the new one."""
    before, after = stored_state(network), read_state(written)
    names = [name for name, tensor in before.items() if tensor.is_floating_point()]
    error, name = largest_error(before, after, names)
    sizes = [path.stat().st_size / 1e6 for path in (written, source)]
    print(f"{sizes[0]:.2f} MB, from {sizes[1]:.2f} MB; largest relative error of a tensor: {error:.2%} ({name})")
