"""Meshes, shardings and parameters for the tests of weight transfer."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxroll.records import Version
from jaxroll.transfer.manifest import HostSnapshot, from_pieces

SHAPES = {"bias": (8,), "embed": (24, 16), "layers.00.q": (16, 4, 8), "odd": (3, 5), "scale": (), "none": (0, 4)}
SPECS = {
    "learner": {"embed": ("fsdp", None), "layers.00.q": ("fsdp", "tensor", None), "bias": ("fsdp",)},
    "sampler": {"embed": (None, "tensor"), "layers.00.q": (None, None, "tensor"), "bias": ("tensor",)},
    "replicated": {},
}


def mesh_of(data: int, fsdp: int, tensor: int) -> jax.sharding.Mesh:
    """The mesh over the first devices, axes (data, fsdp, tensor), Auto."""
    count = data * fsdp * tensor
    auto = (jax.sharding.AxisType.Auto,) * 3
    return jax.make_mesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), auto, devices=jax.devices()[:count])


def shardings_of(dims: tuple[int, int, int], rules: str) -> dict[str, NamedSharding]:
    mesh = mesh_of(*dims)
    return {name: NamedSharding(mesh, PartitionSpec(*SPECS[rules].get(name, ()))) for name in SHAPES}


def values_of(seed: int) -> dict[str, np.ndarray]:
    """The float32 parameters of `seed`, every element different from its neighbors."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def params_of(values: dict[str, np.ndarray], shardings: dict[str, NamedSharding]) -> dict[str, jax.Array]:
    return {name: jax.device_put(value, shardings[name]) for name, value in values.items()}


def abstract_of(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def host_snapshot(version: Version, values: dict[str, np.ndarray]) -> HostSnapshot:
    """A snapshot whose pieces are views of `values`, so that a test can change them later."""
    return from_pieces(version, {name: (v.shape, [(tuple((0, n) for n in v.shape), v)]) for name, v in values.items()})


BIG = {"a": (512, 1024), "b": (1024, 512)}  # 4 MiB in several chunks


def big_values() -> dict[str, np.ndarray]:
    """Values of the shapes BIG."""
    rng = np.random.default_rng(5)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in BIG.items()}
