"""Printing of tables, on a terminal or as Markdown."""

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Format = Literal["table", "markdown", "json"]
FILE_WIDTH = 150  # characters, where the output is not a terminal


def print_table(
    titles: Sequence[str],
    lines: Sequence[Sequence[str]],
    form: Format,
    *,
    numbers: Sequence[int] = (),
    colors: Sequence[str] | None = None,
) -> None:
    """Print a table; `numbers` are the right-aligned columns, `colors` the style of each line."""
    if form == "markdown":
        rule = ["---:" if i in numbers else "---" for i in range(len(titles))]
        for line in (titles, rule, *lines):
            print(markdown_line(line), end="")
        return
    table = Table()
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i in numbers else "left", no_wrap=i in numbers)
    for i, line in enumerate(lines):
        table.add_row(*map(escape, line), style=None if colors is None else colors[i])
    wide(Console()).print(table)


def markdown_line(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def wide(console: Console) -> Console:
    """Return the console, or one of a fixed width if the output is not a terminal."""
    return console if console.is_terminal else Console(file=console.file, width=FILE_WIDTH)
