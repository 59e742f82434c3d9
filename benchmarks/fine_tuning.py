"""Compare learning rates and layer decays of fine-tuning on a CPU, to choose the rule in `lambdanets/train/plan.py`.

python benchmarks/fine_tuning.py IMAGENETTE OUTPUT.json [--folder runs/fine-tuning]

The source network is trained on six digits (120 images each), or on five classes of Imagenette (300 photos each, 64
pixels), with the settings of `lambdanets train`. It is fine-tuned on a few images of the other classes for 30 epochs;
all other settings follow the rules. Every accuracy is measured on training images that no run trains on; the test
images are not used. Each seed has its own training images. The same command resumes an interrupted comparison.
"""

import argparse
import json
import statistics
from pathlib import Path

from PIL import Image

from lambdanets.data.source import Source, open_source
from lambdanets.data.split import hashed
from lambdanets.files import write_json
from lambdanets.machine import describe
from lambdanets.options import chosen_device
from lambdanets.runs import WEIGHTS
from lambdanets.train.loop import fit
from lambdanets.train.plan import FROZEN, Machine, make_plan
from lambdanets.train.probe import find_start, look_at

SOURCES = {"digits": (6, 120), "photos": (5, 300)}  # classes of the source network, and images of each
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
SETS = (  # images of each new class, seeds, multiples of the rate from scratch
    ("digits", 5, 1, FACTORS),
    ("photos", 10, 1, FACTORS),
    ("digits", 30, 1, FACTORS),
    ("photos", 50, 1, FACTORS[:-1]),  # the slowest
)
UNSEEN = {"digits": 100, "photos": 60}  # images of each class to measure the accuracy on
EPOCHS = 30.0  # the rule for up to 266 images on a CPU; from scratch, the same steps
Row = dict


def write_images(source: Source, folder: Path, labels: range, first: int, each: int) -> None:
    """Write `each` images of each class to folder/CLASS/*, from the `first` one in a fixed random order."""
    for label in labels:
        target = folder / source.class_names[label]
        target.mkdir(parents=True)
        members = [int(index) for index in (source.labels == label).nonzero()[0]]
        for index in sorted(members, key=lambda i: hashed(0, source.name(i)))[first : first + each]:
            data = source.read(index)
            path = target / f"{index:05d}"
            if isinstance(data, bytes):
                path.with_suffix(".jpg").write_bytes(data)
            else:
                Image.fromarray(data).save(path.with_suffix(".png"))


def run(images: Path, given: Row, weights: Path | None, factor: float = 1.0) -> Row:
    """Train with the settings of `lambdanets train`; with weights at a multiple of the rate from scratch."""
    fixed = {"device": "cpu", "data.workers": 0, "logger": "none", **given}
    if weights is not None:
        fixed["model.pretrained"] = str(weights)
    facts = look_at(str(images), given.get("data.validation"))
    config = make_plan(facts, Machine("cpu"), lambda _: 1e9, fixed, start=find_start(facts, fixed)).config
    rate = factor * 0.004 * (config.batch_size / 32) ** 0.5
    settings = {**fixed, "schedule.rate": rate, "evaluate_every": int(config.epochs)}
    config = make_plan(facts, Machine("cpu"), lambda _: 1e9, settings, start=find_start(facts, settings)).config
    result = fit(config.make_task(), config, resume=True)
    scores = list(result.scores["ema"].values())[-1]
    return {"top1": scores["top1"], "rate": rate, "epochs": config.epochs, "seconds": round(result.seconds, 1)}


def methods(factors: tuple[float, ...]) -> list[tuple[str, float, Row]]:
    """Return the name of each method, its multiple of the rate from scratch, and its settings."""
    every: list = [("from scratch", 1.0, {}), ("the classifier", 1.0, {"model.freeze": FROZEN})]
    for decay in (0.75, 1.0):
        every += [(f"all layers, decay {decay:g}", f, {"optimizer.layer_decay": decay}) for f in factors]
    return every


def means(rows: list[Row]) -> list[Row]:
    found, keys = [], ("data", "each", "method", "factor")
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        values = [row["top1"] for row in rows if tuple(row[name] for name in keys) == key]
        found.append({**dict(zip(keys, key, strict=True)), "top1": statistics.mean(values), "runs": len(values)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("imagenette")
    parser.add_argument("output", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/fine-tuning"))
    options = parser.parse_args()
    about = {"name": "fine_tuning", **describe(chosen_device("cpu"))}
    rows: list[Row] = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    for seed, (data, each, _, factors) in ((seed, one) for seed in range(2) for one in SETS if seed < one[2]):
        folder, (classes, many) = options.folder / data, SOURCES[data]
        source = open_source("mnist" if data == "digits" else options.imagenette, split="train")
        size = {} if data == "digits" else {"model.image_size": 64}
        new = range(classes, len(source.class_names))
        if not folder.exists():
            write_images(source, folder / "unseen", new, 0, UNSEEN[data])
            write_images(source, folder / "source", range(classes), 0, many)
            print(data, run(folder / "source", {**size, "out": folder / "run"}, None), flush=True)
        images = folder / f"{each}-{seed}"
        if not images.exists():
            write_images(source, images, new, UNSEEN[data] + seed * each, each)
        for number, (method, factor, settings) in enumerate(methods(factors)):
            row = {"data": data, "each": each, "method": method, "factor": factor, "seed": seed}
            if any(row.items() <= old.items() for old in rows):
                continue
            given = {**size, **settings, "data.validation": str(folder / "unseen"), "seed": seed}
            given |= {"epochs": EPOCHS, "out": folder / f"run-{each}-{seed}-{number}-{factor:g}"}
            rows.append({**row, **run(images, given, None if number == 0 else folder / "run" / WEIGHTS, factor)})
            print(rows[-1], flush=True)
            write_json(options.output, {**about, "means": means(rows), "rows": rows}, indent=1)


if __name__ == "__main__":
    main()
