"""Reading and writing a folder of labels: `labels.json` and one file per unit of work, as JSON and safetensors.

Files are written atomically. Their contents do not depend on the time or on the process that wrote them, so the same
command gives the same bytes.
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
    """A unit of work, labelled by one process into one file: a tar shard, or a range of a list of images.

    Attributes:
        name: the file name of a shard, or `images-FIRST`.
        first: the index of the first image of a range.
        images: the number of images of a range; 0 for a shard, which is counted when it is read.
    """

    name: str
    first: int = 0
    images: int = 0


@dataclass(frozen=True)
class Manifest:
    """The images, teachers and settings of a folder of labels. Labelling resumes only if they are unchanged.

    Attributes:
        images: the path of the images.
        kind: "shards" or "list".
        units: the units of work; unit i is in file i.
        class_names: the classes of the teacher; labels are indices into them.
        teachers: name, hash of the weights and image size of each teacher.
        split: the split of the images that is labelled.
        soft: number of probabilities kept for each image; 0 keeps only the top class.
        batch_size: images per forward pass.
        precision: precision of the forward pass.
        guard: datasets whose validation images are dropped.
        guard_distance: bits in which the perceptual hashes of copies may differ; -1 compares file contents only.
        listing: the hash of the file names of a list.
    """

    images: str
    kind: str
    units: tuple[Unit, ...]
    class_names: tuple[str, ...]
    teachers: tuple[dict[str, Any], ...]
    split: str = "train"
    soft: int = 0
    batch_size: int = 128
    precision: str = "float32"
    guard: tuple[str, ...] = ()
    guard_distance: int = 6
    listing: str = ""

    def as_json(self) -> str:
        """Return the text of `labels.json`."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


@dataclass(frozen=True)
class Labels:
    """The labels of the N readable images of a unit.

    Attributes:
        position: int32 [N], the index of each image in the unit.
        label: int32 [N], the top class.
        confidence: float32 [N], the probability of the top class.
        classes: int32 [N, K], the K most likely classes, the most likely first; None without soft labels.
        probabilities: float16 [N, K], the probabilities of `classes`.
        offset: int64 [N], the position of each image in its tar shard in bytes; None for a list.
        size: int64 [N], the size of each image in its tar shard in bytes; None for a list.
        images: the number of images of the unit, unreadable ones included.
        broken: name of each unreadable image, and the reason.
        leaks: name of each dropped image, the validation image that it copies, and how it was found.
    """

    position: np.ndarray
    label: np.ndarray
    confidence: np.ndarray
    classes: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    offset: np.ndarray | None = None
    size: np.ndarray | None = None
    images: int = 0
    broken: tuple[tuple[str, str], ...] = ()
    leaks: tuple[tuple[str, str, str], ...] = field(default=())

    def __len__(self) -> int:
        return len(self.label)


def label_path(folder: Path, number: int) -> Path:
    return folder / LABELS / f"{number:06d}.safetensors"


def selected_path(folder: Path, number: int) -> Path:
    return folder / SELECTED / f"{number:06d}.safetensors"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, replacing another one without finished units. All processes write the same bytes."""
    path = folder / MANIFEST
    while not check_manifest(folder, manifest):
        remove_parts(folder, MANIFEST)  # of a killed process, or of one that writes now too
        try:
            write_whole(path, manifest.as_json().encode())
        except FileNotFoundError:  # another process removed our partial file
            continue
    remove_parts(folder, MANIFEST)


def check_manifest(folder: Path, manifest: Manifest) -> bool:
    """Return whether the folder has this manifest. Another manifest is a ValueError if it has finished units."""
    path = folder / MANIFEST
    if not path.exists():
        return False
    found = difference(read_object(path), json.loads(manifest.as_json()))
    if found and any(whole(unit) for unit in (folder / LABELS).glob("*.safetensors")):
        raise ValueError(
            f"{folder} has labels that were made with other images or settings: {found}. Use the same ones, or "
            f"another folder"
        )
    return not found


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return a description of the first difference between two manifests, or "" if they are equal."""
    for key in ("precision", *now):  # precision first: it also changes the hash of the weights
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
    """Return a description of the first item in which two lists differ, counted from 1."""
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
    return f"{name} {number + 1}, {shown!r}, is {'missing' if len(before) > len(now) else 'new'}"


def read_manifest(folder: Path) -> Manifest:
    """Read and check the `labels.json` of a folder of labels; a missing or damaged one is a ValueError.

    >>> from pathlib import Path
    >>> from lambdanets.pseudo.files import Manifest, Unit, read_manifest, write_manifest
    >>> folder, units = Path("labels"), (Unit("images-0", 0, 3),)
    >>> write_manifest(folder, Manifest("images", "list", units, ("cat", "dog"), teachers=()))  # as `label` does
    >>> read_manifest(folder).class_names
    ('cat', 'dog')
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} has no {MANIFEST}: it must be a folder that `lambdanets pseudo label` wrote")
    try:
        data = read_object(path)
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        data.pop("max_broken", None)  # older versions wrote it; it may change when labelling resumes
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
    """Raise a ValueError if the folder has a label file of a unit that is not in the manifest."""
    paths = (folder / LABELS).glob("*.safetensors")
    beyond = sorted(path for path in paths if path.stem.isdecimal() and int(path.stem) >= len(manifest.units))
    if beyond:
        raise ValueError(
            f"{folder / MANIFEST} is damaged: it has {len(manifest.units)} units, but {beyond[0]} belongs to another "
            f"unit. Label again into another folder"
        )


def write_labels(folder: Path, number: int, labels: Labels) -> None:
    arrays = {
        name: value
        for name, value in asdict_shallow(labels).items()
        if isinstance(value, np.ndarray)  # optional columns that are None are not written
    }
    about = {"images": labels.images, "broken": labels.broken, "leaks": labels.leaks}
    write_arrays(label_path(folder, number), arrays, about)


def asdict_shallow(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def read_labels(folder: Path, number: int) -> Labels:
    """Read the labels of a unit and check them against the manifest.

    Args:
        folder: the folder that `lambdanets pseudo label` wrote.
        number: the index of the unit in the manifest.

    >>> import numpy as np
    >>> from pathlib import Path
    >>> from lambdanets.pseudo.files import Labels, Manifest, Unit, read_labels, write_labels, write_manifest
    >>> folder, units = Path("labels"), (Unit("images-0", 0, 3),)
    >>> write_manifest(folder, Manifest("images", "list", units, ("cat", "dog"), teachers=()))  # as `label` does
    >>> position, classes = np.arange(3, dtype=np.int32), np.array([0, 1, 1], np.int32)
    >>> write_labels(folder, 0, Labels(position, classes, np.array([0.9, 0.8, 0.4], np.float32), images=3))
    >>> labels = read_labels(folder, 0)
    >>> labels.label.tolist(), len(labels)
    ([0, 1, 1], 3)
    """
    arrays, about = read_columns(folder, read_manifest(folder), number)
    broken, leaks = (tuple(tuple(row) for row in about[name]) for name in ("broken", "leaks"))
    return Labels(**arrays, images=about["images"], broken=broken, leaks=leaks)


def read_columns(
    folder: Path, manifest: Manifest, number: int, columns: tuple[str, ...] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read some or all columns of a label file, and its header; invalid values are a ValueError."""
    path = label_path(folder, number)
    arrays, about = read_arrays(path, columns)
    if columns is None and not {"position", "label", "confidence"} <= arrays.keys() <= COLUMNS:
        raise ValueError(f"{path} is not a label file: it has the columns {', '.join(sorted(arrays))[:200]}")
    wrong = what_is_wrong(arrays, about, len(manifest.class_names), manifest.soft, manifest.units[number].images)
    if wrong:
        raise ValueError(f"{path} is damaged: {wrong}. {AGAIN}")
    return arrays, about


def read_selected(folder: Path, number: int, labels: int) -> dict[str, np.ndarray]:
    """Read which labels of a unit are selected ("row") and how often each is used ("repeats")."""
    path = selected_path(folder, number)
    columns, _ = read_arrays(path, ("row", "repeats"))
    wrong = what_is_wrong_with_rows(columns, labels)
    if wrong:
        raise ValueError(f"{path} is damaged: {wrong}. Run `lambdanets pseudo select` again")
    return columns


def write_arrays(path: Path, arrays: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    from safetensors.numpy import save

    # one metadata key: safetensors does not keep the order of several, so the bytes would vary
    digests = {name: digest(array) for name, array in arrays.items()} | {"": digest(json.dumps(about))}
    write_whole(path, save(arrays, {KEY: json.dumps(about | {DIGESTS: digests})}))


def read_arrays(path: Path, columns: tuple[str, ...] | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read some or all columns of a file, and its header, and compare them with their digests if it has any."""
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
        raise ValueError(
            f"{path} is missing: run `lambdanets pseudo label` again, which labels only missing units"
        ) from None
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}. {AGAIN}") from error


def whole(path: Path) -> bool:
    """Return whether a label file exists and is not truncated; other units are labelled again."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            return KEY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, with fsync. A full disk is an OSError with the free and the required space."""
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
            f"{path} cannot be written: {error.strerror} ({free:,} bytes free, {len(data):,} needed). Finished units "
            f"are kept: free some space and run the same command again"
        ) from error


def finished(folder: Path, manifest: Manifest) -> list[bool]:
    return [whole(label_path(folder, number)) for number in range(len(manifest.units))]


def every_label(
    folder: Path, manifest: Manifest, columns: tuple[str, ...] = ("label", "confidence")
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield the number and some columns of each labelled unit, one at a time, to limit the memory in use."""
    for number in range(len(manifest.units)):
        if label_path(folder, number).exists():
            yield number, read_columns(folder, manifest, number, columns)[0]
