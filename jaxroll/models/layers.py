"""The decoder as flax modules: the only declaration of each parameter's shape, dtype, logical axes and initializer.

Blocks of grouped-query attention with rotary positions and a gated MLP, each after an RMSNorm; `spec.ModelSpec` lists
the options (biases, norms of q and k, norms after attention and MLP, …). Parameters are float32; a module computes in
its spec's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxroll.kernels.attention import exact_precision
from jaxroll.kernels.quantised import of_columns
from jaxroll.models import moe
from jaxroll.models.families import ModelSpec, RopeScaling
from jaxroll.models.moe import PRODUCT, Routing

Rotation = tuple[Array, Array]  # cos and sin, each float32 [..., 1, H]
Attend = Callable[[Array, Array, Array], Array]


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], logical: tuple[str, ...], stddev: float | None) -> nnx.Param:
    """One float32 parameter: normal with standard deviation `stddev`, or ones if that is None."""
    if stddev is None:
        value = jnp.ones(shape, jnp.float32)
    else:
        value = stddev * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, logical=logical)


def project(x: Float[Array, " ..."], weight: nnx.Param, inputs: int = 1) -> Float[Array, " ..."]:
    """x [*rows, *in] times a parameter [*in, *out], in the activation's dtype; `inputs` counts the axes of `in`."""
    kernel = of_columns(weight.get_value(), x.dtype)
    rows, out = x.shape[: x.ndim - inputs], kernel.shape[inputs:]
    flat = _product(x.reshape(math.prod(rows), -1), kernel.reshape(-1, math.prod(out)))
    return checkpoint_name(flat.reshape(*rows, *out), PRODUCT)


@jax.custom_vjp
def _product(x: Float[Array, "R I"], kernel: Float[Array, "I O"]) -> Float[Array, "R O"]:
    """x·W, with the gradient dW = xᵀ·dy."""
    # JAX derives dW = (dyᵀ·x)ᵀ, for which the CPU backend recomputes the operations before dy in transposed form: a
    # fifth of a training step.
    return jnp.dot(x, kernel, precision=exact_precision(x.dtype))


def _product_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, kernel), (x, kernel)


def _product_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    exact = exact_precision(x.dtype)
    dx = jax.lax.dot_general(dy, kernel, (((1,), (1,)), ((), ())), precision=exact)
    return dx, jax.lax.dot_general(x, dy, (((0,), (0,)), ((), ())), precision=exact)


_product.defvjp(_product_forward, _product_backward)


def with_rank(x: Array, rank: int) -> Array:
    """`x` with axes of length 1 in front, `rank` in all. Tests forbid JAX to add them, which may hide a wrong shape."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def rotation(
    positions: Int[Array, "*rows"], head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Rotation:
    """cos and sin of position · frequency; the H/2 frequencies θ^(-2i/H) are repeated (Hugging Face's layout)."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        kept = _kept(scaling, frequency, theta)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    angle = positions[..., None].astype(jnp.float32) * with_rank(frequency, positions.ndim + 1)
    angle = jnp.concatenate([angle, angle], axis=-1)[..., None, :]
    factor = 1.0 if scaling is None else scaling.attention_factor
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def _kept(scaling: RopeScaling, frequency: Float[Array, " F"], theta: float) -> Float[Array, " F"]:
    """The share of every frequency that is not divided by the scaling's factor."""
    if scaling.kind == "linear":
        return jnp.zeros_like(frequency)
    if scaling.kind == "llama3":
        turns = scaling.context * frequency / (2 * math.pi)
        return jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    count = len(frequency)
    # The indices of the frequencies that turn `high` and `low` times within the context.
    first, last = (
        count * math.log(scaling.context / (turns * 2 * math.pi)) / math.log(theta)
        for turns in (scaling.high, scaling.low)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    last = first + 0.001 if first == last else last
    return 1 - jnp.clip((jnp.arange(count, dtype=jnp.float32) - first) / (last - first), 0, 1)


def rotated(x: Float[Array, "*rows N H"], by: Rotation, factor: float = 1.0) -> Float[Array, "*rows N H"]:
    """factor · (x·cos + (−x₂, x₁)·sin), where x₁ and x₂ are the halves of the head dimension; computed in float32."""
    cos, sin = by
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    wide = x.astype(jnp.float32) * cos + turned * sin
    return (wide if factor == 1 else wide * factor).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / √(mean x² + ε) · scale, or · (1 + scale) with `norm_offset`; the mean in float32."""

    def __init__(self, spec: ModelSpec, size: int, rngs: nnx.Rngs) -> None:
        self.scale = parameter(rngs, (size,), ("norm",), 0.0 if spec.norm_offset else None)
        self.eps, self.offset = spec.norm_eps, spec.norm_offset

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.offset:  # as in Gemma, the product is in float32, too
            return (wide * with_rank(1 + self.scale[...].astype(jnp.float32), x.ndim)).astype(x.dtype)
        return wide.astype(x.dtype) * with_rank(self.scale[...].astype(x.dtype), x.ndim)


class Attention(nnx.Module):
    """Grouped-query attention; the caller passes the function `attend` of queries, keys and values."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        D, N, K, H = spec.width, spec.heads, spec.kv_heads, spec.head_dim
        fan_in = 1 / math.sqrt(D)
        self.q = parameter(rngs, (D, N, H), ("embed", "heads", "head_dim"), fan_in)
        self.k = parameter(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in)
        self.v = parameter(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in)
        self.o = parameter(rngs, (N, H, D), ("heads", "head_dim", "embed"), 1 / math.sqrt(2 * spec.layers * N * H))
        if spec.attention_bias:
            self.q_bias = parameter(rngs, (N, H), ("heads", "head_dim"), 0.0)
            self.k_bias = parameter(rngs, (K, H), ("kv_heads", "head_dim"), 0.0)
            self.v_bias = parameter(rngs, (K, H), ("kv_heads", "head_dim"), 0.0)
        if spec.qk_norm:
            self.q_norm = RMSNorm(spec, H, rngs)
            self.k_norm = RMSNorm(spec, H, rngs)
        self.bias, self.qk_norm, self.query_factor = spec.attention_bias, spec.qk_norm, spec.query_factor

    def __call__(self, x: Float[Array, "*rows D"], rotation: Rotation, attend: Attend) -> Float[Array, "*rows D"]:
        q, k, v = (project(x, weight) for weight in (self.q, self.k, self.v))
        if self.bias:
            q, k, v = (
                x + with_rank(bias[...].astype(x.dtype), x.ndim)
                for x, bias in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias))
            )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return project(attend(rotated(q, rotation, self.query_factor), rotated(k, rotation), v), self.o, inputs=2)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) · up(x)): SwiGLU or GeGLU (N. Shazeer, arXiv 2002.05202)."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        D, F = spec.width, spec.hidden
        self.gate = parameter(rngs, (D, F), ("embed", "mlp"), 1 / math.sqrt(D))
        self.up = parameter(rngs, (D, F), ("embed", "mlp"), 1 / math.sqrt(D))
        self.down = parameter(rngs, (F, D), ("mlp", "embed"), 1 / math.sqrt(2 * spec.layers * F))
        self.activation = spec.activation

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        activation = jax.nn.silu if self.activation == "silu" else jax.nn.gelu  # by tanh
        return project(activation(project(x, self.gate)) * project(x, self.up), self.down)


class Experts(nnx.Module):
    """The SwiGLU projections of all experts of a layer."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        E, D, F = spec.experts, spec.width, spec.hidden
        self.gate = parameter(rngs, (E, D, F), ("experts", "expert_embed", "mlp"), 1 / math.sqrt(D))
        self.up = parameter(rngs, (E, D, F), ("experts", "expert_embed", "mlp"), 1 / math.sqrt(D))
        self.down = parameter(rngs, (E, F, D), ("experts", "mlp", "expert_embed"), 1 / math.sqrt(2 * spec.layers * F))


class MixtureOfExperts(nnx.Module):
    """The weighted sum of the outputs of each token's k experts; `routing` chooses them."""

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        self.router = parameter(rngs, (spec.width, spec.experts), ("embed", "router"), 1 / math.sqrt(spec.width))
        self.router_bias = parameter(rngs, (spec.experts,), ("router",), 0.0) if spec.router_bias else None
        self.experts = Experts(spec, rngs)
        self.normalized = spec.normalized_gates

    def __call__(self, x: Float[Array, "*rows D"], routing: Routing) -> Float[Array, "*rows D"]:
        logits = moe.router_logits(x, self.router[...])
        chosen = routing.choose(
            logits, logits if self.router_bias is None else logits + with_rank(self.router_bias[...], x.ndim)
        )
        weights = moe.gates(logits, chosen, self.normalized)
        experts = moe.ExpertWeights(self.experts.gate[...], self.experts.up[...], self.experts.down[...])
        return moe.mixed(x, chosen, weights, experts, routing.layout)


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); with `post_norms`, the outputs are normed, too.

    `routing` chooses the experts of a mixture.
    """

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs) -> None:
        self.attn_norm = RMSNorm(spec, spec.width, rngs)
        self.attn = Attention(spec, rngs)
        self.mlp_norm = RMSNorm(spec, spec.width, rngs)
        self.mlp = MixtureOfExperts(spec, rngs) if spec.experts else GatedMLP(spec, rngs)
        if spec.post_norms:
            self.attn_post_norm = RMSNorm(spec, spec.width, rngs)
            self.mlp_post_norm = RMSNorm(spec, spec.width, rngs)
        self.post_norms = spec.post_norms

    def __call__(
        self, x: Float[Array, "*rows D"], rotation: Rotation, attend: Attend, routing: Routing
    ) -> Float[Array, "*rows D"]:
        out = self.attn(self.attn_norm(x), rotation, attend)
        x = x + (self.attn_post_norm(out) if self.post_norms else out)
        y = self.mlp_norm(x)
        out = self.mlp(y, routing) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(y)
        return x + (self.mlp_post_norm(out) if self.post_norms else out)


class Decoder(nnx.Module):
    """Embedding, blocks, final norm, and the head (tied to the embedding or separate; a critic has a value head).

    `layers` is the number of blocks; the default is that of `spec`.
    """

    def __init__(self, spec: ModelSpec, rngs: nnx.Rngs, layers: int | None = None) -> None:
        self.embed = parameter(rngs, (spec.vocab_size, spec.width), ("vocab", "embed"), 0.02)
        self.layers = nnx.List([Block(spec, rngs) for _ in range(spec.layers if layers is None else layers)])
        self.final_norm = RMSNorm(spec, spec.width, rngs)
        if spec.value_head:
            self.value = parameter(rngs, (spec.width, 1), ("embed", "value"), 0.0)
        elif not spec.tied_embeddings:
            self.head = parameter(rngs, (spec.width, spec.vocab_size), ("embed", "vocab"), 1 / math.sqrt(spec.width))
        self.tied, self.dtype = spec.tied_embeddings, jnp.dtype(spec.compute_dtype)
        self.embed_factor = math.sqrt(spec.width) if spec.scaled_embeddings else 1.0
        self.softcap = spec.logit_softcap

    def embedded(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows D"]:
        """The embeddings of `tokens`, in the compute dtype."""
        found = jnp.take(self.embed[...].astype(self.dtype), tokens, axis=0)
        # Gemma rounds the factor to the compute dtype.
        return found if self.embed_factor == 1 else found * jnp.asarray(self.embed_factor, self.dtype)

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """The logits of the next token, float32 for every compute dtype."""
        return head_logits(hidden, (self.embed if self.tied else self.head)[...], tied=self.tied, softcap=self.softcap)

    def values(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
        """A critic's value of every hidden state, float32 for every compute dtype."""
        weight = self.value[...].astype(hidden.dtype)
        product = jnp.einsum(
            "...d,dk->...k",
            hidden,
            weight,
            precision=exact_precision(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        return product[..., 0]


def head_logits(
    hidden: Float[Array, "*rows D"], weight: Float[Array, ...], *, tied: bool, softcap: float
) -> Float[Array, "*rows V"]:
    """`Decoder.logits` by the head's own parameter, [V, D] if it is `tied` to the embedding and [D, V] otherwise."""
    found = jnp.einsum(
        "...d,vd->...v" if tied else "...d,dv->...v",
        hidden,
        weight.astype(hidden.dtype),
        precision=exact_precision(hidden.dtype),
        preferred_element_type=jnp.float32,
    )
    return softcap * jnp.tanh(found / softcap) if softcap else found


def summing(
    cycle: Callable[[Array, Any], tuple[Array, Any]], xs: Any, sums: Any, x: Array, *, offload: bool = False
) -> tuple[Array, Any]:
    """`lax.scan(cycle, x, xs)`; the cotangent of `sums` is `sums` plus the gradients by `xs[0]`.

    The backward loop recomputes each cycle from its input and adds its gradients to the running sums, so that only the
    gradients of one cycle exist at a time. That of `lax.scan` returns those of all cycles: a copy of the parameters.
    With `offload`, the inputs of the cycles are in host memory until then.
    """

    def moved(x: Array, space: Any) -> Array:
        return jax.device_put(x, space) if offload else x

    @jax.custom_vjp
    def run(xs: Any, sums: Any, x: Array) -> tuple[Array, Any]:
        return jax.lax.scan(cycle, x, xs)

    def forwards(xs: Any, sums: Any, x: Array) -> tuple[tuple[Array, Any], Any]:
        def step(x: Array, of_cycle: Any) -> tuple[Array, Any]:
            after, loads = cycle(x, of_cycle)
            return after, (loads, moved(x, jax.memory.Space.Host))

        after, (loads, before) = jax.lax.scan(step, x, xs)
        return (after, loads), (xs, sums, before)

    def backwards(kept: Any, cotangents: tuple[Array, Any]) -> tuple[None, Any, Array]:
        (xs, sums, before), (after, loads) = kept, cotangents
        loads = [leaf for leaf in jax.tree.leaves(loads) if leaf.dtype != jax.dtypes.float0]

        def step(carry: Any, of_cycle: Any) -> tuple[Any, None]:
            (after, sums, at), ((values, given), x, loads) = carry, of_cycle
            x = moved(x, jax.memory.Space.Device)

            def floats(values: Any, x: Array) -> tuple[Array, list[Array]]:
                after, loads = cycle(x, (values, given))
                return after, [leaf for leaf in jax.tree.leaves(loads) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

            grads, before = jax.vjp(floats, values, x)[1]((after, loads))
            sums = jax.tree.map(lambda total, grad: total.at[at].add(grad.astype(total.dtype)), sums, grads)
            return (before, sums, at - 1), None

        last = jnp.asarray(len(before) - 1)
        (x, sums, _), _ = jax.lax.scan(step, (after, sums, last), (xs, before, loads), reverse=True)
        return None, sums, x

    run.defvjp(forwards, backwards)
    return run(xs, sums, x)
