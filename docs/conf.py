"""The documentation site: `make docs` builds it into build/docs. Pages are Markdown that also reads well unbuilt."""

import hashlib
import os
import sys
from functools import partialmethod
from pathlib import Path

from nbclient import NotebookClient
from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))  # docstrings.py and pages.py

from docstrings import plain_types, process_docstring, process_signature  # noqa: E402
from pages import add_download, read_source, write_notebooks, write_pages  # noqa: E402

import lambdanets  # noqa: E402

project = "lambdanets"
author = "the lambdanets authors"
copyright = author
version = release = lambdanets.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
]
exclude_patterns = ["_generated/*"]  # included by other pages
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!lambdanets\.).*"),  # other packages' names: their inventories need a network
    (r"py:.*", r".*\.T"),  # type variables
    # In signatures of documented classes, but no part of the interface.
    (r"py:class", r"lambdanets\.(typed|layers\.arguments|layers\.vector_attention|train\.data_path)\..*"),
    (r"py:class", r"lambdanets\.data\.(order|resident|batch_augment|transforms)\..*"),
]
show_warning_types = True
smartquotes = False  # they would turn --option into a dash

html_theme = "furo"
html_title = f"lambdanets {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"top_of_page_buttons": []}
copybutton_exclude = ".linenos, .gp, .go"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3


def package_digest() -> str:
    """Of the package's sources: an output in the cache is never older than the code that made it."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "lambdanets").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# Tutorials type `lambdanets ...`: the command of the Python that builds the site.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
os.environ["TTY_COMPATIBLE"] = "0"  # Jupyter asks for colours and moving bars, which a page cannot show

# The output of a command comes in pieces of 100 bytes: show it as one block. (nb_merge_streams would break its lines.)
NotebookClient.__init__ = partialmethod(NotebookClient.__init__, coalesce_streams=True)

nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "tutorials" / package_digest())
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_in_temp = True  # what a tutorial writes is gone afterwards
nb_output_stderr = "remove"  # progress bars

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 88
autodoc_inherit_docstrings = False  # torch's "define the computation" says nothing about ours


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_pages)
    app.connect("builder-inited", plain_types, priority=600)  # the help of commands needs them as they are
    app.connect("source-read", read_source)
    app.connect("html-page-context", add_download)
    app.connect("build-finished", write_notebooks)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
