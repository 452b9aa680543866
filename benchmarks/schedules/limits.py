"""The largest speed-up over the synchronous schedule under an age bound, computed and simulated.

    python -m benchmarks.schedules.limits [--quick] [--rounds=N]

The workloads are those of benchmarks/schedules whose environments sleep: 64 environments, 8 groups of 8 per step, an
answer judged after N(μ, σ) seconds cut at 0. A token sampled at version u is trained in step u + α at the latest.
Between the publication of u and that claim are α + 1 steps minus one training, and the longest rollout that began at u
must end in this time. If as many rollouts begin at each version as a step trains, the longest takes as long as a
synchronous step without its training. So the ratio is at most α + 1 for every schedule that trains all rollouts that it
begins (one that drops stragglers does other work). The rate is also at most that of the environments, one answer per
environment in the mean time. `limit` is the smaller of the two; `simulated` are steps of `lease_order` under the
store's admission rule (`AgeLimiter`), in which only environments and training take time.

Class S, a few seconds on one core. The last line is one JSON object: {WORKLOAD: {α: {"ratio", "low", "high", "limit",
"samples_per_s", "sync_samples_per_s"}}}.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.lib.report import arguments, finish, ratio, say
from jaxroll.policy.limiter import AgeLimiter

ALPHAS = (1.0, 2.0, 4.0)
MEAN_S, DEVIATIONS_S = 1.0, {"0": 0.0, "half": 0.5, "one": 1.0}
ENVIRONMENTS, GROUPS, GROUP_SIZE = 64, 8, 8
TRAINS_S = 0.12  # training time per step, close to that of the measured runs
STEPS, SETTLING, ROUNDS = 400, 100, 5


@dataclass
class _Group:
    """A group in progress: its unfinished members, and the version at which it began."""

    missing: int
    version: int


def samples_per_s(alpha: float, deviation_s: float, seed: int, steps: int = STEPS, settling: int = SETTLING) -> float:
    """The rate of a simulated run after its first `settling` steps. AssertionError if a token is too old."""
    chance, limiter = np.random.default_rng(seed), AgeLimiter(alpha, GROUPS)
    groups: dict[int, _Group] = {}  # in the order of issue, until they are claimed
    numbers, to_begin = itertools.count(), []  # groups of which members wait for an environment
    playing: list[tuple[float, int]] = []  # (end, group)
    now_s, free, training_ends_s, ended_s = 0.0, ENVIRONMENTS, None, []
    while len(ended_s) < steps:
        version = len(ended_s)
        in_training = GROUPS if training_ends_s is not None else 0
        while free and (to_begin or len(groups) + in_training < limiter.window(0)):
            if not to_begin:
                number = next(numbers)
                groups[number] = _Group(GROUP_SIZE, version)
                to_begin += [number] * GROUP_SIZE
            free -= 1
            heapq.heappush(playing, (now_s + max(0.0, chance.normal(MEAN_S, deviation_s)), to_begin.pop()))
        batch = list(itertools.islice(groups, GROUPS))
        if not in_training and len(batch) == GROUPS and not any(groups[number].missing for number in batch):
            assert version - min(groups.pop(number).version for number in batch) <= limiter.max_age, "too old"
            training_ends_s = now_s + TRAINS_S
            continue
        now_s = min(times for times in (training_ends_s, playing[0][0] if playing else None) if times is not None)
        if training_ends_s is not None and training_ends_s <= now_s:
            ended_s.append(now_s)
            training_ends_s = None
        while playing and playing[0][0] <= now_s:
            groups[heapq.heappop(playing)[1]].missing -= 1
            free += 1
    return GROUPS * GROUP_SIZE * (steps - settling) / (ended_s[-1] - ended_s[settling - 1])


def limit(alpha: float, deviation_s: float, sync_samples_per_s: float, draws: int = 100_000) -> float:
    """The smallest known upper bound of the ratio; see above."""
    latencies = np.maximum(0.0, np.random.default_rng(0).normal(MEAN_S, deviation_s, draws))
    return min(alpha + 1.0, ENVIRONMENTS / float(latencies.mean()) / sync_samples_per_s)


def main() -> int:
    """Compute."""
    chosen, started = arguments(str(__doc__).splitlines()[0]).parse_args(), time.monotonic()
    rounds = chosen.rounds or (2 if chosen.quick else ROUNDS)
    result: dict[str, dict] = {}
    for name, deviation_s in DEVIATIONS_S.items():
        rates = {a: [samples_per_s(a, deviation_s, seed) for seed in range(rounds)] for a in (0.0, *ALPHAS)}
        sync = statistics.median(rates[0.0])
        row = result[f"agentic_latency_{name}"] = {}
        for alpha in ALPHAS:
            found = ratio(rates[alpha], rates[0.0])
            row[f"{alpha:g}"] = {
                "ratio": found["value"], "low": found["low"], "high": found["high"], "runs": rounds,
                "limit": limit(alpha, deviation_s, sync), "samples_per_s": statistics.median(rates[alpha]),
                "sync_samples_per_s": sync,
            }  # fmt: skip
            at_most = row[f"{alpha:g}"]["limit"]
            say(f"agentic_latency_{name} α={alpha:g}: {found['value']:.2f} simulated, at most {at_most:.2f}")
    finish(result | {"class": "S"}, command="python -m benchmarks.schedules.limits", started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
