"""The page as a server: who gets in, what is kept, and that nothing is fetched from elsewhere."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.types import Message, Receive, Scope, Send

from lambdanets.cli import main
from lambdanets.data.decode import Limits
from lambdanets.experiments.webdemo import command, serve
from lambdanets.experiments.webdemo.analyse import open_model
from lambdanets.experiments.webdemo.choose import Example
from lambdanets.experiments.webdemo.page import Desk, bars, nothing
from lambdanets.experiments.webdemo.serve import FORM_BYTES, Uploads, address_of, is_loopback, listening
from tests.experiments.webdemo.helpers import HOSTILE, LIMITS, bomb, detector_weights, noise, served
from tests.train.weights import NAMES, small_weights


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_weights(tmp_path_factory.mktemp("weights") / "classes.safetensors")[1]


@pytest.fixture(scope="module")
def desk(weights: Path) -> Desk:
    return Desk(open_model(str(weights), device="cpu"), (Example(Image.new("RGB", (12, 12)), "black"),), LIMITS)


def analysed(address: str, picture: Path) -> tuple[dict | None, str, str]:
    """What the page gets for an uploaded file, the way it asks for it: picture, answers, frame."""
    with picture.open("rb") as file:
        (path,) = httpx.post(f"{address}/gradio_api/upload", files={"files": (picture.name, file)}).json()
    kind, data = asked(address, {"path": path})
    assert kind == "complete", data
    picture_data, answers, frame = data
    return picture_data, answers, frame


def asked(address: str, file: dict[str, Any]) -> tuple[str, Any]:
    given = {"data": [file | {"meta": {"_type": "gradio.FileData"}}]}
    event = httpx.post(f"{address}/gradio_api/call/analyse", json=given).json()["event_id"]
    said = httpx.get(f"{address}/gradio_api/call/analyse/{event}", timeout=60).text
    kind, data = re.findall(r"event: (.*)\ndata: (.*)", said)[-1]
    return kind, json.loads(data)


def test_a_picture_is_answered_and_bad_files_do_not_end_it(tmp_path: Path, desk: Desk) -> None:
    (tmp_path / "bad.png").write_bytes(b"garbage")
    with served(desk) as address:
        for _ in range(2):  # alive after a bad file
            _, answers, frame = analysed(address, noise(tmp_path / "a.png"))
            assert sum(name in answers for name in NAMES) == 5
            assert 'sandbox="allow-scripts"' in frame
            picture, answers, frame = analysed(address, tmp_path / "bad.png")
            assert picture is None
            assert "This image cannot be used: not a readable JPEG / PNG / WEBP / GIF / BMP image" in answers
            assert not frame


def test_a_file_that_is_too_large_is_not_taken(desk: Desk) -> None:
    with served(desk) as address:
        small, large = (
            httpx.post(f"{address}/gradio_api/upload", files={"files": ("a.png", bytes(size))})
            for size in (LIMITS.bytes, LIMITS.bytes + 1)
        )
        assert small.status_code == 200
        assert large.status_code == 413
        assert httpx.get(address).status_code == 200


def test_uploads_are_limited_together(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old ones give way to new ones, also those that were broken off; what the page shows itself stays."""
    most = 5
    monkeypatch.setattr(serve, "KEPT_UPLOADS", most)
    body = noise_bytes(LIMITS.bytes)
    with served(desk) as address, httpx.Client() as browser:
        gallery = gallery_file(address)
        paths: list[Path] = []
        (first,) = browser.post(f"{address}/gradio_api/upload", files={"files": ("a", b"x")}).json()
        left = Path(first).parents[1] / "left"
        left.write_bytes(body)  # what gradio leaves of an upload that was broken off
        os.utime(left, (0, 0))
        for number in range(most + 4):
            files = {"files": (f"{number}.png", body + str(number).encode())}
            (path,) = browser.post(f"{address}/gradio_api/upload", files=files).json()
            paths.append(Path(path))
            os.utime(path, (number + 1, number + 1))
        there = [path.is_file() for path in paths]
        assert sum(there) >= most - 2
        assert sum(path.stat().st_size for path in paths[0].parent.parent.rglob("*") if path.is_file()) <= (
            (most + 1) * (LIMITS.bytes + FORM_BYTES)
        )
        assert not left.exists()
        assert there == sorted(there)  # the oldest have gone
        assert not there[0]
        assert not paths[0].parent.exists()
        assert there[-1]
        assert httpx.get(gallery).status_code == 200


def test_one_request_cannot_send_many_files_or_an_endless_one(desk: Desk) -> None:
    with served(desk) as address:
        upload = f"{address}/gradio_api/upload"
        many = [("files", (f"{i}.png", bytes(LIMITS.bytes // 2) + bytes([i]))) for i in range(5)]
        assert httpx.post(upload, files=many).status_code == 413
        assert httpx.post(upload, content=iter([b"x"] * 3)).status_code == 411
        large = b'{"data": ["' + b"x" * (LIMITS.bytes + FORM_BYTES) + b'"]}'
        for name in ("call/analyse", "queue/join", "run/analyse"):
            assert httpx.post(f"{address}/gradio_api/{name}", content=large).status_code == 413
        assert httpx.get(address).status_code == 200


def test_too_many_uploads_at_once_are_refused() -> None:
    """They are counted while they are read, and no longer once they are done."""

    async def ended(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    async def tried() -> list[int]:
        statuses: list[int] = []
        answered = asyncio.Event()

        async def waits() -> Message:
            await answered.wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                answered.set()

        headers = [(b"content-length", str(LIMITS.bytes).encode())]
        scope = {"type": "http", "method": "POST", "path": "/gradio_api/upload", "headers": headers}
        uploads = Uploads(ended, gr.Blocks(), "nowhere", LIMITS.bytes)
        fits = uploads.most // LIMITS.bytes
        await asyncio.gather(*(uploads(scope, waits, noted) for _ in range(fits + 1)))
        assert uploads.coming == 0
        return statuses

    assert asyncio.run(tried()) == [503]


def noise_bytes(size: int) -> bytes:
    return np.random.default_rng(3).bytes(size - 10)


def gallery_file(address: str) -> str:
    """The address of the picture of an example."""
    config = httpx.get(f"{address}/config").json()
    (gallery,) = (one for one in config["components"] if one["type"] == "gallery")
    return gallery["props"]["value"][0]["image"]["url"]


def test_the_description_of_the_api_is_closed(desk: Desk) -> None:
    with served(desk) as address:
        for path in ("openapi.json", "gradio_api/openapi.json", "docs", "redoc", "docs/oauth2-redirect", "monitoring"):
            for method in ("GET", "HEAD"):
                found = httpx.request(method, f"{address}/{path}")
                assert found.status_code == 404, path
            assert httpx.get(f"{address}/{path}/").status_code == 404
        link = httpx.get(f"{address}/gradio_api/deep_link", params={"session_hash": "x"})  # it would write a file
        assert link.status_code == 404
        assert httpx.get(address).status_code == 200


def test_a_line_of_millions_of_pixels_is_refused_before_it_is_decoded(tmp_path: Path, desk: Desk) -> None:
    """A PNG of kilobytes: it would take half a minute and gigabytes."""
    roomy = replace(desk, limits=Limits(pixels=40_000_000))
    for size in ((40_000_000, 1), (1, 40_000_000), (65_501, 2)):
        (tmp_path / "line.png").write_bytes(bomb(*size))
        ((picture, answers, frame),) = roomy.upload(str(tmp_path / "line.png"), 0.0)
        assert (picture, frame) == (None, "")
        assert f"{size[0]} x {size[1]} pixels, more than the limit of 65,500 a side" in answers


def test_other_sites_do_not_get_in(desk: Desk) -> None:
    with served(desk) as address:
        own = httpx.get(address)
        assert own.status_code == 200
        assert "default-src 'self'" in own.headers["content-security-policy"]
        assert httpx.get(address, headers={"Host": "evil.example"}).status_code == 400  # a name that leads here
        files = {"files": ("a.png", b"x")}
        for origin in ("http://evil.example", "null", address.replace("http", "https", 1).replace("127", "126")):
            assert (
                httpx.post(f"{address}/gradio_api/upload", files=files, headers={"Origin": origin}).status_code == 403
            )
        upload = httpx.post(f"{address}/gradio_api/upload", files=files, headers={"Origin": address})
        assert upload.status_code == 200
        assert httpx.get(f"{address}/gradio_api/file=/etc/passwd").status_code == 403
        assert httpx.get(f"{address}/gradio_api/file={Path(__file__)}").status_code == 403


@pytest.mark.parametrize("more", [{}, {"is_stream": True}], ids=["file", "stream"])
def test_files_of_this_machine_cannot_be_asked_for(tmp_path: Path, desk: Desk, more: dict) -> None:
    """A request that names a file instead of uploading one."""
    noise(tmp_path / "private.png")
    (tmp_path / "private.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    with served(desk) as address:
        for name in ("private.png", "private.svg", f"../{tmp_path.name}/private.png"):
            path = tmp_path / name
            assert path.is_file()
            kind, said = asked(address, {"path": str(path), **more})
            assert kind == "error", said
            assert "was not uploaded by a user" in said["error"]
            assert httpx.get(f"{address}/gradio_api/file={path}").status_code == 403
        assert asked(address, {"path": os.path.relpath(tmp_path / "private.png"), **more})[0] == "error"


def test_addresses_are_not_fetched(desk: Desk) -> None:
    with served(desk) as address, listening("127.0.0.1", 0) as other:
        other.setblocking(False)
        for host in ("127.0.0.1", "localhost", "example.com"):
            url = f"http://{host}:{other.getsockname()[1]}/a.png"
            kind, said = asked(address, {"path": url, "url": url})
            assert kind == "error"
            assert said["error"] == "Only uploaded files are accepted, no URLs."
        with pytest.raises(BlockingIOError):  # nobody knocked
            other.accept()


def test_uploaded_pictures_are_deleted_at_the_end(desk: Desk) -> None:
    with served(desk) as address:
        (path,) = httpx.post(f"{address}/gradio_api/upload", files={"files": ("a.png", b"x")}).json()
        assert Path(path).is_file()
    assert not Path(path).exists()


def test_the_server_asks_nobody(tmp_path: Path, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """No telemetry, no look for a newer version: every connection stays on this machine."""
    connect, others = socket.socket.connect, []

    def watched(self: socket.socket, address: object) -> None:
        if not (isinstance(address, tuple) and address[0] in ("127.0.0.1", "::1", "localhost")):
            others.append(address)
            raise OSError("no network in this test")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    monkeypatch.setattr(socket, "getaddrinfo", refuse_names(socket.getaddrinfo, others))
    with served(desk) as address:
        analysed(address, noise(tmp_path / "a.png"))
    assert others == []


def refuse_names(resolve, others: list):
    def resolved(host, *arguments, **options):
        if host not in ("127.0.0.1", "::1", "localhost", None):
            others.append(host)
            raise socket.gaierror("no network in this test")
        return resolve(host, *arguments, **options)

    return resolved


def test_names_cannot_harm(tmp_path: Path) -> None:
    desk = Desk(open_model(str(detector_weights(tmp_path / "objects.safetensors")), device="cpu"), (), LIMITS)
    first, second = desk.upload(str(noise(tmp_path / "a.png", (96, 64))), 0.0)
    assert "&lt;img src=x" in first[1]
    for text in (first[1], second[2], nothing(HOSTILE)[1]):
        assert "<img src=x" not in text
    assert bars(desk.model.answer(Image.new("RGB", (20, 20)), 1.1)).startswith('<p class="soft">No object has')


def test_a_slider_asks_again_for_what_is_shown(tmp_path: Path) -> None:
    model = open_model(str(detector_weights(tmp_path / "objects.safetensors")), device="cpu")
    scene = noise(tmp_path / "a.png", (96, 64))
    desk = Desk(model, (Example(Image.open(scene), ""),), LIMITS)
    assert desk.again(str(scene), None, 0.1)[1] == desk.again(None, 0, 0.1)[1] == next(desk.upload(str(scene), 0.1))[1]
    assert desk.again(None, 0, 0.1)[1] != desk.again(None, 0, 0.99)[1]
    assert desk.again(None, None, 0.1) == (None, "")


def test_a_network_without_lambda_layers_says_so(tmp_path: Path) -> None:
    _, path = small_weights(tmp_path / "plain.safetensors", placement="CCCC")
    desk = Desk(open_model(str(path), device="cpu"), (), LIMITS)
    first, second = desk.upload(str(noise(tmp_path / "a.png")), 0.0)
    assert "%" in first[1]
    assert "no LambdaLayer2d" in second[2]


def test_addresses() -> None:
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert address_of(taken) == f"http://127.0.0.1:{port}"
        assert is_loopback(taken)
        with pytest.raises(ValueError, match=rf"--port {port} cannot be used .*--port 0"):
            listening("127.0.0.1", port)
    with listening("0.0.0.0", 0) as taken:
        assert not is_loopback(taken)
        assert address_of(taken).startswith("http://127.0.0.1:")
    with pytest.raises(ValueError, match="no such address"):
        listening("no such host", 0)
    with pytest.raises(ValueError, match="70000"):
        listening("127.0.0.1", 70_000)


@pytest.mark.parametrize(
    ("host", "warned", "interrupt"),
    [("127.0.0.1", False, signal.SIG_DFL), ("127.0.0.1", False, signal.SIG_IGN), ("0.0.0.0", True, signal.SIG_DFL)],
    ids=["this machine", "in the background", "everybody"],  # shells let background jobs ignore SIGINT
)
def test_the_command_serves_until_it_is_told_to_end(
    tmp_path: Path, weights: Path, host: str, warned: bool, interrupt: signal.Handlers
) -> None:
    arguments = [
        "experiments",
        "webdemo",
        str(weights),
        "--no-browser",
        "--port",
        "0",
        "--host",
        host,
        "--device",
        "cpu",
    ]
    root = str(Path(command.__file__).parents[3])
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": root, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "lambdanets", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt),
    )
    try:
        assert process.stdout is not None
        about, where = process.stdout.readline(), process.stdout.readline()
        assert "7 classes: ant, bee" in about
        found = re.search(r"http://127\.0\.0\.1:\d+", where)
        assert found is not None
        assert "lambdanets demo" in httpx.get(found[0], timeout=60).text
        assert list(tmp_path.glob("lambdanets-demo-*"))
        process.send_signal(signal.SIGTERM if warned else signal.SIGINT)
        out, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == (143 if warned else 0)
    assert ("Stopped." in out) == (not warned)
    assert ("everyone who can reach this machine" in said) == warned
    assert "Traceback" not in said
    assert not list(tmp_path.glob("lambdanets-demo-*"))


def test_refusals_are_sentences(weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def refused(*words: str) -> str:
        assert main(["experiments", "webdemo", str(weights), "--no-browser", "--port", "0", *words]) == 2
        return capsys.readouterr().err

    assert "--max-megabytes must be more than 0, got 0.0" in refused("--max-megabytes", "0")
    assert "--max-megapixels must be more than 0, got -3.0" in refused("--max-megapixels", "-3")
    assert "no such address" in refused("--host", "no such host")
    assert "toaster" in refused("--device", "toaster")
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert "pip install 'lambdanets[demo]'" in refused()


def test_other_commands_do_not_load_gradio() -> None:
    code = "import sys, lambdanets.cli; print([n for n in ('gradio', 'fastapi', 'uvicorn') if n in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"


def test_the_document_has_the_defaults() -> None:
    text = (Path(command.__file__).parents[3] / "docs" / "demo.md").read_text()
    usual = command.WebDemo()
    assert f"| `--max-megabytes` | {usual.max_megabytes:g} |" in text
    assert f"| `--max-megapixels` | {usual.max_megapixels:g} |" in text
    assert f"| `--host`, `--port` | {usual.host}, {usual.port} |" in text
