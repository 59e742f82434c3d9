"""Tar files that may be damaged or hostile: their members by headers alone, and gzipped ones unpacked with a limit."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lambdanets.data.places import cache_folder, fingerprint
from lambdanets.data.strings import printable
from lambdanets.files import whole_file

EXPANSION = 200  # a gzipped shard may grow by so much: padding of tiny files shrinks well, bombs shrink by 1,000
TAR_MAGIC = b"ustar"  # of every header


@dataclass(frozen=True)
class Member:
    """One file of a tar."""

    name: str
    offset: int
    size: int


def check_whole(path: Path, shown: str, name: Path) -> None:
    """Refuse a file that is not a complete shard. `name` is what it will be called, `shown` what messages call it."""
    if is_packed(name):
        for _ in unzipped(path, shown):
            pass
    else:
        for _ in members_of(path, shown):
            pass


def members_of(path: Path, shown: Path | str) -> Iterator[Member]:
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
        before = b""
        while block := file.read(2**20):
            if TAR_MAGIC in before + block:  # what tarfile does not show: a header is lost, or there are two tars
                raise ValueError(
                    f"{shown} has more files behind its end at byte {end:,}: a header is damaged, or several tars were "
                    f"joined. Make it again, or keep them apart"
                )
            before = block[-len(TAR_MAGIC) :]


def unpacked(path: Path) -> Path:
    """The shard itself, or an unpacked copy in the cache folder."""
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
            "room, or unpack it yourself"
        ) from error
    return copy


def is_packed(path: Path) -> bool:
    return path.suffix in (".gz", ".tgz")


def unzipped(path: Path, shown: Path | str) -> Iterator[bytes]:
    """The content of a gzipped shard. A ValueError where it is damaged or grows beyond all measure."""
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
                raise ValueError(f"{shown} unpacks to more than {EXPANSION} times its size: refused")
            if not block:
                return
            yield block
