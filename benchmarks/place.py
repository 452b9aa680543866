"""The planner's pick, judged by the simulator: four workloads, AReaL-Hex's clusters, 1,024 devices.

    python -m benchmarks.place [--quick] [--rounds=SEEDS] [--only=PART ...] [--workload=NAME ...] [--most=N]

- `workloads`: on four devices every candidate is simulated on the workloads of benchmarks/schedules/compare.py. `gap`:
  how much longer a step of the pick takes than one of the candidate that is fastest in the simulation. A candidate that
  is more than `CLEARLY` slower than the fastest with the first seed gets no other seeds. `rows` has all candidates.
- `hetero`: three clusters of equal price with the constants that AReaL-Hex publishes (arXiv 2511.00796): 24 H800 and 24
  H20, 32 H800, 88 H20. The planner picks for each among its best predictions (`--compared`) by short simulations, and
  longer ones give the ratios, for α = 2 and for α = 4; with `--cluster` the rates of some clusters, without ratios.
  The batch is that of AReaL's own example (examples/math/boba_grpo.yaml at bc9f009): 32 groups of 16, at most 8,192
  tokens, α = 4. `null` gives both types the same rates and price, and answers of equal length.
- `bound`: the same clusters without a simulation: the most tokens per second that their rates allow, if devices are
  divided at will between one learner's type and samplers, nothing waits and weights are read for free. By the tokens of
  context per decoded token, which decide whether decoding is bound by compute or by memory.
- `large`: seconds of a search on 1,024 devices of two types.
- `dispatch`: seconds of generation with the longest answers on instances of their own, over a random assignment, by the
  formula of the engine; the lengths are ranked by a model that was fitted to other prompts.

Class S, one core. The last line is one JSON object. The rows of workloads are kept in benchmarks/placed.json, where
those of other workloads stay.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.report import arguments, commit, finish, say, spread
from benchmarks.schedules import compare
from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.policy import selection
from jaxroll.sim import place
from jaxroll.sim.costs import DeviceType, Hardware, Law, ModelCosts, SamplerCosts, Space, Workload

DATA = Path(__file__).with_name("placed.json")
CLEARLY = 0.15
WORKLOADS = ("long tail", "balanced", "agentic latency", "spot")
MODEL = ModelCosts(7.6e9, 57344.0)
# AReaL-Hex: TFLOP/s, TB/s and $ per hour; 5 GB/s between machines of a type, 1.5 GB/s between types.
H800 = DeviceType("H800", 32, 8, 756e12, 2e12, 80e9, 5e9, price_per_hour=5.28)
H20 = DeviceType("H20", 88, 8, 148e12, 4e12, 96e9, 5e9, price_per_hour=1.85)
LONG = Workload(Law(mean=256), Law("lognormal", 4000, 4000, 1, 16384), answers_alike=0.5)
EVEN = Workload(Law(mean=256), Law("normal", 1000, 20, 1))
CONTEXTS = (2000, 2801, 4000, 8000, 12000, 16000)  # 2,801: that of `hetero`, whose answers end at 8,192 tokens
HETERO_STEPS, CLUSTERS = 16, ("both", "H800", "H20")
PUBLISHED = {"over H800": (1.31, 1.50), "over H20": (2.29, 2.80)}


def config(steps: int, groups: int = compare.GROUPS, size: int = compare.GROUP_SIZE) -> Config:
    """The run of benchmarks/schedules/compare.py, whose samplers and schedule the planner chooses."""
    base = configs.to_dict(compare.config(1, steps, 0, compare.SCHEDULES["bounded"]))
    return configs.parse(configs.override(base, [f"schedule.groups_per_step={groups}", f"schedule.group_size={size}"]))


def four(workload: str) -> Hardware:
    """Four devices of benchmarks/schedules/compare.py and a workload of that page."""
    device = compare.DEVICE
    every_s, down_s = (compare.LOST_EVERY_S, compare.LOST_FOR_S) if workload == "spot" else (math.inf, 0.0)
    one = DeviceType(
        "H800",
        compare.DEVICES,
        8,
        device.flops,
        device.bytes_per_s,
        link_bytes_per_s=device.link_bytes_per_s,
        flops_share=device.flops_share,
        bytes_share=device.bytes_share,
        price_per_hour=device.price_per_hour,
        lost_every_s=every_s,
        down_s=down_s,
    )
    schedules = ("shared", "sync", "one_step", "interval", "bounded", "pure")
    space = Space(schedules, (1.0, 2.0), (1, 2), (1, 2, compare.DEVICES), 1.0)
    return Hardware(
        "published constants", workload=compare.WORKLOADS[workload], devices=(one,), model=MODEL, search=space
    )


def judged(workload: str, steps: int, rounds: int, most: int) -> dict[str, Any]:
    """The pick, the simulated best, and the errors of all predictions."""
    planner = place.Planner(config(steps), four(workload))
    found = [(one, predicted) for one, predicted in place.ranked(planner, "throughput") if _complete(planner, one)][
        :most
    ]
    runs = [[_step_s(planner, one, 0, workload)] for one, _ in found]
    least = min(first for (first,) in runs)
    for (one, _), made in zip(found, runs, strict=True):
        if made[0] <= (1 + CLEARLY) * least or one == found[0][0]:
            made += [_step_s(planner, one, seed, workload) for seed in range(1, rounds)]
    rows = [
        {
            "candidate": _named(one),
            "predicted_s": predicted.step_s,
            "low_s": predicted.low_s,
            "high_s": predicted.high_s,
            "simulated_s": statistics.median(made),
            "simulated": spread(made),
            "error": predicted.step_s / statistics.median(made) - 1,
        }
        for (one, predicted), made in zip(found, runs, strict=True)
    ]
    pick, best = rows[0], min(rows, key=lambda row: row["simulated_s"])
    errors = [abs(row["error"]) for row in rows]
    inside = [row["low_s"] <= row["simulated_s"] <= row["high_s"] for row in rows]
    return {
        "candidates": len(rows),
        "pick": pick["candidate"],
        "best": best["candidate"],
        "gap": pick["simulated_s"] / best["simulated_s"] - 1,
        "error_median": statistics.median(errors),
        "error_max": max(errors),
        "inside_share": statistics.mean(inside),
        "rows": rows,
    }


def _step_s(planner: place.Planner, one: place.PlacementPlan, seed: int, workload: str) -> float:
    found = place.simulated(planner, one, seed)["step_s"]
    predicted = planner.predict(one)
    assert predicted is not None
    say(
        f"{workload}: {_named(one)}, seed {seed}: predicted {predicted.step_s:.1f} "
        f"({predicted.low_s:.1f} to {predicted.high_s:.1f}), simulated {found:.1f} s"
    )
    return found


def _complete(planner: place.Planner, one: place.PlacementPlan) -> bool:
    """True if a candidate uses all devices: with fewer, none is faster."""
    return sum(one.used()) + one.sampler_devices > sum(planner.hardware.counts)


def _named(one: place.PlacementPlan) -> str:
    samplers = f"{sum(one.samplers)} of {one.sampler_devices}"
    return f"{one.schedule}, alpha {one.alpha:g}, learner {one.learner_devices}, samplers {samplers}"


def hetero(
    steps: int, rounds: int, compared: int, null: bool, alpha: float = 2.0, clusters: Sequence[str] = CLUSTERS
) -> dict[str, Any]:
    """Tokens per second of clusters of equal price, each with the planner's pick, and the ratios if all are given."""
    fast, slow = (
        (replace(H800, price_per_hour=1.0), replace(H800, name="H20", price_per_hour=1.0)) if null else (H800, H20)
    )
    sizes = (
        {"both": (24, 24), "H800": (48, 0), "H20": (0, 48)}
        if null
        else {"both": (24, 24), "H800": (32, 0), "H20": (0, 88)}
    )
    found: dict[str, Any] = {}
    for name in clusters:
        counts = sizes[name]
        types = tuple(replace(each, count=n) for each, n in zip((fast, slow), counts, strict=True) if n)
        between = H800.link_bytes_per_s if null else 1.5e9
        space = Space(("bounded",), (alpha,), (1, 2, 4), (), 1.0, between_bytes_per_s=between)
        work = EVEN if null else LONG
        hardware = Hardware("AReaL-Hex", workload=work, devices=types, model=MODEL, search=space)
        planner = place.Planner(config(steps, 32, 16), hardware)
        chosen = place.ranked(planner, "throughput")[:compared]
        best = place.simulated_best(planner, chosen, "throughput") if compared > 1 else []
        one, predicted = best[0][:2] if best else chosen[0]
        for compared_one, of, run in best:
            say(f"{name}: {_used(planner, compared_one)}, seed 0: {of.step_s:.2f} s predicted, {run['step_s']:.2f} s")
        runs = list[dict[str, Any]]()
        for seed in range(1, rounds + 1):  # not the seed that chose it
            runs.append(place.simulated(planner, one, seed))
            say(f"{name}, seed {seed}: {runs[-1]['tokens_per_s']:,.0f} tokens/s")
        rates = [run["tokens_per_s"] for run in runs]
        found[name] = {
            "tokens_per_s": statistics.median(rates),
            "rates": rates,
            "predicted": predicted.tokens_per_s,
            "learner_busy": statistics.median(run["learner_busy"] for run in runs),
            "sampler_busy": statistics.median(run["sampler_busy"] for run in runs),
            "age_mean": statistics.median(run["age_mean"] for run in runs),
            "price_per_hour": sum(each.price_per_hour * each.count for each in types),
            **_used(planner, one),
            "compared": [
                _used(planner, each)
                | {"predicted_s": of.step_s, "simulated_s": run["step_s"], "training_s": of.training_s}
                for each, of, run in best
            ],
        }
        say(f"{'null ' * null}alpha {alpha:g}, {name}: {found[name]}")
    if {*clusters} != {*CLUSTERS}:
        return found
    both = found["both"]["rates"]
    return found | {
        f"over {name}": spread([a / b for a, b in zip(both, found[name]["rates"], strict=True)])
        for name in ("H800", "H20")
    }


def _used(planner: place.Planner, one: place.PlacementPlan) -> dict[str, Any]:
    """The devices of a candidate by type."""
    types = planner.hardware.devices
    return {
        "learner": {types[one.learner_type].name: one.learner_devices},
        "samplers": {each.name: n for each, n in zip(types, one.samplers, strict=True) if n},
        "sampler_devices": one.sampler_devices,
    }


def bound(context: float, prompt: float, answer: float) -> dict[str, float]:
    """The most tokens per second of the three clusters at this mean context, and their ratios."""

    def decodes(device: DeviceType) -> float:
        compute_s = 2 * MODEL.parameters / (device.flops * device.flops_share)
        return 1 / max(compute_s, MODEL.kv_bytes_per_token * context / (device.bytes_per_s * device.bytes_share))

    def trains(device: DeviceType) -> float:
        return device.flops * device.flops_share / (6 * MODEL.parameters * (1 + prompt / answer))

    def most(h800: int, h20: int) -> float:
        """With x devices in training: trains · x = the samplers' rate, or all of that type train."""
        counts, found = ((H800, h800), (H20, h20)), 0.0
        total = sum(count * decodes(each) for each, count in counts)
        for each, count in counts:
            found = max(found, trains(each) * min(count, total / (trains(each) + decodes(each))))
        return found

    both, fast, slow = most(24, 24), most(32, 0), most(0, 88)
    return {"context": context, "both": both, "H800": fast, "H20": slow, "over H800": both / fast,
            "over H20": both / slow}  # fmt: skip


def large(count: int) -> dict[str, Any]:
    """Seconds of a search on `count` devices, half of each type."""
    types = (replace(H800, count=count // 2), replace(H20, count=count // 2))
    hardware = Hardware("AReaL-Hex", workload=LONG, devices=types, model=MODEL, search=Space(between_bytes_per_s=1.5e9))
    started = time.monotonic()
    planner = place.Planner(config(10, 256, 16), hardware)
    one, predicted = place.ranked(planner, "throughput")[0]
    return {"devices": count, "search_s": time.monotonic() - started, "pick": _named(one), "step_s": predicted.step_s}


def dispatched(rounds: int, answers: int, scale: float) -> dict[str, Any]:
    """Makespan of a random assignment over that of `selection.dispatch`, for lengths with a tail and for equal ones.

    A prompt of n digits has an answer of `scale` · 1.25ⁿ tokens with log-normal noise; the ranker saw other prompts.
    """
    costs, instances = place.Planner(config(10), four("long tail")).sampler_costs(0, 1), 8
    ratios, same, recalls = [], [], []
    for seed in range(rounds):
        chance = random.Random(seed)

        def drawn(chance: random.Random = chance) -> tuple[str, float]:
            digits = chance.randint(1, 24)
            noise = chance.lognormvariate(0, 0.3)
            return f"add {''.join(chance.choices('0123456789', k=digits))}", scale * 1.25**digits * noise

        seen, held = [drawn() for _ in range(512)], [drawn() for _ in range(answers)]
        predicted = selection.LengthRanker().fit(*zip(*seen, strict=True)).predict([prompt for prompt, _ in held])
        lengths, most = [length for _, length in held], answers // 5
        top = set(sorted(range(answers), key=lambda index: -lengths[index])[:most])
        recalls.append(len(top & set(sorted(range(answers), key=lambda index: -predicted[index])[:most])) / most)
        ratios.append(_over_random(lengths, predicted, instances, costs, chance))
        equal = [statistics.mean(lengths)] * answers
        same.append(_over_random(equal, equal, instances, costs, chance))
    return {"ratio": spread(ratios), "null": spread(same), "recall_of_top_fifth": spread(recalls)}


def _over_random(
    lengths: list[float], predicted: list[float], instances: int, costs: SamplerCosts, chance: random.Random
) -> float:
    def drain_s(members: list[int]) -> float:
        """Decode steps of all members at once, until the longest ends."""
        ranked, total, before = sorted(lengths[index] for index in members), 0.0, 0.0
        for rank, length in enumerate(ranked):
            alive = len(ranked) - rank
            total += (length - before) * costs.step_s(alive, alive * (length + before) / 2)
            before = length
        return total

    def makespan(groups: list[list[int]]) -> float:
        return max(drain_s(group) for group in groups if group)

    order, mean = list(range(len(lengths))), statistics.mean(lengths)
    chance.shuffle(order)
    found = selection.dispatch(predicted, instances, lambda batch: costs.step_s(batch, batch * mean / 2), len(lengths))
    groups = [list(found.long[i :: found.long_instances]) for i in range(found.long_instances)]
    groups += [list(found.others[i :: found.other_instances]) for i in range(found.other_instances)]
    return makespan([order[i::instances] for i in range(instances)]) / makespan(groups)


def main() -> int:
    """All parts."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--only", action="append", choices=("workloads", "hetero", "bound", "large", "dispatch"))
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="one; repeatable (default: all)")
    parser.add_argument("--alpha", action="append", type=float, help="of `hetero`; repeatable (default: 2 and 4)")
    parser.add_argument("--cluster", action="append", choices=CLUSTERS, help="of `hetero`; repeatable (default: all)")
    parser.add_argument(
        "--compared",
        type=int,
        default=4,
        help="predictions of `hetero` that are simulated first (4; 1: the best is the pick)",
    )
    parser.add_argument("--most", type=int, default=100, help="candidates of a workload, the best predictions first")
    chosen, started = parser.parse_args(), time.monotonic()
    steps, rounds, most = (8, 1, 3) if chosen.quick else (14, chosen.rounds or 3, chosen.most)
    parts = chosen.only or ["workloads", "hetero", "bound", "large", "dispatch"]
    found: dict[str, Any] = {"class": "S", "steps": steps, "rounds": rounds}
    if "dispatch" in parts:
        seeds = 3 if chosen.quick else 20
        found["dispatch"] = {
            "weights bound": dispatched(seeds, 512, 16.0),
            "cache bound": dispatched(seeds, 2048, 64.0),
        }
    if "large" in parts:
        found["large"] = [large(count) for count in ((1024,) if chosen.quick else (64, 256, 1024))]
    if "bound" in parts:
        found["bound"] = [bound(context, LONG.prompt_tokens.mean, LONG.answer_tokens.mean) for context in CONTEXTS]
    if "hetero" in parts and not chosen.quick:
        clusters = chosen.cluster or CLUSTERS
        alphas = {
            f"alpha {alpha:g}": hetero(HETERO_STEPS, rounds, chosen.compared, False, alpha, clusters)
            for alpha in chosen.alpha or (2.0, 4.0)
        }
        null = hetero(8, 1, 1, True, clusters=clusters)
        found["hetero"] = {"null": null} | alphas | {"published": PUBLISHED, "steps": HETERO_STEPS}
    if "workloads" in parts:
        found["workloads"] = {}
        for name in chosen.workload or WORKLOADS:
            found["workloads"][name] = row = judged(name, steps, rounds, most) | {"steps": steps, "commit": commit()}
            if not chosen.quick:
                known = json.loads(DATA.read_text()) if DATA.exists() else {}
                kept = {each: (known | {name: row})[each] for each in WORKLOADS if each in {*known, name}}
                DATA.write_text(json.dumps(kept, indent=1) + "\n")
    finish(found, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
