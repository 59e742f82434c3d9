"""Lambda networks on patches, which the paper suggests: a convolution cuts patches, all blocks are alike."""

from collections.abc import Iterable

from torch import Tensor, nn

from lambdanets.layers import LambdaLayer2d, RelativePositions
from lambdanets.models.blocks import DropPath, conv, drop_path_rates, smaller, zero_gamma
from lambdanets.models.config import PatchConfig
from lambdanets.models.network import Network
from lambdanets.models.spatial import scope_of_stage, spatial_layer

STAGES = 4  # of equal depth, only to name features


class Branch(nn.Module):
    """x + norm(layers(norm(x))): the last norm starts at zero, as in the paper's bottlenecks.

    The norm after is needed: at initialisation a lambda layer's output is some hundred times its input.
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
    """A network of `PatchConfig`; its four stages are quarters of the depth, all at the same resolution."""

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
            raise ValueError(f"depth={config.depth}: at least {STAGES} blocks are needed")
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
        if stage == 0:  # pixels outside are zero, so that any size has whole patches
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
