"""Our engine and learner at Qwen3's shapes, random weights made on the device, against the card's measured limits.

Most points compile two depths of a model and extrapolate linearly to all layers, because XLA compiles every layer. The
result gives both depths, and `engine` and `learner_whole` measure one whole model to check the extrapolation.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import card
from benchmarks.gpu.case import Case, device_facts, rates, run_case, timed
from benchmarks.learner.gpu_arm import GROUP, flops, peak, prepared
from benchmarks.lib.report import spread
from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import programs, requests
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request, Sizes
from jaxroll.models import families, params
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version

SIZES = ("qwen3_0p6b", "qwen3_1p7b", "qwen3_8b")
DEPTHS = (2, 6)  # compiled numbers of layers
STATE_BYTES = 16  # per parameter in the learner: itself, two moments and the gradient in float32


def spec_of(size: str, quick: bool) -> ModelSpec:
    """The model; with `quick` a model of the same name with few layers and tokens."""
    if quick:
        return ModelSpec(size, 2048, 4, 256, 8, 4, 32, 1024, tied_embeddings=size != "qwen3_8b")
    return families.spec(size, compute_dtype="bfloat16")


def at_depth(spec: ModelSpec, layers: int) -> ModelSpec:
    """The model with so many layers."""
    return dataclasses.replace(spec, layers=layers)


def depths(quick: bool) -> tuple[int, int]:
    """The two compiled depths."""
    return (1, 3) if quick else DEPTHS


def continued(by_depth: Mapping[int, Sequence[float]], layers: int) -> dict[str, Any]:
    """Seconds of all `layers` by the line through the medians of two depths, and by their extremes.

    If a run of the deeper model was faster than one of the other, the line is noise: `reliable` is False.
    """
    (few, short), (many, long) = sorted(by_depth.items())

    def line(low: float, high: float) -> float:
        return low + (high - low) * (layers - few) / (many - few)

    middle = line(float(np.median(short)), float(np.median(long)))
    ends = [line(a, b) for a in (min(short), max(short)) for b in (min(long), max(long))]
    return {
        "seconds": {"median": middle, "min": min(ends), "max": max(ends), "runs": min(len(short), len(long))},
        "reliable": max(short) < min(long),
        "of_layer_s": (float(np.median(long)) - float(np.median(short))) / (many - few),
        "layers": layers,
        "measured_depths": {str(k): spread(list(v)) for k, v in by_depth.items()},
    }


def weights(spec: ModelSpec, dtype: str = "", seed: int = 0) -> params.Params:
    """Random parameters on the device, made shape by shape: few programs, no copy on the host."""
    draw = jax.jit(lambda key, shape, kind: jax.random.normal(key, shape, kind) * 0.02, static_argnums=(1, 2))
    one = jax.jit(jnp.ones, static_argnums=(0, 1))
    kind, made = jnp.dtype(dtype or spec.compute_dtype), {}
    where = params.shardings(spec, sharding.build(MeshConfig()), sharding.SAMPLER)
    for number, (name, leaf) in enumerate(params.abstract(spec).items()):
        key = jax.random.fold_in(jax.random.key(seed), number)
        value = one(leaf.shape, kind) if name.endswith("norm") else draw(key, leaf.shape, kind)
        made[name] = jax.device_put(value, where[name])
    return made


def engine_weights(spec: ModelSpec) -> params.Held:
    """`weights` as an engine holds them."""
    return params.held(spec, weights(spec), None)


# --- decode


def bytes_of_step(spec: ModelSpec, slots: int, context: int) -> int:
    """Bytes that a decode step must read: the weights without an embedding that is only looked up, and the KV cache."""
    looked_up = 0 if spec.tied_embeddings else spec.vocab_size * spec.width
    cache = 2 * spec.layers * slots * context * spec.kv_heads * spec.head_dim
    return jnp.dtype(spec.compute_dtype).itemsize * (families.parameter_count(spec) - looked_up + cache)


class Decoder:
    """The engine's decode program with all slots running, at any context up to the longest."""

    def __init__(self, spec: ModelSpec, slots: int, longest: int, chunk: int) -> None:
        mesh = sharding.build(MeshConfig())
        sizes = Sizes(slots, longest, 1, 1, (128,), chunk, 4, page_tokens=64, logit_rows=1)
        self.attention = programs.choose_kernels(spec, mesh, sizes)
        self._programs = programs.build(spec, mesh, sharding.SAMPLER, sizes, self.attention)
        self._state, self._params, self._chunk, self._sizes = self._programs.empty(), engine_weights(spec), chunk, sizes
        self._seed = jax.device_put(jax.random.key(0), self._programs.replicated)
        tables = np.arange(slots * sizes.table, dtype=np.int32).reshape(slots, sizes.table)
        self._tables = jax.device_put(tables, self._programs.tables)
        self._limits = jax.device_put(np.array([chunk, np.iinfo(np.int32).max], np.int32), self._programs.replicated)
        wanted = SamplingParams(max_tokens=longest - 1, temperature=1.0)
        row = requests.request_row(Request(0, np.ones(1, np.int32), GenerationKey(0, 0, 0), wanted), sizes)
        self._requests = np.tile(np.array(row, np.int32), (slots, 1))

    def seconds(self, context: int, runs: int) -> list[float]:
        """Seconds per step of all slots, the mean over a dispatch from `context` on; the first run is warm-up."""
        found = []
        for _ in range(runs + 1):
            slots, like = len(self._requests), self._programs.state
            leaves = {"positions": context, "counts": 1, "status": requests.RUNNING, "tokens": 1}
            fresh = {name: np.full(slots, value, np.int32) for name, value in leaves.items()} | {
                "requests": self._requests
            }
            placed = {name: jax.device_put(value, getattr(like, name).sharding) for name, value in fresh.items()}
            state = dataclasses.replace(self._state, **placed)
            jax.block_until_ready(placed)
            started = time.perf_counter()
            self._state, report = self._programs.decode(self._params, self._seed, state, self._tables, self._limits)
            steps = requests.read_report(np.asarray(report), self._sizes).steps
            found.append((time.perf_counter() - started) / self._chunk)
            if steps != self._chunk:
                raise RuntimeError(f"a dispatch of {self._chunk} steps made {steps}")
        return found[1:]


def decode(case: Case) -> None:
    """Tokens per second and the share of the memory's bandwidth, by size, slots and context."""
    case.put(**device_facts())
    limit = card.bandwidth_limit()
    case.put(limit_bytes_per_s=limit)
    chunk, runs = (4, 3) if case.quick else (32, 5)
    contexts = (16, 48) if case.quick else (512, 3968)
    longest = contexts[-1] + 2 * chunk
    for slots in (4,) if case.quick else (64, 8, 256):
        for size in SIZES if slots in (4, 64) else SIZES[:1]:  # other numbers: the smallest model alone
            spec = spec_of(size, case.quick)

            def measure(spec: ModelSpec = spec, slots: int = slots) -> dict[str, Any]:
                by_context: dict[int, dict[int, list[float]]] = {context: {} for context in contexts}
                chosen = ""
                for layers in depths(case.quick):
                    decoder = Decoder(at_depth(spec, layers), slots, longest, chunk)
                    for context in contexts:
                        by_context[context][layers] = decoder.seconds(context, runs)
                    chosen = str(decoder.attention.paged)
                    del decoder
                found: dict[str, Any] = {"attention": chosen}
                for context, seconds in by_context.items():
                    line, read = continued(seconds, spec.layers), bytes_of_step(spec, slots, context + chunk // 2)
                    step_s = line["seconds"]["median"]
                    found[str(context)] = line | {
                        "tokens_per_s": slots / step_s,
                        "bytes": read,
                        "of_limit": read / step_s / limit,
                    }
                return found

            case.point(f"{size} {slots} slots", measure, needs_s=5 if case.quick else 15)


def engine(case: Case) -> None:
    """A whole model in the engine, prompts and sampling included: tokens per second and the host's share."""
    case.put(**device_facts())
    limit = card.bandwidth_limit()
    for size, slots, new, chunk in (
        [(SIZES[0], 4, 12, 4)] if case.quick else [(SIZES[0], 64, 256, 16), (SIZES[0], 256, 256, 16)]
    ):
        for in_flight in (1, 2):
            job = partial(_generated, case.quick, size, slots, new, chunk, limit, in_flight)
            case.point(f"{size} {slots} slots, {in_flight} in flight", job)


def _generated(
    quick: bool, size: str, slots: int, new: int, chunk: int, limit: float, in_flight: int
) -> dict[str, Any]:
    spec, prompt = spec_of(size, quick), 16 if quick else 128
    config = EngineConfig(
        slots=slots,
        max_tokens=prompt + new,
        prefill_rows=min(slots, 16),
        prefill_buckets=(prompt,),
        decode_chunk=chunk,
        seed=0,
        in_flight=in_flight,
    )
    made = Engine(spec, sharding.build(MeshConfig()), sharding.SAMPLER, config)
    held, started = weights(spec), time.perf_counter()
    made.warmup(held, lambda text: print(text, flush=True))
    warm_s, rng, found = time.perf_counter() - started, np.random.default_rng(0), []
    for run in range(4):
        made.swap(Version(0, run), held)
        done: list[int] = []
        for number in range(slots):
            tokens = rng.integers(1, spec.vocab_size, prompt).astype(np.int32)
            wanted = SamplingParams(max_tokens=new, temperature=1.0)
            made.add(
                Request(number, tokens, GenerationKey(number, 0, run), wanted),
                lambda result, done=done: done.append(len(result.completion.tokens)),
            )
        before, began = made.stats(), time.perf_counter()
        while made.step():
            pass
        seconds, now = time.perf_counter() - began, made.stats()
        if done != [new] * slots or now.compiles:
            raise RuntimeError(
                f"{len(done)} of {slots} requests ended, {sum(done)} tokens, {now.compiles} compilations"
            )
        step_s, device_s = now.step_s - before.step_s, now.device_s - before.device_s
        found.append(
            {
                "seconds": seconds,
                "step_s": step_s / (now.decode_steps - before.decode_steps),
                "host_share": 1 - device_s / step_s,
            }
        )
    found = found[1:]  # the first run may still load programs
    step_s, read = [one["step_s"] for one in found], bytes_of_step(spec, slots, prompt + new // 2)
    return {
        "tokens_per_s": rates(slots * new, [one["seconds"] for one in found]),
        "step_ms": spread([1e3 * s for s in step_s]),
        "of_limit": rates(read / limit, step_s),
        "host_share": spread([one["host_share"] for one in found]),
        "warmup_s": warm_s,
        "attention": made.attention.described(),
        "layers": spec.layers,
    }


# --- prefill and learner


def prefill(case: Case) -> None:
    """Prompts per second and the share of the matmul rate, by size and length."""
    case.put(**device_facts())
    limit = card.matmul_limit()
    case.put(limit_flops_per_s=limit, peak_flops_per_s=peak(jax.devices()[0].device_kind))
    for rows, tokens in [(2, 128)] if case.quick else [(4, 4096), (1, 16384)]:
        for size in SIZES:
            case.point(
                f"{size} {rows}x{tokens}",
                lambda a=(size, rows, tokens): _prefilled(case.quick, *a, limit),
                needs_s=5 if case.quick else 15,
            )


def _prefilled(quick: bool, size: str, rows: int, tokens: int, limit: float) -> dict[str, Any]:
    spec, mesh, by_depth = spec_of(size, quick), sharding.build(MeshConfig()), {}
    sizes = Sizes(rows, tokens, rows, rows, (tokens,), 1, 4, page_tokens=64, logit_rows=rows)
    attention = ""
    for layers in depths(quick):
        model = at_depth(spec, layers)
        chosen = programs.choose_kernels(model, mesh, sizes)
        attention = str(chosen.prefill)
        made = programs.build(model, mesh, sharding.SAMPLER, sizes, chosen)
        held, words = (
            engine_weights(model),
            np.random.default_rng(0).integers(1, spec.vocab_size, (rows, tokens)).astype(np.int32),
        )
        packed = requests.pack_prefill(
            tokens,
            [
                requests.PrefillRow(row, 0, 0, range(i * sizes.table, (i + 1) * sizes.table), i)
                for i, row in enumerate(words)
            ],
            sizes,
        )
        state = [made.empty()]

        def once(
            made: programs.EnginePrograms = made,
            held: params.Held = held,
            packed: np.ndarray = packed,
            state: list = state,
        ) -> jax.Array:
            state[0] = made.prefill[True, tokens](held, state[0], packed)
            return state[0].logits

        by_depth[layers] = timed(once, runs=5)
        del state, made, held
    line = continued(by_depth, spec.layers)
    # Without the embedding and the head, through which one token per row passes.
    layer = (families.parameter_count(at_depth(spec, 2)) - families.parameter_count(at_depth(spec, 1))) * spec.layers
    done = rows * (2.0 * layer * tokens + 2.0 * spec.layers * spec.heads * spec.head_dim * tokens**2)
    seconds = line["seconds"]["median"]
    return line | {
        "tokens_per_s": rows * tokens / seconds,
        "flops": done,
        "of_matmul": done / seconds / limit,
        "attention": attention,
    }


def memory(spec: ModelSpec) -> dict[str, Any]:
    """GiB of the learner's state if all parameters are trained, and True if this device has them."""
    need = STATE_BYTES * families.parameter_count(spec) / 2**30
    there = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) / 2**30
    return {"state_gib": need, "device_gib": there or None, "state_fits": need < 0.85 * there if there else None}


def learner(case: Case) -> None:
    """Optimizer steps on packed rows, by size, row length and attention: rates, and shares of the limits."""
    case.put(**device_facts())
    limit = card.matmul_limit()
    case.put(limit_flops_per_s=limit, peak_flops_per_s=peak(jax.devices()[0].device_kind))
    most, short, long = ("auto", 64, 128) if case.quick else ("auto", 4096, 16384)
    wanted = [
        (SIZES[0], short, most),
        (SIZES[2], short, most),
        (SIZES[1], short, most),
        (SIZES[0], long, most),
        (SIZES[0], short, "xla"),
        (SIZES[2], long, most),
    ]
    for size, tokens, name in wanted:
        case.point(
            f"{size} rows of {tokens}, attention {name}",
            lambda a=(size, tokens, name): _learned(case, *a, limit),
            needs_s=5 if case.quick else 20,
        )
    case.point(
        f"{SIZES[2]} rows of {short}, adapters of rank 32",
        lambda: _learned(case, SIZES[2], short, most, limit, lora_rank=32),
        needs_s=5 if case.quick else 20,
    )


def _learned(case: Case, size: str, tokens: int, name: str, limit: float, **options: Any) -> dict[str, Any]:
    spec, by_depth, chosen = spec_of(size, case.quick), {}, ""
    for layers in depths(case.quick):
        once, chosen = _stepping(at_depth(spec, layers), tokens, attention=name, **options)
        by_depth[layers] = [once() for _ in range(4)][1:]
        del once
    line, done = continued(by_depth, spec.layers), flops(spec, GROUP, tokens)
    seconds = line["seconds"]["median"]
    return line | shares(done, GROUP * tokens, seconds, limit) | {"attention": chosen, **memory(spec), **options}


def shares(done: float, tokens: int, seconds: float, limit: float) -> dict[str, Any]:
    """Rates of a step of so many operations and tokens, over the measured limit and the maker's figure."""
    promised = peak(jax.devices()[0].device_kind)
    return {
        "tokens_per_s": tokens / seconds,
        "flops": done,
        "of_matmul": done / seconds / limit,
        "mfu": done / seconds / promised if promised else None,
    }


def _stepping(spec: ModelSpec, tokens: int, **options: Any) -> tuple[Callable[[], float], str]:
    """Seconds of one step on a group of full rows, and the attention that was chosen."""
    gc.collect()  # frees the memory of the previous one
    trainer, work = prepared(spec, GROUP, tokens, micro_batch_rows=1 if tokens > 8192 else 2, **options)

    def once() -> float:
        started = time.perf_counter()
        row = trainer.train(work)
        if row["compiles"] or not np.isfinite(row["loss"]):
            raise RuntimeError(f"{row['compiles']} compilations after warm-up, loss {row['loss']}")
        return time.perf_counter() - started

    once()
    return once, str(trainer.programs.recipe.attention)


def learner_whole(case: Case) -> None:
    """All layers of the smallest model, to check the line through two depths."""
    case.put(**device_facts())
    spec, tokens = spec_of(SIZES[0], case.quick), 64 if case.quick else 4096

    def measure() -> dict[str, Any]:
        limit, started = card.matmul_limit(), time.perf_counter()
        once, chosen = _stepping(spec, tokens)
        warm_s = time.perf_counter() - started
        seconds = [once() for _ in range(5)]
        found = shares(flops(spec, GROUP, tokens), GROUP * tokens, float(np.median(seconds)), limit)
        peaks = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
        return found | {
            "seconds": spread(seconds),
            "warmup_s": warm_s,
            "attention": chosen,
            "peak_gib": peaks or None,
            **memory(spec),
        }

    case.point(f"{SIZES[0]} rows of {tokens}", measure)


if __name__ == "__main__":
    run_case(
        {"decode": decode, "engine": engine, "prefill": prefill, "learner": learner, "learner_whole": learner_whole}
    )
