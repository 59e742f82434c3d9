"""Folders of images: one for each class, perhaps inside one for each split."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lambdanets.data.decode import EXTENSIONS
from lambdanets.data.source import SPLITS, FileSource, no_split

MOST_OTHERS, MOST_OTHERS_PER_IMAGE = 30_000, 10  # files and folders that are not images, before a walk gives up


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


@dataclass
class Walked:
    """Counts what a walk has found, and ends one that went into a disk or a home folder instead of a data set."""

    where: Path
    images: int = 0
    others: int = 0  # files that are not images, and folders

    def add(self, images: int, others: int) -> None:
        self.images += images
        self.others += others
        if self.others > MOST_OTHERS and self.others > MOST_OTHERS_PER_IMAGE * self.images:
            raise ValueError(
                f"{self.where} does not look like a folder of images: {self.others:,} other files and folders and "
                f"{self.images:,} images so far. Choose the folder that holds the class folders"
            )


def images_below(folder: Path, walked: Walked | None = None) -> list[str]:
    """Paths of image files below a folder, relative to it, sorted; links are followed once."""
    walked = walked or Walked(folder)
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not name.startswith(".")]
        relative = os.path.relpath(place, folder)
        images = [name for name in files if is_image(name)]
        walked.add(len(images), len(folders) + len(files) - len(images))
        found += [name if relative == "." else os.path.join(relative, name) for name in images]
    return sorted(found)


def class_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def split_folders(folder: Path) -> dict[str, Path]:
    """Which folder holds which split, where there are folders with such names; else nothing."""
    present = {name.lower(): name for name in class_folders(folder)}
    found = {}
    for split, names in SPLITS.items():
        name = next((present[n] for n in names if n in present), None)
        if name is not None:
            found[split] = folder / name
    only_splits = len(present) == len(set(found.values()))
    # "train" may be a class too, beside "bus": then it holds images and no folders.
    return found if only_splits or ("train" in found and class_folders(found["train"])) else {}


def open_folder(folder: Path, split: str) -> FileSource:
    """A folder of class folders, or of splits that hold such; images without class folders are unlabelled."""
    splits = split_folders(folder)
    if not splits:
        if split != "train":
            raise no_split(folder, split, ["train"])
        return folder_source(folder, folder, class_folders(folder))
    if split not in splits:
        raise no_split(folder, split, sorted(splits))
    # The classes are the training set's, so that a class without validation images does not shift the others.
    return folder_source(folder, splits[split], class_folders(splits.get("train", splits[split])))


def folder_source(root: Path, folder: Path, class_names: Sequence[str]) -> FileSource:
    here = class_folders(folder)
    unknown = [name for name in here if name not in class_names]
    if unknown:
        raise ValueError(f"{folder} has the class {unknown[0]!r}, which the training images do not have")
    paths: list[str] = []
    labels: list[int] = []
    walked = Walked(folder)
    for label, name in enumerate(class_names):
        if name in here:
            inside = images_below(folder / name, walked)
            paths += [os.path.join(name, path) for path in inside]
            labels += [label] * len(inside)
    if not here:
        paths = [name for name in sorted(os.listdir(folder)) if is_image(name)]
        labels = [-1] * len(paths)
    if not paths:
        raise ValueError(
            f"{folder} has no images ({', '.join(EXTENSIONS)}): they lie in a folder for each class, or, where no "
            f"labels are needed, in the folder itself"
        )
    if folder != root:
        paths = [os.path.join(folder.name, path) for path in paths]
    return FileSource(root, paths, labels, class_names)
