"""Environments of other packages, and small ones in the form that other packages made common. Works without JAX.

`games` is the base: a game shows text, takes text, and begins from a seed. docs/environments.md lists the adapters.
Optional packages are imported when a game begins, and a missing one is a ConfigError that names the extra.
"""
