"""Parts of networks that several families use."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from lambdanets.layers.pool import AveragePool
from lambdanets.models.config import Activation


@dataclass(frozen=True)
class Step:
    """How a block changes the resolution.

    Attributes:
        stride: nominal stride of the block, 1 or 2.
        dilation: dilation of its convolution or scope.
        left_out: whether the stride is omitted (`output_stride`), so that the resolution stays and pooling slides.
    """

    stride: int = 1
    dilation: int = 1
    left_out: bool = False

    @property
    def kept(self) -> int:
        """The actual stride."""
        return 1 if self.left_out else self.stride

    @property
    def after(self) -> "Step":
        """The step of a layer behind the one that takes the stride."""
        return Step(1, self.dilation * (self.stride if self.left_out else 1))


class Steps:
    """The steps of a network's blocks in order, starting from a map with the given `reduction`."""

    def __init__(self, reduction: int, output_stride: int) -> None:
        self.reduction, self.output_stride, self.dilation = reduction, output_stride, 1

    def take(self, stride: int) -> Step:
        left_out = stride > 1 and self.reduction >= self.output_stride
        step = Step(stride, self.dilation, left_out)
        if left_out:  # the dilation applies to the blocks after this one
            self.dilation *= stride
        self.reduction *= step.kept
        return step


def conv(
    channels: int, out_channels: int, size: int = 1, *, stride: int = 1, groups: int = 1, dilation: int = 1
) -> nn.Conv2d:
    """Return a convolution without bias and with He initialisation; its output size is size / stride, rounded up."""
    padding = size // 2 * dilation
    layer = nn.Conv2d(channels, out_channels, size, stride, padding, dilation, groups=groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def activation(kind: Activation) -> nn.Module:
    if kind == "gelu":
        return nn.GELU()
    return {"relu": nn.ReLU, "silu": nn.SiLU, "mish": nn.Mish}[kind](inplace=True)


def blur_by_half() -> nn.Module:
    """Return a 3x3 binomial filter with stride 2, made of two 2x2 average poolings that ignore padding."""
    return nn.Sequential(AveragePool(2, 1, padding=1, count_include_pad=False), AveragePool(2, 2))


def zero_gamma(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    """Set the weight of a residual branch's last norm to zero, so that the block starts as the identity (paper)."""
    nn.init.zeros_(norm.weight)
    return norm


def average_by_half(window: Literal[2, 3], step: Step) -> nn.Module:
    """Return average pooling with the stride of a block: 3x3 with zero padding, or 2x2 that rounds odd sizes up."""
    if step.stride == 1:
        return nn.Identity()
    if step.left_out:
        return SlidingAverage(window, step.dilation)
    if window == 3:
        return AveragePool(3, step.stride, padding=1)
    return AveragePool(2, step.stride, ceil_mode=True, count_include_pad=False)


class SlidingAverage(nn.Module):
    """Average pooling with stride 1 and a dilated window, which replaces `average_by_half` if a stride is omitted."""

    def __init__(self, window: Literal[2, 3], dilation: int) -> None:
        super().__init__()
        self.window, self.dilation = window, dilation

    def forward(self, x: Tensor) -> Tensor:
        d, (height, width) = self.dilation, (x.shape[2], x.shape[3])
        if self.window == 3:
            x = nn.functional.pad(x, [d, d, d, d])
        else:  # replicated borders leave the mean of the inside unchanged
            x = nn.functional.pad(x, [0, d, 0, d], mode="replicate")
        places = range(0, self.window * d, d)
        rows = sum(x[:, :, i : i + height] for i in places)
        return sum(rows[:, :, :, i : i + width] for i in places) / self.window**2  # type: ignore[index, return-value]

    def extra_repr(self) -> str:
        return f"window={self.window}, dilation={self.dilation}"


class DropPath(nn.Module):
    """Stochastic depth: in training, drop the residual branch of an example with probability `rate`."""

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
    """Return the drop rate of each block, which increases linearly from 0 in the first block to `rate` in the last."""
    return [rate * i / max(blocks - 1, 1) for i in range(blocks)]


def smaller(size: tuple[int, int], stride: int) -> tuple[int, int]:
    """Return the size of a map after a layer with this stride, rounded up."""
    return -(-size[0] // stride), -(-size[1] // stride)
