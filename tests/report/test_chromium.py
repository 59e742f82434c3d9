"""The page in a real browser."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import sync_playwright

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
    const tips = [...inside.querySelectorAll(".tip")], zoom = inside.querySelector(".zoom input");
    const outside = tips.filter(tip => {
      const frame = tip.ownerSVGElement.viewBox.baseVal;
      return [...tip.querySelectorAll("rect, text")].some(part => {
        const box = part.getBBox();
        return box.x < -1 || box.y < -1 || box.x + box.width > frame.width + 1 || box.y + box.height > frame.height;
      });
    });
    const cut = tips.filter(tip => {
      const frame = tip.querySelector("rect").getBBox();
      return [...tip.querySelectorAll("text")].some(text => text.getBBox().width > frame.width - 7);
    });
    const before = getComputedStyle(zoom.nextElementSibling).position;
    zoom.checked = true;
    const zoomed = getComputedStyle(zoom.nextElementSibling);
    const charts = [...inside.querySelectorAll(".chart svg, .matrix")].map(e => e.getBoundingClientRect());
    found.push({
      width, wide: inside.documentElement.scrollWidth, title: inside.title,
      images: images.length, shown: images.filter(i => i.naturalWidth > 0).length,
      tips: tips.length, visible: tips.filter(tip => getComputedStyle(tip).visibility != "hidden").length,
      outside: outside.length, cut: cut.length, which: cut.map(tip => tip.textContent), before, after: zoomed.position,
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
        assert one["tips"] > 50
        assert one["visible"] == one["outside"] == one["cut"] == 0, one["which"]
        assert (one["before"], one["after"]) == ("static", "fixed"), "a click enlarges a picture"


def test_values_appear_under_the_pointer(tmp_path: Path):
    report = write_report(write_run(tmp_path / "run"), pictures=0)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.goto(report.as_uri())
        chart = page.locator(".charts svg").nth(1)
        place = chart.bounding_box()
        assert place is not None
        shown = chart.locator(".tip:visible rect")
        assert shown.count() == 0
        seen = []
        for share in (0.3, 0.9):
            page.mouse.move(place["x"] + share * place["width"], place["y"] + 0.5 * place["height"])
            shown.wait_for()
            seen.append(chart.locator(".tip:visible text").all_text_contents())
        browser.close()
    steps = [int(texts[0].removeprefix("step ").replace(",", "")) for texts in seen]
    assert 0 < steps[0] < steps[1] <= 600
    assert all(texts[1].startswith("training: ") and texts[1].endswith("%") for texts in seen)


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
