"""Lambda networks on patches, which the paper suggests: a patch embedding, then blocks at a single resolution."""

from collections.abc import Iterable

from torch import Tensor, nn

from lambdanets.layers import LambdaLayer2d, RelativePositions
from lambdanets.models.blocks import DropPath, conv, drop_path_rates, smaller, zero_gamma
from lambdanets.models.config import PatchConfig
from lambdanets.models.network import Network
from lambdanets.models.spatial import scope_of_stage, spatial_layer

STAGES = 4  # of equal depth, for `feature_info`


class Branch(nn.Module):
    """A residual branch, x + norm(layers(norm(x))), whose last norm starts at zero as in the paper's bottlenecks.

    The second norm is needed because the output of a lambda layer is initially about 100 times as large as its input.
    """

    def __init__(self, width: int, layers: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(width)
        self.layers = layers
        self.norm2 = zero_gamma(nn.BatchNorm2d(width))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.norm2(self.layers(self.norm1(x))))


class PatchNetwork(Network):
    """A lambda network on patches. Its four stages are quarters of the depth, all at the same resolution.

    Args:
        config: the configuration; `create_model` makes it from a name.

    Shape:
        input: [B, in_chans, height, width]
        output: [B, num_classes]

    >>> import torch
    >>> from lambdanets.models import PatchConfig, PatchNetwork
    >>> network = PatchNetwork(PatchConfig(width=64, depth=4, patch=8, image_size=32, num_classes=10))
    >>> network(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    classifier_name = "head"
    depth_patterns = (r"^patch_embed\.", r"^blocks\.(\d+)")

    @classmethod
    def first_conv_of(cls, config: PatchConfig) -> str:
        return "patch_embed"

    @classmethod
    def reduction_of(cls, config: PatchConfig) -> int:
        return config.patch

    def __init__(self, config: PatchConfig) -> None:
        super().__init__(config)
        self.patch, width = config.patch, config.width
        if config.depth < STAGES:
            raise ValueError(f"depth must be at least {STAGES}, got {config.depth}")
        self.patch_embed = nn.Conv2d(config.in_chans, width, config.patch, config.patch)
        size = smaller(config.image_grid, config.patch)
        scope = scope_of_stage(config.scope, 0, 1)
        blocks: list[nn.Module] = []
        shared: RelativePositions | None = None
        for rate in drop_path_rates(config.drop_path_rate, config.depth):
            spatial = spatial_layer(width, config, scope, size, shared)
            if config.share_positions and isinstance(spatial, LambdaLayer2d):
                shared = spatial.positions
            hidden = width * config.expansion
            perceptron = nn.Sequential(conv(width, hidden), nn.BatchNorm2d(hidden), nn.GELU(), conv(hidden, width))
            blocks.append(nn.Sequential(Branch(width, spatial, rate), Branch(width, perceptron, rate)))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(width)
        self.ends = [config.depth * (i + 1) // STAGES for i in range(STAGES)]
        for end in self.ends:
            info = {"num_chs": width, "reduction": config.patch, "module": f"blocks.{end - 1}"}
            self.feature_info.append(info)
        self.feature_info[-1]["module"] = "norm"
        self.finish(width)

    def forward_stage(self, stage: int, x: Tensor) -> Tensor:
        if stage == 0:  # pad with zeros to whole patches
            x = self.patch_embed(nn.functional.pad(x, [0, -x.shape[3] % self.patch, 0, -x.shape[2] % self.patch]))
        for block in self.blocks[self.ends[stage - 1] if stage else 0 : self.ends[stage]]:
            x = self.run_block(block, x)
        return self.norm(x) if stage == STAGES - 1 else x

    def residual_blocks(self) -> Iterable[tuple[str, nn.Module]]:
        for i, (mixing, perceptron) in enumerate(self.blocks):  # type: ignore[misc]
            yield f"blocks.{i}.0", mixing
            yield f"blocks.{i}.1", perceptron

    def keep_stages(self, stages: int) -> None:
        self.blocks = self.blocks[: self.ends[stages - 1]]
        if stages < STAGES:
            self.norm = nn.Identity()
