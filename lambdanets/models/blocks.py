"""Pieces that the families share."""

from torch import Tensor, nn


def conv(channels: int, out_channels: int, size: int = 1, *, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias that makes the map smaller by `stride`, rounded up; He initialisation."""
    layer = nn.Conv2d(channels, out_channels, size, stride, padding=size // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


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
