"""Plot benchmark results from their JSON files.

python benchmarks/plot_results.py benchmarks/results/language-cpu.json docs/language.svg
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from lambdanets.files import read_object

MIB = 2**20
GROWTH_SIDES = 4  # with at least this many map sizes, cost is plotted by size


@dataclass(frozen=True)
class BenchPlot:
    """Plot a result of `bench op` or `bench layer`: times by case or, for many map sizes, time and memory by size.

    For a result of `benchmarks/language_models.py`: bits per byte by time, and time and memory per byte by length.
    """

    result: Annotated[Path, tyro.conf.Positional]
    """The JSON file of the benchmark."""
    picture: Annotated[Path, tyro.conf.Positional]
    """The image file to write, such as growth.png or growth.svg."""

    def run(self) -> int:
        result = read_object(self.result)
        layers = all({"shape", "contender"} <= set(row) for row in result.get("rows", [{}]))
        if "generation" not in result and not layers:
            raise ValueError(f"{self.result} is not a result of `bench op`, `bench layer` or `language_models.py`")
        draw(result, self.picture)
        print(f"drawn in {self.picture}")
        return 0


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # writes a file, opens no window
    from matplotlib import pyplot

    if "generation" in result:
        save(language(result, pyplot), path, pyplot)
        return
    rows = result["rows"]
    sides = {side(row) for row in rows}
    if len(sides) >= GROWTH_SIDES and len({row["shape"].split("x")[2] for row in rows}) == 1:
        figure = growth(rows, pyplot)
    else:
        figure = times(rows, pyplot)
    save(figure, path, pyplot)


def save(figure: Any, path: Path, pyplot: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def side(row: dict[str, Any]) -> int:
    return int(row["shape"].split("x")[0])


def scope_name(row: dict[str, Any]) -> str:
    return "global" if row["scope"] is None else f"scope {row['scope']}"


def times(rows: list[dict[str, Any]], pyplot: Any) -> Any:
    """Plot the times of all contenders, one panel for each kind and mode."""
    panels = list(dict.fromkeys((row["kind"], row["mode"]) for row in rows))
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(10, 4 * len(panels)), squeeze=False, layout="constrained")
    for axis, (kind, mode) in zip(axes[:, 0], panels, strict=True):
        chosen = [row for row in rows if (row["kind"], row["mode"]) == (kind, mode)]
        cases = list(dict.fromkeys(f"{row['shape']} {scope_name(row)}" for row in chosen))
        for name in dict.fromkeys(row["contender"] for row in chosen):
            own = [row for row in chosen if row["contender"] == name]
            points = [(cases.index(f"{row['shape']} {scope_name(row)}"), row["milliseconds"]) for row in own]
            axis.plot(*zip(*points, strict=True), "o-", label=name)
        axis.set(title=f"{kind}, {mode}", ylabel="milliseconds", yscale="log", xticks=range(len(cases)))
        axis.set_xticklabels(cases, rotation=30, ha="right", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, ncols=2)
    return figure


def language(result: dict[str, Any], pyplot: Any) -> Any:
    """Plot bits per byte against training time, and time per byte and memory against the length of the text."""
    figure, (learning, speed, memory) = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    rows = result["generation"]
    lengths = [row["length"] for row in rows]
    for kind, found in result["training"].items():
        points = [(point["seconds"], point["bits_per_byte"]) for point in found["curve"]]
        learning.plot(*zip(*points, strict=True), "o-", label=kind)
        speed.plot(lengths, [row[kind]["milliseconds"] for row in rows], "o-", label=kind)
        memory.plot(lengths, [row[kind]["state_bytes"] / MIB for row in rows], "o-", label=kind)
    learning.axhline(result["bigram_bits_per_byte"], linestyle=":", color="grey", label="counted pairs")
    learning.set(title="learning", xlabel="seconds of training", ylabel="bits per byte, validation")
    speed.set(title="time", ylabel="milliseconds a byte")
    memory.set(title="memory", ylabel="state, MiB", yscale="log")
    for axis in (speed, memory):
        axis.set(xlabel="bytes so far", xscale="log", xticks=lengths)
        axis.set_xticklabels([f"{length:,}" for length in lengths])
        axis.minorticks_off()
    speed.set_ylim(bottom=0)
    for axis in (learning, speed, memory):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    return figure


def growth(rows: list[dict[str, Any]], pyplot: Any) -> Any:
    """Plot time and peak memory by the side of the map, with lines of linear and quadratic growth."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    columns = (("milliseconds", 1, "milliseconds"), ("peak_bytes", MIB, "peak memory, MiB"))
    figure, axes = pyplot.subplots(len(modes), 2, figsize=(11, 4 * len(modes)), squeeze=False, layout="constrained")
    for line, mode in zip(axes, modes, strict=True):
        for axis, (field, unit, label) in zip(line, columns, strict=True):
            chosen = [row for row in rows if row["mode"] == mode and row["contender"] in ("ours", "conv3x3 + BN")]
            for name in dict.fromkeys((row["contender"], scope_name(row)) for row in chosen):
                if name[0] != "ours" and name[1] != scope_name(chosen[0]):
                    continue  # convolutions have no scope, so one line is enough
                own = [row for row in chosen if (row["contender"], scope_name(row)) == name]
                points = sorted((side(row), row[field] / unit) for row in own)
                axis.plot(*zip(*points, strict=True), "o-", label=f"ours, {name[1]}" if name[0] == "ours" else name[0])
                if name[0] == "ours":
                    (x, y), last = points[-1], points[0][0]
                    for power in (1, 2):  # in the number of positions
                        below = y * (last / x) ** (2 * power)
                        axis.plot([last, x], [below, y], ":", color="grey", linewidth=0.8, zorder=0)
            sides = sorted({side(row) for row in chosen})
            axis.set(title=mode, xlabel="side of the map", ylabel=label, xscale="log", yscale="log", xticks=sides)
            axis.set_xticklabels(sides)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
    figure.supxlabel("dotted: linear and quadratic in the number of positions", fontsize=8)
    return figure


def main(words: Sequence[str] | None = None) -> int:
    return tyro.cli(BenchPlot, args=words).run()


if __name__ == "__main__":
    sys.exit(main())
