"""`lambdanets demo`: train a small LambdaResNet and its convolutional twin on real digits, and look at both."""

from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lambdanets.data.source import Source
from lambdanets.recipes import digits
from lambdanets.report.page import write_report
from lambdanets.report.show import count, percent, rate
from lambdanets.train.command import train
from lambdanets.train.config import TrainConfig
from lambdanets.train.inference.evaluate import Evaluation, Images, evaluate, find_images
from lambdanets.train.inference.predict import answer_table, gather, predict, row
from lambdanets.train.inference.trained import open_trained
from lambdanets.view.command import write_view

LAMBDA, TWIN = "lambda", "convolution"
PREDICTED = 8


@dataclass(frozen=True)
class Demo:
    """A first run, about two minutes on a CPU: nothing is downloaded.

    Trains a small LambdaResNet and its convolutional twin on 4,000 handwritten digits that come with the package,
    compares them on 1,000 others, draws what the lambda layers look at, and writes report.html.
    """

    output: Path = Path("runs/demo")
    """The folder for the results; a number is appended if it exists."""

    def run(self) -> int:
        return run(self.output)


def run(output: Path, config: TrainConfig | None = None, console: Console | None = None) -> int:
    """Train both networks in a new folder, and show the results; returns an exit status."""
    console = console or Console(highlight=False)
    config = config or digits()
    folder = unused(output)
    name = config.model.name.removeprefix("lambda_")
    plain = replace(config.model, name=name, placement="CCCC", embedding_std=None)  # it has no embeddings
    twin = replace(config, out=folder / TWIN, model=plain)
    config = replace(config, out=folder / LAMBDA)
    console.rule("1. A small LambdaResNet learns to read digits")
    console.print(f"4,000 handwritten digits (MNIST), {config.epochs:g} epochs.")
    if status := train(config, report=False, console=console):
        return status
    console.rule("2. Its convolutional twin")
    console.print("The same recipe, with 3x3 convolutions where the lambda layers were.")
    if status := train(twin, report=False, console=console):
        return status
    console.rule("3. Digits that neither has seen")
    images = find_images(str(config.out))
    compare({LAMBDA: config.out, TWIN: twin.out}, images, console)
    console.rule("4. A few of them")
    files = write_images(images.source, folder / "images")
    look(config.out, folder / "images", console)
    console.rule("5. What the lambda layers look at")
    console.print(f"[bold]lambdanets view {escape(str(config.out))} {escape(str(files[0]))}[/]", soft_wrap=True)
    write_view(open_trained(str(config.out)), files[0], folder / "view", title=config.model.name, console=console)
    console.rule("6. The report")
    report = write_report(config.out, beside=[twin.out])
    console.print(f"[bold]{escape(str(report))}[/]", soft_wrap=True)
    console.print("Open it in a browser: curves, confusion matrix, hardest mistakes.")
    console.print("Your own images, a folder for each class: [bold]lambdanets train FOLDER[/]")
    return 0


def unused(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that is not there: nothing is written over."""
    number, free = 2, folder
    while free.exists():
        free = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return free


def compare(folders: dict[str, Path], images: Images, console: Console) -> dict[str, Evaluation]:
    """Print accuracy and size of both networks."""
    found = {name: evaluate(open_trained(str(folder)), images) for name, folder in folders.items()}
    table = Table()
    for title in ("network", "top-1", "mistakes", "parameters", "images/s"):
        table.add_column(title, justify="left" if title == "network" else "right")
    for name, one in found.items():
        mistakes = f"{round((1 - one.top1) * one.examples)} of {one.examples:,}"
        table.add_row(name, percent(one.top1, 1), mistakes, count(one.parameters), rate(one.network_images_per_second))
    console.print(table)
    examples = next(iter(found.values())).examples
    error = (sum(one.top1 * (1 - one.top1) for one in found.values()) / examples) ** 0.5
    console.print(
        f"One training run of each, judged by {examples:,} images: the difference has a standard error of "
        f"{100 * error:.1f} points from the choice of images, and the random start adds to it. "
        "This cannot show which network is better."
    )
    return found


def write_images(source: Source, folder: Path, number: int = PREDICTED) -> list[Path]:
    """Some of the digits as files whose names say what they are."""
    folder.mkdir(parents=True)
    written = []
    for i in range(number):
        index = i * len(source) // number + 7 * i  # from all over
        pixels = source.read(index % len(source))
        assert not isinstance(pixels, bytes)
        label = source.class_names[int(source.labels[index % len(source)])]
        written.append(folder / f"{i + 1}-this-is-a-{label}.png")
        Image.fromarray(pixels).save(written[-1])
    return written


def look(run: Path, images: Path, console: Console) -> None:
    """Print the likeliest classes of the images in a folder."""
    console.print(f"[bold]lambdanets predict {escape(str(run))} {escape(str(images))}[/]", soft_wrap=True)
    table = answer_table(3)
    for one in predict(open_trained(str(run)), gather([str(images)]), top=3):
        table.add_row(*row(one))
    console.print(table)
