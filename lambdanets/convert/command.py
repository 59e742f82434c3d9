"""`lambdanets convert`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lambdanets.convert.files import chosen_names, read_source, save_converted
from lambdanets.convert.formats import FORMATS, convert_state
from lambdanets.options import optional


@dataclass(frozen=True)
class Convert:
    """Weights of other implementations as ours, with equal outputs.

    Lambda layers of lucidrains, timm and d-li14; d-li14's LambdaResNet and timm's lambda networks; ResNets and
    ResNet-RS of torchvision and timm, and torchvision's MobileNet-v2. Networks are known by their parameters: one that
    differs in what has none (blurred pooling, another activation) is taken for the usual one; Keras' ResNets with
    torchvision's names need --format resnet-keras. Pickles load only if they hold tensors and nothing that could run
    code.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A state dict: .safetensors, or .pt, .pth and the like from torch.save."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """A .safetensors file; for networks also a folder, as save_pretrained writes it."""
    format: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FORMAT",
            help_behavior_hint="",
            help=f"{', '.join(FORMATS)}; by default seen from the names inside.",
        ),
    ] = None
    class_names: Annotated[str | None, optional("NAMES")] = None
    """The names of a network's classes, to be stored with its weights: a .txt file with a name on each line, imagenet
    (WordNet ids such as n01440764) or imagenet-words (English names)."""

    def run(self) -> int:
        names = chosen_names(self.class_names)
        state = read_source(self.source)
        try:
            converted = convert_state(state, self.format)
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from error
        written = save_converted(converted, self.target, self.source, names)
        print(f"{self.source} ({converted.source_format}) is {converted.description}: written to {written}")
        return 0
