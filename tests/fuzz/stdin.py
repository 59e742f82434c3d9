"""Input piped into `lambdanets predict`: an image, or a list of files."""

import contextlib
import json

from tests.fuzz import damage
from tests.fuzz.case import Defect, FuzzCase, silent
from tests.fuzz.hub_config import picture
from tests.fuzz.made import empty_folder, image_folder, picture_bytes, small_run

WORDS = (
    *(b"", b" ", b"-", b"x", b"\xff.png", b"\x1b[31m", b"x" * 5_000, b"a/" * 3_000, b"/dev/zero", b"/dev/stdin", b"~"),
    *(b"~nobody/x.png", b"\r", b"'quoted'", b"http://localhost/x.png", b"..", b"nul\0"),
)


def run(case: FuzzCase) -> bool:
    from lambdanets.train.inference.command import Predict, Using

    draw = case.random
    good = str(picture()).encode()
    lines = [good, str(image_folder() / "ant").encode(), good]
    said, data = "a list", b"\n".join(lines)
    if case.number >= 3:
        kind = draw.randrange(4)
        if kind == 0:
            said, data = damage.damaged(draw, data)
        elif kind == 1:
            said, data = damage.damaged(draw, picture_bytes(3, draw.choice(("PNG", "JPEG", "WEBP"))))
        elif kind == 2:
            word = draw.choice(WORDS)
            lines.insert(draw.randrange(4), word)
            said, data = f"a line {word[:20]!r}", b"\n".join(lines)
        else:
            said, data = draw.choice((("nothing", b""), ("zeros", bytes(100)), ("noise", draw.randbytes(3_000))))
    case.note(said)
    with contextlib.chdir(empty_folder()):  # whose parent, a line "..", has no images either
        found = case.command(
            Predict(str(small_run()), ("-",), Using(device="cpu", workers=0), json=True),
            names=("stdin", "images"),
            stdin=data,
        )
    if found.refused:
        if said == "a list":
            raise silent("refused although it is whole")
        return False
    answers = [json.loads(line) for line in found.out.splitlines()]
    failed = [one for one in answers if "error" in one]
    if (found.status == 1) != bool(failed):
        raise silent(f"exit status {found.status} with {len(failed)} images that cannot be read")
    if not all(one["image"].isprintable() and one.get("error", "x").isprintable() for one in answers):
        raise Defect("an answer that is not printable")
    if (
        said.startswith("a l")
        and b"\0" not in data
        and len(answers) != 7 + (not said.endswith("b''") and data.count(b"\n") == 3 and is_word(data))
    ):
        raise silent(f"{len(answers)} answers: {found.out[:300]}")
    return True


def is_word(data: bytes) -> bool:
    """Return whether the list has exactly four non-empty lines other than "-"."""
    return sum(bool(line.strip()) and line.strip() != b"-" for line in data.splitlines()) == 4
