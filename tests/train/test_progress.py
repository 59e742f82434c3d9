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
