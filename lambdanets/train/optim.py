"""Optimisers and their parameter groups."""

from typing import Any

import torch
from torch import Tensor, nn

from lambdanets.models.network import Network
from lambdanets.train.config import Optimizer


def parameter_groups(model: nn.Module, weight_decay: float, layer_decay: float = 1.0) -> list[dict]:
    """Return parameter groups: weight decay for matrices, kernels and position tables, none for batch norm and biases.

    With a layer decay, each depth of the network has its own groups, with timm's `lr_scale`.
    """
    spared = getattr(model, "no_weight_decay", None)
    names: Any = spared() if callable(spared) else {n for n, p in model.named_parameters() if p.ndim <= 1}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = []
    for scale, members in by_depth(model, trained, layer_decay):
        groups += [
            {"params": [p for name, p in members if name not in names], "weight_decay": weight_decay} | scale,
            {"params": [p for name, p in members if name in names], "weight_decay": 0.0} | scale,
        ]
    return [group for group in groups if group["params"]]


def by_depth(
    model: nn.Module, named: list[tuple[str, nn.Parameter]], layer_decay: float
) -> list[tuple[dict[str, float], list[tuple[str, nn.Parameter]]]]:
    """Group parameters by learning rate."""
    if layer_decay == 1:
        return [({}, named)]
    if not isinstance(model, Network):
        raise ValueError("optimizer.layer_decay supports only image classification: remove it, or set it to 1")
    depths = model.depths()
    last = max(depths.values())
    return [
        ({"lr_scale": layer_decay ** (last - depth)}, [(name, p) for name, p in named if depths[name] == depth])
        for depth in range(last + 1)
    ]


def make_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser, with its state allocated, so that the first step can be skipped and memory use is known."""
    groups = parameter_groups(model, config.weight_decay, config.layer_decay)
    if not groups:
        raise ValueError("the network has no trainable parameters")
    if config.kind == "sgd":
        nesterov = config.nesterov and config.momentum > 0
        optimizer = torch.optim.SGD(groups, lr=0.0, momentum=config.momentum, nesterov=nesterov, fused=True)
        if config.momentum:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    if config.kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=(config.momentum, config.alpha), eps=config.eps, fused=True)
    try:
        from timm.optim.lamb import Lamb
        from timm.optim.rmsprop_tf import RMSpropTF
    except ImportError as error:
        raise ValueError(f"optimizer.kind {config.kind} needs timm: pip install 'lambdanets[train]'") from error
    if config.kind == "lamb":
        betas = (config.momentum, config.alpha)
        optimizer = Lamb(groups, lr=0.0, betas=betas, eps=config.eps, max_grad_norm=None)  # the engine clips gradients
        for group in optimizer.param_groups:
            group["step"] = torch.zeros(())
            for parameter in group["params"]:
                optimizer.state[parameter] = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return optimizer
    if config.kind == "muon":
        try:
            from timm.optim.muon import Muon
        except ImportError as error:
            raise ValueError("optimizer.kind muon needs a newer timm: pip install --upgrade timm") from error
        matrices = {p for name, p in model.named_parameters() if is_matrix(name, p, model)}
        betas = (config.momentum, config.alpha)
        split = [
            group | {"params": [p for p in group["params"] if (p in matrices) == chosen], "use_fallback": not chosen}
            for group in groups
            for chosen in (True, False)
        ]
        split = [group for group in split if group["params"]]
        return Muon(split, lr=0.0, momentum=config.momentum, nesterov=config.nesterov, betas=betas, eps=config.eps)
    assert config.kind == "rmsprop"
    return RMSpropTF(
        groups, lr=0.0, alpha=config.alpha, eps=config.eps, momentum=config.momentum, decoupled_decay=False
    )


def is_matrix(name: str, parameter: nn.Parameter, model: nn.Module) -> bool:
    """Return whether Muon orthogonalises the updates: for kernels and projections, not position tables or
    classifier."""
    classifier = getattr(model, "classifier_name", None)
    return parameter.ndim >= 2 and name.endswith(".weight") and name.split(".")[0] != classifier


def load(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Load the state of an optimiser of the same kind. Raises ValueError if it does not fit."""
    before = {p: set(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]}
    counting = "step" in optimizer.param_groups[0]  # LAMB
    options = [numbers_of(group) for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state)
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"optimizer is not the state of {type(optimizer).__name__}: {error!r}") from error
    if [numbers_of(group) for group in optimizer.param_groups] != options:
        raise ValueError(f"the settings of the optimizer differ from those of this run: {options}")
    for group in optimizer.param_groups if counting else []:
        if not isinstance(group.get("step"), Tensor) or group["step"].ndim:
            raise ValueError(f"optimizer has the invalid number of steps {str(group.get('step'))[:40]!r}")
    for parameter, names in before.items():
        found = optimizer.state[parameter]
        if not isinstance(found, dict):
            raise ValueError(f"optimizer has the invalid state {str(found)[:40]!r} of a parameter")
        if not names <= found.keys():
            raise ValueError(f"optimizer has no {', '.join(sorted(names - found.keys()))}")
        for name, value in found.items():
            if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                shapes = f"{tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}"
                raise ValueError(f"optimizer has a {name} of shape {shapes}")


def numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the numeric settings of a group, without the learning rate, which is set in every step."""
    return {key: group[key] for key in group if key != "lr" and type(group[key]) in (int, float, str, tuple)}


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimiser skips a step on the device if `found_inf` is 1, without synchronisation."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step(optimizer: torch.optim.Optimizer, rate: float | Tensor, skip: Tensor) -> None:
    """Run a step unless `skip` (float32 on the device) is 1. With a rate on the device and an optimiser that
    `skips_on_device`, it needs no input from the host."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    if not skips_on_device(optimizer):
        if not bool(skip):  # synchronises with the device
            optimizer.step()
        return
    told: Any = optimizer
    told.found_inf = skip  # like torch's GradScaler
    try:
        optimizer.step()
    finally:
        del told.found_inf
        if isinstance(rate, Tensor):
            for group in optimizer.param_groups:
                group["lr"] = 0.0  # keeps the tensor out of checkpoints
