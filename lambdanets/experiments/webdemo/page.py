"""The page in gradio: an image is uploaded, predictions and a frame with the interactions are shown."""

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from gradio_client.utils import is_http_url_like
from PIL import Image

from lambdanets import __version__
from lambdanets.data.decode import EXTENSIONS, BrokenImageError, Limits
from lambdanets.experiments.webdemo.analyse import Answers, Model, read_picture, shown
from lambdanets.experiments.webdemo.choose import Example
from lambdanets.report.show import probability, some

CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
TITLE = "lambdanets demo"
FRAME = "height:min(900px,92vh);border:0;border-radius:8px"
FORGET_SECONDS = 1800  # how long an uploaded image is kept; checked every minute
MOST_WAITING = 16
THUMBNAIL = 192

Shown = tuple[Any, Any, Any]  # picture, answers, frame
# A click on the large picture selects the pixel in the frame, whose data-window is the part that the network sees.
CLICK = """() => document.querySelector("#picture").addEventListener("click", event => {
  const image = event.target.closest("#picture img"), frame = document.querySelector("#looks iframe");
  if (!image || !frame) return;
  const place = image.getBoundingClientRect(), {naturalWidth: across, naturalHeight: down} = image;
  const scale = Math.min(place.width / across, place.height / down);  // object-fit: contain
  const x = .5 + (event.clientX - place.left - place.width / 2) / (across * scale);
  const y = .5 + (event.clientY - place.top - place.height / 2) / (down * scale);
  const [top, left, height, width] = frame.parentElement.dataset.window.split(",").map(Number);
  frame.contentWindow.postMessage({query: [(y - top) / height, (x - left) / width]}, "*");
})"""


@dataclass(frozen=True, eq=False)
class Desk:
    """The event handlers of the page. They are generators, because predictions are ready before the maps."""

    model: Model
    examples: tuple[Example, ...]
    limits: Limits
    layers: tuple[str, ...] = ()

    def upload(self, path: str | None, least_share: float) -> Iterator[Shown]:
        """Show an uploaded file."""
        try:
            image = None if path is None else read_picture(path, self.limits, self.model.exif_orientation)
        except BrokenImageError as error:
            yield nothing(str(error))
        else:
            yield from self.show(image, least_share)

    def example(self, index: int, least_share: float) -> Iterator[Shown]:
        """Show an example."""
        yield from self.show(self.examples[index].image, least_share)

    def again(self, path: str | None, index: int | None, least_share: float) -> tuple[Any, Any]:
        """Return picture and predictions for a new value of the slider; the maps stay."""
        asked = self.upload(path, least_share) if index is None else self.example(index, least_share)
        picture, answers, _ = next(asked)
        return picture, answers

    def show(self, image: Image.Image | None, least_share: float) -> Iterator[Shown]:
        """Yield picture and predictions, then also the frame with the maps."""
        if image is None:
            yield nothing("")
            return
        answers = self.model.answer(image, least_share)
        picture, listed = answers.picture, bars(answers)
        yield picture, listed, waiting("Computing the maps of the lambda layers ...")
        try:
            window = ",".join(f"{part:.6f}" for part in self.model.window(image))
            frame = f'<div data-window="{window}">{self.model.look(image, self.layers).frame(FRAME)}</div>'
        except ValueError as error:  # no lambda layers, or too much for one page: the predictions are still shown
            frame = waiting(f"The maps cannot be shown: {error}.")
        yield picture, listed, frame


def build(desk: Desk, what: str) -> gr.Blocks:
    """Return the page of a network; `what` is where its weights are."""
    model = desk.model
    megabytes, megapixels = desk.limits.bytes / 2**20, desk.limits.pixels / 1e6
    task = "classify it" if model.least_share is None else "detect the objects in it"
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(60, FORGET_SECONDS), fill_width=True) as blocks:
        gr.HTML(header(what, model.about, task))
        with gr.Row():
            with gr.Column(scale=4, min_width=280):
                file = gr.File(
                    label="Upload an image",
                    file_types=list(EXTENSIONS),
                    height=150,
                    elem_id="upload",
                )
                # Patched on the object: for a derived class gradio would write a file into this package.
                file.async_move_resource_to_block_cache = no_addresses(file.async_move_resource_to_block_cache)
                gr.HTML(
                    f'<p class="soft">JPEG, PNG, WebP, GIF or BMP, up to {megabytes:.3g} MB and {megapixels:.3g} '
                    "megapixels.</p>"
                    + ("<p>Or choose an image that the network was evaluated on:</p>" if desk.examples else "")
                )
                gallery = gr.Gallery(
                    [(shown(one.image, THUMBNAIL), one.name) for one in desk.examples],
                    show_label=False,
                    columns=5,
                    height="auto",
                    object_fit="contain",
                    allow_preview=False,
                    interactive=False,
                    buttons=[],
                    visible=bool(desk.examples),
                    elem_id="examples",
                )
            with gr.Column(scale=4, min_width=280):
                picture = gr.Image(
                    label="Click a pixel", format="png", interactive=False, buttons=[], height=340, elem_id="picture"
                )
            with gr.Column(scale=4, min_width=280):
                slider = gr.Slider(
                    0.05,
                    0.95,
                    model.least_share or 0.05,
                    step=0.05,
                    label="Minimum score",
                    visible=model.least_share is not None,
                    elem_id="least",
                )
                answers = gr.HTML(elem_id="answers")  # below the slider, so that the slider does not move
        frame = gr.HTML(elem_id="looks")
        chosen = gr.State(None)  # index of the shown example
        least = slider if model.least_share is not None else gr.State(0.0)
        outputs = [picture, answers, frame]
        usual: dict[str, Any] = {"show_progress": "minimal", "concurrency_id": "network", "concurrency_limit": 1}
        file.upload(desk.upload, [file, least], outputs, api_name="analyse", **usual)
        file.upload(lambda: None, None, chosen, api_visibility="private")
        # In the same queue, so that a slow "clear" does not remove the next upload.
        file.clear(lambda: (None, *nothing("")), None, [chosen, *outputs], api_visibility="private", **usual)
        gallery.select(pick(desk.example), least, [file, chosen, *outputs], api_visibility="private", **usual)
        slider.change(
            desk.again,
            [file, chosen, least],
            [picture, answers],
            api_visibility="private",
            trigger_mode="always_last",
            **usual,
        )
        if desk.examples:

            def first(least_share: float) -> Iterator[tuple[Any, ...]]:
                yield from ((0, *one) for one in desk.example(0, least_share))

            blocks.load(first, least, [chosen, *outputs], api_visibility="private", **usual)
        blocks.load(None, None, None, js=CLICK)
    blocks.queue(max_size=MOST_WAITING)
    return blocks


def no_addresses(move: Any) -> Any:
    """Refuse URLs in place of files, which gradio would download."""

    async def moved(place: str | Path | None) -> str | None:
        if is_http_url_like(str(place)):
            raise gr.Error("Only uploaded files are accepted, no URLs.", print_exception=False)
        return await move(place)

    return moved


def pick(example: Callable[[int, float], Iterator[Shown]]) -> Callable[..., Iterator[tuple[Any, ...]]]:
    """Return the handler of a click in the gallery; gradio passes the event by the type of the argument."""

    def picked(least_share: float, event: gr.SelectData) -> Iterator[tuple[Any, ...]]:
        for one in example(event.index, least_share):
            yield None, event.index, *one

    return picked


def nothing(sentence: str) -> Shown:
    """Return an empty page with a sentence."""
    return None, f'<p class="refused" role="alert">{html.escape(sentence)}</p>' if sentence else "", ""


def waiting(sentence: str) -> str:
    """Return a sentence as HTML."""
    return f'<p class="soft">{html.escape(sentence)}</p>'


def header(what: str, about: str, task: str) -> str:
    """Return the heading of the page."""
    return (
        f"<h1>What a lambda network sees</h1><p>Upload an image to {task}. Then click a pixel: the maps below show the "
        f"weights of all positions for that pixel in every lambda layer, by content and by position.</p>"
        f'<p class="soft"><b>{html.escape(what)}</b>: {html.escape(about)} lambdanets {__version__}</p>'
    )


def bars(answers: Answers) -> str:
    """Return names and probabilities as HTML; objects have the colour of their boxes."""
    if not answers.found:
        return '<p class="soft">No object has this score. Move the slider to the left to see less certain ones.</p>'
    rows = []
    for one in answers.found:
        colour = f"background:rgb{one.colour}" if one.colour else ""
        rows.append(
            f'<li><span class="name">{html.escape(one.name)}</span><span class="share">{probability(one.share)}</span>'
            f'<span class="bar"><i style="width:{100 * one.share:.1f}%;{colour}"></i></span></li>'
        )
    more = f'<p class="soft">and {some(answers.more, "object", "objects")} more</p>' if answers.more else ""
    return f'<ol class="bars">{"".join(rows)}</ol>{more}'
