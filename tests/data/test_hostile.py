"""Files that want to harm: nothing runs, nothing is written elsewhere, nothing takes all memory, and each says so."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from lambdanets.data import decode as decoding
from lambdanets.data import tars
from lambdanets.data.broken import BrokenImages
from lambdanets.data.decode import BrokenImageError, Limits, decode
from lambdanets.data.loader import Loader, LoaderOptions
from lambdanets.data.remote import expand, fetch
from lambdanets.data.source import open_source, read_file
from lambdanets.data.transforms import training
from tests.data.helpers import encoded, jpeg, picture, samples, write_folder, write_tar


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["00000.pkl", "00000.pyd", "00000.cls.pickle", "00000.pth", "00000.npy"])
def test_a_pickle_in_a_shard_is_refused(tmp_path: Path, name: str):
    mark = tmp_path / "mark"
    write_tar(tmp_path / "x.tar", [("00000.jpg", jpeg(0)), (name, pickle.dumps(Trap(mark)))])
    with pytest.raises(ValueError, match=f"{name}: pickles are refused, because they can run code"):
        open_source(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["00000.cls", "00000.json", "00000.jpg"])
def test_a_pickle_by_another_name_is_not_run(tmp_path: Path, name: str):
    mark = tmp_path / "mark"
    members = [("00000.jpg", jpeg(0)), (name, pickle.dumps(Trap(mark)))][name.endswith("jpg") :]
    write_tar(tmp_path / "x.tar", members)
    with pytest.raises(ValueError, match=r"label|not a readable"):
        decode(open_source(tmp_path).read(0))  # type: ignore[arg-type]
    assert not mark.exists()


@pytest.mark.parametrize(
    "url",
    [
        "pipe:touch {mark}",
        "pipe:touch {mark}; cat x-{{0..3}}.tar",
        "http://host/x.tar{{,}} pipe:touch {mark}",
        "file:///etc/passwd",
        "gs://bucket/x.tar",
        "hf://datasets/x.tar",
        "http:///x.tar",
        "ftp://host/x.tar",
    ],
)
def test_only_web_urls_are_opened(tmp_path: Path, url: str):
    mark = tmp_path / "mark"
    with pytest.raises(ValueError, match=r"refused|spaces"):
        open_source(url.format(mark=mark))
    assert not mark.exists()


def test_a_brace_list_cannot_bring_in_a_command(tmp_path: Path):
    with pytest.raises(ValueError, match=r"pipe:.*refused"):
        expand("{http://host/a.tar,pipe:true}")
    with pytest.raises(ValueError, match="refused"):
        fetch("pipe:true")


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds almost nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packed = zlib.compress(b"\0" * 100_000, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "size", [(9_000, 9_000), (12_000, 12_000), (2**31 - 1, 2**31 - 1), (2**20, 1000), (0, 0), (65_501, 1), (1, 2**26)]
)
def test_a_decompression_bomb_is_refused_before_it_unpacks(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
):
    monkeypatch.setattr(decoding, "load", lambda image: pytest.fail("it was decoded"))
    with pytest.raises(BrokenImageError, match=r"pixels|not a readable"):
        decode(png_of(*size))
    assert not recwarn.list


def gif_of(screen: tuple[int, int], frame: tuple[int, int]) -> bytes:
    """A GIF that says so: the size of its canvas, and of its first frame."""
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0xF0, 0, 0) + bytes(6)
    return head + b"," + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x4c\x01\x00;"


def bmp_of(width: int, height: int) -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + header


@pytest.mark.parametrize(
    "data",
    [
        *(gif_of((60_000, 60_000), (1, 1)), gif_of((1, 1), (60_000, 60_000)), gif_of((0, 0), (65_535, 65_535))),
        *(bmp_of(60_000, 60_000), bmp_of(2**31 - 1, 1), bmp_of(1, -(2**31)), bmp_of(9_000, -9_000)),
    ],
)
def test_gif_and_bmp_bombs_are_refused(data: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "decoded", lambda image: pytest.fail("it was decoded"))
    with pytest.raises(BrokenImageError, match=r"pixels|not a readable"):
        decode(data)


def test_limits_are_the_callers():
    with pytest.raises(BrokenImageError, match="40 x 32 pixels, more than the limit of 1,000"):
        decode(jpeg(0), Limits(pixels=1000))
    with pytest.raises(BrokenImageError, match="40 x 32 pixels, more than the limit of 39 a side"):
        decode(jpeg(0), Limits(side=39))
    with pytest.raises(BrokenImageError, match="bytes, more than the limit of 100"):
        decode(jpeg(0), Limits(bytes=100))


BROKEN = {
    "empty": b"",
    "garbage": bytes(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)),
    "text": b"<html>404</html>",
    "tiff": encoded(picture(0), "TIFF"),
    "truncated gif": encoded(picture(0).convert("P"), "GIF")[:300],
    "truncated bmp": encoded(picture(0), "BMP")[:300],
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "truncated jpeg": jpeg(0)[:400],
    "header of a jpeg": jpeg(0)[:20],
    "truncated png": encoded(picture(0), "PNG")[:200],
    "truncated webp": encoded(picture(0), "WEBP")[:60],
    "png that lies": png_of(300, 300),
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_image_is_one_kind_of_error(name: str):
    with pytest.raises(BrokenImageError) as caught:
        decode(BROKEN[name])
    assert str(caught.value).isprintable()


def test_flipped_bytes_never_raise_anything_else():
    generator = np.random.default_rng(0)
    for format in ("JPEG", "PNG", "WEBP"):
        good = np.frombuffer(encoded(picture(0), format), np.uint8)
        for _ in range(60):
            bad = good.copy()
            bad[generator.integers(0, len(bad), 5)] = generator.integers(0, 256, 5)
            with suppress(BrokenImageError):
                assert decode(bad.tobytes()).mode == "RGB"


def test_a_flipped_bit_in_a_png_is_always_noticed():
    """Pillow stops reading before the checksums of the pixels."""
    good = encoded(picture(0), "PNG")
    pixels = np.asarray(decode(good))
    first = good.index(b"IDAT")
    last = good.index(b"IEND") - 4
    refused = 0
    for at in range(first, last):
        bad = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
        try:
            assert np.array_equal(np.asarray(decode(bad)), pixels), at
        except BrokenImageError:
            refused += 1
    assert refused == last - first


def test_a_run_goes_on_among_broken_files(tmp_path: Path):
    write_folder(tmp_path, {"a": 40})
    for i, data in enumerate(BROKEN.values()):
        (tmp_path / "a" / f"{i:03d}.jpg").write_bytes(data)
    os.mkfifo(tmp_path / "a" / "039.jpg.png")
    loader = Loader(
        open_source(tmp_path), training(8), LoaderOptions(batch_size=41, broken=BrokenImages(0.5)), training=True
    )
    (batch,) = loader.epoch(0)
    assert len(batch) == 41
    assert len(loader.broken) == len(BROKEN) + 1


def test_devices_and_pipes_are_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "folder.jpg").mkdir()
    for path in (tmp_path / "pipe.jpg", tmp_path / "folder.jpg", Path("/dev/zero")):
        with pytest.raises(BrokenImageError, match="not a regular file"):
            read_file(path)
    (tmp_path / "large.jpg").write_bytes(bytes(101))
    with pytest.raises(BrokenImageError, match="101 bytes, more than the limit of 100"):
        read_file(tmp_path / "large.jpg", Limits(bytes=100))


def test_names_in_a_shard_are_only_names(tmp_path: Path):
    hostile = ["../../escape", "/tmp/absolute", "a/../../b", "new\nline", "\x1b[31mred", "<script>"]
    members = [(f"{name}.jpg", jpeg(i)) for i, name in enumerate(hostile)]
    before = set(tmp_path.parent.rglob("*"))  # what other tests wrote may be called anything
    write_tar(tmp_path / "data" / "x.tar.gz", members)
    source = open_source(tmp_path / "data")
    assert [source.read(i) for i in range(len(hostile))] == [jpeg(i) for i in range(len(hostile))]
    assert all(source.name(i).isprintable() for i in range(len(hostile)))
    names = [path.name for path in set(tmp_path.parent.rglob("*")) - before if path.is_file()]
    assert names
    assert not [
        name for name in names if any(part in name for part in ("escape", "absolute", "b.jpg", "red", "script"))
    ]
    assert not Path("/tmp/absolute.jpg").exists()


def test_links_in_a_shard_lead_nowhere(tmp_path: Path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            info = tarfile.TarInfo(f"{kind.decode()}.jpg")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        info = tarfile.TarInfo("good.jpg")
        info.size = len(jpeg(0))
        tar.addfile(info, io.BytesIO(jpeg(0)))
    source = open_source(tmp_path)
    assert len(source) == 1
    assert source.read(0) == jpeg(0)


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("size", [10**6, 2**40, 2**62, -512, -1024, -(2**40)])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.CONTTYPE])
def test_a_header_that_lies_about_its_size(tmp_path: Path, size: int, kind: bytes):
    good = write_tar(tmp_path / "good.tar", samples(2)).read_bytes()
    (tmp_path / "x.tar").write_bytes(good.rstrip(b"\0") + bytes(-len(good.rstrip(b"\0")) % 512))
    with (tmp_path / "x.tar").open("ab") as file:
        file.write(header("bad.jpg", size, kind) + bytes(512))
    with pytest.raises(ValueError, match=r"x.tar"):
        open_source(tmp_path / "x.tar")


@pytest.mark.parametrize("keep", [0, 100, 512, 700, 1024, 1536, 1600])
def test_a_truncated_shard_is_named(tmp_path: Path, keep: int):
    data = write_tar(tmp_path / "good.tar", samples(3)).read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[:keep])
    (tmp_path / "cut.tar.gz").write_bytes(gzip.compress(data)[:keep])
    for name in ("cut.tar", "cut.tar.gz"):
        with pytest.raises(ValueError, match=name):
            open_source(tmp_path / name)


def test_a_shard_spoilt_in_the_middle_is_named(tmp_path: Path):
    data = write_tar(tmp_path / "good.tar", samples(20)).read_bytes()
    (tmp_path / "bad.tar").write_bytes(data[: len(data) // 2] + b"junk" + data[len(data) // 2 :])
    with pytest.raises(ValueError, match=r"bad.tar"):
        open_source(tmp_path / "bad.tar")


def test_a_shard_that_shrinks_later_gives_broken_images(tmp_path: Path):
    path = write_tar(tmp_path / "x.tar", samples(3))
    source = open_source(tmp_path)
    os.truncate(path, 1000)
    with pytest.raises(BrokenImageError, match="the shard ends after"):
        source.read(2)


def test_a_gzip_bomb_stops_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tars, "EXPANSION", 2)
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(bytes(80 * 2**20)))
    with pytest.raises(ValueError, match="unpacks to more than 2 times"):
        open_source(tmp_path)
    assert not [p for p in Path(os.environ["LAMBDANETS_CACHE"]).rglob("*") if p.is_file()]


def test_file_names_are_printable(tmp_path: Path):
    (tmp_path / "a").mkdir()
    for name in (b"x\n.jpg", b"\xff\xfe.jpg", b"\x1b[31m.jpg"):
        Path(os.fsdecode(bytes(tmp_path / "a") + b"/" + name)).write_bytes(jpeg(0))
    source = open_source(tmp_path)
    assert len(source) == 3
    for i in range(3):
        assert source.name(i).isprintable()
        assert source.read(i) == jpeg(0)


def test_a_class_whose_name_is_not_utf8_is_refused(tmp_path: Path):
    """Reports and logs could not hold it: a run would fail at its end."""
    for name in (b"ant", b"\xff\xfe"):
        folder = Path(os.fsdecode(bytes(tmp_path) + b"/" + name))
        folder.mkdir()
        (folder / "x.jpg").write_bytes(jpeg(0))
    with pytest.raises(ValueError, match=r"class folder \\udcff\\udcfe is not UTF-8"):
        open_source(tmp_path)


def test_images_behind_the_end_of_a_shard_are_not_lost_silently(tmp_path: Path):
    first = write_tar(tmp_path / "a" / "x.tar", samples(3)).read_bytes()
    second = write_tar(tmp_path / "b" / "x.tar", samples(3, first=3)).read_bytes()
    (tmp_path / "two.tar").write_bytes(first + second)
    (tmp_path / "hole.tar").write_bytes(bytes(512) + first[512:])  # the header of the first file
    for name in ("two.tar", "hole.tar"):
        with pytest.raises(ValueError, match=rf"{name} has more files after its end"):
            open_source(tmp_path / name)
    assert len(open_source(tmp_path / "a")) == 3


@pytest.mark.parametrize("label", [b"99999999999", b"7"])
def test_a_label_that_no_class_has_names_the_shards(tmp_path: Path, label: bytes):
    write_tar(tmp_path / "a.tar", [("0.jpg", jpeg(0)), ("0.cls", label)])
    if label == b"7":
        (tmp_path / "classes.txt").write_text("ant\nbee\n")
    with pytest.raises(ValueError, match=str(tmp_path)):
        open_source(tmp_path)
