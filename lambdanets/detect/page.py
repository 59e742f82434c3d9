"""The report of a detection run: one self-contained HTML file without scripts, with every name escaped."""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lambdanets.data.decode import decode
from lambdanets.detect import precision
from lambdanets.detect.coco import DetectionSet
from lambdanets.detect.config import DetectConfig
from lambdanets.detect.draw import draw, true_objects
from lambdanets.detect.quality import Quality, quality
from lambdanets.detect.results import Detection, by_picture, check_sizes, read_results
from lambdanets.detect.scenes import Picture
from lambdanets.detect.task import DETECTIONS, PROBLEMS, evaluated_set
from lambdanets.files import write_text
from lambdanets.report.log import Log, number
from lambdanets.report.page import events, facts, groups, warnings
from lambdanets.report.pictures import address
from lambdanets.report.plots import Series, curves
from lambdanets.report.run import ReportedRun, read_log
from lambdanets.report.show import count, duration, flattened, rate, shortened
from lambdanets.report.template import rendered
from lambdanets.runs import CONFIG, LOG, REPORT, read_stored
from lambdanets.typed import from_json

HERE = Path(__file__).parent
SIDE = 420  # pixels of a picture on the page
SHOWN_SCORE = 0.5
LONG = 40
ROWS = ("ap", "ap50", "ap75", "small", "medium", "large", "recall")


@dataclass(frozen=True, eq=False)
class Shown:
    """An image on the page."""

    picture: Picture
    found: tuple[Detection, ...]
    quality: Quality
    index: int


def write_report(folder: Path, pictures: int = 12) -> Path:
    """Write `folder`/report.html and return its path.

    Args:
        folder: the folder of a run of `lambdanets detect train`, finished or not.
        pictures: maximum number of the best and of the worst images.
    """
    if pictures < 0:
        raise ValueError(f"--pictures {pictures} is negative: use 0 or more")
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: pass a folder that `lambdanets detect train` wrote")
    try:
        stored = read_stored(folder)
    except (OSError, ValueError):
        raise ValueError(f"{folder} has no readable {CONFIG}: it is not the folder of a run") from None
    if stored.task != DetectConfig.TASK:
        raise ValueError(f"{folder} is a run of {stored.task}, and this report shows runs of {DetectConfig.TASK}")
    config = from_json(DetectConfig, stored.settings)
    run = ReportedRun(folder, read_log(folder / LOG), stored.settings)
    shown, classes, why_not = looked_at(folder, config, pictures)
    text = rendered(
        HERE,
        title=run.name,
        subtitle=f"{run.network}, {config.size}x{config.size}",
        warnings=warnings(run),
        tiles=tiles(run),
        table=table(run),
        counted=max(precision.COCO_DETECTIONS, config.heads.detections),
        charts=charts(run.log),
        shown=shown,
        why_not=why_not,
        classes=classes,
        events=events(run.log),
        problems=problems(folder),
        facts=facts(run),
        config=flattened(stored.settings),
        folder=folder.resolve(),
    )
    write_text(folder / REPORT, text)
    return folder / REPORT


def percent(value: Any) -> str:
    """Return "41.2" for 0.412, and "-" for anything that is not a finite number."""
    found = number(value)
    return "-" if found is None else f"{100 * found:.1f}"


def tiles(run: ReportedRun) -> list[tuple[str, str]]:
    final, log = run.final, run.log
    last = log.steps[-1] if log.steps else {}
    found = [
        ("box AP", percent(final.get("box_ap"))),
        ("mask AP", percent(final.get("mask_ap"))),
        ("evaluated on", f"{final.get('examples', '?')} pictures, {final.get('split', '')}" if final else "-"),
        ("parameters", count(run.parameters)),
        ("steps", count(number(last.get("step")))),
        ("time", duration(log.seconds)),
        ("training pictures/s", rate(run.mean("examples_per_second"))),
    ]
    return [(name, value) for name, value in found if value != "-"]


def table(run: ReportedRun) -> list[tuple[str, list[str]]]:
    """Return AP of the last evaluation, one row for boxes and one for masks."""
    kinds = [kind for kind in ("box", "mask") if number(run.final.get(f"{kind}_ap")) is not None]
    return [(kind, [percent(run.final.get(f"{kind}_{name}")) for name in ROWS]) for kind in kinds]


def charts(log: Log) -> list[dict[str, Any]]:
    """Return the charts of AP, losses, learning rate and speed."""
    marks = [step for step, _ in log.curve("step", (*log.skipped, *log.resumed))]
    found = []
    for kind in ("box", "mask"):
        for said, records in groups(log.evaluations)[:1]:
            names = ("ap", "ap50", "small", "large")
            lines = [Series(log.curve(f"{kind}_{n}", records), i, "o-", shown_name(n)) for i, n in enumerate(names, 1)]
            svg = curves(lines, label=f"{kind} AP", marks=marks, percent=True)
            if svg is not None:
                keys = [(shown_name(n), i) for i, n in enumerate(names, 1)]
                found.append({"title": f"{kind} AP, {said}", "svg": svg, "legend": keys})
    losses = [f"loss_{name}" for name in ("classifier", "box_reg", "mask", "objectness")]
    lines = [
        Series(log.curve(name), i, name=name.removeprefix("loss_").replace("_", " "))
        for i, name in enumerate(losses, 1)
    ]
    keys = [(line.name, line.colour) for line in lines if line.points]
    for title, series, legend, options in (
        ("training loss", [Series(log.curve("loss"), 1)], [], {"log": True}),
        ("parts of the training loss", lines, keys, {"log": True}),
        ("learning rate", [Series(log.curve("lr"), 1)], [], {"from_zero": True}),
        ("pictures per second", [Series(log.curve("examples_per_second"), 1)], [], {"from_zero": True}),
    ):
        svg = curves(series, label=title, marks=marks, **options)
        if svg is not None:
            found.append({"title": title, "svg": svg, "legend": legend})
    return found


def shown_name(name: str) -> str:
    """Return the name of a metric in a legend."""
    return name.upper() if name.startswith("ap") else name


# Pictures -------------------------------------------------------------------------------------------------------------


def looked_at(folder: Path, config: DetectConfig, pictures: int) -> tuple[list[Any], list[Any], str]:
    """Return the worst and the best images, the classes, and a sentence if there are none."""
    path = folder / DETECTIONS
    if not path.is_file():
        return [], [], "This run has no detections yet. They are written when training ends."
    try:
        results = read_results(path)
        data, indices, _ = evaluated_set(config)
        check_sizes(path, results, data.scenes.pictures)
    except (ValueError, OSError) as error:
        return [], [], f"The images cannot be shown: {error}"
    found = by_picture(results, data.scenes.categories)
    done = []
    for index in np.asarray(indices).tolist():
        picture = data.scenes.pictures[index]
        answers = tuple(found.get(picture.id, ()))
        done.append(Shown(picture, answers, quality(picture, answers), index))
    ordered = sorted((one for one in done if len(one.picture.labels_N)), key=lambda one: one.quality.f1)
    worst, best = ordered[:pictures], ordered[::-1][: min(pictures, max(0, len(ordered) - pictures))]
    parts = [("Worst images", worst), ("Best images", best)]
    shown = [(title, [entry(one, data) for one in chosen]) for title, chosen in parts if chosen]
    return shown, classes_of(data, indices, results, config), ""


def entry(one: Shown, data: DetectionSet) -> dict[str, Any]:
    """Return an image twice, with the annotated objects and with the detections."""
    q, names = one.quality, data.class_names
    said = f"{q.right} found, {q.missed} missed, {q.wrong} wrong"
    highest = max((found.score for found in one.found), default=0.0)
    if highest < SHOWN_SCORE:
        said += f"; the highest score is {highest:.2f}"
    try:
        read = data.read(one.index)
        image = Image.fromarray(read) if isinstance(read, np.ndarray) else decode(read, exif_orientation=False)
    except (ValueError, OSError) as error:  # it may have been deleted since
        return {"name": one.picture.name, "said": said, "pictures": [], "why_not": str(error)}
    truth = true_objects(one.picture, data.scenes.masks)
    sure = [found for found in one.found if found.score >= SHOWN_SCORE]
    drawn = [draw(image, truth, names, scores=False, side=SIDE), draw(image, sure, names, side=SIDE)]
    return {"name": one.picture.name, "said": said, "pictures": [encoded(d) for d in drawn], "why_not": ""}


def encoded(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return address(file, "jpeg")


def classes_of(data: DetectionSet, indices: Any, results: list[Any], config: DetectConfig) -> list[dict[str, Any]]:
    if not precision.available():
        return []
    scores = precision.average_precision(
        data.scenes.as_coco(np.asarray(indices).tolist()),
        results,
        masks=data.scenes.masks,
        detections=config.heads.detections,
    )
    rows = []
    for label, category in enumerate(data.scenes.categories, start=1):
        objects = sum(int((data.scenes.pictures[i].labels_N == label).sum()) for i in np.asarray(indices).tolist())
        values = {kind: found.get(category.id, math.nan) for kind, found in scores.classes.items()}
        rows.append(
            {
                "name": shortened(category.name, LONG),
                "objects": objects,
                "box": percent(values.get("box")),
                "mask": percent(values.get("mask")) if "mask" in values else "",
                "order": values["box"] if math.isfinite(values["box"]) else 2.0,
            }
        )
    return sorted(rows, key=lambda row: row["order"])


def problems(folder: Path) -> list[str]:
    path = folder / PROBLEMS
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[:200] if path.is_file() else []
