"""How files are written: whole or not at all, and with the rights that any other file of the user gets."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """A place to write to, which gets the name `path` when all is well; an error leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    # Whoever writes may make a file of its own in this place, with its own rights (safetensors: for the user alone).
    # The rights of this empty one are what the umask and the folder say.
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        mode = stat.S_IMODE(part.stat().st_mode)
        yield part
        os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
