"""Speed and memory: benchmarks as data (`cases.py`, `peers.py`) plus one runner (`bench.py`)."""
