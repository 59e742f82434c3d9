"""Tar shards in webdataset's naming: images KEY.jpg (png, webp, ...) with labels KEY.cls or KEY.json.

Each shard is indexed once, with the offsets of its images kept as JSON in the cache folder; an image is then a single
read. Gzipped shards are unpacked once into the cache folder. Members are never extracted to their own path, and pickles
are refused, so nothing in a shard can run code or write files.
"""

import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from lambdanets.data.decode import EXTENSIONS, LIMITS, BrokenImageError
from lambdanets.data.folders import UNREAD, unread_notes
from lambdanets.data.patterns import MOST_NAMES, expand_braces, matching
from lambdanets.data.places import cache_folder, fingerprint
from lambdanets.data.source import SPLITS, check_labels, no_split
from lambdanets.data.strings import Strings, encodable, printable
from lambdanets.data.tars import Member, members_of, unpacked
from lambdanets.files import parse_json, read_object, write_json

SHARDS = (".tar", ".tar.gz", ".tgz")
PICKLES = ("pkl", "pickle", "pyd", "pth", "pt", "joblib", "npy", "npz")  # NumPy files may contain pickles
LABEL_MEMBERS = ("cls", "json")
LABEL_KEYS = ("label", "cls", "class", "target")
MAX_LABEL = 1_000_000  # bytes of a .cls or .json member, and the largest class number
MAX_NAME = 1000  # characters of a class name
MOST_CLASSES_BYTES, MOST_INDEX_BYTES = 2**24, 2**30
INDEX_FOLDER = "shards-3"  # in the cache; increase the number when `walk` changes
OPEN = 64  # files kept open by a process


@dataclass(frozen=True)
class ShardIndex:
    """Offsets, sizes and labels of the images of a shard."""

    keys: list[str]
    labels: list[str]  # number or class name; "" without a label
    offsets: list[int]
    sizes: list[int]
    unread: dict[str, int] = field(default_factory=dict)  # images in unsupported formats, by extension


class OpenFile:
    """A file that is open as long as there is a reference to it."""

    def __init__(self, path: str) -> None:
        self.handle = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)


class ShardSource:
    """A source that reads images from local tar shards."""

    def __init__(self, shards: Sequence[Path], indices: Sequence[ShardIndex], class_names: Sequence[str]) -> None:
        self.shards = [str(unpacked(path)) for path in shards]
        self.shard_names = [path.name for path in shards]
        self.shard = np.repeat(np.arange(len(shards)), [len(index.keys) for index in indices])
        self.keys = Strings(key for index in indices for key in index.keys)
        self.offsets = np.array([offset for index in indices for offset in index.offsets], np.int64)
        self.sizes = np.array([size for index in indices for size in index.sizes], np.int64)
        self.class_names = tuple(class_names)
        unread = sum((Counter(index.unread) for index in indices), Counter())
        self.notes = tuple(unread_notes(shards[0].parent, unread))
        labels = [label for index in indices for label in index.labels]
        self.labels = label_numbers(labels, self.class_names, str(shards[0].parent))
        check_labels(self.labels, self.class_names, str(shards[0]))
        self.files: OrderedDict[int, OpenFile] = OrderedDict()

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, index: int) -> str:
        return printable(f"{self.shard_names[self.shard[index]]}:{self.keys[index]}")

    def read(self, index: int) -> bytes:
        size = int(self.sizes[index])
        if size > LIMITS.bytes:
            raise BrokenImageError(f"{size:,} bytes, more than the limit of {LIMITS.bytes:,}")
        # pread does not use the file position, so threads and forked workers can share open files
        file = self.open_shard(int(self.shard[index]))
        data = os.pread(file.handle, size, int(self.offsets[index]))
        if len(data) < size:
            raise BrokenImageError(f"the shard ends after {len(data):,} of {size:,} bytes")
        return data

    def open_shard(self, shard: int) -> "OpenFile":
        """Return an open shard. It stays open while the caller has it, also if another thread opens many others."""
        file = self.files.pop(shard, None) or OpenFile(self.shards[shard])
        self.files[shard] = file
        if len(self.files) > OPEN:
            self.files.popitem(last=False)
        return file

    def close(self) -> None:
        self.files.clear()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"files": OrderedDict()}


def open_shards(every: Sequence[Path], split: str) -> ShardSource:
    """Open the shards of a split: those whose names start with "train", "val" or "test". `classes.txt` in the same
    folder contains the class names."""
    groups = by_split(every)
    if split not in groups:
        raise no_split(every[0].parent, split, sorted(groups))
    shards = groups[split]
    indices = [index_shard(path) for path in shards]
    names = read_class_names(shards[0].parent)
    if names is None:  # use the labels of the training shards as well, so that splits agree
        more = [index_shard(path) for path in groups.get("train", []) if path not in shards]
        labels = (label for index in [*indices, *more] for label in index.labels)
        names = guessed_class_names(labels, str(shards[0].parent))
    return ShardSource(shards, indices, names)


def has_shards(folder: Path) -> bool:
    return any(entry.name.endswith(SHARDS) and entry.is_file() for entry in os.scandir(folder))


def shard_paths(where: str | Path) -> list[Path]:
    """Return the shards of a folder, a glob or a brace list; at least one."""
    path = Path(where).expanduser()
    if path.is_dir():
        return sorted(entry for entry in path.iterdir() if entry.name.endswith(SHARDS) and entry.is_file())
    if path.is_file():
        return [path]
    found: list[Path] = []
    for pattern in expand_braces(str(path)):
        matches = matching(pattern)
        if not matches:
            raise ValueError(f"{pattern}: no such shard")
        wrong = next((match for match in matches if not match.is_file()), None)
        if wrong is not None:
            raise ValueError(f"{wrong} is not a regular file: pass the shards, or the folder that contains them")
        found += matches
        if len(found) > MOST_NAMES:
            raise ValueError(f"{path} expands to more than {MOST_NAMES:,} shards")
    return found


def by_split(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the shards of each split; without names of splits, all shards are for training."""
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
    """Return the index of a shard, from the cache if it was indexed before."""
    shown, path = path, unpacked(path)
    kept = cache_folder() / INDEX_FOLDER / f"{fingerprint(path)}.json"
    try:
        index = ShardIndex(**read_object(kept, MOST_INDEX_BYTES))
        check_index(index, path.stat().st_size)
        return index
    except (OSError, ValueError, TypeError):
        pass
    index = walk(path, shown)
    with suppress(OSError):  # without a writable cache the shard is indexed again next time
        write_json(kept, asdict(index), indent=None)
    return index


def check_index(index: ShardIndex, size: int) -> None:
    """Raise ValueError if a cached index does not describe a shard of this size."""
    texts, numbers = (index.keys, index.labels), (index.offsets, index.sizes)
    if not all(isinstance(column, list) and len(column) == len(index.keys) for column in texts + numbers):
        raise ValueError("columns differ")
    if not index.keys or not all(isinstance(text, str) for column in texts for text in column):
        raise ValueError("not names")
    unread = index.unread.values() if isinstance(index.unread, dict) else [None]
    if not all(type(number) is int for column in (*numbers, unread) for number in column):
        raise ValueError("not places")
    if not all(at >= 0 and n >= 0 and at + n <= size for at, n in zip(*numbers, strict=True)):
        raise ValueError("beyond the end")


def walk(path: Path, shown: Path) -> ShardIndex:
    """Index a shard: pair images and labels by their keys, in any order. `shown` is the name of the shard in messages.

    If a key has KEY.jpg and others such as KEY.mask.png, KEY.jpg is the image, and the others are left out.
    """
    images: dict[str, Member] = {}
    longer: dict[str, list[Member]] = {}  # images whose extensions have more than one part
    labels: dict[str, dict[str, Member]] = {}
    others: list[tuple[str, str]] = []  # key and extension of images in unsupported formats
    for member in members_of(path, shown):
        key, extension = split_name(member.name)
        if not extension or os.path.basename(key).startswith("__"):
            continue
        refuse_pickle(extension, f"{shown}: {printable(member.name)}")
        if is_image_extension(extension):
            if "." in extension:
                longer.setdefault(key, []).append(member)
                continue
            other = images.setdefault(key, member)
        elif extension in LABEL_MEMBERS:
            other = labels.setdefault(key, {}).setdefault(extension, member)
        else:
            if (last := f".{extension.rpartition('.')[2]}") in UNREAD:
                others.append((key, last))
            continue
        if other is not member:
            raise twice(other, member, shown)
    for key, found in longer.items():
        if key not in images:
            if len(found) > 1:
                raise twice(found[0], found[1], shown)
            images[key] = found[0]
    if longer:
        images = dict(sorted(images.items(), key=lambda item: item[1].offset))
    if not images:
        known = ", ".join(extension.removeprefix(".") for extension in EXTENSIONS[1:])
        raise ValueError(f"{shown} contains no images; expected KEY{EXTENSIONS[0]} ({known}) and KEY.cls or KEY.json")
    alone = [found["cls"].name for key, found in labels.items() if key not in images and "cls" in found]
    if alone:
        raise ValueError(
            f"{shown} has {len(alone):,} labels without an image, the first is {printable(alone[0])}: add the images "
            f"(one of {', '.join(EXTENSIONS)}, with the same name up to the first dot) or remove the labels"
        )
    unread = Counter(extension for key, extension in others if key not in images)
    index = ShardIndex([], [], [], [], dict(unread))
    with open(path, "rb") as file:
        for key, image in images.items():
            small = {}
            for extension, member in labels.get(key, {}).items():
                if member.size > MAX_LABEL:
                    raise ValueError(
                        f"{shown}: {printable(member.name)} has {member.size:,} bytes, too many for a label"
                    )
                small[extension] = os.pread(file.fileno(), member.size, member.offset)
            index.keys.append(key)
            index.labels.append(label_text(small, f"{shown}: {key}"))
            index.offsets.append(image.offset)
            index.sizes.append(image.size)
    return index


def twice(one: Member, other: Member, shown: Path) -> ValueError:
    names = printable(one.name), printable(other.name)
    what = f"{names[0]} twice" if names[0] == names[1] else f"{names[0]} and {names[1]}, two images of one key"
    return ValueError(f"{shown} contains {what}: pack each image once, with a unique key")


def split_name(name: str) -> tuple[str, str]:
    """Split a name into key and extension as webdataset does: the extension starts at the first dot of the file
    name."""
    folder, _, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return f"{folder}/{stem}" if folder else stem, extension.lower()


def is_image_extension(extension: str) -> bool:
    return f".{extension}".endswith(EXTENSIONS)


def refuse_pickle(extension: str, what: str) -> None:
    if extension.rpartition(".")[2] in PICKLES:
        raise ValueError(f"{what}: pickles are refused, because they can run code; store labels as .cls or .json")


def label_text(members: dict[str, bytes], what: str) -> str:
    """Return the label of an image, a number or class name; "" if it has none."""
    try:
        if "cls" in members:
            number = members["cls"].strip()
            if not re.fullmatch(rb"[-+]?[0-9]{1,19}", number):
                raise ValueError(f"a .cls file must contain a number, got {number[:40]!r}")
            return str(int(number))
        if "json" in members:
            content = parse_json(members["json"], "its .json file", any_number=True)  # only the label is checked
            if isinstance(content, dict):
                content = next((content[key] for key in LABEL_KEYS if key in content), "")
            if isinstance(content, int) and not isinstance(content, bool):
                return str(content)
            if not isinstance(content, str) or len(content) > MAX_NAME or not encodable(content):
                raise ValueError(f"a label must be a number or a class name, got {str(content)[:40]!r}")
            return content
    except ValueError as error:
        raise ValueError(f"{printable(what)} has no readable label: {error}") from error
    return ""


def label_numbers(labels: Sequence[str], class_names: Sequence[str], where: str) -> np.ndarray:
    numbers = {name: i for i, name in enumerate(class_names)}
    found = np.full(len(labels), -1, np.int64)
    for i, label in enumerate(labels):
        if label in numbers and not is_number(label):
            found[i] = numbers[label]
        elif is_number(label) and -1 <= int(label) <= MAX_LABEL:
            found[i] = int(label)
        elif label:
            raise ValueError(f"{where}: the label {label[:40]!r} is not one of the {len(class_names):,} classes")
    return found


def is_number(label: str) -> bool:
    return label.removeprefix("-").isdecimal()


def guessed_class_names(labels: Iterable[str], where: str) -> list[str]:
    distinct = {label for label in labels if label and label != "-1"}
    numbers = sorted(filter(is_number, distinct))
    if len(numbers) < len(distinct):
        if numbers:
            raise ValueError(
                f"{where} has both numbers and names as labels, such as {numbers[0][:40]} and "
                f"{min(distinct.difference(numbers))[:40]!r}: use one kind, or list the class names in classes.txt"
            )
        return sorted(distinct)
    largest = max((int(label) for label in distinct), default=-1)
    if largest > MAX_LABEL:
        raise ValueError(
            f"{where}: the label {str(largest)[:40]} is too large. Labels must be numbers from 0 to {MAX_LABEL:,}, or "
            "names"
        )
    return [str(i) for i in range(largest + 1)]


def read_class_names(folder: Path) -> tuple[str, ...] | None:
    """Read `classes.txt`: one class name per line, or tab-separated lines with number first and name last."""
    path = folder / "classes.txt"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        data = file.read(MOST_CLASSES_BYTES + 1)
    if len(data) > MOST_CLASSES_BYTES:
        raise ValueError(f"{path} is larger than the limit of {MOST_CLASSES_BYTES:,} bytes for class names")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): save it as UTF-8") from error
    rows = [line.removesuffix("\r").split("\t") for line in text.split("\n") if line.strip()]
    if all(len(row) > 1 and row[0].strip() == str(i) for i, row in enumerate(rows)):
        names = [row[-1].strip() for row in rows]
    else:
        names = ["\t".join(row).strip() for row in rows]
    if not names:
        raise ValueError(f"{path} is empty: write one class name per line, or delete the file")
    seen: set[str] = set()
    for name in names:
        if not name or "\0" in name or name in seen:
            raise ValueError(f"{path}: the class name {name[:40]!r} is {'duplicated' if name in seen else 'invalid'}")
        seen.add(name)
    return tuple(names)
