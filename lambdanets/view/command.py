"""`lambdanets view`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lambdanets.train.inference.command import Using, Weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image
    from torch import Tensor

    from lambdanets.train.inference.trained import Trained
    from lambdanets.view.look import Reach


@dataclass(frozen=True)
class View:
    """Show the weights of all positions for a pixel of an image in each lambda layer, by content and by position.

    Writes view.png and view.html, a page on which you can click any pixel.
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
    """The folder of a run, a .safetensors file, a model folder, or the name of a network (with --pretrained)."""
    image: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE")]
    """A .jpg, .png, .webp, .gif or .bmp file."""
    query: Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="ROW COLUMN", help_behavior_hint="")] = None
    """Row and column of the query pixel in the input of the network (resized and cropped); by default the middle."""
    output: Path = Path("runs/view")
    """Output folder; view.html and view.png are written there."""
    layers: tuple[str, ...] = ()
    """Only layers whose name contains one of these words, for example layer4 (stage c5) or layer3.0; by default all."""
    using: Annotated[Weights, tyro.conf.arg(name="")] = field(default_factory=Weights)

    def run(self) -> int:
        from lambdanets.train.inference.trained import open_trained

        trained = open_trained(self.what, Using(**vars(self.using), device="cpu"))
        write_view(trained, self.image, self.output, self.query, self.layers, trained.network.name or self.what)
        return 0


def write_view(
    trained: "Trained",
    path: Path,
    output: Path,
    query: tuple[int, int] | None = None,
    layers: tuple[str, ...] = (),
    title: str = "",
    console: Console | None = None,
) -> None:
    """Write view.html and view.png for an image, and print the effective range of each layer."""
    from lambdanets.view.draw import draw, untrained_tables
    from lambdanets.view.look import interactions
    from lambdanets.view.page import interactive

    console = console or Console()
    picture, image = prepared(trained, path)
    seen = interactions(trained.network, image, query, layers=layers)
    page = interactive(
        trained.network,
        image,
        seen.query,
        layers=layers,
        picture=picture,
        title=f"{title}: {path.name}",
        answers=answers(trained, image),
    )
    written = [page.save(output / "view.html"), draw(seen, output / "view.png", picture)]
    console.print(reach_table(seen.reaches))
    if warning := untrained_tables(seen):
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False, soft_wrap=True)
    for one in written:
        console.print(escape(str(one)), highlight=False, soft_wrap=True)


def prepared(trained: "Trained", path: Path) -> "tuple[Tensor, Tensor]":
    """Return the preprocessed pixels, uint8 [height, width, channels], and the input [channels, height, width]."""
    from lambdanets.data.decode import BrokenImageError, open_image
    from lambdanets.data.source import read_file

    try:
        return as_input(trained, open_image(read_file(str(path))))
    except BrokenImageError as error:
        raise ValueError(f"{path}: {error}") from error


def as_input(trained: "Trained", image: "Image") -> "tuple[Tensor, Tensor]":
    """Return the same as `prepared` for an open image."""
    import torch

    from lambdanets.data.transforms import evaluation, normalize

    picture = torch.tensor(evaluation(trained.card.preprocessing, trained.channels)(image))
    return picture, normalize(picture.permute(2, 0, 1)[None], trained.card.preprocessing)[0]


def answers(trained: "Trained", image: "Tensor", top: int = 3) -> list[tuple[str, str]]:
    """Return the classes with the highest probabilities, as text."""
    from lambdanets.report.show import probability

    return [(name, probability(p)) for name, p in likeliest(trained, image, top)]


def likeliest(trained: "Trained", image: "Tensor", top: int) -> list[tuple[str, float]]:
    """Return the classes with the highest probabilities for an input [channels, height, width]."""
    import torch

    with torch.no_grad():
        logits = trained.network(image[None].to(trained.device))[0].double().cpu()
    best = logits.softmax(0).topk(min(top, len(logits)))
    names = trained.class_names
    return [(names[i], p) for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]


def reach_table(reaches: "Sequence[Reach]") -> Table:
    table = Table(title="Effective range: mean distance in pixels, weighted by |interaction|")
    for column in ("stage", "layer", "map"):
        table.add_column(column, no_wrap=True)
    for column in ("content", "position", "equal weights", "share of positions"):
        table.add_column(column, justify="right")
    for one in reaches:
        far = ["off" if value is None else f"{value:.0f}" for value in (one.content, one.position)]
        grid = f"{one.grid[0]}x{one.grid[1]}"
        table.add_row(one.stage, escape(one.name), grid, *far, f"{one.everywhere:.0f}", f"{one.position_share:.0%}")
    return table
