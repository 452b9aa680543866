"""Scorers and the pool of killable processes that runs them. Works without JAX."""
