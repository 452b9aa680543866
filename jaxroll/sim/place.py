"""`jaxroll place`: the placement, schedule and age bound that a described cluster is fastest or cheapest with.

Costs are those of the simulator (`sim.costs`): derived from rates of devices, measured by `jaxroll sim calibrate`, or
taken from a plan (`jaxroll plan --json`). A prediction is the recursion of the schedule over drawn rollouts
(`policy.step_times`): what an age bound admits, when new weights arrive, and the longest rollout of each step.
`ranked` predicts every candidate, or for large clusters those that `policy.placement.partition` finds.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.config.derived import answer_tokens, rollouts_per_step
from jaxroll.errors import ConfigError
from jaxroll.policy import placement
from jaxroll.policy.placement import Vector
from jaxroll.policy.step_times import Engines, Range, Rollouts, Rules
from jaxroll.sim import costs, simulate
from jaxroll.sim.costs import Cluster, Hardware, Law, LearnerCosts, RoleFailure, SamplerCosts, TransferCosts

Objective = Literal["throughput", "cost", "time"]
SHARED = "shared"  # the schedule in which all devices generate, and then all train
EPISODES, LEAST_STEPS, MOST_STEPS = 2**14, 24, 96  # drawn for a prediction
DRAINING = ("one_step", "interval", "pure")  # of one version: an answer; with `pure` an episode of several turns
SCORES = np.linspace(-4.5, 4.5, 1801)  # quantiles at which a law is computed
HORIZON_S = 20_000.0  # of simulated losses
SIMULATED, LEAST_SIMULATED, MOST_SIMULATED = 2**13, 12, 48  # rollouts and steps of a short simulation
USABLE = 0.9  # of a device's memory
EXHAUSTIVE = 1500  # candidates; with more, `partition` chooses among them


# --- candidates and predictions


@dataclass(frozen=True)
class PlacementPlan:
    """A schedule with its age bound, the learner's devices, and the samplers: number by type, and devices of each."""

    schedule: str
    alpha: float
    learner_type: int
    learner_devices: int
    samplers: Vector
    sampler_devices: int

    def used(self) -> Vector:
        """Devices by type. With the shared schedule samplers and learner have the same ones."""
        learner = [self.learner_devices * (kind == self.learner_type) for kind in range(len(self.samplers))]
        samplers = [count * self.sampler_devices for count in self.samplers]
        return tuple(learner) if self.schedule == SHARED else tuple(map(int.__add__, learner, samplers))


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step with their range, and what follows from them. `generation_s` is inf without memory for it."""

    step_s: float
    low_s: float
    high_s: float
    training_s: float
    generation_s: float
    tokens_per_s: float
    price_per_hour: float
    cost_per_million_tokens: float
    run_s: float
    slots: int

    def score(self, objective: Objective) -> tuple[float, float, float]:
        """Smaller is better. Of equals the one with less training, then the cheaper one."""
        first = {"throughput": self.step_s, "cost": self.cost_per_million_tokens, "time": self.run_s}[objective]
        return first, self.training_s, self.price_per_hour


def merged(hardware: Hardware) -> Hardware:
    """`hardware` with types that differ only by name as one type, unless links between types are slower than others."""
    found: dict[costs.DeviceType, costs.DeviceType] = {}
    for each in hardware.devices:
        same = replace(each, name="", count=1)
        if same in found and hardware.search.between_bytes_per_s >= each.link_bytes_per_s:
            known = found[same]
            found[same] = replace(known, name=f"{known.name}+{each.name}", count=known.count + each.count)
        else:
            found[same if same not in found else each] = each
    return replace(hardware, devices=tuple(found.values()))


class Planner:
    """Predictions for one config on one hardware."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        self.config, self.hardware = costs.checked(config), merged(hardware)
        self._known: dict[PlacementPlan, Prediction | None] = {}
        work = hardware.workload
        self.rollouts = rollouts_per_step(config)
        self.drawn, self.turns, self.longest_turn = self._drawn(np.random.default_rng(0))  # the same for every seed
        tokens, prompt, replies = float(self.drawn.tokens.mean()), work.prompt_tokens.mean, work.reply_tokens.mean
        replies *= self.turns - 1
        self.decoded, self.replies = self.rollouts * tokens, replies
        self._long = float(np.quantile(self.drawn.tokens, 0.9))
        rows = math.ceil(self.rollouts * (prompt + replies + tokens) / config.learner.row_tokens)
        self.micro_batches = math.ceil(rows / config.learner.micro_batch_rows)
        self.padded = self.micro_batches * config.learner.micro_batch_rows * config.learner.row_tokens

    def _drawn(self, random: np.random.Generator) -> tuple[Rollouts, float, float]:
        """Rollouts of some steps, their turns in the mean, and the tokens of the longest turn of a group."""
        work, schedule, chunk = self.hardware.workload, self.config.schedule, self.config.sampler.decode_chunk
        steps, most = min(max(EPISODES // self.rollouts, LEAST_STEPS), MOST_STEPS), answer_tokens(self.config)
        shape = steps, schedule.groups_per_step, self.rollouts // schedule.groups_per_step

        def drawn(law: Law, scores: np.ndarray) -> np.ndarray:
            return np.interp(scores, SCORES, [law.at(score) for score in SCORES])

        turns = np.maximum(1, np.round(drawn(work.turns, random.standard_normal(shape))))
        of_group, alike = random.standard_normal(shape[:2])[..., None], work.answers_alike
        tokens, answers, waits, longest = np.zeros(shape), np.zeros(shape), np.zeros(shape), 0.0
        for turn in range(int(turns.max())):
            scores = math.sqrt(1 - alike) * random.standard_normal(shape) + math.sqrt(alike) * of_group
            length = np.minimum(np.maximum(1, np.round(drawn(work.answer_tokens, scores))), most)
            longest = max(longest, float(length.max(axis=2).mean()))
            # Requests join and leave between two dispatches.
            steps_taken = np.ceil(length / chunk) * chunk + (chunk / 2 if turn else 0)
            tokens += np.where(turns > turn, length, 0)
            answers += np.where(turns > turn, steps_taken, 0)
            waits += np.where(turns > turn, np.maximum(0, drawn(work.env_s, random.standard_normal(shape))), 0)
        replies = float(turns.mean() - 1) * work.reply_tokens.mean
        context = work.prompt_tokens.mean + replies + float(np.average(tokens, weights=tokens)) / 2
        answers, waits, tokens = (each.reshape(steps, -1) for each in (answers, waits, tokens))
        return Rollouts(answers, waits, work.prompt_tokens.mean, context, tokens), float(turns.mean()), longest

    # costs of a role on devices

    def _speed(self, devices: int, measured_on: int = 1) -> float:
        """The speed of `devices` over that of `measured_on`."""
        ratio = devices / measured_on
        return ratio * self.hardware.search.parallel_share ** math.log2(ratio)

    def sampler_costs(self, kind: int, devices: int) -> SamplerCosts:
        """The costs of one sampler."""
        device, model = self.hardware.devices[kind], self.hardware.model
        price = device.price_per_hour * devices
        if model is None:
            return replace(self.hardware.sampler, price_per_hour=price or self.hardware.sampler.price_per_hour)
        speed = self._speed(devices)
        return SamplerCosts(
            flops_per_token=2 * model.parameters,
            flops=device.flops * device.flops_share * speed,
            weight_bytes=model.weight_bytes * model.parameters,
            kv_bytes_per_token=model.kv_bytes_per_token,
            bytes_per_s=device.bytes_per_s * device.bytes_share * speed,
            price_per_hour=price,
        )

    def learner_costs(self, kind: int, devices: int) -> LearnerCosts:
        """The costs of the learner."""
        device, model, measured = self.hardware.devices[kind], self.hardware.model, self.hardware.learner
        price = device.price_per_hour * devices
        if model is None:
            return replace(measured, price_per_hour=price or measured.price_per_hour)
        flops = device.flops * device.flops_share * self._speed(devices)
        return LearnerCosts(flops_per_token=6 * model.parameters, flops=flops, price_per_hour=price)

    def transfer_costs(self, one: PlacementPlan) -> TransferCosts:
        """The costs of new weights: over the slowest link between the learner and a sampler."""
        model, devices, between = self.hardware.model, self.hardware.devices, self.hardware.search.between_bytes_per_s
        if one.schedule == SHARED:
            return TransferCosts()
        if model is None:
            return self.hardware.transfer
        other = any(count for kind, count in enumerate(one.samplers) if kind != one.learner_type)
        link = min(devices[one.learner_type].link_bytes_per_s, between if other else math.inf)
        return TransferCosts(size_bytes=model.weight_bytes * model.parameters, bytes_per_s=link)

    def _at_once(self, one: PlacementPlan) -> float:
        """The most rollouts that the schedule lets run at once."""
        return (1 if one.schedule == "interval" else one.alpha + 1) * self.rollouts

    def slots(self, one: PlacementPlan) -> int:
        """Slots of a sampler: for the rollouts that the age bound allows, and no more than fit; 0 if none does."""
        wanted = math.ceil(self._at_once(one) / max(1, sum(one.samplers)))
        model, most = self.hardware.model, math.inf
        if model is None:
            return wanted
        weights = model.weight_bytes * model.parameters
        long = self.drawn.prompt + self._long
        for kind, count in enumerate(one.samplers):
            room = self.hardware.devices[kind].memory_bytes * USABLE * one.sampler_devices
            learner = model.training_bytes * model.parameters / one.learner_devices * one.sampler_devices
            room -= learner + weights if one.schedule == SHARED else 2 * weights  # while new weights arrive
            if count and math.isfinite(room):
                most = min(most, room / (max(model.kv_bytes_per_token, 1e-9) * long))
        return int(max(0.0, min(wanted, most)))

    def _fits(self, one: PlacementPlan) -> bool:
        model, device = self.hardware.model, self.hardware.devices[one.learner_type]
        if model is None:
            return True
        needed = (model.training_bytes + model.weight_bytes) * model.parameters / one.learner_devices
        return needed <= USABLE * device.memory_bytes

    # seconds

    def _engines(self, one: PlacementPlan, slots: int) -> list[Engines]:
        """The samplers by type, with the rollouts of a step that each gets.

        If they have slots for all that the age bound allows, the store deals rollouts by free slots, of which all have
        equally many; otherwise a sampler gets the next rollout when another has ended, so that the quick get more.
        """
        kinds = [(self.sampler_costs(kind, one.sampler_devices), kind) for kind, n in enumerate(one.samplers) if n]
        scarce = slots * sum(one.samplers) >= self._at_once(one)
        rates = [1.0 if scarce else slots / each.step_s(slots, slots * self.drawn.context) for each, _ in kinds]
        total = sum(rate * one.samplers[kind] for rate, (_, kind) in zip(rates, kinds, strict=True))
        return [
            self._engine(one, kind, each, slots, self.rollouts * rate / total)
            for rate, (each, kind) in zip(rates, kinds, strict=True)
        ]

    def _engine(self, one: PlacementPlan, kind: int, each: SamplerCosts, slots: int, members: float) -> Engines:
        schedule, device = self.config.schedule, self.hardware.devices[kind]
        spread = schedule.group_placement == "spread"  # each sampler prefills the prompts of its members
        prompts = min(schedule.groups_per_step, members) if spread else members / schedule.members_per_group
        tokens = prompts * self.drawn.prompt + members * self.replies
        calls = math.ceil(prompts / min(self.config.sampler.prefill_rows, slots))
        step = (lambda n, context: each.step_s(slots, context)) if each.all_slots else each.step_s
        return Engines(
            step, one.samplers[kind], slots, members, each.prefill_s(int(tokens), calls),
            device.lost_every_s / one.sampler_devices, device.down_s, self.config.store.lease_s,
        )  # fmt: skip

    def predict(self, one: PlacementPlan) -> Prediction | None:
        """The prediction for a candidate; None if it does not fit into the memory of its devices."""
        if one not in self._known:
            self._known[one] = self._predicted(one)
        return self._known[one]

    def _predicted(self, one: PlacementPlan) -> Prediction | None:
        slots = self.slots(one)
        if slots < 1 or not self._fits(one) or not any(one.samplers):
            return None
        learner = self.learner_costs(one.learner_type, one.learner_devices)
        train_s = learner.train_s(self.padded, self.micro_batches) * learner.jitter.mean
        sends, engines = self.transfer_costs(one), self._engines(one, slots)
        swap_s = max(self.sampler_costs(kind, one.sampler_devices).swap_s for kind, n in enumerate(one.samplers) if n)
        drains, barrier, fetch_s = one.schedule in DRAINING, one.schedule == "interval", sends.fetch_s + swap_s
        sends_s = sends.publish_s + fetch_s
        if drains and one.schedule != "pure" and (self.turns > 1 or self.drawn.waits.any()):  # only running turns end
            drains = False
            sends_s += self.longest_turn * max(each.step(slots, slots * self.drawn.context) for each in engines)
        bounds = sorted({math.floor(one.alpha), math.ceil(one.alpha)})
        found = [
            self.drawn.stepped(
                engines,
                Rules(alpha, train_s, sends_s, drains, barrier, fetch_s * barrier),
                self.config.schedule.steps,
            )
            for alpha in bounds
        ]
        share = one.alpha - bounds[0]  # of the steps whose rollouts may begin a step earlier
        step: Range = tuple(a + share * (b - a) for a, b in zip(found[0][0], found[-1][0], strict=True))  # type: ignore[assignment]
        generation = found[0][1] + share * (found[-1][1] - found[0][1])
        used = one.used()
        price = sum(n * each.price_per_hour for n, each in zip(used, self.hardware.devices, strict=True))
        price = price or learner.price_per_hour + sum(
            self.sampler_costs(kind, one.sampler_devices).price_per_hour * n for kind, n in enumerate(one.samplers)
        )
        rate, steps = self.decoded / step[0], self.config.schedule.steps
        longer = 1 + self.hardware.search.steps_per_age * one.alpha
        return Prediction(step[0], step[1], step[2], train_s, generation, rate, price, price / 3600 / rate * 1e6,
                          steps * longer * step[0] + generation, slots)  # fmt: skip


# --- search


def _alphas(planner: Planner, schedule: str) -> tuple[float, ...]:
    fixed = {SHARED: (0.0,), "sync": (0.0,), "one_step": (1.0,), "interval": (1.0,)}
    return fixed.get(schedule) or tuple(alpha for alpha in planner.hardware.search.alphas if alpha > 0)


def _learners(planner: Planner, kind: int, schedule: str) -> list[int]:
    """Devices that a learner of this type may have: powers of two, half and whole machines, or those of the file."""
    device, given = planner.hardware.devices[kind], planner.hardware.search.learner_devices
    if given or planner.hardware.model is None:
        numbers = [number for number in given or (1,) if number <= device.count]
    else:
        powers = [1 << power for power in range(device.count.bit_length()) if 1 << power <= device.count]
        steps = (max(1, device.machine // 2), device.machine)
        numbers = sorted({*powers, *(n for step in steps for n in range(step, device.count + 1, step))})
    return [number for number in numbers if schedule != SHARED or number <= device.machine]


def _settings(planner: Planner) -> Iterator[tuple[str, float, int]]:
    space = planner.hardware.search
    sizes = space.sampler_devices if planner.hardware.model else space.sampler_devices[:1]
    for schedule in space.schedules:
        yield from itertools.product((schedule,), _alphas(planner, schedule), sizes)


def _room(planner: Planner, free: Vector, size: int) -> Vector:
    """Samplers of `size` devices by type that free devices have room for. A sampler has one machine."""
    devices = planner.hardware.devices
    return tuple(n // size if size <= each.machine else 0 for n, each in zip(free, devices, strict=True))


def _shared(planner: Planner, size: int) -> Iterator[PlacementPlan]:
    kinds = range(len(planner.hardware.devices))
    for kind in kinds:
        for number in _learners(planner, kind, SHARED):
            if number % size == 0:
                yield PlacementPlan(SHARED, 0.0, kind, number, tuple(number // size * (k == kind) for k in kinds), size)


def candidates(planner: Planner) -> Iterator[PlacementPlan]:
    """Every candidate, whether it fits or not."""
    counts = planner.hardware.counts
    for schedule, alpha, size in _settings(planner):
        if schedule == SHARED:
            yield from _shared(planner, size)
            continue
        for kind in range(len(counts)):
            for number in _learners(planner, kind, schedule):
                free = tuple(count - number * (k == kind) for k, count in enumerate(counts))
                for samplers in itertools.product(*(range(n + 1) for n in _room(planner, free, size))):
                    if any(samplers):
                        yield PlacementPlan(schedule, alpha, kind, number, samplers, size)


def _split(planner: Planner, schedule: str, alpha: float, size: int, training: Vector) -> PlacementPlan | None:
    """The candidate with at most the learner devices `training` and all others as samplers; None if there is none."""
    kinds = [kind for kind, number in enumerate(training) if number]
    if len(kinds) != 1:
        return None  # a mesh has one type of device
    number = max((n for n in _learners(planner, kinds[0], schedule) if n <= training[kinds[0]]), default=0)
    used = tuple(number * (kind == kinds[0]) for kind in range(len(training)))
    samplers = _room(planner, placement.minus(planner.hardware.counts, used), size)
    return PlacementPlan(schedule, alpha, kinds[0], number, samplers, size) if number and any(samplers) else None


def _found(planner: Planner, objective: Objective) -> Iterator[PlacementPlan]:
    """Candidates for a large cluster: for each setting the learner that `partition` finds, and its neighbors."""
    counts, between = planner.hardware.counts, planner.hardware.search.between_bytes_per_s
    types = []
    for each in planner.hardware.devices:
        flops, memory = each.flops * each.flops_share, each.bytes_per_s * each.bytes_share
        rates = [min(rate, 1e18) for rate in (flops, memory, each.link_bytes_per_s)]
        types.append(placement.Devices(each.count, rates[0], rates[1], rates[2], each.machine))
    step = 1 if sum(counts) <= 64 else min(each.machine for each in types)
    for setting in _settings(planner):
        if setting[0] == SHARED:
            yield from _shared(planner, setting[2])
            continue

        def side(training: Vector, name: str, setting: tuple[str, float, int] = setting) -> float:
            one = _split(planner, *setting, training)
            predicted = planner.predict(one) if one else None
            return getattr(predicted, name) if predicted else math.inf

        def rollout_s(rollout: Vector, side: Callable[[Vector, str], float] = side) -> float:
            return side(placement.minus(counts, rollout), "generation_s")

        found = placement.partition(types, lambda own: side(own, "training_s"), rollout_s, min(between, 1e18), step)
        best, half = max(found.training), max(1, min(each.machine for each in types) // 2)
        numbers = {1 << n for n in range(best.bit_length() + 1)} | {best // 4, best // 2}
        numbers |= {best + n for n in (-step, -half, 0, half, step)}
        for kind, number in itertools.product(range(len(types)), numbers):
            training = tuple(min(max(number, 1), n) * (k == kind) for k, n in enumerate(counts))
            if one := _split(planner, *setting, training):
                eighths = (0, 1, 2, 4, 6, 8) if objective == "cost" else (0, 8)
                parts = [sorted({math.ceil(n * part / 8) for part in eighths}) for n in one.samplers]
                yield from (replace(one, samplers=each) for each in itertools.product(*parts) if any(each))


def ranked(planner: Planner, objective: Objective) -> list[tuple[PlacementPlan, Prediction]]:
    """Candidates that fit with their predictions, the best first. ConfigError if none fits."""
    few = list(itertools.islice(candidates(planner), EXHAUSTIVE + 1))
    chosen = few if len(few) <= EXHAUSTIVE else dict.fromkeys(_found(planner, objective))
    found = [(one, predicted) for one in chosen if (predicted := planner.predict(one)) is not None]
    if not found:
        reason = "no placement fits into the memory of these devices"
        remedy = "Add devices or memory_bytes, or raise search.sampler_devices."
        raise ConfigError("devices", planner.hardware.counts, reason, remedy)
    return sorted(found, key=lambda each: (*each[1].score(objective), each[0].alpha))


def workflow(hardware: Hardware, objective: Objective) -> tuple[placement.Plan, float]:
    """The plan of the roles of the file, and the half width of its range relative to its seconds."""
    unit, space = hardware.search.unit, hardware.search
    counts = tuple(count // unit for count in hardware.counts)
    roles, after = tuple(role.name for role in hardware.roles), {role.name: role.after for role in hardware.roles}
    flow = placement.Workflow(roles, after, space.chunks, space.switch_s)
    names = [each.name for each in hardware.devices]

    def cost(role: costs.WorkflowRole, vector: Vector) -> float:
        used = tuple(number * unit for number in vector)
        if role.rates:
            kinds = [
                placement.Replica(names.index(name), devices, rate)
                for name, table in role.rates.items()
                for devices, rate in table.items()
            ]
            plan = placement.rollout_plan(kinds, used, role.rollouts)
            return plan.seconds if plan else math.inf
        kinds = [kind for kind, number in enumerate(used) if number]
        return role.seconds.get(names[kinds[0]], {}).get(used[kinds[0]], math.inf) if len(kinds) == 1 else math.inf

    tables = {role.name: lambda vector, role=role: cost(role, vector) for role in hardware.roles}
    alphas = sorted({0, *(int(alpha) for alpha in space.alphas)})
    subsets = itertools.product(*(range(count + 1) for count in counts)) if objective == "cost" else [counts]
    plans = [
        plan
        for vector in subsets
        if any(vector)
        for alpha in alphas
        if (plan := placement.workflow_plan(flow, vector, tables, alpha)) is not None
    ]
    if not plans:
        remedy = "Add numbers of devices to the tables of roles, or devices."
        raise ConfigError("roles.seconds", hardware.counts, "no placement has seconds for every role", remedy)

    def score(plan: placement.Plan) -> tuple[float, ...]:
        longer = 1 + space.steps_per_age * plan.lag if objective == "time" else 1.0
        price = sum(n * unit * each.price_per_hour for n, each in zip(plan.devices, hardware.devices, strict=True))
        return plan.seconds * longer * (price if objective == "cost" else 1.0), plan.lag

    return min(plans, key=score), max(role.spread for role in hardware.roles)


# --- the pick: overrides of the config, and a simulation


def overrides(planner: Planner, one: PlacementPlan) -> list[str]:
    """Changes KEY=VALUE of the config that make it this candidate."""
    config, count, slots = planner.config, sum(one.samplers), planner.slots(one)
    shared, schedule = one.schedule == SHARED, one.schedule
    fixed = dict(simulate.SCHEDULES["sync" if shared else schedule])
    if schedule in ("bounded", "pure"):
        fixed["alpha"] = one.alpha
    rows = math.ceil(config.learner.micro_batch_rows / one.learner_devices) * one.learner_devices
    own = {
        "placement.colocated": shared,
        "sampler.count": 1 if shared else count,
        "sampler.slots": slots * (count if shared else 1),
        "sampler.mesh.data": count if shared else 1,
        "sampler.mesh.tensor": one.sampler_devices,
        "learner.mesh.fsdp": one.learner_devices,
        "learner.micro_batch_rows": rows,
    }
    meshes = {"sampler": config.sampler.mesh, "learner": config.learner.mesh}
    others = {f"{role}.mesh.{axis}": 1 for role, mesh in meshes.items() for axis, n in asdict(mesh).items() if n != 1}
    values = {f"schedule.{key}": value for key, value in ({"mode": "async"} | fixed).items()} | others | own
    return [f"{key}={value}" for key, value in values.items()]


def simulated(planner: Planner, one: PlacementPlan, seed: int = 0, steps: int = 0) -> simulate.Figures:
    """The figures of a simulated run of the candidate, of `steps` steps (0: those of the config)."""
    hardware, slots, steps = planner.hardware, planner.slots(one), steps or planner.config.schedule.steps
    given = [f"run.seed={seed}", f"sampler.count={sum(one.samplers)}", f"sampler.slots={slots}",
             f"sampler.concurrent_episodes={slots}", f"schedule.steps={steps}"]  # fmt: skip
    if one.schedule in ("bounded", "pure"):
        given.append(f"schedule.alpha={one.alpha}")
    config = configs.parse(configs.override(configs.to_dict(planner.config), given))
    config = simulate.scheduled(config, "sync" if one.schedule == SHARED else one.schedule)
    kinds = [kind for kind, count in enumerate(one.samplers) for _ in range(count)]
    learner = planner.learner_costs(one.learner_type, one.learner_devices)
    samplers = tuple(planner.sampler_costs(kind, one.sampler_devices) for kind in kinds)
    if one.schedule == SHARED:
        learner = replace(learner, price_per_hour=0.0)
    transfer, failures = planner.transfer_costs(one), tuple(_failures(planner, one, kinds, seed))
    cluster = Cluster(hardware.source, samplers[0], learner, transfer, hardware.workload, hardware.rpc_s,
                      hardware.rpc_bytes_per_s, failures, samplers)  # fmt: skip
    return simulate.simulate(config, cluster, Path(), keep=False)


def simulated_best(
    planner: Planner, chosen: Iterable[tuple[PlacementPlan, Prediction]], objective: Objective
) -> list[tuple[PlacementPlan, Prediction, simulate.Figures]]:
    """These candidates with the figures of a short simulated run, the best of the simulations first."""
    steps = min(max(SIMULATED // planner.rollouts, LEAST_SIMULATED), MOST_SIMULATED, planner.config.schedule.steps)
    found = [(one, predicted, simulated(planner, one, steps=max(2, steps))) for one, predicted in chosen]
    key = "cost_per_million_tokens" if objective == "cost" else "step_s"
    per_age = planner.hardware.search.steps_per_age if objective == "time" else 0.0
    return sorted(found, key=lambda each: (each[2][key] * (1 + per_age * each[0].alpha), each[0].alpha))


def _failures(planner: Planner, one: PlacementPlan, kinds: Sequence[int], seed: int) -> Iterator[RoleFailure]:
    for index, kind in enumerate(kinds):
        device, drawn, at_s = planner.hardware.devices[kind], random.Random(repr(("spot", seed, index))), 0.0
        if math.isfinite(device.lost_every_s):
            every = device.lost_every_s / one.sampler_devices
            while (at_s := at_s + device.down_s + drawn.expovariate(1 / every)) < HORIZON_S:
                yield RoleFailure(at_s, f"sampler-{index}", device.down_s)
