"""Datasets as folders: one folder per class, optionally inside one folder per split."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lambdanets.data.decode import EXTENSIONS
from lambdanets.data.source import SPLITS, FileSource, no_split
from lambdanets.data.strings import encodable, printable

# Image formats that are not supported: such files are counted and reported.
UNREAD = (
    *(".heic", ".heif", ".avif", ".tif", ".tiff", ".jp2", ".j2k", ".jxl", ".svg", ".ico", ".psd", ".tga", ".apng"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".raf", ".rw2", ".raw", ".exr", ".hdr", ".dcm", ".ppm", ".pgm"),
    *(".pbm", ".pnm", ".pcx", ".jpe", ".jif", ".dib", ".mpo"),
)
MOST_OTHERS, MOST_OTHERS_PER_IMAGE = 30_000, 10  # other files and folders after which the search stops


def is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


@dataclass
class Walked:
    """Counts the files that a search finds, and stops a search of a disk or a home folder."""

    where: Path
    images: int = 0
    others: int = 0  # files that are not images, and folders
    unread: Counter[str] = field(default_factory=Counter)  # image files of other formats, by extension
    links: list[str] = field(default_factory=list)  # links that were not followed

    def add(self, images: int, others: list[str], folders: int) -> None:
        self.images += images
        self.others += len(others) + folders
        self.unread.update(extension for name in others if (extension := extension_of(name)) in UNREAD)
        if self.others > MOST_OTHERS and self.others > MOST_OTHERS_PER_IMAGE * self.images:
            raise ValueError(
                f"{self.where} does not look like a folder of images: {self.others:,} other files and folders and "
                f"{self.images:,} images so far. Choose the folder that contains the class folders"
            )

    def notes(self) -> tuple[str, ...]:
        """Return sentences about files that were left out, without a full stop."""
        found = unread_notes(self.where, self.unread)
        if self.links:
            links = f"{len(self.links):,} links were" if len(self.links) > 1 else "1 link was"
            found.append(
                f"{links} not followed, because the target contains this folder or belongs to another class: "
                f"{printable(self.links[0])}{' and others' if len(self.links) > 1 else ''}"
            )
        return tuple(found)


def unread_notes(where: Path, unread: Counter[str]) -> list[str]:
    """Return a sentence about image files in unsupported formats, by extension, if there are any."""
    if not unread:
        return []
    counts = ", ".join(f"{extension} ({count:,})" for extension, count in unread.most_common())
    files = "1 file was" if unread.total() == 1 else f"{unread.total():,} files were"
    return [f"{files} not read in {where}: {counts}. Convert them to JPEG or PNG"]


def stray_notes(folder: Path) -> list[str]:
    """Return a sentence about images next to the class folders, which have no class, if there are any."""
    stray = sorted(entry.name for entry in os.scandir(folder) if is_image(entry.name) and not entry.is_dir())
    if not stray:
        return []
    images = "1 image is" if len(stray) == 1 else f"{len(stray):,} images are"
    used = "is" if len(stray) == 1 else "are"
    first = "" if len(stray) == 1 else "the first is "
    return [f"{images} in {folder} outside the class folders and {used} not used: {first}{printable(stray[0])}"]


def extension_of(name: str) -> str:
    return "" if name.startswith(".") else os.path.splitext(name)[1].lower()


class Boundary:
    """Decides which links are followed: not to folders that contain a class or all classes, nor into another class."""

    def __init__(self, folder: Path, class_names: Sequence[str] = ()) -> None:
        self.classes: dict[str, str] = {}  # real path to class name
        for name in class_names:
            real = os.path.realpath(folder / name)
            if real in self.classes:
                raise ValueError(
                    f"{folder}: the classes {self.classes[real]!r} and {name!r} are the same folder; remove the link"
                )
            self.classes[real] = name
        place = Path(os.path.realpath(folder))
        around = {str(place), *(str(above) for above in place.parents)}
        for real in around & set(self.classes):
            raise ValueError(
                f"{folder}: the class {self.classes[real]!r} is a link to a folder that contains this one; remove the "
                "link"
            )
        # "/a/b" is inside "/a" and "/".
        self.holding = around | {str(above) for real in self.classes for above in Path(real).parents}
        for real, name in self.classes.items():
            inside = next((c for above in Path(real).parents if (c := self.classes.get(str(above))) is not None), None)
            if inside is not None:
                raise ValueError(f"{folder}: the class {name!r} lies inside the class {inside!r}; remove the link")

    def allows(self, link: str, own: str) -> bool:
        """Return whether a link in the class whose real path is `own` may be followed."""
        real = os.path.realpath(link)
        owner = next((str(p) for p in (Path(real), *Path(real).parents) if str(p) in self.classes), own)
        return real not in self.holding and owner == own


def images_below(folder: Path, walked: Walked | None = None, boundary: Boundary | None = None) -> list[str]:
    """Return the sorted paths of all image files in a folder and its subfolders, relative to the folder.

    Linked folders are followed once, if `boundary` allows; by default not to folders that contain this one.
    """
    walked = walked or Walked(folder)
    boundary = boundary or Boundary(folder)
    own = os.path.realpath(folder)
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        inside: list[tuple[bool, str]] = []  # links last, so that linked folders are listed by their real name
        for name in folders:
            path = os.path.join(place, name)
            if name.startswith("."):
                continue
            link = os.path.islink(path)
            if link and not boundary.allows(path, own):
                walked.links.append(path)
                continue
            inside.append((link, name))
        folders[:] = [name for _, name in sorted(inside)]
        relative = os.path.relpath(place, folder)
        images = [name for name in files if is_image(name)]
        walked.add(len(images), [name for name in files if not is_image(name)], len(folders))
        found += [name if relative == "." else os.path.join(relative, name) for name in images]
    return sorted(found)


def class_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def split_folders(folder: Path) -> dict[str, Path]:
    """Return the folder of each split; empty if the folder has no folders with names of splits."""
    present = {name.lower(): name for name in class_folders(folder)}
    found = {}
    for split, names in SPLITS.items():
        name = next((present[n] for n in names if n in present), None)
        if name is not None:
            found[split] = folder / name
    only_splits = len(present) == len(set(found.values()))
    # "train" may also be a class, like "bus": then it contains images and no folders.
    return found if only_splits or ("train" in found and class_folders(found["train"])) else {}


def open_folder(folder: Path, split: str) -> FileSource:
    """Open a folder of class folders, or of splits with class folders; images without class folders are unlabelled."""
    splits = split_folders(folder)
    if not splits:
        if split != "train":
            raise no_split(folder, split, ["train"])
        return folder_source(folder, folder, class_folders(folder))
    if split not in splits:
        raise no_split(folder, split, sorted(splits))
    # Use the classes of the training set, so that a class without validation images does not shift the others.
    return folder_source(folder, splits[split], class_folders(splits.get("train", splits[split])))


def folder_source(root: Path, folder: Path, class_names: Sequence[str]) -> FileSource:
    here = class_folders(folder)
    for name in class_names:
        if not encodable(name):
            raise ValueError(f"{root}: the name of the class folder {printable(name)} is not UTF-8. Rename the folder")
    unknown = [name for name in here if name not in class_names]
    if unknown:
        raise ValueError(f"{folder} has the class {unknown[0]!r}, which the training images do not have")
    paths: list[str] = []
    labels: list[int] = []
    walked, boundary = Walked(folder), Boundary(folder, here)
    for label, name in enumerate(class_names):
        if name in here:
            inside = images_below(folder / name, walked, boundary)
            paths += [os.path.join(name, path) for path in inside]
            labels += [label] * len(inside)
    if not here:
        names = sorted(os.listdir(folder))
        paths = [name for name in names if is_image(name)]
        walked.add(len(paths), [name for name in names if not is_image(name)], 0)
        labels = [-1] * len(paths)
    if not paths:
        raise ValueError(
            f"{folder} has no images ({', '.join(EXTENSIONS)}). Put them into one folder per class, or into the folder "
            f"itself if no labels are needed{''.join('. ' + note for note in walked.notes())}"
        )
    if folder != root:
        paths = [os.path.join(folder.name, path) for path in paths]
    stray = stray_notes(folder) if here else []
    return FileSource(root, paths, labels, class_names, (*walked.notes(), *stray))
