"""Checkpoints of a run, which `lambdanets train resume` loads. Their names hold a digest."""

import hashlib
import io
import shutil
import zipfile
from collections import OrderedDict
from typing import Any

import torch

from tests.fuzz import damage
from tests.fuzz.case import FuzzCase, silent
from tests.fuzz.made import finished_run

FOREIGN: tuple[Any, ...] = (
    *(None, 1, "x", [], {}, [1, 2], torch.zeros(3), {"step": 1}, {"engine": {}}, OrderedDict(a=torch.ones(2))),
    {"state_dict": {"w": torch.zeros(2)}},
)


def run(case: FuzzCase) -> bool:
    from lambdanets.train.checkpoint import load_newest
    from lambdanets.train.command import Resume, Train

    draw = case.random
    shutil.copytree(finished_run(), case.folder, dirs_exist_ok=True)
    folder = case.folder / "checkpoints"
    (newest,) = folder.glob("step-*.pt")
    good = newest.read_bytes()
    older = folder / f"step-000000001-{newest.stem[-16:]}.pt"
    two = draw.random() < 0.3
    if two:
        older.write_bytes(good)
    said, foreign = "nothing", False
    if case.number >= 2:
        foreign = draw.random() < 0.5
        if foreign:
            newest.unlink()
            said, data = another(draw, good)
            newest = folder / f"step-000000002-{hashlib.sha256(data).hexdigest()[:16]}.pt"
        else:
            said, data = damage.damaged(draw, good)
        newest.write_bytes(data)
    case.note(f"{said}{' and an older one' if two else ''}")

    names = ("step-", "checkpoint", str(case.folder))
    if not foreign:
        loaded = case.attempt(load_newest, folder, names=names)
        if said != "nothing" and loaded is not None and loaded.path.name == newest.name:
            raise silent("of a checkpoint that does not fit its name")
        if said != "nothing" and two and (loaded is None or newest.name not in str(loaded.damaged)):
            raise silent("the damaged checkpoint is not spoken of")
        if loaded is None and (two or said == "nothing"):
            raise silent("the whole checkpoint is refused")
        if case.number % 10:
            return loaded is not None
    found = case.command(Train(recipe=Resume(case.folder), report=False), names=names)
    if said == "nothing" and found.refused:
        raise silent(f"refused although it is whole: {found.err}")
    return not found.refused


def another(draw, good: bytes) -> tuple[str, bytes]:
    """Return a complete file with other contents."""
    kind = draw.randrange(4)
    if kind == 0:
        content = draw.choice(FOREIGN)
        return f"holds {str(content)[:40]}", saved(content)
    if kind == 1:
        text = draw.choice((b"", b"x", b"\x80\x04N.", draw.randbytes(500)))
        return f"is {text[:20]!r}", text
    state = torch.load(io.BytesIO(good), weights_only=True)
    if kind == 2:
        where = draw.choice([path for path in places(state) if path])
        parent = damage.at(state, where[:-1])
        value = draw.choice((None, -1, 10**30, "x", [], {}, torch.zeros(3), float("nan")))
        if draw.random() < 0.3:
            del parent[where[-1]]
            return f"{damage.dotted(where)} deleted", saved(state)
        parent[where[-1]] = value
        return f"{damage.dotted(where)} is {str(value)[:20]}", saved(state)
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as before, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as after:
        names = before.namelist()
        target = draw.choice(names)
        for name in names:
            content = before.read(name)
            if name == target and content:
                _, content = damage.damaged(draw, content)
            after.writestr(name, content)
    return f"{target} is damaged", file.getvalue()


def places(state: Any, before: tuple = ()) -> list[tuple]:
    """Return the places of all values in dictionaries and lists."""
    found = [before]
    if isinstance(state, dict | list):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            found += places(value, (*before, key))
    return found


def saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
