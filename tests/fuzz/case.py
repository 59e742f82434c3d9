"""Fuzz cases and the checks that they make.

A case draws its input from a generator that its format and number seed, so a number is enough to run it again:
`python -m tests.fuzz FORMAT NUMBER`.
"""

import contextlib
import io
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST_SENTENCE = 5_000  # characters


class Defect(Exception):  # noqa: N818
    """The library handled a case wrongly."""


@dataclass(frozen=True)
class Said:
    """The output and the exit status of a command; 2 if it refused the input."""

    status: int
    out: str
    err: str

    @property
    def refused(self) -> bool:
        return self.status == 2


@dataclass
class FuzzCase:
    """A running case."""

    number: int
    random: random.Random
    folder: Path
    """An empty folder for this case."""
    notes: list[str] = field(default_factory=list)
    """What was changed."""

    def note(self, text: str) -> None:
        self.notes.append(text[:200])

    def command(self, command: Any, *, names: Sequence[str], stdin: bytes = b"") -> Said:
        """Run a command in this process, without parsing its arguments.

        Args:
            command: the parsed command.
            names: files or fields; an error message must name one of them.
            stdin: the contents of stdin.
        """
        from lambdanets import cli

        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            replaced(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
            replaced(cli, "parse", lambda _: command),
            escaping(),
        ):
            status = cli.main(["fuzz"])
        said = Said(status, out.getvalue(), err.getvalue())
        if said.refused:
            check_sentence(said.err.rpartition("lambdanets: ")[2].removesuffix("\n"), names)
        return said

    def attempt(self, function: Callable[..., Any], *arguments: Any, names: Sequence[str], **options: Any) -> Any:
        """Return the result of a function of the library, or None if it refuses its input."""
        with escaping():
            try:
                return function(*arguments, **options)
            except (ValueError, OSError) as error:
                refusal = error
        check_names(str(refusal), names)
        return None


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any):
    """Replace an attribute within a context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def escaping():
    """Turn exceptions that `lambdanets.cli.main` does not report as an error message into defects."""
    try:
        yield
    except (Defect, ValueError, OSError):
        raise
    except Exception as error:
        raise Defect(f"traceback: {type(error).__name__}: {str(error)[:300]} ({where(error)})") from error
    except SystemExit as error:
        raise Defect(f"the process would have ended with {error.code!r}") from error


def where(error: BaseException) -> str:
    """Return the last two frames of the library in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/lambdanets/" in frame.filename] or list(frames)
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in ours[-1:-3:-1])


def check_names(text: str, names: Sequence[str]) -> None:
    if not any(name in text for name in names):
        raise Defect(f"the refusal names none of {', '.join(names)}: {text[:400]!r}")


def check_sentence(text: str, names: Sequence[str]) -> None:
    """Check that an error message names the file or the field, and that it is short and printable."""
    check_names(text, names)
    if len(text) > LONGEST_SENTENCE:
        raise Defect(f"the refusal has {len(text):,} characters: {text[:300]!r}")
    if not text.isprintable():
        raise Defect(f"the refusal is not printable: {text[:300]!r}")


def silent(what: str) -> Defect:
    return Defect(f"silent acceptance: {what}")
