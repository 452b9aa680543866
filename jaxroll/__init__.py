"""Asynchronous reinforcement learning for language models in JAX."""

__version__ = "0.1.0"

PROJECT_URL = ""  # the public address of the repository; empty until there is one
