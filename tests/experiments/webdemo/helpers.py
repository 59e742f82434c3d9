"""Small networks and pictures for the tests of the page, and a page that is served."""

import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from lambdanets.data.decode import Limits
from lambdanets.detect.scenes import Category
from lambdanets.detect.weights import About, save_detector
from lambdanets.experiments.webdemo.page import Desk, build
from lambdanets.experiments.webdemo.serve import address_of, application, is_loopback, listening, own_folder, server
from lambdanets.train.config import ModelConfig
from tests.detect.helpers import NARROW, TINY, tiny_detector

LIMITS = Limits(pixels=100_000, bytes=200_000)
HOSTILE = '</script><img src=x onerror=alert(1)> ${1+1} {{7}} "quoted" \\'
KINDS = ("circle", "square", HOSTILE)


def detector_weights(path: Path) -> Path:
    card = About(
        model=ModelConfig(name="lambda_resnet_tiny", embedding_std=0.1, options=TINY),
        heads=NARROW,
        categories=tuple(Category(i, name) for i, name in enumerate(KINDS, start=1)),
        masks=True,
        size=64,
        mean=(0.3, 0.3, 0.3),
        std=(0.25, 0.25, 0.25),
    )
    return save_detector(tiny_detector(), path, card)


def noise(path: Path, size: tuple[int, int] = (40, 30), mode: str = "RGB", **options: object) -> Path:
    """A picture of random pixels, left and right half of different brightness."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(5).integers(0, 128, (size[1], size[0], bands), np.uint8)
    pixels[:, size[0] // 2 :] += 100
    Image.frombytes(mode, size, pixels.tobytes()).save(path, **options)
    return path


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that says it has many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@contextmanager
def served(desk: Desk, what: str = "weights") -> Iterator[str]:
    """The address of the page, on any free port of this machine."""
    with own_folder() as folder, listening("127.0.0.1", 0) as taken:
        running = server(application(build(desk, what), folder, desk.limits.bytes, loopback=is_loopback(taken)))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [taken]})
        thread.start()
        try:
            yield address_of(taken)
        finally:
            running.should_exit = True
            thread.join()
