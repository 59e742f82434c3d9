"""What people see of a run."""

from io import StringIO

from rich.console import Console

from lambdanets.train.loop import fit
from lambdanets.train.progress import Watcher
from tests.train.tasks import Numbers, config


def test_the_bar_moves_with_every_step_and_the_log_does_not(tmp_path):
    """A CPU may take minutes for the steps between two lines of the log."""
    watcher = Watcher(Console(file=StringIO(), force_terminal=True))
    seen, written = [], []

    def watch(record):
        watcher(record)
        (seen if record["event"] == "tick" else written).append((record["step"], watcher.bar.tasks[0].completed))

    fit(Numbers(), config(tmp_path, log_every=12), watch=lambda record: watch({"step": 0, **record}))
    assert seen == [(step, step) for step in range(1, 25)]
    assert [step for step, _ in written if step]
    text = (tmp_path / "log.jsonl").read_text()
    assert text.count("\n") == len(written)
    assert "tick" not in text


def test_slow_steps_have_a_speed():
    console = Console(file=StringIO(), width=200)
    watcher = Watcher(console)
    for speed in (0.0123, 3.456, 1234.5):
        watcher.step({"step": 1, "epoch": 0.1, "lr": 0.1, "loss": 1.0, "examples_per_second": speed, "data_wait": 0.0})
    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[2] for line in lines] == ["0.012 ex/s", "3.5 ex/s", "1,234 ex/s"]
