"""What a network is, as data. A row of the paper is one of these, and `create_model` changes its fields."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

Scope = int | tuple[int, int] | None  # None: the whole input
ScopePerStage = Scope | str | tuple[Scope, ...]
Placement = str | tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class SpatialOptions:
    """What stands where a spatial convolution would, and the paper's ablations of it.

    Attributes:
        layer: a name of `lambdanets.models.LAYERS`, or a function from channels to a module that keeps the size.
        key_depth, heads: None is the layer's own default (lambda layers: 16 and 4).
        scope: "auto" is the layer's own default (lambda layers: 23, or 7 with intra_depth > 1); an int, (height,
            width), None or "global" for the whole input (then `image_size` is the largest), or a tuple with one for
            each stage.
        key_norm: "softmax", "l2", None or "none" (command lines, and timm, have no None).
        embedding_std: the paper's 1.0, another number, or "unit", the default of a layer outside of these networks.
        share_positions: one table of position embeddings for all lambda layers of a stage.
    The others are options of `LambdaLayer2d`.
    """

    layer: str | Callable[[int], nn.Module] = "lambda"
    key_depth: int | None = None
    heads: int | None = None
    intra_depth: int = 1
    scope: ScopePerStage = "auto"
    content: bool = True
    position: bool = True
    key_norm: str | None = "softmax"
    query_softmax: bool = False
    batch_norm: bool = True
    multi_head: bool = False
    embedding_std: float | str = 1.0
    position_bias: bool = False
    share_positions: bool = False
    backend: str = "auto"


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(SpatialOptions):
    """What every family has.

    Attributes:
        num_classes: outputs of the classifier; 0 for none.
        in_chans: channels of the image.
        image_size: the size it is meant for, and the largest one where a layer sees the whole input.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block, growing linearly from 0 in the first.
        global_pool: "avg", "max", or "" to keep the map (then without a classifier).
    """

    num_classes: int = 1000
    in_chans: int = 3
    image_size: int | tuple[int, int] = 224
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    global_pool: str = "avg"

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):  # JSON and command lines bring lists
            object.__setattr__(self, name, as_tuples(getattr(self, name)))
        scope = tuple(None if s == "global" else s for s in self.scope) if isinstance(self.scope, tuple) else self.scope
        object.__setattr__(self, "scope", None if scope == "global" else scope)
        object.__setattr__(self, "key_norm", None if self.key_norm == "none" else self.key_norm)
        if self.global_pool not in ("avg", "max", ""):
            raise ValueError(f"unknown global_pool {self.global_pool!r}; choose one of 'avg', 'max', ''")
        if not self.global_pool and self.num_classes:
            raise ValueError("global_pool='' keeps the map, which no classifier can take: also pass num_classes=0")
        if not are_whole((self.num_classes,), 1, least=0):
            raise ValueError(f"num_classes must be a whole number, 0 for no classifier, got {self.num_classes!r}")
        if not are_whole((self.in_chans,), 1):
            raise ValueError(f"in_chans must be a whole number from 1 on, got {self.in_chans!r}")
        if not are_whole(self.image_grid):
            raise ValueError(f"image_size must be a number of pixels, or (height, width), got {self.image_size!r}")
        for name in ("drop_rate", "drop_path_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")

    @property
    def image_grid(self) -> tuple[int, int]:
        size = self.image_size
        return (size, size) if isinstance(size, int) else size


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(NetworkConfig):
    """Bottleneck ResNets: vanilla, -D, -RS, and with lambda layers.

    Attributes:
        depths: blocks of the stages c2 to c5.
        widths: channels inside the blocks of each stage; a quarter of what they put out.
        stem: "vanilla": 7x7 and max pooling; "deep": three 3x3 and max pooling (ResNet-D); "strided": three 3x3
            and a strided one in place of the pooling (ResNet-RS); "small": one 3x3, nothing is made smaller.
        shortcut: "conv": a strided 1x1 where a stage makes the map smaller; "pool": 2x2 average pooling and a
            1x1 (ResNet-D).
        se: squeeze-and-excitation in convolution blocks, for all stages or each one; never with another layer.
        se_reduction: hidden width of SE is the block's output / se_reduction.
        placement: for each stage "C" (convolutions), "L" (the `layer` in every block) or the blocks that have it,
            counted from 1: "CCLL", or ("C", "C", (6, 12, 18), "L").
    """

    depths: tuple[int, int, int, int]
    widths: tuple[int, int, int, int] = (64, 128, 256, 512)
    stem: str = "vanilla"
    shortcut: str = "conv"
    se: bool | tuple[bool, bool, bool, bool] = False
    se_reduction: int = 16
    placement: Placement = "CCCC"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("depths", "widths"):
            if not are_whole(getattr(self, name), 4):
                raise ValueError(f"{name} must be 4 numbers from 1 on, one for each stage, got {getattr(self, name)!r}")
        if not isinstance(self.se, bool) and (not isinstance(self.se, tuple) or len(self.se) != 4):
            raise ValueError(f"se must be True, False or 4 of them, one for each stage, got {self.se!r}")


@dataclass(frozen=True, kw_only=True)
class MobileNetConfig(NetworkConfig):
    """MobileNet-v2. `placement` names the inverted bottlenecks (1 to 17) that become lightweight lambda blocks."""

    placement: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PatchConfig(NetworkConfig):
    """A lambda network on patches: one convolution cuts them, all blocks are alike.

    Attributes:
        patch: the side of a patch, in pixels.
        width: channels.
        depth: blocks, each with one lambda layer and one two-layer perceptron.
        expansion: hidden width of the perceptron / width.
    """

    patch: int = 16
    width: int
    depth: int
    expansion: int = 4


@dataclass(frozen=True, kw_only=True)
class AttentionNetworkConfig(NetworkConfig):
    """Self-attention networks (Zhao et al. 2020): five stages of residual blocks without any spatial convolution.

    Attributes:
        depths: blocks of each stage.
        widths: channels of each stage; the layer of a block puts out a quarter of them.
        layer: "patchwise_attention", "pairwise_attention" or another layer by its name.
    """

    layer: str | Callable[[int], nn.Module] = "patchwise_attention"
    scope: ScopePerStage = (3, 7, 7, 7, 7)
    depths: tuple[int, int, int, int, int]
    widths: tuple[int, int, int, int, int] = (64, 256, 512, 1024, 2048)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("depths", "widths"):
            if not are_whole(getattr(self, name), 5):
                raise ValueError(f"{name} must be 5 numbers from 1 on, one for each stage, got {getattr(self, name)!r}")


def are_whole(values: Any, count: int = 2, least: int = 1) -> bool:
    """Whether it is a tuple of so many ints, none of them smaller than `least`."""
    return isinstance(values, tuple) and len(values) == count and all(isinstance(v, int) and v >= least for v in values)


def as_tuples(value: Any) -> Any:
    return tuple(as_tuples(v) for v in value) if isinstance(value, list | tuple) else value
