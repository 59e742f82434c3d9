"""Working directory and environment for tests that start processes."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
