"""Parameters of a simulated cluster, measured in a run or published, and the time that each kind of work takes on it.

A cluster is a TOML file with the tables of `Cluster`. Parameters come from a recorded run (`jaxroll sim calibrate`) or
from published constants, never from the result that is to be predicted.

Decoding, one step of b sequences with c tokens of context in all (roofline):

    overhead + max(b·flops_per_token / flops, (weight_bytes + c·kv_bytes_per_token) / bytes_per_s)

Prefill of n tokens: overhead + n·flops_per_token / flops. Training: overhead + micro-batches·their overhead +
n·flops_per_token / flops, over the padded tokens of the micro-batches.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import sqlite3
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from jaxroll import disk, wire
from jaxroll.config import Config
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Finished, Member
from jaxroll.report import record
from jaxroll.run_paths import RunPaths

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(gt=0, le=1_000_000)]
NORMAL = statistics.NormalDist()
_FILE_BYTES = 1 << 20
_DEEP_KEY = re.compile(r"(?<![^\s.])(?:[^\s.]++\s*+\.\s*+){64}")  # tomllib's time is quadratic in the parts of a key


@dataclass(frozen=True)
class Law:
    """A distribution of numbers that are at least `least` and at most `most`.

    `normal` and `lognormal` have the given mean and deviation (of the numbers, not of their logarithms), `exponential`
    has the mean, and `recorded` draws from `values`, which ascend.
    """

    kind: Literal["constant", "normal", "lognormal", "exponential", "recorded"] = "constant"
    mean: float = 0.0
    deviation: NotNegative = 0.0
    least: float = 0.0
    most: float = math.inf
    values: tuple[float, ...] = ()

    def draw(self, chance: random.Random) -> float:
        """One number."""
        return self.at(chance.gauss(0.0, 1.0))

    def at(self, score: float) -> float:
        """The number at the quantile of `score`, a number of the standard normal distribution."""
        return min(max(self._at(score), self.least), self.most)

    def _at(self, score: float) -> float:
        if self.kind == "normal":
            return self.mean + self.deviation * score
        if self.kind == "lognormal" and self.mean > 0:
            spread = math.log1p((self.deviation / self.mean) ** 2)
            return self.mean * math.exp(math.sqrt(spread) * score - spread / 2)
        if self.kind == "exponential":
            return -self.mean * math.log(max(NORMAL.cdf(-score), sys.float_info.min))
        if self.kind == "recorded" and self.values:
            return self.values[min(int(NORMAL.cdf(score) * len(self.values)), len(self.values) - 1)]
        return self.mean


@dataclass(frozen=True)
class SamplerCosts:
    """One sampler: its engine, and the price of its devices. `all_slots`: a step computes empty slots as well."""

    step_overhead_s: NotNegative = 0.0
    prefill_overhead_s: NotNegative = 0.0
    swap_s: NotNegative = 0.0
    flops_per_token: NotNegative = 0.0
    flops: Positive = math.inf
    weight_bytes: NotNegative = 0.0
    kv_bytes_per_token: NotNegative = 0.0
    bytes_per_s: Positive = math.inf
    all_slots: bool = False
    price_per_hour: NotNegative = 0.0

    def step_s(self, sequences: int, context: float) -> float:
        """Seconds of a decode step."""
        compute_s = sequences * self.flops_per_token / self.flops
        memory_s = (self.weight_bytes + context * self.kv_bytes_per_token) / self.bytes_per_s
        return self.step_overhead_s + max(compute_s, memory_s)

    def prefill_s(self, tokens: int, calls: int) -> float:
        """Seconds of `calls` prefill calls with `tokens` prompt tokens in all."""
        return calls * self.prefill_overhead_s + tokens * self.flops_per_token / self.flops


@dataclass(frozen=True)
class LearnerCosts:
    """The learner, and the price of its devices. `jitter` is a factor of the time of each step.

    With `learner.streaming`, the overhead of a step comes after the claim. `samplers` fit on its devices
    (`partial_overlap`).
    """

    step_overhead_s: NotNegative = 0.0
    micro_batch_overhead_s: NotNegative = 0.0
    flops_per_token: NotNegative = 0.0
    flops: Positive = math.inf
    price_per_hour: NotNegative = 0.0
    jitter: Law = Law(mean=1.0)
    samplers: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0

    def train_s(self, tokens: int, micro_batches: int) -> float:
        """Seconds of a training step."""
        of_tokens_s = tokens * self.flops_per_token / self.flops
        return self.step_overhead_s + micro_batches * self.micro_batch_overhead_s + of_tokens_s


@dataclass(frozen=True)
class TransferCosts:
    """Weights from the learner to a sampler: `publish_s` until they can be fetched, then latency and bandwidth.

    Receivers share the `sender_bytes_per_s` of the one that sends: the learner, or a relay (`transfer.relay`).
    """

    publish_s: NotNegative = 0.0
    latency_s: NotNegative = 0.0
    size_bytes: NotNegative = 0.0
    bytes_per_s: Positive = math.inf
    sender_bytes_per_s: Positive = math.inf

    @property
    def fetch_s(self) -> float:
        """Seconds of one fetch, alone."""
        return self.latency_s + self.size_bytes / min(self.bytes_per_s, self.sender_bytes_per_s)


@dataclass(frozen=True)
class Workload:
    """Sizes of an episode: tokens of prompts, answers and replies, turns, seconds of a step, rewards.

    `answers_alike` is the correlation of the lengths of a group's answers: 1 if a prompt determines the length.
    `rewarded` is the chance of reward 1, drawn for each group.
    """

    prompt_tokens: Law = Law(mean=16)
    answer_tokens: Law = Law(mean=8, least=1)
    reply_tokens: Law = Law(mean=8, least=1)
    turns: Law = Law(mean=1, least=1)
    env_s: Law = Law()
    rewarded: Law = Law(mean=0.5)
    answers_alike: Share = 0.0


@dataclass(frozen=True)
class RoleFailure:
    """The process `role` ("sampler-0", "learner") ends at `at_s` and starts again `down_s` later."""

    at_s: NotNegative
    role: str
    down_s: NotNegative = 0.0


@dataclass(frozen=True)
class Cluster:
    """A cluster and its workload. `source` says where the numbers come from."""

    source: str = ""
    sampler: SamplerCosts = field(default_factory=SamplerCosts)
    learner: LearnerCosts = field(default_factory=LearnerCosts)
    transfer: TransferCosts = field(default_factory=TransferCosts)
    workload: Workload = field(default_factory=Workload)
    rpc_s: NotNegative = 0.001
    rpc_bytes_per_s: Positive = math.inf
    failures: tuple[RoleFailure, ...] = ()
    samplers: tuple[SamplerCosts, ...] = ()  # of samplers 0, 1, …, instead of `sampler`
    start_s: NotNegative = 0.0  # until a sampler that the run asks for has started (`sampler.least_count`)

    def sampler_costs(self, index: int) -> SamplerCosts:
        """The costs of a sampler."""
        return self.samplers[index] if index < len(self.samplers) else self.sampler


@dataclass(frozen=True)
class DeviceType:
    """A type of device. Its rates are reached in part (`flops_share`, `bytes_share`).

    A device that generates is lost every `lost_every_s` seconds in the mean, for `down_s` seconds.
    """

    name: str
    count: Count
    machine: Count = 8
    flops: Positive = math.inf
    bytes_per_s: Positive = math.inf
    memory_bytes: Positive = math.inf
    link_bytes_per_s: Positive = math.inf
    flops_share: Share = 0.4
    bytes_share: Share = 0.7
    price_per_hour: NotNegative = 0.0
    accelerator: str = ""
    lost_every_s: Positive = math.inf
    down_s: NotNegative = 0.0


@dataclass(frozen=True)
class ModelCosts:
    """A model: parameters, bytes of KV cache per token, and bytes per parameter of weights and of training."""

    parameters: Positive
    kv_bytes_per_token: NotNegative = 0.0
    weight_bytes: Positive = 2.0
    training_bytes: Positive = 16.0


@dataclass(frozen=True)
class WorkflowRole:
    """A role of a workflow: the roles it depends on, and its seconds by type of device and number of devices.

    With `rollouts`, `rates` has instead the rollouts per second of one replica, by type and devices of the replica.
    `spread` is the relative uncertainty of these numbers.
    """

    name: str
    after: tuple[str, ...] = ()
    seconds: Mapping[str, Mapping[int, Positive]] = field(default_factory=dict)
    rates: Mapping[str, Mapping[int, Positive]] = field(default_factory=dict)
    rollouts: int = 0
    spread: NotNegative = 0.0


@dataclass(frozen=True)
class Space:
    """The candidates, and the rules of a step.

    `parallel_share`: the share of the speed that is kept when the devices of a role double. `steps_per_age`: the steps
    that an age of 1 adds, relative to all, for the objective `time`. `sampler_devices`: devices of a sampler.
    """

    schedules: tuple[str, ...] = ("shared", "sync", "one_step", "bounded", "interval")
    alphas: tuple[NotNegative, ...] = (1.0, 2.0)
    sampler_devices: tuple[Count, ...] = (1, 2, 4, 8)
    learner_devices: tuple[Count, ...] = ()
    parallel_share: Share = 0.95
    steps_per_age: NotNegative = 0.0
    between_bytes_per_s: Positive = math.inf
    chunks: Count = 1
    switch_s: NotNegative = 0.0
    unit: Count = 1


@dataclass(frozen=True)
class Hardware(Cluster):
    """Devices, and the costs of work on them: of a model, of a plan (`plan`), or as measured ([sampler], [learner])."""

    devices: tuple[DeviceType, ...] = ()
    model: ModelCosts | None = None
    plan: str = ""
    roles: tuple[WorkflowRole, ...] = ()
    search: Space = field(default_factory=Space)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of devices by type."""
        return tuple(each.count for each in self.devices)


C = TypeVar("C", bound=Cluster)


def load(path: Path, kind: type[C] = Cluster, remedy: str = "docs/simulation.md lists the keys of a cluster.") -> C:
    """The cluster that a TOML file describes. ConfigError if it cannot be read or has an unknown or wrong value."""
    try:
        if _DEEP_KEY.search(text := disk.read_text(path, _FILE_BYTES)):
            raise DataError("a key has 64 parts or more")
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError("--cluster", str(path), f"cannot be read ({error.strerror})", "Name a TOML file.") from error
    except (DataError, ValueError, RecursionError) as error:
        raise ConfigError("--cluster", str(path), f"is no TOML: {error}", remedy) from error
    try:
        cluster = msgspec.convert(values, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError("--cluster", str(path), str(error), remedy) from error
    if unknown := _unknown(values, msgspec.to_builtins(cluster, str_keys=True)):
        raise ConfigError("--cluster", str(path), f"has the unknown key {unknown}", remedy)
    return cluster


def _unknown(given: Any, known: Any, where: str = "") -> str:
    """The first key of `given` that `known` lacks, dotted; "" if there is none."""
    if isinstance(given, list) and isinstance(known, list | tuple):
        found = (_unknown(a, b, where) for a, b in zip(given, known, strict=False))
        return next((name for name in found if name), "")
    if not isinstance(given, dict) or not isinstance(known, dict):
        return ""
    for key, value in given.items():
        name = f"{where}{key}"
        if key not in known:
            return name
        if inner := _unknown(value, known[key], f"{name}."):
            return inner
    return ""


def text(cluster: Cluster) -> str:
    """`cluster` as TOML, values that equal their defaults left out."""
    values, defaults = msgspec.to_builtins(cluster), msgspec.to_builtins(Cluster())
    lines = [f"source = {_toml(values['source'])}"]
    lines += [f"{key} = {_toml(values[key])}" for key in ("rpc_s", "rpc_bytes_per_s") if values[key] != defaults[key]]
    for table in ("sampler", "learner", "transfer", "workload"):
        changed = {key: value for key, value in values[table].items() if value != defaults[table][key]}
        lines += [f"\n[{table}]", *(f"{key} = {_toml(value)}" for key, value in changed.items())] if changed else []
    for table in ("failures", "samplers"):
        for row in values[table]:
            lines += [f"\n[[{table}]]", *(f"{key} = {_toml(value)}" for key, value in row.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return msgspec.json.encode(value).decode()


def checked(config: Config) -> Config:
    """`config` without warm start, evaluations and HTTP. ConfigError for a placement that is not simulated."""
    for key, value, why in (
        ("placement.colocated", config.placement.colocated, "roles that share devices are not simulated"),
        ("placement.actors", config.placement.actors, "actors are not simulated"),
    ):
        if value:
            raise ConfigError(key, value, why, f"Add --config.{key}={type(value)()}.")
    return replace(
        config,
        sft=replace(config.sft, steps=0),
        evaluator=replace(config.evaluator, every=0),
        sampler=replace(config.sampler, http_port=-1),
        learner=replace(config.learner, keep_best=""),
    )


# --- Costs and workload of a cluster, measured in the records of a run (`jaxroll sim calibrate RUN`)
#
# Nothing is fitted to step times or rates. The engine: least squares of its busy time over decode steps and prefills.
# The learner: least squares of the step's time over its micro-batches. Transfers: medians of their spans. The workload:
# recorded lengths, rewards and environment times.

VALUES = 1000  # recorded values kept for a law, as quantiles
PAYLOADS = 2000  # rollouts whose prompts and replies are measured
SETTLING = 3  # steps that compile or wait for the first weights

Row = Mapping[str, Any]


def calibrated(run_dir: Path) -> Cluster:
    """The cluster on which the run in `run_dir` was recorded. ConfigError if it has too few records."""
    run = record.load(run_dir)
    samplers = [row for row in run.rows if str(row.get("role")).startswith("sampler")]
    steps = [row for row in run.rows if row.get("kind") == "step"][SETTLING:]
    engine = engine_costs(samplers)
    if not (steps and engine):
        reason = "has too few steps or generations to measure costs"
        raise ConfigError("RUN", str(run_dir), reason, "Calibrate on a run of ten steps or more.")
    return Cluster(
        source=f"measured in the run {run.name}, commit {run.about.get('commit', '')[:12] or 'unknown'}",
        sampler=replace(engine, swap_s=min(_spans(samplers, "weight_swap"), default=0.0)),
        learner=learner_costs([row.get("micro_batches", 1) for row in steps], [row["train_s"] for row in steps]),
        transfer=TransferCosts(
            publish_s=statistics.median(row["publish_s"] for row in steps),
            latency_s=statistics.median(_spans(samplers, "fetch") or [0.0]),
        ),
        workload=workload(run_dir, run.rows),
    )


def engine_costs(rows: Iterable[Row]) -> SamplerCosts | None:
    """Seconds of a decode step and of a prefill, from the counters that samplers report; None if they decoded nothing.

    The split is the least squares over reports, the sum that of the records.
    """
    last: dict[str, np.ndarray] = {}
    found = []
    for row in rows:
        if row.get("kind") == "stats" and "decode_steps" in row:
            now = np.array([row["decode_steps"], row["prefills"], row["step_s"]], float)
            before, last[row["role"]] = last.get(row["role"]), now
            if before is not None and now[0] > before[0]:  # otherwise it is idle, or a new process
                found.append(now - before)
    if not found:
        return None
    counts, seconds = np.array(found)[:, :2], np.array(found)[:, 2]
    step_s, prefill_s = np.linalg.lstsq(counts, seconds, rcond=None)[0]
    if prefill_s < 0 or step_s < 0 or not counts[:, 1].any():
        step_s, prefill_s = seconds.sum() / counts[:, 0].sum(), 0.0
    scale = seconds.sum() / (counts @ (step_s, prefill_s)).sum()
    return SamplerCosts(step_overhead_s=float(step_s * scale), prefill_overhead_s=float(prefill_s * scale))


def learner_costs(micro_batches: Sequence[int], seconds: Sequence[float]) -> LearnerCosts:
    """Overhead and time per micro-batch by least squares; the median as overhead where the numbers do not differ."""
    if len(set(micro_batches)) > 1:
        slope, start = np.polyfit(micro_batches, seconds, 1)
        if slope >= 0 and start >= 0:
            return LearnerCosts(step_overhead_s=float(start), micro_batch_overhead_s=float(slope))
    return LearnerCosts(step_overhead_s=statistics.median(seconds))


def workload(run_dir: Path, rows: Iterable[Row]) -> Workload:
    """Lengths, rewards and environment times as recorded. The environment's: a member's time from its first generation
    to its end, without its generations. The wait for a slot before that is left out: the simulation has its own.
    """
    started: dict[tuple[int, int], float] = {}
    generated: dict[tuple[int, int], float] = {}
    counts: dict[tuple[int, int], int] = {}
    tokens, groups = list[float](), list[int]()
    for row in rows:
        for group, member, t0, t1, count in row["rows"] if row.get("kind") == "members" else ():
            started[group, member] = min(t0, started.get((group, member), t0))
            generated[group, member] = generated.get((group, member), 0.0) + t1 - t0
            counts[group, member] = counts.get((group, member), 0) + 1
            tokens.append(count)
            groups.append(group)
    waits, rewards = [], defaultdict[int, list[float]](list)
    prompts, replies = list[float](), list[float]()
    select = "SELECT group_id, member, ended_unix_s, reward FROM members WHERE state = 'done'"
    address = f"{RunPaths(run_dir).database.absolute().as_uri()}?mode=ro"  # quoted: the path may contain % and #
    with contextlib.closing(sqlite3.connect(address, uri=True)) as db:
        for group, member, ended_s, reward in db.execute(select):
            if reward is not None:
                rewards[group].append(reward)
            if ended_s is not None and (key := (group, member)) in started:
                waits.append(max(0.0, ended_s - started[key] - generated[key]) / counts[key])
        for (body,) in db.execute("SELECT body FROM payloads LIMIT ?", (PAYLOADS,)):
            if isinstance(outcome := wire.decode(body, Member).outcome, Finished):
                given = [float(len(one.tokens)) for one in outcome.segments if not one.loss_mask.any()]
                prompts += given[:1]
                replies += given[1:]
    default = Workload()
    return Workload(
        prompt_tokens=recorded(prompts) if prompts else default.prompt_tokens,
        answer_tokens=recorded(tokens),
        reply_tokens=recorded(replies) if replies else default.reply_tokens,
        env_s=recorded(waits),
        turns=recorded(list(map(float, counts.values()))),
        rewarded=recorded([min(1.0, max(0.0, statistics.fmean(each))) for each in rewards.values()] or [0.5]),
        answers_alike=alike(groups, tokens),
    )


def alike(groups: Sequence[int], values: Sequence[float]) -> float:
    """The correlation between the values of a group, in [0, 1]: that of their normal scores (analysis of variance)."""
    order = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    # Equal values get the score of their middle rank.
    _, which, sizes = np.unique(values, return_inverse=True, return_counts=True)
    rank = np.bincount(which, order) / sizes
    scores = np.array([NORMAL.inv_cdf((float(rank[each]) + 0.5) / len(values)) for each in which])
    _, which, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if len(sizes) < 2 or len(values) == len(sizes) or not scores.std():
        return 0.0
    means = np.bincount(which, scores) / sizes
    within = ((scores - means[which]) ** 2).sum() / (len(values) - len(sizes))
    between = (sizes * (means - scores.mean()) ** 2).sum() / (len(sizes) - 1)
    typical = (len(values) - (sizes**2).sum() / len(values)) / (len(sizes) - 1)
    variance = max(0.0, (between - within) / typical)
    return float(variance / (variance + within))


def recorded(values: Sequence[float]) -> Law:
    """The law of recorded values, of at most `VALUES` quantiles; a constant where they are equal."""
    if len(set(values)) <= 1:
        return Law(mean=values[0] if values else 0.0)
    kept = sorted(values) if len(values) <= VALUES else np.quantile(values, (np.arange(VALUES) + 0.5) / VALUES)
    return Law("recorded", mean=float(np.mean(values)), values=tuple(round(float(value), 6) for value in kept))


def _spans(rows: Iterable[Row], what: str) -> list[float]:
    """Seconds of the spans of this name."""
    return [row["t1"] - row["t0"] for row in rows if row.get("kind") == "span" and row.get("what") == what]
