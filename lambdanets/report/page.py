"""The report of a run: one self-contained HTML file without scripts, with every name escaped."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lambdanets.files import write_text
from lambdanets.report import scores
from lambdanets.report.log import Log, Record, number
from lambdanets.report.matrix import MOST_CLASSES, draw
from lambdanets.report.pictures import LARGE, TINY, encoded, heat
from lambdanets.report.plots import Series, curves
from lambdanets.report.run import ReportedRun, read_image, read_run
from lambdanets.report.show import count, duration, flattened, percent, probability, rate, shortened, some
from lambdanets.report.template import rendered
from lambdanets.runs import REPORT

if TYPE_CHECKING:
    from PIL.Image import Image

    ReadImage = Callable[[int], tuple[str, Image]]

HERE = Path(__file__).parent
MOST_ROWS = 200  # of a list of events
LONG = 48  # letters of a name in a table
CAPTION = 120  # and below a picture
TOP = 5  # of top-5


def write_report(run: Path, *, beside: Sequence[Path] = (), pictures: int = 24) -> Path:
    """Write `run`/report.html and return its path.

    Args:
        run: the folder of a run, finished or not.
        beside: folders of other runs to compare it with.
        pictures: maximum number of mistakes that are shown as images.

    Raises:
        FileNotFoundError: a folder does not exist or has no log.jsonl.
        ValueError: a run is of a task that has no report here, or config.json is of a newer version.
    """
    shown = read_run(Path(run))
    others = [read_run(Path(folder)) for folder in beside]
    text = render(shown, others, pictures)
    write_text(shown.folder / REPORT, text)
    return shown.folder / REPORT


def render(run: ReportedRun, others: Sequence[ReportedRun] = (), pictures: int = 24) -> str:
    """Return the page as text."""
    chart, keys = together([run, *others]) if others else (None, [])
    return rendered(
        HERE,
        title=run.name,
        subtitle=run.network,
        warnings=warnings(run),
        tiles=tiles(run),
        beside=[row(one) for one in (run, *others)] if others else [],
        beside_top5=any(tells_top5(one) for one in (run, *others)),
        beside_chart=chart,
        beside_keys=keys,
        charts=charts(run),
        marked=marked(run),
        events=events(run.log),
        predictions=predictions(run, pictures),
        no_predictions="This run has no predictions yet. They are written when training ends.",
        positions=positions(run),
        facts=facts(run),
        config=flattened(run.config) if run.config else [],
        folder=run.folder.resolve(),
    )


# The top of the page --------------------------------------------------------------------------------------------------


def warnings(run: ReportedRun) -> list[str]:
    said = list(run.problems)
    if run.log.unreadable:
        said.append(f"{some(run.log.unreadable, 'line', 'lines')} of the log could not be read.")
    if not run.log.end:
        said.append("This run has not ended. The page shows its state when the page was written.")
    return said


def tiles(run: ReportedRun) -> list[tuple[str, str]]:
    final, log = run.final, run.log
    last = log.steps[-1] if log.steps else {}
    found = [
        ("top-1", percent(number(final.get("top1")))),
        *([("top-5", percent(number(final.get("top5"))))] if tells_top5(run) else []),
        ("loss", rate(number(final.get("loss")))),
        ("evaluated on", evaluated_on(final)),
        ("parameters", count(run.parameters)),
        ("steps", count(number(last.get("step")))),
        ("time", duration(log.seconds)),
        ("training images/s", rate(run.mean("examples_per_second"))),
    ]
    return [(name, value) for name, value in found if value != "-"]


def tells_top5(run: ReportedRun) -> bool:
    """Return whether top-5 is informative: with five classes or fewer it is always 100%."""
    return run.classes is None or run.classes > TOP


def evaluated_on(final: Record) -> str:
    if not final:
        return "-"
    examples = number(final.get("examples"))
    return (
        f"{final.get('examples', '?') if examples is None else f'{examples:,.0f}'} images, {words(final.get('split'))}"
    )


def words(split: object) -> str:
    return str(split or "validation").replace("_", " ")


def row(run: ReportedRun) -> dict[str, str]:
    """Return one row of the comparison."""
    return {
        "name": run.name,
        "network": run.network,
        "top1": percent(number(run.final.get("top1"))),
        "top5": percent(number(run.final.get("top5"))) if tells_top5(run) else "-",
        "parameters": count(run.parameters),
        "speed": rate(run.mean("examples_per_second")),
        "time": duration(run.log.seconds),
    }


def together(runs: Sequence[ReportedRun]) -> tuple[Markup | None, list[tuple[str, int]]]:
    """Return the evaluations of the first four runs in one chart, and its legend."""
    drawn = [(run, i) for i, run in enumerate(runs[:4], 1)]
    lines = [
        Series(run.log.curve("top1", run.log.evaluated("ema") or run.log.evaluations), i, "o-", run.name)
        for run, i in drawn
    ]
    return curves(lines, label="comparison", percent=True), [(run.name, i) for run, i in drawn]


# Curves ---------------------------------------------------------------------------------------------------------------


def charts(run: ReportedRun) -> list[dict[str, Any]]:
    """Return the charts of training and evaluation, with titles and legends."""
    log = run.log
    marks = [step for step, _ in log.curve("step", (*log.skipped, *log.resumed))]
    evaluations = groups(log.evaluations)[:3]
    found = []
    for name, title, options in (
        ("loss", loss_title(run), {"log": True}),
        ("top1", "top-1", {"percent": True}),
        ("lr", "learning rate", {"from_zero": True}),
        ("examples_per_second", "images per second", {"from_zero": True}),
    ):
        training = "labelled_loss" if name == "loss" and log.curve("labelled_loss") else name  # of co-training
        said = "training, against the teacher" if training == "loss" and log.curve("teacher_loss") else "training"
        lines = [Series(log.curve(training), 1, name=said if evaluations else "")]
        for i, (said, records) in enumerate(evaluations, 2):
            points, said = evaluated(name, said, records, smoothing(run))
            lines.append(Series(points, i, "o-", said))
        svg = curves(lines, label=name, marks=marks, **options)
        if svg is not None:
            keys = [(line.name, line.colour) for line in lines if line.points]
            found.append({"title": title, "svg": svg, "legend": keys if name in ("loss", "top1") else []})
    return found


def smoothing(run: ReportedRun) -> float:
    """Return the label smoothing of training, 0 if there is none."""
    return number(run.config.get("label_smoothing")) or 0.0


def loss_title(run: ReportedRun) -> str:
    given = smoothing(run)
    return f"loss (cross-entropy with label smoothing {given:g})" if given else "loss (cross-entropy)"


def evaluated(name: str, said: str, records: list[Record], smoothing: float) -> tuple[list[tuple[float, float]], str]:
    """Return one quantity of evaluations and its name in the legend.

    The loss is the one with label smoothing, as in training. Logs of earlier versions have only the one without.
    """
    records_of = Log(steps=tuple(records)).curve
    if name != "loss" or not smoothing:
        return records_of(name), said
    return records_of("smoothed_loss") or records_of("loss"), said if records_of(
        "smoothed_loss"
    ) else f"{said}, without label smoothing"


def groups(evaluations: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    """Return the evaluations of each split and kind of weights, with a name for the legend."""
    found: dict[str, list[Record]] = {}
    for record in evaluations:
        weights = "averaged weights" if record.get("weights", "ema") == "ema" else "raw weights"
        found.setdefault(f"{words(record.get('split'))}, {weights}", []).append(record)
    return list(found.items())


def marked(run: ReportedRun) -> list[str]:
    """Return sentences that explain the curves."""
    log, said = run.log, []
    if log.steps:
        said.append("Move the pointer over a chart, or tap it, to read the values.")
    if log.steps and log.evaluations:
        said.append(
            "Training values are measured on augmented images in training mode, so they can be worse than those of the "
            "evaluation."
        )
    mixing = [name for name in ("mixup", "cutmix") if number(part(run.config, "augment").get(name))]
    if mixing and log.steps:
        said.append(
            f"Training images are mixed ({' and '.join(mixing)}) and evaluated images are not, so only the trends of "
            "the two losses can be compared."
        )
    kinds = [word for word, records in (("skipped steps", log.skipped), ("resumed", log.resumed)) if records]
    if kinds:
        said.append(f"Dotted lines: {', '.join(kinds)}.")
    return said


def part(config: Record, name: str) -> Record:
    """Return a part of a configuration; one that is missing or damaged is empty."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


# Events ---------------------------------------------------------------------------------------------------------------


def events(log: Log) -> list[dict[str, Any]]:
    """Return what interrupted or disturbed training, each with a sentence and a table."""
    broken = {str(record.get("name", "?")): str(record.get("reason", "")) for record in log.broken}
    found = [
        event(
            f"{some(len(log.skipped), 'step was', 'steps were')} skipped because the loss or a gradient was not "
            "finite. Weights and batch-norm statistics were restored."
            if log.skipped
            else "No step was skipped: the loss and all gradients were finite.",
            "skipped steps",
            ("step", "reason"),
            [(record.get("step", "?"), record.get("reason", "")) for record in log.skipped],
        ),
        event(
            f"{some(len(broken), 'image', 'images')} could not be read and {'was' if len(broken) == 1 else 'were'} "
            "replaced by others."
            if broken
            else "All images could be read.",
            "unreadable images",
            ("image", "reason"),
            list(broken.items()),
        ),
        event(
            f"The run was resumed {some(len(log.resumed), 'time', 'times')}."
            if log.resumed
            else "The run was not interrupted.",
            "checkpoints",
            ("step", "checkpoint", "note"),
            [(record.get("step", "?"), record.get("path", ""), record.get("note", "") or "") for record in log.resumed],
        ),
    ]
    if log.failed:
        rows = [(record.get("step", "?"), record.get("reason", "")) for record in log.failed]
        sentence = f"{some(len(rows), 'checkpoint', 'checkpoints')} could not be written; the previous one was kept."
        found.append(event(sentence, "failed checkpoints", ("step", "reason"), rows))
    if log.start.get("note"):
        found.append(event(f"{str(log.start['note']).removesuffix('.')}.", "", (), []))
    return found


def event(sentence: str, summary: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    if len(rows) > MOST_ROWS:
        summary += f" (the first {MOST_ROWS})"
    return {"sentence": sentence, "summary": summary, "columns": columns, "rows": rows[:MOST_ROWS]}


# Predictions ----------------------------------------------------------------------------------------------------------


def predictions(run: ReportedRun, pictures: int) -> dict[str, Any] | None:
    made = run.predictions
    if made is None:
        return None
    logits_NC, labels_N = scores.labelled(made.logits_NC, made.labels_N)
    if not len(labels_N):
        return None
    matrix_CC = scores.confusion(logits_NC, labels_N)
    right = int(matrix_CC.diagonal().sum())
    sentence = f"{right:,} of {len(labels_N):,} images are classified correctly."
    sentence += " Rows are true classes, columns are predicted classes; the shade is the share of the row."
    if len(matrix_CC) > MOST_CLASSES:
        sentence += f" The matrix shows the {MOST_CLASSES // 2} of {len(matrix_CC)} classes with the lowest recall."
    names = made.names
    return {
        "sentence": sentence,
        "matrix": draw(matrix_CC, names),
        "pairs": [
            (shortened(names[i], LONG), shortened(names[j], LONG), n) for i, j, n in scores.confused_pairs(matrix_CC)
        ],
        "mistakes": mistakes(run, pictures),
        "classes": [
            {
                "name": names[one.index],
                "examples": one.examples,
                "recall": one.recall,
                "precision": one.precision,
                "f1": one.f1,
                "taken_for": None if one.taken_for is None else shortened(names[one.taken_for], LONG),
                "taken_for_count": one.taken_for_count,
            }
            for one in scores.by_class(matrix_CC)
        ],
    }


def mistakes(run: ReportedRun, limit: int) -> list[dict[str, Any]]:
    made = run.predictions
    assert made is not None
    found = scores.hardest(made.logits_NC.float(), made.labels_N, limit)
    read: ReadImage | None = None
    why_not = ""
    if found:
        try:
            read = read_image(run)
        except (ValueError, OSError, ImportError) as error:
            why_not = f"Image not shown: {error}"
    shown = []
    for one in found:
        index = int(made.indices_N[one.row])
        name, picture, tiny, reason = f"image {index}", None, False, why_not
        if read is not None:
            try:
                name, image = read(index)
                picture, tiny = encoded(image, LARGE), max(image.size) <= TINY
            except (ValueError, OSError, IndexError) as error:  # it may have been deleted since
                reason = f"Image not shown: {error}"
        shown.append(
            {
                "name": name,
                "picture": picture,
                "tiny": tiny,
                "why_not": reason,
                "label": shortened(made.names[one.label], CAPTION),
                "answer": shortened(made.names[one.answer], CAPTION),
                "label_probability": probability(one.label_probability),
                "answer_probability": probability(one.answer_probability),
            }
        )
    return shown


# The rest -------------------------------------------------------------------------------------------------------------


def positions(run: ReportedRun) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "shape": "x".join(map(str, one.shape)),
            "cosine": one.cosine,
            "before": f"{one.before:.3g}",
            "after": f"{one.after:.3g}",
            "picture": None if one.change_HW is None else heat(one.change_HW),
        }
        for one in run.movements
    ]


def facts(run: ReportedRun) -> list[tuple[str, str]]:
    log, start = run.log, run.log.start
    wait = run.mean("data_wait")
    found = [
        ("training images/s", rate(run.mean("examples_per_second"))),
        ("time spent waiting for data", percent(wait, 1)),
        ("total time", duration(log.seconds)),
        ("checkpoints", str(len(log.checkpoints))),
        *((f"machine: {name}" if name else "machine", value) for name, value in flattened(start.get("machine"))),
        *((f"version: {name}" if name else "versions", value) for name, value in flattened(start.get("versions"))),
        ("commit", str(start.get("commit") or "")),
    ]
    return [(name, value) for name, value in found if value not in ("", "-")]
