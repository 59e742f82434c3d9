"""Small trained-looking networks and images for them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lambdanets.models import Card, Preprocessing, create_model, save_weights
from lambdanets.models.network import Network

SIZE = 12
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
NAMES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
OPTIONS = dict(depths=(1, 1, 1, 1), widths=(4, 4, 8, 8), stem="small", placement="CCLL", scope=3, key_depth=4, heads=2)


def small_network(classes: int = len(NAMES), **options) -> Network:
    torch.manual_seed(3)
    network = create_model("resnet26", num_classes=classes, image_size=SIZE, **{**OPTIONS, **options}).eval()
    for module in network.modules():  # as after training: nothing is 0 or 1
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is not None
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
    with torch.no_grad():
        network.get_classifier().weight.mul_(0.05)  # probabilities that are neither 0 nor 1
    return network


def small_weights(path: Path, names: tuple[str, ...] = NAMES, **options) -> tuple[Network, Path]:
    network = small_network(len(names), **options)
    preprocessing = Preprocessing(MEAN[: network.config.in_chans], STD[: network.config.in_chans], SIZE, 1.0)
    return network, save_weights(network, path, Card(preprocessing, names))


def image_folder(root: Path, names: tuple[str, ...] = NAMES, each: int = 5, size: int = SIZE) -> dict[Path, int]:
    """root/CLASS/NUMBER.png of noise in another tint for each; the label of each path."""
    generator = np.random.default_rng(7)
    found = {}
    for label, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for number in range(each):
            tint = generator.integers(0, 255, 3)
            pixels = (0.5 * generator.integers(0, 255, (size, size, 3)) + 0.5 * tint).astype(np.uint8)
            path = root / name / f"{number}.png"
            Image.fromarray(pixels).save(path)
            found[path] = label
    return found


@torch.no_grad()
def scores_of(network: Network, path: Path) -> torch.Tensor:
    """One image of the right size, the plain way: [C]."""
    pixels = torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy()).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(row).view(3, 1, 1) for row in (MEAN, STD))
    return network(((pixels - mean) / std)[None])[0]
