"""Attention kernels side by side, in one run: `python -m benchmarks --help` (docs/benchmarks.md)."""
