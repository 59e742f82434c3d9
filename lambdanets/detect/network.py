"""torchvision's Mask R-CNN, or Faster R-CNN without masks, with a lambdanets backbone."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.poolers import initLevelMapper

from lambdanets.data.preprocessing import Preprocessing
from lambdanets.data.transforms import normalize
from lambdanets.detect.config import Heads
from lambdanets.detect.padding import Padding, Size, float_output
from lambdanets.detect.transforms import unpacked
from lambdanets.models.network import FeatureNetwork
from lambdanets.models.registry import create_model
from lambdanets.models.stored import only_finite_weights
from lambdanets.train.config import ModelConfig

LEVELS = 4  # stages c2 to c5
NAMES = [str(level) for level in range(LEVELS)]
LEAST_OBJECTNESS = 1e-30  # proposals outside of an image have less


class Backbone(nn.Module):
    """Stages c2 to c5 of a network, and a feature pyramid over them with one more level on top.

    Args:
        body: a network made with `features_only=True, out_indices=4`.
        channels: channels of the pyramid.
        norm: makes the norm layers of the pyramid; None for no norm.

    >>> import torch
    >>> from lambdanets import create_model
    >>> from lambdanets.detect.network import Backbone
    >>> body = create_model("resnet26", features_only=True, out_indices=4)
    >>> backbone = Backbone(body, channels=64, norm=None).eval()
    >>> with torch.no_grad():
    ...     levels = backbone(torch.randn(1, 3, 64, 96))
    >>> [tuple(level.shape[1:]) for level in levels.values()]
    [(64, 16, 24), (64, 8, 12), (64, 4, 6), (64, 2, 3), (64, 1, 2)]
    """

    def __init__(self, body: FeatureNetwork, channels: int, norm: Callable[..., nn.Module] | None) -> None:
        super().__init__()
        self.body = body
        self.fpn = FeaturePyramidNetwork(body.feature_info.channels(), channels, LastLevelMaxPool(), norm)
        self.out_channels = channels

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the maps [B, channels, H / stride, W / stride] of the 5 levels for images [B, 3, H, W]."""
        return self.fpn(OrderedDict(zip(NAMES, self.body(x), strict=True)))


class HeadNorm(nn.BatchNorm2d):
    """Batch norm that accepts an empty batch, for images without proposals."""

    def forward(self, input: Tensor) -> Tensor:
        if len(input):
            return super().forward(input)
        return input * self.weight[:, None, None] + self.bias[:, None, None]  # keeps a gradient for all weights


class Anchors(AnchorGenerator):
    """Anchors at a distance of the level's stride; torchvision derives the distance from the padded size."""

    def __init__(self, sizes: Sequence[float], ratios: Sequence[float], strides: Sequence[int]) -> None:
        super().__init__(tuple((s,) for s in sizes), (tuple(ratios),) * len(sizes))
        self.strides = strides

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        first = feature_maps[0]
        dtype = first.dtype if first.dtype == torch.float64 else torch.float32
        self.set_cell_anchors(dtype, first.device)
        grids = [list(level.shape[-2:]) for level in feature_maps]
        steps: Any = [[stride, stride] for stride in self.strides]
        anchors = torch.cat(self.grid_anchors(grids, steps))
        return [anchors] * len(image_list.image_sizes)


class Proposals(RegionProposalNetwork):
    """Region proposals that ignore anchors in the padding during training."""

    def assign_targets_to_anchors(
        self, anchors: list[Tensor], targets: list[dict[str, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        labels, boxes = [], []
        for anchors_A4, target in zip(anchors, targets, strict=True):
            height, width = target["size"].unbind()
            x, y = (anchors_A4[:, :2] + anchors_A4[:, 2:]).unbind(1)  # twice the centre
            inside_A = (x < 2 * width) & (y < 2 * height)
            (label,), (box,) = super().assign_targets_to_anchors([anchors_A4[inside_A]], [target])
            labels.append(label.new_full((len(anchors_A4),), -1.0).masked_scatter(inside_A, label))
            boxes.append(box.new_zeros(anchors_A4.shape).masked_scatter(inside_A[:, None], box))
        return labels, boxes


class Pooling(MultiScaleRoIAlign):
    """RoIAlign with fixed scales that continues the edge of an image into its padding, as at the edge of the canvas."""

    def __init__(self, strides: Sequence[int], output: int, canonical: float) -> None:
        super().__init__(NAMES, output, 2)
        self.scales: Any = [1 / stride for stride in strides]
        first, last = (round(math.log2(stride)) for stride in (strides[0], strides[-1]))
        # torchvision derives levels from strides that start at 4; ours may start at 1
        self.map_levels: Any = initLevelMapper(first, last, canonical_scale=int(canonical), canonical_level=first + 2)

    def forward(self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[Size]) -> Tensor:
        if not self.training:
            maps = zip(NAMES, self.scales, strict=True)
            x = OrderedDict((name, continued(x[name], image_shapes, scale)) for name, scale in maps)
        return super().forward(x, boxes, image_shapes)


def continued(x: Tensor, sizes: Sequence[Size], scale: float) -> Tensor:
    """Return maps where the last row and column of each image are repeated once into its padding."""
    ends = [(math.ceil(height * scale), math.ceil(width * scale)) for height, width in sizes]
    height, width = x.shape[2:]
    if all(bottom >= height and right >= width for bottom, right in ends):
        return x
    x = x.clone()
    for one, (bottom, right) in zip(x, ends, strict=True):
        if bottom < height:
            one[:, bottom] = one[:, bottom - 1]
        if right < width:
            one[:, :, right] = one[:, :, right - 1]
    return x


class Canvas(nn.Module):
    """Replaces torchvision's resizing: the images of a batch are already padded to one size."""

    def __init__(self, preprocessing: Preprocessing, padding: Padding) -> None:
        super().__init__()
        self.preprocessing, self.padding = preprocessing, padding
        self.sizes: Sequence[Size] | None = None

    def forward(self, images: Tensor, targets: Any = None) -> tuple[ImageList, Any]:
        canvas = (images.shape[2], images.shape[3])
        sizes = list(self.sizes) if self.sizes is not None else [canvas] * len(images)
        self.padding.set(sizes, canvas, images.device)
        return ImageList(self.padding.clear(images), sizes), targets

    def postprocess(self, result: Any, image_shapes: Any, original_image_sizes: Any) -> Any:
        return result


class Detector(GeneralizedRCNN):
    """Mask R-CNN, or Faster R-CNN without masks, for images that are padded to one size.

    `make_detector` builds one. In training mode `forward` returns losses, in evaluation mode detections.

    >>> import torch
    >>> from lambdanets.detect.config import Heads
    >>> from lambdanets.detect.network import make_detector
    >>> from lambdanets.train.config import ModelConfig
    >>> backbone = ModelConfig(name="lambda_resnet_tiny", options=("stem='strided'", "widths=(8,8,16,16)", "scope=7"))
    >>> detector = make_detector(backbone, Heads(channels=16, hidden=32), classes=3, masks=False)
    >>> images = torch.randint(0, 256, (2, 3, 96, 128), dtype=torch.uint8)
    >>> target = {"boxes": torch.tensor([[10.0, 20.0, 50.0, 60.0]]), "labels": torch.tensor([2])}
    >>> losses = detector(images, [target, target])
    >>> sorted(losses)
    ['loss_box_reg', 'loss_classifier', 'loss_objectness', 'loss_rpn_box_reg']
    """

    transform: Canvas
    backbone: Backbone
    roi_heads: RoIHeads

    def __init__(
        self,
        backbone: Backbone,
        rpn: RegionProposalNetwork,
        roi_heads: RoIHeads,
        preprocessing: Preprocessing,
        channels_last: bool = True,
    ) -> None:
        padding = Padding()
        super().__init__(backbone, rpn, roi_heads, Canvas(preprocessing, padding))
        self.channels_last = channels_last
        padding.attach(backbone)
        padding.attach(rpn.head)
        rpn.head.register_forward_hook(padding.forget_outside)
        roi_heads.box_predictor.register_forward_hook(float_output)
        if roi_heads.mask_predictor is not None:
            roi_heads.mask_predictor.register_forward_hook(float_output)

    @property
    def masks(self) -> bool:
        """Whether the detector predicts masks."""
        return self.roi_heads.has_mask()

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        targets: Sequence[dict[str, Tensor]] | None = None,
        sizes: Sequence[Size] | None = None,
    ) -> Any:
        """Return the losses by name in training mode, and a dictionary of detections per image in evaluation mode.

        The N detections of an image have "boxes" [N, 4] (left, top, right, bottom in pixels of the padded image),
        "labels" [N] (from 1), "scores" [N] and, with masks, "masks" [N, 1, 28, 28] (probabilities inside the box).

        Args:
            images: uint8 [B, 3, H, W], each image in the top left corner.
            targets: for each image, "boxes" [N, 4], "labels" [N] and, with masks, "masks" bool [N, H, W] or "packed"
                uint8 [N, H, W / 8]. Required in training mode.
            sizes: height and width of each image without padding; by default (H, W).
        """
        dtype = next(self.parameters()).dtype
        inputs = normalize(images, self.transform.preprocessing, dtype)
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        self.transform.sizes = sizes
        if targets is not None:
            shapes = sizes or [(images.shape[2], images.shape[3])] * len(images)
            sizes_B2 = torch.tensor(shapes, device=images.device)
            targets = [
                self.target(one, size, size_2, dtype)
                for one, size, size_2 in zip(targets, shapes, sizes_B2, strict=True)
            ]
        return super().forward(inputs, targets)  # type: ignore[arg-type]

    def target(self, given: dict[str, Tensor], size: Size, size_2: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the targets of one image for torchvision, with unpacked masks and the size of the image."""
        found = {"boxes": given["boxes"].to(dtype), "labels": given["labels"], "size": size_2}
        if self.masks:
            found["masks"] = unpacked(given["packed"], size[1]) if "packed" in given else given["masks"]
        return found

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the backbone network; the shapes of later stages change with every image."""
        self.backbone.body.compile(*args, **options)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters without weight decay: biases and norms."""
        return {name for name, parameter in self.named_parameters() if parameter.ndim <= 1}


def make_backbone(model: ModelConfig, size: int | Size) -> FeatureNetwork:
    """Build the stages c2 to c5 of a network, with the weights of `model.pretrained` if it is set.

    Args:
        model: the network and its options.
        size: the largest image size, for layers with a global scope.

    >>> from lambdanets.detect.network import make_backbone
    >>> from lambdanets.train.config import ModelConfig
    >>> make_backbone(ModelConfig(name="lambda_resnet50"), 512).feature_info.channels()
    [256, 512, 1024, 2048]
    """
    model.row()  # checks the arguments
    arguments = model.arguments()
    arguments.pop("drop_rate", None)
    if model.pretrained is None or model.image_size is None:
        arguments["image_size"] = size
    with only_finite_weights():
        body = create_model(model.name, model.pretrained or False, features_only=True, out_indices=LEVELS, **arguments)
    reductions = body.feature_info.reduction()
    if any(2 * a != b for a, b in pairwise(reductions)):
        raise ValueError(
            f"the stages of {model.name} have the strides {reductions}: a feature pyramid needs four stages with "
            f"strides that double, as in ResNets"
        )
    for module in body.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = model.batch_norm_momentum
    body.set_grad_checkpointing(model.grad_checkpointing)
    if model.freeze is not None:
        body.network.freeze(model.freeze)
    return body


def make_detector(
    model: ModelConfig,
    heads: Heads,
    classes: int,
    *,
    masks: bool = True,
    size: int | Size = 1024,
    preprocessing: Preprocessing | None = None,
    channels_last: bool = True,
) -> Detector:
    """Build a detector.

    Args:
        model: the backbone.
        heads: feature pyramid, region proposals and heads.
        classes: number of classes, without the background.
        masks: whether to predict masks (Mask R-CNN) or only boxes (Faster R-CNN).
        size: the largest image size, for backbones with layers of a global scope; others take any size.
        preprocessing: mean and standard deviation of the pixels; by default those of ImageNet.
        channels_last: whether to convert images to the channels-last memory format.

    >>> import torch
    >>> from lambdanets.detect.config import Heads
    >>> from lambdanets.detect.network import make_detector
    >>> from lambdanets.train.config import ModelConfig
    >>> backbone = ModelConfig(name="lambda_resnet_tiny", options=("stem='strided'", "widths=(8,8,16,16)", "scope=7"))
    >>> detector = make_detector(backbone, Heads(channels=16, hidden=32), classes=3).eval()
    >>> images = torch.randint(0, 256, (2, 3, 96, 128), dtype=torch.uint8)
    >>> with torch.no_grad():
    ...     first, second = detector(images, sizes=[(96, 128), (70, 90)])  # the second image is smaller and padded
    >>> sorted(first)
    ['boxes', 'labels', 'masks', 'scores']
    >>> first["masks"].shape[1:]
    torch.Size([1, 28, 28])
    """
    body = make_backbone(model, size)
    return assemble(
        body,
        heads,
        classes,
        masks=masks,
        preprocessing=preprocessing,
        channels_last=channels_last,
        momentum=model.batch_norm_momentum,
    )


def assemble(
    body: FeatureNetwork,
    heads: Heads,
    classes: int,
    *,
    masks: bool = True,
    preprocessing: Preprocessing | None = None,
    channels_last: bool = True,
    momentum: float = 0.1,
) -> Detector:
    """Build a detector on an existing backbone, `create_model(..., features_only=True, out_indices=4)`.

    The other arguments are those of `make_detector`; `momentum` is that of the norms in the heads.
    """
    norm = partial(HeadNorm, momentum=momentum) if heads.norm else None
    backbone = Backbone(body, heads.channels, norm)
    strides = body.feature_info.reduction()
    anchors = Anchors(heads.anchors, heads.ratios, [*strides, 2 * strides[-1]])
    rpn = Proposals(
        anchors,
        RPNHead(heads.channels, len(heads.ratios)),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 2 * heads.proposals, "testing": heads.proposals},
        post_nms_top_n={"training": 2 * heads.proposals, "testing": heads.proposals},
        nms_thresh=0.7,
        score_thresh=LEAST_OBJECTNESS,
    )
    roi_heads = RoIHeads(
        Pooling(strides, 7, heads.canonical),
        box_head(heads, norm),
        FastRCNNPredictor(heads.hidden, classes + 1),
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=heads.sampled,
        positive_fraction=0.25,
        bbox_reg_weights=None,
        score_thresh=heads.least_score,
        nms_thresh=heads.overlap,
        detections_per_img=heads.detections,
    )
    if masks:
        roi_heads.mask_roi_pool = Pooling(strides, 14, heads.canonical)
        widths = [heads.channels] * heads.mask_convolutions
        roi_heads.mask_head = MaskRCNNHeads(heads.channels, widths, 1, norm)
        roi_heads.mask_predictor = MaskRCNNPredictor(heads.channels, heads.channels, classes + 1)
    return Detector(backbone, rpn, roi_heads, preprocessing or Preprocessing(), channels_last)


def box_head(heads: Heads, norm: Callable[..., nn.Module] | None) -> nn.Module:
    if not heads.convolutions:
        return TwoMLPHead(heads.channels * 7 * 7, heads.hidden)
    widths = [heads.channels] * heads.convolutions
    return FastRCNNConvFCHead((heads.channels, 7, 7), widths, [heads.hidden], norm)
