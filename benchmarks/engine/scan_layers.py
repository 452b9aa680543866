"""Prototype of decode steps with layers in a loop: compile time and speed, compared with layer by layer.

    python -m benchmarks.engine.scan_layers [--quick] [--case=NAME ...] [--rounds=N]

The loop (`jax.lax.scan`) reads each layer's weights as a slice of a stack, and all layers share one pool of pages: the
tables of layer n are offset by n times the pages of a layer, so the pool is updated in place. Greedy tokens must be
equal first; then runs alternate. Engines do not use it: the result says why. The last line is one JSON object.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib.report import Runs, arguments, finish, ratio, spread
from jaxroll.kernels.attention import paged, reach
from jaxroll.models import families, moe, transformer
from jaxroll.models import params as model_params
from jaxroll.models.cache import KVCache, appended
from jaxroll.models.moe import Routing

SLOTS, PAGE_TOKENS, TABLE, STEPS, ROUNDS = 32, 16, 16, 20, 5
PAGES = SLOTS * TABLE
CASES = {"deep": (128, 36), "wide": (512, 12)}  # width and number of layers
Step = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Arm:
    """A compiled greedy decode step, and the empty cache that it starts from."""

    step: Step
    empty: Callable[[], Any]
    compile_cpu_s: float
    temp_bytes: int

    def run(self, tokens: jax.Array, positions: jax.Array, steps: int) -> tuple[float, float, np.ndarray]:
        """Wall and CPU seconds of `steps`, and their tokens [steps, S]."""
        cache, found = jax.block_until_ready(self.empty()), []
        wall, cpu = time.perf_counter(), time.process_time()
        for number in range(steps):
            tokens, cache = self.step(cache, tokens, positions + number)
            found.append(tokens)
        jax.block_until_ready(cache)
        return time.perf_counter() - wall, time.process_time() - cpu, np.asarray(found)


def arms(spec: families.ModelSpec, seed: int = 0) -> dict[str, Arm]:
    """Both arms for random weights."""
    rng, shapes = np.random.default_rng(seed), model_params.abstract(spec)
    weights = {
        name: jnp.ones(leaf.shape)
        if "norm" in name
        else jnp.asarray(rng.standard_normal(leaf.shape, np.float32) / np.float32(np.sqrt(spec.width)))
        for name, leaf in shapes.items()
    }
    tables = jnp.arange(PAGES, dtype=jnp.int32).reshape(SLOTS, TABLE)
    stacks = jax.jit(partial(transformer.stacked, spec, layout=None))(weights)
    outer = {name: value for name, value in weights.items() if not name.startswith("layers.")}
    pool = (1, spec.kv_heads, PAGES, PAGE_TOKENS, spec.head_dim)
    joined = (1, spec.kv_heads, spec.layers * PAGES, PAGE_TOKENS, spec.head_dim)

    def single(weights: Any, cache: KVCache, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, KVCache]:
        logits, cache = transformer.decode(spec, weights, cache, tokens, positions, tables)
        return jnp.argmax(logits, -1).astype(jnp.int32), cache

    def loop(weights: Any, cache: Any, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, Any]:
        outer, stacks = weights
        split = lambda x: x.reshape(1, -1, *x.shape[1:])  # noqa: E731
        order = jnp.argsort(-split(positions), axis=1)
        count = transformer.blocks(SLOTS, None)
        order = order if count > 1 else None
        tokens, positions, own = (transformer.ordered(x, order) for x in (tokens, positions, tables))
        turn, where = transformer.rotations(spec, positions[:, None])[0], split(positions)
        far = reach(where, 1, PAGE_TOKENS, count)
        # The module wants parameters of layers, too; these zeros are never read.
        zeros = {name: jnp.zeros(leaf.shape) for name, leaf in shapes.items() if name not in outer}
        decoder = model_params.module(spec, outer | zeros)

        def layer(carry: Any, of_layer: Any) -> tuple[Any, None]:
            x, keys, values = carry
            weights, number = of_layer
            here = split(own) + number * PAGES

            def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                nonlocal keys, values
                keys = jax.vmap(appended)(keys, split(k[:, 0]), here, where)
                values = jax.vmap(appended)(values, split(v[:, 0]), here, where)
                over = jax.vmap(partial(paged, window=0), in_axes=(0, 0, 0, 0, 0, None))
                return over(split(q), keys, values, here, where, far).reshape(q.shape)

            x = model_params.block(spec, weights)(x, turn, attend, Routing(moe.largest(1)))
            return (x, keys, values), None

        each = {name.split(".", 2)[2]: stack for name, stack in stacks.items()}
        start = decoder.embedded(tokens[:, None]), *cache
        (x, *cache), _ = jax.lax.scan(layer, start, (each, jnp.arange(spec.layers)))
        x = transformer.ordered(x[:, 0], None if order is None else jnp.argsort(order, axis=1))
        return jnp.argmax(decoder.logits(decoder.final_norm(x)), -1).astype(jnp.int32), tuple(cache)

    def arm(step: Callable[..., Any], weights: Any, empty: Callable[[], Any]) -> Arm:
        integers, started = jnp.zeros(SLOTS, jnp.int32), time.process_time()
        compiled = jax.jit(step, donate_argnums=1).lower(weights, empty(), integers, integers).compile()
        compile_cpu_s, memory = time.process_time() - started, compiled.memory_analysis()
        return Arm(partial(compiled, weights), empty, compile_cpu_s, memory.temp_size_in_bytes if memory else 0)

    def layered() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(pool) for _ in range(spec.layers))

    return {
        "single": arm(single, weights, lambda: KVCache(layered(), layered())),
        "loop": arm(loop, (outer, stacks), lambda: (jnp.zeros(joined), jnp.zeros(joined))),
    }


def case(name: str, width: int, layers: int, rounds: int, steps: int, runs: Runs) -> dict[str, Any]:
    """Equal greedy tokens, then the ratios of time of the loop to single layers."""
    spec = replace(families.spec("tiny"), layers=layers, width=width, hidden=3 * width, vocab_size=1000)
    made, rng = arms(spec), np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, spec.vocab_size, SLOTS), jnp.int32)
    positions = jnp.asarray(rng.integers(0, 20, SLOTS), jnp.int32)
    first = {of: arm.run(tokens, positions, steps)[2] for of, arm in made.items()}
    equal = float((first["loop"] == first["single"]).mean())

    def run(of: str) -> dict[str, Any]:
        wall_s, cpu_s, _ = made[of].run(tokens, positions, steps)
        return {"wall_s": wall_s, "cpu_s": cpu_s}

    found = runs.alternate({of: partial(run, of) for of in made}, rounds)
    times = {of: [one["cpu_s"] for one in found[of]] for of in made}
    walls = {of: [one["wall_s"] for one in found[of]] for of in made}
    return {
        "equal_tokens": equal,
        "parameters": families.parameter_count(spec),
        "layers": layers,
        "width": width,
        "compile_cpu_s": {of: arm.compile_cpu_s for of, arm in made.items()},
        "temp_bytes": {of: arm.temp_bytes for of, arm in made.items()},
        "cpu_ratio": ratio(times["loop"], times["single"]),
        "wall_ratio": ratio(walls["loop"], walls["single"]),
        "tokens_per_s": {of: spread([SLOTS * steps / wall for wall in walls[of]]) for of in made},
    }


def main() -> int:
    """Measure; return 1 if tokens differ."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="this one; again for more (default: all)")
    chosen, started = parser.parse_args(), time.monotonic()
    cases = {"small": (64, 2)} if chosen.quick else {name: CASES[name] for name in chosen.case or CASES}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.jit(jnp.negative)(1.0)  # the first compilation of a process starts threads
    result: dict[str, Any] = {"class": "R"}
    for name, (width, layers) in cases.items():
        runs = Runs("engine.scan_layers", {"case": name}, chosen.runs_file, chosen.resume)
        rounds, steps = (2, 5) if chosen.quick else (chosen.rounds or ROUNDS, STEPS)
        result[name] = case(name, width, layers, rounds, steps, runs)
    finish(result, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
    return int(any(one["equal_tokens"] < 1 for one in result.values() if isinstance(one, dict)))


if __name__ == "__main__":
    sys.exit(main())
