"""Docstrings here are plain text with a little Markdown; this makes them the reStructuredText that autodoc wants.

Code between backticks becomes a literal, what means something in reStructuredText alone is escaped, an indented block
after a paragraph is code, lines of `| cells |` are a table, and the entries of "Args:" and "Attributes:" a list. Lists
with dashes are the same in both.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import groupby
from typing import Annotated, Any, get_args, get_origin

CODE = re.compile(r"(`+)(.+?)\1(?!`)")
SPECIAL = re.compile(r"([\\*|`]|(?<=\w)_\b)")
ENTRY = re.compile(r"    (?P<names>\*{0,2}\w+(?:, \w+)*): (?P<text>.*)")
SECTIONS = {"Args:": "Arguments", "Attributes:": "Attributes"}


def to_restructured(lines: list[str]) -> list[str]:
    """The lines of a docstring, its common indentation already removed."""
    found: list[str] = []
    for block in blocks(lines):
        title = SECTIONS.get(block[0])
        if title is not None:
            found += [f"**{title}**", "", *map(entry, block[1:])]
        elif block[0].startswith("    "):
            found += ["::", "", *block]
        elif block[0].startswith("|"):
            found += table(block)
        else:
            found += map(escaped, block)
        found.append("")
    return found[:-1]


def blocks(lines: list[str]) -> Iterator[list[str]]:
    """What stands between empty lines."""
    for filled, block in groupby(lines, key=lambda line: bool(line.strip())):
        if filled:
            yield list(block)


def entry(line: str) -> str:
    """A line of a section: `name: text` or `name, other: text`, or what goes on with it."""
    match = ENTRY.fullmatch(line)
    if match is None:
        return "  " + escaped(line.strip())
    names = ", ".join(f"``{name}``" for name in match["names"].split(", "))
    return f"- {names}: {escaped(match['text'])}"


def table(lines: list[str]) -> list[str]:
    """The first line has the titles."""
    rows = [[escaped(cell.strip()) for cell in line.strip().strip("|").split("|")] for line in lines]
    cells = [f"   {'-' if column else '* -'} {cell}" for row in rows for column, cell in enumerate(row)]
    indented = [line if line.startswith("   *") else f"  {line}" for line in cells]
    return [".. list-table::", "   :header-rows: 1", "", *indented]


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
    """For Sphinx's event of that name. It wants an empty line at the end."""
    lines[:] = [*to_restructured(lines), ""]


def process_signature(
    app: Any, what: str, name: str, obj: object, options: Any, arguments: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """For Sphinx's event of that name: a default that is made anew is written so that Python can read it."""
    return arguments and arguments.replace("<factory>", "..."), result


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
