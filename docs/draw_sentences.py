"""Draw sentences for a review of the writing: from the pages, the docstrings and the help texts of the command line.

    python docs/draw_sentences.py --count 25 --seed 1

A third of the sentences comes from each source. The same seed on the same commit draws the same sentences.
"""

import argparse
import ast
import inspect
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Code, generated tables, front matter, formulas, comments
NO_PROSE = re.compile(
    r"^( *)```.*?^\1```|<!-- bench:.*?/bench -->|\A---.*?^---|\$\$.*?\$\$|<!--.*?-->", re.DOTALL | re.M
)
SKIPPED = ("#", "|", "<", "!", ":::", "[!")  # headings, tables, HTML, pictures, directives, badges
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) |^    \*{0,2}\w+(?:, \w+)*: ")  # of a list, or of "Args:"
END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"*\[(])")
LEAST_WORDS = 5


def paragraphs(lines: list[str]) -> Iterator[str]:
    """Yield paragraphs and list items, each on one line."""
    found: list[str] = []
    for line in [*lines, ""]:
        starts = ITEM.match(line)
        if found and (not line.strip() or starts or line.lstrip().startswith(SKIPPED)):
            yield " ".join(found)
            found = []
        if line.strip() and not line.lstrip().startswith(SKIPPED):
            found.append((line[starts.end() :] if starts else line).strip())


def sentences(text: str) -> list[str]:
    """Return the sentences of a text with at least five words, without code and tables."""
    found = [one.strip() for paragraph in paragraphs(text.splitlines()) for one in END.split(paragraph)]
    return [one for one in found if len(one.split()) >= LEAST_WORDS and one[-1] in ".!?:"]


def of_page(path: Path) -> list[str]:
    return sentences(NO_PROSE.sub("", path.read_text()))


def of_module(path: Path, *, help_texts: bool) -> list[str]:
    """Return the sentences of the docstrings of a module, or those of the fields of its classes, which --help shows."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for before, one in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
            field = isinstance(node, ast.ClassDef) and isinstance(before, ast.AnnAssign)
            text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and one.value.value
            if isinstance(text, str) and field == help_texts:
                blocks = re.split(r"\n *\n", inspect.cleandoc(text))
                prose = [block for block in blocks if not block.startswith((">>>", "    "))]
                found += sentences("\n\n".join(prose))
    return found


def drawn(count: int, seed: int) -> list[tuple[Path, str]]:
    """Draw `count` sentences with their files, in turns from pages, docstrings and help texts."""
    pages = [path for path in sorted(ROOT.glob("docs/**/*.md")) if "_generated" not in path.parts]
    modules = sorted(ROOT.glob("lambdanets/**/*.py"))
    sources = [[(path, one) for path in [ROOT / "README.md", *pages] for one in of_page(path)]]
    sources += [[(p, one) for p in modules for one in of_module(p, help_texts=kind)] for kind in (False, True)]
    chance = random.Random(seed)
    return [one for i, source in enumerate(sources) for one in chance.sample(source, (count + 2 - i) // len(sources))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw sentences from the documentation, for a review of the writing.")
    parser.add_argument("--count", type=int, default=25, help="number of sentences (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    options = parser.parse_args()
    for path, sentence in drawn(options.count, options.seed):
        print(f"{path.relative_to(ROOT)}: {sentence}")
