"""Models: the decoder, its sizes as data, its parameters by name, and the KV cache.

Read `transformer` first (the functions that the learner and the engine call), then `families` (one model as data,
and the known families; no JAX) and `layers` (the flax modules).

    hf_config     config.json from and to a ModelSpec; names of parameters (no JAX)
    params        parameters as a flat dict of names, with shapes and shardings; weights of an imported model
    moe           mixtures of experts: the router and the grouped products
    cache         the paged KV cache, and a contiguous copy of it
    folders       model folders: spec, completeness of weights, safetensors files (no JAX)
"""
