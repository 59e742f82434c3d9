"""Pieces that the families share."""

from torch import Tensor, nn

from lambdanets.layers.pool import AveragePool
from lambdanets.models.config import Activation


def conv(channels: int, out_channels: int, size: int = 1, *, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias that makes the map smaller by `stride`, rounded up; He initialisation."""
    layer = nn.Conv2d(channels, out_channels, size, stride, padding=size // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def activation(kind: Activation) -> nn.Module:
    if kind == "gelu":
        return nn.GELU()
    return {"relu": nn.ReLU, "silu": nn.SiLU, "mish": nn.Mish}[kind](inplace=True)


def blur_by_half() -> nn.Module:
    """The 3x3 binomial filter with stride 2: 2x2 averages of 2x2 averages, where pixels outside do not count."""
    return nn.Sequential(AveragePool(2, 1, padding=1, count_include_pad=False), AveragePool(2, 2))


def zero_gamma(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """The last norm of a residual branch: the block starts as the identity, which the paper found important."""
    nn.init.zeros_(norm.weight)
    return norm


class DropPath(nn.Module):
    """Stochastic depth: in training drops the branch of an example with probability `rate`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        keep = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def drop_path_rates(rate: float, blocks: int) -> list[float]:
    """Growing linearly from 0 in the first block to `rate` in the last."""
    return [rate * i / max(blocks - 1, 1) for i in range(blocks)]


def smaller(size: tuple[int, int], stride: int) -> tuple[int, int]:
    """The size of a map after a layer with this stride: every layer here rounds up."""
    return -(-size[0] // stride), -(-size[1] // stride)
