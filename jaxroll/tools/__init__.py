"""JAX work outside a run: warm start, weights in and out, and what a program costs before it runs."""
