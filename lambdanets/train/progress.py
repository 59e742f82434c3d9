"""Progress of a run in the terminal: a bar with throughput, loss and accuracy, and lines for events of the log."""

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lambdanets.report.show import rounded

Record = dict[str, Any]
FEW_CLASSES = 5  # top-5 accuracy is always 100% for five classes or fewer
SILENCE = 10.0  # without a bar: print a line after this many seconds
LEAST = 3  # steps that an estimate needs
MARK, MARKS = 1.0, 60  # seconds between two measurements of the pace; number of measurements to keep


class Pace:
    """Estimates the remaining time from the steps and evaluations of about the last minute."""

    def __init__(self) -> None:
        self.marks: deque[tuple[float, int]] = deque(maxlen=MARKS)
        self.last = (0.0, 0)

    def note(self, now: float, step: int) -> None:
        """Record a completed step. The first step is not timed, because it includes the startup."""
        self.last = (now, step)
        if not self.marks or now - self.marks[-1][0] >= MARK:
            self.marks.append(self.last)

    def left(self, steps: int) -> float | None:
        """Return the seconds until `steps` steps are done; None before there is an estimate."""
        if not self.marks or self.last[1] < self.marks[0][1] + LEAST:
            return None
        (began, first), (now, step) = self.marks[0], self.last
        return (now - began) / (step - first) * (steps - step)


class Watcher:
    """Shows the progress of a run; pass it to `fit` as `watch`. Without a terminal it prints lines instead of a bar."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console or Console(highlight=False)
        self.clock, self.said, self.pace = clock, clock(), Pace()
        self.evaluating_took: float | None = None
        self.paused = 0.0
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
        self.steps, self.epochs, self.few_classes = 1, 0.0, False

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
        self.said = self.clock()
        self.bar.console.print(text, soft_wrap=True)

    @property
    def left(self) -> str:
        """The remaining time as a suffix of a line."""
        seconds = self.pace.left(self.steps)
        return "" if not seconds else f"  {rounded(seconds)} left"

    # One method for each event of the log

    def start(self, record: Record) -> None:
        self.steps = record["steps"]
        self.few_classes = record.get("classes", FEW_CLASSES + 1) <= FEW_CLASSES
        self.bar.update(self.task, total=self.steps)
        config = record["config"]
        model = config.get("model", {})
        name = model.get("name") or model.get("kind", "a network")
        parts, micro = record["accumulation"], record["micro_batch"]
        cut = f" (processes: {record['processes']}, micro-batches per process: {parts} of {micro})"
        examples = f"{record['examples']:,} {record.get('unit', 'images')}"
        self.say(
            f"{escape(name)}: {record['parameters']:,} parameters, {examples}, "
            f"{self.steps:,} steps with batch size {config['batch_size']}"
            f"{cut if parts * record['processes'] > 1 else ''}, peak learning rate {record['peak_rate']:.4g}"
        )
        if record["note"]:
            self.say(escape(record["note"]))

    def resumed(self, record: Record) -> None:
        self.steps = record["steps"]
        self.bar.update(self.task, total=self.steps, completed=record["step"])
        note = f" ({record['note']})" if record["note"] else ""
        self.say(escape(f"resumed at step {record['step']} of {self.steps}{note}"))

    def tick(self, record: Record) -> None:
        first = not self.pace.marks
        self.pace.note(self.clock(), record["step"])
        self.bar.update(self.task, description="steps", completed=record["step"])
        if not self.console.is_terminal and (first or self.clock() - self.said >= SILENCE):
            self.say(f"step {record['step']}/{self.steps}{self.left}")

    def step(self, record: Record) -> None:
        speed = record["examples_per_second"]
        numbers = f"{speed:{',.0f' if speed >= 10 else '.2g'}} examples/s  loss {record['loss']:.3f}"
        if "top1" in record:
            numbers += f"  top-1 {record['top1']:.1%}"
        if record["data_wait"] > 0.2:
            numbers += f"  waiting for data {record['data_wait']:.0%}"
        self.bar.update(self.task, completed=record["step"], numbers=numbers)
        if not self.console.is_terminal:
            self.say(
                f"step {record['step']}/{self.steps}  epoch {record['epoch']:.2f}  {numbers}  lr {record['lr']:.4g}"
                f"{self.left}"
            )

    def evaluating(self, record: Record) -> None:
        self.bar.update(self.task, description="evaluating")
        long = self.evaluating_took is None or self.evaluating_took >= SILENCE
        if not self.console.is_terminal and long:
            self.say(f"evaluating at step {record['step']}")
        self.paused = self.clock()

    def evaluation(self, record: Record) -> None:
        self.evaluating_took, self.paused = self.clock() - self.paused, self.clock()
        skipped = ("event", "time", "step", "epoch", "weights", "split", "examples", "smoothed_loss")
        skipped += ("top5",) if self.few_classes else ()
        numbers = {name: value for name, value in record.items() if name not in skipped}
        shown = "  ".join(
            f"{name.replace('top', 'top-')} {value:.1%}" if name.startswith("top") else f"{name} {value:.4g}"
            for name, value in numbers.items()
        )
        self.say(f"epoch {record['epoch']:.4g}  {escape(record['split'])} ({record['weights']}): {shown}")

    def skipped_step(self, record: Record) -> None:
        self.say(f"[yellow]skipped step {record['step']}: {escape(record['reason'])}[/]")

    def broken_image(self, record: Record) -> None:
        self.say(f"[yellow]replaced unreadable image {escape(record['name'])}: {escape(record['reason'])}[/]")

    def image_size(self, record: Record) -> None:
        self.say(f"epoch {record['epoch']}: training at {record['size']} pixels")

    def checkpoint_failed(self, record: Record) -> None:
        self.say(
            f"[red]could not write a checkpoint at step {record['step']}, the previous one is kept: "
            f"{escape(record['reason'])}[/]"
        )

    def warning(self, record: Record) -> None:
        self.say(f"[red]{escape(record['reason'])}[/]")
