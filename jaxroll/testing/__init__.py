"""Checks for users' environments and rewards. Works without JAX.

`environments.check_environment` (and the command `jaxroll env check`) plays an environment and reports how it violates
the contract; `observed` holds the instruments of that check.
"""
