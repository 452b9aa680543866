"""Tasks: where they come from, in which order, and which are kept aside. Never initialises a JAX backend."""
