"""Fills the generated blocks of README.md and docs/*.md from benchmarks/results/*.json.

    python docs/generate.py            # write
    python docs/generate.py --check    # exit with 1 if a block is stale

A block is everything between `<!-- bench:NAME -->` and `<!-- /bench -->`; it shows benchmarks/results/NAME.json.
No number is typed by hand: measure again, then run this.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(?P<open><!-- bench:(?P<name>[\w-]+) -->\n)(?P<body>.*?)(?P<close><!-- /bench -->)", re.DOTALL)

Row = dict[str, Any]


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "lambdanets/ops/fused/README.md"]


def filled(text: str, results: Path = RESULTS) -> str:
    """The text with every block as the JSON says."""
    return BLOCK.sub(lambda match: match["open"] + body(match["name"], results) + match["close"], text)


def body(name: str, results: Path) -> str:
    if name.startswith("reproduce-"):
        return reproduced(name, results)
    if name == "pseudo-hours":
        return pseudo_hours(results)
    path = results / f"{name}.json"
    if not path.exists():
        command = WRITERS.get(name, "lambdanets bench")
        return f"No measurement yet: `{command}` writes {name}.json.\n"
    result = json.loads(path.read_text())
    machine = result["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items() if version)
    if "files" in result:
        return exports(result, f"{machine['cpu']}. {versions}. Measured {result['date'][:10]}")
    kind = result.get("name", name).partition("-")[0]
    if kind in OTHERS:
        note = f"\n{result['note']}\n" if "note" in result else ""
        threads = f", {machine['cores']} thread{'s' if machine['cores'] > 1 else ''}"
        where = f"{machine['gpu'] or machine['cpu'] + threads}. {versions}. Measured {result['date'][:10]}"
        return OTHERS[kind](result, where) + note
    rows = result["rows"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} threads"
    first = rows[0]
    parts = [
        f"{where}. {versions}. Measured {result['date'][:10]}; medians, batch {first['batch']}, {first['dtype']}, "
        f"{first['heads']} heads, key depth {first['key_depth']}.\n"
    ]
    if "note" in result:
        parts.append(f"\n{result['note']}\n")
    for mode in dict.fromkeys(row["mode"] for row in rows):
        layers = [row for row in rows if (row["kind"], row["mode"]) == ("layer", mode)]
        operations = [row for row in rows if (row["kind"], row["mode"]) == ("operation", mode)]
        if layers:
            parts.append(f"\nWhole layers, {mode}: ours in milliseconds, the others as multiples of ours.\n\n")
            parts.append(table(layers, layer_cell))
            parts.append(hard_baseline(layers))
        if operations:
            parts.append(f"\nThe operation alone, {mode}: milliseconds, with * for what `auto` chooses.\n\n")
            parts.append(table(operations, operation_cell))
    return "".join(parts)


def reproduced(name: str, results: Path) -> str:
    """What `lambdanets reproduce` wrote into a folder: its name shows the headlines, with `-tables` the tables."""
    folder = name.removesuffix("-tables")
    path = results / folder / "reproduce.json"
    if not path.exists():
        return f"No measurement yet: `lambdanets reproduce all --out benchmarks/results/{folder}` writes it.\n"
    from lambdanets.reproduce.document import summary, tables

    result = json.loads(path.read_text())
    if folder != name:
        return tables(result)
    picture = "\n![Time for 1024 images against published accuracy](figures/pareto.svg)\n"
    return summary(result) + (picture if result["headlines"] else "")


def exports(result: Row, where: str) -> str:
    """What `lambdanets export --json` printed."""
    name = " ".join([result["what"], *result["options"]])
    sides = " x ".join(map(str, result["shapes"][0][2:]))
    lines = [f"{where}; one image of {sides}, {result['threads']} thread(s), medians of CPU time. "]
    lines.append(f"float32 itself changes the scores of this network by {result['rounding']:.1g} of the largest.\n\n")
    lines.append(f"| {name}, {result['size']} size | difference | MB | ms | speed-up |\n")
    lines.append("| --- | ---: | ---: | ---: | ---: |\n")
    eager = result["eager"]["cpu"]
    lines.append(f"| eager PyTorch | | | {eager:.3g} | 1 |\n")
    for one in result["files"]:
        found = one["latency"]["cpu"]
        cells = [one["format"], f"{one['difference']:.1g}", f"{one['bytes'] / 1e6:.0f}", f"{found:.3g}"]
        lines.append(f"| {' | '.join(cells)} | {eager / found:.2f} |\n")
    return "".join(lines)


def comparison(result: Row, where: str) -> str:
    """What `lambdanets compare` wrote: the final runs, and the trials that chose their settings."""
    from lambdanets.recipes.compare import CONTESTANTS, Contest
    from lambdanets.recipes.small import imagenette

    contest = Contest(RESULTS, imagenette(), CONTESTANTS, result["rows"])
    found = {name: contest.final(name) for name in CONTESTANTS}
    final = [row for rows in found.values() for row in rows.values()]
    lines = [f"{where}; images of {result['image_size']} pixels.\n"]
    if final:
        titles = (
            "| network | runs | top-1, mean | spread | beside convolution (95%) | parameters | images/s | settings |\n"
        )
        lines.append(f"\nValidation images, {final[0]['epochs']:g} epochs, several seeds:\n\n{titles}")
        lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n")
        lines += [f"| {' | '.join([name, *contest.cells(name, rows)])} |\n" for name, rows in found.items() if rows]
    trials = [row for row in result["rows"] if row["phase"] == "tuning"]
    if trials:
        titles = "| network | learning rate | weight decay | embedding std | top-1 | cosine with the start |\n"
        lines.append(f"\nThe trials, on held-out training images, {trials[0]['epochs']:g} epochs:\n\n{titles}")
        lines.append("| --- | ---: | ---: | ---: | ---: | ---: |\n")
    for row in trials:
        chosen, cosine = row["settings"], row["embedding_cosine"]
        std = chosen["embedding_std"]
        cells = [row["network"], f"{chosen['rate']:g}", f"{chosen['weight_decay']:g}"]
        cells += ["" if std is None else f"{std:g}", f"{100 * row['top1']:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {'' if cosine is None else f'{cosine:.2f}'} |\n")
    return "".join(lines)


def networks(result: Row, where: str) -> str:
    """What `lambdanets bench network` wrote: examples a second, and in brackets beside the first of the same size."""
    kinds = list(dict.fromkeys(kind_of(row["protocol"]) for row in result["rows"]))
    found: dict[str, Row] = {}
    for row in result["rows"]:
        one = found.setdefault(row["network"], {"parameters": row["parameters"], "pixels": row["image_size"][0]})
        one.setdefault(kind_of(row["protocol"]), row["result"])  # the first network comes again at the end
    memory = "training, eager" in kinds
    protocol = result["rows"][0]["protocol"]
    lines = [
        f"{where}; {protocol['precision']}, examples a second with a batch of {protocol['batch']} (in brackets beside "
        f"the first network at as many pixels), batch norm folded for inference.\n\n"
    ]
    titles = ["network", "pixels", "parameters", *kinds]
    titles += [f"training memory, batch {protocol['memory_batch']}"] if memory else []
    lines.append(f"| {' | '.join(titles)} |\n| --- | {' | '.join(['---:'] * (len(titles) - 1))} |\n")
    firsts: dict[int, Row] = {}
    for name, one in found.items():
        first = firsts.setdefault(one["pixels"], one)
        parameters = f"{one['parameters'] / 1e6:.1f}M" if one["parameters"] else "-"
        cells = [f"`{name}`", str(one["pixels"]), parameters]
        cells += [speed(one.get(kind), first.get(kind), "examples_per_second") for kind in kinds]
        cells += [speed(one.get("training, eager"), first.get("training, eager"), "peak_bytes")] if memory else []
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def kind_of(protocol: Row) -> str:
    how = ("CUDA graphs" if protocol.get("graphs") else "compiled") if protocol["compiled"] else "eager"
    return f"{protocol['mode']}, {how}"


def speed(row: Row | None, first: Row | None, what: str) -> str:
    if row is None or first is None:
        return "-"
    value = f"{row[what]:,.0f}" if what != "peak_bytes" else f"{row[what] / 2**30:.1f} GiB"
    return f"{value} ({row[what] / first[what]:.2f})"


def steps(result: Row, where: str) -> str:
    """What benchmarks/step_profile.py wrote."""
    lines = [f"{where}; a training step of {result['batch']} images, bfloat16, milliseconds.\n\n"]
    lines.append("| network | how | step | until all is started | GPU busy | ratio of steps |\n")
    lines.append("| --- | --- | ---: | ---: | ---: | ---: |\n")
    first: Row = {}
    for row in result["rows"]:
        times = (row["step_ms"], row["start_ms"], row["busy_ms"])
        ratio = row["step_ms"] / first.setdefault(row["way"], row)["step_ms"]
        cells = [f"`{row['network']}`", row["way"], *(f"{time:.1f}" for time in times), f"{ratio:.2f}"]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def engine(result: Row, where: str) -> str:
    """What `lambdanets bench engine` wrote."""
    used = result["settings"]
    spans = {name: f"{min(rates):,.0f} to {max(rates):,.0f}" for name, rates in result["windows"].items()}
    return (
        f"{where}; ResNet-50 {used['placement']} at {used['image_size']} pixels, batch {used['batch']}, "
        f"{used['precision']}: a bare loop {result['bare']:,.0f} images/s ({spans['bare']} over windows), "
        f"ours {result['ours']:,.0f} ({spans['ours']}): {100 * result['overhead']:+.1f}% time.\n"
    )


def loader(result: Row, where: str) -> str:
    """What `lambdanets data speed --json` wrote."""
    options = result["options"]
    lines = [
        f"{where}; crops of {options['image_size']} pixels, {options['randaugment_layers']} layers of RandAugment."
    ]
    lines.append("\n\n| | images/s of one core |\n| --- | ---: |\n")
    return "".join([*lines, *(f"| {row['name']} | {row['per_core']:,.0f} |\n" for row in result["rows"])])


def pseudo(result: Row, where: str) -> str:
    """What benchmarks/pseudo_imagenette.py wrote."""
    lines = [f"{where}; {result['steps']} steps of {result['batch_size']} images each, {result['fraction']:.0%} of "]
    lines.append("the labels.\n\n| seed | alone | with pseudo-labels | gain | kept | of these right |\n")
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: |\n")
    for row in result["seeds"]:
        alone, after = 100 * row["alone"], 100 * row["with_pseudo_labels"]
        kept = f"{row['kept']:,} of {row['labelled_images']:,}"
        lines.append(
            f"| {row['seed']} | {alone:.2f} | {after:.2f} | {after - alone:+.2f} | {kept} | {row['right']:.1%} |\n"
        )
    gain, spread, speeds = result["gain_mean"], result["gain_stdev"], result["throughput"]
    lines.append(f"\nGain: {gain:+.2f} points (standard deviation {spread:.2f}). Labelling ran at ")
    lines.append(f"{speeds['labels_per_second']:,.0f} images/s, {speeds['share']:.0%} of the teacher alone, ")
    return "".join([*lines, "fed by the same loader.\n"])


def pseudo_hours(results: Path, images: int = 130_000_000) -> str:
    """Hours for the paper's number of images, from speeds of one GPU; over several they are divided, not measured."""
    small, large = results / "pseudo-imagenette.json", results / "reproduce-h200/reproduce.json"
    if not small.exists() or not large.exists():
        return f"No measurement yet: it takes {small.name} and {large.parent.name}/{large.name}.\n"
    ours, theirs = json.loads(small.read_text()), json.loads(large.read_text())["measurements"]
    rows = [("labelling as above, with reading", ours["machine"]["gpu"], ours["throughput"]["labels_per_second"])]
    for mode, what in (("inference", "labelling"), ("training", "one pass of training")):
        one = theirs[f"lambda_resnet152 | 288px | {mode} | bfloat16 | batch 1024"]
        rows.append((f"{what}, LambdaResNet-152, 288 px, network alone", one["hardware"], one["examples_per_second"]))
    text = "| hours for 130M | GPU | images/s of one | 1 GPU | 8 GPUs | 64 GPUs |\n| --- | --- |" + 4 * " ---: |" + "\n"
    for what, gpu, rate in rows:
        hours = " | ".join(f"{images / rate / 3600 / count:.3g}" for count in (1, 8, 64))
        text += f"| {what} | {gpu} | {rate:,.0f} | {hours} |\n"
    return text


def language(result: Row, where: str) -> str:
    """What `lambdanets language compare` wrote."""
    text, training, settings = result["text"], result["training"], result["settings"]
    kinds, equal = list(training), result["equal_steps"]
    lines = [
        f"{where}. Text: {text['corpus']}, {text['files']} files, {text['training_bytes']:,} bytes to learn from and "
        f"{text['validation_bytes']:,} kept back (SHA-256 {text['sha256']}...). {settings['minutes']:g} minutes of "
        f"training for each, in turns, in steps of {settings['batch_size']} windows of {settings['length']} bytes; "
        f"{result['evaluated_bytes']:,} bytes evaluated.\n\n",
        f"| model | parameters | bits per byte, equal time | equal steps ({equal['step']:,}) | steps | bytes/s |\n",
        "| --- | ---: | ---: | ---: | ---: | ---: |\n",
    ]
    for kind, found in training.items():
        cells = [kind, f"{found['parameters']:,}", f"{found['bits_per_byte']:.3f}", f"{equal[kind]:.3f}"]
        lines.append(f"| {' | '.join(cells)} | {found['steps']:,} | {found['bytes_per_second']:,.0f} |\n")
    lines.append(f"| counted pairs of bytes | | {result['bigram_bits_per_byte']:.3f} | | | |\n")
    lines.append("\nThe trained models on the same bytes, predicted from texts of other lengths (bits per byte):\n\n")
    lines.append(f"| length | {' | '.join(kinds)} |\n|{' ---: |' * (1 + len(kinds))}\n")
    for row in result["context"]:
        lines.append(f"| {row['length']:,} | {' | '.join(f'{row[kind]:.3f}' for kind in kinds)} |\n")
    lines.append("\nGeneration, one text: the next byte after so many.\n\n| bytes so far |")
    for title in ("ms a byte", "state, KiB", "growth of the process, MiB"):
        lines += [f" {kind}, {title} |" for kind in kinds]
    lines.append(f"\n|{' ---: |' * (1 + 3 * len(kinds))}\n")
    for row in result["generation"]:
        cells = [f"{row[kind]['milliseconds']:.2f}" for kind in kinds]
        cells += [f"{row[kind]['state_bytes'] / 2**10:,.0f}" for kind in kinds]
        growth = (row[kind]["process_growth_bytes"] for kind in kinds)
        cells += ["-" if found is None else f"{found / 2**20:.2f}" for found in growth]
        lines.append(f"| {row['length']:,} | {' | '.join(cells)} |\n")
    return "".join(lines)


def detect(result: Row, where: str) -> str:
    """What `lambdanets detect bench` wrote: a table for each size, beside its first backbone."""
    lines = [f"{where}. Medians, and in brackets beside the first row.\n"]
    kinds = ("width", "height", "batch", "precision", "compiled")
    for kind in dict.fromkeys(tuple(row[key] for key in kinds) for row in result["rows"]):
        chosen = [row for row in result["rows"] if tuple(row[key] for key in kinds) == kind]
        width, height, batch, precision, compiled = kind
        how = ", the backbone compiled" if compiled else ""
        lines.append(f"\nA training step, {batch} pictures of {width}x{height}, {precision}{how}:\n\n")
        lines.append("| backbone | parameters | step, ms | backbone and pyramid, ms | peak memory, GiB |\n")
        lines.append("| --- | ---: | ---: | ---: | ---: |\n")
        for row in chosen:
            if row["error"]:
                lines.append(f"| `{row['network']}` | {row['error'].replace('|', '/')} | | | |\n")
                continue
            cells = [f"`{row['network']}`", f"{row['parameters'] / 1e6:.1f}M"]
            for key, factor in (("seconds", 1e3), ("backbone_seconds", 1e3), ("peak_bytes", 2**-30)):
                first = chosen[0][key]
                beside = f" ({row[key] / first:.2f})" if first else ""
                cells.append(f"{row[key] * factor:.4g}{beside}")
            lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def sets(result: Row, where: str) -> str:
    """What benchmarks/detect_sets.py wrote: AP on each set, how two backbones differ, and what the runs cost."""
    columns = {"ap": "AP", "ap50": "AP50", "ap75": "AP75", "small": "small", "medium": "medium", "large": "large"}
    lines = [f"{where}. Means over seeds, and for all and for small objects the least and the largest.\n"]
    for name, about in result["sets"].items():
        for split, facts in about["splits"].items():
            chosen = [row for row in result["means"] if (row["set"], row["split"]) == (name, split)]
            sorts = f", {facts['small']:,} of them small" if "small" in facts else ""
            sorts += f", crowds: {facts['crowds']}" if facts["crowds"] else ""
            if not any(row["box_ap50"] for row in chosen):
                lines.append(
                    f"\n{name}, {split}: {facts['pictures']} pictures, {facts['objects']:,} objects{sorts}. After "
                    f"{about['steps']:,} steps nothing is found yet, by either backbone.\n"
                )
                continue
            lines.append(
                f"\n{name}, {split}: {facts['pictures']} pictures, {facts['objects']:,} objects{sorts}; "
                f"{about['steps']:,} steps of {about['batch_size']} pictures at {about['size']} pixels.\n\n"
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
    lines.append("\nWhat the runs cost:\n\n| set | backbone | parameters | pictures/s | runs at once | ")
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


OTHERS = {"language": language, "compare": comparison, "networks": networks, "engine": engine, "pseudo": pseudo}
OTHERS |= {"detect": detect, "sets": sets, "steps": steps, "loader": loader}
WRITERS = {"detect-cuda": "lambdanets detect bench", "detect-sets": "benchmarks/detect_sets.py"}
WRITERS |= {"steps-cuda": "benchmarks/step_profile.py", "compare-imagenette": "lambdanets compare"}
HARD = {"ours, folded": "conv3x3, BN folded", "ours, compiled": "conv3x3 + BN, compiled"}


def hard_baseline(rows: list[Row]) -> str:
    """Ours over the convolution in its best mode, both folded (inference) or compiled (training), channels-last."""
    lines = []
    for shape, scope in dict.fromkeys((row["shape"], row["scope"]) for row in rows):
        found = {row["contender"]: row for row in rows if (row["shape"], row["scope"]) == (shape, scope)}
        for ours, theirs in HARD.items():
            pair = [found.get(ours), found.get(theirs)]
            if any(row is None or row["memory_format"] != "channels_last" for row in pair):
                continue
            mine, other = (row["milliseconds"] for row in pair if row is not None)
            lines.append(f"| {shape} | {scope or 'global'} | {mine:.3g} | {other:.3g} | {mine / other:.2f} |\n")
    if not lines:
        return ""
    names = "folded" if rows[0]["mode"] == "inference" else "compiled"
    title = (
        f"\nAgainst the hard baseline, {rows[0]['mode']}, both {names}: milliseconds, and ours over the convolution.\n"
    )
    return title + "\n| map | scope | ours | conv3x3 | ratio |\n| --- | --- | ---: | ---: | ---: |\n" + "".join(lines)


def layer_cell(row: Row) -> str:
    return f"{row['milliseconds']:.3g} ms" if row["contender"] == "ours" else f"{row['ratio']:.2f}x"


def operation_cell(row: Row) -> str:
    return f"{row['milliseconds']:.3g}{'*' if row['chosen'] else ''}"


def table(rows: list[Row], cell: Callable[[Row], str]) -> str:
    """One line for each feature map and scope, one column for each contender."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lines = [["map", "scope", *names], ["---", "---", *["---:"] * len(names)]]
    for case in dict.fromkeys((row["shape"], row["scope"]) for row in rows):
        found = {row["contender"]: cell(row) for row in rows if (row["shape"], row["scope"]) == case}
        lines.append([case[0], str(case[1] or "global"), *(found.get(name, "-") for name in names)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: list[str]) -> int:
    stale = [path for path in documents() if filled(path.read_text()) != path.read_text()]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'stale, run python docs/generate.py' if arguments else 'written'}")
        if not arguments:
            path.write_text(filled(path.read_text()))
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
