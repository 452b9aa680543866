"""The decoder: families as data, flax modules, their parameters by name, the key-value cache."""
