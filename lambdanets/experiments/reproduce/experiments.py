"""The experiments, one for each table and figure of the paper: its numbers, and how each of ours is obtained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

from lambdanets.bench.networks import Entry
from lambdanets.experiments.reproduce import growth
from lambdanets.experiments.reproduce.jobs import GrowthJob, Job, NetworkJob
from lambdanets.experiments.reproduce.marks import UNPRINTED, Comparison, Quantity, compare_row, fits
from lambdanets.experiments.reproduce.pareto import published
from lambdanets.experiments.reproduce.rows import DetectionRow, Row
from lambdanets.experiments.reproduce.tables import DETECTION, ROWS, UNITS, unit
from lambdanets.models.flops import paper_flops
from lambdanets.models.registry import configure
from lambdanets.train.config import TrainConfig

Kind = Literal["exact", "measured", "paper"]
KINDS = {
    "exact": "a count: the same on every machine",
    "measured": "speed or memory, measured on the listed hardware; the paper used 8 TPUv3 cores",
    "paper": "reported by the paper or a paper that it cites, not by us: accuracies on ImageNet and COCO, and counts "
    "of networks that this package does not have",
}
IMAGE_SIZE = 224
DETECTION_SIZE = 1024
SPEED, LATENCY, PEAK = "ex/s", "s / 1024", "GB"
HALF = ("tab:pseudo_labels", "tab:pareto_curve_details")  # tables measured in bfloat16, as stated or implied
PEERS = {  # networks of other papers, from timm
    ("tab:pseudo_labels", "EfficientNet-B7, Noisy Student"): ("timm:efficientnet_b7", 600),
    ("tab:pseudo_labels", "ViT-L/16"): ("timm:vit_large_patch16_384", 384),
    ("tab:parameter_efficient", "EfficientNet-B6"): ("timm:efficientnet_b6", 528),
    ("tab:flops_efficient", "EfficientNet-B6"): ("timm:efficientnet_b6", 528),
}
PAPER_OOM = ("tab:memory_comparison", "Global self-attention")


@dataclass(frozen=True)
class Cell:
    """One number of a table: the paper's, ours, or both.

    Attributes:
        row, quantity, unit: the position in the table, and the unit.
        paper: the number as printed in the paper; None if the paper has none.
        kind: exact, measured or paper.
        compute: returns an exact number with its mark and note.
        job, field, divide: the measurement, the field of its result to use, and the divisor.
        contestant: the same network in `lambdanets experiments compare`, for our accuracy.
        note: a note that is always shown.
    """

    row: str
    quantity: str
    unit: str
    paper: str | None
    kind: Kind
    compute: Callable[[], Comparison] | None = None
    job: Job | None = None
    field: str = "examples_per_second"
    divide: float = 1.0
    contestant: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper."""

    name: str
    label: str  # its LaTeX label in the paper's source
    title: str
    cells: Callable[[], tuple[Cell, ...]]


# Rows of networks -----------------------------------------------------------------------------------------------------


def network_of(row: Row | DetectionRow) -> str | None:
    """Return the network of a row in the form that `lambdanets bench network` accepts."""
    if row.model is None:
        return None
    return ",".join([row.model, *(f"{key}={value}" for key, value in row.arguments.items())])


def contestant(row: Row) -> str | None:
    """Return the network of `lambdanets experiments compare` that a row shows, if any (all are plain ResNet-50s)."""
    known: dict[str, Mapping[str, Any]] = {
        "convolution": {},
        "se": {"se": True},
        "CCLL": {"placement": "CCLL"},
        "LLLL": {"placement": "LLLL"},
        "axial": {"placement": "LLLL", "layer": "axial_attention"},
    }
    if row.model != "resnet50":
        return None
    return next((name for name, arguments in known.items() if dict(row.arguments) == dict(arguments)), None)


def row_cells(row: Row) -> list[Cell]:
    """Return counts, speeds and accuracies of a row, with our speed even if the paper has none."""
    network, size = PEERS.get((row.table, row.label), (network_of(row), row.image_size or IMAGE_SIZE))
    label = row.label if row.table != "tab:pareto_curve_details" else f"{row.label}, {row.image_size} px"
    half = row.table in HALF
    cells = []
    if row.space is not None and row.our_space is not None:
        cells.append(text_cell(row.table, label, "space complexity", row.space, row.our_space, other="reading"))
    quantities: tuple[Quantity, ...] = ("params", "flops", "memory")
    for quantity in quantities:
        printed = getattr(row, quantity)
        if printed is not None or quantity in row.counted:
            compute = partial(compare_row, row, quantity)
            if row.model is None and network is not None:
                compute = partial(compare_peer, row, quantity, network, size)
            cells.append(Cell(label, quantity, unit(row, quantity)[0], printed, "exact", compute))
    if network is not None:
        infer = "OOM" if (row.table, row.label) == PAPER_OOM else row.infer
        inference = NetworkJob(network, size, "inference", half)
        training = NetworkJob(network, size, "training", half)
        cells.append(Cell(label, "inference", SPEED, infer, "measured", job=inference))
        if row.train is not None:
            cells.append(Cell(label, "training", SPEED, row.train, "measured", job=training))
        if row.latency is not None:
            field = "seconds_per_1024"
            cells.append(Cell(label, "training step", LATENCY, row.latency, "measured", job=training, field=field))
        if row.table == "tab:memory_comparison":
            note = "weights, gradients and all activations, not interactions alone"
            peak: dict[str, Any] = dict(job=training, field="peak_bytes", divide=2**30, note=note)
            cells.append(Cell(label, "peak memory, training", PEAK, None, "measured", **peak))
    note = f"as cited from {row.cited}" if row.cited else ""
    for quantity, printed in (("top-1", row.top1), ("top-1, pseudo-labels", row.pseudo_top1)):
        if printed is not None:
            same = contestant(row) if quantity == "top-1" else None
            text = printed if row.gain is None else f"{printed} ({row.gain})"
            cells.append(Cell(label, quantity, "%", text, "paper", contestant=same, note=note))
    if row.remark is not None:
        cells[0] = replace(cells[0], note="; ".join(filter(None, [cells[0].note, row.remark])))
    return cells


def compare_peer(row: Row, quantity: Quantity, network: str, size: int) -> Comparison:
    """Compare the counts of timm's network with those that the paper cites."""
    printed = getattr(row, quantity) or UNPRINTED
    name = unit(row, quantity)[0]
    ours = peer_counts(network, size)[0 if quantity == "params" else 1] / UNITS[name]
    mark = "unprinted" if printed == UNPRINTED else fits(ours, printed)
    note = f"as cited from {row.cited}; ours is {network}"
    if mark is None:
        note += f", {ours / float(printed) - 1:+.1%}"
    return Comparison(row.table, row.label, name, printed, ours, None, mark or "cited", note)


@cache
def peer_counts(network: str, size: int) -> tuple[int, int]:
    import torch

    entry = Entry.parse(network)
    entry.check()
    with torch.device("meta"):
        built = entry.build((size, size)).eval()
    return sum(p.numel() for p in built.parameters()), paper_flops(built, (1, 3, size, size)).total


def table_cells(*tables: str) -> tuple[Cell, ...]:
    return tuple(cell for row in ROWS if row.table in tables for cell in row_cells(row))


# Other experiments ----------------------------------------------------------------------------------------------------


def complexity_cells(table: str) -> tuple[Cell, ...]:
    """Return growth ratios. The paper's are computed with the measurement, since they depend on the sizes."""
    return tuple(
        Cell(
            f"{name}, {letter} doubled",
            quantity,
            "x",
            None,
            "measured",
            job=GrowthJob(table, name, letter),
            field=field,
            note=f"Θ({operation.time if field == 'seconds' else operation.space})",
        )
        for name, operation in growth.TABLES[table].items()
        for letter in operation.letters
        for quantity, field in (("time", "seconds"), ("space", "bytes"))
    )


def detection_cells() -> tuple[Cell, ...]:
    cells = []
    for row in DETECTION:
        network = network_of(row)
        assert network is not None
        sizes = ("small", "medium", "large")
        numbers = [("box AP", row.box), *zip((f"box AP, {s}" for s in sizes), row.box_sizes, strict=True)]
        numbers += [("mask AP", row.mask), *zip((f"mask AP, {s}" for s in sizes), row.mask_sizes, strict=True)]
        cells += [Cell(row.label, quantity, "", printed, "paper") for quantity, printed in numbers]
        job = NetworkJob(network, DETECTION_SIZE, "inference", half=True)
        note = f"the backbone alone at {DETECTION_SIZE} px; whole detectors: `benchmarks/detector_step.py`"
        cells.append(Cell(row.label, "inference", SPEED, None, "measured", job=job, note=note))
    return tuple(cells)


BLOCKS = {  # as printed: blocks of c2 to c5, and the blocks of c4 with a lambda layer
    50: ("3-4-6-3", "3"),
    101: ("3-4-23-3", "6, 12, 18"),
    152: ("3-8-36-3", "5, 10, 15, 20, 25, 30"),
    200: ("3-24-36-3", "5, 10, 15, 20, 25, 30"),
    270: ("4-29-53-4", "8, 16, 24, 32, 40, 48"),
    350: ("4-36-72-4", "10, 20, 30, 40, 50, 60"),
    420: ("4-44-87-4", "10, 20, 30, 40, 50, 60, 70, 80"),
}


def text_cell(
    table: str, label: str, quantity: str, paper: str, ours: str, *, other: str = "misprint", note: str = ""
) -> Cell:
    """Return the cell of a setting or formula, marked with `other` if ours differs."""
    mark = "unprinted" if paper == UNPRINTED else "match" if ours == paper else other
    one = Comparison(table, label, "", paper, None, None, mark, ours)
    return Cell(label, quantity, "", paper, "exact", partial(lambda c: c, one), note=note)


def block_cells() -> tuple[Cell, ...]:
    cells = []
    for depth, (blocks, lambdas) in BLOCKS.items():
        config: Any = configure(f"lambda_resnet{depth}")
        label, table = f"LambdaResNet-{depth}", "tab:block_config_details"
        cells.append(text_cell(table, label, "blocks", blocks, "-".join(map(str, config.depths))))
        cells.append(text_cell(table, label, "lambdas in c4", lambdas, ", ".join(map(str, config.placement[2]))))
    return tuple(cells)


TRAINING = (  # as printed: depth, image size; RandAugment magnitude, dropout, stochastic depth
    *((50, size, "10", "0.2", "0") for size in (128, 160)),
    (101, 160, "10", "0.3", "0"),
    (101, 192, "15", "0.2", "0"),
    (152, 192, "15", "0.3", "0"),
    *((152, size, "15", "0.3", "0.1") for size in (224, 256, 288)),
    (270, 256, "15", "0.3", "0.1"),
    *((350, size, "15", "0.3", "0.2") for size in (256, 288, 320)),
    (420, 320, "15", "0.3", "0.2"),
)


def training_cells() -> tuple[Cell, ...]:
    """Return the training settings of the paper and of our recipes, including those that the paper does not print."""
    from lambdanets.recipes.imagenet import UNPUBLISHED_350, imagenet_350, imagenet_350_unpublished

    cells = []

    def add(label: str, config: TrainConfig, printed: Sequence[str], note: str = "") -> None:
        ours = (config.augment.randaugment_magnitude, config.model.drop_rate, config.model.drop_path_rate)
        names = ("RandAugment magnitude", "dropout", "stochastic depth")
        for name, paper, value in zip(names, printed, ours, strict=True):
            cells.append(text_cell("tab:pareto_curve_hparams", label, name, paper, f"{value:g}", note=note))

    for depth, size, *printed in TRAINING:
        add(f"LambdaResNet-{depth}, {size} px", imagenet_350(depth, size), printed)
    for row in UNPUBLISHED_350:
        config = imagenet_350_unpublished(row.network, row.image_size)
        words = [row.network.replace("lambda_resnet", "LambdaResNet-").replace("_c4", "-C4"), *row.options]
        note = f"the paper has no settings: those of LambdaResNet-{row.like[0]} at {row.like[1]} px"
        add(f"{' '.join(words)}, {row.image_size} px", config, [UNPRINTED] * 3, note)
    return tuple(cells)


def pareto_cells() -> tuple[Cell, ...]:
    """Return times of training and inference, and the published accuracy, for every network of the figure."""
    cells = []
    for one in published():
        for mode, quantity in (("training", "training step"), ("inference", "inference step")):
            job = NetworkJob(one.network, one.image_size, mode, half=True)  # type: ignore[arg-type]
            printed = None if one.tpu_seconds is None or mode == "inference" else f"{one.tpu_seconds:g}"
            field = "seconds_per_1024"
            cells.append(Cell(one.title, quantity, LATENCY, printed, "measured", job=job, field=field))
        cells.append(Cell(one.title, "top-1", "%", f"{one.top1:.1f}", "paper", note=one.source))
    return tuple(cells)


def of_tables(name: str, label: str, title: str) -> Experiment:
    """Return the experiment with the rows of one or more tables of networks."""
    return Experiment(name, label, title, partial(table_cells, *label.split(", ")))


def of_complexity(name: str, label: str, title: str) -> Experiment:
    return Experiment(name, label, title, partial(complexity_cells, label))


EXPERIMENTS = {
    one.name: one
    for one in (
        of_complexity(
            "complexity", "tab:interactions_alternatives", "Complexity: attention, linear attention, lambda layers"
        ),
        of_complexity(
            "multi-head", "tab:multihead_vs_multiquery", "Complexity: multi-head and multi-query lambda layers"
        ),
        of_complexity("intra-depth", "tab:complexity_u", "Complexity: intra-depth"),
        of_tables("layers", "tab:resnet50", "Layers in a ResNet-50"),
        of_tables("attention", "tab:memory_comparison", "Lambda layers and self-attention: memory and throughput"),
        Experiment("pareto", "fig:supervised_pareto_curve", "Speed-accuracy Pareto curve", pareto_cells),
        of_tables("extra-data", "tab:pseudo_labels", "Extra data"),
        Experiment("detection", "tab:detection", "Mask R-CNN on COCO", detection_cells),
        of_tables("ablations", "tab:ablations", "Key depth, heads and intra-depth"),
        of_tables("content-position", "tab:content_vs_position", "Content and position"),
        of_tables("scope", "tab:scope_sizes", "Scope"),
        of_tables("normalization", "tab:normalization", "Normalisation"),
        of_tables("hybrids", "tab:hybrid_lambdanetworks", "Hybrids: placement of lambda layers in a ResNet-50"),
        of_tables("c4", "tab:c4_hybrid", "Lambda layers in c4"),
        of_tables("efficientnet-params", "tab:parameter_efficient", "Parameters compared with EfficientNet-B6"),
        of_tables("efficientnet-flops", "tab:flops_efficient", "FLOPs compared with EfficientNet-B6"),
        of_tables("mobilenet", "tab:mobilenets", "MobileNet-v2"),
        Experiment("blocks", "tab:block_config_details", "Blocks of LambdaResNets", block_cells),
        of_tables("pareto-table", "tab:pareto_curve_details", "LambdaResNets, detailed results"),
        Experiment("settings", "tab:pareto_curve_hparams", "Training settings of LambdaResNets", training_cells),
        of_tables("text", "text:introduction, text:hybrid_attention", "Memory in the paper's text"),
    )
}
"""Experiments by name, in the order of the paper."""
