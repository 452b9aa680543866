"""Engines with layers in a loop (`sampler.scan_layers`) and layer by layer: compile time, temporary memory, speed.

    python -m benchmarks.engine.scan_layers [--quick] [--case=NAME ...] [--rounds=N]

`compile`: CPU seconds in which an engine of few and of many layers compiles all its programs, without a compilation
cache. `deep` and `wide`: greedy tokens must be equal first; then decoding alternates. Both forms use the XLA form of
attention over pages. The last line is one JSON object.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib.report import Runs, arguments, finish, ratio, spread
from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import programs
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request
from jaxroll.models import families, params
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version

SLOTS, PROMPT, TOKENS, ROUNDS, AIM = 32, 12, 20, 5, 2.0
CASES = {"deep": (128, 36), "wide": (512, 12)}  # width and number of layers
LAYERS = 4, 36  # of `compile`
FORMS = {"single": False, "loop": True}


def spec_of(width: int, layers: int) -> families.ModelSpec:
    """A model of this width and depth."""
    return replace(families.spec("tiny"), layers=layers, width=width, hidden=3 * width, vocab_size=1000)


def engine_of(spec: families.ModelSpec, *, scan: bool) -> Engine:
    """An engine whose programs are not compiled yet."""
    config = EngineConfig(
        slots=SLOTS,
        max_tokens=64,
        prefill_rows=8,
        prefill_buckets=(16,),
        decode_chunk=4,
        seed=0,
        scan_layers=scan,
        paged_attention="xla",
    )
    return Engine(spec, sharding.build(MeshConfig()), sharding.SAMPLER, config)


def compile_once(layers: int, *, scan: bool) -> dict[str, Any]:
    """CPU seconds of a warm-up."""
    jax.clear_caches()
    started = time.process_time()
    engine_of(spec_of(128, layers), scan=scan).warmup(None)
    return {"cpu_s": time.process_time() - started}


def compilation(layers: tuple[int, int], rounds: int, runs: Runs) -> dict[str, Any]:
    """The ratios of many to few layers in both forms."""
    arms = {f"{form}, {count} layers": (count, scan) for form, scan in FORMS.items() for count in layers}
    found = runs.alternate(
        {arm: partial(compile_once, count, scan=scan) for arm, (count, scan) in arms.items()}, rounds
    )
    cpu_s = {arm: [one["cpu_s"] for one in of] for arm, of in found.items()}
    few, many = layers
    apart = {form: ratio(cpu_s[f"{form}, {many} layers"], cpu_s[f"{form}, {few} layers"]) for form in FORMS}
    return {
        "aim": AIM,
        "met": apart["loop"]["value"] <= AIM,
        "ratio": apart,
        "cpu_s": {arm: spread(of) for arm, of in cpu_s.items()},
    }


def temporaries(spec: families.ModelSpec, *, scan: bool) -> int:
    """Bytes of temporary memory of a dispatch of decode steps."""
    engine = engine_of(spec, scan=scan)
    lowered = programs.lowered(
        replace(spec, scan=scan), sharding.build(MeshConfig()), sharding.SAMPLER, engine._sizes, engine.attention
    )
    analysis = lowered["decode"].compile().memory_analysis()
    return analysis.temp_size_in_bytes if analysis else 0


def decoded(engine: Engine, seed: int) -> dict[str, Any]:
    """Wall and CPU seconds of greedy answers in every slot, prompts included, and the tokens."""
    rng, results = np.random.default_rng(seed), {}
    for number in range(SLOTS):
        prompt = rng.integers(0, 1000, PROMPT).astype(np.int32)
        wanted = SamplingParams(TOKENS, 0.0, ignore_eos=True)
        engine.add(Request(number, prompt, GenerationKey(number, 0), wanted), partial(results.__setitem__, number))
    wall, cpu = time.perf_counter(), time.process_time()
    while engine.step():
        pass
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tokens": [results[n].completion.tokens.tolist() for n in sorted(results)],
    }


def case(width: int, layers: int, rounds: int, runs: Runs) -> dict[str, Any]:
    """Equal greedy tokens, then the ratios of time of the loop to single layers."""
    spec, rng = spec_of(width, layers), np.random.default_rng(0)
    weights = {
        name: jnp.ones(leaf.shape)
        if "norm" in name
        else jnp.asarray(rng.standard_normal(leaf.shape, np.float32) / np.float32(np.sqrt(width)))
        for name, leaf in params.abstract(spec).items()
    }
    made = {form: engine_of(spec, scan=scan) for form, scan in FORMS.items()}
    for engine in made.values():
        engine.warmup(weights)
        engine.swap(Version(0, 1), weights)
    first = {form: np.array(decoded(engine, 0)["tokens"]) for form, engine in made.items()}
    found = runs.alternate({form: partial(decoded, engine, 1) for form, engine in made.items()}, rounds)
    cpu_s, wall_s = ({of: [one[key] for one in found[of]] for of in made} for key in ("cpu_s", "wall_s"))
    return {
        "equal_tokens": float((first["loop"] == first["single"]).mean()),
        "parameters": families.parameter_count(spec),
        "layers": layers,
        "width": width,
        "temp_bytes": {form: temporaries(spec, scan=scan) for form, scan in FORMS.items()},
        "cpu_ratio": ratio(cpu_s["loop"], cpu_s["single"]),
        "wall_ratio": ratio(wall_s["loop"], wall_s["single"]),
    }


def main() -> int:
    """Measure; return 1 if tokens differ."""
    parser = arguments(str(__doc__).splitlines()[0])
    names = ["compile", *CASES]
    parser.add_argument("--case", action="append", choices=names, help="this one; again for more (default: all)")
    chosen, started = parser.parse_args(), time.monotonic()
    jax.config.update("jax_compilation_cache_dir", None)
    jax.jit(jnp.negative)(1.0)  # the first compilation of a process starts threads
    result: dict[str, Any] = {"class": "R"}
    rounds = 1 if chosen.quick else chosen.rounds or ROUNDS
    for name in chosen.case or names:
        runs = Runs("engine.scan_layers", {"case": name}, chosen.runs_file, chosen.resume)
        if name == "compile":
            result[name] = compilation((1, 2) if chosen.quick else LAYERS, rounds, runs)
        else:
            result[name] = case(*((64, 2) if chosen.quick else CASES[name]), rounds, runs)
    finish(result, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
    return int(any(one.get("equal_tokens", 1) < 1 for one in result.values() if isinstance(one, dict)))


if __name__ == "__main__":
    sys.exit(main())
