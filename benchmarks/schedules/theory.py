"""Closed forms of asynchronous RL compared with simulations of the real store and role loops.

    python -m benchmarks.schedules.theory [--quick] [--rounds=SEEDS] [--workloads=N] [--first=N] [--load=RHO ...]
                                          [--part=NAME ...]

    propositions  the two propositions of ROLL Flash (arXiv 2510.11345) as bounds over random workloads: K slots, N
                  rollouts a step, mean and maximum time of a rollout μ and L, time of training on one worker μ_t.
                  1: a synchronous step takes at most N·μ/K + L; with an age bound α at most N·μ/K + L/(α+1), where L
                  is the maximum over the (α+1)·N rollouts in flight. 2: with training, N·μ/K + L + E·N·μ_t/K; and with
                  the share β of the workers for training max(N·μ/((1−β)K) + L/(α+1), E·N·μ_t/(βK)). Values are those
                  that were drawn. `largest` is the largest time over its bound, `above` the workloads above it. The
                  last bound is not one for an age bound: the rollouts of a step may begin when the step α + 1 before
                  has been trained, so training delays them. `with the age bound` is the bound that follows
                  from that: g = N·μ/((1−β)K) and t = E·N·μ_t/(βK) give max(g, t) + (min(g, t) + L)/(α+1)
    intervals     HTS-RL (arXiv 2012.09849): n environments take α steps of exponential time, then wait for each other
                  (`schedule.mode=interval`). An interval takes the expected maximum of n Gamma(α) variables, by extreme
                  value theory (1 − γ)·F⁻¹(1 − 1/n) + γ·F⁻¹(1 − 1/(n·e)). `error` is that of the mean of all simulated
                  intervals, `deviation` its standard error, `seeds` the errors of single seeds, and `exact` the
                  expected maximum (`DRAWS` draws). The number of intervals makes the standard error `PRECISION`
    queue         an unbounded queue between samplers and learner, both with exponential times: M/M/1. A rollout finds
                  ρ/(1 − ρ) updates between its end and its training in the mean. One row for all seeds of a load
    limits        the workloads of benchmarks/schedules whose environments sleep: 64 environments, 8 groups of 8 a
                  step, answers judged after N(1 s, σ), 0.12 s of training: the gain over the synchronous schedule.
                  `limit`: a token sampled at version u is trained in step u + α at the latest, so the longest rollout
                  that begins at u ends within α + 1 steps, and within one step when synchronous: the ratio is at most
                  α + 1 if all rollouts that begin are trained, and the rate that of the environments

Class S, one core. The last line is one JSON object with a key for each part.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.lib.report import arguments, finish, ratio, say
from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.sim import costs, simulate
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, SamplerCosts, Workload

Rows = Sequence[Mapping[str, Any]]
Bound = Callable[[Sequence[Sequence[float]], int, int, float], float]
EULER = 0.5772156649
DRAWS, PRECISION = 20_000, 0.015
LOADS = (0.3, 0.5, 0.6)
DRAWN = 2_000_000  # rollouts of the recursion alone
INSTANT_S = 1e-9  # of a decode step whose time does not count


def config(slots: int, groups: int, size: int, steps: int, *, seed: int = 0, **schedule: Any) -> Config:
    """A run with one sampler whose slots decode one token at a time. It plays at most what its age bound admits."""
    ahead = (math.ceil(schedule.get("alpha", 1.0)) + 1) * groups * size  # more would only be read ahead as prompts
    base = configs.parse(
        {
            "run": {"seed": seed},
            "schedule": {"steps": steps, "groups_per_step": groups, "group_size": 2, "in_flight_window": "full"}
            | schedule,
            "sampler": {"slots": slots, "decode_chunk": 1, "concurrent_episodes": min(ahead, 4096)},
            "sampling": {"max_tokens": 8192},
            "task": {"max_prompt_tokens": 32, "max_episode_tokens": 65536},
            "learner": {"row_tokens": 65536},
        }
    )
    return costs.checked(replace(base, schedule=replace(base.schedule, group_size=size)))


def _busy(config: Config, episodes: int) -> Config:
    """`config` with so many episodes at a time."""
    return replace(config, sampler=replace(config.sampler, concurrent_episodes=episodes))


def rows_of(config: Config, cluster: Cluster) -> Rows:
    """The rows of a simulation."""
    return simulate.simulated_rows(config, cluster, Path(), keep=False)


def steps_of(rows: Rows) -> list[Mapping[str, Any]]:
    """The rows of the steps, in order."""
    return sorted((row for row in rows if row.get("kind") == "step"), key=lambda row: row["step"])


# --- Propositions 1 and 2


def proposition_ratios(number: int) -> dict[str, float]:
    """The simulated time of a random workload over its bound, for each statement."""
    chance = random.Random(f"proposition {number}")
    slots, groups, size = chance.choice([4, 8]), chance.randint(1, 4), chance.randint(2, 4)
    alpha, mean = chance.choice([1.0, 2.0, 3.0]), chance.uniform(10, 60)
    kind: Any = chance.choice(["lognormal", "exponential", "normal", "constant"])
    lengths = Law(kind, mean, mean * chance.uniform(0.1, 2.0), least=1, most=4096)
    share = chance.choice([0.25, 0.5])
    count, tokens_s = groups * size, 0.02
    on_all_s = tokens_s * count * mean * chance.uniform(0.1, 2.0) / slots  # E·N·μ_t/K
    cluster = Cluster(
        sampler=SamplerCosts(step_overhead_s=tokens_s), workload=Workload(answer_tokens=lengths), rpc_s=0.0
    )
    training = replace(cluster, learner=LearnerCosts(step_overhead_s=on_all_s))
    shared = replace(cluster, learner=LearnerCosts(step_overhead_s=on_all_s / share))
    left = round((1 - share) * slots)

    def run(slots: int, alpha: float, cluster: Cluster, trains_s: float, *bounds: Bound) -> list[float]:
        cycles = math.ceil(4 / (alpha + 1))  # whole ones, because a cycle has one longest rollout
        one = config(slots, groups, size, 1 + cycles * (int(alpha) + 1), seed=number, alpha=alpha)
        rows = rows_of(one, cluster)
        steps, of_step = steps_of(rows), [[count * tokens_s for count in each] for each in _lengths(rows)]
        took_s = steps[-1]["t1"] - steps[0]["t1"]
        return [float(took_s / bound(of_step, slots, int(alpha), trains_s)) for bound in bounds]

    return dict(
        zip(
            ("1, synchronous", "1, asynchronous", "2, synchronous", "2, asynchronous", "2, with the age bound"),
            (
                *run(slots, 0.0, cluster, 0.0, published),
                *run(slots, alpha, cluster, 0.0, published),
                *run(slots, 0.0, training, on_all_s, published),
                *run(left, alpha, shared, on_all_s / share, published, aged),
            ),
            strict=True,
        )
    )


def _lengths(rows: Rows) -> list[list[int]]:
    """The tokens of the rollouts of each step."""
    lengths = defaultdict[int, list[int]](list)
    for row in rows:
        for group, _, _, _, tokens in row["rows"] if row.get("kind") == "members" else ():
            lengths[group].append(tokens)
    return [[count for group in row["groups"] for count in lengths[group]] for row in steps_of(rows)]


def published(of_step: Sequence[Sequence[float]], slots: int, alpha: int, trains_s: float) -> float:
    """The sum of the bounds of the propositions over all steps but the first, from the times of their rollouts.

    Mean and maximum are those of the rollouts in flight together: those of a cycle of α + 1 steps.
    """
    bound_s = 0.0
    for first in range(1, len(of_step), alpha + 1):
        cycle = of_step[first : first + alpha + 1]
        generates_s = sum(map(sum, cycle)) / slots + max(map(max, cycle))
        bound_s += max(generates_s, len(cycle) * trains_s) if alpha else generates_s + trains_s
    return bound_s


def aged(of_step: Sequence[Sequence[float]], slots: int, alpha: int, trains_s: float) -> float:
    """The bound that the age bound allows, over cycles of α + 1 steps.

    When a step has ended, the rollouts of the next α + 1 steps may run, and no others. Slots take them in order, so
    those of the first i steps have ended after their sum over K, plus the longest; the steps from the i-th on follow.
    """
    bound_s = 0.0
    for first in range(1, len(of_step), alpha + 1):
        cycle = of_step[first : first + alpha + 1]
        sums_s = np.cumsum([sum(each) for each in cycle]) / slots
        ends_s = [sum_s + (len(cycle) - index) * trains_s for index, sum_s in enumerate(sums_s)]
        bound_s += max(ends_s) + max(map(max, cycle))
    return bound_s


def propositions(first: int, workloads: int) -> dict[str, Any]:
    """For each statement the largest and the median ratio, and the workloads above 1 (0.5 % for the clock's ticks)."""
    found = defaultdict[str, list[float]](list)
    for number in range(first, first + workloads):
        for name, value in proposition_ratios(number).items():
            found[name].append(value)
        if number % 100 == 99:
            say(f"{number + 1} workloads: " + ", ".join(f"{name} {max(values):.3f}" for name, values in found.items()))
    return {
        name: {
            "workloads": workloads,
            "largest": max(values),
            "median": statistics.median(values),
            "above": sum(value > 1.005 for value in values),
        }
        for name, values in found.items()
    }


# --- Intervals (HTS-RL)


def interval_s(environments: int, alpha: int) -> float:
    """The expected time of an interval whose environment steps take 1 s in the mean."""
    law = stats.gamma(alpha)
    first, second = law.ppf(1 - 1 / environments), law.ppf(1 - 1 / (environments * math.e))
    return float((1 - EULER) * first + EULER * second)


def maxima_s(environments: int, alpha: int) -> np.ndarray:
    """Drawn times of an interval whose environment steps take 1 s in the mean."""
    drawn = np.random.default_rng(0)
    return np.array([drawn.gamma(alpha, size=environments).max() for _ in range(DRAWS)])


def simulated_intervals_s(environments: int, alpha: int, count: int, seed: int = 0) -> np.ndarray:
    """The times of `count` intervals of a simulation, after the first one."""
    groups = math.isqrt(environments)
    one = config(environments, groups, environments // groups, count + 2, seed=seed)
    work = Workload(Law(mean=1), Law(mean=1), Law(mean=1), Law(mean=alpha), Law("exponential", 1.0))
    cluster = Cluster(sampler=SamplerCosts(step_overhead_s=INSTANT_S), workload=work, rpc_s=0.0)
    ends = [row["t1"] for row in steps_of(rows_of(simulate.scheduled(one, "interval"), cluster))]
    return np.diff(ends)[1:]


def interval_row(environments: int, alpha: int, seeds: int, precision: float) -> dict[str, Any]:
    """Formula and simulation for a number of environments and steps."""
    formula, maxima = interval_s(environments, alpha), maxima_s(environments, alpha)
    exact, spread = float(maxima.mean()), float(maxima.std())
    count = max(3, math.ceil((spread / exact / precision) ** 2 / seeds))
    found = [simulated_intervals_s(environments, alpha, count, seed) for seed in range(seeds)]
    every = np.concatenate(found)
    return {
        "n": environments,
        "alpha": alpha,
        "formula_s": formula,
        "exact_s": exact,
        "simulated_s": float(every.mean()),
        "error": float(every.mean()) / formula - 1,
        "deviation": spread / math.sqrt(len(every)) / formula,
        "seeds": [float(each.mean()) / formula - 1 for each in found],
        "intervals": len(every),
    }


def intervals(seeds: int, precision: float) -> list[dict[str, Any]]:
    """A row for each number of environments and steps."""
    rows = []
    for environments, alpha in itertools.product((4, 16, 64), (4, 16, 128)):
        rows.append(interval_row(environments, alpha, seeds, precision))
        say(f"interval: {rows[-1]}")
    return rows


# --- Unbounded queue


def queue(load: float, steps: int, seeds: int) -> dict[str, Any]:
    """Updates between the end of a rollout and its training, simulated and by the formula at the realized load.

    `deviation` is the standard error of `simulated`, from the means of twenty blocks of each seed. `recursion` is the
    same figure of Lindley's recursion over the realized ends and training times: a queue that is one has the same.

    The mean of a queue converges slowly, so `controlled` is the error with the recursion as control variate: that of
    the simulation less the recursion over the same times, plus the recursion over `DRAWN` other ones. Its standard
    error is `controlled_deviation`.
    """
    found = [_queued(load, steps, seed) for seed in range(seeds)]
    lags, recursion = (np.concatenate([each[name] for each in found]) for name in ("lags", "recursion"))
    real = sum(each["busy_s"] for each in found) / sum(each["lasting_s"] for each in found)
    formula, mean = real / (1 - real), float(lags.mean())
    blocks = [float(block.mean()) for each in found for block in np.array_split(each["lags"], 20)]
    alone = [each["busy_s"] / each["lasting_s"] for each in found]
    apart = [
        float(block.mean() - ideal.mean()) / formula
        for each in found
        for block, ideal in zip(np.array_split(each["lags"], 20), np.array_split(each["recursion"], 20), strict=True)
    ]
    drawn = np.random.default_rng(0)
    long = _recursion(np.cumsum(drawn.exponential(1.0, DRAWN)), drawn.exponential(load, DRAWN)) * (1 - load) / load
    of_long = [float(block.mean()) for block in np.array_split(long, 100)]
    errors = [statistics.stdev(values) / math.sqrt(len(values)) for values in (apart, of_long)]
    of_seeds = [float(each["lags"].mean()) / (rho / (1 - rho)) - 1 for each, rho in zip(found, alone, strict=True)]
    return {
        "load": real,
        "formula": formula,
        "simulated": mean,
        "error": mean / formula - 1,
        "deviation": statistics.stdev(blocks) / math.sqrt(len(blocks)),
        "recursion": float(recursion.mean()),
        "controlled": statistics.mean(apart) + statistics.mean(of_long) - 1,
        "controlled_deviation": math.hypot(*errors),
        "seeds": of_seeds,
        "rollouts": len(lags),
    }


def _recursion(arrivals: np.ndarray, trains_s: np.ndarray) -> np.ndarray:
    """The updates between arrival and training of each rollout, in a queue with these times (Lindley)."""
    worked_s = np.cumsum(trains_s)
    ends = worked_s + np.maximum.accumulate(arrivals - (worked_s - trains_s))
    return np.arange(len(ends)) - np.searchsorted(ends, arrivals)


def _queued(load: float, steps: int, seed: int) -> dict[str, Any]:
    """The updates that each rollout of a simulation finds, those of the recursion, and the learner's busy time."""
    slots, tokens, tokens_s = 16, 512, 0.05
    one = _busy(config(slots, 1, 1, steps, seed=seed, alpha=1e4, order="ready_first"), slots)
    made_s = tokens_s * tokens / slots  # between two rollouts, in the mean
    cluster = Cluster(
        sampler=SamplerCosts(step_overhead_s=tokens_s),
        rpc_s=0.0,
        workload=Workload(answer_tokens=Law("exponential", tokens, least=1)),
        learner=LearnerCosts(step_overhead_s=load * made_s, jitter=Law("exponential", 1.0)),
    )
    rows = rows_of(one, cluster)
    ended = {row[0]: row[3] for each in rows if each.get("kind") == "members" for row in each["rows"]}
    trained = steps_of(rows)
    ends, trains_s = (np.array([row[name] for row in trained]) for name in ("t1", "train_s"))
    arrivals = np.array([ended[row["groups"][0]] for row in trained])
    lags = np.searchsorted(ends, ends - 1e-6) - np.searchsorted(ends, arrivals)
    recursion = _recursion(np.sort(arrivals), trains_s)
    skipped = max(1, steps // 20)
    return {
        "lags": lags[skipped:],
        "recursion": recursion[skipped:],
        "busy_s": float(trains_s[skipped:].sum()),
        "lasting_s": float(ends[-1] - ends[skipped - 1]),
    }


# --- Limits of the measured workloads

ALPHAS = (1.0, 2.0, 4.0)
MEAN_S, DEVIATIONS_S = 1.0, {"0": 0.0, "half": 0.5, "one": 1.0}
ENVIRONMENTS, GROUPS = 64, 8
TRAINS_S = 0.12  # close to that of the measured runs


def samples_per_s(alpha: float, deviation_s: float, seed: int, steps: int = 400) -> float:
    """The rate of a simulated run."""
    latency = Law("normal", MEAN_S, deviation_s) if deviation_s else Law(mean=MEAN_S)
    one = _busy(config(ENVIRONMENTS, GROUPS, ENVIRONMENTS // GROUPS, steps, seed=seed, alpha=alpha), ENVIRONMENTS)
    cluster = Cluster(
        sampler=SamplerCosts(step_overhead_s=INSTANT_S),
        learner=LearnerCosts(step_overhead_s=TRAINS_S),
        rpc_s=0.0,
        workload=Workload(answer_tokens=Law(mean=1), env_s=latency),
    )
    return simulate.figures(rows_of(one, cluster), one)["samples_per_s"]


def limit(alpha: float, deviation_s: float, sync_samples_per_s: float, draws: int = 100_000) -> float:
    """The smallest known upper bound of the ratio."""
    latencies = np.maximum(0.0, np.random.default_rng(0).normal(MEAN_S, deviation_s, draws))
    return min(alpha + 1.0, ENVIRONMENTS / float(latencies.mean()) / sync_samples_per_s)


def limits(rounds: int, steps: int) -> dict[str, Any]:
    """The simulated ratios and their limits, by workload and α."""
    found: dict[str, Any] = {}
    for name, deviation_s in DEVIATIONS_S.items():
        rates = {a: [samples_per_s(a, deviation_s, seed, steps) for seed in range(rounds)] for a in (0.0, *ALPHAS)}
        sync = statistics.median(rates[0.0])
        found[f"agentic_latency_{name}"] = {
            f"{alpha:g}": {
                "ratio": (of := ratio(rates[alpha], rates[0.0]))["value"],
                "low": of["low"],
                "high": of["high"],
                "runs": rounds,
                "limit": limit(alpha, deviation_s, sync),
                "samples_per_s": statistics.median(rates[alpha]),
                "sync_samples_per_s": sync,
            }
            for alpha in ALPHAS
        }
    return found


def main() -> int:
    """Compute."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--part", action="append", choices=["propositions", "intervals", "queue", "limits"])
    parser.add_argument("--workloads", type=int, default=0, help="of the propositions (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first of these workloads")
    parser.add_argument("--load", type=float, action="append", help="of the queue; repeatable (default: all three)")
    chosen, started = parser.parse_args(), time.monotonic()
    quick = chosen.quick
    parts = {
        "propositions": lambda: propositions(chosen.first, chosen.workloads or (200 if quick else 1000)),
        "intervals": lambda: intervals(1, 0.1) if quick else intervals(chosen.rounds or 3, PRECISION),
        "queue": lambda: [
            queue(load, *((2500, 1) if quick else (20_000, chosen.rounds or 3))) for load in chosen.load or LOADS
        ],
        "limits": lambda: limits(chosen.rounds or (1 if quick else 3), 40 if quick else 200),
    }
    result = {}
    for name in chosen.part or parts:
        result[name] = parts[name]()
        say(f"{name}: {result[name]}")
    finish(result | {"class": "S"}, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
