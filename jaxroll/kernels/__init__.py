"""Attention: a slow reference, an XLA form that runs everywhere, fused kernels, and which of them is taken."""
