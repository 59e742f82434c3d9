"""What tests of the Triton kernels share: where they run, the oracle, and how errors are judged."""

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# Half types and float32 take different kernels at small contexts; the interpreter has time for some of each.
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if CUDA else [torch.float16, torch.float32]


def dense_of(table, query_grid, context_grid, stride):
    """Embeddings [N, M, K, U] of a table [*scope, K, U]: the definition, pair by pair."""
    queries = torch.cartesian_prod(*(torch.arange(side) for side in query_grid)).view(-1, len(query_grid))
    context = torch.cartesian_prod(*(torch.arange(side) for side in context_grid)).view(-1, len(query_grid))
    scope = torch.tensor(table.shape[: len(query_grid)])
    index_NMD = context[None] - queries[:, None] * stride + (scope - 1) // 2
    inside_NM = ((index_NMD >= 0) & (index_NMD < scope)).all(-1).to(table.device)
    index_NMD = torch.minimum(index_NMD.clamp(min=0), scope - 1)
    embeddings = table[tuple(index_NMD.to(table.device).unbind(-1))]
    return embeddings * inside_NM[..., None, None]


def oracle(queries, values, content, embeddings):
    """The paper's einsums. values [B,M,V,U], embeddings [N,M,K,U]."""
    lambdas = torch.einsum("nmku,bmvu->bnkv", embeddings, values)
    if content is not None:
        lambdas = lambdas + content[:, None].to(lambdas.dtype)
    return torch.einsum("bnhk,bnkv->bnhv", queries, lambdas)


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def gradients(function, inputs, gradient):
    leaves = [one if one is None else one.detach().clone().requires_grad_() for one in inputs]
    output = function(*leaves)
    output.backward(gradient.to(output.dtype))
    return [output.detach()] + [None if one is None else one.grad for one in leaves]


def check(inputs, fused, plain, dtype):
    """Error of `fused` at most twice that of `plain` run in the same type, each against float64."""
    torch.manual_seed(7)
    doubles = [None if one is None else one.double() for one in inputs]
    shape = plain(*doubles).shape
    gradient = torch.randn(shape, dtype=torch.float64, device=DEVICE).to(dtype).double()
    expected = gradients(plain, doubles, gradient)
    found = gradients(fused, inputs, gradient)
    allowed = gradients(lambda *leaves: plain(*(x if x is None else x.to(dtype) for x in leaves)), inputs, gradient)
    floor = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    for name, one, other, usual in zip(["output", "q", "v", "c", "e"], found, expected, allowed, strict=True):
        if other is None:
            assert one is None, name
            continue
        assert one.shape == other.shape, name
        assert torch.isfinite(one).all(), name
        limit = max(2 * relative_error(usual, other), floor)
        assert relative_error(one, other) <= limit, (name, relative_error(one, other), limit)


def random_inputs(batch, count, context, heads, depth, value, intra, positions, dtype, content=True):
    torch.manual_seed(batch * 1000 + count)
    rand = lambda *shape: torch.randn(*shape, device=DEVICE)  # noqa: E731
    queries, values = rand(batch, count, heads, depth).to(dtype), rand(batch, context, value, intra).to(dtype)
    lambdas = rand(batch, depth, value) if content else None
    return [queries, values, lambdas, rand(*positions, depth, intra)]


def two_norms(sizes, dtype):
    torch.manual_seed(1)
    found = []
    for size, eps, momentum in zip(sizes[:2], (1e-5, 1e-3), (0.1, 0.25), strict=True):
        norm = nn.BatchNorm2d(size, eps=eps, momentum=momentum, device=DEVICE)
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
        nn.init.normal_(norm.running_mean)
        found.append(norm.to(dtype))  # drawn in float32: in float64 torch would draw other numbers
    return found


class Graphs:
    """A compiler that runs graphs as they are, split as inductor does, and remembers those of forward and backward."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(
            fw_compiler=lambda graph, _: self.forward.append(graph) or make_boxed_func(graph.forward),
            bw_compiler=lambda graph, _: self.backward.append(graph) or make_boxed_func(graph.forward),
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def calls(graph):
        """Of which of the operators, in their order; one that changes its inputs is wrapped in another."""
        named = (str(target) for node in graph.graph.nodes for target in (node.target, *node.args[:1]))
        return [name.split(".")[1] for name in named if name.startswith("lambdanets.normed_parts")]
