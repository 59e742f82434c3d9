"""The command `lambdanets selftest`: check all implementations on this machine against the paper's equations."""

from lambdanets.selftest.run import Selftest, selftest

__all__ = ["Selftest", "selftest"]
