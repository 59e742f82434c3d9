"""Pages: one HTML file with everything inside, no scripts, every name escaped.

A page is a `page.html` beside the module that fills it; it extends base.html, and may use parts.html and page.css of
this folder.
"""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from lambdanets import __version__

HERE = Path(__file__).parent


def rendered(place: Path, /, **values: Any) -> str:
    """`place`/page.html as text, with `values`; the style sheet (unless there is a `css`) and the version are added."""
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
