"""The effect of each scheduling mechanism: the same work with and without it, and a case where it cannot help.

Part of benchmarks/schedules. Each row and seed has two alternating runs, and two more on a workload on which the
mechanism has no effect, whose ratio should be 1. If the config cannot switch a mechanism off, the environments do: they
wait for each other (envs.py). Most rows are synchronous and bound by latency, so that a step shows the effect of the
schedule and not of the processors; replication is bound by the sampler, and window by the learner.

    queue         the next question is sent as soon as a slot is free; without: in waves, each as long as its longest
    env_async     an environment continues when it can; without: at every turn all wait for the slowest
    redundancy    with a filter that rejects four groups in ten: twice the groups in progress; without: replacements
    redundant_envs  one step in ten takes ten times as long: four redundant members per group; without: none
    replication   a group's members spread over two samplers; without: together on one
    replication_slots  the same with slots for two of three groups, and slept time
    replication_auto   the same by load (auto) instead of spread
    failing       one step in ten slow and one in ten never answered, with redundancy; over the run without failures
    straggler     one answer in ten (long ones more often) takes ten times as long: its group is closed without it
                  (shrink); without: waits for it
    rolling       at α = 2, one of two samplers at a time drains and swaps its weights; without: both at once
    streaming     gradients of groups that are finished before the others of their batch; without: the whole batch at
                  once. It cannot help where no reward is paid
    partial_overlap  with `streaming`, a sampler on the learner's devices for the first seconds of each step; without:
                  only the one with devices of its own. It cannot help where environments take all the time and one
                  sampler has room for all
    colocated     all roles take turns in one process; without: processes that share the cores. It is for devices that
                  only one process can use: here it shows the cost
    interval      HTS-RL: with schedule.mode=interval generation and training overlap, and every token is one version
                  old; without: they alternate (α = 0), four turns of random latency. It cannot help where no reward is
                  paid, so that no gradient is computed
    interval_barrier  the same over a run that alternates and whose environments wait for the slowest at every turn;
                  it cannot help where in addition all turns take the same time
    interval_learning  interval over α = 0 with something to learn, for the held-out accuracy
    window        at α = 4 the smallest window that keeps the learner busy; without: the full window (where it
                  cannot help, the samplers are slower, so that the learner always waits)
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lib.report import Runs, ratio
from benchmarks.schedules.envs import Race
from benchmarks.schedules.runs import ENVIRONMENTS, GROUP_SIZE, GROUPS, Workload, learned, trained

_STEPS, _LONGER = 10, 24
_ADAPTING = 80  # 51 claims without a wait bring a window of ten groups down to two
_WAVE = 16
_LATE_S = 1.2  # longer than a whole synchronous step without slow ones
_LONGEST, _MEAN_LENGTH = 32, 11.6  # lengths of strings with a median of 8 and σ = 1


@dataclass(frozen=True)
class Mechanism:
    """The workload with and without the mechanism; `null` are the same two where it cannot matter."""

    on: Workload
    off: Workload
    null: tuple[Workload, Workload] | None
    alpha: float = 0.0

    def settings(self) -> dict[str, Any]:
        """The settings that identify a run."""
        return asdict(self)


def _workload(name: str, race: Race, env: str = "lottery", median: int = 8, **more: Any) -> Workload:
    quick = {"sft.steps": 40, "sampler.concurrent_episodes": 2 * ENVIRONMENTS, "learner.learning_rate": 1e-6}
    return Workload(
        name,
        _STEPS,
        median,
        env=f"benchmarks.schedules.envs:{env}",
        race=race,
        settings=quick | more.pop("settings", {}),
        **more,
    )


def _pair(name: str, on: Race, off: Race, **more: Any) -> tuple[Workload, Workload]:
    return _workload(f"{name}_on", on, **more), _workload(f"{name}_off", off, **more)


def _queue() -> Mechanism:
    # One turn of a log-normal number of answers would be CPU-bound: here each environment's length is a sleep.
    def both(name: str, latency_s: tuple[float, float]) -> tuple[Workload, Workload]:
        slots, all_of_them = ({"sampler.concurrent_episodes": count} for count in (_WAVE, ENVIRONMENTS))
        return (
            _workload(f"{name}_on", Race(latency_s), settings=slots),
            _workload(f"{name}_off", Race(latency_s, wave=_WAVE), settings=all_of_them),
        )

    return Mechanism(*both("queue", (0.3, 0.6)), both("queue_null", (0.4, 0.0)))


def _env_async() -> Mechanism:
    more = {
        "settings": {
            "task.max_episode_tokens": 96,
            "sampler.concurrent_episodes": ENVIRONMENTS,
            "learner.row_tokens": 96,
        }
    }
    on, same = Race((0.4, 0.4), turns=4), Race((0.4, 0.0), turns=4)
    return Mechanism(
        *_pair("env_async", on, replace(on, barrier=ENVIRONMENTS), **more),
        _pair("env_async_null", same, replace(same, barrier=ENVIRONMENTS), **more),
    )


def _redundancy() -> Mechanism:
    def both(name: str, dull: float) -> tuple[Workload, Workload]:
        # A band that only groups without a reward miss: a lottery pays all or none of eight once in 128.
        rule = {"schedule.filter": "mean_band", "schedule.filter_low": 0.0, "schedule.filter_high": 1.01}
        race = Race((1.0, 0.0), dull=dull)
        more = rule | {"schedule.redundant_groups": GROUPS}
        return _workload(f"{name}_on", race, settings=more), _workload(f"{name}_off", race, settings=rule)

    return Mechanism(*both("redundancy", 0.4), both("redundancy_null", 0.0))


def _redundant_envs() -> Mechanism:
    def both(name: str, slow: float) -> tuple[Workload, Workload]:
        race = Race((0.5, 0.0), slow=slow)
        more = {"schedule.redundant_members": 4}
        return _workload(f"{name}_on", race, settings=more), _workload(f"{name}_off", race)

    return Mechanism(*both("redundant_envs", 0.1), both("redundant_envs_null", 0.0))


def _replication() -> Mechanism:
    def both(name: str, sigma: float) -> tuple[Workload, Workload]:
        two = {"sampler.count": 2, "sampler.slots": ENVIRONMENTS // 2, "sampler.concurrent_episodes": ENVIRONMENTS // 2}
        tail = {"median": 8, "sigma": sigma, "most": 64 if sigma else 0}
        made = [
            _workload(f"{name}_{how}", Race(), settings=two | {"schedule.group_placement": how}, **tail)
            for how in ("spread", "together")
        ]
        return made[0], made[1]

    return Mechanism(*both("replication", 1.0), both("replication_null", 0.0))


def _replication_slots(how: str) -> Mechanism:
    # Three groups for two samplers with slots for one each: a third whole group waits until another has ended.
    def both(name: str, latency_s: tuple[float, float]) -> tuple[Workload, Workload]:
        slots = {"sampler.count": 2, "sampler.slots": GROUP_SIZE, "sampler.concurrent_episodes": GROUP_SIZE}
        shape = slots | {"schedule.groups_per_step": 3}
        made = [
            _workload(f"{name}_{kind}", Race(latency_s), settings=shape | {"schedule.group_placement": kind})
            for kind in (how, "together")
        ]
        return made[0], made[1]

    name = f"replication_seats_{how}"
    return Mechanism(*both(name, (0.4, 0.8)), both(f"{name}_null", (0.6, 0.0)))


def _straggler() -> Mechanism:
    def both(name: str, slow: float) -> tuple[Workload, Workload]:
        def arm(kind: str, policy: str) -> Workload:
            rule = {"schedule.straggler": policy, "schedule.straggler_deadline_s": _LATE_S}
            race = Race((0.3, 0.0), slow=slow, length=_MEAN_LENGTH)
            return _workload(f"{name}_{kind}", race, settings=rule, sigma=1.0, most=_LONGEST)

        return arm("on", "shrink"), arm("off", "wait")

    on, off = (replace(one, steps=_LONGER) for one in both("straggler_null", 0.0))  # its steps are short
    return Mechanism(*both("straggler", 0.1), (on, off))


def _window() -> Mechanism:
    # Partly empty rows make the learner the slower side; few large groups let the window adapt quickly.
    shape = {
        "schedule.groups_per_step": 2,
        "schedule.group_size": 32,
        "learner.shared_prompt_tokens": 0,
        "learner.shared_prompt_rows": 1,
        "learner.micro_batch_rows": 64,
        "learner.row_tokens": 384,
    }
    on, off = (
        _workload(f"window_{kind}", Race(), settings=shape | {"schedule.in_flight_window": window})
        for kind, window in (("on", "adaptive"), ("off", "full"))
    )
    slow_on, slow_off = (
        _workload(f"window_null_{kind}", Race((0.5, 0.5)), settings={"schedule.in_flight_window": window})
        for kind, window in (("on", "adaptive"), ("off", "full"))
    )
    null = replace(slow_on, steps=_LONGER), replace(slow_off, steps=_LONGER)
    return Mechanism(replace(on, steps=_ADAPTING), replace(off, steps=_ADAPTING), null, alpha=4.0)


def _rolling() -> Mechanism:
    def both(name: str, swap: str) -> tuple[Workload, Workload]:
        two = {"sampler.count": 2, "sampler.slots": ENVIRONMENTS // 2, "sampler.concurrent_episodes": ENVIRONMENTS // 2}
        made = [
            _workload(
                f"{name}_{kind}",
                Race(),
                sigma=1.0,
                most=64,
                settings=two | {"schedule.weight_swap": swap, "schedule.rolling_updates": count},
            )
            for kind, count in (("on", 1), ("off", 0))
        ]
        return replace(made[0], steps=_ADAPTING), replace(made[1], steps=_ADAPTING)

    return Mechanism(*both("rolling", "drain"), both("rolling_null", "keep_kv"), alpha=2.0)


def _interval(barrier: int) -> Mechanism:
    ahead, alternating = {"schedule.mode": "interval"}, {"schedule.alpha": 0.0}

    def both(name: str, latency_s: tuple[float, float], env: str) -> tuple[Workload, Workload]:
        # Each answer has a row of its own, so that training takes long enough to be worth hiding.
        shape = {
            "task.max_episode_tokens": 96,
            "sampler.concurrent_episodes": ENVIRONMENTS,
            "learner.row_tokens": 96,
            "learner.micro_batch_rows": 8,
        }
        race = Race(latency_s, turns=4)
        on = _workload(f"{name}_on", race, env, settings=shape | ahead)
        return on, _workload(f"{name}_off", replace(race, barrier=barrier), env, settings=shape | alternating)

    name = "interval_barrier" if barrier else "interval"
    null_s = (0.4, 0.0) if barrier else (0.4, 0.4)
    return Mechanism(*both(name, (0.4, 0.4), "lottery"), both(f"{name}_null", null_s, "pays_nothing"), alpha=1.0)


def _interval_learning() -> Mechanism:
    learn = {"learner.learning_rate": 2e-5, "task.heldout_items": 64, "sampler.slots": ENVIRONMENTS // 2}
    on, off = (
        Workload(
            f"interval_learning_{kind}", 60, 48, evaluations=1, target=0.9, capitals=0.75, settings=learn | schedule
        )
        for kind, schedule in (("on", {"schedule.mode": "interval"}), ("off", {"schedule.alpha": 0.0}))
    )
    return Mechanism(on, off, None, alpha=1.0)


def _streaming() -> Mechanism:
    def both(name: str, env: str) -> tuple[Workload, Workload]:
        # Long rows, so that training takes long enough to be worth hiding; two groups fill a micro-batch.
        shape = {"learner.row_tokens": 128, "learner.micro_batch_rows": 8, "sampler.concurrent_episodes": ENVIRONMENTS}
        on, off = (
            _workload(f"{name}_{kind}", Race((0.4, 0.4)), env, settings=shape | changed)
            for kind, changed in (("on", {"learner.streaming": True}), ("off", {}))
        )
        return replace(on, steps=_LONGER), replace(off, steps=_LONGER)

    return Mechanism(*both("streaming", "lottery"), both("streaming_null", "pays_nothing"))


def _partial_overlap() -> Mechanism:
    def both(name: str, race: Race, median: int, slots: int) -> tuple[Workload, Workload]:
        # With few slots an answer waits for those before it, and a second engine has as many again.
        shape = {"learner.streaming": True, "sampler.flush_tokens": median // 2, "sampler.slots": slots,
                 "sampler.concurrent_episodes": slots}  # fmt: skip
        helped = {"placement.learner_samplers": 1, "sampler.count": 2}
        on, off = (
            _workload(f"{name}_{kind}", race, median=median, settings=shape | changed)
            for kind, changed in (("on", helped), ("off", {}))
        )
        return replace(on, steps=2 * _LONGER), replace(off, steps=2 * _LONGER)

    computing = both("partial_overlap", Race(), 48, ENVIRONMENTS // 8)
    return Mechanism(*computing, both("partial_overlap_null", Race((0.6, 0.0)), 8, ENVIRONMENTS))


def _colocated() -> Mechanism:
    def both(name: str, race: Race, steps: int, **more: Any) -> tuple[Workload, Workload]:
        made = [
            _workload(f"{name}_{kind}", race, median=48, settings=more | {"placement.colocated": kind == "on"})
            for kind in ("on", "off")
        ]
        return replace(made[0], steps=steps), replace(made[1], steps=steps)

    threads = {"placement.cpu_threads": 2}  # the active role has the whole machine
    computing = both("colocated", Race(), _ADAPTING, **threads)
    return Mechanism(*computing, both("colocated_null", Race((1.0, 0.0)), _STEPS, **threads))


def _failing() -> Mechanism:
    more = {"schedule.redundant_members": 4, "schedule.redundant_groups": 2}
    well, ill = Race((1.0, 0.0), limit_s=8.0), Race((1.0, 0.0), slow=0.1, stopped=0.1, limit_s=8.0)
    on, off = _workload("failing_on", ill, settings=more), _workload("failing_off", well, settings=more)
    return Mechanism(replace(on, steps=_LONGER), replace(off, steps=_LONGER), None)


MECHANISMS = {
    "queue": _queue(), "env_async": _env_async(), "redundancy": _redundancy(),
    "redundant_envs": _redundant_envs(), "replication": _replication(), "failing": _failing(),
    "replication_slots": _replication_slots("spread"), "replication_auto": _replication_slots("auto"),
    "straggler": _straggler(), "window": _window(), "rolling": _rolling(),
    "colocated": _colocated(), "interval": _interval(0), "interval_barrier": _interval(ENVIRONMENTS),
    "interval_learning": _interval_learning(), "streaming": _streaming(),
    "partial_overlap": _partial_overlap(),
}  # fmt: skip


def switched(mechanism: Mechanism, folder: Path, runs: Runs, seeds: int) -> dict[str, Any]:
    """The row: ratio of rates with and without, paired by seed; medians of steps; lost members with the mechanism.

    For both arms also the possible costs of the mechanism as means over the runs: `length_bias`; waste in
    shares of all sampled tokens and members; mean age of trained tokens, last window, the learner's wait a step.
    """
    rows = [_raced(mechanism.on, mechanism.off, mechanism.alpha, folder, runs, seeds)]
    rows += [_raced(*mechanism.null, mechanism.alpha, folder, runs, seeds)] if mechanism.null else []
    return rows[0] | ({"null": rows[1]} if mechanism.null else {})


def _raced(on: Workload, off: Workload, alpha: float, folder: Path, runs: Runs, seeds: int) -> dict[str, Any]:
    made: dict[str, list[dict[str, Any]]] = {on.name: [], off.name: []}
    for workload in (on, off):
        workload.questions(folder / f"{workload.name}.jsonl")
    for seed in range(seeds):
        for workload in (on, off)[:: 1 if seed % 2 == 0 else -1]:
            run = lambda w=workload, s=seed: trained(w, folder, alpha, s, 1)  # noqa: E731
            made[workload.name].append(runs.run(workload.name, seed, run))
    rates = [[one["samples_per_s"] for one in made[workload.name]] for workload in (on, off)]
    steps = [[s for one in made[workload.name] for s in one["step_s"]] for workload in (on, off)]
    found = ratio(rates[0], rates[1])
    lost = {key: sum(one["lost"].get(key, 0) for one in made[on.name]) for key in made[on.name][0]["lost"]}
    return {
        "ratio": found["value"],
        "low": found["low"],
        "high": found["high"],
        "runs": seeds,
        "ours": statistics.median(rates[0]),
        "without": statistics.median(rates[1]),
        "step_s": [statistics.median(each) for each in steps],
        "steps": len(steps[0]),
        "lost": lost,
        **{key: [_mean(made[workload.name], key) for workload in (on, off)] for key in _COSTS},
        **(learned(made[off.name], made[on.name], on.target) if made[on.name][0].get("accuracy") else {}),
    }


_COSTS = ("settling_s", "length_bias", "waste_tokens", "waste_members", "age_mean", "window", "wait_s")


def _mean(runs: list[dict[str, Any]], key: str) -> float | None:
    """The mean over the runs that have a value."""
    known = [run[key] for run in runs if run[key] is not None]
    return statistics.mean(known) if known else None
