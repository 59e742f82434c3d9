"""The log of a run, which `lambdanets report` shows."""

import io
import json
import re
import shutil

from tests.fuzz import damage
from tests.fuzz.case import FuzzCase, silent
from tests.fuzz.made import finished_run

FILES = ("config.json", "predictions.safetensors", "start.safetensors", "weights.safetensors")


def run(case: FuzzCase) -> bool:
    from lambdanets.report.command import Report
    from lambdanets.report.log import read_log

    draw = case.random
    for name in (*FILES, "log.jsonl"):
        shutil.copy(finished_run() / name, case.folder / name)
    path = case.folder / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    said, data, other = "nothing", b"".join(lines), None
    if case.number >= 2:
        kind = draw.randrange(6)
        if kind == 0:
            said, data = damage.damaged(draw, data)
        elif kind == 1:  # a line that a crash cut off
            at = draw.randrange(len(lines))
            keep = draw.randrange(len(lines[at]))
            lines[at] = lines[at][:keep] + (b"\n" if draw.random() < 0.5 else b"")
            said, data = f"line {at} ends after {keep} bytes", b"".join(lines)
        elif kind == 2:
            lines.insert(draw.randrange(len(lines) + 1), draw.choice(LINES))
            said, data = "another line", b"".join(lines)
        elif kind == 5:  # another file of the run
            other = draw.choice(FILES)
            if draw.random() < 0.4:
                other = "predictions.safetensors"
            said, content = damage.damaged(draw, (case.folder / other).read_bytes())
            (case.folder / other).write_bytes(content)
        else:
            at = draw.randrange(len(lines))
            said, where, record = damage.spoilt(draw, json.loads(lines[at]))
            lines[at] = damage.as_bytes(record) + b"\n"
            said, data = f"{damage.dotted(where)} of line {at} {said}", b"".join(lines)
    case.note(f"{other or 'log.jsonl'}: {said}")
    path.write_bytes(data)

    log = case.attempt(read_log, path, names=("log.jsonl",))
    text = io.StringIO(data.decode("utf-8", "replace"), newline=None)
    damaged = sum(not is_record(line) for line in text if line.strip())
    if log is not None and log.unreadable != damaged:
        raise silent(f"{damaged} lines cannot be read, and {log.unreadable} are counted")
    if case.number % 3 and other is None:
        return log is not None  # drawing takes a third of a second
    found = case.command(Report(case.folder, pictures=2), names=("log.jsonl", other or "log.jsonl", str(case.folder)))
    if found.refused:
        if said == "nothing" or other is not None:
            raise silent(f"the page is refused: {found.err}")
        return False
    page = (case.folder / "report.html").read_text(encoding="utf-8")
    told = re.search(r"([\d,]+) lines? of the log could not be read", page)
    if (int(told[1].replace(",", "")) if told else 0) != damaged:
        raise silent(f"{damaged} lines of the log cannot be read, and the page says {told and told[0]}")
    if re.search(r"\bnan\b|\binf\b", re.sub(r"<[^>]*>", "", page)):
        raise silent("nan or inf on the page")
    return True


LINES = (
    *(b"\n", b"\0\n", b"{}\n", b"null\n", b'{"event": 1}\n', b'"event"\n', b"[" * 100_000 + b"\n", b"\xff\xfe\n"),
    *(b'{"event": "step"}\n', b'{"event": "evaluation", "step": 1}\n', b'{"event": "resumed", "step": 1e400}\n'),
    *(b'{"event": "step", "step": 1' + b"0" * 400 + b"}\n", b'{"event": "step", "step": 1, "loss": 1e308}\n'),
    *(b'{"event": "step", "step": -1e308, "loss": -1e308}\n', b'{"event": "<script>"}\n', b'{"event":"end"}\n'),
    *(b'{"event": "start", "time": []}\n', b'{"event": "broken_image"}\n', b'{"event": "checkpoint", "path": {}}\n'),
    *(b'{"event": "step", "step": 1, "loss": NaN, "lr": Infinity}\n', b'{"event": "step", "step": "1", "loss": "2"}\n'),
)


def is_record(line: str) -> bool:
    """Return whether a line is a valid JSON object with an event."""

    def refuse(text: str) -> float:
        raise ValueError(text)

    def integer(text: str) -> int:
        if not -(2**63) <= int(text) < 2**63:
            raise ValueError(text)
        return int(text)

    def number(text: str) -> float:
        return refuse(text) if float(text) in (float("inf"), float("-inf")) else float(text)

    try:
        record = json.loads(line, parse_constant=refuse, parse_int=integer, parse_float=number)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and isinstance(record.get("event"), str)
