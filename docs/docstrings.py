"""Convert docstrings, which are plain text with a little Markdown, to the reStructuredText that autodoc reads.

Code in backticks becomes a literal, and characters with a meaning in reStructuredText are escaped. An indented block
after a paragraph is code, lines of `| cells |` are a table, and lines after `>>>` are an interactive session. The
entries of "Args:", "Attributes:", "Shape:", "Returns:" and "Raises:" become a list, and the lines of "Example:" code.
Lists with dashes are the same in both formats.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import groupby
from typing import Annotated, Any, get_args, get_origin

CODE = re.compile(r"(`+)(.+?)\1(?!`)")
SPECIAL = re.compile(r"([\\*|`]|(?<=\w)_\b)")
ANNOTATED = re.compile(r"~?\w+\.Annotated\[([~\w.]+), [^\[\]]+\]")
ENTRY = re.compile(r"    (?P<names>\*{0,2}\w+(?:, \w+)*): (?P<text>.*)")
LISTS = {
    "Args:": "Arguments",
    "Attributes:": "Attributes",
    "Shape:": "Shape",
    "Returns:": "Returns",
    "Raises:": "Raises",
}
EXAMPLES = {"Example:": "Example", "Examples:": "Examples"}


def to_restructured(lines: list[str]) -> list[str]:
    """Return the reStructuredText of a docstring. The common indentation of `lines` is already removed."""
    found: list[str] = []
    for block in blocks(lines):
        if block[0] in LISTS:
            found += [f"**{LISTS[block[0]]}**", "", *map(entry, block[1:])]
        elif block[0] in EXAMPLES:
            found += [f"**{EXAMPLES[block[0]]}**", "", *(["::", "", *block[1:]] if block[1:] else [])]
        elif block[0].startswith(">>>"):
            found += block
        elif block[0].startswith("    "):
            found += ["::", "", *block]
        elif block[0].startswith("|"):
            found += table(block)
        else:
            found += map(escaped, block)
        found.append("")
    return found[:-1]


def blocks(lines: list[str]) -> Iterator[list[str]]:
    """Yield the groups of lines between empty lines."""
    for filled, block in groupby(lines, key=lambda line: bool(line.strip())):
        if filled:
            yield list(block)


def entry(line: str) -> str:
    """Convert a line of a section: `name: text`, `name, other: text`, or the continuation of an entry."""
    match = ENTRY.fullmatch(line)
    if match is None:
        return "  " + escaped(line.strip())
    names = ", ".join(f"``{name}``" for name in match["names"].split(", "))
    return f"- {names}: {escaped(match['text'])}"


def table(lines: list[str]) -> list[str]:
    """Convert a table, whose first line has the column titles."""
    rows = [[escaped(cell.strip()) for cell in line.strip().strip("|").split("|")] for line in lines]
    cells = [f"   {'-' if column else '* -'} {cell}" for row in rows for column, cell in enumerate(row)]
    indented = [line if line.startswith("   *") else f"  {line}" for line in cells]
    return [".. list-table::", "   :header-rows: 1", "", *indented]


def escaped(line: str) -> str:
    """Convert code in backticks to literals and escape the rest of a line."""
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
    """Handle Sphinx's event `autodoc-process-docstring`, which requires an empty line at the end."""
    lines[:] = [*to_restructured(lines), ""]


def process_signature(
    app: Any, what: str, name: str, obj: object, options: Any, arguments: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Handle Sphinx's event `autodoc-process-signature`: simplify types and defaults.

    `Annotated[int, ...]` becomes `int`, and a default factory `...`, which Python can parse.
    """
    return arguments and ANNOTATED.sub(r"\1", arguments.replace("<factory>", "...")), result


def plain_types(app: Any) -> None:
    """Remove the metadata of the command line from the types of dataclasses: `Annotated[int, ...]` becomes `int`."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("lambdanets")]
    for module in modules:
        for one in vars(module).values():
            if isinstance(one, type) and is_dataclass(one):
                for annotations in (one.__annotations__, one.__init__.__annotations__):
                    for name, annotation in annotations.items():
                        if get_origin(annotation) is Annotated:
                            annotations[name] = get_args(annotation)[0]
