"""Episodes and groups: from a lease to finished members. Works without JAX."""
