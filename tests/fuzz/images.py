"""Image files: JPEG, PNG, WebP, GIF and BMP, compared with Pillow and with the undamaged image."""

import io
import random
import struct
import warnings
import zlib
from functools import cache

import numpy as np
from PIL import Image, ImageOps

from tests.fuzz import damage
from tests.fuzz.case import FuzzCase, silent
from tests.fuzz.made import small_run

ENDINGS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}
CHECKED = ("PNG",)  # formats with checksums: a damaged file must not decode to other pixels
MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "L", "P", "1", "RGBA", "LA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L", "P", "1"),
}
ORIENTATION = 0x0112


def run(case: FuzzCase) -> bool:
    from lambdanets.data import decode
    from lambdanets.data.command import DataCheck
    from lambdanets.data.transforms import training
    from lambdanets.train.inference.command import Predict, Using

    draw = case.random
    known = [name for name in ENDINGS if name in decode.FORMATS]
    kind = known[case.number % len(known)]
    good = encoded(kind, draw.choice(MODES[kind]), draw.randrange(4))
    original = pixels(good)
    assert original is not None
    said, data = draw_case(draw, kind, good) if case.number >= 2 * len(known) else ("nothing", good)
    case.note(f"{kind}: {said}")
    name = f"case.{ENDINGS[kind]}"

    image = case.attempt(decode.decode, data, names=("",))
    expected = pixels(data)
    if image is not None:
        found = np.asarray(image)
        if expected is None:
            raise silent("Pillow alone refuses the file")
        if not np.array_equal(found, expected):
            raise silent(f"pixels {found.shape} differ from those of Pillow alone, {expected.shape}")
        lossless = said.startswith("cut off") or (kind in CHECKED and not said.startswith("made"))
        if lossless and not np.array_equal(found, original):
            raise silent("damaged pixels")
    elif said in HARMLESS and expected is not None:
        raise silent("refused although it is whole")
    opened = case.attempt(decode.open_image, data, names=("",))
    if opened is not None:
        random.seed(case.number)
        used = case.attempt(training(8), opened, names=("",))
        if used is not None and image is None:
            raise silent("the training transform takes what decode refuses")

    for place, content in (("a/good.png", encoded("PNG", "RGB", 7)), ("b/1.png", encoded("PNG", "RGB", 8))):
        (case.folder / place).parent.mkdir(exist_ok=True)
        (case.folder / place).write_bytes(content)
    (case.folder / "a" / name).write_bytes(data)
    checked = case.command(DataCheck(str(case.folder), workers=1), names=(str(case.folder),))
    if (image is None) != ("1 unreadable:" in checked.out and name in checked.out):
        raise silent(f"`data check` says otherwise: {checked.out!r}")
    if case.number % 10 == 0:
        path = str(case.folder / "a" / name)
        answer = case.command(Predict(str(small_run()), (path,), Using(device="cpu"), json=True), names=(name,))
        if (answer.status == 1) != (image is None) or (image is None) != ('"error"' in answer.out):
            raise silent(f"`predict` says otherwise: {answer.out!r}")
    return image is not None


@cache
def encoded(kind: str, mode: str, seed: int, size: tuple[int, int] = (64, 48)) -> bytes:
    rough = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    image = Image.fromarray(rough).resize(size, Image.Resampling.BICUBIC)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    else:
        image = image.convert(mode)
    options = {"WEBP": dict(lossless=seed % 2 == 0), "JPEG": dict(progressive=seed % 2 == 1)}.get(kind, {})
    return saved(image, kind, **options)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(data: bytes) -> np.ndarray | None:
    """Decode an image with Pillow: RGB, upright, 16 bits scaled. Return None if Pillow refuses it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=list(ENDINGS))
            if image.width * image.height > 10_000_000:
                return None
            image.load()
            try:
                image = ImageOps.exif_transpose(image)
            except Exception:  # invalid EXIF data is ignored
                image = image.copy()
            if image.mode.startswith("I") or image.mode == "F":
                wide = np.clip(np.asarray(image, np.float32) / 256, 0, 255)
                image = Image.fromarray(wide.astype(np.uint8))
            elif image.mode == "P" and "transparency" in image.info:
                image = image.convert("RGBA")
            return np.asarray(image.convert("RGB"))
    except Exception:
        return None


# Damage ---------------------------------------------------------------------------------------------------------------

HARMLESS = ("nothing", "made upright by EXIF", "made longer", "made with a comment")


def draw_case(draw: random.Random, kind: str, good: bytes) -> tuple[str, bytes]:
    structured = {"PNG": PNG_CASES, "JPEG": JPEG_CASES}.get(kind, ())
    if structured and draw.random() < 0.5:
        return draw.choice(structured)(draw, good)
    if draw.random() < 0.05:
        return draw.choice(
            (
                ("made of nothing", b""),
                ("made of text", b"<html>404</html>"),
                ("made of zeros", bytes(1000)),
                ("made of noise", draw.randbytes(1000)),
                ("made longer", good + draw.randbytes(100)),
                ("made of PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n"),
                ("made of a TIFF", saved(Image.new("RGB", (8, 8)), "TIFF")),
            )
        )
    return damage.damaged(draw, good)


def chunks_of(png: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        found.append((png[at + 4 : at + 8], png[at + 8 : at + 8 + size]))
        at += 12 + size
    return found


def png_of(chunks: list[tuple[bytes, bytes]]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def png_header(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    """Change size or format in the header, with a correct checksum."""
    (kind, header), *rest = chunks_of(good)
    size = draw.choice(((0, 0), (1, 2**31 - 1), (2**31 - 1, 2**31 - 1), (40_000_000, 1), (9_000, 9_000), (64, 4_800)))
    form = header[8:] if draw.random() < 0.7 else bytes(draw.randrange(9) for _ in range(5))
    header = struct.pack(">II", *size) + form
    return f"made of {size} pixels, {form.hex()}", png_of([(kind, header), *rest])


def png_chunks(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    """Remove, duplicate, move or change a chunk, with correct checksums."""
    chunks = chunks_of(good)
    at = draw.randrange(len(chunks))
    how = draw.choice(("gone", "twice", "elsewhere", "other", "half"))
    kind, content = chunks.pop(at)
    if how == "twice":
        chunks[at:at] = [(kind, content)] * 2
    elif how == "elsewhere":
        chunks.insert(draw.randrange(len(chunks) + 1), (kind, content))
    elif how == "other":
        chunks.insert(at, (kind, draw.randbytes(max(1, len(content)))))
    elif how == "half":
        chunks.insert(at, (kind, content[: len(content) // 2]))
    return f"made with {kind.decode()} {how}", png_of(chunks)


def png_bomb(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    """Add a text or a profile that decompresses to 100 MB."""
    packed = bomb()
    kind, before = draw.choice(((b"zTXt", b"k\0\0"), (b"iTXt", b"k\0\1\0\0\0"), (b"iCCP", b"k\0\0")))
    chunks = chunks_of(good)
    chunks.insert(1, (kind, before + packed))
    return f"made with a bomb in {kind.decode()}", png_of(chunks)


@cache
def bomb() -> bytes:
    return zlib.compress(bytes(100_000_000), 9)


def png_checksum(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    at = 8
    ends = [at := at + 12 + len(data) for _, data in chunks_of(good)]
    end = draw.choice(ends[:-1])
    return f"checksum that ends at {end}", good[: end - 1] + bytes([good[end - 1] ^ draw.randrange(1, 256)]) + good[
        end:
    ]


def png_payload(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    """Flip a bit of the compressed pixels, possibly at their end."""
    at = good.index(b"IDAT") + 4
    end = at + struct.unpack(">I", good[at - 8 : at - 4])[0]
    place = draw.randrange(at, end) if draw.random() < 0.5 else draw.randrange(max(at, end - 12), end)
    return f"bit of the pixels at {place - end}", good[:place] + bytes([good[place] ^ (1 << draw.randrange(8))]) + good[
        place + 1 :
    ]


def png_comment(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    chunks = chunks_of(good)
    chunks.insert(1, (b"tEXt", b"Comment\0" + b"x" * 100))
    return "made with a comment", png_of(chunks)


def png_exif(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    chunks = chunks_of(good)
    chunks.insert(1, (b"eXIf", draw.randbytes(draw.choice((1, 8, 60)))))
    return "made with garbage in EXIF", png_of(chunks)


PNG_CASES = (
    png_header,
    png_chunks,
    png_chunks,
    png_bomb,
    png_checksum,
    png_payload,
    png_payload,
    png_comment,
    png_exif,
)


def segments_of(jpeg: bytes) -> list[tuple[int, bytes]]:
    """Return (marker, contents with length) up to the scan, and the rest as marker 0."""
    found, at = [], 2
    while jpeg[at + 1] != 0xDA:
        (size,) = struct.unpack(">H", jpeg[at + 2 : at + 4])
        found.append((jpeg[at + 1], jpeg[at + 2 : at + 2 + size]))
        at += 2 + size
    return [*found, (0, jpeg[at:])]


def jpeg_of(segments: list[tuple[int, bytes]]) -> bytes:
    return b"\xff\xd8" + b"".join(content if not kind else bytes([0xFF, kind]) + content for kind, content in segments)


def segment(kind: int, content: bytes) -> tuple[int, bytes]:
    return kind, struct.pack(">H", len(content) + 2) + content


def jpeg_segments(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    segments = segments_of(good)
    at = draw.randrange(len(segments) - 1)
    kind, content = segments.pop(at)
    how = draw.choice(("gone", "twice", "other", "elsewhere"))
    if how == "twice":
        segments[at:at] = [(kind, content)] * 2
    elif how == "other":
        segments.insert(at, segment(kind, draw.randbytes(len(content) - 2)))
    elif how == "elsewhere":
        segments.insert(draw.randrange(len(segments)), (kind, content))
    return f"made with marker {kind:02x} {how}", jpeg_of(segments)


def jpeg_size(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    size = draw.choice(((0, 0), (65_500, 65_500), (48, 65_535), (49, 64), (9_000, 9_000), (4_800, 64)))
    segments = [
        (kind, content[:3] + struct.pack(">HH", *size) + content[7:] if kind in (0xC0, 0xC2) else content)
        for kind, content in segments_of(good)
    ]
    return f"made of {size} pixels", jpeg_of(segments)


def jpeg_exif(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    first, *rest = segments_of(good)
    garbage = draw.choice((b"", b"MM\0*", b"II*\0\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff")) + draw.randbytes(40)
    return "made with garbage in EXIF", jpeg_of([first, segment(0xE1, b"Exif\0\0" + garbage), *rest])


def jpeg_upright(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    exif = Image.Exif()
    exif[ORIENTATION] = draw.randrange(1, 9)
    first, *rest = segments_of(good)
    return "made upright by EXIF", jpeg_of([first, segment(0xE1, exif.tobytes()), *rest])


def jpeg_marker(draw: random.Random, good: bytes) -> tuple[str, bytes]:
    """Insert a marker into the scan."""
    start = len(jpeg_of(segments_of(good)[:-1])) + 14
    at = draw.randrange(start, len(good) - 2)
    marker = draw.choice((0x01, 0xC4, 0xD0, 0xD7, 0xD8, 0xDA, 0xDB, 0xE0, 0xFE))
    return f"made with marker {marker:02x} at {at}", good[:at] + bytes([0xFF, marker]) + good[at:]


JPEG_CASES = (jpeg_segments, jpeg_segments, jpeg_size, jpeg_exif, jpeg_upright, jpeg_marker)
