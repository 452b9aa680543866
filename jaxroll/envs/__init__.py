"""Environments: the registry by name, and the built-in ones. Works without JAX.

Read `registry` first; `single_turn` is the shortest environment, `frozen_lake` and `calculator` have several turns.
`executors` runs environments on the event loop, in threads or in processes. Scorers are in `jaxroll.rewards`.
"""
