"""Causal sequences: step by step, after a prompt, and all at once are the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lambdanets import LambdaLayer1d

BATCH, CHANNELS, LENGTH = 2, 8, 41  # longer than one chunk of the running sum
VARIANTS = {
    "plain": {},
    "strict": {"causal": "strict"},
    "even_scope": {"scope": 6},
    "scope_1": {"scope": 1},
    "scope_2_strict": {"scope": 2, "causal": "strict"},
    "dilation": {"dilation": 3},
    "dilation_even_strict": {"dilation": 2, "scope": 4, "causal": "strict"},
    "scope_beyond_sequence": {"scope": 101},
    "global": {"scope": None, "input_size": 48},
    "global_strict": {"scope": None, "input_size": LENGTH, "causal": "strict"},
    "multi_head": {"multi_head": True},
    "intra_depth": {"intra_depth": 3},
    "multi_head_intra_depth_strict": {"multi_head": True, "intra_depth": 2, "causal": "strict"},
    "l2": {"key_norm": "l2"},
    "l2_strict": {"key_norm": "l2", "causal": "strict"},
    "no_key_norm": {"key_norm": None},
    "query_softmax": {"query_softmax": True},
    "content_only": {"position": False},
    "content_only_strict": {"position": False, "causal": "strict", "multi_head": True},
    "position_only": {"content": False},
    "position_only_multi_head": {"content": False, "multi_head": True, "causal": "strict"},
    "batch_norm": {"batch_norm": True},
    "out_channels": {"out_channels": 12},
    "position_bias": {"position_bias": True},
    "position_bias_multi_head": {"position_bias": True, "multi_head": True, "query_softmax": True},
}
EACH = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def build(**options):
    layer = LambdaLayer1d(CHANNELS, **({"heads": 2, "key_depth": 3, "scope": 7, "causal": True} | options)).double()
    for norm in (layer.norm_queries, layer.norm_values):
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.bias)
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    if layer.position_bias is not None:
        nn.init.normal_(layer.position_bias)
    return layer.eval()


def sequence(length=LENGTH):
    return torch.randn(BATCH, CHANNELS, length, dtype=torch.float64)


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def shapes(state):
    running = [(c.largest.shape, c.total.shape, c.sums.shape) for c in state.content]
    return [state.values.shape, *running]


def run(layer, x, state):
    outputs = []
    for t in range(x.shape[2]):
        output, state = layer.step(x[:, :, t], state)
        outputs.append(output)
    return torch.stack(outputs, dim=2), state


@EACH
def test_steps_equal_the_parallel_form(options):
    layer, x = build(**options), sequence()
    found, state = run(layer, x, layer.init_state(BATCH))
    close(found, layer(x).detach())
    assert state.length == LENGTH


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_steps_equal_the_parallel_form_whatever_the_sizes(data):
    heads = data.draw(st.sampled_from([1, 2, 4, 8]), "heads")
    options = {name: data.draw(st.integers(1, most), name) for name, most in (("key_depth", 5), ("scope", 90))}
    options |= {"causal": data.draw(st.sampled_from([True, "strict"])), "multi_head": data.draw(st.booleans())}
    length, prompt = data.draw(st.integers(1, 80), "length"), data.draw(st.integers(0, 80), "prompt")
    torch.manual_seed(data.draw(st.integers(0, 2**16), "seed"))
    layer, x = build(heads=heads, **options), 3 * sequence(length)
    prompt = min(prompt, length)
    outputs, state = [], layer.init_state(BATCH)
    if prompt:
        first, state = layer.prefill(x[:, :, :prompt])
        outputs.append(first)
    if prompt < length:
        outputs.append(run(layer, x[:, :, prompt:], state)[0])
    layer.backend = "reference"  # the paper's equations, with the mask of a causal order
    close(torch.cat(outputs, dim=2), layer(x).detach())


@EACH
@pytest.mark.parametrize("prompt", [1, 3, 35])
def test_prompt_then_steps_equal_the_parallel_form(options, prompt):
    layer, x = build(**options), sequence()
    first, state = layer.prefill(x[:, :, :prompt])
    assert state.length == prompt
    rest, _ = run(layer, x[:, :, prompt:], state)
    close(torch.cat([first, rest], dim=2), layer(x).detach())


@EACH
def test_memory_does_not_grow(options):
    layer, x = build(**options), sequence()
    start = layer.init_state(BATCH)
    first = shapes(start)
    _, state = run(layer, x[:, :, :1], start)
    assert shapes(state) == first
    _, state = run(layer, x[:, :, 1:], state)
    assert shapes(state) == first
    assert shapes(layer.prefill(x)[1]) == first


@EACH
def test_a_state_keeps_no_prompt_alive(options):
    layer, x = build(**options), sequence()
    sizes = [layer.prefill(x[:, :, :length])[1].values.untyped_storage().nbytes() for length in (1, LENGTH)]
    assert sizes[0] == sizes[1]


def test_steps_leave_the_earlier_state_alone():
    """Beam search goes on from one state more than once."""
    layer, x = build(), sequence()
    _, state = layer.prefill(x[:, :, :5])
    once, _ = layer.step(x[:, :, 5], state)
    layer.step(x[:, :, 6], state)
    again, _ = layer.step(x[:, :, 5], state)
    assert torch.equal(once, again)


def test_huge_keys():
    layer, x = build(), sequence()
    layer.to_keys.weight.data.mul_(300)
    found, _ = run(layer, x, layer.init_state(BATCH))
    assert found.isfinite().all()
    close(found, layer(x).detach())


def test_half_precision_layer_keeps_float32_state():
    layer = build().to(torch.bfloat16)
    x = sequence().to(torch.bfloat16)
    found, state = run(layer, x, layer.init_state(BATCH))
    assert found.dtype == torch.bfloat16
    assert state.values.dtype == state.content[0].sums.dtype == torch.float32
    parallel = layer(x).detach()
    assert (found.float() - parallel.float()).abs().max() <= 2**-7 * parallel.float().abs().max()


def test_steps_need_no_gradient():
    layer, x = build(), sequence()
    output, state = layer.step(x[:, :, 0], layer.init_state(BATCH))
    assert not output.requires_grad
    assert not state.values.requires_grad


def refused(message):
    return pytest.raises(ValueError, match=message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": False}, "only a causal layer can run step by step.*causal=True"),
        ({"stride": 2}, "stride 2 cannot run step by step"),
        ({"context_channels": 5}, "context_channels=5 and channels=8 cannot run step by step"),
    ],
    ids=["not_causal", "stride", "context_channels"],
)
def test_layers_that_do_not_stream(options, message):
    layer = build(**options)
    with refused(message):
        layer.init_state(BATCH)
    with refused(message):
        layer.prefill(sequence())


def test_batch_statistics_do_not_stream():
    layer = build(batch_norm=True)
    state = layer.init_state(BATCH)
    layer.train()
    for call in (lambda: layer.step(sequence()[:, :, 0], state), lambda: layer.prefill(sequence())):
        with refused("call layer.eval()"):
            call()
    build(batch_norm=False).train().init_state(BATCH)  # without batch norm training mode is no trouble


def test_beyond_the_input_size():
    layer, x = build(scope=None, input_size=5), sequence(6)
    _, state = layer.prefill(x[:, :, :5])
    with refused("6 elements is longer than the input_size 5 .*larger input_size or with a local scope"):
        layer.step(x[:, :, 5], state)
    with refused("6 elements is longer than the input_size 5"):
        layer.prefill(x)


def test_wrong_shapes():
    layer = build()
    state = layer.init_state(BATCH)
    with refused(r"x must be \[batch, 8\] in a step, got \[2, 8, 1\]"):
        layer.step(sequence(1), state)
    with refused(r"x must be \[batch, 8\] in a step, got \[2, 7\]"):
        layer.step(torch.zeros(2, 7), state)
    with refused("state is for 2 sequences, but x has 3"):
        layer.step(torch.zeros(3, 8, dtype=torch.float64), state)
    with refused(r"x must be \[batch, channels, length\], got \[2, 8\]"):
        layer.prefill(torch.zeros(2, 8))
