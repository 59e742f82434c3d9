"""The server of the page: refuses requests from other sites, limits uploads, and loads nothing from other servers."""

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
# gradio needs inline scripts and eval. All other sources are limited to this server.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'self'; form-action 'self'"
)

# Paths that the page does not use and that describe or extend the API or write files on a GET request.
CLOSED = ("/openapi.json", "/gradio_api/openapi.json", "/gradio_api/deep_link", "/docs", "/redoc", "/monitoring")
FORM_BYTES = 2**16  # of an upload in addition to the file
KEPT_UPLOADS = 30  # total size of kept uploads, in files of the maximum size; the oldest are deleted first
KEPT_FILES = 1000


class Fence:
    """Middleware that refuses cross-origin requests and sends a content security policy."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            await PlainTextResponse("Requests from other origins are refused.\n", status_code=403)(scope, receive, send)
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
    """Middleware that limits the size of a request and the disk space of all uploads; the oldest are deleted first.

    gradio limits the size of each file but not their number, and keeps the files of interrupted uploads.
    """

    def __init__(self, app: ASGIApp, blocks: gr.Blocks, folder: str, most_bytes: int) -> None:
        self.app, self.blocks, self.folder = app, blocks, folder
        self.most_request, self.most = most_bytes + FORM_BYTES, KEPT_UPLOADS * (most_bytes + FORM_BYTES)
        self.coming = 0  # bytes of the requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if not length.isdecimal() or len(length) > 18:
            await PlainTextResponse("A Content-Length header is required.\n", status_code=411)(scope, receive, send)
        elif int(length) > self.most_request:
            said = f"The request is larger than the maximum allowed size of {self.most_request:,} bytes.\n"
            await PlainTextResponse(said, status_code=413)(scope, receive, send)
        elif self.coming + int(length) > self.most:
            await PlainTextResponse("Too many uploads at the same time. Try again.\n", status_code=503)(
                scope, receive, send
            )
        else:
            self.coming += int(length)
            try:
                await run_in_threadpool(self.make_room, self.most - self.coming)
                await self.app(scope, receive, send)
            finally:
                self.coming -= int(length)

    def make_room(self, most: int) -> None:
        """Delete the oldest files until the others take at most `most` bytes."""
        kept = {path for one in self.blocks.blocks.values() for path in getattr(one, "keep_in_cache", ())}
        found: list[tuple[float, int, str]] = []
        for place, _, names in os.walk(self.folder):
            for path in (os.path.join(place, name) for name in names):
                if path not in kept:
                    with suppress(OSError):  # moved or deleted in the meantime
                        status = os.stat(path)
                        found.append((status.st_mtime, status.st_size, path))
        found.sort(reverse=True)
        total = 0
        for number, (_, size, path) in enumerate(found):
            total += size
            if total > most or number >= KEPT_FILES:
                with suppress(OSError):
                    os.remove(path)
                    os.rmdir(os.path.dirname(path))  # gradio makes a folder for each file


def application(blocks: gr.Blocks, folder: str, most_bytes: int, *, loopback: bool = True) -> FastAPI:
    """Return the page as an ASGI application; `folder` is the folder for uploads from `own_folder`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Uploads, blocks=blocks, folder=folder, most_bytes=most_bytes)
    app.add_middleware(Fence)
    if loopback:  # refuses host names of other sites that resolve to this machine
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK_NAMES), www_redirect=False)
    # Without these flags gradio does not check that a file was uploaded, and would read any file of this machine.
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
    """Return a listening socket. Raise ValueError if the address cannot be used."""
    if not 0 <= port <= 65_535:
        raise ValueError(f"--port must be between 0 and 65535, got {port}")
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
            f"--host {host} --port {port} cannot be used ({error.strerror}): use another port, or --port 0"
        ) from error
    return taken


def is_loopback(taken: socket.socket) -> bool:
    """Return whether a socket is only reachable from this machine."""
    return ipaddress.ip_address(taken.getsockname()[0]).is_loopback


def address_of(taken: socket.socket) -> str:
    """Return the URL for a browser on this machine."""
    host, port = taken.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if taken.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server(app: FastAPI) -> uvicorn.Server:
    """Return a server that does not wait for open connections when it stops: an open page keeps one."""
    return uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))


@contextmanager
def own_folder() -> Iterator[str]:
    """Create a temporary folder for uploads and delete it at the end, also after SIGTERM."""
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
    """Serve the page until Ctrl-C or SIGTERM. `blocks` makes the page after the folder for uploads exists."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # uvicorn shuts down, then raises the signal again
    with own_folder() as folder:
        server(application(blocks(), folder, most_bytes, loopback=is_loopback(taken))).run(sockets=[taken])
