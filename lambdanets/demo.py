"""`lambdanets demo`: train a small LambdaResNet and the same network with convolutions on digits, and compare them."""

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
    """Train, evaluate and inspect a small network: about two minutes on a CPU, without downloads.

    Trains a small LambdaResNet and the same network with convolutions on 4,000 handwritten digits that are included in
    the package, compares them on 1,000 others, visualises the lambda layers, and writes report.html.
    """

    output: Path = Path("runs/demo")
    """Folder for the results; a number is appended if it exists."""

    def run(self) -> int:
        return run(self.output)


def run(output: Path, config: TrainConfig | None = None, console: Console | None = None) -> int:
    """Train both networks in a new folder, show the results, and return an exit status."""
    console = console or Console(highlight=False)
    config = config or digits()
    folder = unused(output)
    name = config.model.name.removeprefix("lambda_")
    plain = replace(config.model, name=name, placement="CCCC", embedding_std=None)  # no position embeddings
    twin = replace(config, out=folder / TWIN, model=plain)
    config = replace(config, out=folder / LAMBDA)
    console.rule("1. Train a small LambdaResNet")
    console.print(f"Data: 4,000 handwritten digits (MNIST), {config.epochs:g} epochs.")
    if status := train(config, report=False, console=console):
        return status
    console.rule("2. Train the same network with convolutions")
    console.print("The same recipe, with 3x3 convolutions instead of lambda layers.")
    if status := train(twin, report=False, console=console):
        return status
    console.rule("3. Evaluate both on validation images")
    images = find_images(str(config.out))
    compare({LAMBDA: config.out, TWIN: twin.out}, images, console)
    console.rule("4. Predict some images")
    files = write_images(images.source, folder / "images")
    look(config.out, folder / "images", console)
    console.rule("5. Visualise the lambda layers")
    console.print(f"[bold]lambdanets view {escape(str(config.out))} {escape(str(files[0]))}[/]", soft_wrap=True)
    write_view(open_trained(str(config.out)), files[0], folder / "view", title=config.model.name, console=console)
    console.rule("6. Write the report")
    report = write_report(config.out, beside=[twin.out])
    console.print(f"[bold]{escape(str(report))}[/]", soft_wrap=True)
    console.print("Open it in a browser to see curves, the confusion matrix and mistakes.")
    console.print("To train on your own images, with a folder for each class: [bold]lambdanets train FOLDER[/]")
    return 0


def unused(folder: Path) -> Path:
    """Return the folder, or the first of folder-2, folder-3, ... that does not exist."""
    number, free = 2, folder
    while free.exists():
        free = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return free


def compare(folders: dict[str, Path], images: Images, console: Console) -> dict[str, Evaluation]:
    """Print accuracy, size and speed of both networks."""
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
        f"This is one training run of each network, evaluated on {examples:,} images: the difference has a standard "
        f"error of {100 * error:.1f} points from the choice of images, and the random seed adds to it. "
        "It cannot show which network is better."
    )
    return found


def write_images(source: Source, folder: Path, number: int = PREDICTED) -> list[Path]:
    """Write some of the digits as files that are named after their class; return their paths."""
    folder.mkdir(parents=True)
    written = []
    for i in range(number):
        index = i * len(source) // number + 7 * i  # spread over all images
        pixels = source.read(index % len(source))
        assert not isinstance(pixels, bytes)
        label = source.class_names[int(source.labels[index % len(source)])]
        written.append(folder / f"{i + 1}-this-is-a-{label}.png")
        Image.fromarray(pixels).save(written[-1])
    return written


def look(run: Path, images: Path, console: Console) -> None:
    """Print the most probable classes of the images in a folder."""
    console.print(f"[bold]lambdanets predict {escape(str(run))} {escape(str(images))}[/]", soft_wrap=True)
    table = answer_table(3)
    for one in predict(open_trained(str(run)), gather([str(images)]), top=3):
        table.add_row(*row(one))
    console.print(table)
