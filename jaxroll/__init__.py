"""Asynchronous reinforcement learning for language models in JAX.

A run consists of processes (`roles`): samplers generate rollouts with an inference `engine`, the `store` keeps prompts,
rollouts and versions, and the `learner` trains on complete groups and publishes new weights over `transfer`.
Read `records` first (the data that they exchange), then `protocols` (the interfaces to implement), then `roles`.
"""

__version__ = "0.1.0"

PROJECT_URL = ""  # the public address of the repository; empty until there is one
