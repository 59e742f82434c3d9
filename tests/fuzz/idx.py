"""idx files, compressed or not, compared with a reading by `struct` and `zlib`."""

import gzip
import math
import random
import struct
import zlib
from pathlib import Path

import numpy as np

from tests.fuzz import damage
from tests.fuzz.case import FuzzCase, silent

FILES = {"train-images-idx3-ubyte": (6, 8, 7), "train-labels-idx1-ubyte": (6,)}
VALIDATION = {"t10k-images-idx3-ubyte": (4, 8, 7), "t10k-labels-idx1-ubyte": (4,)}


def run(case: FuzzCase) -> bool:
    from lambdanets.data.command import DataCheck
    from lambdanets.data.source import distinct_splits

    draw = case.random
    files = FILES | (VALIDATION if draw.random() < 0.5 else {})
    packed = draw.random() < 0.4
    target = draw.choice(list(files))
    said = "nothing"
    contents: dict[str, bytes] = {}
    for number, (name, shape) in enumerate(files.items()):
        data = written(shape, number)
        if name == target and case.number >= 5 and draw.random() < 0.5:
            said, data = header(draw, data, len(shape))
        if packed:
            data = gzip.compress(data, mtime=0)
        if name == target and case.number >= 5 and said == "nothing":
            said, data = damage.damaged(draw, data)
        contents[name + ".gz" * packed] = data
    case.note(f"{target}{'.gz' * packed}: {said}")
    for name, data in contents.items():
        (case.folder / name).write_bytes(data)

    expected = {
        split: reading(contents, kind)
        for split, kind in (("train", "train"), ("validation", "t10k"))
        if split == "train" or len(files) == 4
    }
    found = case.command(DataCheck(str(case.folder), workers=1), names=(target, case.folder.name))
    if found.refused:
        if said == "nothing":
            raise silent("refused although it is whole")
        return False
    if any(one is None for one in expected.values()):
        raise silent(f"of files that are damaged: {found.out}")
    sources = case.attempt(distinct_splits, str(case.folder), names=(target, case.folder.name))
    for split, one in expected.items():
        assert one is not None
        source = sources[split]
        images = [source.read(i) for i in range(len(source))]
        if len(images) != len(one[0]) or not all(map(np.array_equal, images, one[0])):
            raise silent(f"other pixels in {split}")
        if source.labels.tolist() != one[1].tolist():
            raise silent(f"other labels in {split}: {source.labels.tolist()}, not {one[1].tolist()}")
    return True


def written(shape: tuple[int, ...], seed: int) -> bytes:
    numbers = np.random.default_rng(seed).integers(0, 256 if len(shape) > 1 else 3, shape, dtype=np.uint8)
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + numbers.tobytes()


def header(draw: random.Random, data: bytes, axes: int) -> tuple[str, bytes]:
    """Change the type, number of axes or size in the header."""
    kind = draw.randrange(3)
    if kind == 0:
        at, value = draw.randrange(4), draw.choice((0, 1, 2, 4, 9, 11, 12, 13, 14, 255))
        return f"byte {at} is {value}", data[:at] + bytes([value]) + data[at + 1 :]
    if kind == 1:
        axis, size = draw.randrange(axes), draw.choice((0, 1, 5, 7, 2**16, 2**31, 2**32 - 1))
        at = 4 + 4 * axis
        return f"axis {axis} has {size}", data[:at] + struct.pack(">I", size) + data[at + 4 :]
    shape = draw.choice(((0,), (0, 8, 7), (6, 0, 0), (6, 56), (6, 8, 7, 1), (2, 8, 7, 3), (7, 6, 8), (1,) * 5, ()))
    body = bytes(math.prod(shape)) if draw.random() < 0.7 else data[4 + 4 * axes :]
    return f"shape {shape}", bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


def reading(contents: dict[str, bytes], kind: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the images and labels of a split, or None if they are damaged."""
    images, labels = (
        array(Path(name), data)
        for word in ("images", "labels")
        for name, data in contents.items()
        if name.startswith(f"{kind}-{word}")
    )
    if images is None or labels is None or labels.ndim != 1 or len(images) != len(labels) or not images.size:
        return None
    return (images, labels) if images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3) else None


def array(path: Path, data: bytes) -> np.ndarray | None:
    if path.suffix == ".gz":
        found = b""
        while data:
            unpacking = zlib.decompressobj(31)
            try:
                found += unpacking.decompress(data)
            except zlib.error:
                return None
            if not unpacking.eof:
                return None
            data = unpacking.unused_data.lstrip(b"\0")
        data = found
    if len(data) < 4 or data[:3] != b"\0\0\x08" or not 1 <= data[3] <= 4 or len(data) < 4 + 4 * data[3]:
        return None
    shape = struct.unpack(f">{data[3]}I", data[4 : 4 + 4 * data[3]])
    body = data[4 + 4 * data[3] :]
    return np.frombuffer(body, np.uint8).reshape(shape) if len(body) == math.prod(shape) else None
