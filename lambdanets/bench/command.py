"""The command `lambdanets bench`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from lambdanets.bench.kernels import BenchKernels
from lambdanets.bench.layers import BenchLayer, BenchOp
from lambdanets.bench.networks import BenchNetwork


@dataclass(frozen=True)
class Bench:
    """Measure speed and memory of lambda layers and of other implementations in the same run."""

    what: Annotated[
        Annotated[BenchOp, tyro.conf.subcommand("op")]
        | Annotated[BenchLayer, tyro.conf.subcommand("layer")]
        | Annotated[BenchKernels, tyro.conf.subcommand("kernels")]
        | Annotated[BenchNetwork, tyro.conf.subcommand("network")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.what.run()
