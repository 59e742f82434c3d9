"""The page in a real browser computes what `interactions` computes; pictures, notebooks and the command."""

import base64
import html
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from lambdanets.cli import main
from lambdanets.data.preprocessing import Preprocessing
from lambdanets.layers import LambdaLayer2d
from lambdanets.models.pretrained import Card, save_pretrained
from lambdanets.view import interactions, interactive
from lambdanets.view.draw import coloured, draw, table_channels
from tests.models.helpers import images, randomized, settled, small
from tests.support.browser import BROWSER, chromium

HOSTILE = '</script><script>alert("1")</script><img src=x onerror=alert(2)>'

# Clicks a pixel, chooses a head, and writes down every map that the page then shows.
ASK = """<script>
const box = document.getElementById("picture"), place = box.getBoundingClientRect();
box.dispatchEvent(new MouseEvent("click", {
  clientX: place.left + (COLUMN + .5) / width * place.width, clientY: place.top + (ROW + .5) / height * place.height,
}));
document.querySelectorAll("#heads button")[HEAD + 1].click();
const found = {
  query, wide: document.documentElement.scrollWidth,
  layers: data.layers.map(layer => Object.fromEntries(Object.entries(layer.panels).map(
    ([kind, panel]) => [kind, {map: [...panel.map], caption: panel.caption.textContent}]))),
};
const result = document.createElement("pre");
result.id = "result"; result.textContent = JSON.stringify(found);
document.body.replaceChildren(result);
</script>"""

LAYERS = {
    "usual": {"scope": 5},
    "multi-head": {"scope": (4, 3), "multi_head": True},
    "intra-depth, dilation": {"scope": 3, "intra_depth": 2, "dilation": 2},
    "stride": {"scope": 5, "stride": 2},
    "content alone": {"position": False},
    "positions alone": {"content": False, "scope": 5},
}


def ask(tmp_path: Path, text: str, query: tuple[int, int], head: int, width: int = 1100) -> dict:
    script = ASK.replace("ROW", str(query[0])).replace("COLUMN", str(query[1])).replace("HEAD", str(head))
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", script + "</body>"), encoding="utf-8")
    dom = chromium(tmp_path, path, "--dump-dom", f"--window-size={width},900")
    found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.parametrize("head", [-1, 1], ids=["mean", "second head"])
def test_a_click_shows_the_interactions(tmp_path: Path, head: int) -> None:
    layers = [randomized(LambdaLayer2d(6, heads=2, key_depth=3, **options)) for options in LAYERS.values()]
    model = settled(nn.Sequential(*layers), torch.randn(4, 6, 12, 17)).eval()
    x = torch.randn(6, 12, 17)
    query = (7, 12)
    found = ask(tmp_path, interactive(model, x).text, query, head)
    assert found["query"] == list(query)
    seen = interactions(model, x, query)
    assert len(found["layers"]) == len(seen.layers) == len(LAYERS)
    for shown, layer in zip(found["layers"], seen.layers, strict=True):
        maps = {"content": layer.content, "position": layer.position}
        assert set(shown) == {kind for kind, there in maps.items() if there is not None}
        for kind, panel in shown.items():
            weights = maps[kind].sum(1)
            expected = (weights.mean(0) if head < 0 else weights[head]).flatten()
            scale = float(weights.abs().max())
            torch.testing.assert_close(torch.tensor(panel["map"]), expected, rtol=0, atol=4e-3 * scale)
            assert kind in panel["caption"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")
def test_it_fits_a_telephone_and_names_cannot_harm(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": randomized(LambdaLayer2d(6, heads=2, scope=5))})
    wrapped = nn.Sequential(model["a"])
    text = interactive(wrapped, torch.randn(6, 12, 17), title=HOSTILE, answers=[(HOSTILE, "9%")]).text
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert ask(tmp_path, text, (0, 0), 0, width=500)["wide"] <= 500  # Chromium's narrowest


def test_untrained_tables_are_named_everywhere(tmp_path: Path) -> None:
    layer, x = LambdaLayer2d(6, heads=2, scope=5), torch.randn(6, 8, 8)
    model, sentence = nn.Sequential(layer), "still close to the random initialisation"
    assert sentence in interactive(model, x).text
    assert sentence in interactions(model, x)._repr_html_()
    before = draw(interactions(model, x), tmp_path / "view.png")
    with Image.open(before) as image:
        size = image.size
    assert layer.positions is not None
    with torch.no_grad():
        layer.positions.table.copy_(torch.linspace(-1, 1, 5)[:, None, None] * torch.ones(5, 5, 1))
    assert sentence not in interactive(model, x).text
    assert sentence not in interactions(model, x)._repr_html_()
    with Image.open(draw(interactions(model, x), tmp_path / "view.png")) as image:
        assert image.size < size  # the sentence took room


def test_nothing_comes_from_elsewhere() -> None:
    text = interactive(nn.Sequential(LambdaLayer2d(6, heads=2, scope=5)), torch.randn(6, 8, 8)).text
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:)", text)
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text


def test_page_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 8, 8)
    with pytest.raises(ValueError, match="mask"):
        interactive(LambdaLayer2d(6, heads=2, scope=5, causal=True), x)
    with pytest.raises(ValueError, match="outside"):
        interactive(LambdaLayer2d(6, heads=2, scope=5), x, (8, 0))
    monkeypatch.setattr("lambdanets.view.page.MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="--layers"):
        interactive(LambdaLayer2d(6, heads=2, scope=5), x)


def test_notebooks() -> None:
    model, x = nn.Sequential(randomized(LambdaLayer2d(6, heads=2, scope=5))).eval(), torch.randn(6, 12, 17)
    shown = interactions(model, x, (3, 4))._repr_html_()
    assert "<script" not in shown
    sources = re.findall(r'src="data:image/png;base64,([^"]+)"', shown)
    sizes = [Image.open(io.BytesIO(base64.b64decode(source))).size for source in sources]
    assert sizes == [(17, 12), (17, 12), (17, 12), (5, 5)]  # input, content, position, table
    frame = interactive(model, x)._repr_html_()
    assert 'sandbox="allow-scripts"' in frame
    assert "<script" not in frame  # escaped, in the frame's own document


def test_colours() -> None:
    values = torch.tensor([[-2.0, 0.0], [1.0, torch.nan]])
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(coloured(values, "PuOr_r", True).split(",")[1]))))
    assert pixels[0, 0, 2] > pixels[0, 0, 0]  # purple subtracts
    assert pixels[1, 0, 0] > pixels[1, 0, 2]  # orange adds
    assert pixels[0, 1, :3].min() > 240  # 0 is white
    assert pixels[1, 1, 3] == 0


def test_sheet_of_channels() -> None:
    table = torch.randn(3, 5, 6)
    sheet = table_channels(table)
    assert sheet.shape == (2 * 4 - 1, 3 * 6 - 1)
    torch.testing.assert_close(sheet[4:, 6:11], table[..., 4])
    assert sheet[3].isnan().all()


def test_picture(tmp_path: Path) -> None:
    network, x = small("vanilla").eval(), images("vanilla", batch=1)
    path = draw(interactions(network, x, layers=("layer4",)), tmp_path / "new" / "view.png")
    with Image.open(path) as image:
        assert image.width > 800
        assert len(image.convert("RGB").getcolors(10**7) or ()) > 100


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    network = small("small images").eval()
    names = tuple(f"class {i} {HOSTILE}" for i in range(network.num_classes))
    save_pretrained(network, tmp_path / "model", Card(Preprocessing(size=32), names))
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 60, 3), np.uint8)).save(tmp_path / "a.png")
    arguments = ["view", str(tmp_path / "model"), str(tmp_path / "a.png"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--query", "10", "20", "--layers", "layer3", "layer4"]) == 0
    said = capsys.readouterr().out
    assert "c5" in said
    assert "layer4.0.conv2 │" in said  # whole, also in 80 columns
    assert "view.html" in said.replace("\n", "")
    assert "position tables (layer3.0.conv2, layer3.1.conv2, layer4.0.conv2, layer4.1.conv2) are still close" in said
    text = (tmp_path / "out" / "view.html").read_text()
    assert '"query": [10, 20]' in text
    assert "<script>alert" not in text
    assert (tmp_path / "out" / "view.png").stat().st_size > 10_000
    assert main([*arguments, "--query", "40", "0"]) == 2
    assert "outside the input of 32 x 32" in capsys.readouterr().err
    (tmp_path / "a.png").write_bytes(b"no picture")
    assert main(arguments) == 2
    assert "a.png: not a readable" in capsys.readouterr().err
