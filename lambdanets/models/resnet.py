"""ResNets with bottleneck blocks: ResNet-v1, -D, -RS, and the paper's lambda and hybrid networks.

Parameters have the names of torchvision and timm, so that their weights load.
"""

from collections.abc import Iterable
from math import prod
from typing import Literal

from torch import Tensor, nn

from lambdanets.layers import LambdaLayer2d, SqueezeExcitation2d
from lambdanets.models.blocks import (
    DropPath,
    Step,
    Steps,
    activation,
    average_by_half,
    blur_by_half,
    conv,
    drop_path_rates,
    smaller,
    zero_gamma,
)
from lambdanets.models.config import Activation, Placement, ResNetConfig
from lambdanets.models.network import Network
from lambdanets.models.spatial import pool_behind, scope_of_stage, spatial_layer

EXPANSION = 4  # output channels of a block divided by its width
STAGES = 4
# Strides of the convolutions and of the pooling
STEMS = {"vanilla": (2, 2), "deep": (2, 2), "tiered": (2, 2), "strided": (2, 2), "small": (1, 1)}


class Bottleneck(nn.Module):
    """A bottleneck block: 1x1 convolution, spatial layer, 1x1 convolution, and a shortcut.

    A 3x3 convolution has the stride of the block. Any other `spatial` layer works at the input resolution and is
    followed by average pooling, which lambda layers with `downsample="avg"` include.

    Args:
        channels: number of input channels.
        width: number of channels of the spatial layer; the block has 4 * width output channels.
        stride: stride of the block, 1 or 2.
        dilation: dilation of the 3x3 convolution.
        left_out: omit the stride, so that the block keeps the resolution (`output_stride`).
        spatial: layer that replaces the 3x3 convolution, width -> width; None for the convolution.
        shortcut: "conv" or "pool", see `ResNetConfig`.
        se: reduction of squeeze-and-excitation; None for none.
        drop_path: rate of stochastic depth.
        act: activation.
        blur: replace the stride of the 3x3 convolution by a binomial filter with this stride.
        window: window of the average pooling after `spatial`.
        stride_in: the strided layer: "3x3", or "1x1" for the first convolution, with the spatial layer at the output
            resolution.

    Shape:
        input: [B, channels, height, width]
        output: [B, 4 * width, height / stride, width / stride], rounded up

    >>> import torch
    >>> from lambdanets import LambdaLayer2d
    >>> from lambdanets.models import Bottleneck
    >>> block = Bottleneck(64, 32, stride=2, spatial=LambdaLayer2d(32))
    >>> block(torch.randn(1, 64, 16, 16)).shape
    torch.Size([1, 128, 8, 8])
    """

    def __init__(
        self,
        channels: int,
        width: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        left_out: bool = False,
        spatial: nn.Module | None = None,
        shortcut: str = "conv",
        se: int | None = None,
        drop_path: float = 0.0,
        act: Activation = "relu",
        blur: bool = False,
        window: Literal[2, 3] = 3,
        stride_in: Literal["3x3", "1x1"] = "3x3",
    ) -> None:
        super().__init__()
        out_channels = width * EXPANSION
        step = Step(stride, dilation, left_out)
        inside = step.after if stride_in == "1x1" else step
        blur = blur and spatial is None and step.stride > 1
        self.conv1 = conv(channels, width, stride=step.kept if stride_in == "1x1" else 1)
        self.bn1 = nn.BatchNorm2d(width)
        if spatial is None:
            self.conv2 = conv(width, width, 3, stride=1 if blur else inside.kept, dilation=inside.dilation)
        else:
            self.conv2 = spatial
        self.pool = nn.Identity() if spatial is None else pool_behind(spatial, inside, window)
        if blur:
            self.pool = blur_by_half()
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, out_channels)
        self.bn3 = zero_gamma(nn.BatchNorm2d(out_channels))
        self.se = nn.Identity() if se is None else SqueezeExcitation2d(out_channels, reduction=se)
        self.act = activation(act)
        self.drop_path = DropPath(drop_path)
        self.downsample = None
        if step.stride > 1 or channels != out_channels:
            self.downsample = make_shortcut(channels, out_channels, step, shortcut)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.act(self.bn1(self.conv1(x)))
        x = self.act(self.bn2(self.pool(self.conv2(x))))
        x = self.se(self.bn3(self.conv3(x)))
        return self.act(self.drop_path(x) + shortcut)


def make_shortcut(channels: int, out_channels: int, step: Step, kind: str) -> nn.Sequential:
    if kind == "conv":
        return nn.Sequential(conv(channels, out_channels, stride=step.kept), nn.BatchNorm2d(out_channels))
    if kind == "pool":
        pool = average_by_half(2, step)
        return nn.Sequential(pool, conv(channels, out_channels), nn.BatchNorm2d(out_channels))
    raise ValueError(f"unknown shortcut {kind!r}; choose one of 'conv', 'pool'")


def make_stem(config: ResNetConfig) -> tuple[nn.Module, nn.Module]:
    """Return the convolutions before bn1, and the pooling after it."""
    kind, in_chans, width = config.stem, config.in_chans, config.widths[0]
    if kind not in STEMS:
        raise ValueError(f"unknown stem {kind!r}; choose one of {', '.join(map(repr, STEMS))}")
    blur = config.blur != "none"
    pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), blur_by_half()) if blur else nn.MaxPool2d(3, 2, padding=1)
    if kind == "small":
        if config.blur == "stem":
            raise ValueError("blur='stem' has no effect with stem='small', which keeps the resolution: use blur='all'")
        return conv(in_chans, width, 3), nn.Identity()
    if kind == "vanilla":
        return conv(in_chans, width, 7, stride=2), pool
    half = width // 2
    first = 3 * width // 8 if kind == "tiered" else half
    convs = nn.Sequential(
        conv(in_chans, first, 3, stride=2),
        nn.BatchNorm2d(first),
        activation(config.activation),
        conv(first, half, 3),
        nn.BatchNorm2d(half),
        activation(config.activation),
        conv(half, width, 3),
    )
    if kind == "strided":
        strided = conv(width, width, 3, stride=1 if blur else 2)
        pool = nn.Sequential(strided, nn.BatchNorm2d(width), activation(config.activation))
        if blur:
            pool.append(blur_by_half())
    return convs, pool


def make_stage(
    config: ResNetConfig, i: int, channels: int, steps: Steps, size: tuple[int, int], rates: list[float]
) -> nn.Sequential:
    """Build stage i (0 is c2) for maps of `size`, with one block for each stochastic depth rate."""
    width = config.widths[i]
    replaced = blocks_of_stage(config.placement, i, len(rates))
    scope = scope_of_stage(config.scope, i, STAGES)
    se = config.se if isinstance(config.se, bool) else config.se[i]
    blocks, shared = [], None
    window = 3 if config.block_pool == "3x3" else 2
    for number, rate in enumerate(rates, start=1):
        spatial = None
        step = steps.take(2 if i > 0 and number == 1 else 1)
        if number in replaced:
            inside, seen = (step.after, smaller(size, step.kept)) if config.stride_in == "1x1" else (step, size)
            pooled = inside.kept > 1 and window == 3
            spatial = spatial_layer(width, config, scope, seen, shared, downsample=pooled, dilation=inside.dilation)
            if config.share_positions and isinstance(spatial, LambdaLayer2d):
                shared = spatial.positions
        blocks.append(
            Bottleneck(
                channels,
                width,
                stride=step.stride,
                dilation=step.dilation,
                left_out=step.left_out,
                spatial=spatial,
                shortcut=config.shortcut,
                se=config.se_reduction if se and spatial is None else None,
                drop_path=rate,
                act=config.activation,
                blur=config.blur == "all",
                window=window,
                stride_in=config.stride_in,
            )
        )
        size, channels = smaller(size, step.kept), width * EXPANSION
    return nn.Sequential(*blocks)


class ResNet(Network):
    """A ResNet with bottleneck blocks. Stage 0 is the stem; stages 1 to 4 are c2 to c5.

    Args:
        config: the configuration; `create_model` makes it from a name.

    Shape:
        input: [B, in_chans, height, width]
        output: [B, num_classes]

    >>> import torch
    >>> from lambdanets.models import ResNet, ResNetConfig
    >>> network = ResNet(ResNetConfig(depths=(1, 1, 1, 1), placement="CCLL", num_classes=10))
    >>> network(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 10])
    """

    depth_patterns = (r"^(?:conv1|bn1|maxpool)\.", r"^layer(\d+)\.(\d+)")

    @classmethod
    def first_conv_of(cls, config: ResNetConfig) -> str:
        return "conv1" if config.stem in ("vanilla", "small") else "conv1.0"

    @classmethod
    def reduction_of(cls, config: ResNetConfig) -> int:
        return min(prod(STEMS[config.stem]) * 2 ** (STAGES - 1), config.output_stride)

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        stem = config.widths[0]
        if config.blur == "all" and config.output_stride < 32:
            raise ValueError(f"blur='all' needs output_stride=32, got {config.output_stride}")
        if config.blur == "all" and config.stride_in == "1x1":
            raise ValueError("blur='all' needs stride_in='3x3': it replaces the stride of 3x3 convolutions")
        self.conv1, self.maxpool = make_stem(config)
        self.bn1 = nn.BatchNorm2d(stem)
        self.act1 = activation(config.activation)
        first, second = STEMS[config.stem]
        size = smaller(smaller(config.image_grid, first), second)
        reduction, channels = first, stem
        self.feature_info.append({"num_chs": channels, "reduction": reduction, "module": "act1"})
        steps = Steps(first * second, config.output_stride)
        rates = iter(drop_path_rates(config.drop_path_rate, sum(config.depths)))
        for i, (depth, width) in enumerate(zip(config.depths, config.widths, strict=True)):
            before = steps.reduction
            stage = make_stage(config, i, channels, steps, size, [next(rates) for _ in range(depth)])
            setattr(self, f"layer{i + 1}", stage)
            size, channels = smaller(size, steps.reduction // before), width * EXPANSION
            self.feature_info.append({"num_chs": channels, "reduction": steps.reduction, "module": f"layer{i + 1}"})
        self.finish(channels)
        if config.norm_eps != ResNetConfig.norm_eps:  # keep the eps of layers given as functions by default
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eps = config.norm_eps

    def forward_stage(self, stage: int, x: Tensor) -> Tensor:
        if stage == 0:
            return self.act1(self.bn1(self.conv1(x)))
        if stage == 1:
            x = self.maxpool(x)
        blocks = getattr(self, f"layer{stage}")
        if not self.grad_checkpointing:
            return blocks(x)  # call the stage itself, so that its hooks run
        for block in blocks:
            x = self.run_block(block, x)
        return x

    def residual_blocks(self) -> Iterable[tuple[str, nn.Module]]:
        for i in range(1, STAGES + 1):
            for j, block in enumerate(getattr(self, f"layer{i}")):
                yield f"layer{i}.{j}", block

    def keep_stages(self, stages: int) -> None:
        for i in range(stages, STAGES + 1):
            if i == 1:
                self.maxpool = nn.Identity()
            setattr(self, f"layer{i}", nn.Sequential())


def blocks_of_stage(placement: Placement, stage: int, depth: int) -> frozenset[int]:
    """Return the numbers of the blocks of a stage, counted from 1, in which the `layer` replaces the convolution."""
    if not isinstance(placement, str | tuple) or len(placement) != STAGES:
        raise ValueError(f"placement must name {STAGES} stages, for example 'CCLL', got {placement!r}")
    chosen = placement[stage]
    if chosen == "C":
        return frozenset()
    if chosen == "L":
        return frozenset(range(1, depth + 1))
    if not isinstance(chosen, tuple) or not all(isinstance(i, int) and 1 <= i <= depth for i in chosen):
        raise ValueError(
            f"placement of stage c{stage + 2} must be 'C', 'L' or block numbers from 1 to {depth}, got {chosen!r}"
        )
    return frozenset(chosen)
