"""Calibration: the fit is exact on exact data, and what is printed can be pasted."""

import io

import numpy as np
from rich.console import Console

from benchmarks.calibrate import Calibrate, Measured, Sizes, fit, non_negative, regret, source
from lambdanets.ops.choose import BACKENDS, Rates


def test_non_negative_least_squares():
    columns = np.array([[1.0, 2.0, 0.5], [1.0, 0.3, 4.0], [1.0, 7.0, 1.0], [1.0, 1.0, 1.0]])
    wanted = np.array([0.5, 2.0, 0.25])
    assert np.allclose(non_negative(columns, columns @ wanted), wanted)
    found = non_negative(columns, columns @ np.array([1.0, 2.0, -0.5]))
    assert (found >= 0).all()
    assert found[2] == 0


def measured(seconds, work):
    return Measured(Sizes((4, 4), (3, 3), 1, 8), False, seconds, work)


def test_fit_finds_the_rates_behind_the_times():
    rates = Rates(5e4, 12.0, 300.0)
    found = []
    for macs, elements in ((1e5, 1e3), (1e7, 5e4), (1e9, 1e4), (1e6, 1e6)):
        nanoseconds = rates.call + (rates.macs * macs + rates.elements * elements) / 1e3
        found.append(measured({"gemm": nanoseconds * 1e-9}, {"gemm": (macs, elements)}))
    again = fit(found, "gemm", False)
    assert np.allclose([again.call, again.macs, again.elements], [rates.call, rates.macs, rates.elements])


def test_regret_is_time_over_the_fastest():
    one = measured({"gemm": 3e-3, "conv": 1e-3}, {"gemm": (1.0, 1.0), "conv": (1.0, 1.0)})
    cheap, dear = Rates(1.0, 1.0, 1.0), Rates(9.0, 9.0, 9.0)
    assert regret(one, {"gemm": (cheap, cheap), "conv": (dear, dear)}) == ("conv", "gemm", 3.0)


def test_prints_constants_for_every_backend():
    out = io.StringIO()
    assert Calibrate(device="cpu", repeats=1, quick=True).run(Console(file=out, width=200)) == 0
    text = out.getvalue()
    pasted = eval(text[text.index("RATES = {") + len("RATES = ") :], {"Rates": Rates})
    assert set(pasted) <= set(BACKENDS)
    assert {"gemm", "conv", "depthwise", "dft", "fft"} <= set(pasted)
    assert source(pasted) in text
