"""Replace the lambda layers of other implementations inside any network with ours.

`accelerate(model)` finds the layers of timm, lucidrains and d-li14 by their parameter names, and replaces each with one
of our layers that has the same weights. Both layers are first compared on random input in float64; a layer whose
outputs differ is not replaced. State dicts load in both directions: an accelerated model loads the state dict of the
original, and `original_state` returns its weights under the original names.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lambdanets.layers import LambdaLayer2d
from lambdanets.layers.arguments import fx_leaf
from lambdanets.layers.lambda_layer import LambdaLayer
from lambdanets.layers.pool import AveragePool
from lambdanets.models.fold import fold_in_place
from lambdanets.models.foreign import D_LI14, LUCIDRAINS, TIMM, LayerNames, LayerWeights, read_layer, write_layer
from lambdanets.models.keys import State

SOURCES = (TIMM, LUCIDRAINS, D_LI14)
NORMS = ("norm_q", "norm_v")
PROBE = (6, 7)  # height and width of the test input; each kind of pooling returns a different size for it
TOLERANCE = 1e-9  # relative, in float64
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass
class Acceleration:
    """The result of `accelerate`. It can be unpacked: `model, summary = accelerate(model)`.

    Attributes:
        model: the model, changed in place (a new module if the model itself is a lambda layer).
        replaced: the kind of each replaced layer, by name.
        left: the reason for each lambda layer that was not replaced, by name.
        folded: number of batch norms folded into convolutions (with `inference=True`).

    >>> import lambdanets, timm
    >>> result = lambdanets.accelerate(timm.create_model("lambda_resnet26t"), inference=True)
    >>> len(result.replaced), len(result.left), result.folded
    (3, 0, 28)
    """

    model: nn.Module
    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    folded: int = 0

    def __iter__(self) -> Any:
        return iter((self.model, self))

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} lambda layers replaced, {len(self.left)} not replaced"]
        lines += [f"  {name}: was {what}" for name, what in self.replaced.items()]
        lines += [f"  {name}: not replaced, {why}" for name, why in self.left.items()]
        if self.folded:
            lines.append(f"{self.folded} batch norms folded into convolutions")
        return "\n".join(lines)


class AcceleratedLayer(LambdaLayer2d):
    """Our lambda layer with the weights of another implementation's layer. It loads state dicts of both."""

    def __init__(self, names: LayerNames, arguments: dict[str, Any], pool: nn.Module | None = None, **more: Any):
        super().__init__(**arguments, **more)
        self.names = names
        self.projection_bias = False  # whether the original layer has biases in its projections
        self.pool = nn.Identity() if pool is None else pool

    @fx_leaf
    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return self.pool(super().forward(x, *arguments, **options))

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors) -> None:
        own = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
        if f"{self.names.projections[0]}.weight" in own:
            try:
                state = state_of(read_layer(self.names, own), self.position_bias is not None)
            except ValueError as error:
                errors.append(f"{prefix.rstrip('.')}: {error}")
            else:
                for name in own:
                    del state_dict[prefix + name]
                state_dict.update({prefix + name: tensor for name, tensor in state.items()})
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def original_state(self) -> State:
        """Return the weights with the names and order of the layer that was replaced."""
        return write_layer(self.names, self, self.projection_bias)


def accelerate(model: nn.Module, *, inference: bool = False, input_shape: Sequence[int] | None = None) -> Acceleration:
    """Replace the lambda layers of timm, lucidrains and d-li14 in a network with ours; outputs and gradients are equal.

    Weights keep their device, dtype and `requires_grad`. The new layers have new parameters, so call it before passing
    the model to an optimizer, `torch.compile` or DistributedDataParallel.

    Args:
        model: any module; it is changed in place.
        inference: also set eval mode, merge the projections of each layer (`LambdaLayer.fuse`) and fold batch norms
            into the convolutions before them. The result cannot be trained further.
        input_shape: shape of a batch, [batch, channels, height, width]. A forward pass with this shape finds the norm
            that follows each convolution. Defaults to the input size of timm models; without a shape, norms are not
            folded into convolutions.

    Returns:
        The model, the replaced layers, and the layers that were not replaced with the reasons.

    Raises:
        TypeError: if the model is wrapped in DataParallel or DistributedDataParallel.

    >>> import lambdanets, timm, torch
    >>> model, summary = lambdanets.accelerate(timm.create_model("lambda_resnet26t"))
    >>> len(summary.replaced)
    3
    >>> model(torch.randn(1, 3, 64, 64)).shape
    torch.Size([1, 1000])
    """
    if isinstance(model, WRAPPERS):
        raise TypeError(f"cannot accelerate a model inside {type(model).__name__}: accelerate it before wrapping it")
    done = Acceleration(model)
    layers: dict[int, nn.Module | str] = {}
    owners = owners_of_parameters(model)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, LambdaLayer) or not is_lambda_layer(module):
            continue
        if id(module) not in layers:  # one module may have several names
            layers[id(module)] = replacement(module, owners)
        found = layers[id(module)]
        if isinstance(found, str):
            done.left[name] = found
            continue
        assert isinstance(found, AcceleratedLayer)
        if name:
            model.set_submodule(name, found)
        else:
            done.model = found
        done.replaced[name] = found.names.what
    if inference:
        done.folded = prepare_inference(done.model, input_shape)
    return done


def original_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of an accelerated model with the names and shapes of the original model.

    Biases of projections (timm's `qkv_bias=True`) have no effect and are returned as zeros.

    Args:
        model: a model that `accelerate` has changed.

    >>> import lambdanets, timm
    >>> from lambdanets.accelerate import original_state
    >>> theirs = timm.create_model("lambda_resnet26t")
    >>> model, _ = lambdanets.accelerate(timm.create_model("lambda_resnet26t"))
    >>> theirs.load_state_dict(original_state(model))
    <All keys matched successfully>
    """
    state = dict(model.state_dict())
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, AcceleratedLayer):
            prefix = f"{name}." if name else ""
            state = {key: tensor for key, tensor in state.items() if not key.startswith(prefix)}
            state.update({prefix + key: tensor for key, tensor in module.original_state().items()})
    return state


def prepare_inference(model: nn.Module, input_shape: Sequence[int] | None) -> int:
    configuration = getattr(model, "pretrained_cfg", None) or {}
    shape = input_shape or ((1, *configuration["input_size"]) if "input_size" in configuration else None)
    if shape is not None:
        return fold_in_place(model, tuple(shape))
    for module in model.eval().modules():
        if isinstance(module, LambdaLayer):
            module.fuse()
    return 0


def is_lambda_layer(module: nn.Module) -> bool:
    return type(module).__name__ == "LambdaLayer" or names_of(module) is not None


def names_of(module: nn.Module) -> LayerNames | None:
    present = {name for name, _ in module.named_parameters()}
    for names in SOURCES:
        if {f"{names.projections[0]}.weight", *(f"{norm}.weight" for norm in NORMS)} <= present:
            return names
    return None


def owners_of_parameters(model: nn.Module) -> dict[int, int]:
    """Count the modules that own each parameter, by the parameter's id."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return owners


def replacement(module: nn.Module, owners: dict[int, int]) -> AcceleratedLayer | str:
    """Return our layer with the weights of `module`, or the reason why it cannot be replaced."""
    names = names_of(module)
    if names is None:
        return f"its parameters are not those of {', '.join(one.what for one in SOURCES)}"
    why = why_not(module, owners)
    if why is not None:
        return why
    with torch.no_grad():
        try:
            weights = read_layer(names, module.state_dict())
        except ValueError as error:
            return str(error)
        outcome = "its outputs differ from those of our layer with its weights"
        for downsample, pool in ((None, None), ("avg", None), (None, AveragePool(2, 2))):
            layer = build(module, names, weights, downsample, pool)
            try:
                if equal_outputs(module, layer):
                    return layer
            except Exception as error:  # raised by the other implementation
                outcome = f"it failed on random input ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return outcome


def why_not(module: nn.Module, owners: dict[int, int]) -> str | None:
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in module.modules()):
        return "it has hooks, which our layer would not call: remove them first"
    parameters = list(module.parameters())
    if any(p.is_meta for p in parameters):
        return "it is on the meta device, without weights to compare: move the model to a device first"
    if any(owners[id(p)] > 1 for p in parameters):
        return "it shares parameters with another module"
    for norm in NORMS:
        found = getattr(module, norm)
        if type(found) is not nn.BatchNorm2d or found.running_var is None:
            kind = type(found).__name__
            return f"{norm} is {kind}, expected nn.BatchNorm2d with running statistics: replace it after accelerate()"
    return None


def build(
    module: nn.Module, names: LayerNames, weights: LayerWeights, downsample: str | None, pool: nn.Module | None
) -> AcceleratedLayer:
    like = module.get_parameter(f"{names.projections[0]}.weight")
    local = "input_size" not in weights.arguments
    options = {"downsample": downsample, "position_bias": local, "device": "meta", "dtype": like.dtype}
    layer = AcceleratedLayer(names, weights.arguments, pool, **options)  # the meta device draws no random numbers
    layer.to_empty(device=like.device).load_state_dict(state_of(weights, local))
    layer.projection_bias = f"{names.projections[0]}.bias" in module.state_dict()
    theirs = dict(module.named_parameters())
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(theirs[source_of(name, names, local)].requires_grad)
    for norm, source in zip((layer.norm_queries, layer.norm_values), NORMS, strict=True):
        assert isinstance(norm, nn.BatchNorm2d)
        original = getattr(module, source)
        norm.eps, norm.momentum = original.eps, original.momentum
    layer.train(module.training)
    for norm, source in zip((layer.norm_queries, layer.norm_values), NORMS, strict=True):
        norm.train(getattr(module, source).training)  # its statistics may be frozen
    return layer


def source_of(name: str, names: LayerNames, local: bool) -> str:
    """Return the name of the original parameter that one of our parameters is made from."""
    first = {"to_queries": 0, "to_keys": 1, "to_values": 2}
    module, _, kind = name.rpartition(".")
    if module in first:
        return f"{names.projections[min(first[module], len(names.projections) - 1)]}.weight"
    if module in ("norm_queries", "norm_values"):
        return f"{'norm_q' if module == 'norm_queries' else 'norm_v'}.{kind}"
    if kind == "position_bias":
        return f"{names.convolution}.bias"
    return f"{names.convolution}.weight" if local else str(names.table)


def state_of(weights: LayerWeights, with_bias: bool) -> State:
    return weights.with_bias() if with_bias else weights.state


def equal_outputs(theirs: nn.Module, ours: AcceleratedLayer) -> bool:
    """Return whether both layers have equal outputs on random input, in eval and training mode."""
    grid = PROBE
    if ours.positions is not None and ours.positions.input_size is not None:
        grid = ours.positions.input_size
    x = torch.randn(2, ours.channels, *grid, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pair = [copy.deepcopy(one).cpu().double() for one in (theirs, ours)]
    for training in (False, True):
        expected, found = (one.train(training)(x) for one in pair)
        if found.shape != expected.shape or not (found - expected).abs().max() <= TOLERANCE * expected.abs().max():
            return False
    return True
