"""What a row of the paper's tables is, as data. Numbers stay strings: how they are printed says how exact they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OtherReading:
    """What a printed number fits, where it does not fit what is written: other arguments, or another calculation."""

    text: str
    arguments: Mapping[str, Any] | None = None
    value: float | None = None  # in the unit of the row


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table.

    Attributes:
        table: its label in the paper's source.
        label: what the paper calls the row.
        model, arguments: the network as it is written, for `create_model`; None where we have none.
        image_size: pixels; None where the paper says nothing, which is 224.
        params: in millions.
        flops: in units of 1e9.
        memory: in GB of 2^30 bytes; `memory_bytes` is ours.
        units: of params, flops or memory, where another one is printed.
        infer, train: examples per second on 8 TPUv3 cores: inference in float32 (pseudo-labels: as printed), training.
        latency: seconds of a training step for 1024 images on 8 TPUv3 cores, bfloat16.
        top1, pseudo_top1: ImageNet accuracy, supervised and with pseudo-labels, in percent.
        gain: points of top-1 over a convolutional baseline, as printed; cited rows have baselines of their own.
        speedups: of infer and train, as printed: how many times faster the first network of the table is.
        space, our_space: space complexity of the interactions, as printed and as we count it.
        counted: quantities that we count though the paper prints none.
        cited: whose numbers these are, if not the paper's own.
        reading: what a number that does not fit does fit.
        reason: why a number does not fit.
        remark: what else is to be said about the row.
    """

    table: str
    label: str
    model: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    image_size: int | None = None
    params: str | None = None
    flops: str | None = None
    memory: str | None = None
    memory_bytes: int | None = None
    units: Mapping[str, str] = field(default_factory=dict)
    infer: str | None = None
    train: str | None = None
    latency: str | None = None
    top1: str | None = None
    pseudo_top1: str | None = None
    gain: str | None = None
    speedups: Mapping[str, str] = field(default_factory=dict)
    space: str | None = None
    our_space: str | None = None
    counted: tuple[str, ...] = ()
    cited: str | None = None
    reading: OtherReading | None = None
    reason: str | None = None
    remark: str | None = None


@dataclass(frozen=True, kw_only=True)
class DetectionRow:
    """A row of the table of Mask R-CNN on COCO: average precision of boxes and masks, all and small/medium/large."""

    label: str
    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    box: str
    box_sizes: tuple[str, str, str]
    mask: str
    mask_sizes: tuple[str, str, str]
    table: str = "tab:detection"
