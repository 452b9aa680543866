"""Environments: the registry by name, and the built-in ones. Works without JAX.

Read `registry` first, with the shortest environment, `SingleTurn`; `frozen_lake` and `calculator` have several turns.
`executors` runs them on the event loop and in threads, `processes` in processes. Scorers are in `jaxroll.rewards`.
"""
