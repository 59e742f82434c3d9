"""The lines of each experiment: cells combined with counts, measurements and accuracies, ready to print."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from lambdanets.experiments.reproduce import growth
from lambdanets.experiments.reproduce.experiments import EXPERIMENTS, Cell, Kind
from lambdanets.experiments.reproduce.jobs import OUT_OF_MEMORY, GrowthJob, NetworkJob, Settings, Store, hardware
from lambdanets.experiments.reproduce.marks import UNPRINTED
from lambdanets.experiments.reproduce.pareto import Headline, headlines, published
from lambdanets.files import read_object

MISSING = "-"
QUICK = "--quick"  # in the notes of measurements with small images
IMAGENETTE = "runs/compare/compare.json"
COLUMNS = ("row", "quantity", "unit", "paper", "ours", "kind", "hardware", "note")


@dataclass(frozen=True)
class Number:
    """A line of an experiment. `paper` and `ours` are texts; `value` is our number."""

    row: str
    quantity: str
    unit: str
    paper: str
    ours: str
    kind: Kind
    hardware: str
    note: str
    value: float | None = None


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a network that we trained, in percent, over several runs."""

    top1: float
    spread: float | None
    runs: int
    data: str
    hardware: str


def read_accuracy(file: str) -> dict[str, Accuracy]:
    """Read the accuracies of the final runs in a compare.json, by network; "imagenette" means the default path."""
    path = Path(IMAGENETTE if file == "imagenette" else file)
    path = path / "compare.json" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"{path} does not exist: `lambdanets experiments compare` writes the file for --accuracy")
    try:
        about = read_object(path, constants=True)
        found: dict[str, list[float]] = {}
        for row in about["rows"]:
            if row["phase"] == "final":
                found.setdefault(str(row["network"]), []).append(100 * float(row["top1"]))
        data = str(about.get("data", "Imagenette"))  # older files have no such key and are about Imagenette
        where = hardware(about)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a compare.json of `lambdanets experiments compare` ({error!r})") from None
    return {
        name: Accuracy(fmean(scores), stdev(scores) if len(scores) > 1 else None, len(scores), data, where)
        for name, scores in found.items()
    }


def numbers(name: str, store: Store, settings: Settings, accuracy: Mapping[str, Accuracy]) -> list[Number]:
    """Return the lines of one experiment with everything counted and measured so far."""
    found = []
    for cell, counted in counted_cells(name):
        if cell.kind == "measured":
            found.append(measured(cell, store, settings))
        elif counted is not None:
            found.append(counted)
        else:
            own = "published" if cell.note else "the paper's own"
            found.append(number(cell, MISSING, note=join(f"{own}, not trained here", cell.note)))
            if cell.contestant is not None and cell.contestant in accuracy:
                found.append(own_accuracy(cell, accuracy[cell.contestant]))
    return found


@cache
def counted_cells(name: str) -> tuple[tuple[Cell, Number | None], ...]:
    """Return the cells of an experiment, with the numbers of exact cells, which never change."""
    return tuple((cell, None if cell.compute is None else exact(cell)) for cell in EXPERIMENTS[name].cells())


def number(cell: Cell, ours: str, *, note: str = "", hardware: str = MISSING, value: float | None = None) -> Number:
    paper = MISSING if cell.paper is None else cell.paper
    return Number(cell.row, cell.quantity, cell.unit, paper, ours, cell.kind, hardware, note, value)


def join(*sentences: str) -> str:
    return "; ".join(sentence for sentence in sentences if sentence)


def exact(cell: Cell) -> Number:
    assert cell.compute is not None
    one = cell.compute()
    if one.unit == "" and one.ours is None:  # a setting or formula: our value is in the note
        return number(cell, one.note, note=join(one.mark, cell.note))
    if one.ours is None:
        return number(replace(cell, kind="paper"), MISSING, note=join(one.mark, one.note, cell.note))
    digits = 2 if one.paper == UNPRINTED else len(one.paper.partition(".")[2]) + 1
    reading = "" if one.reading is None else f"{one.reading:.{digits}f}: "
    note = join(one.mark, reading + one.note, cell.note)
    return number(cell, f"{one.ours:.{digits}f}", note=note, value=one.ours)


def measured(cell: Cell, store: Store, settings: Settings) -> Number:
    assert cell.job is not None
    result = store.get(cell.job, settings)
    note = cell.note
    if isinstance(cell.job, GrowthJob):
        sizes = cell.job.sizes(settings)
        operation = growth.TABLES[cell.job.table][cell.job.operation]
        ratios = growth.formula(operation, sizes, cell.job.letter)
        cell = replace(cell, paper=f"{ratios[0 if cell.field == 'seconds' else 1]:.2f}")
        note = join(note, f"from {sizes.text()}")
    if result is None:
        return number(cell, MISSING, note=join("not measured yet", note))
    if "error" in result:
        ours = "OOM" if result["error"] == OUT_OF_MEMORY else MISSING
        return number(cell, ours, note=join(result["error"], note), hardware=result["hardware"])
    value = result[cell.field] / cell.divide
    if isinstance(cell.job, NetworkJob):
        note = join(network_note(cell, cell.job, result, settings), note)
    text = f"{value:.2f}" if cell.unit == "x" else f"{value:.4g}" if value < 1000 else f"{value:.0f}"
    return number(cell, text, note=note, hardware=result["hardware"], value=value)


def network_note(cell: Cell, job: NetworkJob, result: Mapping[str, Any], settings: Settings) -> str:
    protocol = settings.protocol(job.mode, job.half)
    batch = result["peak_batch"] if cell.field == "peak_bytes" else result["batch"]
    words = [f"{protocol.precision}, {protocol.how}, batch {batch}"]
    if result["batch"] < result["asked_batch"] and cell.field != "peak_bytes":
        words[0] += ", the largest that fits"
    if not result["fold"]:
        words.append("batch norm not folded")
    if result["image_size"] != job.image_size:
        words.append(f"{QUICK}: {result['image_size']} px instead of {job.image_size}")
    return join(*words)


def own_accuracy(cell: Cell, found: Accuracy) -> Number:
    spread = "" if found.spread is None else f" ± {found.spread:.2f}"
    note = f"trained here on {found.data}, mean of {found.runs}: not comparable with ImageNet"
    own = replace(cell, quantity=f"top-1 of {found.data}", paper=None, kind="measured")
    return number(own, f"{found.top1:.2f}{spread}", note=note, hardware=found.hardware, value=found.top1)


def found_headlines(store: Store, settings: Settings) -> list[Headline]:
    """Return speed-ups at matched accuracy from all results so far; none with --quick, whose images are too small."""
    found: list[Headline] = []
    if settings.quick:
        return found
    for mode in ("training", "inference"):
        seconds, unknown = {}, set()
        for one in published():
            job = NetworkJob(one.network, one.image_size, mode, half=True)
            result = store.get(job, settings)
            if result is None:
                unknown.add((one.network, one.image_size))
            elif "error" not in result:
                seconds[one.network, one.image_size] = result["seconds_per_1024"]
        found += headlines(seconds, f"{mode}, {settings.protocol(mode, True).how}", unknown)
    return found


def as_json(lines: Iterable[Number]) -> list[dict[str, Any]]:
    return [asdict(one) for one in lines]


def from_json(lines: Iterable[Mapping[str, Any]]) -> list[Number]:
    try:
        return [Number(**line) for line in lines]
    except TypeError as error:
        raise ValueError(f"results of an incompatible version ({error}): choose another folder with --out") from None
