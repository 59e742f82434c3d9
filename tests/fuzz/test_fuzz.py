"""Damaged files of every format that the library reads: no traceback, no silent acceptance, no long wait.

`python -m tests.fuzz FORMAT NUMBER` runs one case again.
"""

import signal
import sys
import types
from pathlib import Path

import pytest

from tests.fuzz import pool
from tests.fuzz.case import FuzzCase, silent
from tests.fuzz.formats import COUNTS, SMOKE, summary
from tests.fuzz.pool import Result, run_all, run_case


def judged(results: list[Result], cases: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = summary(results)
    with capsys.disabled():
        print(f"\n{text}")
    assert len(results) == cases
    assert not [one for one in results if one.verdict == "failed"], text
    assert max(one.seconds for one in results) < pool.SECONDS


@pytest.mark.slow
def test_no_damage_escapes_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    jobs = [(name, number) for name, count in COUNTS.items() for number in range(count)]
    assert len(jobs) >= 3000
    judged(run_all(jobs, tmp_path), len(jobs), capsys)


@pytest.mark.parametrize("format", SMOKE)
def test_some_damage(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LAMBDANETS_CACHE", str(tmp_path / "cache"))
    results = [run_case(format, number) for number in range(SMOKE[format])]
    assert not [one for one in results if one.verdict == "failed"], summary(results)


# The harness itself ---------------------------------------------------------------------------------------------------


def made_up(monkeypatch: pytest.MonkeyPatch, run) -> None:
    module = types.ModuleType("tests.fuzz.made_up")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests.fuzz.made_up", module)


def raised(error: BaseException):
    raise error


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda case: raised(silent("x")), "silent acceptance: x"),
        (lambda case: case.attempt(lambda: {}["key"], names=("",)), "traceback: KeyError: 'key'"),
        (lambda case: case.attempt(lambda: raised(MemoryError()), names=("",)), "traceback: MemoryError"),
        (lambda case: case.attempt(lambda: raised(ValueError("no")), names=("a.csv",)), "names none of a.csv: 'no'"),
        (lambda case: case.attempt(lambda: raised(SystemExit(3)), names=("",)), "would have ended with 3"),
        (lambda case: [None for _ in iter(int, 1)], "takes longer than 0.2 s"),
    ],
)
def test_a_defect_is_a_failure(monkeypatch: pytest.MonkeyPatch, run, words: str):
    made_up(monkeypatch, run)
    result = run_case("made_up", 1, seconds=0.2)
    assert result.verdict == "failed"
    assert words in result.text


@pytest.mark.parametrize(("run", "verdict"), [(lambda case: True, "accepted"), (lambda case: False, "refused")])
def test_a_case_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, run, verdict: str):
    folders = []

    def writing(case: FuzzCase) -> bool:
        folders.append(case.folder)
        (case.folder / "x").write_text("x")
        return run(case)

    made_up(monkeypatch, writing)
    before = signal.getsignal(signal.SIGALRM)
    assert run_case("made_up", 1).verdict == verdict
    assert not folders[0].exists()
    assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.slow
def test_workers_that_crash_or_hang_fail_their_case_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The cases are those of `tests/fuzz/crashes.py`."""
    monkeypatch.setattr(pool, "SECONDS", 1)
    monkeypatch.setattr(pool, "GRACE", 1)
    results = run_all([("crashes", number) for number in range(7)], tmp_path, workers=1)
    found = {one.number: one for one in results}
    assert [found[i].verdict for i in range(7)] == ["accepted", "failed", "accepted", *["failed"] * 3, "accepted"]
    assert "the process ended with -11" in found[1].text
    assert "was killed after 2 s" in found[3].text
    assert "traceback: MemoryError" in found[4].text
    assert "a connection to" in found[5].text
    assert summary(results).count("FAILED crashes") == 4
