"""Compilation of networks block by block, so that a deep network compiles as fast as a shallow one.

torch.compile caches code per function, with guards on the module's class, settings and shapes; weights are inputs. So
a compiled block serves all blocks like it, in this network and in later ones.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils._pytree import tree_leaves, tree_map_only

from lambdanets.bench.check import MismatchError, relative_error
from lambdanets.bench.timing import captured

VARIANTS = 1024  # maximum variants of the code of a block: widths, strides, layers, image sizes, modes of a run
WRONG = 0.5  # relative error of a single gradient beyond which float32 decides whether it is only rounding
# Allowed normwise relative difference of a compiled and an eager block on the same input, also of gradients
TOLERANCE = {"float32": 1e-3, "tf32": 2e-2, "bfloat16": 0.1}

Way = Literal["no", "yes", "graphs", "blocks"]  # eager, compiled, compiled with CUDA graphs, compiled by blocks


class Compilation(TypedDict):
    """The fields of a `Protocol` that concern compilation."""

    compiled: bool
    graphs: bool
    blocks: bool


def compilation(way: Way, device: torch.device) -> Compilation:
    """Return the fields of a `Protocol` for a value of --compile."""
    cuda = device.type == "cuda"
    if way == "graphs" and not cuda:
        raise ValueError("--compile graphs (also part of all) needs a CUDA GPU: use yes or blocks")
    return {
        "compiled": way != "no",
        "graphs": way == "graphs" or (way == "blocks" and cuda),
        "blocks": way == "blocks",
    }


@dataclass(frozen=True)
class Compiled:
    """The parts of a network that `compile_blocks` compiled.

    Attributes:
        blocks: names of the repeated blocks.
        rest: names of the modules of each other part, such as the stem, which is compiled as a whole. A network without
            repeated blocks is one part with an empty name.
        parts: a module that calls the blocks and the other parts in order.
    """

    blocks: tuple[str, ...]
    rest: tuple[tuple[str, ...], ...]
    parts: nn.Module


def compile_blocks(network: nn.Module, **options: Any) -> Compiled:
    """Compile a network in place: each of its repeated blocks, and each part before, between and after them.

    Set training or eval mode first. A graph break raises an error, and so does a block with more variants than torch
    allows (see `many_variants`).

    Args:
        network: the network.
        options: options of torch.compile, by default fullgraph=True and dynamic=False.

    Returns:
        The names of the compiled parts.
    """
    options = {"fullgraph": True, "dynamic": False, **options}
    blocks = repeated_blocks(network)
    if not blocks:
        compile_module(network, options)
        return Compiled((), (("",),), network)
    parts = split_at(network, blocks)
    rest: list[tuple[str, ...]] = []
    for part in parts.children():
        assert isinstance(part, fx.GraphModule)
        modules = [str(node.meta["name"]) for node in part.graph.nodes if node.op == "call_module"]
        if not set(modules) & set(blocks):
            rest.append(tuple(modules))
            compile_module(part, options)
    for name in blocks:
        compile_module(network.get_submodule(name), options)
    network.forward = parts.forward
    return Compiled(tuple(blocks), tuple(rest), parts)


def compile_module(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile a module in place. In torch 2.11, `module.compile` silently leaves modules of torch.nn eager."""
    module.forward = torch.compile(module.forward, **options)


def repeated_blocks(network: nn.Module) -> list[str]:
    """Return the names of the repeated blocks of a network.

    Blocks are the outermost modules with children inside a Sequential or ModuleList, whose class occurs there at least
    twice. Sequential and ModuleList are not blocks themselves.

    Example:
        >>> from torch import nn
        >>> from lambdanets.bench.compiled import repeated_blocks
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(4, 4)
        >>> repeated_blocks(nn.Sequential(nn.Linear(8, 4), nn.Sequential(Block(), Block())))
        ['1.0', '1.1']
    """

    def listed(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        inside = isinstance(module, nn.Sequential | nn.ModuleList)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if inside and not isinstance(child, nn.Sequential | nn.ModuleList) and any(child.children()):
                yield path, child
            else:
                yield from listed(child, path)

    found = list(listed(network, ""))
    counts = Counter(type(module) for _, module in found)
    return [name for name, module in found if counts[type(module)] > 1]


class Outside(fx.Tracer):
    """A tracer that traces only into modules that contain blocks."""

    def __init__(self, blocks: Sequence[str]) -> None:
        super().__init__()
        self.above = {block[:end] for block in blocks for end, letter in enumerate(block) if letter == "."}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.above


def split_at(network: nn.Module, blocks: Sequence[str]) -> fx.GraphModule:
    """Split a network into a sequence of parts: the blocks, and the operations between two blocks."""
    try:
        graph = Outside(blocks).trace(network)
    except Exception as error:  # forward may raise anything during tracing
        raise ValueError(
            f"{type(network).__name__} cannot be split into blocks ({error}): compile it as a whole, --compile graphs"
        ) from error
    names = set(blocks)
    part, after_block = 0, False
    for node in graph.nodes:
        node.meta["name"] = node.target  # splitting gives modules new names
        is_block = node.op == "call_module" and node.target in names
        part += is_block or after_block
        after_block = is_block
        node.meta["part"] = part
    return split_module(fx.GraphModule(network, graph), network, lambda node: node.meta["part"])


@contextmanager
def many_variants() -> Iterator[None]:
    """Allow up to `VARIANTS` compiled variants of a function inside the context, where torch allows eight.

    More variants raise an error for modules that `compile_blocks` compiled, instead of running eager.
    """
    import torch._dynamo.config as dynamo

    with dynamo.patch(recompile_limit=VARIANTS, accumulated_recompile_limit=VARIANTS, fail_on_recompile_limit_hit=True):
        yield


def check_compiled(
    compiled: Compiled, images: Tensor, allowed: float, autocast: Callable[[], AbstractContextManager] = nullcontext
) -> float:
    """Compare each compiled part with the same part in eager mode on the same input.

    Parts are compared separately, because hundreds of layers with random weights amplify rounding errors. Gradients are
    compared if they are enabled, together and each by itself. A compiled part may differ by more than `allowed` if it
    is that close to the same part in float32, or much closer than the eager one, which rounds more often. The call
    also compiles all parts.

    Args:
        compiled: the result of `compile_blocks`.
        images: the input.
        allowed: largest allowed relative error.
        autocast: returns the context manager to run in.

    Returns:
        The largest relative error.

    Raises:
        MismatchError: if a part differs too much or has a wrong gradient.
    """
    worst = 0.0

    def compare(part: nn.Module, inputs: Sequence[Any]) -> Any:
        nonlocal worst
        found = run_part(part, inputs, autocast)
        with torch.compiler.set_stance("force_eager"):
            expected = run_part(part, inputs, autocast)
            error = worst_error(found, expected)
            if not error <= allowed:
                if worst_error(run_part(part, inputs, autocast), expected) > allowed:
                    error = 0.0  # random (dropout), cannot be compared
                elif not is_nearer(part, inputs, found, expected, allowed):
                    raise MismatchError(
                        f"a compiled part of the network differs from the same part in eager mode by {error:.1e}, "
                        f"allowed: {allowed}"
                    )
            if error and (name := wrong_gradient(part, inputs, found, expected, autocast)):
                raise MismatchError(f"a compiled part of the network has a wrong gradient for {name}")
        worst = max(worst, error)
        return expected.output

    class Parts(fx.Interpreter):
        def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
            return compare(self.fetch_attr(target), args)

    if isinstance(compiled.parts, fx.GraphModule):
        Parts(compiled.parts).run(images)
    else:
        compare(compiled.parts, (images,))
    return worst


@dataclass(frozen=True)
class PartResult:
    """The result of a part of a network: its detached output, and all tensors to compare."""

    output: Any
    outputs: list[Tensor]
    gradients: list[Tensor]
    names: list[str]  # of the parameters or inputs to which the gradients belong


def run_part(part: nn.Module, inputs: Sequence[Any], autocast: Callable[[], AbstractContextManager]) -> PartResult:
    """Run forward and backward, always with the same output gradient; `requires_grad` of the inputs is respected."""
    leaves = tree_map_only(Tensor, without_history, inputs)
    with autocast():
        output = part(*tree_map_only(Tensor, copied, leaves))  # parts may change their inputs in place
    outputs = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
    above = [one for one in outputs if one.requires_grad]
    names, gradients = [], []
    if above:
        named = [*(("the input", one) for one in tree_leaves(leaves)), *part.named_parameters()]
        wanted = [(name, one) for name, one in named if getattr(one, "requires_grad", False)]
        given = [some_gradient(one) for one in above]
        all_of_them = torch.autograd.grad(above, [one for _, one in wanted], given, allow_unused=True)
        names = [name for (name, _), one in zip(wanted, all_of_them, strict=True) if one is not None]
        gradients = [one for one in all_of_them if one is not None]
    output = tree_map_only(Tensor, without_history, output)
    return PartResult(output, [one.detach() for one in outputs], gradients, names)


def wrong_gradient(
    part: nn.Module,
    inputs: Sequence[Any],
    found: PartResult,
    expected: PartResult,
    autocast: Callable[[], AbstractContextManager],
) -> str | None:
    """Return the name of a gradient that is far from the eager one and even further from the float32 one, or None."""
    both = zip(found.names, found.gradients, expected.gradients, strict=True)
    apart = [name for name, *one in both if not off(*one) <= WRONG]
    if not apart or any(one.dtype != torch.float32 for one in part.parameters()):
        return None
    again, exact = run_part(part, inputs, autocast), run_in_float32(part, inputs)
    for name, mine, eager, other, right in zip(
        found.names, found.gradients, expected.gradients, again.gradients, exact.gradients, strict=True
    ):
        rounding = max(off(eager, right), off(other, right))  # 0 if all is float32, which then has no more information
        if name in apart and 0 < 2 * rounding < off(mine, right) and not off(mine, right) <= WRONG:
            return name
    return None


def off(found: Tensor, expected: Tensor) -> float:
    """Return the relative error of one tensor."""
    return together([found], [expected])


def run_in_float32(part: nn.Module, inputs: Sequence[Any]) -> PartResult:
    """Run a part on float32 inputs without autocast."""
    return run_part(part, tree_map_only(Tensor, in_float32, inputs), nullcontext)


def is_nearer(part: nn.Module, inputs: Sequence[Any], found: PartResult, expected: PartResult, allowed: float) -> bool:
    """Return whether outputs and gradients of `found` are close to those in float32.

    They must be within `allowed`, or at most half as far away as those of `expected`. Weights in half precision give
    False, because there is no float32 result to compare with.
    """
    if any(one.dtype != torch.float32 for one in part.parameters()):
        return False
    exact = run_in_float32(part, inputs)

    def near(mine: Sequence[Tensor], eager: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
        return not right or together(mine, right) <= max(allowed, together(eager, right) / 2)

    return near(found.outputs, expected.outputs, exact.outputs) and near(
        found.gradients, expected.gradients, exact.gradients
    )


def in_float32(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().float().requires_grad_(tensor.requires_grad)


def without_history(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor, in inference mode if it was created there, because code is compiled for one of the two."""
    with torch.inference_mode(tensor.is_inference()) if torch.is_inference_mode_enabled() else nullcontext():
        return tensor.clone()


def some_gradient(output: Tensor) -> Tensor:
    """Return a random gradient for an output, with the same numbers for every dtype."""
    drawn = torch.empty_like(output, dtype=torch.float32).normal_(
        generator=torch.Generator(output.device).manual_seed(0)
    )
    return drawn.to(output.dtype)


def worst_error(found: PartResult, expected: PartResult) -> float:
    """Return the larger relative error of outputs and gradients, each concatenated: tiny gradients are all rounding."""
    return max(
        together(found.outputs, expected.outputs),
        together(found.gradients, expected.gradients) if expected.gradients else 0.0,
    )


def together(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the relative error of several tensors as one vector."""
    difference = norm([mine - right for mine, right in zip(found, expected, strict=True)])
    return (difference / norm(expected).clamp(min=torch.finfo(torch.float64).tiny)).item()


def norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in tensors]).norm()


def as_graph(step: Callable[[], Tensor], allowed: float | None) -> Callable[[], object]:
    """Capture a step as one CUDA graph, after some eager steps, and check that its result is finite.

    Args:
        step: a function that works on tensors with fixed addresses and returns one tensor.
        allowed: largest relative difference between the result of the graph and that of the step; None if every step
            changes the result.

    Returns:
        A function that replays the graph.

    Raises:
        MismatchError: if the result is not finite or differs too much.
    """
    kept: list[Tensor] = []

    def run() -> None:
        kept[:] = [step()]

    expected = step().clone()
    torch.cuda.empty_cache()  # other streams cannot use memory that this stream has cached
    replay = captured(run, required=True)
    replay()
    if not kept[0].isfinite().all():
        raise MismatchError("the step as a CUDA graph gave non-finite numbers")
    if allowed is not None:
        error = relative_error(kept[0], expected)
        if not error <= allowed and not relative_error(step(), expected) > allowed:  # otherwise it is random
            raise MismatchError(
                f"the step as a CUDA graph differs from the eager step by {error:.1e}, allowed: {allowed}"
            )
    return replay
