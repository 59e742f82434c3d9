"""Our networks as encoders of segmentation-models-pytorch."""

from pathlib import Path

import pytest
import torch

from lambdanets.models import create_model
from tests.models.helpers import randomized, settled

pytest.importorskip("timm")
pytest.importorskip("lambdanets.timm")  # registers our names
smp = pytest.importorskip("segmentation_models_pytorch", reason="needs pip install segmentation-models-pytorch")

SMALL = {"depths": (1, 1, 3, 1), "widths": (8, 8, 16, 16), "scope": 5}
DECODERS = ("Unet", "FPN", "UPerNet", "UnetPlusPlus", "Linknet", "PSPNet", "MAnet", "Segformer", "DeepLabV3Plus")


@pytest.mark.parametrize("name", ["lambda_resnet50", "lambdanets_resnet26"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_decoders(decoder: str, name: str) -> None:
    torch.manual_seed(0)
    options = SMALL | ({"placement": "CLLL"} if name == "lambdanets_resnet26" else {})
    model = getattr(smp, decoder)(f"tu-{name}", encoder_weights=None, classes=3, **options)
    scores = model(torch.randn(2, 3, 64, 96))
    assert scores.shape == (2, 3, 64, 96)
    scores.square().mean().backward()
    stages = 3 if decoder == "PSPNet" else 5  # it reads the map at 1/8
    parts = ("conv1", "layer1", "layer2", "layer3", "layer4")[:stages]
    for part in parts:
        weights = [p for p in model.encoder.model.network.get_submodule(part).parameters() if p.ndim > 1]
        assert any(weight.grad is not None and weight.grad.abs().max() > 0 for weight in weights), part


def test_the_encoder_has_our_maps_and_our_weights(tmp_path: Path) -> None:
    """Weights of a classifier, by their file."""
    classifier = create_model("lambda_resnet50", num_classes=7, **SMALL)
    classifier = settled(randomized(classifier), torch.randn(4, 3, 64, 64)).eval()
    classifier.save_pretrained(tmp_path)
    weights = {"file": str(tmp_path / "model.safetensors")}
    model = smp.Unet("tu-lambda_resnet50", encoder_weights=True, pretrained_cfg_overlay=weights, **SMALL).eval()
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        image, *maps = model.encoder(x)
        expected = classifier.forward_intermediates(x, intermediates_only=True)
        assert torch.equal(image, x)
        assert len(maps) == len(expected) == 5
        assert all(torch.equal(found, wanted) for found, wanted in zip(maps, expected, strict=True))


def test_grey_images_and_fewer_stages() -> None:
    model = smp.Unet(
        "tu-lambda_resnet50",
        encoder_weights=None,
        in_channels=1,
        encoder_depth=4,
        decoder_channels=(32, 16, 8, 8),
        **SMALL,
    )
    assert model(torch.randn(2, 1, 48, 64)).shape == (2, 1, 48, 64)
    assert not list(model.encoder.model.network.layer4.parameters())


def test_networks_that_keep_the_resolution_are_refused() -> None:
    """Their first two stages have the same size, which the library's encoders cannot have."""
    with pytest.raises(ValueError, match="downsampling pattern"):
        smp.Unet("tu-lambda_resnet_small", encoder_weights=None)
