"""Parameters and optimizer state: what a checkpoint holds and an optimizer step replaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxroll.errors import ConfigError
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.sharding.rules import Layout, replicated

Params = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The learner's arrays. `step` (int32) counts optimizer steps, which is claims × substeps.

    A state that only describes one holds ShapeDtypeStructs or shardings in their places.
    """

    params: dict[str, Any]
    opt_state: Any
    step: Any


def shardings(spec: ModelSpec, layout: Layout, transform: optax.GradientTransformation) -> TrainState:
    """A TrainState of NamedShardings: moments lie where their parameter lies, counters everywhere."""
    params = model_params.shardings(spec, layout.mesh, layout.rules)
    everywhere = replicated(layout.mesh)
    opt_state = optax.tree_map_params(
        transform,
        lambda _, sharding: sharding,
        jax.eval_shape(transform.init, model_params.abstract(spec)),
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(params, opt_state, everywhere)


def abstract(spec: ModelSpec, layout: Layout, transform: optax.GradientTransformation) -> TrainState:
    """A TrainState of ShapeDtypeStructs with shardings: what to compile against and to restore into."""
    params = model_params.abstract(spec)
    shapes = TrainState(params, jax.eval_shape(transform.init, params), jax.ShapeDtypeStruct((), jnp.int32))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(spec, layout, transform),
    )


def fresh(params: Params, spec: ModelSpec, layout: Layout, transform: optax.GradientTransformation) -> TrainState:
    """The state of `params` before the first step; the moments are made where they will lie."""
    placed = shardings(spec, layout, transform)
    opt_state = jax.jit(transform.init, out_shardings=placed.opt_state)(params)
    return TrainState(params, opt_state, jax.device_put(np.int32(0), placed.step))


def placed(params: Mapping[str, np.ndarray], spec: ModelSpec, layout: Layout) -> Params:
    """Host arrays as sharded float32 parameters; ConfigError when they are not this model's."""
    expected = model_params.abstract(spec)
    missing, unknown = sorted(expected.keys() - params.keys()), sorted(params.keys() - expected.keys())
    if missing or unknown:
        raise ConfigError(
            "model.size",
            spec.name,
            f"the weights lack {missing[:3]} and have {unknown[:3]} besides",
            "Another model's?",
        )
    for name, leaf in expected.items():
        if params[name].shape != leaf.shape:
            raise ConfigError(
                "model.size",
                spec.name,
                f"{name} has shape {params[name].shape} in the weights, the model has {leaf.shape}",
            )
    where = model_params.shardings(spec, layout.mesh, layout.rules)
    # Not aliased: a step donates its parameters, and the caller still holds the host arrays.
    return {
        name: jax.device_put(np.asarray(params[name], np.float32), where[name], may_alias=False) for name in expected
    }
