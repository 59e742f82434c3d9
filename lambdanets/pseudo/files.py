"""What labelling leaves on the disk: a folder with `labels.json` and one file for each unit of work.

A file appears under its name when it is whole, and holds nothing that depends on when or by whom it was made: the same
command gives the same bytes. Safetensors and JSON only.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lambdanets.files import FULL, as_object, parse_json, read_object, remove_parts, whole_file
from lambdanets.pseudo.checks import AGAIN, digest, what_is_wrong, what_is_wrong_with_rows
from lambdanets.typed import from_json

MANIFEST, LABELS, SELECTED, SELECTION = "labels.json", "labels", "selected", "selection.json"
KEY, DIGESTS = "lambdanets", "digests"
KINDS = ("shards", "list")
COLUMNS = {"position", "label", "confidence", "classes", "probabilities", "offset", "size"}
FORMAT = 1


@dataclass(frozen=True)
class Unit:
    """What one process labels in one go: a tar shard, or a stretch of a list of files."""

    name: str
    first: int = 0  # of a stretch: its first image
    images: int = 0  # of a stretch; a shard is counted when it is read


@dataclass(frozen=True)
class Manifest:
    """What was to be labelled, by whom and how. A run goes on only under the same one."""

    images: str
    kind: str  # "shards" or "list"
    units: tuple[Unit, ...]
    class_names: tuple[str, ...]
    teachers: tuple[dict[str, Any], ...]
    split: str = "train"
    soft: int = 0  # probabilities kept of each image; 0: only the best class
    batch_size: int = 128
    precision: str = "float32"
    guard: tuple[str, ...] = ()
    guard_distance: int = 6
    listing: str = ""  # of a list of files: the hash of their names

    def as_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


@dataclass(frozen=True)
class Labels:
    """The labels of a unit: N readable images. `rows` that are no array are facts for the report."""

    position: np.ndarray  # int32 [N], among the images of the unit
    label: np.ndarray  # int32 [N]
    confidence: np.ndarray  # float32 [N]
    classes: np.ndarray | None = None  # int32 [N, K], the likeliest first
    probabilities: np.ndarray | None = None  # float16 [N, K]
    offset: np.ndarray | None = None  # int64 [N], where the image lies in its shard
    size: np.ndarray | None = None  # int64 [N]
    images: int = 0
    broken: tuple[tuple[str, str], ...] = ()  # name, why
    leaks: tuple[tuple[str, str, str], ...] = field(default=())  # name, of which image, how it was found

    def __len__(self) -> int:
        return len(self.label)


def label_path(folder: Path, number: int) -> Path:
    return folder / LABELS / f"{number:06d}.safetensors"


def selected_path(folder: Path, number: int) -> Path:
    return folder / SELECTED / f"{number:06d}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Every process writes the same. One that no finished unit belongs to is replaced."""
    path = folder / MANIFEST
    while not check_manifest(folder, manifest):
        remove_parts(folder, MANIFEST)  # of a process that was killed, or of one that is as far as we
        try:
            write_whole(path, manifest.as_json().encode())
        except FileNotFoundError:  # another one thought that we were killed
            continue
    remove_parts(folder, MANIFEST)


def check_manifest(folder: Path, manifest: Manifest) -> bool:
    """Whether the folder has this manifest; False also if it has another without a finished unit. Finished units that
    were made otherwise are a ValueError."""
    path = folder / MANIFEST
    if not path.exists():
        return False
    found = difference(read_object(path), json.loads(manifest.as_json()))
    if found and any(whole(unit) for unit in (folder / LABELS).glob("*.safetensors")):
        raise ValueError(
            f"{folder} holds labels that were made otherwise: {found}. Go on with the same images and settings, or "
            f"choose another folder"
        )
    return not found


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first thing in which manifests differ, in words; empty if they are the same."""
    for key in ("precision", *now):  # precision first: the hash of the weights follows from it
        was, is_now = before.get(key), now[key]
        if was == is_now:
            continue
        if key == "listing":
            return "files were added, removed or renamed"
        if not isinstance(was, list) or not isinstance(is_now, list):
            return f"{key} was {was!r} and is {is_now!r}"
        name = {"units": "unit", "class_names": "class", "teachers": "teacher"}.get(key, key)
        return item_difference(name, was, is_now)
    return ""


def item_difference(name: str, before: list[Any], now: list[Any]) -> str:
    """The first item in which lists differ, counted from 1, and within it the first value."""
    for number, (was, is_now) in enumerate(zip(before, now, strict=False), 1):
        if was == is_now:
            continue
        if isinstance(was, dict) and isinstance(is_now, dict):
            key = next(key for key in {**is_now, **was} if was.get(key) != is_now.get(key))
            of = f" ({is_now['name']})" if "name" in is_now else ""
            which = "" if key in ("name", "what") else f"{of}: {key}"
            return f"{name} {number}{which} was {was.get(key)!r} and is {is_now.get(key)!r}"
        return f"{name} {number} was {was!r} and is {is_now!r}"
    number = min(len(before), len(now))
    other = (before if len(before) > len(now) else now)[number]
    shown = other.get("name", other) if isinstance(other, dict) else other
    return f"{name} {number + 1}, {shown!r}, is {'gone' if len(before) > len(now) else 'new'}"


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} has no {MANIFEST}: it is not a folder that `lambdanets pseudo label` wrote")
    try:
        data = read_object(path)
        if data.pop("format", None) != FORMAT:
            raise ValueError("another format")
        data.pop("max_broken", None)  # was written once; it may change from run to run
        manifest = from_json(Manifest, data)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if manifest.kind not in KINDS or not manifest.class_names or not 0 <= manifest.soft <= len(manifest.class_names):
        raise ValueError(
            f"{path} cannot be read: kind {manifest.kind!r}, {len(manifest.class_names)} classes, soft {manifest.soft}"
        )
    if any(unit.first < 0 or unit.images < 0 for unit in manifest.units):
        raise ValueError(f"{path} cannot be read: a unit has a negative number of images")
    return manifest


def check_units(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder with labels of units that the manifest does not have: the manifest is damaged."""
    paths = (folder / LABELS).glob("*.safetensors")
    beyond = sorted(path for path in paths if path.stem.isdecimal() and int(path.stem) >= len(manifest.units))
    if beyond:
        raise ValueError(
            f"{folder / MANIFEST} has {len(manifest.units)} units, and {beyond[0]} is of another one: the manifest is "
            f"damaged. Label again into another folder"
        )


def write_labels(folder: Path, number: int, labels: Labels) -> None:
    arrays = {
        name: value
        for name, value in asdict_shallow(labels).items()
        if isinstance(value, np.ndarray)  # what there is none of is left out
    }
    about = {"images": labels.images, "broken": labels.broken, "leaks": labels.leaks}
    write_arrays(label_path(folder, number), arrays, about)


def asdict_shallow(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def read_labels(folder: Path, number: int) -> Labels:
    """The labels of a unit, checked against the manifest."""
    arrays, about = read_columns(folder, read_manifest(folder), number)
    broken, leaks = (tuple(tuple(row) for row in about[name]) for name in ("broken", "leaks"))
    return Labels(**arrays, images=about["images"], broken=broken, leaks=leaks)


def read_columns(
    folder: Path, manifest: Manifest, number: int, columns: tuple[str, ...] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Some or all columns of a file of labels, and its counts and names; a ValueError if they cannot be."""
    path = label_path(folder, number)
    arrays, about = read_arrays(path, columns)
    if columns is None and not {"position", "label", "confidence"} <= arrays.keys() <= COLUMNS:
        raise ValueError(f"{path} is no file of labels: it has the columns {', '.join(sorted(arrays))[:200]}")
    wrong = what_is_wrong(arrays, about, len(manifest.class_names), manifest.soft, manifest.units[number].images)
    if wrong:
        raise ValueError(f"{path} is damaged: {wrong}. {AGAIN}")
    return arrays, about


def read_selected(folder: Path, number: int, labels: int) -> dict[str, np.ndarray]:
    """Which of the labels of a unit are used ("row"), and how often ("repeats")."""
    path = selected_path(folder, number)
    columns, _ = read_arrays(path, ("row", "repeats"))
    wrong = what_is_wrong_with_rows(columns, labels)
    if wrong:
        raise ValueError(f"{path} is damaged: {wrong}. Run `lambdanets pseudo select` again")
    return columns


def write_arrays(path: Path, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    from safetensors.numpy import save

    # one key of metadata: with several their order in the file would be another each time
    digests = {name: digest(array) for name, array in arrays.items()} | {"": digest(json.dumps(about))}
    write_whole(path, save(arrays, {KEY: json.dumps(about | {DIGESTS: digests})}))


def read_arrays(path: Path, columns: tuple[str, ...] | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Columns of a file, all without `columns`, and its counts and names. Digests are checked where a file has them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            about = as_object(parse_json((file.metadata() or {})[KEY], "its header"), "its header")
            arrays = {name: file.get_tensor(name) for name in columns or file.keys()}
        digests = about.pop(DIGESTS, None)
        if digests is not None:
            found = {name: digest(array) for name, array in arrays.items()} | {"": digest(json.dumps(about))}
            if not isinstance(digests, dict) or any(digests.get(name) != value for name, value in found.items()):
                raise ValueError("its contents do not match their digests")
        return arrays, about
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: run `lambdanets pseudo label` again, it goes on where it was") from None
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}. {AGAIN}") from error


def whole(path: Path) -> bool:
    """Whether a file is there and as long as it says; a damaged one is made anew."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            return KEY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def write_whole(path: Path, data: bytes) -> None:
    """On the disk when it returns; a full one is an error that says what is kept."""
    try:
        with whole_file(path) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            f"{path} cannot be written: {error.strerror} ({free:,} bytes free for {len(data):,}). What is finished is "
            f"kept: make room and run the same command again"
        ) from error


def finished(folder: Path, manifest: Manifest) -> list[bool]:
    return [whole(label_path(folder, number)) for number in range(len(manifest.units))]


def every_label(
    folder: Path, manifest: Manifest, columns: tuple[str, ...] = ("label", "confidence")
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Unit after unit, only some columns: what there is once is never all in memory."""
    for number in range(len(manifest.units)):
        if label_path(folder, number).exists():
            yield number, read_columns(folder, manifest, number, columns)[0]
