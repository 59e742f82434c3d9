"""Measure `lambdanets train FOLDER` on 500 images with a CPU: accuracy on unseen images, time, and what it prints.

python benchmarks/own_images.py IMAGENETTE OUTPUT.json [--folder runs/own-images] [--data photos digits] [--seeds 0]

photos: 100 training images of each of five classes of Imagenette; the test images are all validation images of these
classes. digits: 50 of each of the ten digits that come with the package, and its 1,000 test images. `train` holds out a
fifth of the 500 images itself and never sees the test images. The baselines are logistic regressions on all 500 images,
on pixels (32x32) and on features (histograms of gradient orientations in 8x8 cells of 64x64 pixels, and of colours);
their regularisation is chosen by cross-validation.

Prediction before the first run: features 60% on photos and 90% on digits, `train` 15 points more on photos and 4 on
digits; in less than 10 minutes on two idle cores. Refuted if `train` is less than 10 points ahead on photos.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lambdanets.data.decode import decode
from lambdanets.data.source import Source, open_source
from lambdanets.data.split import hashed
from lambdanets.files import write_json
from lambdanets.machine import describe
from lambdanets.options import chosen_device
from lambdanets.runs import read_stored

PRINTED = 30.0  # seconds of output to keep
CELLS, ORIENTATIONS, COLOURS = 8, 9, 4
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)  # C of the regressions


def pixels(source: Source, index: int) -> np.ndarray:
    data = source.read(index)
    return np.asarray(
        Image.fromarray(data if isinstance(data, np.ndarray) else np.asarray(decode(data))).convert("RGB")
    )


def write_images(source: Source, folder: Path, classes: int, each: int | None) -> None:
    """Write some images of the first classes to folder/CLASS/*."""
    for label, name in enumerate(source.class_names[:classes]):
        (folder / name).mkdir(parents=True)
        members = np.flatnonzero(source.labels == label)
        for index in sorted(members, key=lambda i: hashed(0, source.name(int(i))))[:each]:
            data = source.read(int(index))
            path = folder / name / f"{index:05d}"
            if isinstance(data, bytes):
                path.with_suffix(".jpg").write_bytes(data)
            else:
                Image.fromarray(data).save(path.with_suffix(".png"))


def make_data(name: str, imagenette: str, folder: Path) -> None:
    where, classes, each = (imagenette, 5, 100) if name == "photos" else ("mnist", 10, 50)
    if not folder.exists():
        write_images(open_source(where, split="train"), folder / "images", classes, each)
        write_images(open_source(where, split="validation"), folder / "test", classes, None)


def resized(source: Source, side: int) -> np.ndarray:
    images = (Image.fromarray(pixels(source, i)) for i in range(len(source)))
    return np.stack([np.asarray(image.resize((side, side), Image.Resampling.BILINEAR)) for image in images])


def features(images_N: np.ndarray) -> np.ndarray:
    """Return histograms of gradient orientations in cells, each divided by its norm, and of colours."""
    grey = images_N.astype(np.float32).mean(3)
    across, down = np.gradient(grey, axis=2), np.gradient(grey, axis=1)
    size = np.hypot(across, down)
    bins = (np.arctan2(down, across) % np.pi / np.pi * ORIENTATIONS).astype(int) % ORIENTATIONS
    side = grey.shape[1] // CELLS
    cells = np.stack(
        [(size * (bins == k)).reshape(-1, CELLS, side, CELLS, side).sum((2, 4)) for k in range(ORIENTATIONS)], axis=-1
    )
    cells /= np.sqrt((cells**2).sum(-1, keepdims=True)) + 1.0
    colours = np.stack(
        [np.histogramdd(i.reshape(-1, 3), bins=(COLOURS,) * 3, range=((0, 256),) * 3)[0].ravel() for i in images_N]
    )
    return np.concatenate([cells.reshape(len(cells), -1), colours / grey[0].size], axis=1)


def baselines(folder: Path) -> list[dict]:
    sources = [open_source(folder / part) for part in ("images", "test")]
    inputs = {
        "pixels": [resized(source, 32).reshape(len(source), -1) / 255 for source in sources],
        "features": [features(resized(source, 64)) for source in sources],
    }
    rows = []
    for kind, (train, test) in inputs.items():
        regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
        model = GridSearchCV(regression, {"logisticregression__C": STRENGTHS}, cv=3).fit(train, sources[0].labels)
        rows.append({"method": f"logistic regression, {kind}", "test_top1": model.score(test, sources[1].labels)})
    return rows


def train(folder: Path, seed: int, minutes: float | None) -> dict:
    """Run the command in a separate process and return its accuracy on the test images."""
    run = folder / f"run-{seed}"
    words = [sys.executable, "-u", "-m", "lambdanets", "train", str(folder / "images"), "--out", str(run)]
    words += ["--seed", str(seed), "--device", "cpu", *(["--minutes", str(minutes)] if minutes else [])]
    before, began, printed = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.monotonic(), []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if time.monotonic() - began <= PRINTED:
                printed.append([round(time.monotonic() - began, 1), line.rstrip().replace(f"{folder}/", "")])
    if process.returncode:
        raise RuntimeError(f"training ended with status {process.returncode}")
    seconds = time.monotonic() - began
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    found = json.loads(lambdanets("evaluate", str(run), str(folder / "test"), "--device", "cpu", "--json"))
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    settings = read_stored(run).settings
    return {
        "method": "lambdanets train",
        "seed": seed,
        "minutes": minutes,
        "test_top1": found["top1"],
        "test_images": found["examples"],
        "held_out_top1": log[-1]["scores"]["ema"]["held_out"]["top1"],
        "seconds": seconds,
        "cpu_seconds": cpu,
        "network": settings["model"],
        "epochs": settings["epochs"],
        "printed": printed,
    }


def lambdanets(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "lambdanets", *words], check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("imagenette")
    parser.add_argument("output", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/own-images"))
    parser.add_argument("--data", nargs="+", choices=("photos", "digits"), default=["photos", "digits"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, help="time budget of `train` in minutes; set it on a shared machine")
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    about = {"name": "own_images", **describe(chosen_device("cpu")), "note": options.note}
    rows: list[dict] = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
    for name in options.data:
        folder = options.folder / name
        make_data(name, options.imagenette, folder)
        for seed in options.seeds:
            if any(row["data"] == name and row.get("seed") == seed for row in rows):
                continue  # the same command resumes it
            rows.append({"data": name, **train(folder, seed, options.minutes)})
            write_json(options.output, {**about, "means": means(rows), "rows": rows}, indent=1)
        if not any(row["data"] == name and "seed" not in row for row in rows):
            rows += [{"data": name, **row} for row in baselines(folder)]
            write_json(options.output, {**about, "means": means(rows), "rows": rows}, indent=1)


def means(rows: list[dict]) -> list[dict]:
    """Return means over seeds for each data set and method."""
    found = []
    for data, method in dict.fromkeys((row["data"], row["method"]) for row in rows):
        values = [row["test_top1"] for row in rows if (row["data"], row["method"]) == (data, method)]
        found.append({"data": data, "method": method, "test_top1": statistics.mean(values), "runs": len(values)})
    return found


if __name__ == "__main__":
    main()
