"""Shards from a web server, which may be slow, broken or hostile."""

import gzip
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from lambdanets.cli import main
from lambdanets.data import remote
from lambdanets.data.remote import FetchLimits, Surroundings, expand, fetch
from lambdanets.data.source import open_source
from tests.data.helpers import jpeg, samples, write_tar
from tests.data.server import Answer, Asked, Server, in_turn, serving, whole


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with serving() as server:
        yield server


@pytest.fixture
def tar(tmp_path: Path) -> bytes:
    return write_tar(tmp_path / "x.tar", samples(10)).read_bytes()


class Told(Surroundings):
    """Surroundings with a clock that only waiting moves, and lists of waits and messages."""

    def __init__(self, **others: object) -> None:
        self.slept: list[float] = []
        self.said: list[str] = []
        given = dict(now=lambda: sum(self.slept), date=lambda: 784111777.0, sleep=self.slept.append)
        super().__init__(**(given | dict(say=self.said.append) | others))  # type: ignore[arg-type]

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def left_over() -> list[Path]:
    """Files in the cache that are neither locks nor finished."""
    return [path for path in Path(os.environ["LAMBDANETS_CACHE"]).rglob("*") if path.is_file() and path.name != ".lock"]


def test_shards_are_fetched_once(server: Server, tmp_path: Path):
    for i in range(3):
        suffix = ".tar.gz" if i == 2 else ".tar"
        data = write_tar(tmp_path / f"{i}{suffix}", samples(10, i * 10)).read_bytes()
        server.answers[f"/train-{i}{suffix}"] = whole(data)
    for _ in range(2):
        source = open_source(f"{server.address}/train-{{0.tar,1.tar,2.tar.gz}}")
        assert [source.read(i) for i in range(30)] == [jpeg(i) for i in range(30)]
    assert sorted(server.requests) == ["/train-0.tar", "/train-1.tar", "/train-2.tar.gz"]


def test_equal_names_in_different_places_are_different_files(server: Server, tmp_path: Path):
    for i, place in enumerate(["/a/train.tar", "/b/train.tar", "/b/train.tar?part=2"]):
        server.answers[place] = whole(write_tar(tmp_path / f"{i}.tar", samples(2, i * 2)).read_bytes())
    source = open_source(f"{server.address}/{{a/train.tar,b/train.tar,b/train.tar?part=2}}")
    assert [source.read(i) for i in range(6)] == [jpeg(i) for i in range(6)]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host/train-[1-20].tar", r"Write 'http://host/train-{1..20}.tar' for several shards"),
        ("http://host/train-[12].tar", r"Write braces, as in train-{0000..0009}.tar, for several shards"),
        ("http://host/train-*.tar", "wildcards are not supported"),
        ("http://host/x.tar?part=[1-2]", "wildcards are not supported"),
        ("http://host[1-3]/x.tar", "is not a valid url"),
        ("http://host:http/x.tar", "is not a valid url"),
        ("http://host:99999/x.tar", "is not a valid url"),
        ("http://host/{0..99999999}.tar", "more than 100,000 names"),
    ],
)
def test_what_is_no_url_of_shards_is_refused(url: str, message: str):
    with pytest.raises(ValueError, match=message):
        open_source(url)


def test_urls_that_look_odd_are_taken():
    urls = ["http://[::1]:8000/x.tar", "HTTPS://host/a%5B1%5D.tar", "http://host/x.tar?a=1&b=~2"]
    assert [expand(url) for url in urls] == [[url] for url in urls]


def cut(data: bytes, promised: int) -> Answer:
    def answer(asked: Asked) -> None:
        asked.head(Content_Length=promised)
        asked.send(data)

    return answer


def chunked(data: bytes, end: bytes = b"0\r\n\r\n") -> Answer:
    def answer(asked: Asked) -> None:
        asked.protocol_version = "HTTP/1.1"
        asked.head(Transfer_Encoding="chunked")
        asked.send(f"{len(data):x}\r\n".encode() + data + b"\r\n" + end)

    return answer


def unknown_length(data: bytes) -> Answer:
    def answer(asked: Asked) -> None:
        asked.head()
        asked.send(data)

    return answer


@pytest.mark.parametrize("way", [whole, chunked, unknown_length])
@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz"])
def test_a_whole_file_comes_in_any_way(server: Server, tar: bytes, way, name: str):
    server.answers[f"/{name}"] = way(gzip.compress(tar) if name.endswith("gz") else tar)
    assert len(open_source(f"{server.address}/{name}")) == 10


TAR = "damaged or (not a tar|incomplete)"


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("x.tar", lambda tar: cut(tar[:5000], len(tar)), "cannot download .*: peer closed connection"),
        ("x.tar", lambda tar: cut(b"", len(tar)), "cannot download .*: peer closed connection"),
        ("x.tar", lambda tar: chunked(tar[:5000], b""), "cannot download .*: peer closed connection"),
        ("x.tar", lambda tar: chunked(tar[:5000]), TAR),
        ("x.tar", lambda tar: unknown_length(tar[:5000]), TAR),
        ("x.tar", lambda tar: unknown_length(tar[:-10240]), TAR),
        ("x.tar", lambda tar: whole(b""), TAR),
        ("x.tar", lambda tar: whole(b"<html>Please log in</html>" * 100), TAR),
        ("x.tar", lambda tar: whole(gzip.compress(tar), Content_Encoding="gzip"), TAR),
        ("x.tar", lambda tar: whole(tar, Content_Encoding="br"), "content encoding 'br'"),
        ("x.tar.gz", lambda tar: unknown_length(gzip.compress(tar)[:-20]), "x.tar.gz is damaged"),
        ("x.tar.gz", lambda tar: unknown_length(gzip.compress(tar)[:2000] + bytes(500)), "x.tar.gz is damaged"),
        ("x.tar", lambda tar: lambda asked: asked.send(b"SSH-2.0-OpenSSH_9.7\r\n"), "cannot download"),
        ("x.tar", lambda tar: lambda asked: asked.send(b""), "cannot download .*: Server disconnected"),
        (
            "x.tar",
            lambda tar: lambda asked: asked.send(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 50_000),
            "cannot download",
        ),
        ("x.tar", lambda tar: cut(tar, -5), "cannot download"),  # type: ignore[arg-type]
        ("x.tar", lambda tar: lambda asked: asked.head(204), "responded 204 No Content"),
        ("x.tar", lambda tar: lambda asked: asked.head(206, Content_Length=0), "responded 206 Partial Content"),
        ("x.tar", lambda tar: lambda asked: asked.head(401, Content_Length=0), "responded 401 Unauthorized"),
        ("x.tar", lambda tar: lambda asked: asked.head(500, Content_Length=0), "responded 500 Internal"),
        ("y.tar", lambda tar: whole(tar), "y.tar: the server responded 404 Not Found"),
    ],
)
def test_what_is_not_a_whole_shard_is_refused(server: Server, tar: bytes, name: str, answer, message: str):
    server.answers[f"/x{name[1:]}"] = answer(tar)
    with pytest.raises((OSError, ValueError), match=message) as caught:
        open_source(f"{server.address}/{name}")
    assert f"{server.address}/{name}" in str(caught.value)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()
    assert not left_over()
    server.answers[f"/{name}"] = whole(gzip.compress(tar) if name.endswith("gz") else tar)  # mended
    assert len(open_source(f"{server.address}/{name}")) == 10


def test_the_size_has_a_limit(server: Server, tar: bytes, monkeypatch: pytest.MonkeyPatch):
    limits = FetchLimits(bytes=len(tar) - 1)
    server.answers |= {"/said.tar": cut(b"", len(tar)), "/chunks.tar": chunked(tar), "/open.tar": unknown_length(tar)}
    for name, message in (("said", f"it has {len(tar):,} bytes, more than the limit"), ("chunks", "the limit of")):
        with pytest.raises(OSError, match=message):
            fetch(f"{server.address}/{name}.tar", limits)
    with pytest.raises(OSError, match=f"exceeds the limit of {len(tar) - 1:,} bytes"):
        fetch(f"{server.address}/open.tar", limits)
    assert not left_over()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 100, 100))  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="more than the 100 bytes of free disk space"):
        fetch(f"{server.address}/said.tar")


def redirect(to: str) -> Answer:
    return lambda asked: asked.head(302, Location=to, Content_Length=0)


def test_redirects_stay_on_the_server(server: Server, tar: bytes):
    server.answers |= {"/x.tar": redirect("/moved/y.tar?a=b"), "/moved/y.tar?a=b": redirect("z.tar")}
    server.answers["/moved/z.tar"] = whole(tar)
    assert len(open_source(f"{server.address}/x.tar")) == 10
    server.answers["/round.tar"] = redirect("/round.tar")
    with pytest.raises(OSError, match="more than 5 redirects"):
        open_source(f"{server.address}/round.tar")
    assert server.requests.count("/round.tar") == 6


@pytest.mark.parametrize(
    "target",
    [
        *("http://localhost:{port}/y.tar", "http://127.0.0.1:{other}/y.tar", "https://127.0.0.1:{port}/y.tar"),
        *("http://127.0.0.1/y.tar", "//169.254.169.254/latest/meta-data", "file:///etc/passwd", "http://[1-2]/y.tar"),
        *("pipe:true", "http://127.0.0.1:x/y.tar", "http://user@localhost:{port}/y.tar"),
    ],
)
def test_redirects_to_other_places_are_refused(server: Server, tar: bytes, target: str):
    with serving() as other:
        other.answers["/y.tar"] = server.answers["/y.tar"] = whole(tar)
        server.answers["/x.tar"] = redirect(target.format(port=server.server_port, other=other.server_port))
        with pytest.raises(
            OSError, match=r"another host, port or scheme|is not a valid url|in location header|For absolute URLs"
        ):
            open_source(f"{server.address}/x.tar")
        assert not other.requests
    assert server.requests == ["/x.tar"]
    assert not left_over()


def test_a_redirect_does_not_leave_encryption():
    with pytest.raises(OSError, match="another host, port or scheme"):
        remote.redirected("x", "https://host/x.tar", "https://host/x.tar", "http://host/x.tar")
    with pytest.raises(OSError, match="another host, port or scheme"):
        remote.redirected("x", "https://host:8443/x.tar", "https://host:8443/x.tar", "http://host:8443/x.tar")
    assert (
        remote.redirected("x", "https://host/x.tar", "https://host/x.tar", "https://HOST:443/y") == "https://HOST:443/y"
    )


def busy(status: int = 503, **headers: object) -> Answer:
    return lambda asked: asked.head(status, Content_Length=0, **headers)


def test_a_busy_server_is_asked_again(server: Server, tar: bytes):
    date = "Sun, 06 Nov 1994 08:49:48 GMT"  # 11 seconds after the test's date
    answers = busy(Retry_After=7), busy(429), busy(502, Retry_After=date), busy(504, Retry_After="soon")
    server.answers["/x.tar"] = in_turn(*answers, whole(tar))
    told = Told()
    assert fetch(f"{server.address}/x.tar", around=told).read_bytes() == tar
    assert told.slept == [7.0, 4.0, 11.0, 16.0]
    assert [text.partition(": ")[2] for text in told.said] == [
        "the server responded 503 Service Unavailable; waiting 7 s before try 2 of 5",
        "the server responded 429 Too Many Requests; waiting 4 s before try 3 of 5",
        "the server responded 502 Bad Gateway; waiting 11 s before try 4 of 5",
        "the server responded 504 Gateway Timeout; waiting 16 s before try 5 of 5",
    ]


def test_tries_have_an_end(server: Server):
    server.answers["/x.tar"] = busy()
    told = Told()
    with pytest.raises(OSError, match="responded 503 Service Unavailable 5 times"):
        fetch(f"{server.address}/x.tar", around=told)
    assert told.slept == [2.0, 4.0, 8.0, 16.0]
    assert len(server.requests) == 5


@pytest.mark.parametrize("wait", ["3600", "999999999", "Sun, 06 Nov 2094 08:49:48 GMT"])
def test_a_server_cannot_ask_for_a_long_wait(server: Server, wait: str):
    server.answers["/x.tar"] = busy(Retry_After=wait)
    told = Told()
    with pytest.raises(OSError, match=r"requested to wait [\d,]+ s, longer than the limit of 120 s"):
        fetch(f"{server.address}/x.tar", around=told)
    assert not told.slept
    with pytest.raises(OSError, match=r"longer than .* the rest of the 100 s"):
        fetch(f"{server.address}/x.tar", FetchLimits(seconds=100.0, wait=1e9), told)


def test_waits_count_in_the_total(server: Server):
    server.answers["/x.tar"] = busy(Retry_After=30)
    told = Told()
    with pytest.raises(OSError, match=r"the rest of the 100 s"):
        fetch(f"{server.address}/x.tar", FetchLimits(seconds=100.0), told)
    assert told.slept == [30.0, 30.0, 30.0]


def silent(*parts: bytes) -> Answer:
    def answer(asked: Asked) -> None:
        for part in parts:
            asked.send(part)
        asked.wait_for_hang_up()

    return answer


def dripping(start: bytes, drop: bytes) -> Answer:
    def answer(asked: Asked) -> None:
        asked.send(start)
        while not asked.gone():
            asked.send(drop)

    return answer


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n"


@pytest.mark.parametrize("parts", [(), (b"HTTP/1.1 200",), (HEAD,), (HEAD + b"\r\n",), (HEAD + b"\r\n", b"x" * 512)])
def test_a_server_that_falls_silent_is_left(server: Server, parts: tuple[bytes, ...]):
    server.answers["/x.tar"] = silent(*parts)
    with pytest.raises(OSError, match="the server sent nothing for 0 s"):
        fetch(f"{server.address}/x.tar", FetchLimits(stall=0.1))
    assert not left_over()


@pytest.mark.parametrize("start", [b"", HEAD, HEAD + b"\r\n"])
def test_a_server_that_sends_a_byte_now_and_then_is_left(server: Server, start: bytes):
    server.answers["/x.tar"] = dripping(start, b"x")
    with pytest.raises(OSError, match="it took longer than 0 s"):
        fetch(f"{server.address}/x.tar", FetchLimits(seconds=0.3))
    assert not left_over()


def test_ctrl_c_leaves_nothing(server: Server, tar: bytes):
    def interrupt(text: str) -> None:
        assert left_over()  # it is half-way
        raise KeyboardInterrupt

    server.answers["/x.tar"] = whole(tar)
    with pytest.raises(KeyboardInterrupt):
        fetch(f"{server.address}/x.tar", around=Told(say=interrupt, progress_every=0.0))
    assert not left_over()
    assert fetch(f"{server.address}/x.tar").read_bytes() == tar


def test_what_a_killed_process_left_is_removed(server: Server, tar: bytes):
    server.answers["/x.tar"] = in_turn(busy(500), whole(tar))
    with pytest.raises(OSError, match="500"):
        fetch(f"{server.address}/x.tar")
    (lock,) = Path(os.environ["LAMBDANETS_CACHE"]).rglob(".lock")
    (lock.parent / ".x.tar.0000.part").write_bytes(tar[:100])
    path = fetch(f"{server.address}/x.tar")
    assert left_over() == [path]


def test_long_downloads_say_how_far_they_are(server: Server, tar: bytes):
    ticks = iter(range(0, 10**6, 4))
    server.answers |= {"/x.tar": whole(tar + bytes(2**22)), "/y.tar": chunked(tar + bytes(2**22))}
    for name, end in (("x", r" MiB, \d+\.\d MiB/s"), ("y", " MiB, ")):
        told = Told(now=lambda: float(next(ticks)))
        fetch(f"{server.address}/{name}.tar", replace_limits(seconds=1e9), told)
        assert told.said
        assert all(text.startswith(f"downloading {name}.tar: ") and end.strip()[:3] in text for text in told.said)
    assert " of 4 MiB" in told.said[0] or name == "y"


def replace_limits(**changes: float) -> FetchLimits:
    return replace(FetchLimits(), **changes)


def test_two_processes_fetch_a_url_once(server: Server, tar: bytes):
    waiting, fetched = threading.Event(), threading.Event()

    def slow(asked: Asked) -> None:
        assert waiting.wait(30)  # until the other one has come and waits
        whole(tar)(asked)

    server.answers["/x.tar"] = slow
    paths: list[Path] = []

    def first() -> None:
        paths.append(fetch(f"{server.address}/x.tar"))
        fetched.set()

    def wait(seconds: float) -> None:
        waiting.set()
        assert fetched.wait(30)

    told = Told(sleep=wait, now=lambda: 0.0)
    thread = threading.Thread(target=first)
    thread.start()
    while not server.requests:  # the first one has the lock
        assert not fetched.wait(0.001)
    paths.append(fetch(f"{server.address}/x.tar", around=told))
    thread.join()
    assert paths[0] == paths[1]
    assert server.requests == ["/x.tar"]
    assert told.said == [f"{server.address}/x.tar is being downloaded by another process: waiting for it"]


def test_waiting_for_another_process_has_an_end(server: Server):
    server.answers["/x.tar"] = silent()

    def first() -> None:
        with suppress(OSError):
            fetch(f"{server.address}/x.tar")

    thread = threading.Thread(target=first)
    thread.start()
    while not server.requests:
        thread.join(0.001)
    told = Told()
    with pytest.raises(
        OSError, match=r"was not downloaded by another process within 20 s: .* is in use by another process"
    ):
        fetch(f"{server.address}/x.tar", FetchLimits(seconds=20.0), told)
    server.over.set()
    thread.join()


def test_proxies_of_the_environment_are_used(server: Server, tar: bytes, monkeypatch: pytest.MonkeyPatch):
    server.answers["http://shards.invalid/x.tar"] = whole(tar)
    server.answers["/x.tar"] = whole(tar)
    monkeypatch.setenv("HTTP_PROXY", server.address)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert len(open_source("http://shards.invalid/x.tar")) == 10
    assert len(open_source(f"{server.address}/x.tar")) == 10
    assert server.requests == ["http://shards.invalid/x.tar", "/x.tar"]


@pytest.mark.parametrize("proxy", ["nonsense://127.0.0.1:9", "socks5://127.0.0.1:9", "http://127.0.0.1:x"])
def test_a_wrong_proxy_is_a_sentence(server: Server, proxy: str, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("HTTP_PROXY", proxy)
    assert main(["data", "check", f"{server.address}/x.tar"]) == 2
    assert f"cannot download {server.address}/x.tar" in capsys.readouterr().err


def test_passwords_are_not_shown(server: Server):
    url = f"http://somebody:secret@127.0.0.1:{server.server_port}/x.tar"
    with pytest.raises(OSError, match="404") as caught:
        open_source(url)
    assert "secret" not in str(caught.value)


def test_nobody_at_home(server: Server):
    server.server_close()
    for url in (f"{server.address}/x.tar", "http://a..b/x.tar"):
        with pytest.raises(OSError, match="cannot download"):
            open_source(url)
