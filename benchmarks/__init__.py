"""Benchmarks of JaxRoll: `python -m benchmarks.NAME`, in the repository's root."""
