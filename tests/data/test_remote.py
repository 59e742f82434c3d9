"""Shards from a web server."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lambdanets.data.source import open_source
from tests.data.helpers import jpeg, samples, write_tar


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
