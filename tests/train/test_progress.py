"""What people see of a run."""

from io import StringIO

import pytest
from rich.console import Console

from lambdanets.report.show import rounded
from lambdanets.train.loop import fit
from lambdanets.train.progress import Pace, Watcher
from tests.train.tasks import Numbers, config


def test_the_bar_moves_with_every_step_and_the_log_does_not(tmp_path):
    """A CPU may take minutes for the steps between two lines of the log."""
    watcher = Watcher(Console(file=StringIO(), force_terminal=True))
    seen, written = [], []

    def watch(record):
        watcher(record)
        if record["event"] != "evaluating":
            (seen if record["event"] == "tick" else written).append((record["step"], watcher.bar.tasks[0].completed))

    fit(Numbers(), config(tmp_path, log_every=12), watch=lambda record: watch({"step": 0, **record}))
    assert seen == [(step, step) for step in range(1, 25)]
    assert [step for step, _ in written if step]
    text = (tmp_path / "log.jsonl").read_text()
    assert text.count("\n") == len(written)
    assert "tick" not in text
    assert "evaluating" not in text


def test_slow_steps_have_a_speed():
    console = Console(file=StringIO(), width=200)
    watcher = Watcher(console)
    for speed in (0.0123, 3.456, 1234.5):
        watcher.step({"step": 1, "epoch": 0.1, "lr": 0.1, "loss": 1.0, "examples_per_second": speed, "data_wait": 0.0})
    lines = console.file.getvalue().splitlines()
    assert [line.split("  ")[2] for line in lines] == ["0.012 examples/s", "3.5 examples/s", "1,234 examples/s"]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_file_gets_the_first_step_and_then_a_line_after_ten_seconds():
    clock, console = Clock(), Console(file=StringIO(), width=200)
    watcher = Watcher(console, clock)
    watcher.steps = 100
    for step in range(1, 31):
        clock.now = 20.0 + 2.0 * step  # the first step waits for much else
        watcher({"event": "tick", "step": step})
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == ["step 1/100", "step 6/100  3 min 10 s left"]  # 94 steps of 2 s
    assert lines[-1] == "step 26/100  2 min 30 s left"
    assert len(lines) == 6


def test_a_line_of_the_log_says_how_long_the_rest_takes():
    clock, console = Clock(), Console(file=StringIO(), width=200)
    watcher = Watcher(console, clock)
    watcher.steps = 10
    for step in (1, 2, 3, 4):
        clock.now += 3.0
        watcher({"event": "tick", "step": step})
        assert watcher.left == ("" if step < 4 else "  18 s left")  # a step or two say little
    record = {"event": "step", "step": 4, "epoch": 0.1, "lr": 0.1, "loss": 1.0, "data_wait": 0.0}
    watcher(record | {"examples_per_second": 9.0})
    assert console.file.getvalue().splitlines()[-1].endswith("lr 0.1  18 s left")


def test_the_pace_follows_a_machine_that_becomes_slower():
    pace, now = Pace(), 0.0
    for step in range(1, 401):
        now += 1.0 if step < 200 else 3.0
        pace.note(now, step)
    assert pace.left(500) == pytest.approx(300.0)
    assert Pace().left(500) is None


def test_an_evaluation_is_announced_where_it_may_take_long():
    """The first one, as nobody knows yet, and those that took more than ten seconds the last time."""
    clock, console = Clock(), Console(file=StringIO(), width=200)
    watcher = Watcher(console, clock)
    for step, seconds in ((10, 2.0), (20, 30.0), (30, 1.0), (40, 1.0)):
        watcher({"event": "evaluating", "step": step})
        clock.now += seconds
        watcher({"event": "evaluation", "step": step, "epoch": 1.0, "split": "held_out", "weights": "ema", "top1": 0.5})
    lines = [line for line in console.file.getvalue().splitlines() if "evaluating" in line]
    assert lines == ["evaluating at step 10", "evaluating at step 30"]


@pytest.mark.parametrize(("classes", "shown"), [(5, False), (6, True)])
def test_top_5_is_shown_where_it_says_something(classes, shown):
    console = Console(file=StringIO(), width=200)
    watcher = Watcher(console)
    start = {"event": "start", "steps": 9, "config": {"batch_size": 8}, "accumulation": 1, "micro_batch": 8}
    watcher({**start, "processes": 1, "examples": 8, "parameters": 5, "peak_rate": 0.1, "note": "", "classes": classes})
    scores = {"top1": 0.5, "top5": 0.9}
    watcher({"event": "evaluation", "step": 9, "epoch": 1.0, "split": "held_out", "weights": "ema", **scores})
    line = console.file.getvalue().splitlines()[-1]
    assert "top-1 50.0%" in line
    assert ("top-5" in line) is shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (42.4, "42 s"), (128.0, "2 min 10 s"), (1300.0, "22 min"), (7300.0, "2 h 2 min")],
)
def test_estimates_are_rounded(seconds, text):
    assert rounded(seconds) == text
