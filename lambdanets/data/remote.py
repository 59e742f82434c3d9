"""Shards on a web server: each is downloaded once into the cache folder and used as a local file.

Servers are not trusted: downloads have limits on bytes and time, redirects to other servers are refused, and a file
gets its name in the cache only when it is a complete tar file. Proxies (HTTPS_PROXY, HTTP_PROXY, NO_PROXY) and
certificates (SSL_CERT_FILE) are taken from the environment.
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
SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:")  # at least two letters, because "C:" is a drive
BUSY = (429, 502, 503, 504)  # status codes after which a request is repeated
REDIRECTS = 5
LONGEST_NAME = 100  # characters of a file name in the cache


@dataclass(frozen=True)
class FetchLimits:
    """Limits of the download of one file.

    Attributes:
        bytes: largest size of the file.
        seconds: total time, including waits between requests.
        stall: seconds without data from the server.
        tries: number of requests while the server responds that it is busy.
        wait: longest wait, in seconds, that the server may request with Retry-After.
    """

    bytes: int = 64 * 2**30
    seconds: float = 6 * 3600.0
    stall: float = 60.0
    tries: int = 5
    wait: float = 120.0


@dataclass(frozen=True)
class Surroundings:
    """Clocks, waiting and messages, which tests replace."""

    now: Callable[[], float] = time.monotonic
    date: Callable[[], float] = time.time  # seconds since 1970, for a Retry-After with a date
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[str], object] = lambda text: print(text, file=sys.stderr, flush=True)
    progress_every: float = 10.0  # seconds between lines about a long download
    poll: float = 1.0  # seconds between checks of a download by another process


class BusyError(Exception):
    """The server responds that it is busy."""

    def __init__(self, status: str, wait: float | None) -> None:
        super().__init__(status)
        self.wait = wait


def is_url(text: str) -> bool:
    return SCHEME.match(text) is not None


def expand(text: str) -> list[str]:
    """Expand a brace list of urls and check each of them."""
    return [checked(url) for url in expand_braces(text)]


def checked(url: str) -> str:
    """Return the url. Raises ValueError if it is not an allowed url."""
    said = repr(url[:200])
    try:
        parts = urlsplit(url)
        scheme, host, _ = origin(url)
    except ValueError as error:
        raise ValueError(f"{said} is not a valid url: {error}") from error
    if scheme not in SCHEMES or not host or url.startswith("-"):
        raise ValueError(
            f"{said}: shards must be {' or '.join(SCHEMES)} urls or files. Commands (pipe:) and other schemes are "
            "refused, so that a url cannot run code"
        )
    if any(c.isspace() or not c.isprintable() for c in url):
        raise ValueError(f"{said}: a url must not contain spaces or control characters")
    if any(c in parts.path + parts.query for c in "[]*"):
        braces = re.sub(r"\[([0-9]+)-([0-9]+)\]", r"{\1..\2}", url)
        hint = repr(braces[:200]) if braces != url else "braces, as in train-{0000..0009}.tar,"
        raise ValueError(
            f"{said}: wildcards are not supported in urls. Write {hint} for several shards, and %5B, %5D or %2A for "
            "a bracket or a star in a name"
        )
    return url


def origin(url: str) -> tuple[str, str, int | None]:
    """Return (scheme, host, port)."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    return scheme, (parts.hostname or "").lower(), SCHEMES.get(scheme) if parts.port is None else parts.port


def shown(url: str) -> str:
    """Return the url without user name and password, for messages."""
    parts = urlsplit(url)
    return printable(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())[:300]


def fetch_all(text: str) -> list[Path]:
    """Return local copies of the shards of a brace list of urls, downloading them if necessary."""
    return [fetch(url) for url in expand(text)]


def fetch(url: str, limits: FetchLimits | None = None, around: Surroundings | None = None) -> Path:
    """Return the local copy of a shard, downloading it if necessary.

    Each url has its own folder in the cache, and one process at a time downloads into it.
    """
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
                    raise OSError(
                        f"{shown(url)} was not downloaded by another process within {limits.seconds:,.0f} s: {error}"
                    ) from error
                if not waits:
                    around.say(f"{shown(url)} is being downloaded by another process: waiting for it")
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
    """Download a file, and repeat the request while the server is busy."""
    for attempt in range(1, limits.tries + 1):
        try:
            receive(url, path, limits, around, deadline)
            return
        except BusyError as busy:
            if attempt == limits.tries:
                raise OSError(f"cannot download {shown(url)}: the server responded {busy} {attempt} times") from None
            wait = 2.0**attempt if busy.wait is None else busy.wait
            if wait > limits.wait or around.now() + wait > deadline:
                raise OSError(
                    f"cannot download {shown(url)}: the server responded {busy} and requested to wait {wait:,.0f} s, "
                    f"longer than the limit of {limits.wait:,.0f} s or the rest of the {limits.seconds:,.0f} s: try "
                    "again later"
                ) from None
            around.say(
                f"{shown(url)}: the server responded {busy}; waiting {wait:g} s before try {attempt + 1} of "
                f"{limits.tries}"
            )
            around.sleep(wait)


def receive(url: str, path: Path, limits: FetchLimits, around: Surroundings, deadline: float) -> None:
    """Send a request, follow its redirects, and save the response."""
    import httpx2

    said = f"cannot download {shown(url)}"
    try:
        client = httpx2.Client(
            timeout=limits.stall, headers={"Accept-Encoding": "identity", "User-Agent": "lambdanets"}, trust_env=True
        )
    except (
        ImportError,
        ValueError,
        httpx2.InvalidURL,
    ) as error:  # a missing package for SOCKS, or an invalid value of a variable
        raise OSError(f"{said} through the proxy in the environment: {error}") from error
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
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:  # UnicodeError: an invalid host name
        if watch.expired:
            why = f"it took longer than {limits.seconds:,.0f} s"
        elif isinstance(error, httpx2.TimeoutException):
            why = f"the server sent nothing for {limits.stall:,.0f} s"
        else:
            why = printable(str(error))[:200] or type(error).__name__
        raise OSError(f"{said}: {why}") from error


def redirected(said: str, url: str, place: str, location: str) -> str:
    """Return the target of a redirect. Raises OSError if it leads to another server."""
    try:
        target = urljoin(place, location)
        same = origin(target) == origin(url)
    except ValueError as error:
        raise OSError(f"{said}: the redirect is not a valid url: {printable(location)[:200]!r}") from error
    if not same:
        raise OSError(
            f"{said}: the server redirects to {shown(target)}, which has another host, port or scheme. If you trust "
            "it, pass that url instead"
        )
    return target


def check_answer(said: str, status: int, reason: str, headers: Mapping[str, str], around: Surroundings) -> None:
    answer = f"{status} {printable(reason)[:50]}".strip()
    if status in BUSY:
        raise BusyError(answer, retry_after(headers.get("Retry-After", ""), around.date()))
    if status != 200:
        raise OSError(f"{said}: the server responded {answer}")
    coding = headers.get("Content-Encoding", "identity").lower()
    if coding not in ("identity", "gzip", "x-gzip"):  # some servers send a .tar.gz as a gzip-encoded .tar
        raise OSError(f"{said}: the server used the unrequested content encoding {printable(coding)[:50]!r}")


def retry_after(text: str, date: float) -> float | None:
    """Return the seconds to wait from a Retry-After header; None if it is missing or invalid."""
    if re.fullmatch(r"[0-9]{1,9}", text.strip()):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - date)
    except (ValueError, OverflowError):
        return None


def save(said: str, path: Path, response: Any, limits: FetchLimits, around: Surroundings) -> None:
    """Write the body of a response; the file gets its final name after it was checked to be a complete shard."""
    length = response.headers.get("Content-Length")  # the client checks that it is a number and that it matches
    total = None if length is None else int(length)
    free = shutil.disk_usage(path.parent).free
    if total is not None and total > min(limits.bytes, free):
        what = f"the limit of {limits.bytes:,}" if total > limits.bytes else f"the {free:,} bytes of free disk space"
        raise OSError(f"{said}: it has {total:,} bytes, more than {what}")
    written, told = 0, around.now()
    started = told
    with whole_path(path) as part:
        with part.open("wb") as file:
            for block in response.iter_raw():
                written += len(block)
                if written > limits.bytes:
                    raise OSError(f"{said}: it exceeds the limit of {limits.bytes:,} bytes")
                file.write(block)
                now = around.now()
                if now - told >= around.progress_every:
                    told = now
                    rate = written / max(now - started, 1e-3) / 2**20
                    whole = "" if total is None else f" of {total / 2**20:,.0f}"
                    around.say(f"downloading {path.name}: {written / 2**20:,.0f}{whole} MiB, {rate:,.1f} MiB/s")
        check_whole(part, shown(str(response.url)), path)


class Watch:
    """Closes connections after a time limit, also if the server keeps sending single bytes."""

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
        """Remember each connection; called by the client with its events."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self.connections.append(info["return_value"].get_extra_info("socket"))
            if self.expired:
                self.end()

    def end(self) -> None:
        self.expired = True
        for connection in self.connections:
            with suppress(OSError):  # of the plain socket: a TLS socket would send a closing message first
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
