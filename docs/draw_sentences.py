"""Draw sentences for a review of the writing: from the pages, the docstrings and the help texts of the command line.

    python docs/draw_sentences.py --count 25 --seed 1

A third comes from each source, all from different files. The same seed on the same commit draws the same sentences.
"""

import argparse
import ast
import inspect
import random
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Code, generated tables, comments, front matter, formulas
NO_PROSE = re.compile(r"(?ms)^( *)```.*?^\1```|<!-- bench:.*?/bench -->|<!--.*?-->|\A---.*?^---|\$\$.*?\$\$")
SKIPPED = ("|", "#", "<", "!", ":::", "[!")  # tables, headings, HTML, pictures, directives, badges
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) |^    \*{0,2}\w+(?:, \w+)*: ")  # of a list, or of "Args:"
CODE = re.compile(r"`+[^`]*`+|\[\[.*|>>>.*")
BLOCK = re.compile(r"(?s)\n *\n(?:    |>>> ).*?(?=\n *\n|\Z)")  # a listing or an example in a docstring
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "lambdanets/ops/triton/README.md", "docs/**/*.md")


def sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs, list items and cells of tables with at least five words outside code."""
    parts = [""]
    for line in text.splitlines():
        item = ITEM.match(line)
        if item or not line.strip() or line.lstrip().startswith(SKIPPED):
            parts += [*line.split("|")[1:-1], line[item.end() :] if item else ""]
        else:
            parts[-1] += " " + line.strip()
    found = [one.strip() for part in parts for one in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"*\[(])", part)]
    return [one for one in found if len(re.findall(r"[A-Za-z][\w'-]+", CODE.sub("", one))) >= 5]


def of_page(path: Path) -> list[str]:
    return sentences(NO_PROSE.sub("", path.read_text()))


def of_module(path: Path, *, help_texts: bool) -> list[str]:
    """Return the sentences of the docstrings of a module, or those that --help shows."""
    texts: list[ast.expr] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if help_texts and isinstance(node, ast.Call):
            texts += [word.value for word in node.keywords if word.arg in ("help", "description")]
            texts += node.args[:1] if getattr(node.func, "id", "") == "Command" else []
        body = getattr(node, "body", None)
        for before, one in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
            field = isinstance(node, ast.ClassDef) and isinstance(before, ast.AnnAssign)
            texts += [one.value] if isinstance(one, ast.Expr) and field == help_texts else []
    strings = [one.value for one in texts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return [one for text in strings for one in sentences(BLOCK.sub("", inspect.cleandoc(text)))]


def drawn(count: int, seed: int) -> list[tuple[Path, str]]:
    """Draw `count` sentences with their files, each from another file, in turns from the three sources."""
    pages = [path for glob in PAGES for path in sorted(ROOT.glob(glob)) if "_generated" not in path.parts]
    modules = [*sorted(ROOT.glob("lambdanets/**/*.py")), *sorted(ROOT.glob("benchmarks/**/*.py"))]
    sources = [[(path, one) for path in pages for one in of_page(path)]]
    sources += [[(p, one) for p in modules for one in of_module(p, help_texts=kind)] for kind in (False, True)]
    chance = random.Random(seed)
    mixed = [list(dict(chance.sample(source, len(source))).items()) for source in sources]  # one of each file
    return [one for i, source in enumerate(mixed) for one in source[: (count + 2 - i) // len(sources)]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw sentences for a review of the writing.")
    parser.add_argument("--count", type=int, default=25, help="number of sentences (default: 25)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    for path, sentence in drawn(**vars(parser.parse_args())):
        print(f"{path.relative_to(ROOT)}: {sentence}")
