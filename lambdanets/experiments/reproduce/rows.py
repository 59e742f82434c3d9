"""The rows of the paper's tables. Numbers are strings, which keep the printed precision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OtherReading:
    """Another reading of the paper that gives a printed number: other arguments, or another calculation.

    Attributes:
        text: the reading in words.
        arguments: arguments of `create_model` that replace those of the row.
        value: the number in the unit of the row, if no network gives it.

    >>> from lambdanets.experiments.reproduce import ROWS
    >>> next(row for row in ROWS if row.label == "23x23").reading.text
    'lambda layers in the last three stages; the caption says two'
    """

    text: str
    arguments: Mapping[str, Any] | None = None
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table.

    Attributes:
        table: label of the table in the paper's source.
        label: name of the row in the paper.
        model, arguments: the network as the paper describes it, for `create_model`; None if this package lacks it.
        image_size: height and width in pixels; None where the paper does not specify it (224).
        params: parameters in millions.
        flops: FLOPs in units of 1e9.
        memory: memory in GB of 2^30 bytes.
        memory_bytes: our number for it, in bytes.
        units: units of params, flops or memory, where they differ from these.
        infer, train: examples per second on 8 TPUv3 cores: inference in float32 (pseudo-labels: as printed), training.
        latency: seconds of a training step for 1024 images on 8 TPUv3 cores in bfloat16.
        top1, pseudo_top1: ImageNet top-1 accuracy in percent, supervised and with pseudo-labels.
        gain: gain in top-1 points over a convolutional baseline, as printed; cited rows have their own baselines.
        speedups: speed-up of the first network of the table over this one for infer and train, as printed.
        space, our_space: space complexity of the interactions, as printed and according to us.
        counted: quantities that we count although the paper does not print them.
        cited: the paper that the numbers come from, if it is another one.
        reading: another reading of the paper that gives a number that does not match otherwise.
        reason: explanation of a number that does not match.
        remark: further explanation of the row.

    >>> from lambdanets.experiments.reproduce import ROWS
    >>> row = next(row for row in ROWS if row.label == "Lambda layer")
    >>> row.model, row.arguments, row.params, row.top1
    ('resnet50', {'placement': 'LLLL'}, '15.0', '78.4')
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
    """A row of the table of Mask R-CNN on COCO.

    Attributes:
        label: name of the row in the paper.
        model, arguments: the backbone, for `create_model`.
        box, mask: average precision of boxes and masks.
        box_sizes, mask_sizes: average precision of small, medium and large objects.
        table: label of the table in the paper's source.

    >>> from lambdanets.experiments.reproduce import DETECTION
    >>> DETECTION[0].label, DETECTION[0].box, DETECTION[0].box_sizes
    ('ResNet-101', '48.2', ('29.9', '50.9', '64.9'))
    """

    label: str
    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    box: str
    box_sizes: tuple[str, str, str]
    mask: str
    mask_sizes: tuple[str, str, str]
    table: str = "tab:detection"
