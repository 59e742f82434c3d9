"""The page in a real browser: upload, see, click, and bad files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser, Frame, Page, expect, sync_playwright

from lambdanets.experiments.webdemo.analyse import Classifier, open_model, read_picture
from lambdanets.experiments.webdemo.choose import Example
from lambdanets.experiments.webdemo.page import Desk
from lambdanets.report.show import probability
from lambdanets.view import interactions
from lambdanets.view.command import as_input
from tests.experiments.webdemo.helpers import HOSTILE, LIMITS, detector_weights, noise, served
from tests.support.browser import BROWSER
from tests.train.weights import small_weights

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")

NAMES = ("ant", "bee", HOSTILE, "a name that is much longer than anybody would like it to be", "eel", "fox", "gnu")
SECONDS = 60_000  # milliseconds that a busy machine may need
MAPS = """() => data.layers.map(layer => Object.fromEntries(
    Object.entries(layer.panels).map(([kind, panel]) => [kind, [...panel.map]])))"""

PLACE = "slider => slider.getBoundingClientRect().top + window.scrollY"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=SECONDS)
    with sync_playwright() as playwright:
        # No name leads anywhere: what the page would fetch from elsewhere fails.
        offline = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        found = playwright.chromium.launch(executable_path=BROWSER, args=[offline])
        yield found
        found.close()


@contextmanager
def opened(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """A tab; at its end nothing was asked of others and nothing went wrong in it."""
    page = browser.new_page(**options)
    page.set_default_timeout(SECONDS)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: None if inside(request.url, address) else wrong.append(request.url))
    page.goto(address)
    yield page
    assert wrong == []
    page.close()


def inside(url: str, address: str) -> bool:
    return url.startswith((address, "data:", "blob:", "about:"))


def upload(page: Page, path: Path) -> None:
    clear = page.locator("#upload button[aria-label='Clear'], #upload button[aria-label='Remove this file']").first
    if clear.is_visible():
        clear.click()
    page.locator("#upload input[type=file]").set_input_files(path)


def maps_of(page: Page) -> Frame:
    """The frame with the maps, once it is drawn."""
    handle = page.locator("#looks iframe").element_handle()
    assert handle is not None
    frame = handle.content_frame()
    assert frame is not None
    frame.locator("#maps figcaption").first.wait_for()
    return frame


def click(frame: Frame, row: int, column: int, size: tuple[int, ...]) -> None:
    """A pixel of an input of that height and width. Again if it was lost: the page may still be moving its parts."""
    for last in (False, False, True):
        place = frame.locator("#picture").bounding_box()
        assert place is not None
        x, y = (column + 0.5) / size[1] * place["width"], (row + 0.5) / size[0] * place["height"]
        frame.locator("#picture").click(position={"x": x, "y": y})
        try:
            expect(frame.locator("#where")).to_have_text(f"row {row}, column {column}", timeout=SECONDS / 3)
            return
        except AssertionError:
            if last:
                raise


def test_classes_a_click_and_bad_files(tmp_path: Path, browser: Browser) -> None:
    _, path = small_weights(tmp_path / "classes.safetensors", NAMES)
    model = open_model(str(path), device="cpu")
    assert isinstance(model, Classifier)
    desk = Desk(model, (Example(Image.new("RGB", (30, 30), (240, 20, 10)), "red"),), LIMITS)
    picture = noise(tmp_path / "picture.png")
    (tmp_path / "garbage.png").write_bytes(b"no picture at all")
    (tmp_path / "large.png").write_bytes(bytes(LIMITS.bytes + 1))
    with served(desk, f"runs/{HOSTILE}") as address, opened(browser, address) as page:
        # It starts with an example, and shows its maps.
        expect(page.locator("#answers .bars li")).to_have_count(5)
        maps_of(page)
        assert HOSTILE in page.locator("body").inner_text()

        # A picture: its classes, as the network predicts them.
        upload(page, picture)
        image = read_picture(picture, LIMITS)
        expected = model.answer(image).found
        expect(page.locator("#answers .share")).to_have_text([probability(one.share) for one in expected])
        assert page.locator("#answers .name").all_inner_texts() == [one.name for one in expected]

        # A click: where each layer looks, by content and by position.
        frame = maps_of(page)
        _, given = as_input(model.trained, image)
        click(frame, 3, 9, given.shape[1:])
        seen = interactions(model.trained.network, given, (3, 9))
        shown = frame.evaluate(MAPS)
        assert len(shown) == len(seen.layers) == 2
        for maps, layer in zip(shown, seen.layers, strict=True):
            for kind, tensor in (("content", layer.content), ("position", layer.position)):
                assert tensor is not None
                weights = tensor.sum(1).mean(0).flatten()
                torch.testing.assert_close(
                    torch.tensor(maps[kind]), weights, rtol=0, atol=4e-3 * float(tensor.abs().max())
                )
        before = shown
        click(frame, 10, 2, given.shape[1:])
        assert frame.evaluate(MAPS) != before

        # A click on the large picture, of which the network sees a part: the same pixel.
        place = page.locator("#picture img").bounding_box()
        assert place is not None
        scale = min(place["width"] / image.width, place["height"] / image.height)
        top, left, height, width = model.window(image)
        across, down = (left + 9.5 / given.shape[2] * width) * image.width, (top + 3.5 / given.shape[1] * height) * 30
        x, y = place["width"] / 2 + (across - 20) * scale, place["height"] / 2 + (down - 15) * scale
        page.locator("#picture img").click(position={"x": x, "y": y})
        expect(frame.locator("#where")).to_have_text("row 3, column 9")
        assert frame.evaluate(MAPS) == shown

        # Bad files: a sentence each, and the page lives on.
        upload(page, tmp_path / "garbage.png")
        expect(page.locator("#answers .refused")).to_contain_text("This image cannot be used: not a readable JPEG")
        expect(page.locator("#looks iframe")).to_have_count(0)
        upload(page, tmp_path / "large.png")
        expect(page.get_by_text("maximum allowed size")).to_be_visible()
        page.locator("#examples button").first.click()
        expect(page.locator("#answers .bars li")).to_have_count(5)
        maps_of(page)


def test_objects_with_boxes_and_masks(tmp_path: Path, browser: Browser) -> None:
    model = open_model(str(detector_weights(tmp_path / "objects.safetensors")), device="cpu")
    picture = noise(tmp_path / "picture.png", (96, 64))
    image = read_picture(picture, LIMITS)
    with served(Desk(model, (), LIMITS)) as address, opened(browser, address) as page:
        upload(page, picture)
        expect(page.locator("#answers")).to_contain_text("No object has this score.")
        frame = maps_of(page)
        click(frame, 20, 50, (43, 64))
        before = page.locator("#least").evaluate(PLACE)
        page.locator("#least input[type=number]").fill("0.3")
        page.locator("#least input[type=number]").blur()
        answers = model.answer(image, 0.3)
        expect(page.locator("#answers .share")).to_have_text([probability(one.share) for one in answers.found])
        expect(page.locator("#answers")).to_contain_text(f"and {answers.more} objects more")
        assert page.locator("#least").evaluate(PLACE) == before  # the slider does not run away from the mouse
        assert maps_of(page).evaluate("query") == [20, 50]  # the maps stay where they were
        source = page.locator("#picture img").get_attribute("src")
        drawn = tmp_path / "drawn.png"
        drawn.write_bytes(page.request.get(source or "").body())
        assert np.array_equal(np.asarray(Image.open(drawn).convert("RGB")), np.asarray(answers.picture))


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits(tmp_path: Path, browser: Browser, width: int) -> None:
    _, path = small_weights(tmp_path / "classes.safetensors", ("w" * 300, *NAMES[1:]))
    desk = Desk(open_model(str(path), device="cpu"), (Example(Image.new("RGB", (30, 30)), "w" * 90),), LIMITS)
    size = {"width": width, "height": 900}
    with served(desk, "runs/" + "w" * 300) as address, opened(browser, address, viewport=size) as page:
        frame = maps_of(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert frame.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        caption, thumbnail = (
            page.locator(f"#examples .{name}").first.bounding_box() for name in ("caption-label", "thumbnail-item")
        )
        assert caption is not None
        assert thumbnail is not None
        assert caption["height"] > 60, "90 letters need several lines"
        assert thumbnail["y"] + 40 < caption["y"], "below the image"
        assert caption["y"] + caption["height"] <= thumbnail["y"] + thumbnail["height"] + 1, "cut off"
