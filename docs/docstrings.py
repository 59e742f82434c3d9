"""Docstrings here are plain text with Markdown's code spans; this makes them the reStructuredText that autodoc wants.

Code between single backticks becomes a literal, characters that mean something in reStructuredText are escaped, and an
indented block after a paragraph is code. Lists with dashes and "Attributes:" sections are the same in both.
"""

import re
import sys
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_origin

from sphinx.ext.napoleon import Config, GoogleDocstring

CODE = re.compile(r"(`+)(.+?)\1(?!`)")
SPECIAL = re.compile(r"([\\*|`]|(?<=\w)_\b)")
ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
SECTION = re.compile(r"(?:Args|Arguments|Attributes|Returns|Raises|Yields|Example|Examples|Note):$")


def to_restructured(lines: list[str]) -> list[str]:
    """The lines of a docstring, its common indentation already removed."""
    found: list[str] = []
    literal = False  # inside a block of code
    section = False  # inside "Attributes:" and the like, whose entries are indented
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line.strip() and not indent:
            literal, section = False, bool(SECTION.match(line))
        starts = indent >= 4 and not literal and not section and blank(lines, number - 1) and not in_item(lines, number)
        if starts:
            literal = True
            found += ["::", ""]
        found.append(line if literal else escaped(line))
    return found


def blank(lines: list[str], number: int) -> bool:
    return number >= 0 and not lines[number].strip()


def in_item(lines: list[str], number: int) -> bool:
    """Whether the indented line goes on with an item of a list."""
    before = next((line for line in reversed(lines[:number]) if line.strip() and not line.startswith(" ")), "")
    return bool(ITEM.match(before))


def escaped(line: str) -> str:
    parts, last = [], 0
    for match in CODE.finditer(line):
        parts += [plain(line[last : match.start()]), f"``{match[2]}``"]
        after = line[match.end() : match.end() + 1]
        parts.append("\\ " if after.isalnum() else "")  # `LambdaLayer2d`s: a literal ends before a word does
        last = match.end()
    return "".join(parts) + plain(line[last:])


def plain(text: str) -> str:
    return SPECIAL.sub(r"\\\1", text)


def process_docstring(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """For Sphinx's event of that name."""
    lines[:] = to_restructured(lines)
    if what in ("module", "class", "function", "method"):  # an attribute's "Torch's: 1 - decay" is no type
        lines[:] = GoogleDocstring(lines, Config(napoleon_use_ivar=True), app, what, name, obj, options).lines()


def process_bases(app: Any, name: str, obj: object, options: Any, bases: list[Any]) -> None:
    """For Sphinx's event of that name: a class without a base has nothing to say about it."""
    bases[:] = [base for base in bases if base is not object]


def plain_types(app: Any) -> None:
    """Takes the command line's notes out of the types of dataclasses: `Annotated[int, ...]` becomes `int`."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("lambdanets")]
    for module in modules:
        for one in vars(module).values():
            if isinstance(one, type) and is_dataclass(one):
                for annotations in (one.__annotations__, one.__init__.__annotations__):
                    for name, annotation in annotations.items():
                        if get_origin(annotation) is Annotated:
                            annotations[name] = get_args(annotation)[0]
