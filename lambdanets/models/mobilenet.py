"""MobileNet-v2, and the paper's variant with lightweight lambda blocks. Parameters have torchvision's names."""

from collections.abc import Iterable

from torch import Tensor, nn

from lambdanets.models.blocks import DropPath, Step, Steps, conv, drop_path_rates, smaller
from lambdanets.models.config import MobileNetConfig
from lambdanets.models.network import Network
from lambdanets.models.spatial import pool_behind, scope_of_stage, spatial_layer

STEM, LAST = 32, 1280
# (expansion, channels, stride) of the 17 inverted bottlenecks
BLOCKS = tuple(
    (expansion, channels, stride if i == 0 else 1)
    for expansion, channels, count, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for i in range(count)
)
ENDS = (1, 3, 6, 13, 18)  # the last module of `features` in each stage


def conv_norm_act(
    channels: int, out_channels: int, size: int = 1, *, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Module:
    return nn.Sequential(
        conv(channels, out_channels, size, stride=stride, groups=groups, dilation=dilation),
        nn.BatchNorm2d(out_channels),
        nn.ReLU6(inplace=True),
    )


class InvertedBottleneck(nn.Module):
    """An inverted bottleneck: 1x1 to more channels, depthwise 3x3, 1x1, and a shortcut if the shape does not change."""

    def __init__(self, channels: int, out_channels: int, *, step: Step, expansion: int, drop_path: float) -> None:
        super().__init__()
        width = channels * expansion
        layers = [] if expansion == 1 else [conv_norm_act(channels, width)]
        layers.append(conv_norm_act(width, width, 3, stride=step.kept, groups=width, dilation=step.dilation))
        self.conv = nn.Sequential(*layers, conv(width, out_channels), nn.BatchNorm2d(out_channels))
        self.has_shortcut = step.stride == 1 and channels == out_channels
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.conv(x)) if self.has_shortcut else self.conv(x)


class LightweightBlock(InvertedBottleneck):
    """The paper's lightweight lambda block: 1x1 without expansion, a `spatial` layer, 1x1.

    With a stride, the spatial layer is followed by 3x3 average pooling, or includes it.
    """

    def __init__(self, channels: int, out_channels: int, *, step: Step, spatial: nn.Module, drop_path: float) -> None:
        nn.Module.__init__(self)
        pool = [pool_behind(spatial, step)] if step.stride > 1 else []  # kept as an identity: names do not change
        self.conv = nn.Sequential(
            conv_norm_act(channels, channels),
            nn.Sequential(spatial, *pool, nn.BatchNorm2d(channels), nn.ReLU6(inplace=True)),
            conv(channels, out_channels),
            nn.BatchNorm2d(out_channels),
        )
        self.has_shortcut = step.stride == 1 and channels == out_channels
        self.drop_path = DropPath(drop_path)


class MobileNetV2(Network):
    """MobileNet-v2, optionally with lambda blocks. Its five stages have the reductions 2, 4, 8, 16 and 32.

    Args:
        config: the configuration; `create_model` makes it from a name.

    Shape:
        input: [B, in_chans, height, width]
        output: [B, num_classes]

    >>> import torch
    >>> from lambdanets.models import MobileNetConfig, MobileNetV2
    >>> network = MobileNetV2(MobileNetConfig(placement=(10, 16), num_classes=10))
    >>> network(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 10])
    """

    classifier_name = "classifier"
    depth_patterns = (r"^features\.0\.", r"^features\.(\d+)")

    @classmethod
    def first_conv_of(cls, config: MobileNetConfig) -> str:
        return "features.0.0"

    @classmethod
    def reduction_of(cls, config: MobileNetConfig) -> int:
        return min(32, config.output_stride)

    def __init__(self, config: MobileNetConfig) -> None:
        super().__init__(config)
        chosen = config.placement
        if not isinstance(chosen, tuple) or not all(isinstance(i, int) and 1 <= i <= len(BLOCKS) for i in chosen):
            raise ValueError(f"placement must be block numbers from 1 to {len(BLOCKS)}, got {chosen!r}")
        scope = scope_of_stage(config.scope, 0, 1)
        size, channels, steps = smaller(config.image_grid, 2), STEM, Steps(2, config.output_stride)
        layers = [conv_norm_act(config.in_chans, STEM, 3, stride=2)]
        rates = drop_path_rates(config.drop_path_rate, len(BLOCKS))
        for i, ((expansion, out_channels, stride), rate) in enumerate(zip(BLOCKS, rates, strict=True), start=1):
            step = steps.take(stride)
            if i in config.placement:
                down, dilation = step.kept > 1, step.dilation
                spatial = spatial_layer(channels, config, scope, size, downsample=down, dilation=dilation)
                block = LightweightBlock(channels, out_channels, step=step, spatial=spatial, drop_path=rate)
            else:
                block = InvertedBottleneck(channels, out_channels, step=step, expansion=expansion, drop_path=rate)
            layers.append(block)
            size, channels = smaller(size, step.kept), out_channels
            if i in ENDS:
                self.feature_info.append({"num_chs": channels, "reduction": steps.reduction, "module": f"features.{i}"})
        layers.append(conv_norm_act(channels, LAST))
        self.feature_info.append({"num_chs": LAST, "reduction": steps.reduction, "module": f"features.{ENDS[-1]}"})
        self.features = nn.Sequential(*layers)
        self.finish(LAST)

    def forward_stage(self, stage: int, x: Tensor) -> Tensor:
        for block in self.features[ENDS[stage - 1] + 1 if stage else 0 : ENDS[stage] + 1]:
            x = self.run_block(block, x)
        return x

    def residual_blocks(self) -> Iterable[tuple[str, nn.Module]]:
        for i, block in enumerate(self.features):
            yield f"features.{i}", block

    def keep_stages(self, stages: int) -> None:
        self.features = self.features[: ENDS[stages - 1] + 1]
