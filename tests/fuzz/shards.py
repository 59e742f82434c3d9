"""Tar shards, compared with a reader of tar headers that does not use `tarfile`."""

import gzip
import io
import json
import random
import tarfile
import zlib
from collections import Counter
from dataclasses import dataclass

from tests.fuzz import damage
from tests.fuzz.case import FuzzCase, silent
from tests.fuzz.made import picture_bytes

BLOCK = 512
CLASSES = ("ant", "bee", "cat")
IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp")
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


@dataclass
class Member:
    name: str
    data: bytes = b""
    type: bytes = tarfile.REGTYPE
    link: str = ""


def run(case: FuzzCase) -> bool:
    from lambdanets.data.command import DataCheck
    from lambdanets.data.source import distinct_splits

    draw = case.random
    members = base_members(draw)
    format, packed = draw.choice(FORMATS), draw.random() < 0.25
    said, data = "nothing", tar_of(members, format)
    if case.number >= 5:
        kind = draw.randrange(3)
        if kind == 0:
            said, members = draw.choice(MEMBERS)(draw, members)
            data = tar_of(members, format)
        elif kind == 1:
            said, data = draw.choice(BLOCKS)(draw, data)
    if packed:
        data = gzip.compress(data, mtime=0)
    if case.number >= 5 and said == "nothing":
        said, data = damage.damaged(draw, data)
    shard = "train-00000.tar" + ".gz" * packed
    case.note(f"{shard}: {said}")
    (case.folder / shard).write_bytes(data)
    classes = draw.random() < 0.7
    if classes:
        said_too, text = (
            draw_classes(draw) if case.number % 10 == 9 else ("", "".join(f"{n}\n" for n in CLASSES).encode())
        )
        case.note(said_too)
        (case.folder / "classes.txt").write_bytes(text)

    names = (shard, "classes.txt", str(case.folder))
    unpacked = data if not packed else gunzipped(data)
    expected = None if unpacked is None else reading(unpacked)
    found = case.command(DataCheck(str(case.folder), workers=1), names=names)
    if found.refused:
        if said in HARMLESS and not case.notes[1:]:
            raise silent(f"refused although it is whole: {found.err}")
        return False
    if expected is None:
        raise silent(f"of a shard that is damaged: {found.out}")
    source = case.attempt(distinct_splits, str(case.folder), names=names)["train"]
    images = [member for member in expected if is_image(member)]
    bytes_read = [source.read(i) for i in range(len(source))]
    if Counter(bytes_read) != Counter(member.data for member in images):
        raise silent(f"{len(images)} images are in the shard, {len(bytes_read)} were read: {found.out}")
    keys = Counter(split_name(member.name)[0] for member in images)
    labels: dict[str, Member] = {}
    for ending in ("json", "cls"):  # the second one decides
        labels |= {split_name(member.name)[0]: member for member in expected if split_name(member.name)[1] == ending}
    for index, data in enumerate(bytes_read):
        key = next(split_name(member.name)[0] for member in images if member.data == data)
        if keys[key] > 1 or Counter(bytes_read)[data] > 1:
            continue  # labels and images cannot be matched
        try:
            wanted = label_of(labels.get(key))
        except (ValueError, RecursionError):
            raise silent(f"{key} has no readable label") from None
        number = int(source.labels[index])
        read = "" if number < 0 else source.class_names[number]
        if read != wanted and str(number) != wanted:
            raise silent(f"{key} has the label {wanted!r}, read was {read!r}")
    return True


def is_image(member: Member) -> bool:
    key, extension = split_name(member.name)
    return extension.rpartition(".")[2] in IMAGES and not key.rpartition("/")[2].startswith("__")


def split_name(name: str) -> tuple[str, str]:
    folder, _, last = name.rpartition("/")
    stem, _, extension = last.partition(".")
    return f"{folder}/{stem}", extension.lower()


def label_of(member: Member | None) -> str:
    if member is None:
        return ""
    if member.name.endswith("json"):
        content = json.loads(member.data)
        content = (
            content
            if not isinstance(content, dict)
            else next((content[k] for k in ("label", "cls", "class", "target") if k in content), "")
        )
        return str(content)
    return str(int(member.data)) if int(member.data) >= 0 else ""


def reading(data: bytes) -> list[Member] | None:
    """Return the regular files of a tar, or None if it is damaged or truncated."""
    found: list[Member] = []
    at, name = 0, None
    while True:
        block = data[at : at + BLOCK]
        if len(block) < BLOCK:
            return None
        if not any(block):
            return found if b"ustar" not in data[at:] else None  # images after the end are lost
        checksum, size = number(block[148:156]), number(block[124:136])
        sums = sum(block[:148] + b" " * 8 + block[156:])
        if checksum != sums or size is None or size < 0 or at + BLOCK + size > len(data):
            return None
        kind, content = block[156:157], data[at + BLOCK : at + BLOCK + size]
        at += BLOCK + (-(-size // BLOCK) * BLOCK if kind not in (b"1", b"2", b"3", b"4", b"5", b"6") else 0)
        if kind == b"L":
            name = content.rstrip(b"\0").decode("utf-8", "surrogateescape")
        elif kind == b"x":
            name = pax_path(content) or name
        elif kind in (b"0", b"\0"):
            prefix = text(block[345:500]) if block[257:263] == b"ustar\0" else ""
            found.append(Member(name or (f"{prefix}/" if prefix else "") + text(block[:100]), content))
            name = None
        else:
            name = None


def number(field: bytes) -> int | None:
    if field[0] & 0x80:
        return int.from_bytes(field, "big", signed=True) if field[0] == 0xFF else int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return None


def text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def pax_path(content: bytes) -> str | None:
    for line in content.split(b"\n"):
        key, equals, value = line.partition(b" ")[2].partition(b"=")
        if equals and key == b"path":
            return value.decode("utf-8", "surrogateescape")
    return None


def gunzipped(data: bytes) -> bytes | None:
    found = b""
    while data:
        unpacking = zlib.decompressobj(31)
        try:
            found += unpacking.decompress(data)
        except zlib.error:
            return None
        if not unpacking.eof:
            return None
        data = unpacking.unused_data.lstrip(b"\0")
    return found


def base_members(draw: random.Random) -> list[Member]:
    how = draw.choice(("cls", "json", "both"))
    members = []
    for i in range(6):
        members.append(Member(f"{i:03d}.png", picture_bytes(i, "PNG")))
        if how != "json":
            members.append(Member(f"{i:03d}.cls", str(i % 3).encode()))
        if how != "cls":
            members.append(Member(f"{i:03d}.json", json.dumps({"label": i % 3, "x": [1]}).encode()))
    return members


def tar_of(members: list[Member], format: int) -> bytes:
    if any(len(member.name) > 99 for member in members):
        format = tarfile.PAX_FORMAT
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.size, info.type, info.linkname = len(member.data), member.type, member.link
            if member.type != tarfile.REGTYPE:
                info.size = 0
            tar.addfile(info, io.BytesIO(member.data) if member.type == tarfile.REGTYPE else None)
    return file.getvalue()


# Damage ---------------------------------------------------------------------------------------------------------------

HARMLESS = ("nothing", "a directory first", "a note first", "a long name")


def label(draw: random.Random, members: list[Member]) -> tuple[str, list[Member]]:
    """Write an invalid label."""
    values = (
        b"",
        b" ",
        b"x",
        b"-1",
        b"-2",
        b"3",
        b"99999999999",
        b"1.5",
        b"ant",
        b"1" * 400,
        b"\xff\xfe",
        b"null",
        b"true",
    )
    one = draw.choice([member for member in members if not member.name.endswith("png")])
    one.data = draw.choice(values) if one.name.endswith("cls") else draw_json(draw)
    return f"{one.name} holds {one.data[:30]!r}", members


def draw_json(draw: random.Random) -> bytes:
    values = ({"label": v} for v in damage.VALUES)
    return draw.choice(
        [
            b"",
            b"{",
            b"[" * 10_000,
            *(damage.as_text(v).encode("utf-8", "surrogatepass") for v in (*values, *damage.VALUES)),
        ]
    )


def order(draw: random.Random, members: list[Member]) -> tuple[str, list[Member]]:
    kind = draw.randrange(3)
    if kind == 0:
        draw.shuffle(members)
        return "members in any order", members
    if kind == 1:
        return "labels last", sorted(members, key=lambda member: not member.name.endswith("png"))
    return "labels first", sorted(members, key=lambda member: member.name.endswith("png"))


def gone(draw: random.Random, members: list[Member]) -> tuple[str, list[Member]]:
    one = members.pop(draw.randrange(len(members)))
    return f"without {one.name}", members


def twice(draw: random.Random, members: list[Member]) -> tuple[str, list[Member]]:
    one = draw.choice(members)
    members.insert(draw.randrange(len(members) + 1), Member(one.name, one.data))
    return f"{one.name} twice", members


def name(draw: random.Random, members: list[Member]) -> tuple[str, list[Member]]:
    one = draw.choice(members)
    ending = one.name.partition(".")[2]
    names = ("../../x", "/tmp/x", "a/../../b", "\n", "\x1b[31m", "", "x" * 300, "__x", ".x", "a.b", "x/", "ä")
    before, one.name = one.name, f"{draw.choice(names)}.{ending}"
    return f"{before} is called {one.name[:30]!r}", members


def kind(draw: random.Random, members: list[Member]) -> tuple[str, list[Member]]:
    """Add a link, a device or a folder."""
    one = draw.choice(members)
    one.type = draw.choice(
        (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"S", b"g")
    )
    one.link = "/etc/passwd"
    return f"{one.name} is of type {one.type!r}", members


def more(draw: random.Random, members: list[Member]) -> tuple[str, list[Member]]:
    said, one = draw.choice(
        (
            ("a directory first", Member("folder", type=tarfile.DIRTYPE)),
            ("a note first", Member("README", b"hello")),
            ("a long name", Member("x" * 150 + "/README", b"hello")),
            ("a pickle", Member("000.pkl", b"\x80\x04N.")),
            ("numpy", Member("000.npy", b"\x93NUMPY")),
            ("a shard", Member("inside.tar", bytes(1024))),
        )
    )
    return said, [one, *members]


def content(draw: random.Random, members: list[Member]) -> tuple[str, list[Member]]:
    one = draw.choice([member for member in members if member.name.endswith("png")])
    said, one.data = damage.damaged(draw, one.data)
    return f"{one.name}: {said}", members


MEMBERS = (label, label, order, gone, twice, name, name, kind, kind, more, content)


def header(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Change a field of a header, with a correct checksum."""
    at = draw.choice([at for at in range(0, len(data), BLOCK) if data[at + 257 : at + 262] == b"ustar"])
    start, size, values = draw.choice(
        (
            (
                124,
                12,
                (
                    b"00000000000\0",
                    b"77777777777\0",
                    b"\x80" + bytes(10) + b"\1",
                    b"\xff" * 12,
                    b"-0000000001\0",
                    b"x" * 12,
                ),
            ),
            (156, 1, (b"1", b"2", b"3", b"5", b"7", b"S", b"L", b"K", b"x", b"g", b"Z", b"\0")),
            (0, 100, (bytes(100), b"../../x.png" + bytes(89), b"\xff" * 100)),
            (257, 8, (bytes(8), b"ustar  \0", b"\xff" * 8)),
            (100, 8, (b"\xff" * 8, b"        ")),
        )
    )
    value = draw.choice(values)
    block = bytearray(data[at : at + BLOCK])
    block[start : start + size] = value
    block[148:156] = b"%06o\0 " % sum(block[:148] + b" " * 8 + block[156:])
    return f"bytes {start} of the header at {at} are {value[:12]!r}", data[:at] + bytes(block) + data[at + BLOCK :]


def blocks(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    """Remove, duplicate, zero or exchange blocks."""
    count = len(data) // BLOCK
    at = draw.randrange(count) * BLOCK
    block = data[at : at + BLOCK]
    kind = draw.randrange(4)
    if kind == 0:
        return f"block at {at} removed", data[:at] + data[at + BLOCK :]
    if kind == 1:
        return f"block at {at} twice", data[:at] + block + data[at:]
    if kind == 2:
        return f"block at {at} is 0", data[:at] + bytes(BLOCK) + data[at + BLOCK :]
    keep = draw.randrange(count) * BLOCK
    return f"cut off after {keep} of {len(data)} bytes, on a block", data[:keep]


def joined(draw: random.Random, data: bytes) -> tuple[str, bytes]:
    return "two tars in a row", data + tar_of([Member("late.png", picture_bytes(9, "PNG"))], tarfile.USTAR_FORMAT)


BLOCKS = (header, header, header, blocks, blocks, blocks, joined)


def draw_classes(draw: random.Random) -> tuple[str, bytes]:
    data = draw.choice(
        (
            *(b"", b"\n", b"ant\n", b"ant\nant\nant\n", b"ant\n\nbee\ncat\n", b"0\tant\n2\tbee\n1\tcat\n", b"\xff\xfe"),
            *(b"ant\0\nbee\ncat\n", b"ant\rbee\rcat", b"x" * 100_000 + b"\nbee\ncat\n", b"ant\nbee\ncat\ncat\n"),
        )
    )
    return f"classes.txt holds {data[:30]!r}", data
