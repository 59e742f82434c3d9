"""The page, in gradio: a picture goes in, answers come out, and a frame in which any pixel can be clicked."""

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
FORGET_SECONDS = 1800  # how long an uploaded picture is kept; looked after every minute
MOST_WAITING = 16
THUMBNAIL = 192

Shown = tuple[Any, Any, Any]  # picture, answers, frame


@dataclass(frozen=True, eq=False)
class Desk:
    """What the page asks when something is clicked: generators, because answers are known before the maps are."""

    model: Model
    examples: tuple[Example, ...]
    limits: Limits
    layers: tuple[str, ...] = ()

    def upload(self, path: str | None, least_share: float) -> Iterator[Shown]:
        """A file that somebody uploaded."""
        try:
            image = None if path is None else read_picture(path, self.limits, self.model.exif_orientation)
        except BrokenImageError as error:
            yield nothing(str(error))
        else:
            yield from self.show(image, least_share)

    def example(self, index: int, least_share: float) -> Iterator[Shown]:
        yield from self.show(self.examples[index].image, least_share)

    def again(self, path: str | None, index: int | None, least_share: float) -> tuple[Any, Any]:
        """The answers to what is shown, with another slider: the first of them, before the maps."""
        asked = self.upload(path, least_share) if index is None else self.example(index, least_share)
        picture, answers, _ = next(asked)
        return picture, answers

    def show(self, image: Image.Image | None, least_share: float) -> Iterator[Shown]:
        if image is None:
            yield nothing("")
            return
        answers = self.model.answer(image, least_share)
        picture, listed = answers.picture, bars(answers)
        yield picture, listed, waiting("The maps of the lambda layers follow ...")
        try:
            frame = self.model.look(image, self.layers).frame(FRAME)
        except ValueError as error:  # no lambda layers, or too much for one page: the answers stand
            frame = waiting(f"Where it looks cannot be shown: {error}.")
        yield picture, listed, frame


def build(desk: Desk, what: str) -> gr.Blocks:
    """The page of a network; `what` is where its weights are."""
    model = desk.model
    megabytes, megapixels = desk.limits.bytes / 2**20, desk.limits.pixels / 1e6
    finds = "says what it is" if model.least_share is None else "finds the objects in it"
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(60, FORGET_SECONDS), fill_width=True) as blocks:
        gr.HTML(header(what, model.about, finds))
        with gr.Row():
            with gr.Column(scale=4, min_width=280):
                file = gr.File(
                    label="Your picture",
                    file_types=list(EXTENSIONS),
                    height=150,
                    elem_id="upload",
                )
                # On the object, because gradio writes a file beside every class that is derived from a component.
                file.async_move_resource_to_block_cache = no_addresses(file.async_move_resource_to_block_cache)
                gr.HTML(
                    f'<p class="soft">JPEG, PNG, WebP, GIF or BMP, up to {megabytes:.3g} MB and {megapixels:.3g} '
                    "megapixels.</p>" + ("<p>Or one that it was tested on:</p>" if desk.examples else "")
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
                    label="The picture", format="png", interactive=False, buttons=[], height=340, elem_id="picture"
                )
            with gr.Column(scale=4, min_width=280):
                slider = gr.Slider(
                    0.05,
                    0.95,
                    model.least_share or 0.05,
                    step=0.05,
                    label="Only what it is this sure of",
                    visible=model.least_share is not None,
                    elem_id="least",
                )
                answers = gr.HTML(elem_id="answers")  # below: its length must not move the slider
        frame = gr.HTML(elem_id="looks")
        chosen = gr.State(None)  # the number of an example
        least = slider if model.least_share is not None else gr.State(0.0)
        outputs = [picture, answers, frame]
        usual: dict[str, Any] = {"show_progress": "minimal", "concurrency_id": "network", "concurrency_limit": 1}
        file.upload(desk.upload, [file, least], outputs, api_name="analyse", **usual)
        file.upload(lambda: None, None, chosen, api_visibility="private")
        # In the same queue: a slow "clear" must not wipe away what is uploaded after it.
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
    blocks.queue(max_size=MOST_WAITING)
    return blocks


def no_addresses(move: Any) -> Any:
    """gradio would fetch what a request has in place of a file: nothing here asks other machines."""

    async def moved(place: str | Path | None) -> str | None:
        if is_http_url_like(str(place)):
            raise gr.Error("Only uploaded files are read, no addresses.", print_exception=False)
        return await move(place)

    return moved


def pick(example: Callable[[int, float], Iterator[Shown]]) -> Callable[..., Iterator[tuple[Any, ...]]]:
    """A handler for a click in the gallery; gradio tells it where by the type of its argument."""

    def picked(least_share: float, event: gr.SelectData) -> Iterator[tuple[Any, ...]]:
        for one in example(event.index, least_share):
            yield None, event.index, *one

    return picked


def nothing(sentence: str) -> Shown:
    """An empty page with a sentence."""
    return None, f'<p class="refused" role="alert">{html.escape(sentence)}</p>' if sentence else "", ""


def waiting(sentence: str) -> str:
    return f'<p class="soft">{html.escape(sentence)}</p>'


def header(what: str, about: str, finds: str) -> str:
    return (
        f"<h1>What a lambda network sees</h1><p>Give it a picture: it {finds}. Then click a pixel below, and "
        f"every lambda layer shows where that pixel looks, by content and by position.</p>"
        f'<p class="soft"><b>{html.escape(what)}</b>: {html.escape(about)} lambdanets {__version__}</p>'
    )


def bars(answers: Answers) -> str:
    """Names with their probabilities; objects in the colour of their boxes."""
    if not answers.found:
        return '<p class="soft">It finds nothing that it is so sure of. Move the slider to the left to see more.</p>'
    rows = []
    for one in answers.found:
        colour = f"background:rgb{one.colour}" if one.colour else ""
        rows.append(
            f'<li><span class="name">{html.escape(one.name)}</span><span class="share">{probability(one.share)}</span>'
            f'<span class="bar"><i style="width:{100 * one.share:.1f}%;{colour}"></i></span></li>'
        )
    more = f'<p class="soft">and {some(answers.more, "object", "objects")} more</p>' if answers.more else ""
    return f'<ol class="bars">{"".join(rows)}</ol>{more}'
