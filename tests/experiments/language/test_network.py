"""The models: step by step is all at once, no byte sees its future, memory stays or grows as it should."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lambdanets.experiments.language.network import ByteModel, ByteModelConfig, state_bytes

SMALL = ByteModelConfig(width=16, depth=2, heads=2, attention_heads=2, key_depth=4, reach=5)
KINDS = pytest.mark.parametrize("kind", ["lambda", "attention"])
WEIGHTS = 12  # squared widths of a block


def build(kind, **changes):
    torch.manual_seed(3)
    model = ByteModel(replace(SMALL, kind=kind, **changes)).double().ready()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


def text(length, batch=2, seed=0):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@KINDS
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_steps_after_a_prompt_are_the_parallel_form(kind, data):
    heads = data.draw(st.sampled_from([1, 2, 4]))
    model = build(
        kind,
        heads=heads,
        attention_heads=heads,
        reach=data.draw(st.integers(1, 50)),
        intra_depth=data.draw(st.integers(1, 2)),
    )
    length = data.draw(st.integers(2, 70))
    prompt = data.draw(st.integers(1, length - 1))
    bytes_BN = text(length, seed=data.draw(st.integers(0, 99)))
    expected = model(bytes_BN).detach()
    scores, state = model.prefill(bytes_BN[:, :prompt])
    for n in range(prompt, length):
        torch.testing.assert_close(scores, expected[:, n - 1], rtol=1e-10, atol=1e-10)
        scores, state = model.step(bytes_BN[:, n], state)
    torch.testing.assert_close(scores, expected[:, -1], rtol=1e-10, atol=1e-10)


def test_a_cache_that_grows_keeps_what_it_has():
    model, bytes_BN = build("attention", depth=1), text(600, batch=1)
    scores, state = model.prefill(bytes_BN[:, :250])
    for n in range(250, 600):  # the room doubles twice
        scores, state = model.step(bytes_BN[:, n], state)
    torch.testing.assert_close(scores, model(bytes_BN)[:, -1].detach(), rtol=1e-10, atol=1e-10)


@KINDS
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
def test_the_future_changes_nothing(kind, training):
    model = build(kind).train(training)
    one = text(60)
    other = one.clone()
    other[:, 40:] = text(20, seed=1)
    before, after = model(one).detach(), model(other).detach()
    torch.testing.assert_close(before[:, :40], after[:, :40], rtol=1e-12, atol=1e-12)
    assert (before[:, 40:] != after[:, 40:]).any(-1).all()


@KINDS
def test_training_gives_no_gradient_to_the_future(kind):
    model = build(kind).train()
    x = torch.randn(2, 50, SMALL.width, dtype=torch.float64, requires_grad=True)
    hidden = x
    for block in model.blocks:
        hidden = block(hidden)
    (gradient,) = torch.autograd.grad(hidden[:, 30].sum(), x)
    assert (gradient[:, 31:] == 0).all()
    assert (gradient[:, : 30 + 1].abs().amax(-1) > 0).all()  # content and attention reach back to the start


@KINDS
def test_other_texts_of_the_batch_change_nothing_in_training(kind):
    """Batch norm would."""
    model = build(kind).train()
    one, other = text(30), text(30, seed=1)
    other[0] = one[0]
    torch.testing.assert_close(model(one)[0], model(other)[0], rtol=1e-12, atol=1e-12)


def test_memory_of_lambda_layers_stays_and_of_attention_grows():
    sizes = {}
    for kind in ("lambda", "attention"):
        model = build(kind)
        sizes[kind] = []
        for length in (256, 512, 1024):
            bytes_BN = text(length, batch=1)
            state = model.step(bytes_BN[:, 0], model.prefill(bytes_BN[:, :-1])[1])[1]
            sizes[kind].append(state_bytes(state))
    assert len(set(sizes["lambda"])) == 1
    expected = [SMALL.depth * 2 * length * SMALL.width * 8 for length in (256, 512, 1024)]
    assert sizes["attention"] == pytest.approx(expected, rel=1.1)  # up to twice as much: free room
    assert sizes["attention"][2] >= 2 * sizes["attention"][0]


@pytest.mark.parametrize(
    "changes", [{}, {"width": 96, "attention_heads": 4}, {"key_depth": 2, "reach": 40, "width": 64}]
)
def test_both_kinds_have_one_size(changes):
    config = replace(SMALL, **changes)
    models = [ByteModel(replace(config, kind=kind)) for kind in ("lambda", "attention")]
    lambdas, attention = (sum(p.numel() for p in model.parameters()) for model in models)
    assert abs(lambdas - attention) <= 0.01 * attention
    rest = (256 + 2) * config.width + config.depth * 4 * config.width  # embeddings and norms
    assert attention == config.depth * WEIGHTS * config.width**2 + rest


@KINDS
def test_generation_is_a_function_of_the_seed(kind):
    model = build(kind)
    written = [bytes(model.generate(b"\0def ", 40, seed=seed)) for seed in (1, 1, 2)]
    assert written[0] == written[1] != written[2]
    assert len(written[0]) == 40
    likeliest = bytes(model.generate(b"\0def ", 10, temperature=0.0))
    scores = model(torch.tensor([list(b"\0def " + likeliest)]))
    assert list(likeliest) == scores[0, 4:-1].argmax(-1).tolist()


def test_refusals():
    with pytest.raises(ValueError, match=r"width 20 is not a multiple of .*attention_heads 4.*use 24"):
        ByteModelConfig(width=20)
    with pytest.raises(ValueError, match=r"model\.reach must be at least 1, got 0"):
        ByteModelConfig(reach=0)
    with pytest.raises(ValueError, match="more weights than a whole block of width 16"):
        ByteModel(replace(SMALL, key_depth=64, reach=200))
    with pytest.raises(ValueError, match="at least one byte"):
        next(build("lambda").generate(b"", 3))
    with pytest.raises(ValueError, match="temperature must be at least 0, got -1"):
        next(build("lambda").generate(b"a", 3, temperature=-1))
