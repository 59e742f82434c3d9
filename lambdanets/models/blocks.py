"""Pieces that the families share."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from lambdanets.layers.pool import AveragePool
from lambdanets.models.config import Activation


@dataclass(frozen=True)
class Step:
    """How a block changes the resolution.

    Attributes:
        stride: of the block, 1 or 2.
        dilation: of its convolution or scope.
        left_out: whether the stride is left out (`output_stride`): every position stays, and pooling slides.
    """

    stride: int = 1
    dilation: int = 1
    left_out: bool = False

    @property
    def kept(self) -> int:
        """The stride that is taken."""
        return 1 if self.left_out else self.stride

    @property
    def after(self) -> "Step":
        """The step of a layer behind the one that takes the stride."""
        return Step(1, self.dilation * (self.stride if self.left_out else 1))


class Steps:
    """The steps of a network's blocks, one after the other, from a map of `reduction`."""

    def __init__(self, reduction: int, output_stride: int) -> None:
        self.reduction, self.output_stride, self.dilation = reduction, output_stride, 1

    def take(self, stride: int) -> Step:
        left_out = stride > 1 and self.reduction >= self.output_stride
        step = Step(stride, self.dilation, left_out)
        if left_out:  # the block itself still sees the map of before
            self.dilation *= stride
        self.reduction *= step.kept
        return step


def conv(
    channels: int, out_channels: int, size: int = 1, *, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    """A convolution without bias that makes the map smaller by `stride`, rounded up; He initialisation."""
    padding = size // 2 * dilation
    layer = nn.Conv2d(channels, out_channels, size, stride, padding, dilation, groups=groups, bias=False)
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


def average_by_half(window: Literal[2, 3], step: Step) -> nn.Module:
    """Average pooling with the stride of a block: 3x3 with a border of zeros, or 2x2 where an odd map ends in windows
    of one row or column."""
    if step.stride == 1:
        return nn.Identity()
    if step.left_out:
        return SlidingAverage(window, step.dilation)
    if window == 3:
        return AveragePool(3, step.stride, padding=1)
    return AveragePool(2, step.stride, ceil_mode=True, count_include_pad=False)


class SlidingAverage(nn.Module):
    """`average_by_half` with the stride left out: a window at every position, its places `dilation` apart."""

    def __init__(self, window: Literal[2, 3], dilation: int) -> None:
        super().__init__()
        self.window, self.dilation = window, dilation

    def forward(self, x: Tensor) -> Tensor:
        d, (height, width) = self.dilation, (x.shape[2], x.shape[3])
        if self.window == 3:
            x = nn.functional.pad(x, [d, d, d, d])
        else:  # the mean over what is inside
            x = nn.functional.pad(x, [0, d, 0, d], mode="replicate")
        places = range(0, self.window * d, d)
        rows = sum(x[:, :, i : i + height] for i in places)
        return sum(rows[:, :, :, i : i + width] for i in places) / self.window**2  # type: ignore[index, return-value]

    def extra_repr(self) -> str:
        return f"window={self.window}, dilation={self.dilation}"


class DropPath(nn.Module):
    """Stochastic depth: in training drops the branch of an example with probability `rate`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        keep = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def drop_path_rates(rate: float, blocks: int) -> list[float]:
    """Growing linearly from 0 in the first block to `rate` in the last."""
    return [rate * i / max(blocks - 1, 1) for i in range(blocks)]


def smaller(size: tuple[int, int], stride: int) -> tuple[int, int]:
    """The size of a map after a layer with this stride: every layer here rounds up."""
    return -(-size[0] // stride), -(-size[1] // stride)
