"""Gains of mechanisms for many samplers, each in whole simulated runs with and without it, and on null cases.

    python -m benchmarks.fleet [--quick] [--rounds=N] [--case=NAME ...]

    migration   four samplers of 16 slots answer with log-normal lengths (mean 2,000 tokens, deviation 2,000, at most
                8,192). Every sampler is killed at random instants, once in 60 s in the mean, and starts again after
                20 s. With `sampler.flush_tokens` = 256 others continue its answers, without it they start again.
                `null`: the same without kills. `short`: answers of at most 256 tokens, which are never flushed

The store, the loops of samplers and learner and their decisions are the real ones, on a virtual clock; engine, trainer
and network are cost models: a model of 8·10⁹ parameters in bfloat16 on one H100 (3.35 TB/s, 989 TFLOP/s at 40 %) per
sampler and eight for the learner, 0.5 ms a call of the store and 10 Gbit/s to it. A re-prefill is paid for.

A run gives the time of its steps, the tokens that its samplers decoded over those that were stored (`decoded_ratio`; 1
without waste), and the tokens that were continued after. `ratio` is that of the step time without the mechanism over
the one with it, per seed: median and range. Class S. The last line is one JSON object with a key for each case.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.report import arguments, finish, say
from jaxroll import config as configs
from jaxroll.clock import simulated_unix
from jaxroll.config import Config
from jaxroll.sim import costs
from jaxroll.sim import network as virtual_time
from jaxroll.sim.costs import Cluster, Failure, Law, LearnerCosts, SamplerCosts, TransferCosts, Workload
from jaxroll.sim.simulate import EPOCH_S, SimulatedRun, figures

SAMPLERS, KILLS_EVERY_S, DOWN_S, FLUSH = 4, 60.0, 20.0, 256
LENGTHS = Law("lognormal", mean=2000, deviation=2000, least=16, most=8192)
SHORT = Law("lognormal", mean=100, deviation=60, least=16, most=256)
PARAMETERS, FLOPS = 8e9, 0.4 * 989e12


def config(seed: int, flush_tokens: int, steps: int) -> Config:
    """A run of 8 groups of 8 a step, α = 1."""
    return costs.checked(
        configs.parse(
            {
                "run": {"seed": seed},
                "schedule": {"steps": steps, "groups_per_step": 8, "group_size": 8, "alpha": 1.0},
                "sampler": {"count": SAMPLERS, "slots": 16, "decode_chunk": 16, "flush_tokens": flush_tokens},
                "sampling": {"max_tokens": 8192},
                "task": {"max_prompt_tokens": 256},
                "learner": {"row_tokens": 16384},
                "store": {"retention_mb": 4096},
            }
        )
    )


def cluster(seed: int, lengths: Law, kills: bool) -> Cluster:
    """The hardware, and the instants of the kills, which depend on the seed only."""
    chance, failures = random.Random(seed), list[Failure]()
    for index in range(SAMPLERS if kills else 0):
        at_s = 0.0
        while (at_s := at_s + DOWN_S + chance.expovariate(1 / KILLS_EVERY_S)) < 36_000.0:
            failures.append(Failure(at_s, f"sampler-{index}", DOWN_S))
    return Cluster(
        "published figures of an H100 SXM; 8e9 parameters, 36 layers of 8 heads of 128 in bfloat16",
        SamplerCosts(
            step_overhead_s=0.002,
            flops_per_token=2 * PARAMETERS,
            flops=FLOPS,
            weight_bytes=2 * PARAMETERS,
            kv_bytes_per_token=36 * 8 * 128 * 2 * 2,
            bytes_per_s=3.35e12,
        ),
        LearnerCosts(flops_per_token=6 * PARAMETERS, flops=8 * FLOPS),
        TransferCosts(publish_s=2.0, size_bytes=2 * PARAMETERS, bytes_per_s=5e9),
        Workload(Law(mean=128), lengths, env_s=Law(mean=0.1)),
        rpc_s=0.0005,
        rpc_bytes_per_s=1.25e9,
        failures=tuple(failures),
    )


def run(made: Config, on: Cluster) -> dict[str, float]:
    """The figures of one run."""

    async def job() -> dict[str, float]:
        loop = asyncio.get_running_loop()
        with simulated_unix(lambda: EPOCH_S + loop.time()), contextlib.redirect_stdout(None):
            at = SimulatedRun(made, on, Path())
            async with at:
                try:
                    await at.train()
                    await at.settled()
                    status, found = at.store.status(), figures(at.store.metrics.written(), made, on)
                    decoded = sum(engine.stats().tokens_decoded for engine in at.engines)
                finally:
                    await at.close()
        assert status["conservation_residual"] == 0
        return {
            "step_s": found["step_s"],
            "age_max": found["age_max"],
            "decoded_ratio": decoded / status["tokens_put"],
            "tokens_resumed": status["tokens_resumed"],
            "members_resumed": status["members_resumed"],
            "tokens_flushed": status["tokens_flushed"],
            "expired": sum(status["expired"].values()),
        }

    return virtual_time.run(job(), 365 * 86400.0)


def compared(seeds: Sequence[int], steps: int, lengths: Law, kills: bool) -> dict[str, Any]:
    """Runs with and without flushes for each seed."""
    pairs: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
    for seed in seeds:
        on = cluster(seed, lengths, kills)
        longest = 8192 if lengths is LENGTHS else 256
        pair = [run(_with(config(seed, tokens, steps), longest), on) for tokens in (0, FLUSH)]
        pairs.append((pair[0], pair[1]))
        say(
            f"seed {seed}: step {pair[0]['step_s']:.2f} s without, {pair[1]['step_s']:.2f} s with flushes; decoded "
            f"{pair[0]['decoded_ratio']:.3f} and {pair[1]['decoded_ratio']:.3f} of the stored tokens"
        )
    ratios = [off["step_s"] / with_["step_s"] for off, with_ in pairs]
    return {
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "seeds": list(seeds),
        "steps": steps,
        "without": [off for off, _ in pairs],
        "with": [with_ for _, with_ in pairs],
    }


def _with(made: Config, longest: int) -> Config:
    return replace(made, sampling=replace(made.sampling, max_tokens=longest))


def migration(rounds: int, steps: int) -> dict[str, Any]:
    """The case `migration`, with its null cases."""
    seeds = range(rounds)
    found = {}
    for name, lengths, kills in (("kills", LENGTHS, True), ("null", LENGTHS, False), ("short", SHORT, True)):
        say(f"migration: {name}")
        found[name] = compared(seeds, steps, lengths, kills)
    return found


CASES: Mapping[str, Callable[[int, int], dict[str, Any]]] = {"migration": migration}


def main() -> int:
    parser = arguments("mechanisms for many samplers, simulated")
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="only these cases")
    args, started = parser.parse_args(), time.monotonic()
    rounds, steps = (1, 4) if args.quick else (args.rounds or 3, 12)
    found = {name: CASES[name](rounds, steps) for name in args.case or CASES}
    finish({"class": "S", **found}, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
