"""Low-rank adapters: the model computes with W + (α/r)·A·B, where W is frozen and A and B are trained.

E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (their ΔW = BA is our AB: weights here are
[*in, *out]). B begins at zero, so the first step sees the model that the run starts from. Samplers, evaluation and
export see W + (α/r)·A·B as one array; a checkpoint holds A, B and their optimizer. In a mixture of experts every
expert has adapters of its own, with the experts as the first axis, and the router is frozen.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PRNGKeyArray

from jaxroll import sharding as layouts
from jaxroll.config import LearnerConfig
from jaxroll.learner import peft
from jaxroll.models import params
from jaxroll.models.families import ModelSpec
from jaxroll.models.hf_config import of_experts
from jaxroll.sharding import Layout

Params = dict[str, jax.Array]
_A, _B = ".A", ".B"


@dataclass(frozen=True)
class Lora:
    """The adapted parameters and the adapters' rank; `alpha` / `rank` scales the product."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, learner: LearnerConfig) -> Lora | None:
        """The adapters that the config asks for; None when all parameters are trained."""
        if not learner.lora_rank:
            return None
        return cls(learner.lora_rank, learner.lora_alpha, tuple(learner.lora_targets))

    @property
    def scale(self) -> float:
        """α/r."""
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """True if the parameter of this name has adapters (see `peft.target`)."""
        return peft.target(name) in self.targets


def abstract(spec: ModelSpec, lora: Lora) -> dict[str, jax.ShapeDtypeStruct]:
    """Name to shape of every adapter (float32): A [*in, r] and B [r, *out] of each target parameter, sorted.

    Those of experts are A [E, in, r] and B [E, r, out].
    """
    found = {}
    for name, leaf in params.abstract(spec).items():
        if lora.adapts(name):
            each, inputs, outputs = peft.divided(name, leaf.shape)
            found[name + _A] = jax.ShapeDtypeStruct((*each, *inputs, lora.rank), leaf.dtype)
            found[name + _B] = jax.ShapeDtypeStruct((*each, lora.rank, *outputs), leaf.dtype)
    return found


def logical_axes(spec: ModelSpec, lora: Lora) -> dict[str, tuple[str | None, ...]]:
    """The logical axes of every adapter by name: those of its parameter; the rank axis has none."""
    axes = params.logical_axes(spec)

    def logical(adapter: str) -> tuple[str | None, ...]:
        name = adapter.removesuffix(_A).removesuffix(_B)
        each, inputs, outputs = peft.divided(name, axes[name])
        return (*each, *inputs, None) if adapter.endswith(_A) else (*each, None, *outputs)

    return {name: logical(name) for name in abstract(spec, lora)}


def shardings(spec: ModelSpec, layout: Layout, lora: Lora) -> dict[str, jax.NamedSharding]:
    """The sharding of every adapter by name: its parameter's axes are sharded alike, the rank axis is replicated."""
    axes = logical_axes(spec, lora)
    return {name: layout.sharding(axes[name], leaf.shape) for name, leaf in abstract(spec, lora).items()}


def init(spec: ModelSpec, layout: Layout, lora: Lora, key: PRNGKeyArray) -> Params:
    """Fresh adapters, created sharded: A normal with deviation 1/√in, B zero; the same on every mesh."""
    # One program creates every layer: a program for all of them compiles in a time that grows with their number.
    where, everywhere = shardings(spec, layout, lora), layouts.replicated(layout.mesh)
    # By a program, because device_put places no keys on devices of other hosts.
    keys = jax.jit(jax.random.split, static_argnums=1, out_shardings=everywhere)(key, len(where))
    names, numbers = params.in_layer(where), {name: number for number, name in enumerate(where)}
    out = {name: where[f"layers.00.{name}"] for name in names}
    create, found = jax.jit(functools.partial(_created, spec, lora), out_shardings=out), {}
    for layer in range(spec.layers):
        full, _ = params.in_loop(spec, layer, names)
        chosen = np.array([numbers[full[name]] for name in names], np.int32)
        made = create(keys, jax.device_put(chosen, everywhere))
        found |= {full[name]: value for name, value in made.items()}
    return {name: found[name] for name in where}


def starting(learner: LearnerConfig, spec: ModelSpec, layout: Layout, lora: Lora, key: PRNGKeyArray) -> Params:
    """The adapters that a run starts from: those in `learner.lora_path`, or fresh ones."""
    if not learner.lora_path:
        return init(spec, layout, lora, key)
    given, where = peft.read(learner, spec), shardings(spec, layout, lora)
    return {name: layouts.placed_once(given[name], where[name]) for name in where}


def merged(
    spec: ModelSpec, layout: Layout | None, lora: Lora, base: Mapping[str, Array], adapters: Mapping[str, Array]
) -> Params:
    """The parameters that the model computes with, by name: W, or W + (α/r)·A·B (float32) for adapted parameters.

    With a `layout`, each product is sharded like its parameter.
    """
    axes = params.logical_axes(spec)

    def one(name: str, value: Array) -> Array:
        if not lora.adapts(name):
            return value
        product = _product(name)(adapters[name + _A], adapters[name + _B])
        product = product if layout is None else layout.constrain(product, axes[name])
        return value + lora.scale * product

    return {name: one(name, value) for name, value in base.items()}


def stacked(spec: ModelSpec, layout: Layout, lora: Lora, adapters: Mapping[str, Array]) -> Params:
    """The adapters of the layers in the loop, stacked ("loop.00.attn.q.A"): A [layers, *in, r], B [layers, r, *out]."""
    axes = logical_axes(spec, lora)
    return params.stacks(spec, adapters, layout, {name: axes[f"layers.00.{name}"] for name in params.in_layer(axes)})


def merged_stacks(
    spec: ModelSpec, layout: Layout, lora: Lora, base: Mapping[str, Array], adapters: Mapping[str, Array]
) -> Params:
    """`params.stacked` of the merged parameters; `adapters` are those of `stacked`."""
    axes = params.block_axes(spec)

    def one(full: str, stack: Array) -> Array:
        if full + _A not in adapters:
            return stack
        product = jax.vmap(_product(full))(adapters[full + _A], adapters[full + _B])
        return stack + lora.scale * layout.constrain(product, ("layers", *axes[full.split(".", 2)[2]]))

    return params.stacked(spec, base, layout, one)


def _product(name: str) -> Callable[[Array, Array], Array]:
    """A·B of a parameter's adapters; of experts, for each of them."""
    multiplied = jnp.matmul if of_experts(name) else functools.partial(jnp.tensordot, axes=1)
    return functools.partial(multiplied, precision=jax.lax.Precision.HIGHEST)


# --- gradients of the trained parameters: of adapters, or without them of all


def differentiated(spec: ModelSpec, layout: Layout, lora: Lora | None, trained: Mapping[str, Array]) -> Params:
    """The arrays by which gradients are taken: `trained`, of which those of layers in a loop are stacked."""
    # Gradients of stacks are accumulated as stacks and divided before the optimizer step: otherwise every program of a
    # micro-batch has to compile a slice and a sum per parameter.
    if not spec.scan:
        return dict(trained)
    stacks = stacked(spec, layout, lora, trained) if lora else params.stacked(spec, trained, layout)
    shapes = jax.eval_shape(functools.partial(params.unstacked, spec), stacks)
    return {name: value for name, value in trained.items() if name not in shapes} | stacks


def abstract_gradients(
    spec: ModelSpec, layout: Layout, lora: Lora | None, trained: Mapping[str, Any]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract gradients of a micro-batch, for the abstract parameters `trained` of a state."""
    axes = logical_axes(spec, lora) if lora else params.logical_axes(spec)
    shapes = jax.eval_shape(functools.partial(differentiated, spec, layout, lora), dict(trained))

    def one(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        if name in trained:
            return jax.ShapeDtypeStruct(shape, np.float32, sharding=trained[name].sharding)
        logical = "layers", *axes["layers.00." + name.split(".", 2)[2]]
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=layout.sharding(logical, shape))

    return {name: one(name, leaf.shape) for name, leaf in shapes.items()}


def merged_on_host(lora: Lora, name: str, base: np.ndarray, adapters: Mapping[str, np.ndarray]) -> np.ndarray:
    """One parameter of `merged`, from host arrays."""
    if not lora.adapts(name):
        return base
    multiplied = np.matmul if of_experts(name) else functools.partial(np.tensordot, axes=1)
    product = multiplied(adapters[name + _A], adapters[name + _B])
    return (base + np.float32(lora.scale) * product).astype(np.float32)


def digest(base: Mapping[str, Any]) -> str:
    """A digest of the frozen parameters' bits, which shows that adapters are applied to the base they were trained on.

    Reads each parameter once and keeps none.
    """
    text = ",".join(f"{name}:{int(_bit_sum(jnp.asarray(base[name], jnp.float32))):08x}" for name in sorted(base))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@jax.jit
def _bit_sum(value: Array) -> Array:
    """uint32: the sum, modulo 2³², of each number's bits hashed with its index; a sum is the same on every mesh."""
    # Hashed before summing: otherwise two changes could cancel, such as two swapped signs.
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, stride in enumerate(_strides(bits.shape)):
        place = place + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
    return jnp.sum(_mixed(bits ^ _mixed(place + jnp.uint32(0x9E3779B9))), dtype=jnp.uint32)


def _mixed(bits: Array) -> Array:
    """uint32, bijective: every input bit changes about half of the output bits (MurmurHash3 finalizer, A. Appleby)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _created(spec: ModelSpec, lora: Lora, keys: Key[Array, " L"], numbers: Int[Array, " l"]) -> Params:
    """The fresh adapters of a layer by name in it; adapter i of the layer has the key of number numbers[i]."""
    shapes = abstract(spec, lora)

    def one(name: str, key: Key[Array, ""]) -> Array:
        leaf = shapes[f"layers.00.{name}"]
        if name.endswith(_B):
            return jnp.zeros(leaf.shape, leaf.dtype)
        _, inputs, _ = peft.divided(f"layers.00.{name}".removesuffix(_A), leaf.shape)
        return jax.random.normal(key, leaf.shape, leaf.dtype) / math.sqrt(math.prod(inputs))

    return {name: one(name, keys[numbers[i]]) for i, name in enumerate(params.in_layer(shapes))}
