"""Registration of our networks with timm.

`import lambdanets.timm` registers them. Names that timm already uses get the prefix `lambdanets_`.
`python -m lambdanets.timm train.py --model lambda_resnet50 ...` runs a timm script with our networks.
"""

import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from timm.models import (
    FeatureGraphNet,
    FeatureHookNet,
    PretrainedCfg,
    generate_default_cfgs,
    is_model,
    register_model,
)
from timm.models._features import FeatureGetterNet
from torch import nn

from lambdanets.models import FeatureNetwork, Network, create_model, list_models
from lambdanets.models.network import stage_indices
from lambdanets.models.packaged import PACKAGED, packaged_weights
from lambdanets.models.pretrained import (
    WEIGHTS,
    WIDEST,
    default_card,
    default_configuration,
    locate,
    timm_configuration,
    timm_name,
)
from lambdanets.models.stored import within_size_of
from lambdanets.models.zoo import PUBLISHED

SAVED = ("hf-hub", "local-dir")  # sources of configurations that were saved with weights
USAGE = "usage: python -m lambdanets.timm SCRIPT [arguments of the script], for example timm's train.py or validate.py"


def entrypoint(name: str) -> Callable[..., nn.Module]:
    """Return the function that timm calls for one of our names."""

    def build(
        pretrained: bool = False,
        pretrained_cfg: str | dict[str, Any] | PretrainedCfg | None = None,
        pretrained_cfg_overlay: dict[str, Any] | None = None,
        cache_dir: str | None = None,  # ignored: huggingface_hub uses HF_HOME
        pretrained_model_args: dict[str, Any] | None = None,  # since timm 1.0.31: arguments of the saved network
        *,
        img_size: int | tuple[int, int] | None = None,
        features_only: bool = False,
        out_indices: Sequence[int] | int | None = None,
        feature_cls: str | type[nn.Module] | None = None,
        bn_momentum: float | None = None,
        bn_eps: float | None = None,
        **arguments: Any,
    ) -> nn.Module:
        if isinstance(pretrained_cfg, str) and pretrained_cfg not in default_cfgs[timm_name(name)].cfgs:
            raise ValueError(f"{timm_name(name)} has no weights with the tag {pretrained_cfg!r}: {tags(name)}")
        if isinstance(pretrained_cfg, PretrainedCfg):
            pretrained_cfg = pretrained_cfg.to_dict()
        given = {**(pretrained_cfg if isinstance(pretrained_cfg, dict) else {}), **(pretrained_cfg_overlay or {})}
        if img_size is not None:
            arguments["image_size"] = img_size
        weights = pretrained and (weights_of(given, pretrained_cfg_overlay or {}) or True)
        bounded: Any = nullcontext()
        described = given.get("source") in SAVED
        said = (pretrained_model_args or {}).get("num_classes", given.get("num_classes") if described else None)
        if said is not None:
            arguments.setdefault("num_classes", said)
        if (described or pretrained_model_args) and isinstance(weights, str):  # bound the size that a file asks for
            weights = str(locate(weights, WEIGHTS))
            classes = arguments.get("num_classes")
            by_caller = classes if classes != said else None
            bounded = within_size_of(Path(weights), (by_caller or 0) * WIDEST)
        with bounded:
            if features_only:
                arguments.setdefault("num_classes", 0)
            network = create_model(name, weights, **arguments)
        model = network if not features_only else feature_network(network, out_indices, feature_cls)
        if not features_only and not (out_indices is None and feature_cls is None):
            raise ValueError("out_indices and feature_cls are for features_only=True")
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = module.momentum if bn_momentum is None else bn_momentum
                module.eps = module.eps if bn_eps is None else bn_eps
        known = {f.name for f in fields(PretrainedCfg)}
        card = default_card(network)
        if weights in (True, PACKAGED) and network.card is not None and packaged_weights(name) is not None:
            card = network.card
            if img_size is not None:
                card = replace(card, preprocessing=replace(card.preprocessing, size=img_size))
        configuration = timm_configuration(network.config, card)
        configuration.update({k: v for k, v in given.items() if k in known and k != "num_classes"})
        configuration = PretrainedCfg(**{**configuration, "architecture": timm_name(name)}).to_dict()
        # timm reads both names. They are plain attributes, not submodules or buffers.
        model.pretrained_cfg = model.default_cfg = configuration  # type: ignore[assignment]
        model.pretrained_model_args = pretrained_model_args or {}  # type: ignore[assignment]
        return model

    build.__name__ = build.__qualname__ = timm_name(name)
    build.__doc__ = f"`lambdanets.create_model({name!r}, ...)`"
    return build


def feature_network(
    network: Network, out_indices: Sequence[int] | int | None, feature_cls: str | type[nn.Module] | None
) -> nn.Module:
    """Wrap the network for `features_only=True`, with our `FeatureNetwork` or with one of timm's classes."""
    if feature_cls in (None, "list"):
        return FeatureNetwork(network, out_indices)
    kept = stage_indices(out_indices, len(network.feature_info))
    if not isinstance(feature_cls, str):
        return feature_cls(network, out_indices=kept)  # type: ignore[misc]
    if feature_cls == "dict":
        return FeatureHookNet(network, kept, out_map=[str(i) for i in kept], return_dict=True)
    classes = {"hook": FeatureHookNet, "fx": FeatureGraphNet, "getter": FeatureGetterNet}
    if feature_cls not in classes:
        raise ValueError(f"unknown feature_cls {feature_cls!r}; choose from 'list', 'dict', 'hook', 'fx', 'getter'")
    return classes[feature_cls](network, kept)


def tags(name: str) -> str:
    found = [tag for tag in default_cfgs[timm_name(name)].tags if tag]
    return f"choose {' or '.join(map(repr, found))}" if found else "none are published"


def weights_of(given: dict[str, Any], overlay: dict[str, Any]) -> str | None:
    """Return the file, folder or hub id of the weights. A configuration from the hub can only name its own weights."""
    if given.get("source") == "hf-hub":
        return overlay.get("file") or given.get("hf_hub_id")
    return given.get("file") or given.get("hf_hub_id")


def register() -> list[str]:
    """Register the networks that are not registered yet, and return all names."""
    names = []
    for name in list_models():
        build = entrypoint(name)
        if not is_model(build.__name__):
            register_model(build)
        names.append(build.__name__)
    return names


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        raise SystemExit(0 if arguments else 2)
    script = Path(arguments[0])
    if not script.is_file():
        raise SystemExit(f"{script} is not a file; {USAGE}")
    sys.argv = arguments
    sys.path.insert(0, str(script.resolve().parent))  # like `python SCRIPT`
    runpy.run_path(str(script), run_name="__main__")


def configurations() -> dict[str, dict[str, Any] | PretrainedCfg]:
    """Return timm's configurations of our networks, by name and tag of published weights."""
    found: dict[str, dict[str, Any] | PretrainedCfg] = {}
    for name in list_models():
        tag = PUBLISHED[name].hub_id.partition(".")[2] if name in PUBLISHED else ""
        found[timm_name(name) + (f".{tag}" if tag else "")] = PretrainedCfg(**default_configuration(name))
    return found


default_cfgs = generate_default_cfgs(configurations())  # `register_model` reads this name
NAMES = register()

if __name__ == "__main__":
    main(sys.argv[1:])
