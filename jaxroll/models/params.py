"""Parameters as a flat dict by dotted names ("layers.00.attn.q"), derived from the abstract state of `layers.Decoder`.

Shapes, dtypes and logical axes are declared only there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PRNGKeyArray

from jaxroll.models import moe
from jaxroll.models.families import ModelSpec
from jaxroll.models.layers import Block, Decoder
from jaxroll.sharding.layout import Rules, sharding

Params = dict[str, jax.Array]


def abstract(spec: ModelSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype (float32) by name, sorted; nothing is allocated."""
    _, variables = _blueprint(spec)
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in variables.items()}


def served(spec: ModelSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """As `abstract`, but in the compute dtype (routers in float32), for an engine."""
    # Every use of a parameter casts it to the compute dtype first, so the results are bitwise equal, and bfloat16
    # parameters take half the memory. Routers compute in float32.
    dtype = jnp.dtype(spec.compute_dtype)
    return {
        name: leaf if moe.is_router(name) else jax.ShapeDtypeStruct(leaf.shape, dtype)
        for name, leaf in abstract(spec).items()
    }


def logical_axes(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The logical axes by name, as the module declares them."""
    _, variables = _blueprint(spec)
    return {name: variable.get_metadata("logical") for name, variable in variables.items()}


def shardings(spec: ModelSpec, mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
    """The sharding of every parameter by name, on this mesh under these rules."""
    axes = logical_axes(spec)
    return {name: sharding(mesh, axes[name], rules, leaf.shape) for name, leaf in abstract(spec).items()}


def init(spec: ModelSpec, key: PRNGKeyArray, mesh: Mesh, rules: Rules) -> Params:
    """Fresh parameters, created sharded; their values do not depend on the mesh."""
    create = jax.jit(functools.partial(_created, spec), out_shardings=shardings(spec, mesh, rules))
    return create(key)


def module(spec: ModelSpec, params: Mapping[str, jax.Array]) -> Decoder:
    """The decoder with `params`; ValueError names missing or unknown parameters, and wrong shapes."""
    graph, variables = _blueprint(spec)
    _check(variables, params)
    filled = {name: variable.replace(params[name]) for name, variable in variables.items()}
    state = nnx.from_flat_state([(_path(name), variable) for name, variable in filled.items()])
    return nnx.merge(graph, state)


def block(spec: ModelSpec, values: Mapping[str, jax.Array]) -> Block:
    """One layer of the decoder with `values` by name without the layer's prefix ("attn.q")."""
    graph, variables = _block_blueprint(spec)
    state = [(_path(name), variable.replace(values[name])) for name, variable in variables.items()]
    return nnx.merge(graph, nnx.from_flat_state(state))


def block_axes(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The logical axes of one layer's parameters by name without the layer's prefix."""
    return {name: variable.get_metadata("logical") for name, variable in _block_blueprint(spec)[1].items()}


def _created(spec: ModelSpec, key: PRNGKeyArray) -> Params:
    variables = _named(nnx.state(Decoder(spec, nnx.Rngs(params=key)), nnx.Param))
    return {name: variable[...] for name, variable in variables.items()}


@functools.lru_cache(maxsize=32)
def _blueprint(spec: ModelSpec) -> tuple[nnx.GraphDef, dict[str, nnx.Variable]]:
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(spec, nnx.Rngs(params=0))), nnx.Param)
    return graph, _named(state)


@functools.lru_cache(maxsize=32)
def _block_blueprint(spec: ModelSpec) -> tuple[nnx.GraphDef, dict[str, nnx.Variable]]:
    graph, state = nnx.split(nnx.eval_shape(lambda: Block(spec, nnx.Rngs(params=0))), nnx.Param)
    return graph, _named(state)


def _named(state: nnx.State) -> dict[str, nnx.Variable]:
    return dict(sorted((_name(path), variable) for path, variable in nnx.to_flat_state(state)))


def _name(path: tuple[Any, ...]) -> str:
    """The name "layers.00.attn.q" for ("layers", 0, "attn", "q"); a norm's name leaves out its `scale`."""
    parts = path[:-1] if path[-1] == "scale" else path
    return ".".join(f"{part:02d}" if isinstance(part, int) else part for part in parts)


def _path(name: str) -> tuple[str | int, ...]:
    parts = tuple(int(part) if part.isdigit() else part for part in name.split("."))
    return (*parts, "scale") if str(parts[-1]).endswith("norm") else parts


def _check(variables: Mapping[str, nnx.Variable], params: Mapping[str, jax.Array]) -> None:
    missing, unknown = sorted(variables.keys() - params.keys()), sorted(params.keys() - variables.keys())
    if missing or unknown:
        raise ValueError(f"parameters do not fit the model: missing {missing}, unknown {unknown}")
    for name, variable in variables.items():
        if params[name].shape != variable.shape:
            raise ValueError(f"parameter {name} has shape {params[name].shape}, the model declares {variable.shape}")
