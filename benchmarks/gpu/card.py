"""Limits of the card, with JAX alone: bandwidths, matmul rate, overheads; and attention by implementation."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.case import Case, device_facts, on_gpu, rates, run_case, timed
from benchmarks.lib.report import ratio, spread
from jaxroll.kernels import attention as plain

ERROR_FORWARD, ERROR_BACKWARD = 0.03, 0.06  # bounds for bfloat16 against float32, relative to the largest value


def _size(small: int, large: int) -> int:
    return large if on_gpu() else small


def copy_bandwidth(size_bytes: int = 0) -> dict[str, Any]:
    """Bytes per second of the device's memory: of a copy, which reads and writes, and of a sum, which only reads."""
    count = (size_bytes or _size(64 << 20, 4 << 30)) // 2
    x = jax.jit(lambda: jnp.ones((count // 1024, 1024), jnp.bfloat16))()
    copy, total = jax.jit(lambda x: -x), jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    copied, read = timed(lambda: copy(x)), timed(lambda: total(x))
    return {
        "copy_bytes_per_s": rates(4.0 * count, copied),
        "read_bytes_per_s": rates(2.0 * count, read),
        "array_bytes": 2 * count,
    }


def bandwidth_limit() -> float:
    """The better median of the two kinds of `copy_bandwidth`: the limit that other cases are compared with."""
    found = copy_bandwidth()
    return max(found[kind]["median"] for kind in ("copy_bytes_per_s", "read_bytes_per_s"))


def matmul_rate(m: int, k: int, n: int, dtype: Any = jnp.bfloat16) -> dict[str, float]:
    """Floating-point operations per second of a product of random matrices."""
    a, b = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(((m, k), (k, n))))
    product = jax.jit(jnp.matmul)
    return rates(2.0 * m * k * n, timed(lambda: product(a, b), least_s=0.2))


def matmul_limit() -> float:
    """The best median over a few shapes."""
    return max(matmul_rate(*shape)["median"] for shape in _matmul_shapes())


def _matmul_shapes() -> list[tuple[int, int, int]]:
    return [(8192, 8192, 8192), (8192, 4096, 12288)] if on_gpu() else [(256, 256, 256)]


def _to_device(size_bytes: int) -> dict[str, Any]:
    host = np.random.default_rng(0).integers(0, 255, size_bytes, np.uint8)
    return {"bytes_per_s": rates(size_bytes, timed(lambda: jax.device_put(host), runs=5))}


def _to_host(size_bytes: int) -> dict[str, Any]:
    make = jax.jit(lambda i: jnp.full(size_bytes, i, jnp.uint8))
    seconds = []
    for number in range(5):  # new arrays: a fetched one keeps its copy on the host
        x = make(number).block_until_ready()
        started = time.perf_counter()
        np.asarray(x)
        seconds.append(time.perf_counter() - started)
    return {"bytes_per_s": rates(size_bytes, seconds[1:])}


def _pinned(size_bytes: int) -> dict[str, Any]:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    there = jax.block_until_ready(jax.device_put(np.ones(size_bytes, np.uint8), device))
    here = jax.block_until_ready(jax.device_put(there, host))
    return {
        "to_host_bytes_per_s": rates(size_bytes, timed(lambda: jax.device_put(there, host), runs=5)),
        "to_device_bytes_per_s": rates(size_bytes, timed(lambda: jax.device_put(here, device), runs=5)),
    }


def _overheads() -> dict[str, Any]:
    """Seconds of a small program with a wait, of one in a queue, and of one iteration of a loop on the device."""
    x, turns = jnp.zeros(8), 1000
    one = jax.jit(lambda x: x + 1)
    loop = jax.jit(lambda x, n: jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))[1])
    waited = timed(lambda: jax.block_until_ready(one(x)))
    queued, looped = timed(lambda: one(x)), timed(lambda: loop(x, turns))
    return {
        "waited_us": spread([1e6 * s for s in waited]),
        "queued_us": spread([1e6 * s for s in queued]),
        "loop_turn_us": spread([1e6 * s / turns for s in looped]),
    }


def limits(case: Case) -> None:
    """Measure the limits of the card one by one."""
    case.put(**device_facts())
    case.point("memory", copy_bandwidth)
    for shape in _matmul_shapes():
        case.point("matmul bf16 " + "x".join(map(str, shape)), lambda s=shape: {"flops_per_s": matmul_rate(*s)})
    case.point(
        "matmul f32 (default precision)", lambda: {"flops_per_s": matmul_rate(*_matmul_shapes()[0], jnp.float32)}
    )
    case.point("overheads", _overheads)
    size_bytes = _size(4 << 20, 1 << 30)
    for name, measure in {"to device": _to_device, "to host": _to_host, "pinned host memory": _pinned}.items():
        case.point(name, partial(measure, size_bytes))


# --- attention

Attend = Callable[..., jax.Array]  # q, k, v, segments or None


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    return plain.grouped(q, k, v, plain.visible(q.shape[1], segments))


def row_kernels() -> dict[str, tuple[Attend, bool]]:
    """Implementations of attention over rows that run here, by name, each with True if it takes segments."""
    found: dict[str, tuple[Attend, bool]] = {"xla": (_xla, True)}
    from jaxroll.kernels import placed

    if on_gpu():
        return found | {"triton": (placed.triton, True), "cudnn": (placed.cudnn, False)}
    return found | {"triton interpreted": (partial(placed.triton, interpret=True), True)}


def _rows(batch: int, tokens: int, heads: int, kv_heads: int, dtype: Any) -> tuple[jax.Array, ...]:
    """Random q, k, v with heads of 128 (64 with --quick), and the gradient of the output."""
    keys, head = jax.random.split(jax.random.key(tokens), 4), 128 if on_gpu() else 64
    counts = heads, kv_heads, kv_heads, heads
    return tuple(jax.random.normal(key, (batch, tokens, n, head), dtype) for key, n in zip(keys, counts, strict=True))


def _segments(batch: int, tokens: int, of: int) -> jax.Array:
    """Segments of lengths that differ, and padding at the end."""
    ids = np.sort(np.random.default_rng(3).integers(1, of + 1, (batch, tokens)), axis=1).astype(np.int32)
    ids[:, tokens - tokens // 16 :] = 0
    return jnp.asarray(ids)


def _both(attend: Attend, segments: jax.Array | None, q: Any, k: Any, v: Any, d_out: Any) -> tuple[jax.Array, ...]:
    """The output and the gradients of q, k and v; padding counts as 0, since it has no meaning."""
    real = None if segments is None else (segments > 0)[:, :, None, None]
    out, back = jax.vjp(lambda q, k, v: attend(q, k, v, segments), q, k, v)
    d_out = d_out if real is None else jnp.where(real, d_out, 0)
    return (out if real is None else jnp.where(real, out, 0), *back(d_out.astype(out.dtype)))


def apart_by(exact: jax.Array, found: jax.Array) -> float:
    """Largest difference over the largest exact value; NaN if one occurs (XLA's maximum on CPU ignores NaN)."""
    right, other = (np.asarray(x, np.float64) for x in (exact, found))
    return float(np.max(np.abs(right - other)) / np.max(np.abs(right)))


def errors(attend: Attend, segmented: bool, tokens: int) -> dict[str, Any]:
    """Largest difference from float32 attention in XLA, relative to its largest value: output, and worst gradient."""
    arrays = _rows(2, tokens, 4, 2, jnp.bfloat16)
    segments = _segments(2, tokens, 5) if segmented else None
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(partial(_both, _xla, segments))(*(x.astype(jnp.float32) for x in arrays))
    found = jax.jit(partial(_both, attend, segments))(*arrays)
    apart = [apart_by(a, b) for a, b in zip(exact, found, strict=True)]
    backward = float(np.max(apart[1:]))  # NaN if one occurs
    equal = apart[0] <= ERROR_FORWARD and backward <= ERROR_BACKWARD
    return {"forward_error": apart[0], "backward_error": backward, "equal": bool(equal)}


def _measure_rows(
    case: Case, kernels: dict[str, tuple[Attend, bool]], shape: tuple[int, int, int, int], packed: bool
) -> None:
    """Time of all `kernels` at one shape in alternating rounds, forwards alone and with the backward pass."""
    batch, tokens, heads, kv_heads = shape
    arrays = _rows(batch, tokens, heads, kv_heads, jnp.bfloat16)
    segments = _segments(batch, tokens, 8) if packed else None
    head = arrays[0].shape[-1]
    flops = 2.0 * batch * heads * head * tokens**2  # causal, whole rows: two products of half the pairs
    able = {name: attend for name, (attend, takes) in kernels.items() if takes or not packed}
    for way, factor in (("forward", 1.0), ("forward and backward", 3.5)):  # five products back, for two forth
        calls: dict[str, Callable[[], Any]] = {}
        label = f"{way} {batch}x{tokens} heads {heads}/{kv_heads}{' packed' if packed else ''}"
        for name, attend in able.items():
            scores_gib = 4 * batch * heads * tokens**2 / 2**30
            if name == "xla" and 4 * scores_gib > 40:
                case.skip(f"{label} {name}", f"it stores all scores, {scores_gib:.0f} GiB in several copies")
                continue
            body = (
                (lambda q, k, v, _, a=attend: a(q, k, v, segments)) if factor == 1 else partial(_both, attend, segments)
            )
            calls[name] = partial(jax.jit(body), *arrays)

        def raced(calls: dict[str, Callable[[], Any]] = calls, factor: float = factor) -> dict[str, Any]:
            failed: dict[str, str] = {}
            seconds: dict[str, list[float]] = {}
            for name, call in calls.items():
                try:
                    timed(call, runs=1, least_s=0.0)
                    seconds[name] = []
                except Exception as error:  # noqa: BLE001 - recorded: the other implementations are timed
                    failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            for number in range(3 if case.quick else 5):
                for name in list(seconds)[:: 1 if number % 2 == 0 else -1]:
                    seconds[name].append(float(np.median(timed(calls[name], runs=3, least_s=0.02))))
            result: dict[str, Any] = {
                name: {"ms": spread([1e3 * s for s in of]), "flops_per_s": rates(factor * flops, of)}
                for name, of in seconds.items()
            }
            first = next(iter(seconds), "")
            result["speed_ratios"] = {
                f"{name} / {first}": ratio(seconds[first], of) for name, of in seconds.items() if name != first
            }
            return result | ({"failed": failed} if failed else {})

        case.point(label, raced)


def _paged(tokens: int, slots: int, quick: bool) -> dict[str, Any]:
    """The paged kernel compared with attention over a contiguous KV cache: its error, its share of the bandwidth."""
    from jaxroll.kernels import placed

    page, heads, kv_heads, head = 16 if quick else 64, 16, 8, 128 if on_gpu() else 64
    table = tokens // page
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (slots, heads, head), jnp.bfloat16)
    k, v = (jax.random.normal(key, (kv_heads, slots * table, page, head), jnp.bfloat16) for key in keys[1:])
    tables = jnp.asarray(np.random.default_rng(0).permutation(slots * table).reshape(slots, table).astype(np.int32))
    positions = jnp.asarray(np.random.default_rng(1).integers(tokens // 2, tokens, slots).astype(np.int32))
    paged = jax.jit(partial(placed.paged_on_gpu, interpret=not on_gpu()))

    def row(q: jax.Array, table: jax.Array, position: jax.Array) -> jax.Array:
        keys, values = (
            x[:, table].reshape(kv_heads, -1, head).transpose(1, 0, 2).astype(jnp.float32)[None] for x in (k, v)
        )
        seen = (jnp.arange(tokens) <= position)[None, None]
        return plain.grouped(q.astype(jnp.float32)[None, None], keys, values, seen)[0, 0]

    exact = jax.lax.map(lambda one: row(one[0], one[1], one[2]), (q, tables, positions))
    apart = apart_by(exact, paged(q, k, v, tables, positions))
    found: dict[str, Any] = {"forward_error": apart, "equal": bool(apart <= ERROR_FORWARD)}
    if not found["equal"]:
        return found
    seconds = timed(lambda: paged(q, k, v, tables, positions), runs=5)
    read = 2 * 2 * kv_heads * head * int(jnp.sum(positions + 1))  # keys and values, two bytes each
    return found | {
        "us": spread([1e6 * s for s in seconds]),
        "bytes_per_s": rates(read, seconds),
        "of_bandwidth": rates(read / bandwidth_limit(), seconds),
    }


def attention(case: Case) -> None:
    """Compare errors, then time: an implementation that differs from float32 is not timed."""
    case.put(**device_facts())
    equal: dict[str, tuple[Attend, bool]] = {}
    for name, (attend, takes) in row_kernels().items():
        found = [
            case.point(f"error {name}{' packed' * s}", partial(errors, attend, s, 128 if case.quick else 512))
            for s in ((False, True) if takes else (False,))
        ]
        if all(one and one["equal"] for one in found):
            equal[name] = (attend, takes)
    shapes = [(1, 128, 4, 2)] if case.quick else [(4, 4096, 16, 8), (1, 16384, 16, 8), (2, 4096, 32, 8)]
    for tokens, slots in [(64, 4)] if case.quick else [(4096, 64), (1024, 256)]:
        case.point(f"paged {slots} slots x {tokens}", partial(_paged, tokens, slots, case.quick))
    for shape in shapes:
        for packed in (False, True):
            _measure_rows(case, equal, shape, packed)
    wrong = [name for name, point in case.result["points"].items() if point.get("equal") is False]
    case.put(equal=not wrong, differing=wrong)


if __name__ == "__main__":
    run_case({"limits": limits, "attention": attention})
