"""Simulation of a run: the real store, sampler and learner loops in virtual time, and the figures of its steps.

The result is a run folder that `jaxroll report`, `inspect` and `export` read; its run.json has the mark `simulated`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxroll import config as configs
from jaxroll.clock import simulated_unix
from jaxroll.config import Config
from jaxroll.config.derived import MODES, learner_samplers, own_samplers, sampler_names
from jaxroll.errors import ConfigError, InfraError
from jaxroll.metrics import JsonlTracker
from jaxroll.policy.routing import LEARNER
from jaxroll.records import Version, VersionRef
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles.sampler import SamplerLoops
from jaxroll.run_paths import RunPaths
from jaxroll.sim import costs
from jaxroll.sim import network as virtual_time
from jaxroll.sim.costs import Cluster, RoleFailure, TransferCosts, Workload
from jaxroll.sim.devices import ENV, SimulatedEngine, SimulatedTrainer, chance
from jaxroll.sim.network import Links, Network
from jaxroll.sim.world import Feed, MemoryPublisher, World

EPOCH_S = 1.767e9  # of simulated records (December 2025): the same in every simulation
SETTLING = 0.1  # share of the steps that the figures leave out at the start
POLLS = 50  # looks at the devices in a step of the learner
LIMIT_S = 365 * 86400.0
STARTED_S, REPORT_EVERY_S = 2.0, 5.0  # the store counts a sampler that has started; of the real clock

Figures = dict[str, Any]


class SimulatedPool(ScoringPool):
    """The scoring pool of a simulated role, which tells its environments the workload.

    Each episode has random numbers of its own: members of a group have equal tasks and seeds.
    """

    def __init__(self, workload: Workload, config: Config, role: str) -> None:
        super().__init__(1)
        self.workload, self.config, self._role = workload, config, role
        self._episodes = Counter[int]()  # begun here, by prompt

    def episode(self, index: int) -> random.Random:
        """The random numbers of the next episode of this prompt."""
        self._episodes[index] += 1
        return chance("episode", self.config, self._role, index, self._episodes[index])


class SimulatedPublisher(MemoryPublisher):
    """Weights that can be fetched `publish_s` after the step."""

    def __init__(self, cluster: Cluster, links: Links) -> None:
        self._publish_s, self._links = cluster.transfer.publish_s, links

    @property
    def sent_bytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes that the learner has sent."""
        return int(self._links.sent.get(LEARNER, 0))

    async def finish(self, version: Version, started: Version) -> VersionRef:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The weights, once they can be fetched."""
        await asyncio.sleep(self._publish_s)
        return self.publish(started, None)


class SimulatedRun(World):
    """A run on a simulated cluster. Use it as an asynchronous context manager."""

    def __init__(self, config: Config, cluster: Cluster, run_dir: Path, metrics: Any = None) -> None:
        self._cluster = cluster
        network = Network(cluster.rpc_s, cluster.rpc_bytes_per_s)
        super().__init__(config, run_dir, lambda: Feed(ENV, text=self._question), metrics, network)
        self.links = Links(cluster.transfer)
        self.engines: list[SimulatedEngine] = []
        self._starting = set[str]()  # samplers that had left and start again

    def _question(self, index: int) -> str:
        drawn = self._cluster.workload.prompt_tokens.draw(chance("prompt", self.config, index))
        return "a" * max(1, round(drawn))

    def sampler(self, index: int) -> SimulatedEngine:
        """Start a sampler; its engine."""
        role = f"sampler-{index}"
        self.engines.append(engine := self._make_engine(role))
        pool = SimulatedPool(self._cluster.workload, self.config, role)
        self.start_engine(role, engine, lambda session: SamplerLoops(session).run(), pool)
        return engine

    def _make_engine(self, role: str) -> SimulatedEngine:
        links = Links(TransferCosts()) if role in learner_samplers(self.config) else self.links
        return SimulatedEngine(self._cluster, self.config, role, links)

    def learner(self) -> asyncio.Future[int]:
        """Start the learner; the future is its exit code."""
        schedule, size = self.config.schedule, self._cluster.workload
        tokens = schedule.groups_per_step * schedule.group_size * (size.prompt_tokens.mean + size.answer_tokens.mean)
        poll_s = max(self._cluster.learner.train_s(int(tokens), 1) / POLLS, 0.005)
        publisher = SimulatedPublisher(self._cluster, self.links)
        return self.start_learner(SimulatedTrainer(self._cluster, self.config), publisher, poll_s)

    async def train(self, report: Callable[[str], None] | None = None) -> None:
        """Run to the end of the schedule. InfraError if a role ends before."""
        reported_s = time.monotonic()
        for index in range(self.config.sampler.count):
            self.sampler(index)
        self._training = self.learner()
        failing = [asyncio.ensure_future(self._fail(failure)) for failure in self._cluster.failures]
        while not self._training.done() or self._training.cancelled():
            ended = [job for job in (*self.jobs(), *failing) if job.done() and not job.cancelled() and job.exception()]
            if ended:
                raise InfraError(f"a simulated role failed: {ended[0].exception()}") from ended[0].exception()
            if report is not None and time.monotonic() - reported_s > REPORT_EVERY_S:
                reported_s = time.monotonic()
                report(
                    f"simulated {asyncio.get_running_loop().time():,.0f} s: step "
                    f"{self.store.keeper.state.acked:,} of {self.store.keeper.settings.steps:,}"
                )
            self._start_missing(failing)
            if not self._training.cancelled():
                await asyncio.wait([self._training], timeout=10.0)
            else:
                await asyncio.sleep(1.0)  # it starts again
        for job in failing:
            job.cancel()
        if code := self._training.result():
            raise InfraError(f"the simulated learner ended with exit code {code}")

    def _start_missing(self, starting: list[asyncio.Task[None]]) -> None:
        """Start samplers again that had left, as many as the run asks for, as a supervisor does."""
        asked = self.store.fleet.missing - len(self._starting) if self.store.fleet else 0
        names = [name for name in sampler_names(self.config) if self.has_left(name) and name not in self._starting]
        for name in names[: max(0, asked)]:
            self._starting.add(name)
            starting.append(asyncio.ensure_future(self._start_again(name)))

    async def _start_again(self, name: str) -> None:
        await asyncio.sleep(self._cluster.start_s)
        self.sampler(int(name.rpartition("-")[2]))
        await asyncio.sleep(STARTED_S)
        self._starting.remove(name)

    async def _fail(self, failure: RoleFailure) -> None:
        await asyncio.sleep(failure.at_s)
        if self.has_left(failure.role):
            return
        with contextlib.suppress(KeyError):  # it is down already
            await self.kill(failure.role)
            self.links.lose(failure.role)
            await asyncio.sleep(failure.down_s)
            if failure.role == "learner":
                self._training = self.learner()
            else:
                self.sampler(int(failure.role.rpartition("-")[2]))

    async def close(self) -> None:
        """End the engines."""
        for engine in self.engines:
            await engine.close()


def simulate(
    config: Config,
    cluster: Cluster,
    run_dir: Path,
    *,
    keep: bool = True,
    report: Callable[[str], None] | None = None,
) -> Figures:
    """The figures of a simulated run of `config` on `cluster` (see `figures` and `simulated_rows`)."""
    return figures(simulated_rows(config, cluster, run_dir, keep=keep, report=report), config, cluster)


def simulated_rows(
    config: Config,
    cluster: Cluster,
    run_dir: Path,
    *,
    keep: bool = True,
    report: Callable[[str], None] | None = None,
) -> list[Mapping[str, Any]]:
    """The metric rows of a simulated run of `config` on `cluster`.

    With `keep`, log and rows are written into `run_dir`. `report` gets progress. InfraError if the run cannot end.
    """
    config = costs.checked(config)
    _check_roles(config, cluster)
    tracker = JsonlTracker(RunPaths(run_dir).metrics) if keep else None

    async def job() -> list[Mapping[str, Any]]:
        loop = asyncio.get_running_loop()
        with simulated_unix(lambda: EPOCH_S + loop.time()):
            run = SimulatedRun(config, cluster, run_dir, tracker)
            async with run:
                try:
                    await run.train(report)
                    await run.settled()
                    if keep:
                        run.store.save(RunPaths(run_dir).database)
                    return list(run.store.metrics.written())
                finally:
                    await run.close()

    try:
        with _printing(run_dir if keep else None):
            return virtual_time.run(job(), LIMIT_S)
    except (virtual_time.Stuck, TimeoutError) as error:
        raise InfraError(f"the simulated run cannot end: {error}") from error
    finally:
        if tracker is not None:
            tracker.close()


def _check_roles(config: Config, cluster: Cluster) -> None:
    """Raise ConfigError for a run without samplers, a failure of an unknown role, and samplers that cannot help."""
    if not config.sampler.count:
        raise ConfigError("sampler.count", 0, "no sampler joins a simulated run", "Set it to 1 or more.")
    roles = ["learner", *sampler_names(config)]
    for failure in cluster.failures:
        if failure.role not in roles:
            raise ConfigError("failures.role", failure.role, "the run has no such role", f"Known: {', '.join(roles)}.")
    if (seeding := learner_samplers(config)) and {"learner", *seeding} & {failure.role for failure in cluster.failures}:
        reason = "a failure of the learner's devices is not simulated with samplers on them"
        raise ConfigError("placement.learner_samplers", len(seeding), reason, "Set it to 0, or leave the failure out.")


@contextlib.contextmanager
def _printing(run_dir: Path | None) -> Iterator[None]:
    """Write what roles print into the run's log, or nowhere."""
    if run_dir is None:
        with contextlib.redirect_stdout(None):
            yield
        return
    path = RunPaths(run_dir).log_of("simulation")
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        yield


def figures(rows: Sequence[Mapping[str, Any]], config: Config, cluster: Cluster | None = None) -> Figures:
    """The figures of a run, real or simulated, after its first steps.

    `step_s` (between two ends of steps), `samples_per_s`, `tokens_per_s` (trained), `age_mean`, `age_max`, `age_hist`
    (tokens by age), `learner_busy` and `learner_wait` (shares of the time), `sampler_busy` (share of the time in which
    engines work, in the mean), and with `cluster` the price of a million trained tokens and `samplers_paid`, the mean
    number of samplers that had not left.
    """
    last = {row["step"]: row for row in rows if row.get("kind") == "step"}
    steps = [last[step] for step in sorted(last)]
    skipped = max(1, math.ceil(SETTLING * len(steps)))
    start, kept = steps[min(skipped, len(steps)) - 1]["t1"], steps[skipped:]
    if not kept:
        raise InfraError(f"figures need more steps than {len(steps)}")
    end = kept[-1]["t1"]
    elapsed_s = end - start
    ages, times = Counter[str](), [row["t1"] for row in kept]
    for row in kept:
        ages.update(row["age_hist"])
    tokens = sum(ages.values())
    busy_s = sum(
        max(0.0, min(row["t1"], end) - max(row["t0"], start))
        for row in rows
        if row.get("kind") == "span" and row.get("what") == "decode" and str(row.get("role")).startswith("sampler")
    )
    found = {
        "steps": len(kept),
        "seconds": elapsed_s,
        "step_s": elapsed_s / len(kept),
        "step_s_median": statistics.median(b - a for a, b in zip([start, *times], times, strict=False)),
        "samples_per_s": sum(row["samples"] for row in kept) / elapsed_s,
        "tokens_per_s": tokens / elapsed_s,
        "age_mean": sum(int(age) * count for age, count in ages.items()) / max(tokens, 1),
        "age_max": max((int(age) for age in ages), default=0),
        "age_hist": dict(sorted(ages.items())),
        "learner_busy": sum(row["train_s"] for row in kept) / elapsed_s,
        "learner_wait": sum(row["wait_s"] for row in kept) / elapsed_s,
        "sampler_busy": busy_s / elapsed_s / max(1, len(sampler_names(config))),
    }
    if cluster is not None:
        events = [row for row in rows if row.get("kind") == "event" and row.get("what") in ("join", "leave")]
        paid = [1 - _away_s(events, name, start, end) / elapsed_s for name in sampler_names(config)]
        own = paid[: len(own_samplers(config))]  # the others are on the learner's devices
        prices = [cluster.sampler_costs(index).price_per_hour * share for index, share in enumerate(own)]
        found["samplers_paid"] = sum(own)
        per_s = (sum(prices) + cluster.learner.price_per_hour) / 3600
        found["cost_per_million_tokens"] = per_s / found["tokens_per_s"] * 1e6 if found["tokens_per_s"] else math.inf
    return found


def _away_s(events: Sequence[Mapping[str, Any]], name: str, start: float, end: float) -> float:
    """The seconds between two times in which a sampler that left, and was not lost, had not joined again."""
    away_s, left_t = 0.0, math.inf
    for row in events:
        if row.get("role") == name and row["what"] == "join":
            away_s, left_t = away_s + max(0.0, min(row["t"], end) - max(left_t, start)), math.inf
        elif row.get("role") == name and str(row.get("text")).startswith("left"):
            left_t = row["t"]
    return away_s + max(0.0, end - max(left_t, start))


# --- Schedules and sweeps

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "sync": {"alpha": 0.0},
    "one_step": {"mode": "one_step", **MODES["one_step"]},  # α = 1, and a batch is sampled wholly at one version
    "bounded": {},  # the config's α; a generation continues under new weights
    "pure": {"weight_swap": "trajectory"},  # the config's α; every member is of one version, in all its turns
    "interval": {"mode": "interval", **MODES["interval"]},  # no member begins before the batch before is finished
}
STREAMED = ("stream", "partial_overlap")  # `sync`, where the learner computes each group as soon as it is finished
FLUSH_TOKENS = 256  # of `partial_overlap`, if the config has none: rollouts go on elsewhere in every step
SCHEDULE = "schedule"  # the key of a sweep over `SCHEDULES` and `STREAMED`


def scheduled(config: Config, name: str) -> Config:
    """`config` under the schedule of this name. ConfigError for an unknown name."""
    if name not in SCHEDULES:
        raise ConfigError("--sweep", name, "no schedule has this name", f"Known: {', '.join((*SCHEDULES, *STREAMED))}.")
    return replace(config, schedule=replace(config.schedule, **({"mode": "async"} | dict(SCHEDULES[name]))))


def scheduled_on(config: Config, cluster: Cluster, name: str) -> tuple[Config, Cluster]:
    """Config and cluster under the schedule of this name, which may be one of `STREAMED`. ConfigError if it cannot be.

    Samplers on the learner's devices belong to `partial_overlap` only: others have so many fewer.
    """
    return _streamed(scheduled(config, "sync" if name in STREAMED else name), cluster, name)


def _streamed(config: Config, cluster: Cluster, name: str) -> tuple[Config, Cluster]:
    sampler, seeding = config.sampler, config.placement.learner_samplers or cluster.learner.samplers
    if name in STREAMED:
        config = replace(config, learner=replace(config.learner, streaming=True))
    if name == "partial_overlap":
        if not seeding:
            remedy = "Set their number in [learner] of the cluster file, or placement.learner_samplers."
            raise ConfigError("learner.samplers", 0, "no sampler fits on the learner's devices", remedy)
        sampler = replace(sampler, flush_tokens=sampler.flush_tokens or FLUSH_TOKENS)
    elif seeding:
        sampler, seeding = replace(sampler, count=sampler.count - seeding), 0
    placement = replace(config.placement, learner_samplers=seeding)
    return replace(config, sampler=sampler, placement=placement), cluster


def swept(config: Config, cluster: Cluster, sweeps: Sequence[str]) -> Iterator[tuple[dict[str, str], Config, Cluster]]:
    """Config and cluster of all combinations of the sweeps `KEY=VALUE,VALUE,…`, each with its values.

    KEY is a key of the config, or `schedule`. ConfigError for what cannot be parsed, before the first is returned.
    """
    lists = []
    for text in sweeps:
        key, equals, values = text.partition("=")
        if not (key and equals and values):
            raise ConfigError("--sweep", text, "not KEY=VALUE,VALUE", "As in --sweep=schedule.alpha=0,1,2.")
        lists.append([(key, value) for value in values.split(",")])
    found = []
    for chosen in itertools.product(*lists):
        values, one = dict(chosen), config
        if (name := values.get(SCHEDULE)) is not None:
            fixed = SCHEDULES.get(base := "sync" if name in STREAMED else name, {})
            for key in {f"schedule.{key}" for key in ("mode", *fixed)} & values.keys():
                raise ConfigError("--sweep", key, f"schedule={name} fixes it", "Sweep one of the two.")
            one = scheduled(config, base)
        changes = [f"{key}={value}" for key, value in chosen if key != SCHEDULE]
        one = configs.parse(configs.override(configs.to_dict(one), changes), changes)
        found.append((values, *((one, cluster) if name is None else _streamed(one, cluster, name))))
    yield from found
