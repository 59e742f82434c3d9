"""Configurations of networks. Each named network has one, whose fields `create_model` can change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn

from lambdanets.typed import LARGEST_IMAGE, Bounds, Deviation, Side, check_fields

MOST = 2**16  # of channels, heads and depths: limits the memory that a configuration from a file can request
MOST_BLOCKS = 200  # per stage; the paper's deepest stage has 87
MOST_CLASSES = 10**7

Count = Annotated[int, Bounds(1, MOST)]
Blocks = Annotated[int, Bounds(1, MOST_BLOCKS)]
ScopeSide = Annotated[int, Bounds(1, 2 * LARGEST_IMAGE)]
Rate = Annotated[float, Bounds(0, 1)]
Scope = ScopeSide | tuple[ScopeSide, ScopeSide] | Literal["global"] | None  # None and "global" mean the whole input
ScopePerStage = Scope | Literal["auto"] | tuple[Scope, ...]
BlocksOfStage = str | tuple[Blocks, ...]
Placement = str | tuple[BlocksOfStage, ...]
Activation = Literal["relu", "silu", "mish", "gelu"]
OutputStride = Literal[8, 16, 32]
NormEps = Annotated[float, Bounds(1e-12, 1)]


@dataclass(frozen=True, kw_only=True)
class SpatialOptions:
    """Options of the layer that replaces spatial convolutions, including the paper's ablations.

    Attributes:
        layer: a key of `lambdanets.models.LAYERS`, or a function that takes the number of channels and returns a module
            which keeps the size of its input.
        key_depth, heads: key depth and number of heads; None is the default of the layer (lambda layers: 16 and 4).
        intra_depth: intra-depth u.
        scope: size of the local context: an int, (height, width), None or "global" for the whole input (`image_size` is
            then the largest image size), or a tuple with one of these for each stage. "auto" is the default of the
            layer (lambda layers: 23, or 7 with intra_depth > 1).
        content, position: whether lambda layers have content lambdas and position lambdas.
        key_norm: normalisation of keys: "softmax", "l2", or None ("none" on the command line and in timm).
        query_softmax: apply softmax to queries.
        batch_norm: apply batch norm to queries and values.
        multi_head: use keys and values per head instead of multi-query lambdas.
        embedding_std: standard deviation of initial position embeddings; the paper's is 1.0. "unit" is the default of
            `LambdaLayer2d`.
        position_bias: add a bias to the position lambdas, as timm does.
        share_positions: share one table of position embeddings between all lambda layers of a stage.
        backend: implementation of the lambda operation, see `lambdanets.ops`.

    >>> from lambdanets.models import SpatialOptions
    >>> SpatialOptions(scope=7, intra_depth=4).scope
    7
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
    """Fields of the configurations of all families.

    The other fields are those of `SpatialOptions`.

    Attributes:
        num_classes: number of classes; 0 removes the classifier, and the network returns features.
        in_chans: number of image channels.
        image_size: default image size, an int or (height, width); the largest size for layers that see the whole input.
        drop_rate: dropout rate before the classifier.
        drop_path_rate: stochastic depth rate of the last block, increasing linearly from 0 in the first block.
        global_pool: "avg", "max", "avgmax" (their mean), "catavgmax" (both, concatenated), or "" to return the map,
            which needs num_classes=0.

    >>> from lambdanets.models import configure
    >>> configure("lambda_resnet50", image_size=(192, 256)).image_grid
    (192, 256)
    """

    num_classes: Annotated[int, Bounds(0, MOST_CLASSES)] = 1000
    in_chans: Count = 3
    image_size: Side | tuple[Side, Side] = 224
    drop_rate: Rate = 0.0
    drop_path_rate: Rate = 0.0
    global_pool: Literal["avg", "max", "avgmax", "catavgmax", ""] = "avg"

    def __post_init__(self) -> None:
        check_fields(self)  # also converts lists from JSON and the command line to tuples
        scope = tuple(None if s == "global" else s for s in self.scope) if isinstance(self.scope, tuple) else self.scope
        object.__setattr__(self, "scope", None if scope == "global" else scope)
        object.__setattr__(self, "key_norm", None if self.key_norm == "none" else self.key_norm)
        if not self.global_pool and self.num_classes:
            raise ValueError(
                f"global_pool='' returns a map and needs num_classes=0, got num_classes={self.num_classes}"
            )
        for name in ("drop_rate", "drop_path_rate"):
            if getattr(self, name) == 1:
                raise ValueError(f"{name} must be below 1, got 1, which would drop everything")

    @property
    def image_grid(self) -> tuple[int, int]:
        """The image size as (height, width)."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else size


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(NetworkConfig):
    """The configuration of ResNets with bottleneck blocks: ResNet-v1, -D, -RS, and with lambda layers.

    The other fields are those of `NetworkConfig` and `SpatialOptions`.

    Attributes:
        depths: number of blocks in the stages c2 to c5.
        widths: channels inside the blocks of each stage; blocks have four times as many output channels.
        stem: "vanilla": 7x7 convolution and max pooling; "deep": three 3x3 convolutions and max pooling (ResNet-D);
            "strided": three 3x3 convolutions and a strided one instead of pooling (ResNet-RS); "small": one 3x3
            convolution that keeps the resolution; "tiered": like "deep", with 24, 32 and 64 channels instead of 32, 32
            and 64 (timm's ResNet-T).
        shortcut: downsampling in shortcuts: "conv": a strided 1x1 convolution; "pool": 2x2 average pooling and a 1x1
            convolution (ResNet-D).
        se: squeeze-and-excitation, for all stages or each one; only blocks with convolutions have it.
        se_reduction: output channels of a block divided by the hidden width of squeeze-and-excitation.
        placement: for each stage "C" (convolutions), "L" (the `layer` in every block) or the blocks that have it,
            counted from 1: "CCLL", or ("C", "C", (6, 12, 18), "L").
        activation: activation in the stem and the blocks.
        blur: anti-aliasing (Zhang 2019): "stem" replaces the stride of the stem's pooling (or its convolution) by a 3x3
            binomial filter with stride 2; "all" also that of strided 3x3 convolutions in blocks.
        block_pool: window of the average pooling after the `layer` in blocks that reduce the resolution.
        output_stride: largest reduction, 8, 16 or 32. Strides beyond it are omitted, and later convolutions and scopes
            are dilated, so that weights of the network with 32 load and each position sees the same context (content
            lambdas see all positions of the larger map).
        stride_in: the strided layer of a block: the 3x3 convolution (or the `layer` that replaces it), or the first 1x1
            convolution, as in the first ResNets and Keras (then no pooling follows the `layer`).
        norm_eps: eps of all batch norms.

    >>> from lambdanets.models import ResNet, ResNetConfig
    >>> config = ResNetConfig(depths=(1, 1, 1, 1), placement="CCLL", stem="small", num_classes=10)
    >>> sum(parameter.numel() for parameter in ResNet(config).parameters())
    5240554
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
    """The configuration of MobileNet-v2.

    The other fields are those of `NetworkConfig` and `SpatialOptions`.

    Attributes:
        placement: numbers of the inverted bottlenecks (1 to 17) that are replaced by lightweight lambda blocks.
        output_stride: largest reduction, see `ResNetConfig`.

    >>> from lambdanets.models import configure
    >>> configure("lambda_mobilenet_v2").placement
    (10, 16)
    """

    placement: tuple[Blocks, ...] = ()
    output_stride: OutputStride = 32


@dataclass(frozen=True, kw_only=True)
class PatchConfig(NetworkConfig):
    """The configuration of lambda networks on patches: a patch embedding and equal blocks.

    The other fields are those of `NetworkConfig` and `SpatialOptions`.

    Attributes:
        patch: height and width of a patch in pixels.
        width: number of channels.
        depth: number of blocks, each with a lambda layer and a two-layer perceptron.
        expansion: hidden width of the perceptron divided by `width`.

    >>> from lambdanets.models import configure
    >>> configure("lambda_patch_small", patch=8).width
    384
    """

    patch: Side = 16
    width: Count
    depth: Blocks
    expansion: Count = 4


@dataclass(frozen=True, kw_only=True)
class AttentionNetworkConfig(NetworkConfig):
    """The configuration of self-attention networks (Zhao et al. 2020): five stages without spatial convolutions.

    The other fields are those of `NetworkConfig` and `SpatialOptions`.

    Attributes:
        depths: number of blocks in each stage.
        widths: channels of each stage; the `layer` of a block has a quarter of them as output channels.
        layer: "patchwise_attention", "pairwise_attention" or another key of `LAYERS`.

    >>> from lambdanets.models import configure
    >>> configure("san10", layer="pairwise_attention").depths
    (2, 1, 2, 4, 1)
    """

    layer: str | Callable[[int], nn.Module] = "patchwise_attention"
    scope: ScopePerStage = (3, 7, 7, 7, 7)
    depths: tuple[Blocks, Blocks, Blocks, Blocks, Blocks]
    widths: tuple[Count, Count, Count, Count, Count] = (64, 256, 512, 1024, 2048)
