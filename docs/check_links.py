"""Do the links inside a built site lead somewhere? Files and anchors; addresses elsewhere are counted, not visited.

python docs/check_links.py build/docs
"""

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Page(HTMLParser):
    """What a page links to, and where others can link to."""

    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def broken_links(site: Path) -> tuple[list[str], int, int]:
    """Sentences about broken links; how many links inside the site there are, and how many lead elsewhere."""
    pages = {path.resolve(): read(path) for path in sorted(site.rglob("*.html"))}
    broken, inside, elsewhere = [], 0, 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                elsewhere += 1
                continue
            inside += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            where = f"{path.relative_to(site.resolve())}: {link}"
            if not target.exists():
                broken.append(f"{where}: there is no such file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                broken.append(f"{where}: there is no such anchor")
    return sorted(set(broken)), inside, elsewhere


def main(arguments: list[str]) -> int:
    (site,) = map(Path, arguments)
    broken, inside, elsewhere = broken_links(site)
    for sentence in broken:
        print(sentence)
    print(f"{inside} links inside the site, {len(broken)} broken; {elsewhere} links elsewhere were not visited")
    return 1 if broken or not inside else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
