"""Every kernel compiles for a Hopper GPU, on a machine without one: Triton's interpreter, which checks their values,
takes programs that its compiler refuses. Letters as in test_fused.py.
"""

import re

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed")

from lambdanets.ops.triton import (
    content,
    expanded,
    interpreted,
    norm_operators,
    pool_first,
    pooling_operators,
    tiled,
)
from lambdanets.ops.triton.problem import Geometry, Problem

pytestmark = pytest.mark.skipif(interpreted(), reason="TRITON_INTERPRET is set: nothing is compiled")
HOPPER = 90


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Calls of kernels compile them, for sm_90, and do no more; the code of those that did, by name."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, MockTensor

    class Hopper:
        def get_current_target(self):
            return GPUTarget("cuda", HOPPER, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

    found = {}
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        mocked = [MockTensor(one.dtype) if isinstance(one, torch.Tensor) else one for one in arguments]
        kernel = run(self, *mocked, grid=grid, warmup=True, **options)
        found[self.fn.__name__] = kernel.asm
        # Of operands that tensor cores read from shared memory: expanded_kernels.py says why
        widths = set(re.findall(r"nvmma_shared<\{swizzlingByteWidth = (\d+)", kernel.asm["ttgir"]))
        assert widths <= {"128"}, f"{self.fn.__name__} reads operands of {widths} bytes"

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", Hopper())
    return found


def on_meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def forward_and_backward(mode, side, value, geometry, pooled=False):
    N, B, H, K = side * side, 8, 4, 16
    queries, values = on_meta(B, N, H, K), on_meta(B, N, value)
    lambdas, table = on_meta(B, K, value, dtype=torch.float32), on_meta(*geometry.scope, K, 1, dtype=torch.float32)
    if geometry.query_grid is None:
        table = on_meta(N, N, K, 1)
    problem = Problem.of(geometry, queries, values, pooled)
    output = mode.forward(problem, queries, values, lambdas, table)
    mode.backward(problem, torch.empty_like(output), queries, values, lambdas, table, (True,) * 4)


def square(side):
    return Geometry((side, side), (side, side), (23, 23))


def test_maps_of_one_block(compiled):
    forward_and_backward(expanded, 14, 64, square(14))
    wanted = {"expand", "forward_small", "query_gradients_small", "value_gradients", "table_gradients", "fold"}
    assert compiled.keys() == wanted


def test_larger_maps_with_all_pairs(compiled):
    forward_and_backward(expanded, 20, 16, Geometry(None, (1, 400), (1, 1)))
    assert {"forward_large", "query_gradients_large", "value_gradients", "table_gradients"} <= compiled.keys()


@pytest.mark.parametrize(("side", "value"), [(28, 32), (28, 64), (56, 16)], ids=["usual", "many values", "wide map"])
def test_larger_maps_by_tiles(side, value, compiled):
    forward_and_backward(tiled, side, value, square(side))
    names = ("forward", "query_gradients", "value_gradients", "table_gradients")
    assert {"sum_table_parts", "lambda_gradients", *(f"{name}_window" for name in names)} <= compiled.keys()


def test_pooling_before_values(compiled):
    forward_and_backward(pool_first, 14, 128, square(14), pooled=True)
    assert compiled.keys() == {"expand_windows", "gather", "scatter", "fold"}
    for name in ("expand_windows", "gather", "scatter"):  # 16 bytes a thread
        assert re.search(r"st\.global\.v4\.b32", compiled[name]["ptx"]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("value", "with_values"), [(128, True), (128, False), (32, True)])
def test_content(value, with_values, dtype, compiled):
    keys, values = on_meta(2, 49, 16, dtype=dtype), on_meta(2, 49, value, dtype=dtype)
    found, norm = content.content_lambda(keys, values)
    content.content_gradients(found, keys, values, found, norm, values if with_values else None, keys)
    assert compiled.keys() == {"content_forward", "content_backward"}


def parameters_and_statistics(sizes):
    pair = [nn.BatchNorm2d(size, device="meta") for size in sizes[:2]]
    names = ("running_mean", "running_var", "num_batches_tracked")
    parameters = [getattr(norm, name) for name in ("weight", "bias") for norm in pair]
    return parameters, [getattr(norm, name) for name in names for norm in pair]


def test_norms(compiled):
    sizes, product = (64, 32, 16), on_meta(8, 49, 112)
    parameters, statistics = parameters_and_statistics(sizes)
    *parts, moments = norm_operators.forward(product, *parameters, *statistics, [1e-5, 1e-5], [0.1, 0.1], sizes)
    norm_operators.backward(*parts, product, *parameters, moments, sizes)
    assert compiled.keys() == {"batch_moments", "normalise_parts", "gradient_moments", "gradients_of_parts"}


@pytest.mark.parametrize("kernel", [2, 3])
def test_pooling(kernel, compiled):
    """Where 16 divides the channels, a thread reads and writes 16 bytes at a time."""
    pooling_operators.backward(pooling_operators.forward(on_meta(8, 256, 28, 28), kernel), 28, 28, kernel)
    assert compiled.keys() == {"pool_forward", "pool_backward"}
    for code in compiled.values():
        widths = set(re.findall(r"(?:ld|st)\.global\.(\S+)", code["ptx"]))
        assert widths == {"v4.b32"}
