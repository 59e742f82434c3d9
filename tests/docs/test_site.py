"""The site: nothing is left out of it, its generated parts are right, and (slow) it builds without a warning."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lambdanets

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted(DOCS.glob("tutorials/*.md"))
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
CELL = re.compile(r"^```\{code-cell\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
PACKAGES = ("layers", "ops", "models", "recipes", "experiments.reproduce", "view", "convert")  # those with an __all__

pytest.importorskip("sphinx", reason="the site needs pip install 'lambdanets[docs]'")
sys.path.insert(0, str(DOCS))
check_links = importlib.import_module("check_links")
docstrings = importlib.import_module("docstrings")
pages = importlib.import_module("pages")
sys.path.remove(str(DOCS))

every_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def listed(page: Path) -> set[Path]:
    """The pages of a page's tables of contents."""
    lines = [line for block in TOCTREE.findall(page.read_text()) for line in block.splitlines()]
    return {page.parent / f"{line}.md" for line in lines if line and not line.startswith(":")}


def test_every_page_is_in_a_table_of_contents():
    there = {*DOCS.glob("*.md"), *DOCS.glob("api/*.md"), *TUTORIALS} - {DOCS / "index.md"}
    there = {page for page in there if "\norphan: true\n" not in page.read_text()[:40]}
    assert listed(DOCS / "index.md") | listed(DOCS / "api" / "index.md") == there


def test_the_start_page_leads_to_every_tutorial():
    links = re.findall(r"\]\((tutorials/[\w-]+\.md)\)", (DOCS / "index.md").read_text())
    assert {DOCS / link for link in links} == set(TUTORIALS)


def code_cells(path: Path) -> list[str]:
    return [cell.strip() for cell in CELL.findall(path.read_text())]


@every_tutorial
def test_tutorials_show_and_assert(path: Path):
    code = code_cells(path)
    assert any("plt.show()" in cell for cell in code)
    assert sum(cell.count("assert") for cell in code) >= 2
    for cell in code:
        if not cell.startswith("%%"):
            compile(cell, str(path), "exec")


@every_tutorial
def test_links_of_tutorials_lead_somewhere(path: Path):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name(package: str):
    page = (DOCS / "api" / f"{package.rpartition('.')[2]}.md").read_text()
    if f".. automodule:: lambdanets.{package}\n" in page:
        return  # that goes by __all__
    missing = [name for name in importlib.import_module(f"lambdanets.{package}").__all__ if name not in page]
    assert not missing


def test_figures_are_what_the_script_draws():
    done = subprocess.run(
        [sys.executable, str(DOCS / "figures" / "draw.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_versions_to_cite_are_the_package_s():
    version = re.escape(lambdanets.__version__)
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert re.search(rf"version = \{{{version}\}}", (DOCS / "cite.md").read_text())
    released = re.search(r'^date-released: "(.+)"$', (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert released is not None
    assert f"## {lambdanets.__version__} - {released[1]}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_docstrings_become_restructured_text():
    text = [
        "`scope` of `LambdaLayer2d`s, **kwargs, |x|, name_ and e_nm.",
        "",
        "    seen = interactions(model)  # `code`",
        "",
        "- one `item`",
        "  goes on",
        "",
        "| depth | top-1 |",
        "| 50 | 77.4 |",
        "",
        "Args:",
        "    model, arguments: the network, for `create_model`;",
        "        None where: we have none",
        "",
        "Shape:",
        "    x: `[B, C]`",
        "",
        "Raises:",
        "    ValueError: if it is odd",
        "",
        "Example:",
        "    >>> a_ = [2] * 3",
        "    >>> a_",
        "    [2, 2, 2]",
        "",
        ">>> b_",
    ]
    assert docstrings.to_restructured(text) == [
        r"``scope`` of ``LambdaLayer2d``\ s, \*\*kwargs, \|x\|, name\_ and e_nm.",
        "",
        "::",
        "",
        "    seen = interactions(model)  # `code`",
        "",
        "- one ``item``",
        "  goes on",
        "",
        ".. list-table::",
        "   :header-rows: 1",
        "",
        "   * - depth",
        "     - top-1",
        "   * - 50",
        "     - 77.4",
        "",
        "**Arguments**",
        "",
        "- ``model``, ``arguments``: the network, for ``create_model``;",
        "  None where: we have none",
        "",
        "**Shape**",
        "",
        "- ``x``: ``[B, C]``",
        "",
        "**Raises**",
        "",
        "- ``ValueError``: if it is odd",
        "",
        "**Example**",
        "",
        "::",
        "",
        "    >>> a_ = [2] * 3",
        "    >>> a_",
        "    [2, 2, 2]",
        "",
        ">>> b_",
    ]


def test_signatures_show_plain_types():
    shown = "(a: ~typing.Annotated[int, ~lambdanets.typed.Bounds(low=1, high=inf)] | None = <factory>) -> None"
    found = docstrings.process_signature(None, "class", "name", None, None, shown, None)
    assert found == ("(a: int | None = ...) -> None", None)


def test_the_command_reference_has_every_command():
    from lambdanets.cli import COMMANDS, EXPERIMENTS

    text = pages.commands()
    for name in COMMANDS:
        assert f"\n## lambdanets {name}\n" in text
    for name in EXPERIMENTS:
        assert f"\n### lambdanets experiments {name}\n" in text
    assert "\n### lambdanets detect train\n" in text
    assert "--model.embedding-std" in text  # the settings of a recipe


def test_downloaded_notebooks_stand_alone():
    text = ["See [the layers](../layers.md#step-by-step), ", "[a page](https://example.org/) and `x[0](1)`."]
    streams = [{"output_type": "stream", "name": name, "text": ["some"]} for name in ("stdout", "stderr")]
    cells = [
        {"cell_type": "markdown", "source": text},
        {"cell_type": "code", "source": ["f[0](x)"], "outputs": [*streams, {"output_type": "execute_result"}]},
    ]
    markdown, code = pages.for_download({"cells": cells})["cells"]
    assert markdown["source"] == "See the layers, [a page](https://example.org/) and `x[0](1)`."
    assert code == {
        "cell_type": "code",
        "source": ["f[0](x)"],
        "outputs": [streams[0], {"output_type": "execute_result"}],
    }


def test_broken_links_are_found(tmp_path: Path):
    (tmp_path / "one.html").write_text('<p id="here"><a href="two.html#there">.</a><a href="https://example.org">.</a>')
    (tmp_path / "two.html").write_text('<a id="there" href="one.html#gone">.</a><img src="gone.svg"><a href="#there">.')
    broken, inside, elsewhere = check_links.broken_links(tmp_path)
    assert broken == [
        "two.html: gone.svg: there is no such file",
        "two.html: one.html#gone: there is no such anchor",
    ]
    assert (inside, elsewhere) == (4, 1)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path):
    """Every tutorial runs anew: the cache of the test is its own."""
    nbformat = pytest.importorskip("nbformat")
    for needed in ("myst_nb", "segmentation_models_pytorch"):
        pytest.importorskip(needed, reason="the site needs pip install 'lambdanets[docs]'")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    site = tmp_path / "site"
    options = ["-W", "--keep-going", "-q", "-d", str(tmp_path / "doctrees")]
    options += ["-D", f"nb_execution_cache_path={tmp_path / 'cache'}"]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(site)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    broken, inside, _ = check_links.broken_links(site)
    assert not broken
    assert inside > 1000
    for path in TUTORIALS:
        page = (site / "tutorials" / f"{path.stem}.html").read_text()
        assert 'class="cell_output' in page  # it ran
        assert "<img" in page
        assert f'<a href="{path.stem}.ipynb" download>' in page
        notebook = nbformat.read(site / "tutorials" / f"{path.stem}.ipynb", as_version=4)
        nbformat.validate(notebook)
        assert [cell.source for cell in notebook.cells if cell.cell_type == "code"] == code_cells(path)
        assert "image/png" in str([cell.get("outputs") for cell in notebook.cells])
        assert "](../" not in str(notebook.cells)
