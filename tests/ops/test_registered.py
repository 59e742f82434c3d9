"""The operator that torch.compile sees: registered as it should be, and the same operation."""

import pytest
import torch

from lambdanets.ops import Dense, Relation, lambda_op, registered
from tests.cases import VARIANTS, Inputs

NAMES = [
    "plain",
    "multi_head_intra_depth",
    "content_only",
    "position_only",
    "mask_causal",
    "causal_context_mask",
    "strict_l2",
    "no_key_norm",
    "query_softmax",
    "dense",
    "relation",
    "stride_dilation_even",
    "3d",
]


def operands(inputs: Inputs, backend: str = "auto") -> tuple:
    """The arguments of torch.ops.lambdanets.lambda_op."""
    queries, keys, values, positions = inputs.arguments()
    relative = positions is not None and not isinstance(positions, (Dense, Relation))
    geometry = [list(getattr(positions, name)) if relative else [] for name in registered.GEOMETRY]
    options = inputs.options
    return (
        queries,
        keys,
        values,
        inputs.leaves.get("embeddings"),
        positions.index if isinstance(positions, Relation) else None,
        options["mask"],
        options["context_mask"],
        *geometry,
        options["key_norm"] or "none",
        options["query_softmax"],
        options["multi_head"],
        str(options["causal"]),
        backend,
    )


def finite(name: str) -> Inputs:
    """Without the NaN in the padding, which opcheck would compare with itself."""
    inputs = Inputs(VARIANTS[name])
    for leaf in inputs.leaves.values():
        leaf.data.nan_to_num_(0.5)
    return inputs


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    torch.library.opcheck(torch.ops.lambdanets.lambda_op.default, operands(finite(name)))


@pytest.mark.parametrize("backend", ["auto", "reference", "gemm"])
@pytest.mark.parametrize("name", NAMES)
def test_operator_equals_the_reference(name, backend):
    inputs = Inputs(VARIANTS[name])
    output = torch.ops.lambdanets.lambda_op(*operands(inputs, backend))
    assert output.is_contiguous()
    grads = torch.autograd.grad(output, list(inputs.leaves.values()), inputs.gradient)
    expected = inputs.results("oracle")
    for name, found in zip(["output", *inputs.leaves], [output.detach(), *grads], strict=True):
        torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-10)


def test_gradient_without_influence_is_zero():
    # One context position: its softmax is 1 whatever the key says.
    inputs = Inputs(VARIANTS["pixel_causal"])
    output = torch.ops.lambdanets.lambda_op(*operands(inputs))
    grads = torch.autograd.grad(output, list(inputs.leaves.values()), inputs.gradient)
    assert all(grad.abs().max() == 0 for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fake_has_the_real_dtype_and_shape(dtype):
    inputs = Inputs(VARIANTS["multi_head_intra_depth"], dtype=dtype)
    real = torch.ops.lambdanets.lambda_op(*operands(inputs))
    meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in operands(inputs)]
    fake = torch.ops.lambdanets.lambda_op(*meta)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype) == (real.shape, dtype)


@pytest.mark.parametrize("backend", ["gemm", "conv", "depthwise", "dft", "fft"])
def test_every_implementation_is_right_below_the_compiler(backend):
    inputs = finite("plain")
    options = {**inputs.options, "backend": backend}

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def function(inputs):
        return lambda_op(*inputs.arguments(), **options)

    torch.testing.assert_close(function(inputs), inputs.forward("oracle"), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["causal", "mask", "relation", "dense_multi_head_intra_depth"])
def test_compiled_function_equals_eager(name):
    inputs = finite(name)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def function(inputs):
        return lambda_op(*inputs.arguments(), **inputs.options)

    torch.testing.assert_close(function(inputs), inputs.forward("oracle"), rtol=1e-10, atol=1e-10)
