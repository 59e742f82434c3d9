"""Files appear whole, and others may read them if the umask says so."""

import errno
import math
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from lambdanets.convert.files import save_layer
from lambdanets.detect import weights as detection
from lambdanets.detect.scenes import Category
from lambdanets.experiments.language.network import ByteModel, ByteModelConfig
from lambdanets.experiments.language.task import About, save_language
from lambdanets.files import (
    LOCK,
    FolderInUseError,
    locked,
    parse_json,
    read_json,
    read_object,
    remove_parts,
    whole_file,
    whole_path,
    write_json,
    write_text,
)
from lambdanets.layers import LambdaLayer2d
from lambdanets.models.pretrained import save_weights
from lambdanets.runs import WEIGHTS
from lambdanets.train.classify import PREDICTIONS, START, Classify
from lambdanets.train.config import ModelConfig
from lambdanets.train.loop import fit
from tests.detect.helpers import NARROW, TINY, tiny_detector
from tests.support.file_size import limit, unlimited_afterwards
from tests.support.image_runs import folder_of_images, image_config
from tests.train.weights import small_network


@contextmanager
def umask(value: int):
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def plain_file(path: Path) -> Path:
    with whole_file(path) as file:
        file.write(b"bytes")
    return path


def language_model(path: Path) -> Path:
    config = ByteModelConfig(width=16, depth=1, attention_heads=2, key_depth=4, reach=7)
    return save_language(ByteModel(config), path, About(model=config, text={}))


def detector(path: Path) -> Path:
    model = ModelConfig(name="lambda_resnet_tiny", embedding_std=0.1, options=TINY)
    card = detection.About(
        model=model,
        heads=NARROW,
        categories=(Category(1, "circle"),),
        masks=True,
        size=64,
        mean=(0.3, 0.3, 0.3),
        std=(0.25, 0.25, 0.25),
    )
    return detection.save_detector(tiny_detector(), path, card)


WRITERS = {
    "network": lambda folder: small_network().save_pretrained(folder) / "model.safetensors",
    "layer": lambda folder: save_layer(LambdaLayer2d(8, scope=3), folder / "layer.safetensors", {}),
    "detector": lambda folder: detector(folder / "detector.safetensors"),
    "language model": lambda folder: language_model(folder / "language.safetensors"),
    "plain file": lambda folder: plain_file(folder / "file"),
}


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
@pytest.mark.parametrize("write", WRITERS)
def test_files_have_the_mode_that_open_gives(tmp_path, write, mask):
    with umask(mask):
        (tmp_path / "opened").write_bytes(b"")
        written = WRITERS[write](tmp_path / "made")
    assert mode(written) == mode(tmp_path / "opened") == 0o666 & ~mask
    assert not list((tmp_path / "made").glob("*.part"))
    assert not list((tmp_path / "made").glob(".*"))


def test_files_of_a_run_can_be_read_by_others(tmp_path):
    with umask(0o022):
        config = image_config(folder_of_images(tmp_path / "images"), tmp_path / "run", epochs=0.2)
        fit(Classify(config), config)
    modes = {path.name: mode(path) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {START, PREDICTIONS, WEIGHTS} <= modes.keys()
    assert set(modes.values()) == {0o644}, modes


def test_a_full_disk_names_the_file(tmp_path: Path):
    """What write() raises does not."""
    with unlimited_afterwards():
        limit(100)
        with pytest.raises(OSError, match=r"File too large: '.*/file'") as caught:
            write_text(tmp_path / "file", "x" * 1000)
    assert (caught.value.errno, caught.value.strerror) == (errno.EFBIG, "File too large")
    assert not list(tmp_path.iterdir())


def test_an_error_leaves_what_was_there(tmp_path):
    (tmp_path / "file").write_text("old")

    def half() -> None:
        with whole_path(tmp_path / "file") as part:
            part.write_text("new")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        half()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_pipe_is_written_directly(tmp_path):
    """As /dev/stdout for --output."""
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        write_json(tmp_path / "pipe", {"a": 1}, indent=None)
        assert reader.communicate(timeout=60)[0] == '{"a": 1}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_what_killed_writers_left_is_removed(tmp_path):
    for name in (".a.json.0123.part", ".b.json.0123.part", "a.json", "c.part"):
        (tmp_path / name).touch()
    remove_parts(tmp_path, "a.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.json.0123.part", "a.json", "c.part"]
    remove_parts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "c.part"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("9" * 400, "64 bits"),
        ("-9223372036854775809", "64 bits"),
        ("1e999", "too large"),
        ("NaN", "not a JSON number"),
        ('{"a": -Infinity}', "not a JSON number"),
        ("{", "not usable JSON"),
        (b"\xff\xfe\xfd", "not usable JSON"),
        ("", "not usable JSON"),
    ],
)
def test_json_that_is_refused(text: str | bytes, said: str):
    with pytest.raises(ValueError, match=r"^settings is not usable JSON") as caught:
        parse_json(text, "settings")
    assert said in str(caught.value)


def test_json_that_is_read():
    text = '{"a": [1, -9223372036854775808, 2.5e-3, true, null, "\u00e9"]}'
    assert parse_json(text, "here") == {"a": [1, -(2**63), 0.0025, True, None, "é"]}


def test_a_generous_limit_takes_no_memory(tmp_path: Path):
    (tmp_path / "a.json").write_text("[1]")
    assert read_json(tmp_path / "a.json", 2**60) == [1]


def test_json_whose_caller_checks_the_numbers(tmp_path: Path):
    path = tmp_path / "large.json"
    path.write_text(f"[{10**400}, NaN, 1e400]")
    first, second, third = read_json(path, any_number=True)
    assert first == 10**400
    assert math.isnan(second)
    assert third == math.inf
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000, "here", any_number=True)


def test_json_files_are_bounded_objects(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"config\.json must contain a JSON object, got '\[1, 2\]'"):
        read_object(path)
    path.write_text('{"a": "' + "x" * 100 + '"}')
    with pytest.raises(ValueError, match="more than 64 bytes"):
        read_object(path, most=64)


HOLD = """import sys
from pathlib import Path
from lambdanets.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_locked_folder_is_refused_until_its_process_ends(tmp_path: Path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(FolderInUseError, match=f"process {other.pid}"), locked(tmp_path):
        pass
    other.kill()
    other.wait()
    with locked(tmp_path):
        pass


def test_a_file_with_the_name_of_a_folder_is_said(tmp_path: Path):
    (tmp_path / "run").touch()
    for folder in (tmp_path / "run", tmp_path / "run" / "inside"):
        with pytest.raises(NotADirectoryError, match=r"because .*run is not a folder"), locked(folder):
            pass


FORK = """import os, sys
from pathlib import Path
from lambdanets.files import locked
with locked(Path(sys.argv[1])):
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)
    sys.stdin.read()
"""


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_parent(tmp_path: Path):
    """As worker processes of a killed run, which end only when they notice."""
    parent = subprocess.Popen(
        [sys.executable, "-c", FORK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    with pytest.raises(FolderInUseError), locked(tmp_path):  # neither does its end release it
        pass
    parent.kill()
    parent.wait()
    try:
        os.kill(child, 0)
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    waited = []

    def end(seconds: float) -> None:
        waited.append(seconds)
        other.kill()
        other.wait()

    monkeypatch.setattr("lambdanets.files.time.sleep", end)
    with locked(tmp_path, wait=600.0):
        assert len(waited) == 1


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_gets_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    def flock(handle: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.warns(UserWarning, match=r"cannot be locked .* no other process writes"), locked(tmp_path):
        assert (tmp_path / LOCK).exists()


def test_a_weights_file_that_cannot_be_written_is_an_oserror(tmp_path: Path):
    """Safetensors raises an exception of its own."""
    network = small_network()
    with unlimited_afterwards():
        limit(100)
        with pytest.raises(OSError, match=r"weights\.safetensors cannot be written: .*os error 27"):
            save_weights(network, tmp_path / "weights.safetensors")
    assert not list(tmp_path.iterdir())
