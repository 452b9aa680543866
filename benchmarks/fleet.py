"""Gains of mechanisms for many samplers, each in whole simulated runs with and without it, and on null cases.

    python -m benchmarks.fleet [--quick] [--rounds=N] [--case=NAME ...]

    migration   four samplers of 16 slots answer with log-normal lengths (mean 2,000 tokens, deviation 2,000, at most
                8,192). Every sampler is killed at random instants, once in 60 s in the mean, and starts again after
                20 s. With `sampler.flush_tokens` = 256 others continue its answers, without it they start again.
                `null`: the same without kills. `short`: answers of at most 256 tokens, which are never flushed
    affinity    two tasks in equal shares: prompts of 20,000 tokens with answers of 64, and prompts of 64 with answers
                of 1,500 (log-normal, deviation 300). Four samplers: one computes quickly (989.5 TFLOP/s, 3.35 TB/s),
                three read memory quickly (148 TFLOP/s, 4 TB/s), each rate at 40 %. A step has 32 groups, so that all
                slots have work. With `placement.pools` each task has its samplers, without it both go anywhere.
                `equal`: the same pools over four samplers of the second kind. `null`: also equal tasks, the second
                one twice, and two samplers for each
    order       α = 0, one sampler of 16 slots, eight groups of 8 a step from four tasks, whose answers have 250, 500,
                1,000 or 4,000 tokens in the mean (log-normal, deviation a quarter). With
                `schedule.lease_first=longest` a step starts with those that are predicted to be long; without it, in
                the order of the prompts. `null`: all answers have 1,000 tokens

    repack      α = 2, one version per trajectory (`schedule.weight_swap=trajectory`), the lengths of `migration`,
                flushes of 64 tokens. With `schedule.repack_s=5` samplers that wait for their last members before they
                take new weights give these to one another. `null`: all answers have 2,000 tokens

The store, the loops of samplers and learner and their decisions are the real ones, on a virtual clock; engine, trainer
and network are cost models: a model of 8·10⁹ parameters in bfloat16 on one H100 (3.35 TB/s, 989 TFLOP/s at 40 %) per
sampler and eight for the learner, 0.5 ms a call of the store and 10 Gbit/s to it. A re-prefill is paid for.

A run gives the time of its steps, the tokens that its samplers decoded over those that were stored (`decoded_ratio`; 1
without waste), and the tokens that were continued after; of `affinity` also the share of members that their own pool
sampled, of `repack` the samplers that were emptied and the members that moved. `ratio` is that of the step time
without the mechanism over the one with it, per seed: median and range. Class S. The last line is one JSON object with
a key for each case.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.report import arguments, finish, say
from jaxroll import config as configs
from jaxroll.clock import simulated_unix
from jaxroll.config import Config, section_rules
from jaxroll.config.parsing import SOURCE_ITEMS
from jaxroll.protocols import Completion
from jaxroll.records import Message, Task
from jaxroll.sim import costs
from jaxroll.sim import network as virtual_time
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, RoleFailure, SamplerCosts, TransferCosts, Workload
from jaxroll.sim.devices import ENV, SimulatedEngine
from jaxroll.sim.simulate import EPOCH_S, SimulatedRun, figures
from jaxroll.sim.world import Feed, VirtualStore

SAMPLERS, KILLS_EVERY_S, DOWN_S, FLUSH = 4, 60.0, 20.0, 256
REPACK_S, REPACK_FLUSH = 5.0, 64
LENGTHS = Law("lognormal", mean=2000, deviation=2000, least=16, most=8192)
SHORT = Law("lognormal", mean=100, deviation=60, least=16, most=256)
PARAMETERS, FLOPS = 8e9, 0.4 * 989e12
Figures = Mapping[str, float]


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
    chance, failures = random.Random(seed), list[RoleFailure]()
    for index in range(SAMPLERS if kills else 0):
        at_s = 0.0
        while (at_s := at_s + DOWN_S + chance.expovariate(1 / KILLS_EVERY_S)) < 36_000.0:
            failures.append(RoleFailure(at_s, f"sampler-{index}", DOWN_S))
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


# --- Several tasks: sources with prompts and answers of their own


@dataclass(frozen=True)
class Kind:
    """Prompts of a source, and its answers."""

    prompt_tokens: int
    answers: Law


class MixedFeed(Feed):
    """Prompts of several sources in turn; the length of a prompt names its source."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        super().__init__(ENV)
        self._kinds = kinds

    def _task(self, index: int) -> Task:
        number = index % len(self._kinds)
        shown = (Message("user", "a" * self._kinds[number].prompt_tokens),)
        return Task(number * SOURCE_ITEMS + index, shown, ENV, "{}", index, f"{index:016x}")


class MixedEngine(SimulatedEngine):
    """An engine whose answers have the lengths of their source: that with the nearest prompts."""

    kinds: Sequence[Kind] = ()

    async def generate(self, prompt: np.ndarray, *args: Any, **options: Any) -> Completion:
        """An answer; its length is drawn before the first await."""
        if self.kinds:
            own = min(self.kinds, key=lambda kind: abs(kind.prompt_tokens - len(prompt)))
            self._workload = replace(self._workload, answer_tokens=own.answers)
        return await super().generate(prompt, *args, **options)


class FleetRun(SimulatedRun):
    """A run over prompts of several kinds; without kinds, that of every simulation."""

    def __init__(self, made: Config, on: Cluster, kinds: Sequence[Kind] = ()) -> None:
        super().__init__(made, on, Path())
        self._kinds = kinds
        if kinds:
            self.store = VirtualStore(made, lambda: MixedFeed(kinds))

    def _make_engine(self, role: str) -> SimulatedEngine:
        engine = MixedEngine(self._cluster, self.config, role, self.links)
        engine.kinds = self._kinds
        return engine


# --- Runs and their figures


def run(made: Config, on: Cluster, kinds: Sequence[Kind] = ()) -> dict[str, float]:
    """The figures of one run."""

    async def job() -> dict[str, float]:
        loop = asyncio.get_running_loop()
        with simulated_unix(lambda: EPOCH_S + loop.time()), contextlib.redirect_stdout(None):
            at = FleetRun(made, on, kinds)
            async with at:
                try:
                    await at.train()
                    await at.settled()
                    status, found = at.store.status(), figures(at.store.metrics.written(), made, on)
                    decoded = sum(engine.stats().tokens_decoded for engine in at.engines)
                    sampled = at.store.sql(_SAMPLED)
                finally:
                    await at.close()
        assert status["conservation_residual"] == 0
        given = section_rules.pools(made)
        own = [given.of_role(holder) == given.of_work(item // SOURCE_ITEMS) for holder, item in sampled]
        return {
            "step_s": found["step_s"],
            "age_max": found["age_max"],
            "decoded_ratio": decoded / status["tokens_put"],
            "tokens_resumed": status["tokens_resumed"],
            "members_resumed": status["members_resumed"],
            "tokens_flushed": status["tokens_flushed"],
            "expired": sum(status["expired"].values()),
            **_moved(at.store.metrics.written()),
            **({"own_pool": sum(own) / len(own)} if given else {}),
        }

    return virtual_time.run(job(), 365 * 86400.0)


def _moved(rows: Sequence[Any]) -> dict[str, int]:
    """The samplers that were emptied by a plan, and the members that moved; from the last row of each."""
    last = {row["role"]: row for row in rows if row.get("kind") == "stats" and "repacks" in row}
    return {name: sum(row[name] for row in last.values()) for name in ("repacks", "members_moved")}


_SAMPLED = "SELECT m.holder, g.prompt_index FROM members m JOIN groups g ON g.id = m.group_id WHERE m.tokens > 0"


def compared(seeds: Sequence[int], what: str, run_pair: Callable[[int], tuple[Figures, Figures]]) -> dict[str, Any]:
    """Runs without and with a mechanism for each seed."""
    pairs = list[tuple[Figures, Figures]]()
    for seed in seeds:
        pairs.append(pair := run_pair(seed))
        say(f"{what}, seed {seed}: step {pair[0]['step_s']:.2f} s without, {pair[1]['step_s']:.2f} s with")
    ratios = [off["step_s"] / with_["step_s"] for off, with_ in pairs]
    return {
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "seeds": list(seeds),
        "without": [off for off, _ in pairs],
        "with": [with_ for _, with_ in pairs],
    }


def _with(made: Config, longest: int) -> Config:
    return replace(made, sampling=replace(made.sampling, max_tokens=longest))


def migration(rounds: int, steps: int) -> dict[str, Any]:
    """The case `migration`, with its null cases."""
    found = {}
    for name, lengths, kills in (("kills", LENGTHS, True), ("null", LENGTHS, False), ("short", SHORT, True)):
        longest = 8192 if lengths is LENGTHS else 256

        def pair(seed: int) -> tuple[Figures, Figures]:
            on = cluster(seed, lengths, kills)  # noqa: B023 - called within this round of the loop
            off, with_ = (run(_with(config(seed, tokens, steps), longest), on) for tokens in (0, FLUSH))  # noqa: B023
            return off, with_

        found[name] = compared(range(rounds), f"migration, {name}", pair)
    return found


POOLS = {"compute": {"samplers": 1, "tags": ["prefill"]}, "memory": {"samplers": 3, "tags": ["decode"]}}
LONG = Law("lognormal", mean=1500, deviation=300, least=16, most=6000)
TASKS, ALIKE = (Kind(20_000, Law(mean=64)), Kind(64, LONG)), (Kind(32, LONG), Kind(64, LONG))
HALVES = {"one": {"samplers": 2, "tags": ["prefill"]}, "two": {"samplers": 2, "tags": ["decode"]}}
AFFINITY_GROUPS = 32
COMPUTE = {"flops": 0.4 * 989.5e12, "bytes_per_s": 0.4 * 3.35e12}
MEMORY = {"flops": 0.4 * 148e12, "bytes_per_s": 0.4 * 4e12}


def mixed(seed: int, steps: int, labels: Sequence[str], **sections: Mapping[str, Any]) -> Config:
    """A run over several tasks in equal shares."""
    made = config(seed, 0, steps)
    spell = {"source": "reasoning_gym", "name": "spell_backward"}
    values = configs.to_dict(made)
    values["task"] |= {"mixture": [spell | {"label": label} for label in labels], "max_prompt_tokens": 20_480}
    values["learner"] |= {"row_tokens": 32_768}
    for name, changes in sections.items():
        values[name] |= changes
    return configs.parse(values)


def affinity(rounds: int, steps: int) -> dict[str, Any]:
    """The case `affinity`, with equal samplers and its null case."""
    found = {}
    cases = {
        "mixed": ((COMPUTE, MEMORY, MEMORY, MEMORY), TASKS, POOLS),
        "equal": ((MEMORY,) * 4, TASKS, POOLS),
        "null": ((MEMORY,) * 4, ALIKE, HALVES),
    }
    for name, (rates, kinds, pools) in cases.items():

        def pair(seed: int) -> tuple[Figures, Figures]:
            one = cluster(seed, LENGTHS, False)
            on = replace(one, samplers=tuple(replace(one.sampler, **rate) for rate in rates))  # noqa: B023
            schedule = {"groups_per_step": AFFINITY_GROUPS}
            off, with_ = (
                run(mixed(seed, steps, ("prefill", "decode"), schedule=schedule, placement={"pools": given}), on, kinds)  # noqa: B023
                for given in ({}, pools)  # noqa: B023
            )
            return off, with_

        found[name] = compared(range(rounds), f"affinity, {name}", pair)
    return found


def order(rounds: int, steps: int) -> dict[str, Any]:
    """The case `order`, with its null case."""
    found = {}
    unequal = [
        Kind(prompt, Law("lognormal", mean=mean, deviation=mean / 4, least=16, most=8192))
        for prompt, mean in ((32, 250), (64, 500), (96, 1000), (128, 4000))
    ]
    equal = [replace(kind, answers=Law(mean=1000)) for kind in unequal]
    for name, kinds in (("unequal", unequal), ("null", equal)):

        def pair(seed: int) -> tuple[Figures, Figures]:
            sections = [
                {"schedule": {"alpha": 0.0, "lease_first": first}, "sampler": {"count": 1, "concurrent_episodes": 16}}
                for first in ("oldest", "longest")
            ]
            on = cluster(seed, LENGTHS, False)
            off, with_ = (run(mixed(seed, steps, "abcd", **changes), on, kinds) for changes in sections)  # noqa: B023
            return off, with_

        found[name] = compared(range(rounds), f"order, {name}", pair)
    return found


def repack(rounds: int, steps: int) -> dict[str, Any]:
    """The case `repack`, with its null case."""
    found = {}
    for name, lengths in (("unequal", LENGTHS), ("null", Law(mean=2000))):

        def pair(seed: int) -> tuple[Figures, Figures]:
            made = config(seed, REPACK_FLUSH, steps)
            one_version = replace(made.schedule, alpha=2.0, weight_swap="trajectory")
            sampler = replace(made.sampler, concurrent_episodes=made.sampler.slots)
            off, with_ = (
                run(
                    replace(made, schedule=replace(one_version, repack_s=period_s), sampler=sampler),
                    cluster(seed, lengths, False),  # noqa: B023 - called within this round of the loop
                )
                for period_s in (0.0, REPACK_S)
            )
            return off, with_

        found[name] = compared(range(rounds), f"repack, {name}", pair)
    return found


CASES: Mapping[str, Callable[[int, int], dict[str, Any]]] = {
    "migration": migration,
    "affinity": affinity,
    "order": order,
    "repack": repack,
}


def main() -> int:
    parser = arguments("mechanisms for many samplers, simulated")
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="only these cases")
    args, started = parser.parse_args(), time.monotonic()
    rounds, steps = (args.rounds or 1, 4) if args.quick else (args.rounds or 3, 12)
    found = {name: CASES[name](rounds, steps) for name in args.case or CASES}
    finish({"class": "S", **found}, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
