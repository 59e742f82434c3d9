"""Image files of a dataset, in a folder or in tar files that are read without unpacking."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lambdanets.data.decode import LIMITS, BrokenImageError
from lambdanets.data.folders import images_below, is_image
from lambdanets.data.source import read_file
from lambdanets.data.tars import members_of, unpacked


class ImageFiles(Protocol):
    """Encoded images by name. Only listed names can be read, so annotations cannot name other files.

    >>> from pathlib import Path
    >>> from PIL import Image
    >>> from lambdanets.detect.images import open_images
    >>> Path("images").mkdir()
    >>> Image.new("RGB", (8, 8)).save("images/a.png")
    >>> files = open_images(Path("images"))
    >>> files.find("train/a.png"), files.find("b.png")
    ('a.png', None)
    >>> contents = files.read("a.png")
    """

    def find(self, name: str) -> str | None:
        """Return the listed name of an image from its name in annotations, or None if it is missing.

        A name in another folder matches if its last part is unique.
        """
        ...

    def read(self, name: str) -> bytes:
        """Return the contents of a file."""
        ...


class Names:
    """The listed names, and their last parts where these are unique."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)
        self.short: dict[str, str | None] = {}
        for name in names:
            last = os.path.basename(name)
            self.short[last] = None if last in self.short else name

    def find(self, name: str) -> str | None:
        if name in self.names:
            return name
        return self.short.get(os.path.basename(name.replace("\\", "/")))


class FolderImages:
    """The images in a folder and its subfolders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = Names(images_below(folder))

    def find(self, name: str) -> str | None:
        return self.names.find(os.path.normpath(name) if name else name)

    def read(self, name: str) -> bytes:
        if name not in self.names.names:
            raise BrokenImageError(f"{name} is not among the images of {self.folder}")
        return read_file(self.folder / name)


class TarImages:
    """The images in tar files. Compressed files are decompressed once, into the cache folder."""

    def __init__(self, tars: Sequence[Path]) -> None:
        self.places: dict[str, tuple[str, int, int]] = {}
        for tar in tars:
            path = unpacked(tar)
            for member in members_of(path, tar):
                if is_image(os.path.basename(member.name)):
                    self.places[member.name.removeprefix("./")] = (str(path), member.offset, member.size)
        self.names = Names(list(self.places))
        self.handles: dict[str, int] = {}

    def find(self, name: str) -> str | None:
        return self.names.find(name)

    def read(self, name: str) -> bytes:
        path, offset, size = self.places[name]
        if size > LIMITS.bytes:
            raise BrokenImageError(f"{size:,} bytes are more than the limit of {LIMITS.bytes:,}")
        if path not in self.handles:
            self.handles[path] = os.open(path, os.O_RDONLY)
        data = os.pread(
            self.handles[path], size, offset
        )  # pread has no file position: forked workers may share the handle
        if len(data) < size:
            raise BrokenImageError(f"the tar ends after {len(data):,} of {size:,} bytes")
        return data

    def __del__(self) -> None:
        for handle in getattr(self, "handles", {}).values():
            os.close(handle)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"handles": {}}


def open_images(where: Path | Sequence[Path]) -> ImageFiles:
    """Open a folder, a tar file, or several tar files."""
    if isinstance(where, Path) and where.is_dir():
        return FolderImages(where)
    tars = [where] if isinstance(where, Path) else list(where)
    for tar in tars:
        if not tar.is_file():
            raise ValueError(f"{tar}: no such folder or tar of images")
    return TarImages(tars)
