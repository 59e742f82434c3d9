"""The base class of all networks, with the interface of timm's networks."""

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
    """The base class of networks: images [B, in_chans, height, width] -> scores [B, num_classes].

    Images may have any size, since every stage rounds up. A subclass implements `forward_stage`, `residual_blocks` and
    `keep_stages`, and calls `finish` at the end of its constructor.

    Args:
        config: the configuration.

    Attributes:
        config: the configuration.
        name: name in the registry, or None.
        card: preprocessing, class names, metrics and recipe of loaded weights, or None.
        feature_info: channels (num_chs), reduction and module of each stage.

    Shape:
        input: [B, in_chans, height, width]
        output: [B, num_classes]; features [B, num_features] if num_classes is 0

    >>> import torch
    >>> from lambdanets import create_model
    >>> network = create_model("lambda_resnet_tiny", num_classes=10)
    >>> network(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> network.forward_features(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 1024, 4, 4])
    """

    classifier_name: ClassVar[str] = "fc"
    depth_patterns: ClassVar[tuple[str, str]]  # patterns of parameter names in the stem and in numbered blocks
    config: NetworkConfig
    name: str | None = None
    card: "Card | None" = None

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.feature_info: list[dict[str, Any]] = []
        self.grad_checkpointing = False
        self.frozen_norms: tuple[str, ...] = ()  # names of batch norms that stay in eval mode

    @classmethod
    @abstractmethod
    def first_conv_of(cls, config: Any) -> str:
        """Return the name of the first convolution."""

    @classmethod
    @abstractmethod
    def reduction_of(cls, config: Any) -> int:
        """Return the reduction of the last map relative to the image."""

    def finish(self, num_features: int) -> None:
        """Create the head and check the network; the constructor of a subclass calls it last.

        Args:
            num_features: number of channels of the last map.
        """
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

    # Implemented by each family

    @abstractmethod
    def forward_stage(self, stage: int, x: Tensor) -> Tensor:
        """Compute the map of a stage from that of the previous stage, or from the image for stage 0."""

    @abstractmethod
    def residual_blocks(self) -> Iterable[tuple[str, nn.Module]]:
        """Yield the name and module of every block with a residual connection."""

    @abstractmethod
    def keep_stages(self, stages: int) -> None:
        """Remove all stages except the first `stages`."""

    # Common to all families

    def forward(self, x: Tensor) -> Tensor:
        """Return scores [B, num_classes] for images [B, in_chans, height, width]."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last map, [B, num_features, height, width], for images [B, in_chans, height, width]."""
        self._check_images(x)
        for stage in range(self.stages_left):
            x = self.forward_stage(stage, x)
        return x

    def _check_images(self, x: Tensor) -> None:
        if isinstance(x, Proxy):  # symbolic tracing by torch.fx
            return
        check_tensor(x, "x")
        if x.ndim != 4:
            raise ValueError(f"x must be [batch, channels, height, width], got {list(x.shape)}")
        check_type(x, self.get_submodule(self.first_conv), "x")

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Apply pooling, dropout and the classifier to the last map.

        Args:
            x: the map that `forward_features` returned, [B, num_features, height, width].
            pre_logits: return the features [B, num_features] without the classifier.
        """
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
        """Return the last map and the maps of several stages, with the arguments of timm.

        Args:
            x: images [B, in_chans, height, width].
            indices: indices of stages; an int means the last n, None all stages.
            norm: ignored: the maps include the norms.
            stop_early: skip the stages after the last one of `indices`, whose map is then returned as the last map.
            output_fmt: only "NCHW" is supported.
            intermediates_only: return only the list of maps.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}: the maps are [B, C, height, width]")
        self._check_images(x)
        wanted = stage_indices(indices, len(self.feature_info))
        if max(wanted) >= self.stages_left:
            raise ValueError(f"stage {max(wanted)} was removed: the network has stages 0 to {self.stages_left - 1}")
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
        """Remove the stages after the last one of `indices`, and the head; return the indices as in timm.

        Args:
            indices: the stages that `forward_intermediates` will return; an int means the last n.
            prune_norm: ignored: the maps include the norms.
            prune_head: remove the head even if all stages are kept.
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
        """Return the classifier, or its name."""
        return self.classifier_name if name_only else getattr(self, self.classifier_name)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier with a new one on the network's device and in its dtype.

        Args:
            num_classes: number of classes; 0 removes the classifier.
            global_pool: "avg", "max", "avgmax", "catavgmax" or ""; None keeps the current pooling.
        """
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
        """Name of the first convolution."""
        return self.first_conv_of(self.config)

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 without a classifier."""
        return self.config.num_classes

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay: batch norms and biases, but not position tables."""
        return {name for name, parameter in self.named_parameters() if parameter.ndim <= 1}

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return patterns of parameter names by depth, for timm's layer-wise learning rates.

        Args:
            coarse: one group for each stage of a ResNet instead of each block.
        """
        stem, blocks = self.depth_patterns
        return {"stem": stem, "blocks": blocks.removesuffix(r"\.(\d+)") if coarse and blocks.count("(") > 1 else blocks}

    def depths(self) -> dict[str, int]:
        """Return the depth of each parameter by name: 0 for the stem, then each block, and last the classifier."""
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
            raise ValueError(
                f"cannot freeze {upto!r}; choose from stem, {', '.join(stages)} and features (all of these)"
            )
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
        """Enable gradient checkpointing: store only the input of each block and recompute the rest in backward."""
        self.grad_checkpointing = enable

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        if not (self.grad_checkpointing and self.training and torch.is_grad_enabled()):
            return block(x)
        if torch.compiler.is_compiling():
            return checkpoint(block, x, use_reentrant=False)
        return checkpoint(block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _frozen_statistics(block)))

    # Weights on disk and on the hub

    def save_pretrained(self, folder: str | Path, card: "Card | None" = None) -> Path:
        """Write config.json, README.md and model.safetensors into a folder, and return the folder.

        Args:
            folder: output folder, created if it does not exist.
            card: preprocessing, class names, metrics and recipe; default: `self.card`.
        """
        from lambdanets.models import pretrained

        return pretrained.save_pretrained(self, folder, card)

    @classmethod
    def from_pretrained(cls, source: str | Path, **arguments: Any) -> "Network":
        """Load a network from a folder, file or hub id, see `lambdanets.models.from_pretrained`."""
        from lambdanets.models import pretrained

        network = pretrained.from_pretrained(source, **arguments)
        if not isinstance(network, cls):
            raise TypeError(f"{source} contains a {type(network).__name__}, expected a {cls.__name__}")
        return network

    def push_to_hub(self, repo_id: str, card: "Card | None" = None, **options: Any) -> str:
        """Upload the network to the Hugging Face hub and return its URL.

        Args:
            repo_id: id of the model, "owner/name"; created if it does not exist.
            card: preprocessing, class names, metrics and recipe; default: `self.card`.
            options: arguments of `huggingface_hub.HfApi.upload_folder`.
        """
        from lambdanets.models import pretrained

        return pretrained.push_to_hub(self, repo_id, card, **options)


class FeatureNetwork(SharesParameters):
    """A backbone that returns a list of maps, for detection or segmentation; `create_model(features_only=True)`.

    The classifier and the stages after the last chosen one are removed.

    Args:
        network: the network, which is changed.
        out_indices: indices of stages; an int means the last n, None all stages.

    Shape:
        input: [B, in_chans, height, width]
        output: a list of [B, channels, height / reduction, width / reduction], rounded up; see `feature_info`

    >>> import torch
    >>> from lambdanets import create_model
    >>> backbone = create_model("lambda_resnet_tiny", features_only=True, out_indices=(1, 4))
    >>> [list(x.shape) for x in backbone(torch.randn(1, 3, 32, 32))]
    [[1, 128, 32, 32], [1, 1024, 4, 4]]
    >>> backbone.feature_info.reduction()
    [1, 8]
    """

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
        """Return the maps of the chosen stages for images [B, in_chans, height, width]."""
        return self.network.forward_intermediates(x, self.out_indices, intermediates_only=True)  # type: ignore

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable gradient checkpointing, see `Network.set_grad_checkpointing`."""
        self.network.set_grad_checkpointing(enable)


def pool_globally(x: Tensor, kind: str) -> Tensor:
    """Pool [B, C, height, width] to [B, C], or to [B, 2C] with "catavgmax"; "" returns x."""
    if not kind:
        return x
    if kind == "avg":
        return x.mean((2, 3))
    if kind == "max":
        return x.amax((2, 3))
    average, largest = x.mean((2, 3)), x.amax((2, 3))
    return torch.cat([average, largest], dim=1) if kind == "catavgmax" else 0.5 * (average + largest)


class FeatureInfo:
    """Channels, reductions and modules of a backbone's maps, with the methods of timm's `FeatureInfo`.

    In all methods, `index` is a stage or a sequence of stages; None means the returned stages.

    Args:
        info: num_chs, reduction and module of every stage.
        out_indices: indices of the returned stages.

    >>> from lambdanets import create_model
    >>> info = create_model("lambda_resnet_tiny", features_only=True, out_indices=(1, 4)).feature_info
    >>> info.channels(), info.reduction(), info.module_name()
    ([128, 1024], [1, 8], ['layer1', 'layer4'])
    """

    def __init__(self, info: list[dict[str, Any]], out_indices: Sequence[int]) -> None:
        self.info, self.out_indices = info, tuple(out_indices)

    def get(self, key: str, index: int | Sequence[int] | None = None) -> Any:
        """Return num_chs, reduction or module of stages."""
        if isinstance(index, int):
            return self.info[index][key]
        return [self.info[i][key] for i in (self.out_indices if index is None else index)]

    def channels(self, index: int | Sequence[int] | None = None) -> Any:
        """Return the number of channels of stages."""
        return self.get("num_chs", index)

    def reduction(self, index: int | Sequence[int] | None = None) -> Any:
        """Return the reduction of stages relative to the image."""
        return self.get("reduction", index)

    def module_name(self, index: int | Sequence[int] | None = None) -> Any:
        """Return the module at the end of stages."""
        return self.get("module", index)

    def get_dicts(self) -> list[dict[str, Any]]:
        """Return num_chs, reduction and module of each returned stage."""
        return [self.info[i] for i in self.out_indices]

    def __getitem__(self, stage: int) -> dict[str, Any]:
        return self.info[stage]

    def __len__(self) -> int:
        return len(self.info)


def stage_indices(indices: Sequence[int] | int | None, stages: int) -> tuple[int, ...]:
    """Return stages as non-negative indices; None means all, an int the last n, negative indices count from the end."""
    if indices is None:
        return tuple(range(stages))
    chosen = range(-indices, 0) if isinstance(indices, int) else indices
    if not chosen or any(not -stages <= i < stages for i in chosen):
        raise ValueError(f"out_indices must be stages from 0 to {stages - 1} of this network, got {indices}")
    return tuple(i % stages for i in chosen)


@contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Keep the running statistics of a block unchanged while gradient checkpointing recomputes it."""
    norms = [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, (_, batches) in zip(norms, before, strict=True):  # a copy of the counter, which SyncBatchNorm needs
        norm.momentum, norm.num_batches_tracked = 0.0, None if batches is None else batches.clone()
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches
