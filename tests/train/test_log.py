"""The log of a run, on a disk that is full: nothing stops, and what is there can be read."""

import resource
import sys
import threading
from io import StringIO
from types import ModuleType

import pytest
from rich.console import Console

from lambdanets.files import read_object
from lambdanets.report.log import read_log
from lambdanets.train.log import RunLog
from lambdanets.train.loop import fit
from lambdanets.train.progress import Watcher
from tests.support.file_size import limit, unlimited_afterwards
from tests.train.tasks import Numbers, StopAt, config, final, records, same


def test_a_log_that_fails_loses_records_and_says_so_once(tmp_path):
    said = []
    path = tmp_path / "log.jsonl"
    with RunLog(tmp_path, warn=said.append) as log:
        log.write("start", steps=3)
        with unlimited_afterwards():
            limit(path.stat().st_size + 10)
            log.write("checkpoint", step=1)
            torn = read_log(path)  # as it is in the middle of a run
            log.write("checkpoint", step=2)
        log.write("checkpoint", step=3)
        log.write("end", step=3)
    assert (torn.start["steps"], torn.unreadable, torn.checkpoints) == (3, 1, ())
    found = read_log(path)
    assert [record["step"] for record in found.checkpoints] == [3]
    assert found.end["step"] == 3
    assert found.unreadable == 1
    assert len(said) == 1
    assert str(path) in said[0]


def test_a_line_that_a_crash_has_torn_is_ended(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"event": "start"}\n{"event": "st')
    with RunLog(tmp_path) as log:
        log.write("end", step=1)
    assert (tmp_path / "log.jsonl").read_text().splitlines()[1] == '{"event": "st'
    found = read_log(tmp_path / "log.jsonl")
    assert (found.unreadable, found.end["step"]) == (1, 1)


def test_tensorboards_file_that_fails_is_named(tmp_path, monkeypatch):
    """Once, in a sentence: the traceback of its thread is not printed too."""
    pytest.importorskip("tensorboard")
    printed, said = [], []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    log = RunLog(tmp_path, warn=said.append)
    log.write("step", step=1, loss=2.0)
    log.board.flush()
    (events,) = (tmp_path / "tensorboard").iterdir()
    with unlimited_afterwards():
        limit(events.stat().st_size)
        log.write("step", step=2, loss=2.0)  # another thread writes: it fails here, or at the end
        log.close()
    assert len([sentence for sentence in said if str(tmp_path / "tensorboard") in sentence]) == 1
    assert not printed


def test_errors_of_other_threads_are_still_printed(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    hook = threading.excepthook
    with RunLog(tmp_path):
        thread = threading.Thread(target=lambda: open(tmp_path / "missing"))  # noqa: SIM115
        thread.start()
        thread.join()
    assert [one.exc_type for one in found] == [FileNotFoundError]
    assert threading.excepthook is hook


def test_tensorboard_keeps_the_step_that_a_run_resumed_at_and_nothing_beyond(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, end in ((0, 12), (10, 14)):
        with RunLog(tmp_path, step=begin) as log:
            for step in range(begin + 1, end + 1):
                log.write("step", step=step, loss=float(begin))
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("step/loss")] == [
        *((step, 0.0) for step in range(1, 11)),
        *((step, 10.0) for step in range(11, 15)),
    ]


def test_a_run_goes_on_when_the_disk_is_full_and_ends_with_the_same_weights(tmp_path):
    """From step 10 on no file grows; at step 20 there is room again."""
    whole, full = tmp_path / "whole", tmp_path / "full"
    fit(Numbers(), config(whole))
    console = Console(file=StringIO(), width=400)
    with unlimited_afterwards(), Watcher(console) as watcher:
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[0]

        def watch(record):
            watcher(record)
            if record["event"] == "step" and record["step"] in (10, 20):
                limit((full / "log.jsonl").stat().st_size + 10 if record["step"] == 10 else unlimited)

        assert fit(Numbers(), config(full, checkpoint_minutes=0.0), watch=watch).finished
    assert same(final(whole), final(full))
    log = read_log(full / "log.jsonl")
    assert [record["step"] for record in log.steps] == [5, 10, 24]
    assert log.end["reason"] == "finished"
    text = console.file.getvalue()
    assert text.count(f"cannot write {full / 'log.jsonl'}") == 1
    assert "could not write a checkpoint at step 11" in text


class Library(ModuleType):
    """In place of wandb or trackio."""

    def __init__(self, name, fails_at=None):
        super().__init__(name)
        self.calls, self.fails_at = [], fails_at

    def init(self, **options):
        self.calls.append(("init", options))

    def log(self, values, step):
        if step == self.fails_at:
            raise ConnectionError("no network")
        self.calls.append((step, values))

    def finish(self):
        self.calls.append(("finish", {}))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_curves_of_a_run_go_to_other_libraries(tmp_path, monkeypatch, name):
    library = Library(name)
    monkeypatch.setitem(sys.modules, name, library)
    fit(Numbers(), config(tmp_path, logger=name), watch=StopAt(10))
    fit(Numbers(), config(tmp_path, logger=name), resume=True)
    assert not (tmp_path / "tensorboard").exists()
    begun = [options for kind, options in library.calls if kind == "init"]
    assert len(begun) == [kind for kind, _ in library.calls].count("finish") == 2
    assert all((one["project"], one["name"], one["resume"]) == ("lambdanets", tmp_path.name, "allow") for one in begun)
    assert begun[0]["config"]["batch_size"] == 16
    assert [one.get("id") for one in begun] == [
        read_object(tmp_path / "run.json")["id"] if name == "wandb" else None
    ] * 2
    losses = {step: values["step/loss"] for step, values in library.calls if "step/loss" in values}
    assert losses == {record["step"]: record["loss"] for record in records(tmp_path, "step")}
    assert any("held_out_ema/top1" in values for _, values in library.calls)


def test_a_library_that_fails_stops_nothing(tmp_path, monkeypatch):
    said, library = [], Library("trackio", fails_at=10)
    monkeypatch.setitem(sys.modules, "trackio", library)
    fit(Numbers(), config(tmp_path, logger="trackio"), watch=said.append)
    assert ["no network" in one["reason"] for one in said if one["event"] == "warning"] == [True]
    assert records(tmp_path, "end")[0]["reason"] == "finished"
    assert max(step for step, _ in library.calls if step != "init") == 6


def test_a_library_that_is_missing_is_named_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="logger wandb is not installed: pip install wandb"):
        fit(Numbers(), config(tmp_path / "run", logger="wandb"))
    assert not (tmp_path / "run" / "log.jsonl").exists()
    fit(Numbers(), config(tmp_path / "none", logger="none"))
    assert not (tmp_path / "none" / "tensorboard").exists()
