"""Attention kernels: an XLA implementation that runs everywhere, a slow reference, and fused kernels for TPU and GPU.

Read `choice` first (which implementation is used, and why), then `attention` (packed rows, prompts, and over
a KV cache). `placed` runs a chosen implementation over a mesh, and wraps the fused kernels.
"""
