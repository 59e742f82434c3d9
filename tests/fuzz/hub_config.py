"""config.json of a model folder, and the same description in the header of a weights file."""

import json
import math
import shutil
import struct
from functools import cache
from typing import Any

from tests.fuzz import damage
from tests.fuzz.case import FuzzCase, silent
from tests.fuzz.made import image_folder, model_folder

FREE = ("version", "metrics", "recipe")  # not used by the library


def run(case: FuzzCase) -> bool:
    from lambdanets.models.pretrained import from_pretrained
    from lambdanets.train.inference.command import Predict, Using

    draw = case.random
    in_header = draw.random() < 0.4
    good = json.loads((model_folder() / "config.json").read_text())
    below: tuple[str | int, ...] = () if in_header or draw.random() < 0.2 else ("lambdanets",)
    data = good["lambdanets"] if in_header else good
    said, where, changed = "nothing", (), data
    if case.number >= 3:
        said, where, changed = damage.spoilt(draw, data, below)
        for _ in range(draw.choice((0, 0, 0, 1, 3))):
            more, at, changed = (
                damage.spoilt(draw, changed) if isinstance(changed, dict) and changed else ("", (), changed)
            )
            said += f", {damage.dotted(at)} {more}"
    content = damage.as_bytes(changed)
    if case.number % 10 == 9:
        said, content = damage.damaged(draw, content)
    case.note(f"{'header' if in_header else 'config.json'}: {damage.dotted(where)} {said}")
    shutil.copytree(model_folder(), case.folder, dirs_exist_ok=True)
    weights = case.folder / "model.safetensors"
    if in_header:
        weights.write_bytes(with_description(weights.read_bytes(), content))
    else:
        (case.folder / "config.json").write_bytes(content)
    what = weights if in_header else case.folder
    fields = (*good["lambdanets"]["arguments"], *good["lambdanets"]["preprocessing"], *good["lambdanets"])
    names = ("config.json", "model.safetensors", str(case.folder), *(field for field in fields if len(field) > 3))

    network = case.attempt(from_pretrained, str(what), names=names)
    found = case.command(Predict(str(what), (picture(),), Using(device="cpu", workers=0), json=True), names=names)
    if found.refused != (network is None):
        raise silent(f"`predict` and from_pretrained disagree: {found.err}")
    if network is None:
        if said == "nothing":
            raise silent("refused although it is whole")
        return False
    try:
        ours = json.loads(content)
        ours = ours if in_header else ours["lambdanets"]
        assert isinstance(ours, dict)
    except (ValueError, RecursionError, KeyError, TypeError, AssertionError):
        raise silent("of a description that cannot be read") from None
    wrong = what_is_wrong(ours, good["lambdanets"])
    if wrong:
        raise silent(wrong)
    if found.status == 0:
        shares = [one["probability"] for one in json.loads(found.out)["classes"]]
        if not all(math.isfinite(p) and 0 <= p <= 1 for p in shares) or abs(sum(shares) - 1) > 1e-6:
            raise silent(f"probabilities {shares}")
    return True


def what_is_wrong(ours: dict[str, Any], good: dict[str, Any]) -> str:
    """Return the first value of the description that must not be used, or ""."""
    arguments, preprocessing = ours.get("arguments", {}), ours.get("preprocessing", {})
    for name, given, usual in (
        ("arguments", arguments, good["arguments"]),
        ("preprocessing", preprocessing, good["preprocessing"]),
    ):
        if not isinstance(given, dict):
            return f"{name} is {given!r}"
        for key, value in given.items():
            if key not in usual and not (name == "preprocessing" and key.startswith("exif")):
                if name == "preprocessing" or key in ("pretrained", "__class__", "unknown", ""):
                    return f"{name}.{key}"
                continue
            if not alike(value, usual.get(key, value)):
                return f"{name}.{key} is {str(value)[:60]}, usual is {usual[key]!r}"
    mean, std = preprocessing.get("mean", [0]), preprocessing.get("std", [1])
    if not all(map(finite, [*mean, *std])) or min(std) <= 0:
        return f"mean {mean} and std {std}"
    crop = preprocessing.get("crop", 1)
    if not 0 < crop <= 1:
        return f"crop {crop}"
    size = preprocessing.get("size", 12)
    if not all(0 < side < 100_000 for side in (size if isinstance(size, list) else [size])):
        return f"size {size}"
    names = ours.get("class_names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(names) not in (0, 3):
        return f"class names {str(names)[:80]}"
    return ""


def alike(value: Any, usual: Any) -> bool:
    """Return whether the type of a value is acceptable instead of the usual one; null stands for a default."""
    if value is None or type(value) is type(usual):
        return not isinstance(value, list) or (len(value) == len(usual) and all(map(alike, value, usual)))
    numbers = isinstance(usual, float) and type(value) is int
    return numbers or (isinstance(usual, int) and not isinstance(usual, bool) and isinstance(value, list))


def finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def with_description(weights: bytes, description: bytes) -> bytes:
    """Return the weights file with another description in its header."""
    (size,) = struct.unpack("<Q", weights[:8])
    header = json.loads(weights[8 : 8 + size])
    header["__metadata__"]["lambdanets"] = description.decode("utf-8", "replace")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + weights[8 + size :]


@cache
def picture() -> str:
    return str(next(iter(sorted(image_folder().rglob("*.png")))))
