"""The page in a real browser."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lambdanets.report.page import write_report
from tests.report.runs import HOSTILE, write_run
from tests.support.browser import BROWSER, chromium

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")

# Shows the page at several widths and writes down what it looks like to the browser.
RULER = """<!DOCTYPE html><meta charset="utf-8"><body><script>
const page = PAGE, widths = [360, 1100], found = [];
for (const width of widths) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 800; frame.srcdoc = page;
  frame.onload = () => {
    const inside = frame.contentDocument;
    const images = [...inside.images];
    const charts = [...inside.querySelectorAll(".chart svg, .matrix")].map(e => e.getBoundingClientRect());
    found.push({
      width, wide: inside.documentElement.scrollWidth, title: inside.title,
      images: images.length, shown: images.filter(i => i.naturalWidth > 0).length,
      charts: charts.length, drawn: charts.filter(r => r.width > 50 && r.height > 50).length,
    });
    if (found.length == widths.length) {
      const result = document.createElement("pre");
      result.id = "result"; result.textContent = JSON.stringify(found);
      document.body.replaceChildren(result);
    }
  };
  document.body.append(frame);
}
</script></body>"""


def test_it_fits_and_everything_is_drawn(tmp_path: Path):
    names = [HOSTILE, "a name that is much longer than anybody would like it to be", "w" * 300, "short"]
    report = write_report(write_run(tmp_path / ("run" * 40), names), pictures=6)
    ruler = tmp_path / "ruler.html"
    ruler.write_text(
        RULER.replace("PAGE", json.dumps(report.read_text()).replace("</", r"<\/").replace("<!--", r"<\!--"))
    )
    found = re.search(r'<pre id="result">(.*?)</pre>', chromium(tmp_path, ruler, "--dump-dom"), re.DOTALL)
    assert found is not None
    measured = json.loads(html.unescape(found[1]))  # in the order in which the frames were ready
    assert sorted(one["width"] for one in measured) == [360, 1100]
    for one in measured:
        assert one["wide"] <= one["width"], "it scrolls sideways"
        assert one["title"].endswith("lambdanets"), "a script ran"
        assert one["images"] == one["shown"] == 6 + 4  # mistakes, position tables
        assert one["charts"] == one["drawn"] == 4 + 1


@pytest.mark.parametrize(("theme", "background"), [("light", 255), ("dark", 20)])
def test_it_follows_the_theme(tmp_path: Path, theme: str, background: int):
    report = write_report(write_run(tmp_path / "run"), pictures=0)
    picture = tmp_path / "page.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if theme == "dark" else []
    chromium(tmp_path, report, *dark, f"--screenshot={picture}", "--window-size=900,900")
    pixels = np.asarray(Image.open(picture).convert("L")).astype(int)
    assert abs(pixels[3, 3] - background) < 5
    title = pixels[20:70, :300]
    assert np.abs(title - background).max() > 150  # readable
