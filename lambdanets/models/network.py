"""What every network does, as timm's and torchvision's users know it."""

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.checkpoint import checkpoint

from lambdanets.layers.arguments import check_tensor, check_type
from lambdanets.layers.lambda_layer import LambdaLayer
from lambdanets.models.config import NetworkConfig
from lambdanets.models.shared import SharesParameters, complete_shared

if TYPE_CHECKING:
    from lambdanets.models.pretrained import Card


class Network(SharesParameters, ABC):
    """Images [B, in_chans, height, width] -> [B, num_classes]. Any size: every stage rounds up.

    A family says what its stages are (`forward_stage`), which blocks are residual (`residual_blocks`) and how to
    leave stages out (`keep_stages`); it calls `finish` at the end of its constructor.
    """

    classifier_name: ClassVar[str] = "fc"
    depth_patterns: ClassVar[tuple[str, str]]  # of the names of parameters in the stem and in numbered blocks
    config: NetworkConfig
    name: str | None = None  # in the registry
    card: "Card | None" = None  # preprocessing, class names, metrics, recipe of weights that were loaded

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.feature_info: list[dict[str, Any]] = []  # one for each stage: num_chs, reduction, module
        self.grad_checkpointing = False
        self.frozen_norms: tuple[str, ...] = ()  # batch norms that stay in eval mode

    @classmethod
    @abstractmethod
    def first_conv_of(cls, config: Any) -> str:
        """The name of the convolution that sees the image."""

    @classmethod
    @abstractmethod
    def reduction_of(cls, config: Any) -> int:
        """How much smaller than the image the last map is."""

    def finish(self, num_features: int) -> None:
        """The head, and checks on what was built."""
        self.num_features = self.head_hidden_size = num_features
        self.stages_left = len(self.feature_info)
        self.head_drop = nn.Dropout(self.config.drop_rate)
        self.reset_classifier(self.config.num_classes)
        self.register_load_state_dict_pre_hook(complete_shared)
        for name, block in self.residual_blocks():
            if sum(isinstance(module, LambdaLayer) for module in block.modules()) > 1:
                warnings.warn(
                    f"{name} has two lambda layers in sequence in one residual block, which the paper found unstable: "
                    f"use one, or give each a residual connection",
                    stacklevel=4,
                )

    # What a family says

    @abstractmethod
    def forward_stage(self, stage: int, x: Tensor) -> Tensor:
        """From the map of the stage before (the image for stage 0) to the map that feature_info[stage] describes."""

    @abstractmethod
    def residual_blocks(self) -> Iterable[tuple[str, nn.Module]]:
        """Every block with a residual connection, by name."""

    @abstractmethod
    def keep_stages(self, stages: int) -> None:
        """Removes the stages from `stages` on."""

    # What they all do

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """The last map, [B, num_features, height, width]."""
        self._check_images(x)
        for stage in range(self.stages_left):
            x = self.forward_stage(stage, x)
        return x

    def _check_images(self, x: Tensor) -> None:
        if isinstance(x, Proxy):  # torch.fx can trace a network whose layers the tracer keeps whole
            return
        check_tensor(x, "x")
        if x.ndim != 4:
            raise ValueError(f"x must be [batch, channels, height, width], got {list(x.shape)}")
        check_type(x, self.get_submodule(self.first_conv), "x")

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pooling, dropout and the classifier (not with `pre_logits`) on what `forward_features` returned."""
        x = self.head_drop(pool_globally(x, self.config.global_pool))
        return x if pre_logits else self.get_classifier()(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Sequence[int] | int | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """As in timm: the last map, and those of the stages `indices` (all if None, the last n if an int).

        Args:
            x: images.
            indices: which stages.
            norm: has no effect: no stage has a norm that its map leaves out.
            stop_early: leave out the stages after the last one of `indices`, whose map is then the last.
            output_fmt: "NCHW", the only one.
            intermediates_only: return the list alone.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt={output_fmt!r}: these networks have maps [B, C, H, W], 'NCHW'")
        self._check_images(x)
        wanted = stage_indices(indices, len(self.feature_info))
        if max(wanted) >= self.stages_left:
            raise ValueError(f"stage {max(wanted)} was removed: the network has the stages 0 to {self.stages_left - 1}")
        maps = {}
        for stage in range(max(wanted) + 1 if stop_early else self.stages_left):
            x = self.forward_stage(stage, x)
            if stage in wanted:
                maps[stage] = x
        found = [maps[stage] for stage in wanted]
        return found if intermediates_only else (x, found)

    def prune_intermediate_layers(
        self, indices: Sequence[int] | int = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """As in timm: remove the stages after the last one of `indices`, and the head; returns the indices kept.

        Args:
            indices: which stages `forward_intermediates` will be asked for.
            prune_norm: has no effect: a norm behind the last stage belongs to its map.
            prune_head: remove the head also where all stages stay.
        """
        wanted = stage_indices(indices, len(self.feature_info))
        left = max(wanted) + 1
        ends_early = left < len(self.feature_info)
        self.keep_stages(left)
        self.stages_left = left
        if ends_early:
            self.num_features = self.feature_info[left - 1]["num_chs"]
        if prune_head or ends_early:
            self.reset_classifier(0, "")
        return list(wanted)

    def get_classifier(self, name_only: bool = False) -> Any:
        """The classifier, or its name."""
        return self.classifier_name if name_only else getattr(self, self.classifier_name)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier, on the device and in the dtype of the network; 0 classes for none."""
        pool = self.config.global_pool if global_pool is None else global_pool
        self.config = replace(self.config, num_classes=num_classes, global_pool=pool)
        self.head_hidden_size = self.num_features * (2 if pool == "catavgmax" else 1)
        like = next(self.parameters())
        head: nn.Module = nn.Identity()
        if num_classes:
            head = nn.Linear(self.head_hidden_size, num_classes, device=like.device, dtype=like.dtype)
        setattr(self, self.classifier_name, head)

    @property
    def first_conv(self) -> str:
        return self.first_conv_of(self.config)

    @property
    def num_classes(self) -> int:
        return self.config.num_classes

    def no_weight_decay(self) -> set[str]:
        """Batch norm parameters and biases. Tables of positions do decay."""
        return {name for name, parameter in self.named_parameters() if parameter.ndim <= 1}

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Patterns of parameters' names by depth, as timm's functions for layer-wise learning rates take them.

        `coarse`: a group for each stage of a ResNet, otherwise for each block.
        """
        stem, blocks = self.depth_patterns
        return {"stem": stem, "blocks": blocks.removesuffix(r"\.(\d+)") if coarse and blocks.count("(") > 1 else blocks}

    def depths(self) -> dict[str, int]:
        """The depth of each parameter: 0 is the stem, then block after block, and last the classifier."""
        keys = {}
        for name, _ in self.named_parameters():
            found = [(i, re.match(pattern, name)) for i, pattern in enumerate(self.depth_patterns)]
            matches = [(i, *map(int, match.groups())) for i, match in found if match]
            keys[name] = matches[0] if matches else (len(self.depth_patterns),)
        order = {key: depth for depth, key in enumerate(sorted(set(keys.values())))}
        return {name: order[key] for name, key in keys.items()}

    def freeze(self, upto: str) -> None:
        """Exclude parameters from training, and keep the batch norms among them in eval mode.

        Args:
            upto: "stem"; the module of a stage (see `feature_info`), which also freezes the stem and the stages before
                it; or "features", everything but the classifier.
        """
        depths, head = self.depths(), f"{self.classifier_name}."
        stages = {
            str(info["module"]): max(inside)
            for info in self.feature_info
            if (inside := [depth for name, depth in depths.items() if name.startswith(f"{info['module']}.")])
        }
        if upto not in ("stem", "features", *stages):
            raise ValueError(f"freeze {upto!r}: this network has stem, {', '.join(stages)}, and features (all of them)")
        last = max(depths.values()) if upto == "features" else stages.get(upto, 0)
        frozen = {name for name, depth in depths.items() if depth <= last and not name.startswith(head)}
        for name, parameter in self.named_parameters():
            if name in frozen:
                parameter.requires_grad_(False)
        norms = [n for n, m in self.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.frozen_norms = tuple(norm for norm in norms if f"{norm}.weight" in frozen)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for name in self.frozen_norms:
            self.get_submodule(name).eval()
        return self

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training keeps only the input of each block and computes the rest again."""
        self.grad_checkpointing = enable

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        if not (self.grad_checkpointing and self.training and torch.is_grad_enabled()):
            return block(x)
        if torch.compiler.is_compiling():
            return checkpoint(block, x, use_reentrant=False)
        return checkpoint(block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _frozen_statistics(block)))

    # Weights on disk and on the hub

    def save_pretrained(self, folder: str | Path, card: "Card | None" = None) -> Path:
        """Writes config.json, README.md and model.safetensors; `card`: preprocessing, class names, metrics, recipe."""
        from lambdanets.models import pretrained

        return pretrained.save_pretrained(self, folder, card)

    @classmethod
    def from_pretrained(cls, source: str | Path, **arguments: Any) -> "Network":
        """The network of a folder or file that `save_pretrained` wrote, or of a hub id; `arguments` change it."""
        from lambdanets.models import pretrained

        network = pretrained.from_pretrained(source, **arguments)
        if not isinstance(network, cls):
            raise TypeError(f"{source} holds a {type(network).__name__}, not a {cls.__name__}")
        return network

    def push_to_hub(self, repo_id: str, card: "Card | None" = None, **options: Any) -> str:
        """Saves to the Hugging Face hub; `options` are those of `HfApi.upload_folder`. Returns the address."""
        from lambdanets.models import pretrained

        return pretrained.push_to_hub(self, repo_id, card, **options)


class FeatureNetwork(SharesParameters):
    """The maps of chosen stages, as a list: a backbone for detection or segmentation. Later stages are removed."""

    def __init__(self, network: Network, out_indices: Sequence[int] | int | None = None) -> None:
        super().__init__()
        self.out_indices = stage_indices(out_indices, len(network.feature_info))
        network.reset_classifier(0)
        network.stages_left = max(self.out_indices) + 1
        network.keep_stages(network.stages_left)
        del network.feature_info[network.stages_left :]
        self.network = network
        self.feature_info = FeatureInfo(network.feature_info, self.out_indices)

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.network.forward_intermediates(x, self.out_indices, intermediates_only=True)  # type: ignore

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.network.set_grad_checkpointing(enable)


def pool_globally(x: Tensor, kind: str) -> Tensor:
    """[B, C, height, width] -> [B, C], [B, 2C] with "catavgmax", or x itself with ""."""
    if not kind:
        return x
    if kind == "avg":
        return x.mean((2, 3))
    if kind == "max":
        return x.amax((2, 3))
    average, largest = x.mean((2, 3)), x.amax((2, 3))
    return torch.cat([average, largest], dim=1) if kind == "catavgmax" else 0.5 * (average + largest)


class FeatureInfo:
    """What a FeatureNetwork returns, with the methods of timm's class of this name."""

    def __init__(self, info: list[dict[str, Any]], out_indices: Sequence[int]) -> None:
        self.info, self.out_indices = info, tuple(out_indices)

    def get(self, key: str, index: int | Sequence[int] | None = None) -> Any:
        if isinstance(index, int):
            return self.info[index][key]
        return [self.info[i][key] for i in (self.out_indices if index is None else index)]

    def channels(self, index: int | Sequence[int] | None = None) -> Any:
        return self.get("num_chs", index)

    def reduction(self, index: int | Sequence[int] | None = None) -> Any:
        return self.get("reduction", index)

    def module_name(self, index: int | Sequence[int] | None = None) -> Any:
        return self.get("module", index)

    def get_dicts(self) -> list[dict[str, Any]]:
        return [self.info[i] for i in self.out_indices]

    def __getitem__(self, stage: int) -> dict[str, Any]:
        return self.info[stage]

    def __len__(self) -> int:
        return len(self.info)


def stage_indices(indices: Sequence[int] | int | None, stages: int) -> tuple[int, ...]:
    """All if None, the last n if an int; negative ones count from the end."""
    if indices is None:
        return tuple(range(stages))
    chosen = range(-indices, 0) if isinstance(indices, int) else indices
    if not chosen or any(not -stages <= i < stages for i in chosen):
        raise ValueError(f"out_indices={indices}: this network has the stages 0 to {stages - 1}")
    return tuple(i % stages for i in chosen)


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Computing a block again must not update its running statistics again."""
    norms = [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, (_, batches) in zip(norms, before, strict=True):  # a copy to count in: SyncBatchNorm insists on one
        norm.momentum, norm.num_batches_tracked = 0.0, None if batches is None else batches.clone()
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches
