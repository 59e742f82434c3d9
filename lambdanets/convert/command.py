"""The command `lambdanets convert`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lambdanets.convert.files import chosen_names, read_source, save_converted
from lambdanets.convert.formats import FORMATS, convert_state
from lambdanets.options import optional


@dataclass(frozen=True)
class Convert:
    """Convert weights of other implementations to this package, with equal outputs.

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

    def run(self) -> int:
        names = chosen_names(self.class_names)
        state = read_source(self.source)
        try:
            converted = convert_state(state, self.format)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from error
        written = save_converted(converted, self.target, self.source, names)
        print(f"converted {self.source} ({converted.source_format}) to {converted.description}, written to {written}")
        return 0
