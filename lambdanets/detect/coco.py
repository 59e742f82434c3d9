"""Where the pictures and annotations of a data set are, and what reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lambdanets.data.shards import SHARDS
from lambdanets.data.source import SPLITS, NoSplitError, place_of
from lambdanets.detect import shapes
from lambdanets.detect.annotations import Masks, read_scenes
from lambdanets.detect.images import ImageFiles, open_images
from lambdanets.detect.scenes import Category, Scenes

LAYOUTS = (  # of annotation files, for a word such as "train" or "val"
    "instances_{}*.json",
    "annotations/instances_{}*.json",
    "{}.json",
    "annotations/{}*.json",
    "{}/_annotations.coco.json",
    "{}/*.json",
)
FOLDERS = ("{}", "{}20*", "images/{}", "images/{}20*", "images")  # of pictures


@dataclass(frozen=True, eq=False)
class DetectionSet:
    """Scenes and what reads their pictures: a source for `lambdanets.data`'s loader."""

    scenes: Scenes
    files: ImageFiles | shapes.Shapes

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.scenes.class_names

    @property
    def labels(self) -> np.ndarray:
        return np.full(len(self.scenes), -1, np.int64)

    def __len__(self) -> int:
        return len(self.scenes)

    def name(self, index: int) -> str:
        return self.scenes.pictures[index].name

    def read(self, index: int) -> bytes | np.ndarray:
        return self.files.read(self.scenes.pictures[index].name)


def open_set(
    where: str,
    split: str = "train",
    *,
    images: str | None = None,
    masks: Masks = "auto",
    categories: Sequence[Category] = (),
) -> DetectionSet:
    """The pictures of a split.

    `where` is "shapes" (made from a seed, nothing to download), a COCO file with `images` beside it (a folder or a
    tar), or a folder: instances_train.json with train.tar or train/; annotations/instances_train2017.json with
    train2017/; train/_annotations.coco.json among its pictures.
    """
    if where == shapes.NAME:
        made = shapes.Shapes(split)
        scenes = made.scenes()
        return DetectionSet(replace(scenes, masks=scenes.masks and masks != "no"), made)
    path = place_of(where)
    if path.is_file():
        if images is None and not has_pictures(path.parent):
            raise ValueError(f"{where}: where are its pictures? Give a folder or a tar as data.images")
        place: Path | list[Path] = Path(images).expanduser() if images else path.parent
    elif path.is_dir():
        path, place = find_split(path, split)
        if images is not None:
            place = Path(images).expanduser()
    else:
        raise ValueError(f"{where}: no such folder or COCO file, nor {shapes.NAME!r}, the set that is made from a seed")
    files = open_images(place)
    return DetectionSet(read_scenes(path, files, masks=masks, categories=categories), files)


def splits_of(where: str) -> tuple[str, ...]:
    """Which of train, validation and test a place has; where one file serves as two of them, the first."""
    if where == shapes.NAME:
        return tuple(SPLITS)
    path = place_of(where)
    if not path.is_dir():
        return ("train",)
    files = {split: annotations_of(path, split) for split in SPLITS}
    return tuple(
        split for i, (split, file) in enumerate(files.items()) if file is not None and file not in [*files.values()][:i]
    )


def annotations_of(folder: Path, split: str) -> tuple[str, Path] | None:
    """The word for a split that a folder uses, and its annotations."""
    for word in SPLITS[split]:
        for layout in LAYOUTS:
            found = sorted(p for p in folder.glob(layout.format(word)) if p.is_file())
            if found:
                return word, found[0]
    return None


def find_split(folder: Path, split: str) -> tuple[Path, Path | list[Path]]:
    """Annotations and pictures of a split."""
    found = annotations_of(folder, split)
    if found is None:
        there = [name for name in SPLITS if annotations_of(folder, name)]
        raise NoSplitError(
            f"{folder} has no {split} annotations"
            + (f", only {', '.join(there)}" if there else ": expected instances_train.json, or another COCO layout")
        )
    word, path = found
    tars = sorted(p for p in folder.glob(f"{word}*") if p.name.endswith(SHARDS) and p.is_file())
    if tars:
        return path, tars
    for layout in FOLDERS:
        for place in sorted(folder.glob(layout.format(word))):
            if place.is_dir():
                return path, place
    return path, path.parent


def has_pictures(folder: Path) -> bool:
    return any(p.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp") for p in folder.iterdir())
