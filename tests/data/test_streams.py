"""Shards from a web server: fetched or streamed."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from lambdanets.data.augment import Augment
from lambdanets.data.broken import BrokenImages
from lambdanets.data.loader import Batch, LoaderOptions
from lambdanets.data.source import open_source
from lambdanets.data.streams import StreamLoader
from lambdanets.data.transforms import training
from tests.data.helpers import jpeg, samples, write_tar

CHANGE = training(8, Augment(flip=0.5))
CLASSES = ("a", "b", "c")


class Quiet(SimpleHTTPRequestHandler):
    requests: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.requests.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Four shards of ten images on this machine's own address."""
    for shard in range(4):
        suffix = ".tar.gz" if shard == 3 else ".tar"
        write_tar(tmp_path / "served" / f"train-{shard}{suffix}", samples(10, shard * 10))
    Quiet.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "served")))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_shards_are_fetched_once(address: str):
    for _ in range(2):
        source = open_source(f"{address}/train-{{0..2}}.tar")
        assert [source.read(i) for i in range(30)] == [jpeg(i) for i in range(30)]
    assert sorted(Quiet.requests) == ["/train-0.tar", "/train-1.tar", "/train-2.tar"]


def test_what_is_not_there_is_said(address: str):
    with pytest.raises(OSError, match=r"train-9.tar cannot be fetched"):
        open_source(f"{address}/train-9.tar")


def stream(address: str, batch_size: int = 5, buffer: int = 7, **options) -> StreamLoader:
    urls = f"{address}/{{train-0.tar,train-1.tar,train-2.tar,train-3.tar.gz}}"
    return StreamLoader(urls, CHANGE, CLASSES, 40, LoaderOptions(batch_size, **options), buffer=buffer)


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_repeats_and_resumes(address: str, workers: int):
    loader = stream(address, workers=workers)
    first = list(loader.epoch(0))
    assert len(first) == len(loader) == 8
    assert equal(first, list(loader.epoch(0)))
    for start in (1, 4, 7):
        assert equal(first[start:], list(loader.epoch(0, start)))
    assert not equal(first, list(loader.epoch(1)))
    labels = torch.cat([batch.labels for batch in first])
    assert torch.bincount(labels).tolist() == [14, 13, 13]  # every image once


def test_processes_share_the_shards(address: str):
    labels = []
    for rank in range(2):
        batches = list(stream(address, rank=rank, world=2).epoch(0))
        assert len(batches) == 4
        labels += [batch.labels for batch in batches]
    assert torch.bincount(torch.cat(labels)).tolist() == [14, 13, 13]
    with pytest.raises(ValueError, match="4 shards for 6 readers"):
        stream(address, world=3, workers=2)


def test_broken_images_and_shards_are_named(address: str, tmp_path: Path):
    members = samples(10, 10)
    members[4] = (members[4][0], b"garbage")
    write_tar(tmp_path / "served" / "train-1.tar", members)
    (tmp_path / "served" / "train-2.tar").unlink()
    loader = stream(address, broken=BrokenImages(0.5))
    batches = list(loader.epoch(0))
    assert sum(len(batch) for batch in batches) == 40
    names = {one.name for batch in batches for one in batch.broken}
    assert names == {f"{address}/train-2.tar", "train-1.tar:00012"}
    assert equal(batches[5:], list(stream(address, broken=BrokenImages(0.5)).epoch(0, 5)))


def test_a_pickle_in_a_stream_is_refused(address: str, tmp_path: Path):
    write_tar(tmp_path / "served" / "train-0.tar", [("a.jpg", jpeg(0)), ("a.pkl", b"\x80\x04.")])
    with pytest.raises(ValueError, match="pickles can run code"):
        list(stream(address).epoch(0))


def test_a_server_without_images_ends_the_run(address: str, tmp_path: Path):
    for path in (tmp_path / "served").iterdir():
        path.unlink()
    with pytest.raises(OSError, match="no image could be read"):
        list(stream(address).epoch(0))
