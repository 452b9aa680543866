"""Worlds that a model's words act on, and the processes that judge its answers. Works without JAX."""
