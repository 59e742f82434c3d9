"""Rendering of pages: one self-contained HTML file each, with every name escaped.

The template of a page is the `page.html` in the folder of its module. It extends base.html and may use parts.html and
page.css of this folder.
"""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from lambdanets import __version__

HERE = Path(__file__).parent


def rendered(place: Path, /, **values: Any) -> str:
    """Return `place`/page.html filled with `values`. `css` and `version` are added unless they are given."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([place, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    values = {"css": Markup((HERE / "page.css").read_text(encoding="utf-8")), "version": __version__} | values
    return environment.get_template("page.html").render(values)
