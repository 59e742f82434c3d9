"""Shards on a web server: each is fetched once into the cache folder, and is a local file from then on.

A server is not trusted: a download has limits of bytes and time, leads to no other server, and gets its name in the
cache only when it is a complete tar file. Proxies (HTTPS_PROXY, HTTP_PROXY, NO_PROXY) and certificates (SSL_CERT_FILE)
are taken from the environment, as clusters need it.
"""

import hashlib
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import urljoin, urlsplit

from lambdanets.data.patterns import expand_braces
from lambdanets.data.places import cache_folder
from lambdanets.data.strings import printable
from lambdanets.data.tars import check_whole
from lambdanets.files import FolderInUseError, locked, remove_parts, whole_path

SCHEMES = {"http": 80, "https": 443}
SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:")  # two letters or more: "C:" is a disk
BUSY = (429, 502, 503, 504)  # worth another try
REDIRECTS = 5
LONGEST_NAME = 100  # characters of a file's name in the cache


@dataclass(frozen=True)
class FetchLimits:
    """What the download of one file may cost.

    Attributes:
        bytes: the size of the file.
        seconds: the time for all of it, including waits before further tries.
        stall: seconds without a byte from the server.
        tries: requests while the server answers that it is busy.
        wait: the longest wait, in seconds, that a server may ask for with Retry-After.
    """

    bytes: int = 64 * 2**30
    seconds: float = 6 * 3600.0
    stall: float = 60.0
    tries: int = 5
    wait: float = 120.0


@dataclass(frozen=True)
class Surroundings:
    """Clocks, waiting and messages; tests have their own."""

    now: Callable[[], float] = time.monotonic
    date: Callable[[], float] = time.time  # seconds since 1970, for a Retry-After with a date
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[str], object] = lambda text: print(text, file=sys.stderr, flush=True)
    progress_every: float = 10.0  # seconds between lines about a long download
    poll: float = 1.0  # seconds between looks at another process's download


class BusyError(Exception):
    """The server answers that it is busy."""

    def __init__(self, status: str, wait: float | None) -> None:
        super().__init__(status)
        self.wait = wait


def is_url(text: str) -> bool:
    return SCHEME.match(text) is not None


def expand(text: str) -> list[str]:
    """The urls of a brace list, each of an allowed scheme."""
    return [checked(url) for url in expand_braces(text)]


def checked(url: str) -> str:
    """The url, if it is one that is fetched; else a ValueError."""
    said = repr(url[:200])
    try:
        parts = urlsplit(url)
        scheme, host, _ = origin(url)
    except ValueError as error:
        raise ValueError(f"{said} is not a url: {error}") from error
    if scheme not in SCHEMES or not host or url.startswith("-"):
        raise ValueError(
            f"{said}: shards come from {' or '.join(SCHEMES)} urls or from files; commands (pipe:) and other "
            "schemes are refused, because whoever writes a url must not be able to run something"
        )
    if any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError(f"{said}: a url has no spaces or control characters")
    if any(c in parts.path + parts.query for c in "[]*"):
        braces = re.sub(r"\[([0-9]+)-([0-9]+)\]", r"{\1..\2}", url)
        hint = repr(braces[:200]) if braces != url else "braces, as in train-{0000..0009}.tar,"
        raise ValueError(
            f"{said}: a web server knows no wildcards. Write {hint} for several shards, and %5B, %5D or %2A for "
            "a bracket or a star in a name"
        )
    return url


def origin(url: str) -> tuple[str, str, int | None]:
    """(scheme, host, port)."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    return scheme, (parts.hostname or "").lower(), SCHEMES.get(scheme) if parts.port is None else parts.port


def shown(url: str) -> str:
    """The url as messages have it: without a password."""
    parts = urlsplit(url)
    return printable(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())[:300]


def fetch_all(text: str) -> list[Path]:
    """Local copies of the shards of a brace list."""
    return [fetch(url) for url in expand(text)]


def fetch(url: str, limits: FetchLimits | None = None, around: Surroundings | None = None) -> Path:
    """The local copy of a shard. Each url has a folder of its own, and one process at a time downloads into it."""
    limits, around = limits or FetchLimits(), around or Surroundings()
    folder = cache_folder() / "fetched" / hashlib.sha256(checked(url).encode()).hexdigest()[:32]
    path = folder / file_name(url)
    deadline = around.now() + limits.seconds
    with ExitStack() as stack:
        waits = False
        while not path.is_file():
            try:
                stack.enter_context(locked(folder))
                break
            except FolderInUseError as error:
                if around.now() > deadline:
                    raise OSError(f"{shown(url)} is not there after {limits.seconds:,.0f} s: {error}") from error
                if not waits:
                    around.say(f"{shown(url)} is being fetched by another process: waiting for it")
                waits = True
                around.sleep(around.poll)
        if not path.is_file():
            remove_parts(folder)
            download(url, path, limits, around, deadline)
    return path


def file_name(url: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "_", urlsplit(url).path.rpartition("/")[2])
    return name[-LONGEST_NAME:].lstrip(".") or "shard.tar"


def download(url: str, path: Path, limits: FetchLimits, around: Surroundings, deadline: float) -> None:
    """Fetch the file, and try again while the server is busy."""
    for attempt in range(1, limits.tries + 1):
        try:
            receive(url, path, limits, around, deadline)
            return
        except BusyError as busy:
            if attempt == limits.tries:
                raise OSError(f"{shown(url)} cannot be fetched: the server answered {busy} {attempt} times") from None
            wait = 2.0**attempt if busy.wait is None else busy.wait
            if wait > limits.wait or around.now() + wait > deadline:
                raise OSError(
                    f"{shown(url)} cannot be fetched: the server answered {busy} and asks to wait {wait:,.0f} s, "
                    f"longer than the {limits.wait:,.0f} s for a wait or what is left of {limits.seconds:,.0f} s: try "
                    "again later"
                ) from None
            around.say(
                f"{shown(url)}: the server answered {busy}; waiting {wait:g} s before try {attempt + 1} of "
                f"{limits.tries}"
            )
            around.sleep(wait)


def receive(url: str, path: Path, limits: FetchLimits, around: Surroundings, deadline: float) -> None:
    """One request, and those that its redirects lead to."""
    import httpx2

    said = f"{shown(url)} cannot be fetched"
    try:
        client = httpx2.Client(
            timeout=limits.stall, headers={"Accept-Encoding": "identity", "User-Agent": "lambdanets"}, trust_env=True
        )
    except (
        ImportError,
        ValueError,
        httpx2.InvalidURL,
    ) as error:  # a SOCKS proxy needs a package, and any text may be in a variable
        raise OSError(f"{said} through the proxy of the environment: {error}") from error
    watch = Watch(max(0.0, deadline - around.now()))
    try:
        with client, watch:
            place = url
            for _ in range(REDIRECTS + 1):
                with client.stream("GET", place, extensions={"trace": watch.note}) as response:
                    if not response.has_redirect_location:
                        check_answer(said, response.status_code, response.reason_phrase, response.headers, around)
                        save(said, path, response, limits, around)
                        return
                    place = redirected(said, url, place, response.headers["Location"])
            raise OSError(f"{said}: more than {REDIRECTS} redirects")
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:  # the last: a host that cannot be one
        if watch.expired:
            why = f"it takes longer than {limits.seconds:,.0f} s"
        elif isinstance(error, httpx2.TimeoutException):
            why = f"the server sent nothing for {limits.stall:,.0f} s"
        else:
            why = printable(str(error))[:200] or type(error).__name__
        raise OSError(f"{said}: {why}") from error


def redirected(said: str, url: str, place: str, location: str) -> str:
    """Where a redirect leads. Only the server that was asked for may be asked again."""
    try:
        target = urljoin(place, location)
        same = origin(target) == origin(url)
    except ValueError as error:
        raise OSError(f"{said}: its redirect leads to no url: {printable(location)[:200]!r}") from error
    if not same:
        raise OSError(
            f"{said}: the server redirects to {shown(target)}, which is another server, port or scheme. If you trust "
            "it, pass that url instead"
        )
    return target


def check_answer(said: str, status: int, reason: str, headers: Mapping[str, str], around: Surroundings) -> None:
    answer = f"{status} {printable(reason)[:50]}".strip()
    if status in BUSY:
        raise BusyError(answer, retry_after(headers.get("Retry-After", ""), around.date()))
    if status != 200:
        raise OSError(f"{said}: the server answered {answer}")
    coding = headers.get("Content-Encoding", "identity").lower()
    if coding not in ("identity", "gzip", "x-gzip"):  # some servers call a .tar.gz a gzipped .tar
        raise OSError(f"{said}: the server sends it in the coding {printable(coding)[:50]!r}, which was not asked for")


def retry_after(text: str, date: float) -> float | None:
    """Seconds to wait, by a Retry-After header; None where it says nothing."""
    if re.fullmatch(r"[0-9]{1,9}", text.strip()):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - date)
    except (ValueError, OverflowError):
        return None


def save(said: str, path: Path, response: Any, limits: FetchLimits, around: Surroundings) -> None:
    """Write the body of a response; the file gets its name when it is known to be a whole shard."""
    length = response.headers.get("Content-Length")  # the client has checked that it is a number, and compares it
    total = None if length is None else int(length)
    free = shutil.disk_usage(path.parent).free
    if total is not None and total > min(limits.bytes, free):
        what = f"the limit of {limits.bytes:,}" if total > limits.bytes else f"the {free:,} that are free"
        raise OSError(f"{said}: it has {total:,} bytes, more than {what}")
    written, told = 0, around.now()
    started = told
    with whole_path(path) as part:
        with part.open("wb") as file:
            for block in response.iter_raw():
                written += len(block)
                if written > limits.bytes:
                    raise OSError(f"{said}: it has more than {limits.bytes:,} bytes, the limit")
                file.write(block)
                now = around.now()
                if now - told >= around.progress_every:
                    told = now
                    rate = written / max(now - started, 1e-3) / 2**20
                    whole = "" if total is None else f" of {total / 2**20:,.0f}"
                    around.say(f"fetching {path.name}: {written / 2**20:,.0f}{whole} MiB, {rate:,.1f} MiB/s")
        check_whole(part, shown(str(response.url)), path)


class Watch:
    """Ends a connection when its time is up, whatever it is doing: a server may send a byte now and then for ever."""

    def __init__(self, seconds: float) -> None:
        self.connections: list[socket.socket] = []
        self.expired = False
        self.timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self.end)
        self.timer.daemon = True

    def __enter__(self) -> Self:
        self.timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.timer.cancel()

    def note(self, event: str, info: dict[str, Any]) -> None:
        """The client says what it does: remember each connection."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self.connections.append(info["return_value"].get_extra_info("socket"))
            if self.expired:
                self.end()

    def end(self) -> None:
        self.expired = True
        for connection in self.connections:
            with suppress(OSError):  # of the plain socket: one with TLS would say goodbye first
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
