"""Rewards: scorers, and a pool of sandboxed processes that runs them. Works without JAX.

Read `scorers` first (the registry, and how to add a scorer), then `scoring_pool` (its asyncio interface).
`processes` is a worker as seen by its parent, `worker` the program in the process, `sandbox` its restrictions.
"""
