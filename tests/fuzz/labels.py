"""The files of `lambdanets pseudo label`: manifest, label files and selection, which have digests."""

import json
import shutil
from functools import cache

import numpy as np

from tests.fuzz import damage
from tests.fuzz.case import FuzzCase, silent
from tests.fuzz.made import labels_folder

CLASSES = ("ant", "bee", "cat")


def run(case: FuzzCase) -> bool:
    from lambdanets.pseudo.command import PseudoSelect
    from lambdanets.pseudo.select import Selection
    from lambdanets.pseudo.source import PseudoSource

    draw = case.random
    shutil.copytree(labels_folder(), case.folder, dirs_exist_ok=True)
    files = sorted(
        str(p.relative_to(case.folder)) for p in case.folder.rglob("*") if p.suffix in (".json", ".safetensors")
    )
    name = draw.choice(files)
    if draw.random() < 0.4:
        name = draw.choice([file for file in files if file.startswith("labels/")])
    path = case.folder / name
    good = path.read_bytes()
    said = "nothing"
    if case.number >= 3:
        if name.endswith(".json") and draw.random() < 0.7:
            said, where, changed = damage.spoilt(draw, json.loads(good))
            said, data = f"{damage.dotted(where)} {said}", damage.as_bytes(changed)
        elif name.startswith("labels/") and draw.random() < 0.4:
            said, data = values(draw, good)
        elif name.endswith(".safetensors") and draw.random() < 0.1:
            said, data = "gone", b""
            path.unlink()
        else:
            said, data = damage.damaged(draw, good)
        if said != "gone":
            path.write_bytes(data)
    case.note(f"{name}: {said}")

    names = (path.name, str(case.folder), "labels.json", "selection.json")
    again = name not in ("selection.json",) and not name.startswith("selected/")
    if again:
        found = case.command(PseudoSelect(case.folder, Selection(threshold=0.1), json=True), names=names)
        if not found.refused and json.loads(found.out) != counted():
            raise silent(f"other counts: {found.out[:300]}")
        if found.refused and said == "nothing":
            raise silent(f"refused although it is whole: {found.err}")
        if found.refused:
            return False
    source = case.attempt(PseudoSource, case.folder, CLASSES, names=names)
    if source is None:
        if said == "nothing":
            raise silent("refused although it is whole")
        return False
    if summary(source) != whole():
        raise silent("other images or labels")
    return True


def values(draw, good: bytes) -> tuple[str, bytes]:
    """Write invalid labels and confidences into a file that is otherwise valid."""
    from safetensors.numpy import load, save

    from tests.fuzz.weights import parts

    metadata = parts(good)[0]["__metadata__"]
    arrays = load(good)
    column = draw.choice(("label", "confidence", "position", "classes", "probabilities"))
    kind = draw.randrange(3)
    if kind == 0:
        del arrays[column]
        said = "gone"
    elif kind == 1:
        arrays[column] = arrays[column][:-1]
        said = "shorter"
    else:
        array = arrays[column].copy()
        value = draw.choice((-1, 3, 2**31 - 1) if array.dtype.kind == "i" else (np.nan, np.inf, -1, 2))
        array.reshape(-1)[draw.randrange(array.size)] = value
        arrays[column] = array
        said = f"holds {value}"
    return f"{column} {said}", save(arrays, metadata)


def summary(source) -> tuple:
    return source.labels.tolist(), source.position.tolist(), source.unit.tolist(), len(source), source.digest


@cache
def whole() -> tuple:
    from lambdanets.pseudo.source import PseudoSource

    return summary(PseudoSource(labels_folder(), CLASSES))


@cache
def counted() -> dict:
    return json.loads((labels_folder() / "selection.json").read_text())
