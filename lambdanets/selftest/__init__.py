"""`lambdanets selftest`: does every implementation compute the paper's equations, on this machine?"""

from lambdanets.selftest.run import Selftest, selftest

__all__ = ["Selftest", "selftest"]
