"""Detection of validation images among the unlabelled ones: identical files and near-duplicates.

Identical files have the same hash of their bytes. Images that were scaled, recompressed or slightly changed have
perceptual hashes (`phash` of imagehash, 64 bits) that differ in a few bits.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

from lambdanets.data.decode import BrokenImageError, load, open_image, upright
from lambdanets.data.source import NoSplitError, Source, open_source
from lambdanets.data.strings import Strings

CONTENT_ONLY = -1


@dataclass(frozen=True)
class Hashes:
    """Names and hashes of the N guarded images."""

    names: Strings
    content: np.ndarray  # uint64 [N]
    perceptual: np.ndarray  # uint64 [N]
    distance: int

    def __len__(self) -> int:
        return len(self.content)

    def leak(self, data: bytes | np.ndarray, image: Image.Image | None) -> tuple[str, str] | None:
        """Return the name of the guarded image that this one copies, and how it was found; None if there is none."""
        same = np.flatnonzero(self.content == content_hash(data))
        if len(same):
            return self.names[int(same[0])], "the same file"
        if image is None or self.distance < 0 or not len(self):
            return None
        bits = np.bitwise_count(self.perceptual ^ perceptual_hash(image))
        nearest = int(bits.argmin())
        if bits[nearest] > self.distance:
            return None
        return self.names[nearest], f"it looks the same ({bits[nearest]} of 64 bits differ)"


def content_hash(data: bytes | np.ndarray) -> np.uint64:
    raw = data.tobytes() + repr(data.shape).encode() if isinstance(data, np.ndarray) else data
    return np.uint64(int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big"))


def perceptual_hash(image: Image.Image) -> np.uint64:
    import imagehash

    bits = imagehash.phash(load(upright(image), "RGB")).hash
    return np.packbits(bits.ravel()).view(">u8")[0].astype(np.uint64)


def open_guarded(where: str) -> Source:
    """Open the validation split of a dataset, or the whole dataset if it has none."""
    try:
        return open_source(where, split="validation")
    except NoSplitError:
        return open_source(where, split="train")


def hash_images(places: tuple[str, ...], distance: int) -> Hashes:
    """Return the hashes of all guarded images; an unreadable image has the hash of its bytes only."""
    check_library(distance)
    names: list[str] = []
    content: list[np.uint64] = []
    perceptual: list[np.uint64] = []
    for place in places:
        source = open_guarded(place)
        for index in range(len(source)):
            data = source.read(index)
            names.append(source.name(index))
            content.append(content_hash(data))
            perceptual.append(np.uint64(0) if distance < 0 else hash_of(data, content[-1]))
    return Hashes(Strings(names), np.array(content, np.uint64), np.array(perceptual, np.uint64), distance)


def hash_of(data: bytes | np.ndarray, otherwise: np.uint64) -> np.uint64:
    try:
        return perceptual_hash(Image.fromarray(data) if isinstance(data, np.ndarray) else open_image(data))
    except BrokenImageError:
        return otherwise


def check_library(distance: int) -> None:
    if distance < CONTENT_ONLY or distance > 32:
        raise ValueError(
            f"--guard-distance must be between 0 and 32 bits, or -1 to find identical files only, got {distance}"
        )
    if distance >= 0:
        try:
            import imagehash  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "finding near-duplicates needs imagehash: pip install imagehash, or use --guard-distance -1 to find "
                "identical files only"
            ) from error
