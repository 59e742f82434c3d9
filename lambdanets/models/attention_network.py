"""The self-attention networks of Zhao et al. 2020 (SAN), without convolutions larger than 1x1."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from lambdanets.models.blocks import DropPath, conv, drop_path_rates, smaller
from lambdanets.models.config import AttentionNetworkConfig
from lambdanets.models.network import Network
from lambdanets.models.spatial import scope_of_stage, spatial_layer

STAGES = 5


class AttentionBlock(nn.Module):
    """A residual block, x + conv(relu(norm(spatial(relu(norm(x)))))), with a quarter of the width after `spatial`."""

    def __init__(self, width: int, spatial: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width)
        self.spatial = spatial
        self.bn2 = nn.BatchNorm2d(width // 4)
        self.conv = nn.Conv2d(width // 4, width, 1)
        self.act = nn.ReLU(inplace=True)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.conv(self.act(self.bn2(self.spatial(self.act(self.bn1(x)))))))


class AttentionStage(nn.Module):
    """A stage: 2x2 max pooling, a 1x1 convolution to the stage's width, residual blocks, batch norm and ReLU."""

    def __init__(self, channels: int, width: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.conv = conv(channels, width)
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, run_block: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        x = self.conv(self.pool(x))
        for block in self.blocks:
            x = run_block(block, x)
        return self.act(self.bn(x))


class AttentionNetwork(Network):
    """A self-attention network. Its five stages halve the resolution, so the last reduction is 32.

    Args:
        config: the configuration; `create_model` makes it from a name.

    Shape:
        input: [B, in_chans, height, width]
        output: [B, num_classes]

    >>> import torch
    >>> from lambdanets.models import AttentionNetwork, AttentionNetworkConfig
    >>> network = AttentionNetwork(AttentionNetworkConfig(depths=(1, 1, 1, 1, 1), num_classes=10))
    >>> network(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 10])
    """

    depth_patterns = (r"^(?:conv_in|bn_in)\.", r"^stages\.(\d+)")

    @classmethod
    def first_conv_of(cls, config: AttentionNetworkConfig) -> str:
        return "conv_in"

    @classmethod
    def reduction_of(cls, config: AttentionNetworkConfig) -> int:
        return 2**STAGES

    def __init__(self, config: AttentionNetworkConfig) -> None:
        super().__init__(config)
        channels, size = config.widths[0], config.image_grid
        self.conv_in = conv(config.in_chans, channels)
        self.bn_in = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)
        rates = iter(drop_path_rates(config.drop_path_rate, sum(config.depths)))
        stages = []
        for i, (depth, width) in enumerate(zip(config.depths, config.widths, strict=True)):
            size, scope = smaller(size, 2), scope_of_stage(config.scope, i, STAGES)
            blocks: list[nn.Module] = [
                AttentionBlock(width, spatial_layer(width, config, scope, size, out_channels=width // 4), next(rates))
                for _ in range(depth)
            ]
            stages.append(AttentionStage(channels, width, blocks))
            channels = width
            self.feature_info.append({"num_chs": width, "reduction": 2 ** (i + 1), "module": f"stages.{i}"})
        self.stages = nn.Sequential(*stages)
        self.finish(channels)

    def forward_stage(self, stage: int, x: Tensor) -> Tensor:
        if stage == 0:
            x = self.act(self.bn_in(self.conv_in(x)))
        return self.stages[stage](x, self.run_block)

    def residual_blocks(self) -> Iterable[tuple[str, nn.Module]]:
        for i, stage in enumerate(self.stages):
            assert isinstance(stage, AttentionStage)
            for j, block in enumerate(stage.blocks):
                yield f"stages.{i}.blocks.{j}", block

    def keep_stages(self, stages: int) -> None:
        self.stages = self.stages[:stages]
