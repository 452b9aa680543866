"""All schedules on four workloads, at equal resources and with one cost model, by simulation.

    python -m benchmarks.schedules.compare [--quick] [--rounds=N] [--workload=NAME ...]
    python -m benchmarks.schedules.compare --page    # only write docs/results/schedules_compared.md from the JSON file

Four devices, of which one or two train; each schedule takes its fastest split. The costs of a device and of the model
are published constants (`DEVICE`, `MODEL`), the workloads are `WORKLOADS`. Every schedule gets the same prompts and
distributions, spreads the rollouts that its age bound allows evenly over its samplers, and trains all that it begins.
`null` is no workload of the page's question but its check: equal answers, training and transfers that take no time, and
decode steps whose time is proportional to their sequences. No schedule can be faster there.

Class S, one core. Results are written to benchmarks/schedules/compared.json, where those of other workloads stay, and
the page is made from them. The last line is one JSON object.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lib.report import ROOT, arguments, commit, finish, say
from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.sim import costs, simulate
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, RoleFailure, SamplerCosts, TransferCosts, Workload

DATA = Path(__file__).with_name("compared.json")
PAGE = ROOT / "docs" / "results" / "schedules_compared.md"
DEVICES, LEARNERS = 4, (1, 2)
GROUPS, GROUP_SIZE = 16, 8
ALPHA = 2.0


@dataclass(frozen=True)
class Device:
    """An accelerator: peak FLOP/s and bytes/s, the shares of them that are reached, and the price of an hour in $."""

    flops: float = 989.5e12
    bytes_per_s: float = 3.35e12
    flops_share: float = 0.4
    bytes_share: float = 0.7
    link_bytes_per_s: float = 5e9
    price_per_hour: float = 5.28


@dataclass(frozen=True)
class Model:
    """A model of bfloat16 parameters with grouped key-value heads."""

    parameters: float = 7.6e9
    kv_bytes_per_token: float = 57344.0  # 28 layers · 2 · 4 heads · 128 · 2 bytes


DEVICE, MODEL = Device(), Model()


@dataclass(frozen=True)
class Schedule:
    """A schedule of `jaxroll sim` with its age bound, on which devices, and the systems that have it.

    `shared`: all devices generate, then all of them train.
    """

    name: str
    systems: str
    shared: bool = False
    alpha: float = ALPHA

    @property
    def ahead(self) -> float:
        """The steps whose rollouts may run at once."""
        return {"one_step": 2.0, "bounded": self.alpha + 1, "pure": self.alpha + 1}.get(self.name, 1.0)


SCHEDULES = {
    "sync, shared devices": Schedule(
        "sync", "the usual synchronous baseline: DiRL, Shuffle-R1, RLinf with one placement for all roles", shared=True
    ),
    "sync": Schedule("sync", "Reactor's benchmarks: a barrier a round, separate devices"),
    "stream": Schedule("stream", "StreamRL (synchronous), FlexMARL, RLinf's pipelining"),
    "partial overlap": Schedule("partial_overlap", "RLBoost: as `stream`, and the learner's devices generate at first"),
    "one_step": Schedule("one_step", "Asynchronous RLHF, AsyncFlow's delayed update, StreamRL (asynchronous)"),
    "interval": Schedule("interval", "HTS-RL"),
    "bounded, α = 1": Schedule("bounded", "RollArt's default", alpha=1.0),
    "bounded": Schedule("bounded", f"ROLL Flash, AReaL-Hex (α = {ALPHA:g})"),
    "pure": Schedule("pure", f"Laminar: one version a trajectory (here with α = {ALPHA:g})"),
}
TAIL = Workload(Law(mean=256), Law("lognormal", 1000, 1500, 1, 8192), answers_alike=0.5)
WORKLOADS = {
    "long tail": TAIL,
    "balanced": replace(TAIL, answer_tokens=Law("normal", 1000, 20, 1), answers_alike=0.0),
    "agentic latency": Workload(
        Law(mean=256), Law("lognormal", 150, 75, 1, 1024), Law(mean=100), Law(mean=5), Law("normal", 10.0, 10.0)
    ),
    "spot": TAIL,
    "null": Workload(Law(mean=1), Law(mean=512)),
}
NULL, NULL_STEPS = "null", 20
DESCRIPTIONS = {
    "long tail": "one answer of log-normal length, mean 1,000 and deviation 1,500 tokens, at most 8,192",
    "balanced": "one answer of 1,000 ± 20 tokens",
    "agentic latency": "five turns of 150 tokens, after each of which the environment takes N(10 s, 10 s), cut at 0",
    "spot": "the long tail, and each device that generates is lost every 300 s in the mean, for 60 s",
    "null": "answers of 512 tokens; training, prefill and transfers take no time, and a decode step 0.1 ms a sequence",
}
LOST_EVERY_S, LOST_FOR_S, HORIZON_S = 300.0, 60.0, 20_000.0


def config(samplers: int, steps: int, seed: int, schedule: Schedule) -> Config:
    """The run, with `samplers` samplers whose slots in all are the rollouts that the schedule's age bound allows.

    With `partial_overlap` these are the slots of the samplers with devices of their own, which go on alone.
    """
    rollouts = math.ceil(schedule.ahead * GROUPS * GROUP_SIZE / samplers)
    return costs.checked(configs.parse({
        "run": {"seed": seed},
        "schedule": {"steps": steps, "groups_per_step": GROUPS, "group_size": GROUP_SIZE, "alpha": schedule.alpha,
                     "in_flight_window": "full", "group_placement": "spread", "straggler": "wait"},
        "sampler": {"count": samplers, "slots": rollouts, "decode_chunk": 8, "prefill_rows": 8,
                    "concurrent_episodes": rollouts, "prefill_buckets": (1024,)},
        "sampling": {"max_tokens": 8192}, "task": {"max_prompt_tokens": 1024, "max_episode_tokens": 16384},
        "learner": {"row_tokens": 16384, "micro_batch_rows": 1}, "store": {"retention_mb": 4096},
    }))  # fmt: skip


def cluster(workload: str, schedule: Schedule, learners: int, seed: int) -> Cluster:
    """The devices, of which `learners` train."""
    flops = DEVICE.flops * DEVICE.flops_share
    training = DEVICES if schedule.shared else learners
    samplers = _samplers(workload, schedule, learners)
    if workload == NULL:
        return Cluster(
            source=NULL,
            sampler=SamplerCosts(flops_per_token=1e-4, flops=1.0),
            workload=WORKLOADS[NULL],
            learner=LearnerCosts(price_per_hour=DEVICES * DEVICE.price_per_hour),
            rpc_s=0.0,
        )
    sends = TransferCosts(size_bytes=2 * MODEL.parameters, bytes_per_s=DEVICE.link_bytes_per_s)
    return Cluster(
        source="published constants",
        sampler=SamplerCosts(
            flops_per_token=2 * MODEL.parameters,
            flops=flops,
            weight_bytes=2 * MODEL.parameters,
            kv_bytes_per_token=MODEL.kv_bytes_per_token,
            bytes_per_s=DEVICE.bytes_per_s * DEVICE.bytes_share,
        ),
        learner=LearnerCosts(
            flops_per_token=6 * MODEL.parameters,
            flops=flops * training,
            samplers=learners if schedule.name == "partial_overlap" else 0,
            price_per_hour=DEVICES * DEVICE.price_per_hour,
        ),
        transfer=TransferCosts() if schedule.shared else sends,
        workload=WORKLOADS[workload],
        failures=_lost(samplers, seed) if workload == "spot" else (),
    )


def _samplers(workload: str, schedule: Schedule, learners: int) -> int:
    """Those with devices of their own."""
    every = schedule.shared or workload == NULL  # whose training needs no device
    return DEVICES if every else DEVICES - learners


def _lost(samplers: int, seed: int) -> tuple[RoleFailure, ...]:
    failures = []
    for index in range(samplers):
        drawn, at_s = random.Random(repr(("spot", seed, index))), 0.0
        while (at_s := at_s + LOST_FOR_S + drawn.expovariate(1 / LOST_EVERY_S)) < HORIZON_S:
            failures.append(RoleFailure(at_s, f"sampler-{index}", LOST_FOR_S))
    return tuple(failures)


def simulated(workload: str, schedule: Schedule, learners: int, steps: int, seed: int) -> simulate.Figures:
    """The figures of one simulation.

    Steps of equal rollouts end α + 1 at a time, so as many are left out at the start: those that the figures leave out,
    two of eleven to twenty, and before them the first of three.
    """
    if workload == NULL and schedule.name == "partial_overlap":
        schedule = replace(schedule, name="stream")  # all devices generate there
    made, on = (
        config(_samplers(workload, schedule, learners), steps, seed, schedule),
        cluster(workload, schedule, learners, seed),
    )
    made = replace(made, sampler=replace(made.sampler, count=made.sampler.count + on.learner.samplers))
    one, devices = simulate.scheduled_on(made, on, schedule.name)
    rows = simulate.simulated_rows(one, devices, Path(), keep=False)
    counted = [row for row in rows if row.get("kind") != "step" or row["step"] > schedule.ahead - 2]
    return simulate.figures(counted, one, devices)


CLEARLY = 0.1
KEPT = ("tokens_per_s", "step_s", "age_mean", "age_max", "cost_per_million_tokens", "learner_busy", "sampler_busy")


def compared(workload: str, name: str, steps: int, rounds: int) -> dict[str, Any]:
    """The medians over the rounds with the fastest split, and the range of the rates.

    A split that is `CLEARLY` slower than another with the first seed gets no other seeds.
    """
    schedule = SCHEDULES[name]
    splits = (0,) if schedule.shared or workload == NULL else LEARNERS
    runs = {split: [simulated(workload, schedule, split, steps, 0)] for split in splits}
    most = max(first["tokens_per_s"] for (first,) in runs.values())
    runs = {split: made for split, made in runs.items() if made[0]["tokens_per_s"] > (1 - CLEARLY) * most}
    for split, made in runs.items():
        made += [simulated(workload, schedule, split, steps, seed) for seed in range(1, rounds)]
    rate = {split: statistics.median(run["tokens_per_s"] for run in made) for split, made in runs.items()}
    best = max(rate, key=lambda split: rate[split])
    rates = [run["tokens_per_s"] for run in runs[best]]
    return {key: statistics.median(run[key] for run in runs[best]) for key in KEPT} | {
        "learners": best,
        "low": min(rates),
        "high": max(rates),
        "rounds": rounds,
    }


# --- Page

BASELINE = "sync, shared devices"
_HEAD = """# Which schedule for which workload?

The fastest schedule of each workload at equal devices, with its gain over synchronous training on shared devices and
the mean age of its tokens in steps. All have the same devices, so the fastest one is the cheapest.

| workload | fastest | age at most 1 | no staleness |
|---|---|---|---|
{answer}
{advice}
A schedule with a greater age bound gains from three sources: generation and training overlap; more rollouts are
decoded at once, which costs little while reading the weights bounds the time of a decode step; no step waits for its
longest rollout. The balanced workload has only the first two. Where none of them applies (the null workload below), all
schedules are equally fast.

Class S: the store and the role loops of JaxRoll in simulated time, with published constants as costs. Nothing on this
page was measured on an accelerator, and no cost is fitted to a result. How well simulations predict real runs:
[simulation](../simulation.md).

"""
_ADVICE = """
**Which to use.** `bounded` with α = 2, where tokens of two steps before are acceptable: it is the fastest on all four
workloads. With α = 1 it keeps about half of that gain at half the age. `one_step` equals it where answers are of equal
length, and gains less with a long tail, because a batch waits for its longest answer. Without staleness, synchronous
training on shared devices is best or within 2 % of the best where devices stay: separate ones are idle in turn, and a
switch of roles costs nothing here. Where devices are lost, `partial overlap` is best without staleness: it alone has
flushes here, so that rollouts of a lost device go on elsewhere ([migration](fleet.md)). `pure` and `interval` are for
users who need their rules: all tokens of a sequence at one version, or an age of exactly one.
"""
_TABLE = """## {title}

{description}.

| schedule | learners | tokens/s | over {baseline} | step, s | learner, samplers busy | \
age, mean / largest | $/10⁶ tokens |
|---|---|---|---|---|---|---|---|
"""
_BESIDE = """## Compared with ROLL Flash

| over synchronous training, equal devices | ROLL Flash, published | here (S) |
|---|---|---|
| one answer with a long tail | up to 2.24 | {tail:.2f} |
| agents with slow environments | up to 2.72, 1.20 of it by redundant environments | {agentic:.2f} |

Theirs are measured, with other models, lengths and clusters: the columns need not agree.

## Schedules

| schedule | systems that have it |
|---|---|
"""
_CONDITIONS = """
## Conditions

`{command}`, commit {commit}, AMD EPYC, Python 3.11.7, {steps} steps ({null_steps} of the null workload) of {groups}
groups of {size}, of which the first two or α + 1 are left out; number of seeds: {rounds}. {devices} devices of
{flops:,.1f} TFLOP/s and {bytes:.2f} TB/s (H800 in RollArt's table), of which {flops_share:.0%} and {bytes_share:.0%}
are reached (assumed); {link:g} GB/s between machines and ${price} an hour (AReaL-Hex). {parameters:g}·10⁹ bfloat16
parameters and {kv:,.0f} bytes of KV cache a token (Qwen2.5-7B). Training takes 6 FLOP a parameter and token; a decode
step is bound by the bytes of weights and KV cache, or by 2 FLOP a parameter and token. Of one or two devices
that train each schedule takes the fastest. Samplers have slots for the rollouts that the age bound allows, and no
more (with `partial overlap` those with devices of their own). A shared device changes its role and gets the new weights
at no cost, which favors the baseline.

Workloads were computed in calls of their own. Rates are medians over seeds, with their range; a split of the devices
that is more than {clearly:.0%} slower with the first seed got no other seeds. The null workload has no random numbers
and one seed. `stream` has a learner that [streams](../scheduling.md#streaming) micro-batches of 16,384 tokens. With
[`partial overlap`](../scheduling.md#partial-overlap) its devices also generate for T seconds of each step, by RLBoost's
rule.
"""


def page(found: Mapping[str, Any]) -> str:
    """The page of the results."""
    table = found["workloads"]
    asked = {name: rows for name, rows in table.items() if name != NULL}
    parts = [_HEAD.format(answer="\n".join(_best(name, rows) for name, rows in asked.items()), advice=_ADVICE)]
    for workload, rows in table.items():
        title, text = workload.capitalize(), DESCRIPTIONS[workload]
        parts += [
            _TABLE.format(title=title, description=text[0].upper() + text[1:], baseline=BASELINE),
            *_rows(rows),
            "\n",
        ]
    gains = [max(_over(rows, name) for name in rows) for rows in (table["long tail"], table["agentic latency"])]
    parts.append(_BESIDE.format(tail=gains[0], agentic=gains[1]))
    parts += [f"| {name} | {one.systems} |\n" for name, one in SCHEDULES.items()]
    device, model = found["device"], found["model"]
    parts.append(
        _CONDITIONS.format(
            command=found["command"],
            commit=found["commit"],
            steps=found["steps"],
            null_steps=NULL_STEPS,
            rounds=found["rounds"],
            clearly=CLEARLY,
            groups=GROUPS,
            size=GROUP_SIZE,
            devices=DEVICES,
            flops=device["flops"] / 1e12,
            bytes=device["bytes_per_s"] / 1e12,
            flops_share=device["flops_share"],
            bytes_share=device["bytes_share"],
            link=device["link_bytes_per_s"] / 1e9,
            price=device["price_per_hour"],
            parameters=model["parameters"] / 1e9,
            kv=model["kv_bytes_per_token"],
        )
    )
    return "".join(parts)


def _over(rows: Mapping[str, Any], name: str) -> float:
    return rows[name]["tokens_per_s"] / rows[BASELINE]["tokens_per_s"]


def _best(workload: str, rows: Mapping[str, Any]) -> str:
    """The fastest schedule, also of those with an age of at most 1 and 0."""

    def fastest(age: float) -> str:
        name = max((name for name in rows if rows[name]["age_max"] <= age), key=lambda name: _over(rows, name))
        return f"`{name}`: {_over(rows, name):.2f}, {rows[name]['age_mean']:.1f}"

    return f"| {workload} | {fastest(math.inf)} | {fastest(1)} | {fastest(0)} |"


def _rows(rows: Mapping[str, Any]) -> list[str]:
    return [
        f"| {name} | {_learners(name, row)} | {_range(row)} | {_over(rows, name):.2f} | {row['step_s']:.1f} | "
        f"{row['learner_busy']:.0%}, {row['sampler_busy']:.0%} | {row['age_mean']:.2f} / {row['age_max']:.0f} | "
        f"{row['cost_per_million_tokens']:.2f} |\n"
        for name, row in rows.items()
    ]


def _learners(name: str, row: Mapping[str, Any]) -> str:
    return str(row["learners"] or ("all, in turn" if SCHEDULES[name].shared else "none"))


def _range(row: Mapping[str, Any]) -> str:
    spread = f" ({row['low']:,.0f} to {row['high']:,.0f})" if row["rounds"] > 1 else ""
    return f"{row['tokens_per_s']:,.0f}{spread}"


def main() -> int:
    """Simulate, and write the page."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="one; repeatable (default: all)")
    parser.add_argument("--page", action="store_true", help="write the page from the JSON file, without simulations")
    chosen, started = parser.parse_args(), time.monotonic()
    if chosen.page:
        PAGE.write_text(page(json.loads(DATA.read_text())))
        return 0
    steps, rounds = (8, 1) if chosen.quick else (12, chosen.rounds or 3)
    found = {
        "device": asdict(DEVICE),
        "model": asdict(MODEL),
        "steps": steps,
        "rounds": rounds,
        "class": "S",
        "commit": commit(),
        "command": "python -m benchmarks.schedules.compare",
    }
    table: dict[str, dict[str, Any]] = {}
    for workload in chosen.workload or WORKLOADS:
        table[workload] = {}
        for name in SCHEDULES:
            size = (NULL_STEPS, 1) if workload == NULL else (steps, rounds)  # nothing is random there
            table[workload][name] = compared(workload, name, *size)
            say(f"{workload}, {name}: {json.dumps(table[workload][name])}")
        if not chosen.quick:
            known = json.loads(DATA.read_text())["workloads"] if DATA.exists() else {}
            kept = {name: (known | table)[name] for name in WORKLOADS if name in known | table}
            DATA.write_text(json.dumps(found | {"workloads": kept}, indent=1) + "\n")
    found["workloads"] = table
    finish(found, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
