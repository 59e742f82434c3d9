"""What a network is, as data. A row of the paper is one of these, and `create_model` changes its fields."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn

from lambdanets.typed import LARGEST_IMAGE, Bounds, Deviation, Side, check_fields

MOST = 2**16  # of channels, heads and depths: fields may come from a file, which must not make us allocate gigabytes
MOST_BLOCKS = 200  # of a stage; the deepest in the paper has 87
MOST_CLASSES = 10**7

Count = Annotated[int, Bounds(1, MOST)]
Blocks = Annotated[int, Bounds(1, MOST_BLOCKS)]
ScopeSide = Annotated[int, Bounds(1, 2 * LARGEST_IMAGE)]
Rate = Annotated[float, Bounds(0, 1)]
Scope = ScopeSide | tuple[ScopeSide, ScopeSide] | Literal["global"] | None  # None and "global": the whole input
ScopePerStage = Scope | Literal["auto"] | tuple[Scope, ...]
BlocksOfStage = str | tuple[Blocks, ...]
Placement = str | tuple[BlocksOfStage, ...]
Activation = Literal["relu", "silu", "mish", "gelu"]
OutputStride = Literal[8, 16, 32]
NormEps = Annotated[float, Bounds(1e-12, 1)]


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
    key_depth: Count | None = None
    heads: Count | None = None
    intra_depth: Count = 1
    scope: ScopePerStage = "auto"
    content: bool = True
    position: bool = True
    key_norm: Literal["softmax", "l2", "none"] | None = "softmax"
    query_softmax: bool = False
    batch_norm: bool = True
    multi_head: bool = False
    embedding_std: Deviation | Literal["unit"] = 1.0
    position_bias: bool = False
    share_positions: bool = False
    backend: str = "auto"


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(SpatialOptions):
    """What every family has.

    Attributes:
        num_classes: outputs of the classifier; 0 for none: the network returns its features, which are not scores.
        in_chans: channels of the image.
        image_size: the size it is meant for, and the largest one where a layer sees the whole input.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block, growing linearly from 0 in the first.
        global_pool: "avg", "max", "avgmax" (their mean), "catavgmax" (both, twice the features), or "" to keep the map
            (then without a classifier).
    """

    num_classes: Annotated[int, Bounds(0, MOST_CLASSES)] = 1000
    in_chans: Count = 3
    image_size: Side | tuple[Side, Side] = 224
    drop_rate: Rate = 0.0
    drop_path_rate: Rate = 0.0
    global_pool: Literal["avg", "max", "avgmax", "catavgmax", ""] = "avg"

    def __post_init__(self) -> None:
        check_fields(self)  # JSON and command lines bring lists: they become tuples
        scope = tuple(None if s == "global" else s for s in self.scope) if isinstance(self.scope, tuple) else self.scope
        object.__setattr__(self, "scope", None if scope == "global" else scope)
        object.__setattr__(self, "key_norm", None if self.key_norm == "none" else self.key_norm)
        if not self.global_pool and self.num_classes:
            raise ValueError("global_pool='' keeps the map, which no classifier can take: also pass num_classes=0")
        for name in ("drop_rate", "drop_path_rate"):
            if getattr(self, name) == 1:
                raise ValueError(f"{name}=1 would drop everything: it must be below 1")

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
            and a strided one in place of the pooling (ResNet-RS); "small": one 3x3, nothing is made smaller;
            "tiered": as "deep", with 24, 32 and 64 channels in place of 32, 32 and 64 (timm's ResNet-T).
        shortcut: "conv": a strided 1x1 where a stage makes the map smaller; "pool": 2x2 average pooling and a
            1x1 (ResNet-D).
        se: squeeze-and-excitation in convolution blocks, for all stages or each one; never with another layer.
        se_reduction: hidden width of SE is the block's output / se_reduction.
        placement: for each stage "C" (convolutions), "L" (the `layer` in every block) or the blocks that have it,
            counted from 1: "CCLL", or ("C", "C", (6, 12, 18), "L").
        activation: of the stem and the blocks.
        blur: "stem": the pooling of the stem (or the convolution in its place) keeps the resolution, and a 3x3 binomial
            filter with stride 2 follows; "all": the same for strided 3x3 convolutions of blocks. This reduces aliasing
            (Zhang 2019).
        block_pool: windows of the average pooling that follows the `layer` where a block makes the map smaller.
        output_stride: 16 or 8: no stage makes the map smaller than this fraction of the image. Strides beyond it are
            left out, and convolutions and scopes behind them are dilated, so that weights of the usual network fit:
            each position sees what it sees there (content lambdas see all positions of the larger map).
        stride_in: the layer of a block that makes the map smaller: the 3x3 (or the `layer` in its place), or the first
            1x1, as in the first ResNets and Keras' (no pooling follows the `layer` then).
        norm_eps: added to the variance in all batch norms.
    """

    depths: tuple[Blocks, Blocks, Blocks, Blocks]
    widths: tuple[Count, Count, Count, Count] = (64, 128, 256, 512)
    stem: Literal["vanilla", "deep", "tiered", "strided", "small"] = "vanilla"
    shortcut: Literal["conv", "pool"] = "conv"
    se: bool | tuple[bool, bool, bool, bool] = False
    se_reduction: Count = 16
    placement: Placement = "CCCC"
    activation: Activation = "relu"
    blur: Literal["none", "stem", "all"] = "none"
    block_pool: Literal["3x3", "2x2"] = "3x3"
    output_stride: OutputStride = 32
    stride_in: Literal["3x3", "1x1"] = "3x3"
    norm_eps: NormEps = 1e-5


@dataclass(frozen=True, kw_only=True)
class MobileNetConfig(NetworkConfig):
    """MobileNet-v2. `placement` names the inverted bottlenecks (1 to 17) that become lightweight lambda blocks.

    `output_stride` is as in ResNetConfig.
    """

    placement: tuple[Blocks, ...] = ()
    output_stride: OutputStride = 32


@dataclass(frozen=True, kw_only=True)
class PatchConfig(NetworkConfig):
    """A lambda network on patches: one convolution cuts them, all blocks are alike.

    Attributes:
        patch: the side of a patch, in pixels.
        width: channels.
        depth: blocks, each with one lambda layer and one two-layer perceptron.
        expansion: hidden width of the perceptron / width.
    """

    patch: Side = 16
    width: Count
    depth: Blocks
    expansion: Count = 4


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
    depths: tuple[Blocks, Blocks, Blocks, Blocks, Blocks]
    widths: tuple[Count, Count, Count, Count, Count] = (64, 256, 512, 1024, 2048)
