"""Safetensors files with weights, compared with a reading by `struct` and `json`."""

import json
import math
import random
import struct
from typing import Any

import numpy as np

from tests.fuzz import damage
from tests.fuzz.case import FuzzCase, silent
from tests.fuzz.hub_config import picture
from tests.fuzz.made import small_run

TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}


def run(case: FuzzCase) -> bool:
    from lambdanets.models.stored import read_state
    from lambdanets.train.inference.command import Predict, Using
    from lambdanets.view.command import View

    draw = case.random
    good = small_run().read_bytes()
    (size,) = struct.unpack("<Q", good[:8])
    said, data = "nothing", good
    if case.number >= 3:
        kind = draw.randrange(4)
        if kind == 0:
            said, data = damage.damaged(draw, good)
        elif kind == 1:  # the header alone
            said, header = damage.damaged(draw, good[8 : 8 + size])
            data = struct.pack("<Q", len(header)) + header + good[8 + size :]
        else:
            said, data = draw.choice((structured, structured, numbers, length))(draw, good)
    case.note(said)
    path = case.folder / "weights.safetensors"
    path.write_bytes(data)

    expected = reading(data)
    names = ("weights.safetensors",)
    state = case.attempt(read_state, path, names=names)
    found = case.command(Predict(str(path), (picture(),), Using(device="cpu", workers=0), json=True), names=names)
    if case.number % 25 == 0:
        viewed = case.command(
            View(str(path), path.with_name("x.png"), output=case.folder / "v"), names=(*names, "x.png")
        )
        assert viewed.refused
    if state is not None:
        if expected is None:
            raise silent("read_state takes a damaged file")
        for name, tensor in state.items():
            if name not in expected or not same(tensor.float().numpy(), expected[name].astype(np.float32)):
                raise silent(f"{name} is read otherwise")
    if found.refused:
        if said == "nothing":
            raise silent(f"refused although it is whole: {found.err}")
        return False
    if expected is None:
        raise silent("`predict` takes a damaged file")
    if not all(np.isfinite(array).all() for array in expected.values() if array.dtype.kind == "f"):
        if "finite" not in found.err:
            raise silent("weights that are not finite")
        return True
    answer = json.loads(found.out)
    if not all(math.isfinite(one["probability"]) for one in answer.get("classes", ())):
        raise silent(f"probabilities {answer}")
    return True


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=True)


def reading(data: bytes) -> dict[str, np.ndarray] | None:
    """Return the tensors of a safetensors file, or None if it is damaged."""
    try:
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size].decode("utf-8"))
        body, found, spans = data[8 + size :], {}, []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            kind = np.dtype(TYPES[entry["dtype"]])
            array = np.frombuffer(body[start:end], kind).reshape(entry["shape"])
            assert array.nbytes == end - start
            found[name] = array
            spans.append((start, end))
        ends = [0, *(end for _, end in sorted(spans))]
        assert [start for start, _ in sorted(spans)] == ends[:-1]
        assert ends[-1] == len(body)
        return found
    except (struct.error, ValueError, KeyError, TypeError, AssertionError, RecursionError, AttributeError):
        return None


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: Any, body: bytes) -> bytes:
    text = damage.as_bytes(header)
    return struct.pack("<Q", len(text)) + text + body


def structured(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    header, body = parts(good)
    names = [name for name in header if name != "__metadata__"]
    name = draw.choice(names)
    kind = draw.randrange(6)
    if kind == 0:
        other = draw.choice(names)
        header[name], header[other] = header[other], header[name]
        return f"{name} and {other} exchanged", joined(header, body)
    if kind == 1:
        header[name]["dtype"] = draw.choice((*TYPES, "BF16", "BOOL", "F8_E4M3", "x"))
        return f"{name} is {header[name]['dtype']}", joined(header, body)
    if kind == 2:
        shape = header[name]["shape"]
        header[name]["shape"] = draw.choice(([], [0], [-1], [2**62, 4], shape[::-1], [*shape, 1], [math.prod(shape)]))
        return f"{name} has shape {header[name]['shape']}", joined(header, body)
    if kind == 3:
        header[f"{name}x"] = header.pop(name)
        return f"{name} has another name", joined(header, body)
    said, where, header = damage.spoilt(draw, header)
    return f"{damage.dotted(where)} {said}", joined(header, body)


def numbers(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    """Write weights that are NaN, infinite or much too large."""
    header, body = parts(good)
    names = [name for name, entry in header.items() if entry.get("dtype") == "F32"]
    chosen = names if draw.random() < 0.3 else [draw.choice(names)]
    value = draw.choice((math.nan, math.inf, -math.inf))
    found = bytearray(body)
    for name in chosen:
        start, end = header[name]["data_offsets"]
        found[start:end] = struct.pack("<f", value) * ((end - start) // 4)
    return f"{len(chosen)} tensors of {value}", joined(header, bytes(found))


def length(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    size = draw.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(good), 10**8 + 1))
    return f"a header of {size} bytes", struct.pack("<Q", size) + good[8:]
