"""Blocks about trained networks (comparisons, pseudo-labels, detection) and about the cost of training and kernels."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from summary import left_out, when

Row = dict[str, Any]


def comparison(result: Row, where: str) -> str:
    """Show the result of `lambdanets experiments compare`: the final runs, and the trials that chose their settings."""
    from lambdanets.experiments.compare import TITLES, cells

    rows = result["rows"]
    final, trials = ([row for row in rows if row["phase"] == phase] for phase in ("final", "tuning"))
    lines = [f"{where}; images of {result['image_size']} pixels.\n"]
    if final:
        lines.append(f"\nTop-1 on the validation images after {final[0]['epochs']:g} epochs of batches of ")
        lines.append(f"{final[0]['batch_size']}:\n\n| {' | '.join(TITLES)} |\n| --- |{' ---: |' * (len(TITLES) - 1)}\n")
        for name in dict.fromkeys(row["network"] for row in final):
            lines.append(f"| {name} | {' | '.join(cells(name, rows))} |\n")
    for name, edges in result.get("edges", {}).items():
        if edges:
            lines.append(f"\nThe best trial of {name} is at the edge of the grid: {', '.join(edges)}.\n")
    if trials:
        lines.append(f"\n<details>\n<summary>All {len(trials)} trials</summary>\n\nTop-1 on held-out training images ")
        lines.append(f"after {trials[0]['epochs']:g} epochs.\n\n| network | settings | top-1 |\n| --- | --- | ---: |\n")
        for row in trials:
            settings = ", ".join(f"{name}={value}" for name, value in row["settings"].items())
            lines.append(f"| {row['network']} | {settings} | {100 * row['top1']:.2f} |\n")
        lines.append("\n</details>\n")
    return "".join(lines)


def embedding(result: Row, where: str) -> str:
    """Show the result of benchmarks/embedding_std.py."""
    used = result["settings"]
    network = " ".join([used["network"], *used["options"]])
    lines = [
        f"{where}. {network} with lambda layers in all stages, images of {used['image_size']} pixels, "
        f"{used['epochs']:g} epochs, the same recipe for all rows.\n\n",
        "| `embedding_std` | seeds | top-1, held-out training images | top-1, validation images |\n",
        "| --- | ---: | ---: | ---: |\n",
    ]
    for name in result["means"]:
        rows = [row for row in result["rows"] if row["embedding_std"] == name]
        cells = [f"`{name}` ({rows[0]['value']:.3g})" if name == "unit" else name, str(len(rows))]
        for split in ("held_out", "validation"):
            scores = [100 * row[f"{split}_top1"] for row in rows]
            cells.append(f"{fmean(scores):.1f} ({', '.join(f'{score:.1f}' for score in scores)})")
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def own_images(result: Row, where: str) -> str:
    """Show the result of benchmarks/own_images.py."""
    kinds = {"photos": "five classes of Imagenette with 100 photos each", "digits": "50 of each digit of MNIST"}
    used = "; ".join(f"{name}: {kinds[name]}" for name in dict.fromkeys(row["data"] for row in result["rows"]))
    lines = [
        f"{where}. {used[0].upper()}{used[1:]}. No method uses the test images before the final evaluation.\n\n",
        "| 500 images | method | top-1, test images | top-1, held-out images | time, s |\n",
        "| --- | --- | ---: | ---: | ---: |\n",
    ]
    for row in result["rows"]:
        method, held_out, seconds = row["method"], "", ""
        if "network" in row:
            method = f"`{method}`: {row['network']['image_size']} px, {row['epochs']:.3g} epochs, seed {row['seed']}"
            held_out, seconds = f"{100 * row['held_out_top1']:.1f}", f"{row['seconds']:.0f}"
        lines.append(f"| {row['data']} | {method} | {100 * row['test_top1']:.1f} | {held_out} | {seconds} |\n")
    return "".join(lines)


def fine_tuning(result: Row, where: str) -> str:
    """Show the result of benchmarks/fine_tuning.py."""
    found = {(row["data"], row["each"], row["method"], row["factor"]): row for row in result["means"]}
    sets = list(dict.fromkeys(key[:2] for key in found))
    heads = []
    for data, each in sets:
        runs = max(row["runs"] for row in result["means"] if (row["data"], row["each"]) == (data, each))
        heads.append(f"{each} {data} a class, {runs} seed{'s' if runs > 1 else ''}")
    lines = [
        f"{where}. Top-1 in %, on training images that no run trained on.\n\n",
        f"| trained | rate / rate from scratch | {' | '.join(heads)} |\n| --- | ---: |{' ---: |' * len(sets)}\n",
    ]
    for method, factor in sorted(dict.fromkeys(key[2:] for key in found)):
        cells = [found.get((*one, method, factor)) for one in sets]
        shown = " | ".join(f"{100 * cell['top1']:.1f}" if cell else "" for cell in cells)
        lines.append(f"| {method} | {factor:g} | {shown} |\n")
    return "".join(lines)


def engine(result: Row, where: str) -> str:
    """Show the result of benchmarks/loop_overhead.py."""
    used = result["settings"]
    spans = {name: f"{min(rates):,.0f} to {max(rates):,.0f}" for name, rates in result["windows"].items()}
    quartiles = " to ".join(f"{100 * one:+.1f}" for one in result["overhead_quartiles"])
    seconds = {name: sum(1 / rate for rate in rates) for name, rates in result["windows"].items()}
    compiled = ", compiled" if used["compile"] else ""
    bare = "the network alone" if used.get("alone") else "a minimal loop"
    return (
        f"{where}; ResNet-50 {used['placement']} at {used['image_size']} pixels, batch {used['batch']}, "
        f"{used['precision']}{compiled}: {bare} {result['bare']:,.0f} images/s ({spans['bare']} over all turns), "
        f"ours {result['ours']:,.0f} images/s ({spans['ours']}). Our loop takes {100 * result['overhead']:+.1f}% time, "
        f"the median of {used['turns']} turns (quartiles {quartiles}%; total time of all turns "
        f"{100 * (seconds['ours'] / seconds['bare'] - 1):+.1f}%).\n"
    )


def kernels(result: Row, where: str) -> str:
    """Show the result of `lambdanets bench kernels`: inference in a line, a training step in a table."""
    from lambdanets.bench.roofline import TITLES, Peaks, lines, sentence

    used, rows = result["settings"], result["rows"]
    peaks = result["peaks"] and Peaks(**result["peaks"])
    limits = f" Limits: {peaks.flops / 1e12:g} TFLOP/s and {peaks.bytes / 1e12:g} TB/s." if peaks else ""
    parts = [
        f"{where}; one layer, channels-last, scope {used['scope']}, batch {used['batch']}, {used['dtype']}, "
        f"{used['heads']} heads, key depth {used['key_depth']}. Time in kernels only, medians of {used['steps']} "
        f"steps.{limits}\n"
    ]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        inference, training = (
            [row for row in rows if (row["shape"], row["mode"]) == (shape, mode)] for mode in ("inference", "training")
        )
        if inference:
            parts.append(f"\n{shape}, inference, folded: {sentence(inference, peaks)}.\n")
        if training:
            parts.append(f"\n{shape}, training:\n\n")
            table = [list(TITLES), ["---", *["---:"] * (len(TITLES) - 1)], *lines(training, peaks)]
            parts += [f"| {' | '.join(cells)} |\n" for cells in table]
    missing = left_out(result)
    return "".join([*parts, *(["\n"] if missing else []), *missing])


def loader(result: Row, where: str) -> str:
    """Show the result of `lambdanets data speed --json`."""
    options = result["options"]
    probability = options.get("randaugment_probability", 0.5)  # the default before the setting existed
    lines = [
        f"{where}; crops of {options['image_size']} pixels, {options['randaugment_layers']} layers of RandAugment, "
        f"each applied with probability {probability:g}."
    ]
    lines.append("\n\n| loader | images/s per core |\n| --- | ---: |\n")
    for row in result["rows"]:
        rate = "several processes" if row["per_core"] is None else f"{row['per_core']:,.0f}"
        lines.append(f"| {row['name']} | {rate} |\n")
    return "".join(lines)


def pseudo(result: Row, where: str) -> str:
    """Show the result of benchmarks/pseudo_imagenette.py."""
    lines = [f"{where}; {result['steps']} steps of {result['batch_size']} images each, {result['fraction']:.0%} of "]
    lines.append("the labels. Top-1 on the validation images, in percent.\n\n")
    lines.append("| seed | labels only | with pseudo-labels | gain | pseudo-labels kept | of these correct |\n")
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: |\n")
    for row in result["seeds"]:
        alone, after = 100 * row["alone"], 100 * row["with_pseudo_labels"]
        kept = f"{row['kept']:,} of {row['labelled_images']:,}"
        lines.append(
            f"| {row['seed']} | {alone:.2f} | {after:.2f} | {after - alone:+.2f} | {kept} | {row['right']:.1%} |\n"
        )
    gain, spread, speeds = result["gain_mean"], result["gain_stdev"], result["throughput"]
    lines.append(f"\nGain: {gain:+.2f} points (standard deviation {spread:.2f}). Labelling ran at ")
    lines.append(f"{speeds['labels_per_second']:,.0f} images/s, {speeds['share']:.0%} of the teacher alone ")
    lines.append("with the same loader.\n\n")
    taken, ratio = result["steps"] * result["batch_size"], result["ratio"]
    student = taken * ratio / (1 + ratio) / fmean(row["used"] for row in result["seeds"])
    own = fmean(row["labelled_images"] for row in result["seeds"]) * result["fraction"] / (1 - result["fraction"])
    lines.append(f"A student saw each pseudo-labelled image {student:.0f} times; its teacher saw each of its own ")
    return "".join([*lines, f"{taken / own:.0f} times.\n"])


def pseudo_hours(results: Path, images: int = 130_000_000) -> str:
    """Compute the hours for the paper's number of images from the measured speed of one GPU."""
    small, large = results / "pseudo-imagenette.json", results / "reproduce-h200/reproduce.json"
    if not small.exists() or not large.exists():
        return f"No measurement yet. It needs {small.name} and {large.parent.name}/{large.name}.\n"
    ours, theirs = json.loads(small.read_text()), json.loads(large.read_text())["measurements"]
    rows = [("labelling as above, with image loading", ours["machine"]["gpu"], ours["throughput"]["labels_per_second"])]
    origins = [f"{small.name}, {when(ours)}"] if "date" in ours else []
    for mode, what in (("inference", "labelling"), ("training", "one pass of training")):
        one = theirs[f"lambda_resnet152 | 288px | {mode} | bfloat16 | batch 1024"]
        rows.append((f"{what}, LambdaResNet-152, 288 px, network alone", one["hardware"], one["examples_per_second"]))
        origins += [f"{large.name}, {mode}, bfloat16, batch 1024, {when(one)}"] if "date" in one else []
    text = "| hours for 130M | GPU | images/s of one | 1 GPU | 8 GPUs | 64 GPUs |\n| --- | --- |" + 4 * " ---: |" + "\n"
    for what, gpu, rate in rows:
        hours = " | ".join(f"{images / rate / 3600 / count:.3g}" for count in (1, 8, 64))
        text += f"| {what} | {gpu} | {rate:,.0f} | {hours} |\n"
    return text + (f"\nMeasured: {'; '.join(origins)}.\n" if origins else "")


def detect(result: Row, where: str) -> str:
    """Show the result of benchmarks/detector_step.py: a table for each size, with ratios to its first backbone."""
    lines = [f"{where}. Medians; in brackets: relative to the first row.\n"]
    kinds = ("width", "height", "batch", "precision", "compiled")
    for kind in dict.fromkeys(tuple(row[key] for key in kinds) for row in result["rows"]):
        chosen = [row for row in result["rows"] if tuple(row[key] for key in kinds) == kind]
        width, height, batch, precision, compiled = kind
        how = ", compiled backbone" if compiled else ""
        lines.append(f"\nA training step, {batch} images of {width}x{height}, {precision}{how}:\n\n")
        lines.append("| backbone | parameters | step, ms | backbone and pyramid, ms | peak memory, GiB |\n")
        lines.append("| --- | ---: | ---: | ---: | ---: |\n")
        for row in chosen:
            if row["error"]:
                lines.append(f"| `{row['network']}` | {row['error'].replace('|', '/')} | | | |\n")
                continue
            cells = [f"`{row['network']}`", f"{row['parameters'] / 1e6:.1f}M"]
            for key, factor in (("seconds", 1e3), ("backbone_seconds", 1e3), ("peak_bytes", 2**-30)):
                first = chosen[0][key]
                ratio = f" ({row[key] / first:.2f})" if first else ""
                cells.append(f"{row[key] * factor:.4g}{ratio}")
            lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def sets(result: Row, where: str) -> str:
    """Show the result of benchmarks/detect_sets.py: AP on each set, the difference of two backbones, and the cost."""
    columns = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "small": "small", "medium": "medium", "large": "large"}
    lines = [f"{where}. Means over seeds; for all and for small objects also the minimum and maximum.\n"]
    for name, about in result["sets"].items():
        for split, facts in about["splits"].items():
            chosen = [row for row in result["means"] if (row["set"], row["split"]) == (name, split)]
            sorts = f", {facts['small']:,} of them small" if "small" in facts else ""
            sorts += f", crowd annotations: {facts['crowds']}" if facts["crowds"] else ""
            if not any(row["box_ap50"] for row in chosen):
                lines.append(
                    f"\n{name}, {split}: {facts['pictures']} images, {facts['objects']:,} objects{sorts}. After "
                    f"{about['steps']:,} steps neither backbone detects any object.\n"
                )
                continue
            lines.append(
                f"\n{name}, {split}: {facts['pictures']} images, {facts['objects']:,} objects{sorts}; "
                f"{about['steps']:,} steps of {about['batch_size']} images at {about['size']} pixels, "
                f"{about['precision']}.\n\n"
            )
            lines.append(f"| backbone | seeds | | {' | '.join(columns.values())} |\n")
            lines.append(f"| --- | ---: | --- | {' | '.join(['---:'] * len(columns))} |\n")
            for what in [what for what in ("box", "mask") if f"{what}_ap" in chosen[0]]:
                for row in chosen:
                    cells = [precision_cell(row, f"{what}_{key}", key in ("ap", "small")) for key in columns]
                    lines.append(f"| `{row['backbone']}` | {len(row['seeds'])} | {what} | {' | '.join(cells)} |\n")
                if len(chosen) == 2:
                    cells = [difference_cell(*(row[f"{what}_{key}"] for row in chosen)) for key in columns]
                    said = f"`{chosen[0]['backbone']}` - `{chosen[1]['backbone']}`"
                    lines.append(f"| {said} | | {what} | {' | '.join(cells)} |\n")
    lines.append("\nCost of the runs:\n\n| set | backbone | parameters | images/s | parallel runs | ")
    lines.append("seconds of training | peak memory, GiB | Imagenette top-1 |\n| --- | --- |" + " ---: |" * 6 + "\n")
    for row in {(row["set"], row["backbone"]): row for row in result["means"]}.values():
        start = result["weights"].get(row["backbone"])
        cells = [row["set"], f"`{row['backbone']}`", f"{row['parameters'] / 1e6:.1f}M"]
        cells += [f"{row['examples_per_second']:.1f}", str(result["sets"][row["set"]]["together"])]
        cells += [f"{row['training_seconds']:,.0f}", "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"]
        lines.append(f"| {' | '.join(cells)} | {'-' if start is None else format(100 * start['top1'], '.2f')} |\n")
    return "".join(lines)


def precision_cell(row: Row, key: str, span: bool) -> str:
    if row[key] is None:
        return "-"  # there is no such object
    least, most = row[f"{key}_range"]
    return f"{100 * row[key]:.1f}" + (f" ({100 * least:.1f} to {100 * most:.1f})" if span and least != most else "")


def difference_cell(one: float | None, other: float | None) -> str:
    return "-" if one is None or other is None else f"{round(100 * (one - other), 1) + 0.0:+.1f}"  # no "-0.0"
