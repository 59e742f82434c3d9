"""`lambdanets bench`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from lambdanets.bench.engine import BenchEngine
from lambdanets.bench.kernels import BenchKernels
from lambdanets.bench.layers import BenchLayer, BenchOp
from lambdanets.bench.networks import BenchNetwork
from lambdanets.bench.plot import BenchPlot


@dataclass(frozen=True)
class Bench:
    """Measure speed and memory, ours and other implementations in the same run."""

    what: Annotated[
        Annotated[BenchOp, tyro.conf.subcommand("op")]
        | Annotated[BenchLayer, tyro.conf.subcommand("layer")]
        | Annotated[BenchKernels, tyro.conf.subcommand("kernels")]
        | Annotated[BenchNetwork, tyro.conf.subcommand("network")]
        | Annotated[BenchEngine, tyro.conf.subcommand("engine")]
        | Annotated[BenchPlot, tyro.conf.subcommand("plot")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.what.run()
