"""Attention by a chosen implementation, over the devices of a layout.

The compiler cannot partition a fused kernel. So rows, slots and heads are divided here by `shard_map` with the layout's
rules, and every device runs the kernel on its part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jaxroll import sharding as layouts
from jaxroll.kernels.attention import grouped, visible
from jaxroll.kernels.choice import WINDOWED, XLA
from jaxroll.sharding import Layout

Attend = Callable[[Array, Array, Array], Array]  # q [B, T, N, H], k and v [B, T, K, H]

_QUERIES = ("rows", None, "query_heads", "head_dim")
_KEYS = ("rows", None, "key_heads", "head_dim")
_ROWS = ("rows", None)
_SLOTS = ("slots", None, None, "heads", "head_dim")
_POOL = ("slots", "kv_heads", None, "tokens", "head_dim")


def rows(name: str, tokens: int, segments: Int[Array, "B T"] | None, layout: Layout | None, window: int = 0) -> Attend:
    """Causal attention over rows of `tokens`, within `segments` if given (0 is padding), by the implementation `name`.

    With a `window` above 0, a query sees that many keys, its own included. The XLA implementation builds its mask once
    for all layers; it is the only one that works without a layout.
    """
    if name == XLA:
        return partial(_masked, visible(tokens, segments, window))
    # `choice` selects a kernel without windows only if no sample is longer than the window.
    kernel = _row_kernel(name)
    kernel = partial(kernel, window=window) if name in WINDOWED and 0 < window < tokens else kernel
    return partial(_divided_rows, kernel, segments, _needed(name, layout))


def exchanged(attend: Attend, layout: Layout | None) -> Attend:
    """`attend` for tokens that are divided over the mesh axis sequence: during attention, the heads are instead."""
    if layout is None or layout.mesh.shape["sequence"] == 1:
        return attend

    def over_heads(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (layout.constrain(x, of) for x, of in ((q, _QUERIES), (k, _KEYS), (v, _KEYS)))
        out = layout.constrain(attend(q, k, v), _QUERIES)
        return layout.constrain(out, ("rows", "tokens", "heads", "head_dim"))

    return over_heads


def pages(name: str, layout: Layout | None) -> Callable[..., Array]:
    """One more token over the paged cache by the kernel `name`, with the arguments of `paged.paged` for all shards."""
    layout = _needed(name, layout)
    if layouts.platform(layout.mesh) == "gpu":
        from jaxroll.kernels.gpu import paged
    else:
        from jaxroll.kernels.tpu import paged
    return partial(_divided_pages, paged, layout)


def _masked(mask: Array, q: Array, k: Array, v: Array) -> Array:
    return grouped(q, k, v, mask)


def _row_kernel(name: str) -> Callable[..., Array]:
    """The kernel `name`; its module is imported on demand, because importing Pallas takes time."""
    if name == "splash":
        from jaxroll.kernels.tpu import splash

        return splash
    from jaxroll.kernels import gpu

    return {"triton": gpu.triton, "cudnn": gpu.cudnn}[name]


def _divided_rows(
    kernel: Callable[..., Array], segments: Int[Array, "B T"] | None, layout: Layout, q: Array, k: Array, v: Array
) -> Array:
    queries, keys = _spec(layout, _QUERIES, q), _spec(layout, _KEYS, k)
    if segments is None:
        return _divided(lambda *own: kernel(*own, None), layout, (queries, keys, keys), queries)(q, k, v)
    specs = (queries, keys, keys, _spec(layout, _ROWS, segments))
    return _divided(kernel, layout, specs, queries)(q, k, v, segments)


def _divided_pages(
    kernel: Callable[..., Array],
    layout: Layout,
    q: Array,
    keys: Array,
    values: Array,
    tables: Array,
    starts: Array,
    reach: Array,
) -> Array:
    """Attention of q [D, S/D, 1, N, H] over keys and values [D, K, P, U, H]; `reach` is not used by the kernels."""

    def one(q: Array, keys: Array, values: Array, tables: Array, starts: Array) -> Array:
        # D is the number of groups of devices, so each holds one shard.
        return kernel(q[0, :, 0], keys[0], values[0], tables[0], starts[0])[None, :, None]

    queries, pool = _spec(layout, _SLOTS, q), _spec(layout, _POOL, keys)
    specs = (queries, pool, pool, _spec(layout, ("slots", None, None), tables), _spec(layout, ("slots", None), starts))
    return _divided(one, layout, specs, queries)(q, keys, values, tables, starts)


def _divided(
    kernel: Callable[..., Array], layout: Layout, specs: tuple[PartitionSpec, ...], out: PartitionSpec
) -> Callable[..., Array]:
    return jax.shard_map(kernel, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)


def _spec(layout: Layout, logical: tuple[str | None, ...], array: Array) -> PartitionSpec:
    return layout.sharding(logical, array.shape).spec


def _needed(name: str, layout: Layout | None) -> Layout:
    if layout is None:
        raise ValueError(f"attention by {name} needs a layout: a mesh, and rules that divide the work over it")
    return layout
