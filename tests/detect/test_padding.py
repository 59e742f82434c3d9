"""What lies beyond a picture on its canvas changes nothing."""

from types import SimpleNamespace

import pytest
import torch

from lambdanets.detect.padding import Padding
from tests.detect.helpers import TINY, tiny_detector

BACKBONES = {
    "lambda, SE, strided stem, odd maps": ("lambda_resnet_tiny", TINY),
    "convolutions, SE everywhere": ("resnet_tiny", (*TINY[:3], "se=True")),
    "7x7 and max pooling, strided shortcuts": (
        "lambda_resnet_tiny",
        ("stem='vanilla'", "shortcut='conv'", "widths=(8,8,16,16)", "depths=(1,1,1,1)", "scope=7"),
    ),
    "intra-depth, c4 and c5": ("lambda_resnet_tiny", (*TINY[:3], "intra_depth=2", "scope=3")),
}
every_backbone = pytest.mark.parametrize("backbone", BACKBONES.values(), ids=BACKBONES)


def look(detector, images, sizes=None):
    """Maps of the pyramid, and detections."""
    maps = []
    hook = detector.backbone.register_forward_hook(lambda _, __, output: maps.append(output))
    with torch.no_grad():
        found = detector(images, sizes=sizes)
    hook.remove()
    return maps[0], found


@every_backbone
@pytest.mark.parametrize("size", [(71, 53), (64, 96), (33, 90)])
def test_a_picture_alone_is_the_picture_beside_a_larger_one(backbone, size):
    detector = tiny_detector(*backbone).double().eval()
    generator = torch.Generator().manual_seed(0)
    height, width = size
    alone = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8, generator=generator)
    canvas = torch.randint(0, 256, (2, 3, 96, 101), dtype=torch.uint8, generator=generator)  # garbage as padding
    canvas[1, :, :height, :width] = alone[0]
    maps, found = look(detector, alone)
    padded_maps, padded_found = look(detector, canvas, [(96, 101), size])
    for name, one in maps.items():
        inside = padded_maps[name][1:, :, : one.shape[2], : one.shape[3]]
        assert one.abs().mean() > 0.01
        torch.testing.assert_close(inside, one, rtol=1e-10, atol=1e-10)
    assert len(found[0]["scores"]) > 10
    for name, one in found[0].items():
        torch.testing.assert_close(padded_found[1][name], one, rtol=1e-8, atol=1e-8)


@every_backbone
def test_without_masks_it_would_not_be(backbone):
    """The test above can fail."""
    detector = tiny_detector(*backbone).double().eval()
    canvas = torch.randint(0, 256, (2, 3, 96, 101), dtype=torch.uint8)
    plain, _ = look(detector, canvas)
    masked, _ = look(detector, canvas, [(96, 101), (71, 53)])
    torch.testing.assert_close(plain["0"][0], masked["0"][0])
    assert (plain["3"][1, :, :2, :1] - masked["3"][1, :, :2, :1]).abs().max() > 1e-4


def test_maps_of_every_size():
    padding = Padding()
    padding.set([(5, 9), (8, 4)], (8, 9), torch.device("cpu"))
    assert list(padding.inside) == [(8, 9), (4, 5), (2, 3), (1, 2), (1, 1)]
    assert padding.inside[4, 5].sum((1, 2)).tolist() == [3 * 5, 4 * 2]
    padding.set([(8, 9)], (8, 9), torch.device("cpu"))
    assert not padding.inside  # nothing to mask costs nothing


def test_gradient_checkpointing_sees_the_same_masks():
    canvas = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        detector = tiny_detector().double().train()
        detector.backbone.body.set_grad_checkpointing(checkpointing)
        padding = detector.transform.padding
        padding.set([(64, 64), (40, 31)], (64, 64), canvas.device)
        maps = detector.backbone(canvas.double() / 255)
        sum(m.square().sum() for m in maps.values()).backward()
        gradients.append({name: p.grad for name, p in detector.backbone.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_training_learns_nothing_from_padding():
    """Objects at the edge of small pictures: what is not there is neither right nor wrong."""
    detector = tiny_detector().train()
    boxes = torch.tensor([[18.0, 0.0, 30.0, 12.0], [20.0, 18.0, 30.0, 29.0], [0.0, 22.0, 8.0, 29.0]])
    masks = torch.zeros(3, 29, 30, dtype=torch.uint8)
    masks[:, 20:, :8] = 1
    target = {"boxes": boxes, "labels": torch.tensor([1, 2, 3]), "masks": masks}
    images = torch.randint(0, 256, (2, 3, 128, 160), dtype=torch.uint8)
    losses = detector(images, [target, target], [(29, 30), (29, 30)])
    assert float(losses["loss_objectness"]) == pytest.approx(0.693, abs=0.05)  # of a network that knows nothing
    anchors = detector.rpn.anchor_generator(
        SimpleNamespace(image_sizes=[0]), [torch.zeros(1, 1, 128 // s, 160 // s) for s in (4, 8, 16, 32, 64)]
    )
    (labels,), (matched,) = detector.rpn.assign_targets_to_anchors(
        anchors, [{"boxes": boxes, "size": torch.tensor([29, 30])}]
    )
    centres = (anchors[0][:, :2] + anchors[0][:, 2:]) / 2
    inside = (centres < torch.tensor([30.0, 29.0])).all(dim=1)
    assert (labels[~inside] == -1).all()
    assert {tuple(b) for b in matched[labels == 1].tolist()} == {tuple(b) for b in boxes.tolist()}  # each has an anchor
