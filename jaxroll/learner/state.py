"""Train state (parameters or adapters, optimizer state), and the frozen reference model."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxroll import sharding as layouts
from jaxroll.config import LearnerConfig
from jaxroll.errors import ConfigError
from jaxroll.learner import lora as adapters
from jaxroll.learner.lora import Lora
from jaxroll.learner.step_metrics import LOADS
from jaxroll.models import moe
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
    spec: ModelSpec,
    layout: Layout,
    transform: optax.GradientTransformation,
    lora: Lora | None = None,
    *,
    offload: bool = False,
) -> TrainState:
    """A TrainState of NamedShardings: moments are sharded like their parameters, counters are replicated.

    With `offload`, moments are in host memory.
    """
    params = adapters.shardings(spec, layout, lora) if lora else model_params.shardings(spec, layout.mesh, layout.rules)
    everywhere = replicated(layout.mesh)
    opt_state = optax.tree_map_params(
        transform,
        lambda _, sharding: sharding.with_memory_kind(layouts.HOST_MEMORY) if offload else sharding,
        jax.eval_shape(transform.init, _trained(spec, lora)),
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(params, opt_state, everywhere)


def abstract(
    spec: ModelSpec,
    layout: Layout,
    transform: optax.GradientTransformation,
    lora: Lora | None = None,
    *,
    offload: bool = False,
) -> TrainState:
    """A TrainState of ShapeDtypeStructs with shardings, to compile against and to restore into."""
    params = _trained(spec, lora)
    shapes = TrainState(params, jax.eval_shape(transform.init, params), jax.ShapeDtypeStruct((), jnp.int32))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(spec, layout, transform, lora, offload=offload),
    )


def _trained(spec: ModelSpec, lora: Lora | None) -> dict[str, jax.ShapeDtypeStruct]:
    return adapters.abstract(spec, lora) if lora else model_params.abstract(spec)


def fresh(
    params: Params,
    spec: ModelSpec,
    layout: Layout,
    transform: optax.GradientTransformation,
    lora: Lora | None = None,
    *,
    offload: bool = False,
) -> TrainState:
    """The state of `params` (with `lora`: of the adapters) before the first step; moments are created sharded."""
    placed = shardings(spec, layout, transform, lora, offload=offload)
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
        name: jax.device_put(value, value.sharding.with_memory_kind(layouts.HOST_MEMORY), may_alias=False)
        for name, value in params.items()
    }


# --- AdamW with clipping by global norm and a learning-rate schedule, by optax

BETA1, BETA2 = 0.9, 0.95  # not 0.999: a run is a few hundred steps, so the second moment must adapt faster
DECAYED_TO = 0.1  # fraction of the peak at the end of a cosine decay


@dataclass(frozen=True)
class Optimizer:
    """`transform` turns gradients into updates; `schedule` maps the number of updates done to a learning rate.

    `transform` clips by global norm, then does `each`, whose update of a parameter depends on no other parameter.
    With `offload`, a state's moments are in host memory; a program that updates takes them to the devices and back.
    """

    each: optax.GradientTransformation
    schedule: optax.Schedule
    max_grad_norm: float
    offload: bool = False

    @functools.cached_property
    def transform(self) -> optax.GradientTransformation:
        """Clipping, then `each`."""
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), self.each)


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
    each = optax.adamw(schedule, BETA1, BETA2, weight_decay=weight_decay, mask=_decays)
    return Optimizer(each, schedule, max_grad_norm)


def build(config: LearnerConfig) -> Optimizer:
    """The policy's optimizer; its steps are optimizer steps (claims × minibatches)."""
    schedule = learning_rate(config.learning_rate, config.warmup_steps, config.decay_steps)
    return replace(adamw(schedule, config.weight_decay, config.max_grad_norm), offload=config.optimizer_offload)


def of_critic(config: LearnerConfig) -> Optimizer:
    """The critic's optimizer: its own learning rate, and clipping by the norm of its own gradient."""
    # The critic's state is moved as a whole (`critic_offload`), so its own programs move nothing.
    return build(replace(config, learning_rate=config.critic_learning_rate, optimizer_offload=False))


def check_host_memory(learner: LearnerConfig, devices: Sequence[Any]) -> None:
    """Raise ConfigError if a key moves arrays to host memory and one of the `devices` cannot address any."""
    asked = {"optimizer_offload": False, "reference_offload": False, "critic_offload": False, "remat": "layer"}
    for key, instead in asked.items():
        if (value := getattr(learner, key)) not in (True, "offload"):
            continue
        for device in devices:
            kinds = sorted(memory.kind for memory in device.addressable_memories())
            if layouts.HOST_MEMORY not in kinds:
                reason = f"{device.device_kind} has no memory {layouts.HOST_MEMORY}, only {', '.join(kinds)}"
                remedy = f"Set it to {json.dumps(instead)}: the devices then keep the arrays."
                raise ConfigError(f"learner.{key}", value, reason, remedy)


def _decays(params: dict[str, jax.Array]) -> dict[str, bool]:
    return {name: value.ndim > 1 for name, value in params.items()}


# --- one step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Gradients (float32, sharded like the parameters) and statistics, summed over micro-batches.

    An abstract accumulator has ShapeDtypeStructs as leaves.
    """

    grads: dict[str, Any]
    statistics: dict[str, Any]


def applied(
    optimizer: Optimizer, state: TrainState, accumulator: Accumulator
) -> tuple[TrainState, Accumulator, dict[str, Any]]:
    """The state after one step of `optimizer` with the accumulated gradients, an empty accumulator, the report."""
    opt_state = _on_devices_now(optimizer, state.opt_state)
    updates, opt_state = optimizer.transform.update(accumulator.grads, opt_state, state.params)
    params = cast(Params, optax.apply_updates(state.params, updates))
    report = reported(optimizer, accumulator, state.step)
    return TrainState(params, opt_state, state.step + 1), layouts.zeroed(accumulator), report


def _on_devices_now(optimizer: Optimizer, opt_state: Any) -> Any:
    """`opt_state` in a program that updates, on the devices; the sharding of the result moves the next one back."""
    return jax.device_put(opt_state, jax.memory.Space.Device) if optimizer.offload else opt_state


def reported(optimizer: Optimizer, accumulator: Accumulator, step: Any) -> dict[str, Any]:
    """The report of a step: statistics, the norm of all gradients, and the learning rate."""
    return {
        "statistics": accumulator.statistics,
        "grad_norm": optax.tree.norm(accumulator.grads),
        "learning_rate": jnp.asarray(optimizer.schedule(step), jnp.float32),
    }


# --- the same step, a layer at a time

Trees = list[dict[str, Any]]  # parameters, then the moments of the optimizer state, each by name


class ByLayer:
    """The optimizer step of a model whose layers are in a loop: one program for every layer, one for the rest.

        report  (accumulator, step) → report                         it has the norm that clipping needs
        layer   (parameters and moments of a layer) → the next ones  called for every layer; donated
        rest    the same for all other parameters

    The time to compile them does not grow with the number of layers. Gradients of layers are slices of the stacks in
    the accumulator, of which `accumulator` has the shapes, as `state` of the state.
    """

    PROGRAMS = ("report", "layer", "rest")

    def __init__(
        self, spec: ModelSpec, optimizer: Optimizer, bias_rate: float, state: TrainState, accumulator: Accumulator
    ) -> None:
        self._spec, self._optimizer, self._bias_rate = spec, optimizer, bias_rate
        self._state, self._accumulator = state, accumulator
        self._rest = {name: name for name in state.params if name in accumulator.grads}
        self._names = model_params.in_layer(state.params)

    def applied(
        self, programs: Mapping[tuple[str, int], Callable[..., Any]], state: TrainState, accumulator: Accumulator
    ) -> tuple[TrainState, dict[str, Any]]:
        """The next state and the report, by PROGRAMS, which have no rows; donates state and gradients."""
        report, layer, rest = programs["report", 0](accumulator, state.step), programs["layer", 0], programs["rest", 0]
        trees, counts = self._opened(state)
        shared, grads = self._shared(counts, report["grad_norm"], accumulator), accumulator.grads
        for number, index in enumerate(self._indices):
            names, stacks = model_params.in_loop(self._spec, number, self._names)
            _write(trees, names, layer(_read(trees, names), _read([grads], stacks)[0], shared, index))
        part, counts, step = rest(_read(trees, self._rest), _read([grads], self._rest)[0], shared, state.step)
        _write(trees, self._rest, part)
        for grad in grads.values():
            grad.delete()
        return TrainState(trees[0], _joined(state.opt_state, trees[1:], counts), step), report

    def lowered(self, name: str) -> jax.stages.Lowered:
        """One of PROGRAMS before compilation."""
        step, accumulator = self._state.step, self._accumulator
        if name == "report":
            report = functools.partial(reported, self._optimizer)
            return jax.jit(report, out_shardings=step.sharding).lower(accumulator, step)
        trees, counts = self._opened(self._state)
        norm = jax.ShapeDtypeStruct((), jnp.float32, sharding=step.sharding)
        rest = self._rest, self._rest
        names, grads = model_params.in_loop(self._spec, 0, self._names) if name == "layer" else rest
        part, shared = _read(trees, names), self._shared(counts, norm, accumulator)
        where = layouts.shardings_of(part)
        out, of = (where, self._layer) if name == "layer" else ((where, step.sharding, step.sharding), self._others)
        made = jax.jit(of, donate_argnums=0, out_shardings=out)
        return made.lower(part, _read([accumulator.grads], grads)[0], shared, step)

    @functools.cached_property
    def _indices(self) -> list[jax.Array]:
        """The numbers of the layers in the loop, on the devices."""
        numbers = [np.array(number, np.int32) for number in range(model_params.layers_in_loop(self._spec))]
        return [layouts.placed_once(number, self._state.step.sharding) for number in numbers]

    def _opened(self, state: TrainState) -> tuple[Trees, list[Any]]:
        """The trees of `state`, and the counters of its optimizer."""
        trees, counts = _divided(state.opt_state)
        return [dict(state.params), *trees], counts

    def _shared(self, counts: Sequence[Any], norm: Any, accumulator: Accumulator) -> dict[str, Any]:
        """The arguments of all parts; `norm` is that of all gradients."""
        return {"counts": counts, "norm": norm, "loads": accumulator.statistics[LOADS] if self._bias_rate else None}

    def _layer(self, trees: Trees, stacks: Params, shared: dict[str, Any], number: jax.Array) -> Trees:
        """The next trees of layer `number`, by name in a layer."""
        index, prefix = number // self._spec.period, "layers.00."
        grads = {name: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False) for name, stack in stacks.items()}
        (params, *moments), _ = self._stepped(trees, grads, shared)
        if self._bias_rate:
            named = {prefix + name: value for name, value in params.items()}
            named = moe.with_moved_biases(named, shared["loads"][number][None], self._bias_rate)
            params = {name.removeprefix(prefix): value for name, value in named.items()}
        return [params, *moments]

    def _others(
        self, trees: Trees, grads: Params, shared: dict[str, Any], step: jax.Array
    ) -> tuple[Trees, list[Any], jax.Array]:
        """The next trees of the parameters outside the loop, and all counters after the step."""
        (params, *moments), counts = self._stepped(trees, grads, shared)
        if self._bias_rate:
            params = moe.with_moved_biases(params, shared["loads"], self._bias_rate)
        return [params, *moments], counts, step + 1

    def _stepped(self, trees: Trees, grads: Params, shared: dict[str, Any]) -> tuple[Trees, list[Any]]:
        norm, limit = shared["norm"], self._optimizer.max_grad_norm
        clipped = jax.tree.map(lambda grad: jnp.where(norm < limit, grad, grad / norm * limit), grads)
        _, held = _joined(self._state.opt_state, trees[1:], shared["counts"])
        held = _on_devices_now(self._optimizer, held)
        updates, held = self._optimizer.each.update(clipped, held, trees[0])
        moments, counts = _divided(held)
        return [cast(Params, optax.apply_updates(trees[0], updates)), *moments], counts


def _read(trees: Trees, names: Mapping[str, str]) -> Trees:
    """The entries of every tree with the full `names`, by their short ones."""
    return [{short: tree[full] for short, full in names.items()} for tree in trees]


def _write(trees: Trees, names: Mapping[str, str], part: Trees) -> None:
    """Replace the entries that `_read` returns."""
    for tree, found in zip(trees, part, strict=True):
        tree.update({full: found[short] for short, full in names.items()})


def _divided(opt_state: Any) -> tuple[Trees, list[Any]]:
    """The trees of moments (new dicts), and all other leaves, which are counters."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_tree)
    return [dict(leaf) for leaf in leaves if _is_tree(leaf)], [leaf for leaf in leaves if not _is_tree(leaf)]


def _joined(like: Any, trees: Trees, counts: Sequence[Any]) -> Any:
    """The optimizer state in the structure of `like`: the inverse of `_divided`."""
    tree, count = iter(trees), iter(counts)
    return jax.tree.map(lambda leaf: next(tree) if _is_tree(leaf) else next(count), like, is_leaf=_is_tree)


def _is_tree(leaf: Any) -> bool:
    return isinstance(leaf, dict)
