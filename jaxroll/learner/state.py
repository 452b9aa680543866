"""Train state (parameters or adapters, optimizer state), and the frozen reference model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxroll import sharding as layouts
from jaxroll.config import LearnerConfig
from jaxroll.errors import ConfigError
from jaxroll.learner import lora as adapters
from jaxroll.learner.lora import Lora
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.models.folders import Converted
from jaxroll.sharding import Layout, replicated

Params = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The learner's arrays. `params` are the trained parameters: all of the model's, or adapters (see `lora`).

    `step` (int32) counts optimizer steps, which is claims × minibatches. `critic` is the critic's TrainState in a run
    that has one; the programs of the policy neither take nor return it. An abstract state has ShapeDtypeStructs or
    shardings as leaves.
    """

    params: dict[str, Any]
    opt_state: Any
    step: Any
    critic: Any = None


def shardings(
    spec: ModelSpec, layout: Layout, transform: optax.GradientTransformation, lora: Lora | None = None
) -> TrainState:
    """A TrainState of NamedShardings: moments are sharded like their parameters, counters are replicated."""
    params = adapters.shardings(spec, layout, lora) if lora else model_params.shardings(spec, layout.mesh, layout.rules)
    everywhere = replicated(layout.mesh)
    opt_state = optax.tree_map_params(
        transform,
        lambda _, sharding: sharding,
        jax.eval_shape(transform.init, _trained(spec, lora)),
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(params, opt_state, everywhere)


def abstract(
    spec: ModelSpec, layout: Layout, transform: optax.GradientTransformation, lora: Lora | None = None
) -> TrainState:
    """A TrainState of ShapeDtypeStructs with shardings, to compile against and to restore into."""
    params = _trained(spec, lora)
    shapes = TrainState(params, jax.eval_shape(transform.init, params), jax.ShapeDtypeStruct((), jnp.int32))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(spec, layout, transform, lora),
    )


def _trained(spec: ModelSpec, lora: Lora | None) -> dict[str, jax.ShapeDtypeStruct]:
    return adapters.abstract(spec, lora) if lora else model_params.abstract(spec)


def fresh(
    params: Params,
    spec: ModelSpec,
    layout: Layout,
    transform: optax.GradientTransformation,
    lora: Lora | None = None,
) -> TrainState:
    """The state of `params` (with `lora`: of the adapters) before the first step; moments are created sharded."""
    placed = shardings(spec, layout, transform, lora)
    opt_state = jax.jit(transform.init, out_shardings=placed.opt_state)(params)
    return TrainState(params, opt_state, layouts.placed_once(np.array(0, np.int32), placed.step))


def placed(params: Mapping[str, np.ndarray], spec: ModelSpec, layout: Layout) -> Params:
    """Host arrays as sharded float32 parameters; ConfigError when names or shapes are not this model's.

    If the mesh spans several processes, each reads the slices of its own devices from arrays in files (`Converted`).
    """
    expected = model_params.abstract(spec)
    missing, unknown = sorted(expected.keys() - params.keys()), sorted(params.keys() - expected.keys())
    if missing or unknown:
        raise ConfigError(
            "model.size",
            spec.name,
            f"the weights lack {missing[:3]} and have the unknown parameters {unknown[:3]}",
            "Check that they belong to this model.",
        )
    where = model_params.shardings(spec, layout.mesh, layout.rules)
    return {name: _on_devices(spec, name, params, where[name]) for name in expected}


def _on_devices(
    spec: ModelSpec, name: str, params: Mapping[str, np.ndarray], where: jax.sharding.Sharding
) -> jax.Array:
    """One parameter on the devices, after its transfer is complete."""
    # Waiting keeps one host array in memory at a time: `params` may read each of them from a file.
    shape = model_params.abstract(spec)[name].shape
    if isinstance(params, Converted) and not where.is_fully_addressable:
        return jax.block_until_ready(
            jax.make_array_from_callback(shape, where, lambda index: np.array(params.slice_of(name, index or ())))
        )
    value = params[name]
    if value.shape != shape:
        reason = f"{name} has shape {value.shape} in the weights, the model has {shape}"
        raise ConfigError("model.size", spec.name, reason, "Check that the weights belong to this model.")
    # Copied: a step donates its parameters, and the caller still holds the host arrays.
    return jax.block_until_ready(layouts.placed_once(np.asarray(value, np.float32), where))


# --- reference model: a frozen copy of the initial parameters, on the learner's mesh
#
# Between two uses it is stored on the devices or in host memory. Checkpoints do not contain it: a resumed run rebuilds
# it from the parameters that the run started from.

HOST_MEMORY = "pinned_host"


class Reference:
    """The frozen parameters of the reference model; `params()` gives access to them."""

    def __init__(self, params: Params, *, offload: bool) -> None:
        self._shardings = {name: value.sharding for name, value in params.items()}
        # Copied: a step donates the parameters that it replaces.
        self._kept = _on_host(params) if offload else jax.tree.map(jnp.copy, params)
        self.offload = offload

    @classmethod
    def of(cls, learner: LearnerConfig, params: Params) -> Reference | None:
        """The reference that the config asks for, with a copy of `params`; None when it asks for none."""
        return None if learner.reference == "none" else cls(params, offload=learner.reference_offload)

    @property
    def memory_kinds(self) -> set[str]:
        """The kinds of memory that store the parameters between two uses, as JAX names them."""
        return {str(value.sharding.memory_kind) for value in self._kept.values()}

    @contextmanager
    def params(self) -> Iterator[Params]:
        """The parameters on the devices, until the block ends; programs dispatched inside it may finish later."""
        if not self.offload:
            yield self._kept
            return
        yield {name: jax.device_put(value, self._shardings[name]) for name, value in self._kept.items()}


def _on_host(params: Params) -> Params:
    """Copies in host memory; each shard is on the host of its device."""
    return {
        name: jax.device_put(value, value.sharding.with_memory_kind(HOST_MEMORY), may_alias=False)
        for name, value in params.items()
    }


# --- AdamW with clipping by global norm and a learning-rate schedule, by optax

BETA1, BETA2 = 0.9, 0.95  # not 0.999: a run is a few hundred steps, so the second moment must adapt faster
DECAYED_TO = 0.1  # fraction of the peak at the end of a cosine decay


@dataclass(frozen=True)
class Optimizer:
    """`transform` turns gradients into updates; `schedule` maps the number of updates done to a learning rate."""

    transform: optax.GradientTransformation
    schedule: optax.Schedule


def learning_rate(peak: float, warmup_steps: int, decay_steps: int) -> optax.Schedule:
    """Linear warm-up that reaches `peak` at update `warmup_steps`; the first update already has a rate above 0.

    Then constant if `decay_steps` is 0, otherwise a cosine to DECAYED_TO · peak over that many updates.
    """
    warmup_steps = max(warmup_steps, 1)
    after = optax.cosine_decay_schedule(peak, decay_steps, DECAYED_TO) if decay_steps else optax.constant_schedule(peak)
    ramp = optax.linear_schedule(peak / warmup_steps, peak, warmup_steps - 1)
    return optax.join_schedules([ramp, after], [warmup_steps - 1])


def adamw(schedule: optax.Schedule, weight_decay: float, max_grad_norm: float) -> Optimizer:
    """AdamW after clipping by global norm; weight decay applies to matrices only, not to the scales of norms."""
    return Optimizer(
        optax.chain(
            optax.clip_by_global_norm(max_grad_norm),
            optax.adamw(schedule, BETA1, BETA2, weight_decay=weight_decay, mask=_decays),
        ),
        schedule,
    )


def build(config: LearnerConfig) -> Optimizer:
    """The policy's optimizer; its steps are optimizer steps (claims × minibatches)."""
    schedule = learning_rate(config.learning_rate, config.warmup_steps, config.decay_steps)
    return adamw(schedule, config.weight_decay, config.max_grad_norm)


def of_critic(config: LearnerConfig) -> Optimizer:
    """The critic's optimizer: its own learning rate, and clipping by the norm of its own gradient."""
    return build(replace(config, learning_rate=config.critic_learning_rate))


def _decays(params: dict[str, jax.Array]) -> dict[str, bool]:
    return {name: value.ndim > 1 for name, value in params.items()}
