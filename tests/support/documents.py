"""docs/generate.py as a module."""

from tests.support.scripts import ROOT, script

__all__ = ["ROOT", "generate"]

generate = script("docs/generate.py")
