"""Conversion of weights from other implementations: lambda layers of lucidrains, timm and d-li14, and networks."""

from lambdanets.convert.files import load_layer, read_source, save_converted
from lambdanets.convert.formats import FORMATS, Converted, convert_state

__all__ = ["FORMATS", "Converted", "convert_state", "load_layer", "read_source", "save_converted"]
