"""The log as it is after interruptions."""

import json
from pathlib import Path

import pytest

from lambdanets.report.log import from_records, number, read_log


def step(step: int, loss: float = 1.0, time: float = 0.0) -> dict:
    return {"event": "step", "step": step, "loss": loss, "time": time}


def test_steps_that_ran_again_count_once():
    log = from_records(
        [
            step(10, 3.0),
            step(20, 2.5),
            {"event": "evaluation", "step": 20, "weights": "ema", "top1": 0.1},
            {"event": "skipped_step", "step": 25},
            {"event": "broken_image", "name": "a.jpg", "reason": "truncated"},
            step(30, 9.0),
            {"event": "resumed", "step": 20},
            step(30, 2.0),
        ]
    )
    assert log.curve("loss") == [(10, 3.0), (20, 2.5), (30, 2.0)]
    assert len(log.evaluations) == len(log.broken) == len(log.resumed) == 1
    assert not log.skipped  # it lies beyond the checkpoint and was undone with it


def test_time_goes_on_from_the_checkpoint():
    records = [step(10, time=50), step(20, time=100), {"event": "resumed", "step": 10, "time": 55}, step(20, time=90)]
    assert from_records(records).seconds == 90


def test_torn_lines_are_left_out_and_counted(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(
        json.dumps(step(1)).encode() + b'\n{"event": "st\n[1]\n\xff\xfe\n\n' + json.dumps(step(2)).encode()
    )
    log = read_log(path)
    assert [record["step"] for record in log.steps] == [1, 2]
    assert log.unreadable == 3


@pytest.mark.parametrize("value", ["[" * 100_000 + "]" * 100_000, "1" + "0" * 400, "NaN", "1e400"])
def test_lines_that_are_not_json_are_counted(tmp_path: Path, value: str):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(step(1)) + f'\n{{"event": "step", "step": 2, "loss": {value}}}\n')
    log = read_log(path)
    assert (len(log.steps), log.unreadable) == (1, 1)


def test_curves_hold_finite_numbers_only():
    values = [1.0, float("nan"), float("inf"), None, "2", True, 3]
    log = from_records([step(i, value) for i, value in enumerate(values)])  # type: ignore[arg-type]
    assert log.curve("loss") == [(0, 1.0), (6, 3.0)]
    assert number("1") is None


def test_a_folder_without_a_log_is_no_run(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no log\.jsonl: is it the folder of a run"):
        read_log(tmp_path / "log.jsonl")
