"""The page of a run: what stands in it, and that nothing can break out of it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lambdanets.cli import main
from lambdanets.report import run as run_module
from lambdanets.report.page import write_report
from lambdanets.report.plots import MOST_STRIPS, Series, curves, thinned
from lambdanets.report.positions import compare
from lambdanets.report.show import duration, flattened, probability, shortened
from tests.report.runs import HOSTILE, write_run

VOID = {"meta", "img", "br", "input"}


class Page(HTMLParser):
    """Elements, addresses and text by section; raises where elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.section = ""
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs).get("id") or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text[self.section] = " ".join((self.text.get(self.section, "") + " " + data).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def plain_page(run: Path, **options) -> Page:
    """Without pictures, which take a second to find."""
    return read(write_report(run, pictures=0, **options))


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_it_tells_what_happened(tmp_path: Path):
    extra = [
        {"event": "skipped_step", "step": 150, "reason": "the loss is nan"},
        {"event": "broken_image", "name": "train/cat/7.jpg", "reason": "truncated"},
        {"event": "broken_image", "name": "train/cat/7.jpg", "reason": "truncated"},
        {"event": "checkpoint_failed", "step": 300, "reason": "No space left on device"},
        {"event": "resumed", "step": 600, "path": "checkpoints/600.pt", "note": "the newest was damaged"},
    ]
    other = write_run(tmp_path / "twin")
    page = read(write_report(write_run(tmp_path / "digits", extra=extra), beside=[other], pictures=5))
    assert page.text[""].startswith(
        "digits · lambdanets digits resnet26, placement=CCLL, image_size=28, scope=7 top-1 97.02%"
    )
    assert "1.23 M" in page.text[""]
    assert "2 min 0 s" in page.text[""]
    assert "twin" in page.text["beside"]
    for title in ("loss (cross-entropy", "top-1", "learning rate", "images per second", "validation, raw weights"):
        assert title in page.text["curves"]
    events = page.text["events"]
    assert "1 step was skipped" in events
    assert "the loss is nan" in events
    assert "1 image could not be read" in events  # the same one twice
    assert "train/cat/7.jpg truncated" in events
    assert "the newest was damaged" in events
    assert "1 checkpoint could not be written" in events
    assert "No space left on device" in events
    assert "Batch norm uses micro-batches of 8." in events
    assert "Dotted lines: skipped steps, resumed." in page.text["curves"]
    assert "loss (cross-entropy with label smoothing 0.1)" in page.text["curves"]
    assert "of 400 images are classified correctly" in page.text["confusion"]
    cells = [attributes.get("class") for tag, attributes in page.elements if tag == "rect"]
    assert cells.count("right") == 10
    made = load_file(tmp_path / "digits" / "predictions.safetensors")
    answers = set(zip(made["labels"].tolist(), made["logits"].argmax(1).tolist(), strict=True))
    assert cells.count("wrong") == sum(label != answer for label, answer in answers)
    assert "6 predicted as 9: 7 of 40 (17.5%)" in page.text["confusion"]
    mistakes = [attributes for tag, attributes in page.elements if tag == "img" and attributes.get("class") == "tiny"]
    assert len(mistakes) == 5
    assert "mnist/validation:" in page.text["mistakes"]
    assert page.text["classes"].count("40") >= 10
    assert "layer3.0.spatial.positions.table 23x23x16" in page.text["positions"]
    assert "A chip" in page.text["setup"]
    assert "optimizer.momentum 0.9" in page.text["setup"]


def test_it_is_self_contained(tmp_path: Path):
    path = write_report(write_run(tmp_path / "run"))
    page = read(path)
    assert page.count("script") == page.count("link") == page.count("iframe") == 0
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert value is not None
                assert value.startswith(("data:image/", "#")), value
    assert not re.search(r"@import|url\((?!#)", path.read_text())
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_names_cannot_break_out(tmp_path: Path):
    names = [HOSTILE, '"><img src=x onerror=alert(1)>', "{{ config }}", "]]>&amp;<!--"]
    extra = [
        {"event": "broken_image", "name": HOSTILE, "reason": HOSTILE},
        {"event": "skipped_step", "step": 5, "reason": HOSTILE},
        {"event": "evaluation", "step": 600, "weights": HOSTILE, "split": HOSTILE, "top1": 0.5, "examples": HOSTILE},
    ]
    run = write_run(tmp_path / "<b>run", names, extra=extra)
    config = json.loads((run / "config.json").read_text())
    config["model"] |= {"name": HOSTILE, "options": [HOSTILE]}
    config[HOSTILE] = HOSTILE
    (run / "config.json").write_text(json.dumps(config))
    page = read(write_report(run, beside=[write_run(tmp_path / "<i>other", names)], pictures=1))
    assert page.count("script") == 0
    plain = read(write_report(write_run(tmp_path / "plain", extra=extra[:2]), beside=[tmp_path / "plain"], pictures=1))
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements}
    for section in ("events", "confusion", "classes", "setup"):
        assert HOSTILE in page.text[section], section
    assert "{{ config }}" in page.text["classes"]


def test_a_run_that_has_just_begun(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").write_text('{"event": "start", "time": 0}\n')
    page = read(write_report(run))
    assert "has not ended" in page.text[""]
    assert "No training step has been logged yet" in page.text["curves"]
    assert "has no predictions yet" in page.text["confusion"]


@pytest.mark.parametrize("name", ["config.json", "predictions.safetensors", "weights.safetensors", "start.safetensors"])
def test_a_damaged_file_is_named_and_the_rest_shown(tmp_path: Path, name: str):
    run = write_run(tmp_path / "run")
    (run / name).write_bytes((run / name).read_bytes()[:40])
    page = plain_page(run)
    assert f"{name} could not be read" in page.text[""]
    assert "learning rate" in page.text["curves"]


def test_predictions_that_do_not_fit(tmp_path: Path):
    run = write_run(tmp_path / "run")
    state = load_file(run / "predictions.safetensors")
    save_file(state | {"labels": state["labels"][:-1].clone()}, run / "predictions.safetensors")
    assert "the shapes of its tensors do not match" in plain_page(run).text[""]


def test_pictures_that_have_gone(tmp_path: Path):
    page = read(write_report(write_run(tmp_path / "run", data=str(tmp_path / "gone")), pictures=3))
    assert page.text["mistakes"].count("Image not shown") == 3


def test_one_picture_that_cannot_be_read_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = write_run(tmp_path / "run")
    read_image = run_module.read_image(run_module.read_run(run))
    seen: list[int] = []

    def flaky(index: int):
        seen.append(index)
        if len(seen) == 1:
            raise OSError("the disk is tired")
        return read_image(index)

    monkeypatch.setattr("lambdanets.report.page.read_image", lambda _: flaky)
    page = read(write_report(run, pictures=3))
    assert page.text["mistakes"].count("the disk is tired") == 1
    assert sum(a.get("class") == "tiny" for tag, a in page.elements if tag == "img") == 2


@pytest.mark.parametrize("classes", [1, 2, 100, 300])
def test_any_number_of_classes(tmp_path: Path, classes: int):
    page = plain_page(write_run(tmp_path / "run", [f"class {i}" for i in range(classes)], examples=900))
    rows = page.text["classes"].count("class ") - page.text["classes"].count("class by class")
    assert rows >= classes
    assert ("shows the 50 of 300 classes" in page.text["confusion"]) == (classes == 300)


def test_the_same_run_gives_the_same_page(tmp_path: Path):
    run = write_run(tmp_path / "run")
    first = write_report(run, pictures=2).read_bytes()
    assert write_report(run, pictures=2).read_bytes() == first
    assert not list(run.glob("*.part"))


def test_how_far_a_table_moved():
    start = torch.randn(5, 7, 4)
    assert compare("same", start, 3 * start).cosine == pytest.approx(1)
    assert compare("same", start, 3 * start).after == pytest.approx(3 * float(start.square().mean().sqrt()))
    assert compare("turned", start, -start).cosine == pytest.approx(-1)
    assert compare("gone", start, torch.zeros(5, 7, 4)).cosine == 0
    end = start.clone()
    end[1, 2] += 1
    change = compare("one", start, end).change_HW
    assert change is not None
    assert change.nonzero().tolist() == [[1, 2]]
    assert change[1, 2] == pytest.approx(2)  # the root of four ones


def test_curves_are_thinned_but_whole():
    points = [(float(i), float(i)) for i in range(10_001)]
    few = thinned(points, 100)
    assert len(few) == 100
    assert sum(y for _, y in few) / 100 == pytest.approx(5000, rel=0.01)
    assert curves([Series([])], label="nothing") is None
    assert curves([Series([(1, 2.0)])], label="one point") is not None


def readouts(text: str) -> list[list[str]]:
    """The lines that a chart shows on hover, strip by strip."""
    return [re.findall(r"<text[^>]*>([^<]*)</text>", one) for one in re.findall(r'<g class="tip">(.*?)</g>', text)]


def test_values_on_hover():
    training = Series([(10, 0.5), (20, 0.25), (30, 0.125)], 1, name="training")
    evaluated = Series([(20, 0.3), (30, 0.2)], 2, "o-", name="validation <b>")
    svg = curves([training, evaluated], label="loss")
    assert svg is not None
    assert readouts(svg) == [
        ["step 10", "training: 0.5", "validation &lt;b&gt;: 0.3 (step 20)"],
        ["step 20", "training: 0.25", "validation &lt;b&gt;: 0.3"],
        ["step 30", "training: 0.125", "validation &lt;b&gt;: 0.2"],
    ]
    strips = re.findall(r'class="hit" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)
    edges = [(float(x), float(x) + float(width)) for x, width in strips]
    assert [end for _, end in edges[:-1]] == pytest.approx([start for start, _ in edges[1:]], abs=0.2)
    dots = re.findall(r'<circle class="d1" cx="([\d.]+)" cy="([\d.]+)"', svg)
    places = [(float(x), float(y)) for x, y in dots]
    assert places == sorted(places)  # larger steps further right, smaller values further down
    for (x, _), (left, right) in zip(places, edges, strict=True):
        assert left <= x <= right
    share = curves([Series([(1, 0.97015)])], label="top-1", percent=True)
    assert share is not None
    assert readouts(share) == [["step 1", "97.02%"]]


def test_a_single_value_is_shown_near_its_step():
    svg = curves([Series([(i, 1.0) for i in range(101)]), Series([(100, 2.0)], 2)], label="loss")
    assert svg is not None
    shown = readouts(svg)
    assert [len(one) for one in (shown[0], shown[-1])] == [2, 3]


def test_long_runs_have_few_strips():
    svg = curves([Series([(i, 1 / (i + 1)) for i in range(5000)])], label="loss", log=True)
    assert svg is not None
    assert len(readouts(svg)) == MOST_STRIPS


@pytest.mark.parametrize(("classes", "told"), [(2, False), (5, False), (6, True)])
def test_top5_needs_more_than_five_classes(tmp_path: Path, classes: int, told: bool):
    names = [f"class {i}" for i in range(classes)]
    run = write_run(tmp_path / "run", names)
    page = plain_page(run, beside=[run])
    assert ("top-5" in page.text[""]) == told
    assert ("top-5" in page.text["beside"]) == told
    assert "top-1" in page.text["beside"]


def test_training_and_evaluation_have_the_same_loss(tmp_path: Path):
    run = write_run(tmp_path / "run", end=False)
    earlier = plain_page(run).text["curves"]
    assert "validation, averaged weights, without label smoothing" in earlier
    log = run / "log.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        if record["event"] == "evaluation":
            record["smoothed_loss"] = 7.125
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = plain_page(run).text["curves"]
    assert "without label smoothing" not in page
    assert "validation, averaged weights: 7.125" in page
    config = json.loads((run / "config.json").read_text())
    assert "mixed" not in page
    (run / "config.json").write_text(json.dumps(config | {"augment": {"mixup": 0.2, "cutmix": 0.0}}))
    assert "Training images are mixed (mixup)" in plain_page(run).text["curves"]


def test_words():
    assert [duration(s) for s in (5, 65, 7300)] == ["5 s", "1 min 5 s", "2 h 1 min"]
    assert [probability(p) for p in (0.0, 0.5, 1.0)] == ["<0.1%", "50.0%", ">99.9%"]
    assert shortened("abcdefghij", 10) == "abcdefghij"
    assert shortened("abcdefghijk", 10) == "abcde…hijk"
    assert flattened({"a": {"b": 1, "c": [2]}, "d": None, "e": {}}) == [
        ("a.b", "1"),
        ("a.c", "[2]"),
        ("d", ""),
        ("e", "{}"),
    ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--pictures", "0"]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "no log.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("known_by", [{"task": "detection"}, {"heads": {}}, {"task": "language"}, {"text": "python"}])
def test_runs_of_other_tasks(tmp_path: Path, known_by: dict[str, object], capsys: pytest.CaptureFixture[str]):
    (tmp_path / "log.jsonl").write_text(json.dumps({"event": "start", "time": 0}) + "\n")
    (tmp_path / "config.json").write_text(json.dumps(known_by))
    assert main(["report", str(tmp_path)]) == 2
    assert "which this report does not show" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
