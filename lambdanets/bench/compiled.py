"""Networks compiled block by block, so that a deep one compiles as fast as a shallow one.

torch.compile keeps its code for each function, with guards on the module's class, settings and shapes; weights are
inputs. So a block that was compiled once serves all blocks like it, of this network and of the next.
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

VARIANTS = 1024  # of one block's code: widths, strides, layers, image sizes, modes, of all networks of a run
WRONG = 0.5  # relative error of a single gradient, beyond which float32 is asked: it may be all rounding
# What a compiled block may differ from the same block eager on the same input, normwise: rounding, also of gradients.
TOLERANCE = {"float32": 1e-3, "tf32": 2e-2, "bfloat16": 0.1}

Way = Literal["no", "yes", "graphs", "blocks"]  # eager, compiled, and started by CUDA graphs, compiled by blocks


class Compilation(TypedDict):
    """Fields of a `Protocol`."""

    compiled: bool
    graphs: bool
    blocks: bool


def compilation(way: Way, device: torch.device) -> Compilation:
    cuda = device.type == "cuda"
    if way == "graphs" and not cuda:
        raise ValueError("--compile graphs (and all, which has them) is for CUDA GPUs: use yes or blocks")
    return {
        "compiled": way != "no",
        "graphs": way == "graphs" or (way == "blocks" and cuda),
        "blocks": way == "blocks",
    }


@dataclass(frozen=True)
class Compiled:
    """What `compile_blocks` compiled.

    Attributes:
        blocks: names of the repeated blocks.
        rest: names of what lies between them, for each part that is compiled as one, such as the stem. If the network
            has no repeated blocks the only part is the network, whose name is empty.
        parts: calls the blocks and the rest in order.
    """

    blocks: tuple[str, ...]
    rest: tuple[tuple[str, ...], ...]
    parts: nn.Module


def compile_blocks(network: nn.Module, **options: Any) -> Compiled:
    """Compiles a network in place: each of its repeated blocks, and as one what lies before, between and after them.

    The mode (training or not) is to be set before. `options` are torch.compile's; a graph break is an error, and so is
    a block that torch no longer compiles since it has seen too many variants (see `many_variants`).
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
    """In place. `module.compile` leaves modules of torch.nn itself eager, in silence, at least in torch 2.11."""
    module.forward = torch.compile(module.forward, **options)


def repeated_blocks(network: nn.Module) -> list[str]:
    """Names of the outermost modules in a list whose class is in lists at least twice.

    Lists are Sequential and ModuleList, which are no blocks themselves, and neither are modules without children.
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
    """Looks only into modules that have blocks in them."""

    def __init__(self, blocks: Sequence[str]) -> None:
        super().__init__()
        self.above = {block[:end] for block in blocks for end, letter in enumerate(block) if letter == "."}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.above


def split_at(network: nn.Module, blocks: Sequence[str]) -> fx.GraphModule:
    """The network as a sequence of parts: each block is one, and what is between two blocks is one."""
    try:
        graph = Outside(blocks).trace(network)
    except Exception as error:  # whatever its forward does that cannot be traced
        raise ValueError(
            f"{type(network).__name__} cannot be cut into blocks ({error}): compile it as a whole, --compile graphs"
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
    """One block's code may be compiled in many variants: torch gives up after eight.

    Beyond `VARIANTS` it is an error for modules that `compile_blocks` compiled, never silently eager.
    """
    import torch._dynamo.config as dynamo

    with dynamo.patch(recompile_limit=VARIANTS, accumulated_recompile_limit=VARIANTS, fail_on_recompile_limit_hit=True):
        yield


def check_compiled(
    compiled: Compiled, images: Tensor, allowed: float, autocast: Callable[[], AbstractContextManager] = nullcontext
) -> float:
    """Each part compiled against the same part eager, on the same input; returns the worst relative error.

    Part by part, since hundreds of layers with random weights enlarge rounding until nothing can be compared. Where
    gradients are enabled they are compared too. All is compiled here: steps that follow find it done.
    A gradient that is wrong must not hide among larger ones: each is looked at by itself too.
    Eager code rounds more often: a compiled part may differ by more than `allowed` if it is that near to the same part
    in float32, or much nearer than the eager one.
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
                    error = 0.0  # it is random (dropout), and cannot be compared
                elif not is_nearer(part, inputs, found, expected, allowed):
                    raise MismatchError(
                        f"a compiled part of the network differs from the same part eager by {error:.1e}, "
                        f"allowed {allowed}"
                    )
            if error and (name := wrong_gradient(part, inputs, found, expected, autocast)):
                raise MismatchError(f"a compiled part of the network has a wrong gradient of {name}")
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
    """What a part of a network gave: its output without history, and all tensors to compare."""

    output: Any
    outputs: list[Tensor]
    gradients: list[Tensor]
    names: list[str]  # of the parameters, or inputs, that the gradients are of


def run_part(part: nn.Module, inputs: Sequence[Any], autocast: Callable[[], AbstractContextManager]) -> PartResult:
    """Forward, and backward from always the same gradient; inputs need gradients as they say."""
    leaves = tree_map_only(Tensor, without_history, inputs)
    with autocast():
        output = part(*tree_map_only(Tensor, copied, leaves))  # parts may work in place
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
    """Whose gradient is wrong, though small among the others: far from the eager one, and further from float32's."""
    both = zip(found.names, found.gradients, expected.gradients, strict=True)
    apart = [name for name, *one in both if not off(*one) <= WRONG]
    if not apart or any(one.dtype != torch.float32 for one in part.parameters()):
        return None
    again, exact = run_part(part, inputs, autocast), run_in_float32(part, inputs)
    for name, mine, eager, other, right in zip(
        found.names, found.gradients, expected.gradients, again.gradients, exact.gradients, strict=True
    ):
        rounding = max(off(eager, right), off(other, right))  # none where all is in float32, which cannot say more
        if name in apart and 0 < 2 * rounding < off(mine, right) and not off(mine, right) <= WRONG:
            return name
    return None


def off(found: Tensor, expected: Tensor) -> float:
    return together([found], [expected])


def run_in_float32(part: nn.Module, inputs: Sequence[Any]) -> PartResult:
    return run_part(part, tree_map_only(Tensor, in_float32, inputs), nullcontext)


def is_nearer(part: nn.Module, inputs: Sequence[Any], found: PartResult, expected: PartResult, allowed: float) -> bool:
    """Whether outputs and gradients of `found` are each as near to float32's as allowed, or twice as near as expected.

    Weights in half precision cannot say.
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
    """Made in inference mode if the tensor was: code is compiled for the one or the other."""
    with torch.inference_mode(tensor.is_inference()) if torch.is_inference_mode_enabled() else nullcontext():
        return tensor.clone()


def some_gradient(output: Tensor) -> Tensor:
    """The same numbers whatever type the output has."""
    drawn = torch.empty_like(output, dtype=torch.float32).normal_(
        generator=torch.Generator(output.device).manual_seed(0)
    )
    return drawn.to(output.dtype)


def worst_error(found: PartResult, expected: PartResult) -> float:
    """Of outputs and of gradients, each all together: a gradient that is next to nothing is all rounding."""
    return max(
        together(found.outputs, expected.outputs),
        together(found.gradients, expected.gradients) if expected.gradients else 0.0,
    )


def together(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    difference = norm([mine - right for mine, right in zip(found, expected, strict=True)])
    return (difference / norm(expected).clamp(min=torch.finfo(torch.float64).tiny)).item()


def norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in tensors]).norm()


def as_graph(step: Callable[[], Tensor], allowed: float | None) -> Callable[[], object]:
    """The step as one CUDA graph, after some steps without. What it gives must be finite.

    Args:
        step: works on tensors that stay where they are, and returns one.
        allowed: how far the graph's tensor may be from that of the step, relatively; None: steps change it.
    """
    kept: list[Tensor] = []

    def run() -> None:
        kept[:] = [step()]

    expected = step().clone()
    torch.cuda.empty_cache()  # other streams cannot use what this one keeps
    replay = captured(run, required=True)
    replay()
    if not kept[0].isfinite().all():
        raise MismatchError("the step as a CUDA graph gave numbers that are not finite")
    if allowed is not None:
        error = relative_error(kept[0], expected)
        if not error <= allowed and not relative_error(step(), expected) > allowed:  # else it is random
            raise MismatchError(
                f"the step as a CUDA graph differs from the step without by {error:.1e}, allowed {allowed}"
            )
    return replay
