"""The report of a run: one HTML file with everything inside, no scripts, every name escaped."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lambdanets.files import write_text
from lambdanets.report import scores
from lambdanets.report.log import Log, Record, number
from lambdanets.report.matrix import MOST_CLASSES, draw
from lambdanets.report.pictures import TINY, encoded, heat
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
LONG = 48  # letters of a name


def write_report(run: Path, *, beside: Sequence[Path] = (), pictures: int = 24) -> Path:
    """Writes `run`/report.html and returns its path.

    Args:
        run: the folder of a run, finished or not.
        beside: other runs to compare it with.
        pictures: how many of the hardest mistakes are shown.
    """
    shown = read_run(Path(run))
    others = [read_run(Path(folder)) for folder in beside]
    text = render(shown, others, pictures)
    write_text(shown.folder / REPORT, text)
    return shown.folder / REPORT


def render(run: ReportedRun, others: Sequence[ReportedRun] = (), pictures: int = 24) -> str:
    """The page as text."""
    chart, keys = together([run, *others]) if others else (None, [])
    return rendered(
        HERE,
        title=run.name,
        subtitle=run.network,
        warnings=warnings(run),
        tiles=tiles(run),
        beside=[row(one) for one in (run, *others)] if others else [],
        beside_chart=chart,
        beside_keys=keys,
        charts=charts(run.log),
        marked=marked(run),
        events=events(run.log),
        predictions=predictions(run, pictures),
        no_predictions="The run has no predictions yet: they are written when it ends.",
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
        said.append("This run has not ended: the page shows it as far as it went.")
    return said


def tiles(run: ReportedRun) -> list[tuple[str, str]]:
    final, log = run.final, run.log
    last = log.steps[-1] if log.steps else {}
    found = [
        ("top-1", percent(number(final.get("top1")))),
        ("top-5", percent(number(final.get("top5")))),
        ("evaluated on", f"{final.get('examples', '?')} images, {final.get('split', '')}" if final else "-"),
        ("parameters", count(run.parameters)),
        ("steps", count(number(last.get("step")))),
        ("time", duration(log.seconds)),
        ("training images/s", rate(run.mean("examples_per_second"))),
    ]
    return [(name, value) for name, value in found if value != "-"]


def row(run: ReportedRun) -> dict[str, str]:
    """One run in the comparison."""
    return {
        "name": run.name,
        "network": run.network,
        "top1": percent(number(run.final.get("top1"))),
        "top5": percent(number(run.final.get("top5"))),
        "parameters": count(run.parameters),
        "speed": rate(run.mean("examples_per_second")),
        "time": duration(run.log.seconds),
    }


def together(runs: Sequence[ReportedRun]) -> tuple[Markup | None, list[tuple[str, int]]]:
    """The evaluations of several runs in one chart, and its legend; four have colours of their own."""
    drawn = [(run, i) for i, run in enumerate(runs[:4], 1)]
    lines = [
        Series(run.log.curve("top1", run.log.evaluated("ema") or run.log.evaluations), i, "o-") for run, i in drawn
    ]
    return curves(lines, label="side by side", percent=True), [(run.name, i) for run, i in drawn]


# Curves ---------------------------------------------------------------------------------------------------------------


def charts(log: Log) -> list[dict[str, Any]]:
    marks = [step for step, _ in log.curve("step", (*log.skipped, *log.resumed))]
    evaluations = groups(log.evaluations)
    found = []
    for name, title, options in (
        ("loss", "loss", {"log": True}),
        ("top1", "top-1", {"percent": True}),
        ("lr", "learning rate", {"from_zero": True}),
        ("examples_per_second", "images per second", {"from_zero": True}),
    ):
        lines = [("training", Series(log.curve(name), 1))]
        for i, (said, records) in enumerate(evaluations[:3], 2):
            lines.append((said, Series(log.curve(name, records), i, "o-")))
        svg = curves([line for _, line in lines], label=title, marks=marks, **options)
        if svg is not None:
            keys = [(said, line.colour) for said, line in lines if line.points]
            found.append({"title": title, "svg": svg, "legend": keys if name in ("loss", "top1") else []})
    return found


def groups(evaluations: Iterable[Record]) -> list[tuple[str, list[Record]]]:
    """Evaluations by split and weights, with words for the legend."""
    found: dict[str, list[Record]] = {}
    for record in evaluations:
        split = str(record.get("split", "validation")).replace("_", " ")
        weights = "averaged weights" if record.get("weights", "ema") == "ema" else "raw weights"
        found.setdefault(f"{split}, {weights}", []).append(record)
    return list(found.items())


def marked(run: ReportedRun) -> list[str]:
    """What one has to know to read the curves."""
    log, said = run.log, []
    words = [word for word, records in (("skipped steps", log.skipped), ("resumed", log.resumed)) if records]
    if words:
        said.append(f"Dotted lines: {', '.join(words)}.")
    smoothing = number(run.config.get("label_smoothing"))
    if smoothing and log.steps:
        said.append(f"The training loss has label smoothing ({smoothing:g}) in it, the others have not.")
    return said


# Events ---------------------------------------------------------------------------------------------------------------


def events(log: Log) -> list[dict[str, Any]]:
    broken = {str(record.get("name", "?")): str(record.get("reason", "")) for record in log.broken}
    found = [
        event(
            f"{some(len(log.skipped), 'step was', 'steps were')} skipped: the loss or a gradient was not finite; "
            "weights and batch norm statistics were put back."
            if log.skipped
            else "No step was skipped: loss and gradients were always finite.",
            "which",
            ("step", "why"),
            [(record.get("step", "?"), record.get("reason", "")) for record in log.skipped],
        ),
        event(
            f"{some(len(broken), 'image', 'images')} could not be read; others took their place."
            if broken
            else "No broken images.",
            "which",
            ("image", "why"),
            list(broken.items()),
        ),
        event(
            f"The run was resumed {some(len(log.resumed), 'time', 'times')}."
            if log.resumed
            else "It was not interrupted.",
            "where",
            ("step", "from", "note"),
            [(record.get("step", "?"), record.get("path", ""), record.get("note", "") or "") for record in log.resumed],
        ),
    ]
    if log.failed:
        rows = [(record.get("step", "?"), record.get("reason", "")) for record in log.failed]
        sentence = f"{some(len(rows), 'checkpoint', 'checkpoints')} could not be written; the one before was kept."
        found.append(event(sentence, "which", ("step", "why"), rows))
    if log.start.get("note"):
        found.append(event(f"{log.start['note']}.", "", (), []))
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
    sentence = f"Of {len(labels_N):,} images, {right:,} were given their class."
    sentence += " Rows are what an image is, columns what it was taken for."
    if len(matrix_CC) > MOST_CLASSES:
        sentence += f" Drawn are the {MOST_CLASSES // 2} hardest of {len(matrix_CC)} classes."
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
            why_not = f"no picture: {error}"
    shown = []
    for one in found:
        index = int(made.indices_N[one.row])
        name, picture, tiny, reason = f"image {index}", None, False, why_not
        if read is not None:
            try:
                name, image = read(index)
                picture, tiny = encoded(image), max(image.size) <= TINY
            except (ValueError, OSError, IndexError) as error:  # it may have gone since
                reason = f"no picture: {error}"
        shown.append(
            {
                "name": name,
                "picture": picture,
                "tiny": tiny,
                "why_not": reason,
                "label": shortened(made.names[one.label], LONG),
                "answer": shortened(made.names[one.answer], LONG),
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
        ("time waiting for data", percent(wait, 1)),
        ("time in all", duration(log.seconds)),
        ("checkpoints", str(len(log.checkpoints))),
        *((f"machine: {name}" if name else "machine", value) for name, value in flattened(start.get("machine"))),
        *((f"version: {name}" if name else "versions", value) for name, value in flattened(start.get("versions"))),
        ("commit", str(start.get("commit") or "")),
    ]
    return [(name, value) for name, value in found if value not in ("", "-")]
