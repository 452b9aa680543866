"""Mixture of experts: the router's choices, and the experts' SwiGLU as grouped matrix products.

Every token goes to k of E experts, and none is dropped: (token, expert) pairs are sorted by expert, so that each
expert's tokens are consecutive rows of one product (`jax.lax.ragged_dot`). The router computes in float32 for every
compute dtype. If the mesh axis `expert` divides the experts, each device gathers the tokens of its group along that
axis, computes those of its experts, and the sums are scattered back. For a group of up to k devices this moves no more
data than sending every pair to the device of its expert, and all shapes are static.

n tokens, D width, E experts, k experts of a token, F hidden units of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Integer

from jaxroll.kernels.attention import exact_precision
from jaxroll.models.families import ModelSpec
from jaxroll.sharding import Layout

AXIS = "expert"  # the mesh axis that divides the experts
Choose = Callable[[Float[Array, "*rows E"], Float[Array, "*rows E"]], Integer[Array, "*rows k"]]


@dataclass(frozen=True)
class Routing:
    """The choice of experts and its layout (None: the compiler infers shardings).

    `choose` gets the router's logits and the scores that rank the experts (logits plus biases, if there are any).
    """

    choose: Choose
    layout: Layout | None = None


class ExpertWeights(NamedTuple):
    """The projections of E experts."""

    gate: Float[Array, "E D F"]
    up: Float[Array, "E D F"]
    down: Float[Array, "E F D"]


# --- router


def router_logits(x: Float[Array, "*rows D"], router: Float[Array, "D E"]) -> Float[Array, "*rows E"]:
    """x·W in float32."""
    wide = x.astype(jnp.float32)
    return jnp.einsum("...d,de->...e", wide, router.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def largest(k: int) -> Choose:
    """The choice of the k experts with the largest scores, in falling order; the lower index first for equal scores."""
    return lambda logits, scores: jax.lax.top_k(scores, k)[1]


def replayed(choices: Integer[Array, "*rows k"]) -> Choose:
    """The choice of `choices`; a token whose first entry is not an expert gets those with the largest scores."""
    own = largest(choices.shape[-1])

    def choose(logits: Array, scores: Array) -> Array:
        known = choices[..., :1] < logits.shape[-1]
        return jnp.where(known, choices.astype(jnp.int32), own(logits, scores))

    return choose


def gates(
    logits: Float[Array, "*rows E"], chosen: Integer[Array, "*rows k"], normalized: bool
) -> Float[Array, "*rows k"]:
    """The weights of the chosen experts: softmax over all E, and if `normalized` divided by their sum over the k."""
    weights = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), chosen, axis=-1)
    return weights / jnp.sum(weights, axis=-1, keepdims=True) if normalized else weights


def is_router(name: str) -> bool:
    """True for the parameters of routers, which compute in float32."""
    return name.endswith((".router", ".router_bias"))


def with_moved_biases(params: Mapping[str, Array], chosen: Float[Array, "L E"], rate: float) -> dict[str, Array]:
    """`params` with bᵢ + rate · sign(mean load − load of expert i) for the bias of every expert of a layer.

    Biases balance the load without a loss: an expert with too few tokens is chosen more often (L. Wang et al.,
    "Auxiliary-loss-free load balancing strategy for mixture-of-experts", 2024, algorithm 1; there they are added to
    sigmoids, here to logits).
    """
    moves = rate * jnp.sign(jnp.mean(chosen, axis=-1, keepdims=True) - chosen)
    return {
        name: value + moves[int(name.split(".")[1])] if name.endswith(".router_bias") else value
        for name, value in params.items()
    }


# --- experts


def mixed(
    x: Float[Array, "*rows D"],
    chosen: Integer[Array, "*rows k"],
    weights: Float[Array, "*rows k"],
    experts: ExpertWeights,
    layout: Layout | None,
) -> Float[Array, "*rows D"]:
    """Σ over a token's experts of weight · down(silu(gate(x)) · up(x)), in the dtype of x.

    With a layout, x is [B, T, D].
    """
    if layout is None or layout.mesh.size == 1:
        return _grouped(x, chosen, weights, experts, jnp.int32(0))
    divided = layout.sharding(("experts", None, "mlp"), experts.gate.shape).spec
    rows = layout.sharding(("rows", "tokens", None), x.shape).spec
    specs = (rows, rows, rows, divided, divided, PartitionSpec(divided[0], divided[2], None))
    local = partial(_on_one_device, rows[0], divided)
    whole = jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=rows, check_vma=False)
    return whole(x, chosen, weights, *experts)


def _on_one_device(
    rows: str | tuple[str, ...] | None,
    divided: PartitionSpec,
    x: Array,
    chosen: Array,
    weights: Array,
    *projections: Array,
) -> Array:
    """`mixed` of one device's rows, with its part of the experts and of their hidden units."""
    experts = ExpertWeights(*projections)
    sums = [axis for axis in (divided[0], divided[2]) if axis is not None]
    if divided[0] is None:
        return _summed(_grouped(x, chosen, weights, experts, jnp.int32(0)), sums)
    first = jax.lax.axis_index(AXIS) * experts.gate.shape[0]
    if AXIS not in (rows or ()):
        return _summed(_grouped(x, chosen, weights, experts, first), sums)
    x, chosen, weights = (jax.lax.all_gather(one, AXIS, axis=0, tiled=True) for one in (x, chosen, weights))
    y = _summed(_grouped(x, chosen, weights, experts, first), sums[1:])
    return jax.lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True)


def _summed(y: Array, axes: list[str]) -> Array:
    return jax.lax.psum(y, tuple(axes)) if axes else y


def _grouped(
    x: Float[Array, "*rows D"],
    chosen: Integer[Array, "*rows k"],
    weights: Float[Array, "*rows k"],
    experts: ExpertWeights,
    first: Int[Array, ""],
) -> Float[Array, "*rows D"]:
    """`mixed` with the experts `first`, `first` + 1, …; pairs with other experts add nothing."""
    E, k, n = experts.gate.shape[0], chosen.shape[-1], math.prod(chosen.shape[:-1])
    expert = chosen.reshape(n * k) - first
    expert = jnp.where((expert >= 0) & (expert < E), expert, E)  # pairs of other devices' experts are sorted last
    order = jnp.argsort(expert)
    counts = jnp.bincount(expert, length=E + 1)[:E].astype(jnp.int32)
    # Rows behind the last group have undefined products on some backends: they are masked before and after.
    own = (jnp.arange(n * k) < jnp.sum(counts))[:, None]
    tokens = _masked(own, x.reshape(n, -1)[order // k])
    inner = jax.nn.silu(_product(tokens, experts.gate, counts)) * _product(tokens, experts.up, counts)
    out = _masked(own, _product(_masked(own, inner), experts.down, counts))
    pairs = out[jnp.argsort(order)].reshape(n, k, -1)
    total = jnp.einsum("nkd,nk->nd", pairs, weights.reshape(n, k).astype(jnp.float32), precision="highest")
    return total.astype(x.dtype).reshape(x.shape)


def _masked(own: Bool[Array, "m 1"], x: Float[Array, "m D"]) -> Float[Array, "m D"]:
    return jnp.where(own, x, jnp.zeros((), x.dtype))


def _product(x: Float[Array, "m I"], kernels: Float[Array, "E I O"], counts: Int[Array, " E"]) -> Float[Array, "m O"]:
    """Row r of x times the kernel of its group; the groups are consecutive rows, `counts` of each expert."""
    out = jax.lax.ragged_dot(x, kernels.astype(x.dtype), counts, precision=exact_precision(x.dtype))
    return checkpoint_name(out, PRODUCT)


PRODUCT = "product"  # checkpoint name of the products with parameters, for the remat policy "dots"


# --- load of the experts


class ExpertLoad(NamedTuple):
    """Sums over the real tokens of one layer: how often each expert was chosen, and its probability."""

    chosen: Float[Array, " E"]
    probability: Float[Array, " E"]


def load(logits: Float[Array, "B T E"], chosen: Integer[Array, "B T k"], real: Bool[Array, "B T"]) -> ExpertLoad:
    """The load of one layer by the tokens marked as `real`; only `probability` has gradients."""
    E = logits.shape[-1]
    picked = jnp.sum(jax.nn.one_hot(chosen, E, dtype=jnp.float32), axis=-2)
    mask = real[..., None]
    probability = jax.nn.softmax(logits, axis=-1)
    return ExpertLoad(jnp.sum(jnp.where(mask, picked, 0), (0, 1)), jnp.sum(jnp.where(mask, probability, 0), (0, 1)))


def balance_loss(loads: ExpertLoad) -> Float[Array, ""]:
    """E · Σᵢ fᵢ·Pᵢ, averaged over L layers (leaves [L, E]); 1 if all experts are equally loaded, 0 without tokens.

    fᵢ is the fraction of the choices that fell on expert i, Pᵢ its mean probability (W. Fedus et al., "Switch
    Transformers", 2021, equations 4 to 6, with k choices per token).
    """
    share = loads.chosen / jnp.maximum(jnp.sum(loads.chosen, -1, keepdims=True), 1)
    mean = loads.probability / jnp.maximum(jnp.sum(loads.probability, -1, keepdims=True), 1)
    return jnp.mean(loads.chosen.shape[-1] * jnp.sum(jax.lax.stop_gradient(share) * mean, -1))


# --- recorded choices: the experts of every token, for a learner that uses those of the sampler
#
# A token's record is the L·k numbers of all layers. The largest number of its dtype marks a token without a record.


def recorded_dtype(spec: ModelSpec) -> np.dtype:
    """The dtype of records: 8 bits if they can hold the number of every expert, else 16."""
    return np.dtype(np.uint8 if spec.experts < 255 else np.uint16)


def recorded_width(spec: ModelSpec) -> int:
    """L·k, the length of a token's record."""
    return spec.layers * spec.experts_per_token


def recorded(spec: ModelSpec, chosen: Sequence[Integer[Array, "R T k"]]) -> Integer[Array, "R T 1 X"]:
    """The records of tokens from the choices of each layer, as the values of one head (see `cache.KVCache`)."""
    return jnp.concatenate(chosen, axis=-1)[:, :, None].astype(recorded_dtype(spec))
