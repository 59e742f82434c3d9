"""Benchmarks of speed and memory: operations, layers, kernels and networks."""
