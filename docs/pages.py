"""Generate parts of the site: help of every command, measurements, counts of the paper, notebooks to download."""

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

import nbformat
from jupyter_cache import get_cache
from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
GENERATED = HERE / "_generated"

# Pages link to files of the repository, so that they work there too; on the site those files are pages.
OUTSIDE = {
    "../lambdanets/ops/triton/README.md": "kernels.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../benchmarks/results": "measurements.md",
}
# Commands whose subcommands are recipes with the same settings: one stands for all.
RECIPES = {("train",): "imagenette", ("detect", "train"): "small_set", ("experiments", "rounds"): "cotrain"}
# The place for a link to a hosted notebook, once the repository has a public address.
DOWNLOAD = """<p class="notebook"><a href="{name}.ipynb" download>Download notebook</a>
<span>Jupyter notebook with outputs; runs on one CPU core in about a minute</span></p>
"""
LINK_TO_PAGE = re.compile(r"\[([^][]+)\]\([^():]+\.md(?:#[^()]*)?\)")
SUBCOMMAND = re.compile(r"^[│ ]+• (\S+)", re.MULTILINE)


def read_source(app: Sphinx, page: str, source: list[str]) -> None:
    """For Sphinx's event of that name."""
    for target, inside in OUTSIDE.items():
        source[0] = source[0].replace(f"]({target})", f"]({inside})")


def write_pages(app: Sphinx) -> None:
    GENERATED.mkdir(exist_ok=True)
    for name, text in (("commands", commands()), ("counts", counts())):
        path = GENERATED / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # what is the same is not built again
            path.write_text(text)


def add_download(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Add a link to the notebook below the title of a tutorial (event html-page-context)."""
    folder, _, name = page.rpartition("/")
    if folder == "tutorials":
        context["body"] = context["body"].replace("</h1>\n", "</h1>\n" + DOWNLOAD.format(name=name), 1)


def write_notebooks(app: Sphinx, exception: Exception | None) -> None:
    """Write the executed tutorials into the site (event build-finished)."""
    if exception is None and app.builder.format == "html":
        cache = get_cache(app.config.nb_execution_cache_path)  # myst-nb writes cached notebooks without outputs
        for path in Path(app.env.mystnb_config.output_folder).glob("tutorials/*.ipynb"):
            _, notebook = cache.merge_match_into_notebook(nbformat.read(path, as_version=4))
            nbformat.write(for_download(notebook), Path(app.outdir) / "tutorials" / path.name)


def for_download(notebook: dict[str, Any]) -> dict[str, Any]:
    """Replace links to other pages by their text, and remove progress bars and warnings from the outputs."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = LINK_TO_PAGE.sub(r"\1", "".join(cell["source"]))
        else:
            cell["outputs"] = [one for one in cell["outputs"] if one.get("name") != "stderr"]
    return notebook


def help_of(words: tuple[str, ...]) -> str:
    """What `lambdanets WORDS --help` prints."""
    from lambdanets.cli import parse

    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            parse([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def commands() -> str:
    from lambdanets.cli import COMMANDS, EXPERIMENTS, GROUP

    parts = ["## lambdanets\n\n" + fenced(help_of(()))]
    for name in COMMANDS:
        parts += sections((name,))
    parts.append(f"## lambdanets {GROUP}\n\n{fenced(help_of((GROUP,)))}")
    for name in EXPERIMENTS:
        parts += sections((GROUP, name))
    return "\n".join(parts)


def sections(words: tuple[str, ...]) -> list[str]:
    """The help of a command, and of those below it."""
    text = help_of(words)
    level = "##" if len(words) == 1 else "###"
    found = [f"{level} lambdanets {' '.join(words)}\n\n{fenced(text)}"]
    below = SUBCOMMAND.findall(text)
    if words in RECIPES:
        found.append(
            f"The settings of one recipe; those of the others have the same names.\n\n"
            f"{fenced(help_of((*words, RECIPES[words])))}"
        )
        below = []
    for name in below:
        found += sections((*words, name))
    return found


def fenced(text: str) -> str:
    return f"```text\n{text}\n```\n"


def counts() -> str:
    """The paper's counts that its text does not give, as `lambdanets reproduce` finds them."""
    from lambdanets.experiments.reproduce import TABLES, compare
    from lambdanets.experiments.reproduce.marks import MARKS

    lines = ["| table | row | paper | as written | another reading | |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for one in [*compare("params"), *compare("flops"), *compare("memory")]:
        if one.mark not in ("reading", "misprint"):
            continue
        ours, reading = (f"{value:.4g}" if value is not None else "" for value in (one.ours, one.reading))
        note = one.note or MARKS["misprint"]
        lines.append(f"| {TABLES[one.table]} | {one.label} | {one.paper} {one.unit} | {ours} | {reading} | {note} |")
    return "\n".join(lines) + "\n"
