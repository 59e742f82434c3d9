"""What people see while a run goes on: a bar with speed, loss and accuracy, and a line for what matters."""

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Record = dict[str, Any]


class Watcher:
    """A `watch` for `fit`. Without a terminal every record of a step is a line."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("steps", total=1, numbers="")
        self.steps, self.epochs = 1, 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def __call__(self, record: Record) -> None:
        show = getattr(self, record["event"], None)
        if show is not None:
            show(record)

    def say(self, text: str) -> None:
        self.bar.console.print(text, soft_wrap=True)

    # One method for each event of the log

    def start(self, record: Record) -> None:
        self.steps = record["steps"]
        self.bar.update(self.task, total=self.steps)
        config = record["config"]
        model = config.get("model", {})
        name = model.get("name") or model.get("kind", "a network")
        parts, micro = record["accumulation"], record["micro_batch"]
        cut = f", {parts} micro-batches of {micro} in each of {record['processes']} processes"
        examples = f"{record['examples']:,} {record.get('unit', 'images')}"
        self.say(
            f"{escape(name)}: {record['parameters']:,} parameters, {examples}, "
            f"{self.steps:,} steps of {config['batch_size']}{cut if parts * record['processes'] > 1 else ''}, "
            f"learning rate up to {record['peak_rate']:.4g}"
        )
        if record["note"]:
            self.say(escape(record["note"]))

    def resumed(self, record: Record) -> None:
        self.steps = record["steps"]
        self.bar.update(self.task, total=self.steps, completed=record["step"])
        note = f" ({record['note']})" if record["note"] else ""
        self.say(escape(f"resumed at step {record['step']} of {self.steps}{note}"))

    def tick(self, record: Record) -> None:
        self.bar.update(self.task, completed=record["step"])

    def step(self, record: Record) -> None:
        speed = record["examples_per_second"]
        numbers = f"{speed:{',.0f' if speed >= 10 else '.2g'}} ex/s  loss {record['loss']:.3f}"
        if "top1" in record:
            numbers += f"  top-1 {record['top1']:.1%}"
        if record["data_wait"] > 0.2:
            numbers += f"  waits for data {record['data_wait']:.0%}"
        self.bar.update(self.task, completed=record["step"], numbers=numbers)
        if not self.console.is_terminal:
            self.say(
                f"step {record['step']}/{self.steps}  epoch {record['epoch']:.2f}  {numbers}  lr {record['lr']:.4g}"
            )

    def evaluation(self, record: Record) -> None:
        skipped = ("event", "time", "step", "epoch", "weights", "split", "examples")
        numbers = {name: value for name, value in record.items() if name not in skipped}
        shown = "  ".join(
            f"{name} {value:.1%}" if name.startswith("top") else f"{name} {value:.4g}"
            for name, value in numbers.items()
        )
        self.say(f"epoch {record['epoch']:.4g}  {escape(record['split'])} ({record['weights']}): {shown}")

    def skipped_step(self, record: Record) -> None:
        self.say(f"[yellow]step {record['step']} was undone: {escape(record['reason'])}[/]")

    def broken_image(self, record: Record) -> None:
        self.say(f"[yellow]replaced {escape(record['name'])}: {escape(record['reason'])}[/]")

    def checkpoint_failed(self, record: Record) -> None:
        self.say(
            f"[red]no checkpoint at step {record['step']}, the last good one is kept: {escape(record['reason'])}[/]"
        )

    def warning(self, record: Record) -> None:
        self.say(f"[red]{escape(record['reason'])}[/]")
