"""Reading of tar files that may be damaged or malicious: members from headers alone, and unpacking with a limit."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lambdanets.data.places import cache_folder, fingerprint
from lambdanets.data.strings import printable
from lambdanets.files import whole_file

EXPANSION = 200  # limit of the compression ratio: padding of tiny files compresses well, gzip bombs by 1,000
TAR_MAGIC = b"ustar"  # in every header


@dataclass(frozen=True)
class Member:
    """A file in a tar."""

    name: str
    offset: int
    size: int


def check_whole(path: Path, shown: str, name: Path) -> None:
    """Raise an error if a file is not a complete shard. `name` is its final name, `shown` its name in messages."""
    if is_packed(name):
        for _ in unzipped(path, shown):
            pass
    else:
        for _ in members_of(path, shown):
            pass


def members_of(path: Path, shown: Path | str) -> Iterator[Member]:
    """Yield the regular files of a tar from its headers. Raises ValueError for a damaged tar, where tarfile would stop
    silently."""
    size, end = path.stat().st_size, 0
    try:
        with tarfile.open(path, "r:") as tar:
            while (info := tar.next()) is not None:
                if info.size < 0 or info.offset_data < end or info.offset_data + info.size > size:
                    raise ValueError(f"the header of {info.name!r} has size {info.size:,} at {info.offset_data:,}")
                tar.members = []  # type: ignore[attr-defined]  # keeps the list from growing with the shard
                end = info.offset_data + (info.size if info.isreg() else 0)
                if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                    yield Member(info.name, info.offset_data, info.size)
    except Exception as error:  # tarfile raises many types on damaged files
        raise ValueError(f"{shown} is damaged or not a tar file: {printable(str(error))}") from error
    with open(path, "rb") as file:
        file.seek(-(-end // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # a complete tar ends with zeros
            raise ValueError(f"{shown} is damaged or incomplete after byte {end:,}: create it again")
        before = b""
        while block := file.read(2**20):
            if TAR_MAGIC in before + block:  # tarfile does not see these: a lost header or concatenated tars
                raise ValueError(
                    f"{shown} has more files after its end at byte {end:,}: a header is damaged, or several tars were "
                    f"concatenated. Create it again, or keep them as separate files"
                )
            before = block[-len(TAR_MAGIC) :]


def unpacked(path: Path) -> Path:
    """Return the shard itself, or an unpacked copy in the cache folder if it is gzipped."""
    if not is_packed(path):
        return path
    copy = cache_folder() / "unpacked" / f"{fingerprint(path)}.tar"
    if copy.is_file():
        return copy
    try:
        with whole_file(copy) as file:
            for block in unzipped(path, path):
                file.write(block)
    except OSError as error:
        raise OSError(
            f"{path} cannot be unpacked into {copy.parent} ({error}): set LAMBDANETS_CACHE to a folder with more "
            "free space, or unpack it yourself"
        ) from error
    return copy


def is_packed(path: Path) -> bool:
    return path.suffix in (".gz", ".tgz")


def unzipped(path: Path, shown: Path | str) -> Iterator[bytes]:
    """Yield the content of a gzipped shard. Raises ValueError if it is damaged or its compression ratio is too high."""
    most = EXPANSION * path.stat().st_size + 2**26
    written = 0
    with gzip.open(path, "rb") as packed:
        while True:
            try:
                block = packed.read(2**20)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{shown} is damaged: {error}") from error
            written += len(block)
            if written > most:
                raise ValueError(f"{shown} unpacks to more than {EXPANSION} times its size, which is not allowed")
            if not block:
                return
            yield block
