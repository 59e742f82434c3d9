"""Fill the generated blocks of README.md and docs/*.md from benchmarks/results/*.json.

    python docs/generate.py            # write
    python docs/generate.py --check    # exit with 1 if a block is stale

A block is everything between `<!-- bench:NAME -->` and `<!-- /bench -->`; it shows benchmarks/results/NAME.json.
`python benchmarks/run.py NAME` measures again; run this afterwards.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent))  # blocks.py, readings.py, summary.py

import paper_tables
import readings
import summary
from blocks import (
    Row,
    comparison,
    detect,
    embedding,
    engine,
    fine_tuning,
    kernels,
    loader,
    own_images,
    pseudo,
    pseudo_hours,
    sets,
)
from summary import form, left_out, when

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(?P<open><!-- bench:(?P<name>[\w-]+) -->\n)(?P<body>.*?)(?P<close><!-- /bench -->)", re.DOTALL)


def runner() -> ModuleType:
    """Import benchmarks/run.py, which has the command of every file."""
    spec = importlib.util.spec_from_file_location("benchmarks_run", ROOT / "benchmarks" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


run = runner()


def documents() -> list[Path]:
    """Return the files that may have generated blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "lambdanets/ops/triton/README.md"]


def filled(text: str, results: Path = RESULTS) -> str:
    """Return the text with every block filled from the JSON."""
    return BLOCK.sub(lambda match: match["open"] + body(match["name"], results) + match["close"], text)


def body(name: str, results: Path) -> str:
    """Return the content of a block."""
    if name.startswith("reproduce-"):
        return reproduced(name, results)
    if name == "pseudo-hours":
        return pseudo_hours(results)
    if name in ("summary", "contenders", "layers"):
        return getattr(summary, name)(results)
    if name == "files":
        return files(results)
    if name == "records":
        return records(results)
    if name == "pseudo-select":
        return readings.selection(results)
    path = results / f"{name}.json"
    if not path.exists():
        how = f"`python benchmarks/run.py {name}` writes" if name in run.COMMANDS else "There is no"
        return f"No measurement yet. {how} {name}.json.\n"
    result = json.loads(path.read_text())
    machine = result["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items() if version)
    measured = f"{versions}. Measured {when(result)}"
    if "files" in result:
        return exports(result, f"{machine['cpu']}. {measured}")
    kind = "roofline" if "peaks" in result else result.get("name", name).partition("-")[0]
    if kind in OTHERS:
        note = f"\n{result['note']}\n" if "note" in result else ""
        threads = f", {machine['cores']} thread{'s' if machine['cores'] > 1 else ''}"
        where = f"{machine['gpu'] or machine['cpu'] + threads}. {measured}"
        return OTHERS[kind](result, where) + note
    rows = result["rows"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} threads"
    first = rows[0]
    parts = [
        f"{where}. {measured}; medians, batch {first['batch']}, {first['dtype']}, "
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
            if machine["gpu"] and mode == "training" and all(row["peak_bytes"] for row in layers):
                parts.append(
                    "\nPeak memory beyond the input, training: ours in MiB, the others as multiples of ours.\n\n"
                )
                parts.append(table(layers, memory_cell(layers)))
        if operations:
            parts.append(f"\nThe operation alone, {mode}: milliseconds; `auto` chooses the one marked with *.\n\n")
            parts.append(table(operations, operation_cell))
    missing = left_out(result)
    return "".join([*parts, *(["\n"] if missing else []), *missing])


def files(results: Path) -> str:
    """List every file with a command: what wrote it, on which machine, when, at which commit."""
    lines = ["| file | command | machine | measured |\n| --- | --- | --- | --- |\n"]
    for name in run.COMMANDS:
        if (results / f"{name}.json").exists():
            command = run.command(name).replace("|", "\\|")
            lines.append(f"| {link_to(name)} | `{command}` | {' | '.join(origin(results, name))} |\n")
    return "".join(lines)


def records(results: Path) -> str:
    """List the files that are records of experiments with earlier kernels."""
    lines = ["| file | machine | measured |\n| --- | --- | --- |\n"]
    lines += [f"| {link_to(name)} | {' | '.join(origin(results, name))} |\n" for name in run.RECORDS]
    return "".join(lines)


def link_to(name: str) -> str:
    return f"[{name}.json](../{run.RESULTS}/{name}.json)"


def origin(results: Path, name: str) -> tuple[str, str]:
    """Return the machine of a measurement, and its date and commit."""
    result = json.loads((results / f"{name}.json").read_text())
    machine = result.get("machine", {})
    parts = list(result.get("measurements", {}).values())  # of `lambdanets reproduce`, each with its own date
    where = machine.get("gpu") or machine.get("device") or machine.get("cpu") or result.get("hardware") or "not noted"
    if "date" in result:
        return where, when(result)
    if not parts:
        return where, "not noted"
    first, last = (pick(parts, key=lambda one: one["date"]) for pick in (min, max))
    return where, f"{when(first)} to {when(last)}"


def reproduced(name: str, results: Path) -> str:
    """Show what `lambdanets reproduce` wrote: the headlines, or the tables if the name ends in -tables."""
    folder = name.removesuffix("-tables")
    path = results / folder / "reproduce.json"
    if not path.exists():
        return f"No measurement yet. `lambdanets reproduce all --out benchmarks/results/{folder}` writes it.\n"
    result = json.loads(path.read_text())
    if folder != name:
        return paper_tables.tables(result)
    picture = "\n![Time for 1024 images against published accuracy](figures/pareto.svg)\n"
    return paper_tables.summary(result) + (picture if result["headlines"] else "")


def exports(result: Row, where: str) -> str:
    """Show the output of `lambdanets export --json`."""
    name = " ".join([result["what"], *result["options"]])
    sides = " x ".join(map(str, result["shapes"][0][2:]))
    threads = f"{result['threads']} thread{'s' if result['threads'] > 1 else ''}"
    lines = [f"{where}; one image of {sides}, float32, {threads}, medians of CPU time. "]
    lines.append(
        f"Rounding in float32 alone changes the scores of this network by {result['rounding']:.1g} (relative).\n\n"
    )
    lines.append(f"| {name}, {result['size']} size | difference | MB | ms | speed-up |\n")
    lines.append("| --- | ---: | ---: | ---: | ---: |\n")
    eager = result["eager"]["cpu"]
    lines.append(f"| eager PyTorch | | | {eager:.3g} | 1 |\n")
    for one in result["files"]:
        found = one["latency"]["cpu"]
        cells = [one["format"], f"{one['difference']:.1g}", f"{one['bytes'] / 1e6:.0f}", f"{found:.3g}"]
        lines.append(f"| {' | '.join(cells)} | {eager / found:.2f} |\n")
    return "".join(lines)


def networks(result: Row, where: str) -> str:
    """Show the result of `lambdanets bench network`: images per second, and the ratio to the first network."""
    kinds = list(dict.fromkeys(kind_of(row["protocol"]) for row in result["rows"]))
    found: dict[str, Row] = {}
    again: list[str] = []  # measured a second time, at the end
    for row in result["rows"]:
        one = found.setdefault(row["network"], {"parameters": row["parameters"], "pixels": row["image_size"][0]})
        kind = kind_of(row["protocol"])
        if kind not in one:
            one[kind] = row
        elif row["result"] and one[kind]["result"]:
            ratio = row["result"]["examples_per_second"] / one[kind]["result"]["examples_per_second"]
            again.append(f"`{row['network']}`, {kind}: {row['result']['examples_per_second']:,.0f} ({ratio:.3f})")
    training = next((kind for kind in kinds if kind.startswith("training")), None)  # the one whose memory is shown
    protocol = result["rows"][0]["protocol"]
    lines = [
        f"{where}; {protocol['precision']}, images per second with a batch of {protocol['batch']} (in brackets: "
        f"relative to the first network at that resolution), batch norm folded for inference.\n\n"
    ]
    titles = ["network", "pixels", "parameters", *kinds]
    if training:
        rows = [one[training]["result"] for one in found.values() if training in one]
        images = {row["peak_batch"] for row in rows if row}
        titles.append(f"training memory, batch {' or '.join(map(str, sorted(images)))}")
    lines.append(f"| {' | '.join(titles)} |\n| --- | {' | '.join(['---:'] * (len(titles) - 1))} |\n")
    firsts: dict[int, Row] = {}
    for name, one in found.items():
        first = firsts.setdefault(one["pixels"], one)
        parameters = f"{one['parameters'] / 1e6:.1f}M" if one["parameters"] else "-"
        cells = [f"`{name}`", str(one["pixels"]), parameters]
        cells += [speed(one.get(kind), first.get(kind), "examples_per_second") for kind in kinds]
        cells += [speed(one.get(training), first.get(training), "peak_bytes")] if training else []
        lines.append(f"| {' | '.join(cells)} |\n")
    if again:
        lines.append(f"\nMeasured again at the end of the run: {'; '.join(again)}.\n")
    return "".join(lines)


def kind_of(protocol: Row) -> str:
    how = ("CUDA graphs" if protocol.get("graphs") else "compiled") if protocol["compiled"] else "eager"
    if protocol.get("blocks"):
        how = "by blocks, CUDA graph" if protocol["graphs"] else "by blocks"
    return f"{protocol['mode']}, {how}"


def speed(row: Row | None, first: Row | None, what: str) -> str:
    """Return a value with its ratio to that of the first network, or the error of the measurement."""
    if row is None:
        return "not measured"
    if row["result"] is None:
        return str(row["error"]).replace("|", "/").replace("\n", " ")
    value = row["result"][what]
    shown = f"{value:,.0f}" if what != "peak_bytes" else f"{value / 2**30:.1f} GiB"
    base = (first or {}).get("result")
    return f"{shown} ({value / base[what]:.2f})" if base else shown


def language(result: Row, where: str) -> str:
    """Show the result of benchmarks/language_models.py."""
    text, training, settings = result["text"], result["training"], result["settings"]
    kinds, equal = list(training), result["equal_steps"]
    lines = [
        f"{where}. Text: {text['corpus']}, {text['files']} files, {text['training_bytes']:,} bytes for training and "
        f"{text['validation_bytes']:,} for validation (SHA-256 {text['sha256']}...). {settings['minutes']:g} minutes "
        f"of training for each model, in turns, in {settings['precision']}, in steps of {settings['batch_size']} "
        f"sequences of {settings['length']} bytes; {result['evaluated_bytes']:,} bytes evaluated.\n\n",
        f"| model | parameters | bits per byte, equal time | equal steps ({equal['step']:,}) | steps | bytes/s |\n",
        "| --- | ---: | ---: | ---: | ---: | ---: |\n",
    ]
    for kind, found in training.items():
        cells = [kind, f"{found['parameters']:,}", f"{found['bits_per_byte']:.3f}", f"{equal[kind]:.3f}"]
        lines.append(f"| {' | '.join(cells)} | {found['steps']:,} | {found['bytes_per_second']:,.0f} |\n")
    lines.append(f"| bigram counts | | {result['bigram_bits_per_byte']:.3f} | | | |\n")
    lines.append("\nThe trained models on the same bytes, with other context lengths (bits per byte):\n\n")
    lines.append(f"| length | {' | '.join(kinds)} |\n|{' ---: |' * (1 + len(kinds))}\n")
    for row in result["context"]:
        lines.append(f"| {row['length']:,} | {' | '.join(f'{row[kind]:.3f}' for kind in kinds)} |\n")
    lines.append("\nGeneration of one text: cost of the next byte by the number of bytes so far.\n\n| bytes so far |")
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


OTHERS = {"language": language, "compare": comparison, "networks": networks, "engine": engine, "pseudo": pseudo}
OTHERS |= {"detect": detect, "sets": sets, "loader": loader, "guard": readings.guard}
OTHERS |= {"roofline": kernels, "embedding": embedding, "own_images": own_images}
OTHERS |= {"kill": readings.kills, "teachers": readings.teachers, "fine_tuning": fine_tuning}


def hard_baseline(rows: list[Row]) -> str:
    """Compare ours with the convolution, each in its fastest form: eager, folded (inference) or compiled (training)."""
    lines, compared = [], False
    for shape, scope in dict.fromkeys((row["shape"], row["scope"]) for row in rows):
        found = [row for row in rows if (row["shape"], row["scope"]) == (shape, scope)]
        both = [[row for row in found if row["contender"].startswith(name)] for name in ("ours", "conv3x3")]
        fastest = [min(side, key=lambda row: row["milliseconds"]) if side else None for side in both]
        times = [f"{one['milliseconds']:.3g}{form(one)}" if one else "not measured" for one in fastest]
        mine, other = fastest
        compared = compared or bool(mine and other)
        ratio = f"{mine['milliseconds'] / other['milliseconds']:.2f}" if mine and other else "-"
        lines.append(f"| {shape} | {scope or 'global'} | {' | '.join(times)} | {ratio} |\n")
    if not compared:  # a run without one of the two
        return ""
    title = f"\nBoth in their fastest form, {rows[0]['mode']}: milliseconds, and the ratio of times.\n"
    return title + "\n| map | scope | ours | conv3x3 | ratio |\n| --- | --- | ---: | ---: | ---: |\n" + "".join(lines)


def layer_cell(row: Row) -> str:
    return f"{row['milliseconds']:.3g} ms" if row["contender"] == "ours" else f"{row['ratio']:.2f}x"


def memory_cell(rows: list[Row]) -> Callable[[Row], str]:
    ours = {(row["shape"], row["scope"]): row["peak_bytes"] for row in rows if row["contender"] == "ours"}

    def cell(row: Row) -> str:
        mine = ours[row["shape"], row["scope"]]
        return f"{mine / 2**20:,.0f} MiB" if row["contender"] == "ours" else f"{row['peak_bytes'] / mine:.2f}x"

    return cell


def operation_cell(row: Row) -> str:
    return f"{row['milliseconds']:.3g}{'*' if row['chosen'] else ''}"


def table(rows: list[Row], cell: Callable[[Row], str]) -> str:
    """Return one line for each feature map and scope, with one column for each contender."""
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
