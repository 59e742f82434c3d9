"""`import lambdanets` stays light."""

import subprocess
import sys

import lambdanets

HEAVY = ["torchvision", "timm", "triton", "matplotlib", "tyro", "lambda_networks", "einops", "rich"]


def test_import_loads_nothing_heavy():
    code = f"import sys, lambdanets; print([name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"


def test_public_names_are_there():
    from lambdanets import layers, ops

    for module in (lambdanets, layers, ops):
        assert all(hasattr(module, name) for name in module.__all__)
    assert lambdanets.__version__
