"""Networks: named configurations, one class per family, and their weights."""

from lambdanets.data.preprocessing import Preprocessing
from lambdanets.models.attention_network import AttentionNetwork
from lambdanets.models.config import (
    AttentionNetworkConfig,
    MobileNetConfig,
    NetworkConfig,
    PatchConfig,
    ResNetConfig,
    SpatialOptions,
)
from lambdanets.models.mobilenet import MobileNetV2
from lambdanets.models.network import FeatureInfo, FeatureNetwork, Network
from lambdanets.models.patch import PatchNetwork
from lambdanets.models.pretrained import Card, from_pretrained, load_weights, read_card, save_weights
from lambdanets.models.registry import configure, create_model, list_models, weights_of
from lambdanets.models.resnet import Bottleneck, ResNet
from lambdanets.models.spatial import LAYERS
from lambdanets.models.zoo import ROWS

__all__ = [
    "LAYERS",
    "ROWS",
    "AttentionNetwork",
    "AttentionNetworkConfig",
    "Bottleneck",
    "Card",
    "FeatureInfo",
    "FeatureNetwork",
    "MobileNetConfig",
    "MobileNetV2",
    "Network",
    "NetworkConfig",
    "PatchConfig",
    "PatchNetwork",
    "Preprocessing",
    "ResNet",
    "ResNetConfig",
    "SpatialOptions",
    "configure",
    "create_model",
    "from_pretrained",
    "list_models",
    "load_weights",
    "read_card",
    "save_weights",
    "weights_of",
]
