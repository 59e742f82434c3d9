"""Sentences about measurements, with every number and every verdict from the file."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

Row = dict[str, Any]
PAPER_GAIN = 1.0  # points, at least: CCLL beside the convolution in the paper's table of placements


def compare(result: Row) -> str:
    """Sentences on the result of `lambdanets experiments compare`: gains, settings, how far embeddings turned."""
    found = final_runs(result)
    lines = []
    trials = [row for row in result["rows"] if row["phase"] == "tuning"]
    if found and trials:
        lines.append(rates(found, trials))
        lines += [embeddings(name, rows, trials) for name, rows in found.items()]
    if len(found) > 1:
        means = {name: 100 * fmean(row["top1"] for row in rows.values()) for name, rows in found.items()}
        best = max(means, key=lambda name: means[name])
        lines.append(f"{called(best)} learned most in this schedule: {means[best]:.1f}% on average.")
    return verdicts(result) + "".join(f"- {line}\n" for line in lines if line)


def verdicts(result: Row) -> str:
    """Every network beside the convolution."""
    from lambdanets.experiments.compare import BASELINE

    found = final_runs(result)
    lines = [beside(name, rows, found.get(BASELINE, {})) for name, rows in found.items() if name != BASELINE]
    return "".join(f"- {line}\n" for line in lines if line)


SENTENCES = {"reading": compare, "verdict": verdicts}


def final_runs(result: Row) -> dict[str, dict[int, Row]]:
    """By network and seed."""
    from lambdanets.experiments.compare import CONTESTANTS, Contest
    from lambdanets.recipes.small import imagenette

    contest = Contest(Path(), imagenette(), CONTESTANTS, result["rows"])
    return {name: rows for name in CONTESTANTS if (rows := contest.final(name))}


def called(name: str) -> str:
    """As a sentence says it, at its beginning."""
    names = {"convolution": "The convolution", "se": "Squeeze-and-excitation", "axial": "Axial attention"}
    return f"**{names.get(name, name)}**"


def beside(name: str, rows: dict[int, Row], baseline: dict[int, Row]) -> str:
    """How a network does beside the convolution, over the seeds that both have."""
    from lambdanets.experiments.compare import difference

    found = difference(rows, baseline)
    if found is None:
        return ""
    mean, low, high = found
    interval = f"(95% interval {low:+.2f} to {high:+.2f}, {len(rows.keys() & baseline.keys())} seeds)"
    side = "ahead of" if mean > 0 else "behind"
    verdict = f"is {abs(mean):.2f} points {side} the convolution {interval}"
    if low < 0 < high:
        verdict = f"cannot be told from the convolution: {mean:+.2f} points {interval}"
    one, other = (next(iter(those.values()))["parameters"] for those in (rows, baseline))
    size = f"with {abs(1 - one / other):.0%} {'fewer' if one < other else 'more'} parameters"
    sentence = f"{called(name)} {verdict}, {size}."
    if name == "CCLL":
        seen = "is not seen here" if high < PAPER_GAIN else "stays open"
        if mean >= PAPER_GAIN and low > 0:
            seen = "is seen here on average" if low < PAPER_GAIN else "is seen here"
        sentence += f" What the paper has, a gain of a point or more, {seen}."
    return sentence


def rates(found: dict[str, dict[int, Row]], trials: list[Row]) -> str:
    """Which learning rates won, and whether the trials could tell."""
    tried = sorted({row["settings"]["rate"] for row in trials})
    first = {name: next(iter(rows.values())) for name, rows in found.items()}
    won = {name: row["settings"]["rate"] for name, row in first.items()}
    if len(set(won.values())) == 1:
        rate = next(iter(won.values()))
        ends = {tried[0]: ("smallest", "smaller"), tried[-1]: ("largest", "larger")}
        word, further = ends.get(rate, ("", "")) if len(tried) > 1 else ("", "")
        text = f"In the trials a rate of {rate:g} won for every network"
        text += f": the {word} one they tried, so a {further} one may be better still." if word else "."
    else:
        text = f"In the trials these rates won: {', '.join(f'{rate:g} for {name}' for name, rate in won.items())}."
    short, long = trials[0]["epochs"], next(iter(first.values()))["epochs"]
    if short < long:
        text += f" They had {short:g} epochs, the runs {long:g}: what is best for a short run need not be for a longer."
    return text


def embeddings(name: str, rows: dict[int, Row], trials: list[Row]) -> str:
    """What the trials say about the size of new embeddings, and what became of the one they chose."""
    best: dict[float, float] = {}
    for row in trials:
        std = row["settings"]["embedding_std"]
        if row["network"] == name and std is not None:
            best[std] = max(best.get(std, 0.0), 100 * row["top1"])
    cosines = [row["embedding_cosine"] for row in rows.values() if row["embedding_cosine"] is not None]
    if not best or not cosines:
        return ""
    chosen = next(iter(rows.values()))["settings"]["embedding_std"]
    scores = " and ".join(f"{best[std]:.1f}% with {std:g}" for std in sorted(best, reverse=True))
    return (
        f"Embeddings of {name}: the best trials reached {scores}; the runs took {chosen:g}. At the end the cosine of "
        f"their tables with the start is {fmean(cosines):.3f} (1: they are where they were)."
    )


def selection(results: Path, images: int = 130_000_000) -> str:
    """What `python benchmarks/pseudo_select.py` printed: choosing among made-up labels, and what more would take."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("pseudo-select*.json"))]
    if not found:
        return "No measurement yet: `python benchmarks/pseudo_select.py` prints one.\n"
    found.sort(key=lambda one: one["entries"])
    lines = ["| | |\n| --- | --- |\n"]
    for one in found:
        what = (
            f"choosing among {one['entries'] / 1e6:g}M labels of {one['classes']:,} classes in {one['units']:,} files"
        )
        memory = f"{one['peak_bytes'] / 1e9:.2f} GB, of which {one['peak_bytes_before'] / 1e9:.2f} are Python and torch"
        times = f"{one['cpu_seconds']:.0f} s of the core, {one['seconds']:.0f} s until all is safe on the disk"
        lines.append(f"| {what} | {times}; {memory} |\n")
    hard, soft = (pick(one["label_bytes_per_image"] for one in found) for pick in (min, max))
    lines.append(f"| a label on the disk | {hard:.0f} bytes, with ten soft probabilities {soft:.0f} |\n")
    seconds = found[-1]["cpu_seconds"] / found[-1]["entries"] * images
    lines.append(f"| choosing among {images / 1e6:g}M (computed) | {seconds:.0f} s of a core |\n")
    sizes = f"{hard * images / 1e9:.1f} GB, with ten soft probabilities {soft * images / 1e9:.1f} GB"
    lines.append(f"| their labels on the disk (computed) | {sizes} |\n")
    return "".join(lines)


def guard(result: Row, where: str) -> str:
    """What benchmarks/guard_hashes.py wrote."""
    bits = " | ".join(f"{distance} bits" for distance in result["distances"])
    lines = [f"{where}; {result['changed']} photographs changed in each way, {result['pairs']:,} pairs of different "]
    lines.append(f"ones.\n\n| found again | {bits} |\n| --- |{' ---: |' * len(result['distances'])}\n")
    for row in result["rows"]:
        lines.append(f"| {row['change']} | {' | '.join(f'{100 * share:.1f}%' for share in row['found'])} |\n")
    taken = " | ".join(f"{count:,}" for count in result["taken_for_the_same"])
    return "".join([*lines, f"| different ones taken for the same | {taken} |\n"])
