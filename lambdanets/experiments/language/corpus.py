"""Text to train on: the source code of Python's standard library, or files of the user."""

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lambdanets.data.split import held_out

PYTHON = "python"
START = 0  # the byte before every file, which marks the beginning of a text
HELD_OUT = 0.1
# Tests, tables, files that Debian adds or moves to other packages, and files that depend on the machine.
LEFT_OUT = {
    *("test", "tests", "encodings", "pydoc_data", "__phello__", "macholib"),
    *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
    *("dist-packages", "site-packages", "sitecustomize.py", "_distutils_system_mod.py"),
}
GENERATED = ("_sysconfigdata", "config-")  # prefixes of names


@dataclass(frozen=True, eq=False)
class Corpus:
    """The text of training and validation as bytes; each file begins with START."""

    name: str
    training: np.ndarray  # uint8
    validation: np.ndarray  # uint8
    files: int

    @property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 of all bytes."""
        found = hashlib.sha256(self.training.tobytes())
        found.update(self.validation.tobytes())
        return found.hexdigest()[:12]

    def describe(self) -> dict[str, object]:
        sizes = {"training_bytes": len(self.training), "validation_bytes": len(self.validation)}
        return {"corpus": self.name, "files": self.files, **sizes, "sha256": self.digest}


def read_corpus(path: str = PYTHON) -> Corpus:
    """Read the text to train on.

    A tenth is held out for validation: of several files whole files, chosen by the hashes of their names, so that
    versions of Python hold out nearly the same files; of one file its end.

    Args:
        path: "python" (the standard library of this Python), a folder of .py, .md, .rst and .txt files, or a text file.
    """
    if path == PYTHON:
        root = Path(sysconfig.get_path("stdlib"))
        return from_files(f"the standard library of Python {platform.python_version()}", root, python_files(root))
    given = Path(path).expanduser()
    if given.is_dir():
        found = [file for kind in ("py", "md", "rst", "txt") for file in given.rglob(f"*.{kind}") if file.is_file()]
        return from_files(given.name, given, found)
    if not given.is_file():
        raise FileNotFoundError(f"{path} is not a text file or a folder of text files, nor {PYTHON!r}")
    text = joined([given])
    cut = round((1 - HELD_OUT) * len(text))
    return checked(Corpus(given.name, text[:cut], text[cut:], 1), path)


def python_files(root: Path) -> list[Path]:
    """Return the modules of a standard library that every installation of the same Python version has."""
    return [
        file
        for file in root.rglob("*.py")
        if LEFT_OUT.isdisjoint(file.relative_to(root).parts)
        and not file.relative_to(root).parts[0].startswith(GENERATED)
    ]


def from_files(name: str, root: Path, files: list[Path]) -> Corpus:
    names = sorted(file.relative_to(root).as_posix() for file in files)
    kept, held = held_out(np.zeros(len(names), np.int64), HELD_OUT, names=names)
    training, validation = (joined([root / names[i] for i in part]) for part in (kept, held))
    return checked(Corpus(name, training, validation, len(names)), str(root))


def joined(files: list[Path]) -> np.ndarray:
    return np.frombuffer(bytearray().join(bytes([START]) + file.read_bytes() for file in files), np.uint8)


def checked(corpus: Corpus, where: str) -> Corpus:
    if not len(corpus.training) or not len(corpus.validation):
        raise ValueError(
            f"{where} has {len(corpus.training) + len(corpus.validation)} bytes of text in {corpus.files} file(s), too "
            f"few for training and validation: use a longer text file or a folder of them"
        )
    return corpus
