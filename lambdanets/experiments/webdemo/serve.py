"""The server: this machine's browser gets in, pages of others do not, and nothing is fetched from elsewhere."""

import ipaddress
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import gradio as gr
import uvicorn
from fastapi import FastAPI
from gradio.themes import Default
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lambdanets.experiments.webdemo.page import CSS

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1", "[::1]")
# gradio needs inline scripts and eval. What counts is that nothing leads away from this server.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'self'; form-action 'self'"
)

# What describes or extends the API, writes files on a GET request, and is not used by the page.
CLOSED = ("/openapi.json", "/gradio_api/openapi.json", "/gradio_api/deep_link", "/docs", "/redoc", "/monitoring")
FORM_BYTES = 2**16  # of an upload, beside the file
KEPT_UPLOADS = 30  # files of the largest allowed size that fit on the disk together; older ones are deleted
KEPT_FILES = 1000


class Fence:
    """Refuses what other pages send in this browser's name, and tells the browser to fetch nothing from elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            await PlainTextResponse("Only this page may ask.\n", status_code=403)(scope, receive, send)
            return
        if scope["path"].rstrip("/").startswith(CLOSED):
            await PlainTextResponse("Not found.\n", status_code=404)(scope, receive, send)
            return

        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["Content-Security-Policy"] = POLICY
                answered["Referrer-Policy"] = "no-referrer"
            await send(message)

        await self.app(scope, receive, with_policy)


class Uploads:
    """Limits what one request may send, and what all uploads together take of the disk: the oldest are deleted first.

    gradio limits each file, not their number, and leaves those behind whose upload was broken off.
    """

    def __init__(self, app: ASGIApp, blocks: gr.Blocks, folder: str, most_bytes: int) -> None:
        self.app, self.blocks, self.folder = app, blocks, folder
        self.most_request, self.most = most_bytes + FORM_BYTES, KEPT_UPLOADS * (most_bytes + FORM_BYTES)
        self.coming = 0  # bytes of the requests that are being read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if not length.isdecimal() or len(length) > 18:
            await PlainTextResponse("A Content-Length is required.\n", status_code=411)(scope, receive, send)
        elif int(length) > self.most_request:
            said = f"More than the maximum allowed size of {self.most_request:,} bytes.\n"
            await PlainTextResponse(said, status_code=413)(scope, receive, send)
        elif self.coming + int(length) > self.most:
            await PlainTextResponse("Too many uploads at once: try again.\n", status_code=503)(scope, receive, send)
        else:
            self.coming += int(length)
            try:
                await run_in_threadpool(self.make_room, self.most - self.coming)
                await self.app(scope, receive, send)
            finally:
                self.coming -= int(length)

    def make_room(self, most: int) -> None:
        """Delete the oldest files until those that are left take at most so many bytes."""
        kept = {path for one in self.blocks.blocks.values() for path in getattr(one, "keep_in_cache", ())}
        found: list[tuple[float, int, str]] = []
        for place, _, names in os.walk(self.folder):
            for path in (os.path.join(place, name) for name in names):
                if path not in kept:
                    with suppress(OSError):  # it has just been moved or deleted
                        status = os.stat(path)
                        found.append((status.st_mtime, status.st_size, path))
        found.sort(reverse=True)
        total = 0
        for number, (_, size, path) in enumerate(found):
            total += size
            if total > most or number >= KEPT_FILES:
                with suppress(OSError):
                    os.remove(path)
                    os.rmdir(os.path.dirname(path))  # each file has a folder of its own


def application(blocks: gr.Blocks, folder: str, most_bytes: int, *, loopback: bool = True) -> FastAPI:
    """The page as an ASGI application; `folder` is that of `own_folder`, where its uploads go."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Uploads, blocks=blocks, folder=folder, most_bytes=most_bytes)
    app.add_middleware(Fence)
    if loopback:  # another site's name that leads to this machine is not enough
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK_NAMES), www_redirect=False)
    # gradio checks that a file was uploaded, and is not just any file of this machine, only in what it launched itself.
    blocks.has_launched = blocks.is_running = True
    return gr.mount_gradio_app(
        app,
        blocks,
        "/",
        footer_links=[],
        run_history=False,
        max_file_size=most_bytes,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
        theme=Default(primary_hue="orange", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        css=CSS,
    )


def listening(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on."""
    if not 0 <= port <= 65_535:
        raise ValueError(f"--port {port}: ports are between 0 and 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"--host {host} --port {port}: no such address ({error})") from error
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen()
    except OSError as error:
        taken.close()
        raise ValueError(
            f"--host {host} --port {port} cannot be used ({error.strerror}); --port 0 takes any port that is free"
        ) from error
    return taken


def is_loopback(taken: socket.socket) -> bool:
    return ipaddress.ip_address(taken.getsockname()[0]).is_loopback


def address_of(taken: socket.socket) -> str:
    """What to type into a browser on this machine."""
    host, port = taken.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if taken.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server(app: FastAPI) -> uvicorn.Server:
    # A page that is open in a browser keeps a connection: at the end it is not waited for, and not complained about.
    return uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))


@contextmanager
def own_folder() -> Iterator[str]:
    """Uploaded pictures go into a folder that is gone at the end, also after SIGTERM."""
    before = os.environ.get("GRADIO_TEMP_DIR")
    with tempfile.TemporaryDirectory(prefix="lambdanets-demo-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        try:
            yield folder
        finally:
            if before is None:
                del os.environ["GRADIO_TEMP_DIR"]
            else:
                os.environ["GRADIO_TEMP_DIR"] = before


def serve(blocks: Callable[[], gr.Blocks], taken: socket.socket, most_bytes: int) -> None:
    """Until Ctrl-C or SIGTERM. `blocks` makes the page, once there is a folder for its pictures."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # uvicorn ends well, then sends the signal again
    with own_folder() as folder:
        server(application(blocks(), folder, most_bytes, loopback=is_loopback(taken))).run(sockets=[taken])
