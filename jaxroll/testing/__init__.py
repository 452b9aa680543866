"""Checks that users run on code of their own: environments and rewards. Works without JAX."""
