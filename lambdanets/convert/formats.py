"""The supported formats, and detection of the format of a state dict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lambdanets.convert import networks
from lambdanets.layers import LambdaLayer2d
from lambdanets.models import Network
from lambdanets.models.foreign import BYOBNET_MARK, D_LI14, LUCIDRAINS, TIMM, LayerNames, build_layer, read_layer
from lambdanets.models.keys import COUNTER
from lambdanets.models.stored import SPARE, SPARE_TENSORS, Budget, shorten, unwrapped

Module = LambdaLayer2d | Network
OWN = "lambdanets"


def layer(names: LayerNames, state: Mapping[str, Tensor]) -> LambdaLayer2d:
    return build_layer(read_layer(names, state), names.what)


@dataclass(frozen=True)
class Format:
    """A source format.

    Attributes:
        what: the module that its weights belong to, for messages.
        mark: name of a parameter that only this format has; None if the format cannot be detected.
        convert: builds our module from a state dict.
    """

    what: str
    mark: str | None
    convert: Callable[[Mapping[str, Tensor]], Module]


FORMATS = {
    "lucidrains": Format(LUCIDRAINS.what, "to_q.weight", partial(layer, LUCIDRAINS)),
    "timm-layer": Format(TIMM.what, "qkv.weight", partial(layer, TIMM)),
    "d-li14-layer": Format(D_LI14.what, "conv_qkv.weight", partial(layer, D_LI14)),
    "d-li14": Format("d-li14's LambdaResNet", "layer1.0.conv2.conv_qkv.weight", networks.lambda_resnet),
    "timm-lambda": Format("one of timm's lambda networks", BYOBNET_MARK, networks.timm_lambda_resnet),
    "resnet": Format("torchvision's or timm's ResNet or ResNet-RS", "layer1.0.conv1.weight", networks.resnet),
    "resnet-keras": Format("Keras' ResNet with torchvision's names", None, networks.keras_resnet),
    "mobilenet_v2": Format("torchvision's MobileNet-v2", "features.0.0.weight", networks.mobilenet),
}


@dataclass(frozen=True, eq=False)
class Converted:
    """A module of this package with weights of another implementation.

    Attributes:
        module: the layer or network.
        source_format: the format of the weights, a key of `FORMATS`.

    >>> from timm.layers.lambda_layer import LambdaLayer
    >>> from lambdanets.convert import convert_state
    >>> type(convert_state(LambdaLayer(64, r=9).state_dict()).module).__name__
    'LambdaLayer2d'
    """

    module: Module
    source_format: str

    @property
    def description(self) -> str:
        """The module in one line."""
        if isinstance(self.module, Network):
            return f"{self.module.name}, {type(self.module).__name__}"
        return str(self.module).partition("\n")[0] + ")"


def convert_state(state: Mapping[str, Tensor], source_format: str | None = None) -> Converted:
    """Build the module of this package that has the weights of a state dict.

    Args:
        state: the state dict, for example from `read_source`.
        source_format: a key of `FORMATS`; None detects the format from the parameter names.

    Raises:
        ValueError: if the format is unknown, or the names or shapes do not match it.

    >>> from timm.layers.lambda_layer import LambdaLayer
    >>> from lambdanets.convert import convert_state
    >>> converted = convert_state(LambdaLayer(64, r=9).state_dict())
    >>> converted.source_format
    'timm-layer'
    >>> converted.module.positions.scope
    (9, 9)
    """
    state = unwrapped(state)
    name = source_format or recognise(state)
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; choose one of {', '.join(FORMATS)}")
    what = FORMATS[name].what
    odd = next((n for n, t in state.items() if not t.is_floating_point() and not n.endswith(COUNTER)), None)
    if odd is not None:
        raise ValueError(f"this is not {what}: {odd} is {state[odd].dtype}, expected a floating-point dtype")
    elements = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    try:
        with Budget(elements + SPARE, 2 * len(state) + SPARE_TENSORS, what):
            return Converted(FORMATS[name].convert(state), name)
    except (IndexError, RuntimeError, TypeError, ZeroDivisionError) as error:  # tensors of unexpected shapes
        text = str(error).partition("\n")[0]
        raise ValueError(f"this is not {what}: its tensors have unexpected shapes ({text})") from error


def recognise(state: Mapping[str, Tensor]) -> str:
    found = next((name for name, known in FORMATS.items() if known.mark in state), None)
    if found is None:
        known = "; ".join(f"{known.what} ({known.mark})" for known in FORMATS.values() if known.mark)
        raise ValueError(f"unknown format: it has {shorten(sorted(state))}. Each known format has a parameter: {known}")
    return found
