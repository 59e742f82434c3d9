"""A tour of the lambda layer in a terminal: `lambdanets tour`. Everything printed was computed a moment before.

Letters: B batch, N queries, M context positions, H heads, K key depth, V value depth.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from lambdanets.layers import LambdaLayer1d, LambdaLayer2d, LambdaLayer3d, RelativePositions
from lambdanets.layers.lambda_layer import LambdaLayer
from lambdanets.ops import Relative, explain, lambda_op, lambda_reference
from lambdanets.ops.reference import embed, normalise
from lambdanets.tour_picture import SIDE as SIDE
from lambdanets.tour_picture import draw, scene

STAGES = {"c2": (56, 64), "c3": (28, 128), "c4": (14, 256), "c5": (7, 512)}  # ResNet-50: map side, width
BATCH, HEADS, KEY_DEPTH, SCOPE = 2, 4, 16, 23
FIT_STEPS = 150  # of the small denoiser behind the picture
SEED = 0
NOISE = 0.2  # standard deviation, on colours in 0..1


def run(output: Path) -> None:
    """Prints the tour and writes `position_heatmaps.png` into the folder `output`."""
    console = Console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same work on every machine, also on one that is busy
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            stops(console, output)
    finally:
        torch.set_num_threads(threads)


def stops(console: Console, output: Path) -> None:
    first_layer(console)
    variants(console)
    backends(console)
    against_reference(console)
    decoding(console)
    picture(console, output)


# 1. One layer ---------------------------------------------------------------------------------------------------------


PARTS = {
    "to_queries": "what a pixel asks: 4 heads of depth 16",
    "to_keys": "what a pixel says about itself",
    "to_values": "what it hands on",
    "norm_queries": "batch norm",
    "norm_values": "batch norm",
    "positions": "an embedding for each of 23 x 23 relative positions",
}


def first_layer(console: Console) -> None:
    console.rule("1. One layer")
    images, layer = torch.randn(8, 64, 32, 32), LambdaLayer2d(64)
    conv = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    console.print("layer = LambdaLayer2d(64)  # in place of nn.Conv2d(64, 64, 3, padding=1)")
    table = Table("part", "what it does", box=None, pad_edge=False)
    table.add_column("parameters", justify="right")
    for name, part in layer.named_children():
        table.add_row(name, PARTS[name], f"{parameters(part):,}")
    table.add_row("together", "", f"{parameters(layer):,}", style="bold")
    table.add_row("nn.Conv2d", "a 3x3 window, one answer for all that ask", f"{parameters(conv):,}")
    console.print(table)
    console.print(f"{shape(images)} -> {shape(layer(images))}\n", highlight=False)


# 2. Variants ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    name: str
    layer: LambdaLayer
    inputs: tuple[Tensor, ...]
    options: dict[str, Tensor] = field(default_factory=dict)


def all_variants() -> Iterator[Variant]:
    images, text, video = torch.randn(2, 32, 16, 16), torch.randn(2, 32, 40), torch.randn(2, 32, 4, 8, 8)
    yield Variant("default: content and position", LambdaLayer2d(32), (images,))
    yield Variant("content only (linear attention)", LambdaLayer2d(32, position=False), (images,))
    yield Variant("position only", LambdaLayer2d(32, content=False), (images,))
    yield Variant("multi-head", LambdaLayer2d(32, multi_head=True), (images,))
    yield Variant("intra-depth 4, scope 7", LambdaLayer2d(32, intra_depth=4, scope=7), (images,))
    yield Variant("stride 2, 64 channels out", LambdaLayer2d(32, 64, stride=2), (images,))
    yield Variant("average pooling by half", LambdaLayer2d(32, downsample="avg"), (images,))
    yield Variant("scope 7, dilation 3", LambdaLayer2d(32, scope=7, dilation=3), (images,))
    yield Variant("global scope, up to 16x16", LambdaLayer2d(32, scope=None, input_size=16), (images,))
    yield Variant("causal, in row-major order", LambdaLayer2d(32, causal=True), (images,))
    mask_NM = torch.rand(256, 256) < 0.5
    yield Variant("any mask [N, M]", LambdaLayer2d(32), (images,), {"mask": mask_NM})
    padding = torch.ones(2, 16, 16, dtype=torch.bool)
    padding[1, :, 10:] = False
    yield Variant("padded images [B, 16, 16]", LambdaLayer2d(32), (images,), {"context_mask": padding})
    yield Variant("1-d: sequences", LambdaLayer1d(32), (text,))
    yield Variant("3-d: video, scope 7", LambdaLayer3d(32), (video,))
    cross = LambdaLayer2d(32, context_channels=8)
    yield Variant("another image as context", cross, (images, torch.randn(2, 8, 20, 20)))
    shared = RelativePositions(2, scope=23, key_depth=16)
    yield Variant("positions shared with others", LambdaLayer2d(32, positions=shared), (images,))


def variants(console: Console) -> None:
    console.rule("2. Its variants")
    table = Table("variant", "in", "out", box=None, pad_edge=False)
    table.add_column("parameters", justify="right")
    for variant in all_variants():
        result = variant.layer(*variant.inputs, **variant.options)
        table.add_row(variant.name, shape(variant.inputs[0]), shape(result), f"{parameters(variant.layer):,}")
    console.print(table)
    console.print()


# 3. Backends ----------------------------------------------------------------------------------------------------------


def stage_inputs(name: str) -> tuple[Tensor, Tensor, Tensor, Relative]:
    """What `lambda_op` sees in one stage of a ResNet-50 at 224x224."""
    side, width = STAGES[name]
    queries_BNHK = torch.randn(BATCH, side**2, HEADS, KEY_DEPTH)
    keys, values = torch.randn(BATCH, side**2, KEY_DEPTH), torch.randn(BATCH, side**2, width // HEADS)
    return queries_BNHK, keys, values, Relative(torch.randn(SCOPE, SCOPE, KEY_DEPTH), (side, side))


@torch.no_grad()
def backends(console: Console) -> None:
    console.rule("3. Which implementation runs")
    console.print(
        f"The whole operation at the stages of a ResNet-50, scope {SCOPE}, batch {BATCH}, inference, one "
        f"thread: measured on this machine just now, in milliseconds. In brackets what the cost model "
        f"predicted for the position part. "
        f"[bold green]*[/]: what backend='auto' takes.",
        highlight=False,
    )
    names = list(explain(*stage_inputs("c5")))
    table = Table("map", *names, box=None, pad_edge=False)
    for stage, (side, width) in STAGES.items():
        inputs = stage_inputs(stage)
        said, cells = explain(*inputs), []
        chosen = next(iter(said))
        for name in names:
            prediction = said[name]
            if isinstance(prediction, str):
                cells.append("cannot")
                continue
            measured = milliseconds(lambda name=name, inputs=inputs: lambda_op(*inputs, backend=name))
            cell = f"{measured:.1f} ({prediction * 1e3:.1f})"
            cells.append(f"[bold green]{cell}*[/]" if name == chosen else cell)
        table.add_row(f"{side}x{side}x{width}", *cells)
    console.print(table)
    queries_BNHK, keys, values, positions = stage_inputs("c5")
    mask_NM = torch.rand(2 * queries_BNHK.shape[1:2]) < 0.5
    console.print("\nWith a mask not all of them can run, and they say why:", highlight=False)
    for name, said in explain(queries_BNHK, keys, values, positions, mask=mask_NM).items():
        console.print(f"  [bold]{name:5}[/] {escape(said) if isinstance(said, str) else 'can run'}", highlight=False)
    console.print()


# 4. Right -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def against_reference(console: Console) -> None:
    console.rule("4. Is it right?")
    console.print(
        "Largest error against the paper's equations in float64 (lambdanets.ops.reference), relative to the largest "
        "output, at the c4 stage:",
        highlight=False,
    )
    inputs = stage_inputs("c4")
    truth = lambda_reference(*(cast(t, torch.float64) for t in inputs))
    table = Table("backend", "float32", "bfloat16", box=None, pad_edge=False)
    able = [name for name, said in explain(*inputs).items() if not isinstance(said, str)]
    for name in ("reference", *able):
        errors = []
        for dtype in (torch.float32, torch.bfloat16):
            result = lambda_op(*(cast(t, dtype) for t in inputs), backend=name)
            errors.append(f"{relative_error(result, truth):.1e}")
        table.add_row(name, *errors)
    console.print(table)
    console.print(
        "bfloat16 inputs are rounded to 8 bits before any of this; the sums are float32.\n"
        "`lambdanets selftest` does this at random, with every gradient.\n",
        highlight=False,
    )


def cast(thing: Any, dtype: torch.dtype) -> Any:
    return thing.with_table(thing.table.to(dtype)) if isinstance(thing, Relative) else thing.to(dtype)


def relative_error(result: Tensor, truth: Tensor) -> float:
    return float((result.double() - truth).abs().max() / truth.abs().max())


# 5. Step by step ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def decoding(console: Console) -> None:
    console.rule("5. Step by step")
    layer = LambdaLayer1d(64, causal=True).eval()
    sequence_BCN = torch.randn(2, 64, 200)
    parallel = layer(sequence_BCN)
    prompt, state = layer.prefill(sequence_BCN[:, :, :100])
    outputs = [prompt]
    for n in range(100, 200):
        y_BC, state = layer.step(sequence_BCN[:, :, n], state)
        outputs.append(y_BC[:, :, None])
    error = relative_error(torch.cat(outputs, dim=2), parallel.double())
    floats = state.values.numel() + sum(t.numel() for c in state.content for t in (c.largest, c.total, c.sums))
    console.print(
        f"A causal layer read 100 elements at once and 100 one by one: the result differs from the parallel form by "
        f"{error:.1e}. Its memory is {floats // 2:,} numbers for each sequence, whatever the length.\n",
        highlight=False,
    )


# 6. A picture ---------------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """Each pixel asks, from what is around it, which other pixels to mix: one lambda layer on the noisy colours."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 5, padding=2), nn.ReLU(), nn.Conv2d(24, 24, 5, padding=2), nn.ReLU())
        # One head, no batch norm, values that are the colours: the output is a mixture whose weights can be read.
        self.layer = LambdaLayer2d(24, 3, context_channels=3, heads=1, scope=15, batch_norm=False, embedding_std=0.01)
        nn.init.eye_(self.layer.to_values.weight).requires_grad_(False)

    def forward(self, noisy: Tensor) -> Tensor:
        return self.layer(self.stem(noisy), noisy)

    @torch.no_grad()
    def interactions(self, noisy: Tensor) -> tuple[Tensor, Tensor]:
        """q_n . e_nm and q_n . normalised k_m for every pair, each [N, M]: the weights that multiply value m."""
        queries_BNHK, keys_BMK, _, query_grid, context_grid = self.layer.project(self.stem(noisy), noisy)
        assert self.layer.positions is not None
        assert keys_BMK is not None
        embeddings_NMK = embed(self.layer.positions(query_grid, context_grid, self.layer.stride))
        position_NM = torch.einsum("nk,nmk->nm", queries_BNHK[0, :, 0], embeddings_NMK)
        content_NM = queries_BNHK[0, :, 0] @ normalise(keys_BMK, self.layer.key_norm)[0].T
        return position_NM, content_NM


def fit(console: Console) -> tuple[Denoiser, Tensor]:
    """A denoiser trained for some seconds, and scenes [B, 3, side, side] around 0; the first was never shown to it."""
    drawn = np.stack([scene(np.random.default_rng(seed)) for seed in range(1, 66)])
    scenes = torch.tensor(drawn, dtype=torch.float32).permute(0, 3, 1, 2) - 0.5
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=FIT_STEPS)
    for _ in track(range(FIT_STEPS), "fitting a small denoiser", console=console, transient=True):
        clean = scenes[torch.randint(1, len(scenes), (8,))]
        clean = clean.flip(3) if torch.rand(()) < 0.5 else clean
        loss = (model(clean + NOISE * torch.randn_like(clean)) - clean).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    return model.eval(), scenes


def picture(console: Console, output: Path) -> None:
    console.rule("6. What a layer looks at")
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        console.print(
            "The picture needs matplotlib: pip install 'lambdanets[bench]', then run the tour again.", markup=False
        )
        return
    torch.manual_seed(SEED)  # the picture does not depend on what ran before it
    model, scenes = fit(console)
    clean = scenes[:1]
    noisy = clean + NOISE * torch.randn_like(clean)
    with torch.no_grad():
        restored = model(noisy)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "position_heatmaps.png"
    position_NM, content_NM = model.interactions(noisy)
    draw(path, clean, noisy, restored, position_NM, content_NM)
    before, after = ((image - clean).square().mean().sqrt() for image in (noisy, restored))
    console.print(
        f"One lambda layer learnt in {FIT_STEPS} steps to remove noise (error {before:.3f} before, {after:.3f} after, "
        f"on a scene it never saw). The picture shows, for four pixels, the weights with which it mixes the others: by "
        f"their place, q . e_nm, and by their content, q . k_m.\n[bold]{escape(str(path))}[/]",
        highlight=False,
        soft_wrap=True,
    )


# Small things ---------------------------------------------------------------------------------------------------------


def shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def milliseconds(function: Callable[[], Any], repeats: int = 3) -> float:
    """The median time of a call, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
        if times[-1] > 0.5:  # slow enough to be sure of
            break
    return median(times[1:] or times) * 1e3
