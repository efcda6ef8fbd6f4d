"""Measurements, each a script of its own: `python benchmarks/compare.py`."""
