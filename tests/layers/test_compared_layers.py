"""The layers that the paper compares with, against plain loops in float64, with every gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdanets.layers import (
    AugmentedConvolution2d,
    AxialAttention2d,
    ConvolutionLinearAttention2d,
    GlobalAttention2d,
    LinearAttention,
    LocalAttention2d,
    PairwiseAttention2d,
    PatchwiseAttention2d,
    SqueezeExcitation2d,
)
from lambdanets.layers.vector_attention import reflected
from tests.models.helpers import randomized

HEIGHT, WIDTH = 3, 5


def pixels(projection: nn.Linear, x: Tensor, heads: int) -> Tensor:
    """[B, Y, X, heads, depth] of a projection, written out."""
    return torch.einsum("oc,bcyx->byxo", projection.weight, x).unflatten(-1, (heads, -1))


def squeeze_excitation(layer: SqueezeExcitation2d, x: Tensor) -> Tensor:
    hidden, out = layer.fc1, layer.fc2
    examples = []
    for image in x:
        means = torch.stack([channel.sum() / channel.numel() for channel in image])
        first = torch.clamp(hidden.weight[:, :, 0, 0] @ means + hidden.bias, min=0)
        weights = 1 / (1 + torch.exp(-(out.weight[:, :, 0, 0] @ first + out.bias)))
        examples.append(torch.stack([channel * w for channel, w in zip(image, weights, strict=True)]))
    return torch.stack(examples)


def linear_attention(layer: LinearAttention, x: Tensor) -> Tensor:
    """The attention map that the layer never computes, element by element."""
    groups = 1 if layer.multi_query else layer.heads
    queries = pixels(layer.to_queries, x, layer.heads).flatten(1, 2)
    keys = pixels(layer.to_keys, x, groups).flatten(1, 2)
    values = pixels(layer.to_values, x, groups).flatten(1, 2)
    outputs = []
    for head in range(layer.heads):
        q, k, v = queries[:, :, head], keys[:, :, head % groups], values[:, :, head % groups]
        if layer.feature_map == "softmax":
            q = torch.exp(q) / torch.exp(q).sum(2, keepdim=True)
            k = torch.exp(k) / torch.exp(k).sum(1, keepdim=True)
        else:
            q, k = (torch.where(t > 0, t + 1, torch.exp(t)) for t in (q, k))
        weights = torch.einsum("bnk,bmk->bnm", q, k)
        if layer.feature_map == "elu":
            weights = weights / weights.sum(2, keepdim=True)
        assert torch.allclose(weights.sum(2), torch.ones_like(weights[..., 0]))
        outputs.append(torch.einsum("bnm,bmv->bnv", weights, v))
    return torch.cat(outputs, 2).transpose(1, 2).unflatten(2, x.shape[2:])


def attend(queries: Tensor, context: list[tuple[Tensor, Tensor, Tensor]], depth: int) -> Tensor:
    """One query [..., K]; the context is (key, sum of relative embeddings, value) for each position."""
    logits = torch.stack([((key + embedding) * queries).sum(-1) / math.sqrt(depth) for key, embedding, _ in context])
    weights = torch.exp(logits) / torch.exp(logits).sum(0)
    return sum(w[..., None] * value for w, (_, _, value) in zip(weights, context, strict=True))  # type: ignore


def assemble(outputs: dict[tuple[int, int], Tensor], height: int, width: int) -> Tensor:
    rows = [torch.stack([outputs[y, x].flatten(1) for x in range(width)], dim=-1) for y in range(height)]
    return torch.stack(rows, dim=-2)


def global_attention(layer: GlobalAttention2d, x: Tensor) -> Tensor:
    q, k, v = (pixels(p, x, layer.heads) for p in (layer.to_queries, layer.to_keys, layer.to_values))
    height, width = x.shape[2:]
    outputs = {}
    for y0 in range(height):
        for x0 in range(width):
            context = [
                (
                    k[:, y, x],
                    layer.height.table[y - y0 + layer.height.size - 1]
                    + layer.width.table[x - x0 + layer.width.size - 1],
                    v[:, y, x],
                )
                for y in range(height)
                for x in range(width)
            ]
            outputs[y0, x0] = attend(q[:, y0, x0], context, layer.key_depth)
    return assemble(outputs, height, width)


def axial_attention(layer: AxialAttention2d, x: Tensor) -> Tensor:
    height, width = x.shape[2:]
    for part, embedding, along_columns in ((layer.columns, layer.height, True), (layer.rows, layer.width, False)):
        q, k, v = (pixels(p, x, part.heads) for p in (part.to_queries, part.to_keys, part.to_values))
        outputs = {}
        for y0 in range(height):
            for x0 in range(width):
                others = [(y, x0) for y in range(height)] if along_columns else [(y0, x) for x in range(width)]
                context = [
                    (k[:, y, x], embedding.table[(y - y0) + (x - x0) + embedding.size - 1], v[:, y, x])
                    for y, x in others
                ]
                outputs[y0, x0] = attend(q[:, y0, x0], context, part.key_depth)
        x = assemble(outputs, height, width)
    return x


def local_attention(layer: LocalAttention2d, x: Tensor) -> Tensor:
    q, k, v = (pixels(p, x, layer.heads) for p in (layer.to_queries, layer.to_keys, layer.to_values))
    height, width = x.shape[2:]
    outputs = {}
    for y0 in range(height):
        for x0 in range(width):
            context = []
            for i in range(layer.scope[0]):
                for j in range(layer.scope[1]):
                    y, x = y0 + i - layer.scope[0] // 2, x0 + j - layer.scope[1] // 2
                    if 0 <= y < height and 0 <= x < width:
                        embedding = torch.cat([layer.height[:, i], layer.width[:, j]], dim=-1)
                        context.append((k[:, y, x], embedding, v[:, y, x]))
            outputs[y0, x0] = attend(q[:, y0, x0], context, layer.key_depth)
    return assemble(outputs, height, width)


def augmented_convolution(layer: AugmentedConvolution2d, x: Tensor) -> Tensor:
    attended = global_attention(layer.attention, x)
    projected = torch.einsum("oc,bcyx->boyx", layer.project.weight[:, :, 0, 0], attended)
    return torch.cat([F.conv2d(x, layer.conv.weight, padding=1), projected], dim=1)


def convolution_linear_attention(layer: ConvolutionLinearAttention2d, x: Tensor) -> Tensor:
    y = F.conv2d(x, layer.conv.weight, padding=1)
    return y + torch.einsum("oc,bcyx->boyx", layer.project.weight[:, :, 0, 0], linear_attention(layer.attention, y))


def mirrored(place: int, size: int) -> int:
    """A coordinate outside 0 to size - 1, walked back into the map: the edge itself is not repeated."""
    while not 0 <= place < size:
        place = -place if place < 0 else 2 * (size - 1) - place
    return place


def affine(conv: nn.Conv2d, vector: Tensor) -> Tensor:
    """A 1x1 convolution of one pixel's [B, C]."""
    weighted = vector @ conv.weight[:, :, 0, 0].T
    return weighted if conv.bias is None else weighted + conv.bias


def mapped(mapping: nn.Sequential, vector: Tensor) -> Tensor:
    """norm, ReLU, 1x1, norm, ReLU, 1x1 of one vector [B, C] in eval mode."""
    for norm, conv in ((mapping[0], mapping[2]), (mapping[3], mapping[5])):
        vector = (vector - norm.running_mean) / torch.sqrt(norm.running_var + norm.eps) * norm.weight + norm.bias
        vector = affine(conv, torch.clamp(vector, min=0))
    return vector


def vector_attention(layer: PairwiseAttention2d | PatchwiseAttention2d, x: Tensor) -> Tensor:
    height, width = x.shape[2:]
    pixel = {(y, x0): x[:, :, y, x0] for y in range(height) for x0 in range(width)}
    outputs = {}
    for y0, x0 in pixel:
        footprint = [
            (mirrored(y0 + i - layer.scope[0] // 2, height), mirrored(x0 + j - layer.scope[1] // 2, width))
            for i in range(layer.scope[0])
            for j in range(layer.scope[1])
        ]
        query = affine(layer.to_queries, pixel[y0, x0])
        keys = [affine(layer.to_keys, pixel[place]) for place in footprint]
        if isinstance(layer, PairwiseAttention2d):

            def position(y: int, x: int, layer: PairwiseAttention2d = layer) -> Tensor:
                place = [2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1]
                return affine(layer.to_positions, torch.tensor([place], dtype=torch.float64))

            here = position(y0, x0)
            places = [(here - position(*place)).expand(len(query), -1) for place in footprint]
            relations = [torch.cat([query - key, place], 1) for key, place in zip(keys, places, strict=True)]
            weights = torch.stack([mapped(layer.mapping, relation) for relation in relations]).softmax(0)  # [S, B, G]
        else:
            patch = torch.cat([query, torch.stack(keys, 2).flatten(1)], 1)
            weights = mapped(layer.mapping, patch).unflatten(1, (layer.groups, -1)).permute(2, 0, 1)
        values = torch.stack([affine(layer.to_values, pixel[place]) for place in footprint])
        outputs[y0, x0] = (weights.repeat_interleave(layer.group, 2) * values).sum(0)[:, None]
    return assemble(outputs, height, width)


SIZE = (HEIGHT, WIDTH)
CASES = {
    "squeeze_excitation": (SqueezeExcitation2d, (8,), {}, squeeze_excitation),
    "squeeze_excitation hidden": (SqueezeExcitation2d, (8,), {"hidden": 3}, squeeze_excitation),
    "linear": (LinearAttention, (6, 8), {"heads": 2, "key_depth": 3}, linear_attention),
    "linear elu": (LinearAttention, (6, 8), {"heads": 2, "feature_map": "elu"}, linear_attention),
    "linear multi-query": (LinearAttention, (8,), {"heads": 4, "multi_query": True}, linear_attention),
    "linear multi-query elu": (
        LinearAttention,
        (8,),
        {"heads": 4, "key_depth": 3, "multi_query": True, "feature_map": "elu"},
        linear_attention,
    ),
    "global": (GlobalAttention2d, (6, 8), {"heads": 2, "input_size": SIZE}, global_attention),
    "global larger table": (
        GlobalAttention2d,
        (8,),
        {"heads": 4, "key_depth": 3, "input_size": (4, 9)},
        global_attention,
    ),
    "axial": (AxialAttention2d, (6, 8), {"heads": 2, "key_depth": 3, "input_size": (5, 6)}, axial_attention),
    "local": (LocalAttention2d, (6, 8), {"heads": 2, "scope": 3}, local_attention),
    "local rectangle": (LocalAttention2d, (8,), {"heads": 2, "key_depth": 6, "scope": (7, 3)}, local_attention),
    "augmented": (
        AugmentedConvolution2d,
        (6, 12),
        {"heads": 2, "value_ratio": 0.4, "key_depth": 3, "input_size": 6},
        augmented_convolution,
    ),
    "convolution and linear": (
        ConvolutionLinearAttention2d,
        (6, 8),
        {"heads": 2, "key_depth": 3},
        convolution_linear_attention,
    ),
    "pairwise": (PairwiseAttention2d, (6, 8), {"scope": 3, "group": 4}, vector_attention),
    "pairwise rectangle": (PairwiseAttention2d, (4,), {"scope": (1, 5), "key_depth": 3, "group": 2}, vector_attention),
    "patchwise": (PatchwiseAttention2d, (6, 8), {"scope": 3, "group": 4}, vector_attention),
    "patchwise beyond the map": (PatchwiseAttention2d, (4,), {"scope": (7, 3), "group": 2}, vector_attention),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_values_and_gradients(case: str, channels_last: bool) -> None:
    build, sizes, options, oracle = CASES[case]
    torch.manual_seed(1)
    layer = randomized(build(*sizes, **options)).double().eval()
    x = torch.randn(2, sizes[0], HEIGHT, WIDTH, dtype=torch.float64, requires_grad=True)
    given = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    got, expected = layer(given), oracle(layer, x)
    torch.testing.assert_close(got, expected)
    if case != "augmented":  # its parts are a convolution's and an attention's
        assert got.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    weights = torch.randn_like(expected)
    inputs = [x, *layer.parameters()]
    for g, e in zip(
        torch.autograd.grad((got * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(g, e)
        assert e.abs().sum() > 0


@pytest.mark.parametrize("size", [(4, 5), (2, 3), (1, 2), (1, 1)], ids=str)
def test_footprints_are_mirrored_at_the_border(size: tuple[int, int]) -> None:
    x = torch.randn(1, 2, *size)
    padded = reflected(x, (3, 2))
    if size == (4, 5):
        torch.testing.assert_close(padded, F.pad(x, (2, 2, 3, 3), mode="reflect"))
    for y in range(padded.shape[2]):
        for column in range(padded.shape[3]):
            inside = mirrored(y - 3, size[0]) if size[0] > 1 else 0, mirrored(column - 2, size[1]) if size[1] > 1 else 0
            assert torch.equal(padded[:, :, y, column], x[:, :, *inside])


def test_patchwise_attention_can_be_a_convolution_that_ignores_the_content() -> None:
    """With the last map at its bias, the weights are a fixed depthwise kernel for each group of channels."""
    layer = PatchwiseAttention2d(8, scope=3, group=4).double().eval()
    last = layer.mapping[5]
    assert isinstance(last, nn.Conv2d)
    nn.init.zeros_(last.weight)
    x = torch.randn(2, 8, 6, 7, dtype=torch.float64)
    kernel = last.bias.view(2, 1, 3, 3).repeat_interleave(4, 0)
    expected = F.conv2d(F.pad(layer.to_values(x), (1, 1, 1, 1), mode="reflect"), kernel, groups=8)
    torch.testing.assert_close(layer(x), expected)


def test_linear_attention_takes_sequences_and_volumes() -> None:
    layer = LinearAttention(8, heads=2).double()
    x = torch.randn(2, 8, HEIGHT, WIDTH, dtype=torch.float64)
    flat = layer(x.flatten(2))
    torch.testing.assert_close(flat, layer(x).flatten(2))
    torch.testing.assert_close(layer(x[..., None]).flatten(2), flat)


def test_local_attention_with_a_full_window_is_global_attention() -> None:
    """With embeddings at zero the two are the same function: nothing outside the map takes part."""
    torch.manual_seed(2)
    local = LocalAttention2d(8, heads=2, scope=(2 * HEIGHT - 1, 2 * WIDTH - 1)).double()
    whole = GlobalAttention2d(8, heads=2, input_size=SIZE).double()
    for table in (local.height, local.width, whole.height.table, whole.width.table):
        nn.init.zeros_(table)
    for name in ("to_queries", "to_keys", "to_values"):
        getattr(whole, name).load_state_dict(getattr(local, name).state_dict())
    x = torch.randn(2, 8, HEIGHT, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(local(x), whole(x))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GlobalAttention2d(8, 9, heads=2, input_size=4), "not divisible by heads=2"),
        (lambda: LinearAttention(8, heads=3), "not divisible by heads=3"),
        (lambda: LinearAttention(8, feature_map="relu"), "'softmax', 'elu'"),
        (lambda: LocalAttention2d(8, heads=2, scope=4), "scope must be odd"),
        (lambda: LocalAttention2d(6, heads=2), "key_depth must be even .* got 3"),
        (lambda: AugmentedConvolution2d(8, heads=8, input_size=4), "fewer heads"),
        (lambda: SqueezeExcitation2d(3), "no hidden channel for channels=3"),
        (lambda: PatchwiseAttention2d(12), "not divisible by group=8"),
        (lambda: PairwiseAttention2d(8, scope=4), "scope must be odd"),
        (lambda: PatchwiseAttention2d(8)(torch.zeros(8, 5, 5)), r"\[batch, 8, height, width\]"),
        (lambda: ConvolutionLinearAttention2d(10, heads=2), r"not divisible by 2 \* heads, with heads=2"),
        (lambda: GlobalAttention2d(8, heads=2, input_size=4)(torch.zeros(1, 8, 5, 4)), "larger input_size"),
        (lambda: AxialAttention2d(8, heads=2, input_size=4)(torch.zeros(1, 8, 4, 5)), "larger input_size"),
        (lambda: SqueezeExcitation2d(8)(torch.zeros(1, 4, 5, 5)), r"\[batch, 8, height, width\]"),
        (lambda: LocalAttention2d(8, heads=2)(torch.zeros(8, 5, 5)), r"\[batch, 8, height, width\]"),
        (lambda: LinearAttention(8)(torch.zeros(1, 8)), r"\[batch, 8, \*space\]"),
    ],
)
def test_errors_say_what_to_do(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
