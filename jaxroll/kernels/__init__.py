"""Attention under one signature: a slow reference, an XLA form that runs everywhere, and the library's fused one."""
