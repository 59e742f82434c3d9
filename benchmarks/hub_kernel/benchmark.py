"""Time the operation and compare it with its reference: `kernels benchmark OWNER/NAME`."""

import torch
from kernels.benchmark import Benchmark

BATCH, HEADS, DEPTH, VALUES, SCOPE = 32, 4, 16, 64, 23


class LambdaBenchmark(Benchmark):
    """Content and position lambdas on maps of the last stages of a ResNet-50 for images of 224 pixels."""

    seed = 0

    def make(self, side: int) -> None:
        options = {"device": self.device, "dtype": torch.float32}
        places = side * side
        self.queries = torch.randn(BATCH, places, HEADS, DEPTH, **options)
        self.keys = torch.randn(BATCH, places, DEPTH, **options)
        self.values = torch.randn(BATCH, places, VALUES, **options)
        table = torch.randn(SCOPE, SCOPE, DEPTH, **options) / SCOPE
        self.positions = self.kernel.Relative(table, (side, side))
        self.out = torch.empty(BATCH, places, HEADS, VALUES, **options)

    def compute(self) -> None:
        self.out.copy_(self.kernel.lambda_op(self.queries, self.keys, self.values, self.positions))

    def expected(self) -> torch.Tensor:
        return self.kernel.lambda_reference(self.queries, self.keys, self.values, self.positions)

    def setup_map14(self) -> None:
        self.make(14)

    def benchmark_map14(self) -> None:
        self.compute()

    def verify_map14(self) -> torch.Tensor:
        return self.expected()

    def setup_map7(self) -> None:
        self.make(7)

    def benchmark_map7(self) -> None:
        self.compute()

    def verify_map7(self) -> torch.Tensor:
        return self.expected()
