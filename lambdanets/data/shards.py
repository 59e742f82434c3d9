"""Tar shards in webdataset's naming, read in place: KEY.jpg (png, webp) beside KEY.cls or KEY.json.

A shard is walked once; where each image lies is kept as JSON in the cache folder, and then any image is one read.
Gzipped shards are unpacked once into the cache folder. Members are never extracted to a path of their own, and pickles
are refused: nothing in a shard can run or be written anywhere.
"""

import glob
import gzip
import json
import os
import shutil
import tarfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lambdanets.data.decode import EXTENSIONS, LIMITS, BrokenImageError
from lambdanets.data.places import cache_folder, fingerprint, whole_file
from lambdanets.data.source import SPLITS, check_labels, no_split
from lambdanets.data.strings import Strings, printable

SHARDS = (".tar", ".tar.gz", ".tgz")
PICKLES = ("pkl", "pickle", "pyd", "pth", "pt", "joblib", "npy", "npz")  # numpy's may hold pickles
LABEL_KEYS = ("label", "cls", "class", "target")
MAX_LABEL = 1_000_000  # bytes of a .cls or .json member; and the largest class number
EXPANSION = 200  # a gzipped shard may grow by so much: padding of tiny files shrinks well, bombs shrink by 1,000
OPEN = 64  # files kept open by a process


@dataclass(frozen=True)
class ShardIndex:
    """Where the images of a shard lie."""

    keys: list[str]
    labels: list[str]  # a number or a class name; "" where there is none
    offsets: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class Member:
    """One file of a tar."""

    name: str
    offset: int
    size: int


class ShardSource:
    """Local tar shards, by index."""

    def __init__(self, shards: Sequence[Path], indices: Sequence[ShardIndex], class_names: Sequence[str]) -> None:
        self.shards = [str(unpacked(path)) for path in shards]
        self.shard_names = [path.name for path in shards]
        self.shard = np.repeat(np.arange(len(shards)), [len(index.keys) for index in indices])
        self.keys = Strings(key for index in indices for key in index.keys)
        self.offsets = np.array([offset for index in indices for offset in index.offsets], np.int64)
        self.sizes = np.array([size for index in indices for size in index.sizes], np.int64)
        self.class_names = tuple(class_names)
        self.labels = label_numbers([label for index in indices for label in index.labels], self.class_names)
        check_labels(self.labels, self.class_names, str(shards[0]))
        self.handles: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, index: int) -> str:
        return printable(f"{self.shard_names[self.shard[index]]}:{self.keys[index]}")

    def read(self, index: int) -> bytes:
        size = int(self.sizes[index])
        if size > LIMITS.bytes:
            raise BrokenImageError(f"{size:,} bytes, more than the limit of {LIMITS.bytes:,}")
        # pread has no position, so that forked workers may share what was open before them
        data = os.pread(self.handle(int(self.shard[index])), size, int(self.offsets[index]))
        if len(data) < size:
            raise BrokenImageError(f"the shard ends after {len(data):,} of {size:,} bytes")
        return data

    def handle(self, shard: int) -> int:
        if shard in self.handles:
            self.handles.move_to_end(shard)
        else:
            self.handles[shard] = os.open(self.shards[shard], os.O_RDONLY)
            if len(self.handles) > OPEN:
                os.close(self.handles.popitem(last=False)[1])
        return self.handles[shard]

    def close(self) -> None:
        while self.handles:
            os.close(self.handles.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "handles"):
            self.close()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"handles": OrderedDict()}


def open_shards(every: Sequence[Path], split: str) -> ShardSource:
    """Names that start with "train", "val" or "test" tell splits apart; `classes.txt` beside the shards names the
    classes."""
    groups = by_split(every)
    if split not in groups:
        raise no_split(every[0].parent, split, sorted(groups))
    shards = groups[split]
    indices = [index_shard(path) for path in shards]
    names = read_class_names(shards[0].parent)
    if names is None:  # the training shards decide, so that splits agree
        more = [index_shard(path) for path in groups.get("train", []) if path not in shards]
        names = guessed_class_names(label for index in [*indices, *more] for label in index.labels)
    return ShardSource(shards, indices, names)


def has_shards(folder: Path) -> bool:
    return any(entry.name.endswith(SHARDS) for entry in os.scandir(folder))


def shard_paths(where: str | Path) -> list[Path]:
    """The shards of a folder, a glob or a brace list; at least one."""
    from braceexpand import braceexpand

    path = Path(where).expanduser()
    if path.is_dir():
        return sorted(entry for entry in path.iterdir() if entry.name.endswith(SHARDS) and entry.is_file())
    if path.is_file():
        return [path]
    found: list[Path] = []
    for pattern in braceexpand(str(path)):
        matches = sorted(glob.glob(pattern))
        if not matches:
            raise ValueError(f"{pattern}: no such shard")
        found += [Path(match) for match in matches]
    return found


def by_split(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Shards of each split; without telling names all of them are for training."""
    paths = list(paths)
    found: dict[str, list[Path]] = {}
    for split, names in SPLITS.items():
        for name in names:
            chosen = [
                p for p in paths if p.name.lower().startswith(name) and not p.name[len(name) : len(name) + 1].isalpha()
            ]
            if chosen:
                found[split] = chosen
                break
    return found or {"train": paths}


def index_shard(path: Path) -> ShardIndex:
    """Where the images of a shard lie, from the cache if it was walked before."""
    shown, path = path, unpacked(path)
    kept = cache_folder() / "shards" / f"{fingerprint(path)}.json"
    try:
        index = ShardIndex(**json.loads(kept.read_bytes()))
        check_index(index, path.stat().st_size)
        return index
    except (OSError, ValueError, TypeError):
        pass
    index = walk(path, shown)
    try:
        with whole_file(kept) as file:
            file.write(json.dumps(asdict(index)).encode())
    except OSError:
        pass  # a cache that cannot be written costs time, not the run
    return index


def check_index(index: ShardIndex, size: int) -> None:
    columns = (index.keys, index.labels, index.offsets, index.sizes)
    if not all(isinstance(column, list) and len(column) == len(index.keys) for column in columns):
        raise ValueError("columns differ")
    if not all(isinstance(text, str) for text in (*index.keys, *index.labels)):
        raise ValueError("not names")
    if not all(at >= 0 and n >= 0 and at + n <= size for at, n in zip(index.offsets, index.sizes, strict=True)):
        raise ValueError("beyond the end")


def walk(path: Path, shown: Path) -> ShardIndex:
    """`shown` is what the user calls it."""
    keys, labels, offsets, sizes = [], [], [], []
    with open(path, "rb") as file:

        def content(member: Member) -> bytes:
            return os.pread(file.fileno(), member.size, member.offset)

        for key, members in grouped(members_of(path, shown), shown):
            image = next((member for extension, member in members.items() if is_image_extension(extension)), None)
            if image is not None:
                keys.append(key)
                offsets.append(image.offset)
                sizes.append(image.size)
                small = {
                    name: content(m) for name, m in members.items() if name in ("cls", "json") and m.size <= MAX_LABEL
                }
                labels.append(label_text(small, f"{shown}: {key}"))
    if not keys:
        raise ValueError(f"{shown} holds no images: expected KEY.jpg (png, webp) and KEY.cls or KEY.json")
    return ShardIndex(keys, labels, offsets, sizes)


def members_of(path: Path, shown: Path) -> Iterator[Member]:
    """The regular files of a tar, headers only. A damaged tar is an error, where tarfile would just stop."""
    size, end = path.stat().st_size, 0
    try:
        with tarfile.open(path, "r:") as tar:
            while (info := tar.next()) is not None:
                if info.size < 0 or info.offset_data < end or info.offset_data + info.size > size:
                    raise ValueError(f"{info.name!r} claims {info.size:,} bytes at {info.offset_data:,}")
                tar.members = []  # type: ignore[attr-defined]  # or the list grows with the shard
                end = info.offset_data + (info.size if info.isreg() else 0)
                if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    yield Member(info.name, info.offset_data, info.size)
    except Exception as error:  # tarfile raises many kinds on garbage
        raise ValueError(f"{shown} is damaged or no tar: {printable(str(error))}") from error
    with open(path, "rb") as file:
        file.seek(-(-end // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # a tar ends with zeros, a part of one does not
            raise ValueError(f"{shown} is damaged or incomplete after byte {end:,}: make it again")


def grouped(members: Iterable[Member], path: Path) -> Iterator[tuple[str, dict[str, Member]]]:
    """Neighbours with the same key: (key, {extension: member})."""
    current, found = None, {}
    for member in members:
        key, extension = split_name(member.name)
        if not extension or os.path.basename(key).startswith("__"):
            continue
        refuse_pickle(extension, f"{path}: {printable(member.name)}")
        if key != current:
            if current is not None:
                yield current, found
            current, found = key, {}
        if extension in found:
            raise ValueError(f"{path} holds {printable(member.name)} twice")
        found[extension] = member
    if current is not None:
        yield current, found


def split_name(name: str) -> tuple[str, str]:
    """webdataset's rule: the extension starts at the first dot of the last part."""
    folder, _, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return f"{folder}/{stem}" if folder else stem, extension.lower()


def is_image_extension(extension: str) -> bool:
    return f".{extension}".endswith(EXTENSIONS)


def refuse_pickle(extension: str, what: str) -> None:
    if extension.rpartition(".")[2] in PICKLES:
        raise ValueError(f"{what}: pickles can run code and are not read; labels belong into .cls or .json")


def label_text(members: dict[str, bytes], what: str) -> str:
    """A number or a class name, or "" where nothing says it."""
    try:
        if "cls" in members:
            return str(int(members["cls"][:32]))
        if "json" in members:
            content = json.loads(members["json"])
            value = (
                next((content[key] for key in LABEL_KEYS if key in content), "")
                if isinstance(content, dict)
                else content
            )
            if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
                return str(value)
            raise ValueError(f"a label is a number or a class name, not {value!r}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{printable(what)} has no readable label: {error}") from error
    return ""


def label_numbers(labels: Sequence[str], class_names: Sequence[str]) -> np.ndarray:
    numbers = {name: i for i, name in enumerate(class_names)}
    found = np.full(len(labels), -1, np.int64)
    for i, label in enumerate(labels):
        if label in numbers and not is_number(label):
            found[i] = numbers[label]
        elif is_number(label) and -1 <= int(label) <= MAX_LABEL:
            found[i] = int(label)
        elif label:
            raise ValueError(f"label {label!r} is none of the {len(class_names)} classes of classes.txt")
    return found


def is_number(label: str) -> bool:
    return label.removeprefix("-").isdecimal()


def guessed_class_names(labels: Iterable[str]) -> list[str]:
    distinct = {label for label in labels if label}
    if not all(is_number(label) for label in distinct):
        return sorted(distinct)
    return [str(i) for i in range(min(MAX_LABEL, max((int(label) for label in distinct), default=-1)) + 1)]


def read_class_names(folder: Path) -> tuple[str, ...] | None:
    """`classes.txt`: a name on each line, or tab-separated with the number first and the name last."""
    path = folder / "classes.txt"
    if not path.is_file():
        return None
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if all(len(row) > 1 and row[0].strip() == str(i) for i, row in enumerate(rows)):
        return tuple(row[-1].strip() for row in rows)
    return tuple("\t".join(row).strip() for row in rows)


def unpacked(path: Path) -> Path:
    """The shard itself, or an unpacked copy in the cache folder."""
    if path.suffix not in (".gz", ".tgz"):
        return path
    copy = cache_folder() / "unpacked" / f"{fingerprint(path)}.tar"
    if copy.is_file():
        return copy
    most = EXPANSION * path.stat().st_size + 2**26
    written = 0
    try:
        with gzip.open(path, "rb") as packed, whole_file(copy) as file:
            while block := packed.read(2**20):
                written += len(block)
                if written > most:
                    raise ValueError(f"{path} unpacks to more than {EXPANSION} times its size: refused")
                file.write(block)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except OSError as error:
        free = shutil.disk_usage(copy.parent).free
        raise OSError(
            f"{path} cannot be unpacked into {copy.parent} ({error.strerror}, {free:,} bytes free): "
            "set LAMBDANETS_CACHE to a folder with more room, or unpack it yourself"
        ) from error
    return copy
