"""Fault 14: each misbehavior of an environment costs its own member and is recorded with its cause.

The store, the roles' loop and the episodes are real; only the model is scripted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import io
import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll import metrics
from jaxroll.clock import unix_s
from jaxroll.config import Config, EvaluatorConfig, RoleArgs, SamplerConfig, ScheduleConfig, StoreConfig, TaskConfig
from jaxroll.control import cli
from jaxroll.envs import executors, processes
from jaxroll.envs.processes import MOST_LEFT_THREADS
from jaxroll.errors import Closed
from jaxroll.loop_thread import LoopThread, until_one_ends
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Grant, Message, Task, Version, VersionRef, VersionRun
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.roles import session as sessions
from jaxroll.roles.evaluator import EvaluatorLoops
from jaxroll.roles.sampler import Members
from jaxroll.roles.session import episode_counts
from jaxroll.rollout.episode import RolloutManager
from jaxroll.run_paths import RunPaths
from jaxroll.store.client import StoreClient
from jaxroll.store.server.server import serve
from jaxroll.text.tokenizers import CharTokenizer
from tests.harness.envs import misbehaving
from tests.harness.envs.misbehaving import CLOSES, IN_A_PROCESS, MAKES, ON_THE_LOOP, RESETS, RESETS_IN_A_PROCESS, WAYS

pytestmark = pytest.mark.timeout(300)
DEADLINE_S = 240.0
KEPT_IN_A_PROCESS = ("left threads running", "let its process grow by 512 MiB")
NAME = "tests.harness.envs.misbehaving:{}"
TOKENIZER = CharTokenizer("abc")
V0 = Version(0, 0)
Play = Callable[[RoleArgs, asyncio.AbstractEventLoop, dict[str, Any]], Coroutine[Any, Any, None]]


class Model:
    """A model that answers "a" to every prompt."""

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        await asyncio.sleep(0)
        ids = np.array([4, TOKENIZER.eos_id], np.int32)
        return Completion(ids, np.zeros(2, np.float32), (VersionRun(V0, 2),), "stop")


class Feed:
    """A feeder with one prompt for each of `ways`, repeated without end if `endless`."""

    def __init__(self, env: str, ways: list[str], *, endless: bool = False) -> None:
        self._env, self._ways, self._endless, self._at = env, ways, endless, 0

    def restore(self, state: bytes | None) -> None:
        self._at = int(state) if state else 0

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        end = self._at + count if self._endless else min(self._at + count, len(self._ways))
        found = [(self._task(index), str(index + 1).encode()) for index in range(self._at, end)]
        self._at = end
        return found

    def tasks(self) -> list[Task]:
        """All prompts of a feeder that has an end."""
        return [self._task(index) for index in range(len(self._ways))]

    def _task(self, index: int) -> Task:
        way = self._ways[index % len(self._ways)]
        args = json.dumps({"way": way})
        return Task(index, (Message("user", "abc"),), self._env.format(way=way), args, index, f"{index:016x}")


def configured(env: str, groups: int, **store: Any) -> Config:
    """A config with one step of `groups` groups of two members."""
    schedule = ScheduleConfig(steps=1, groups_per_step=max(groups, 1), group_size=2, alpha=0.0)
    kept = {"lease_s": 3.0, "rpc_deadline_s": 2.0, "data_retries": 0, "infra_retries": 0, "dead_limit": 0} | store
    return Config(
        task=TaskConfig(env=env), schedule=schedule, store=StoreConfig(**kept), sampler=SamplerConfig(env_processes=2)
    )


@contextlib.asynccontextmanager
async def store_of(run_dir: Path, config: Config, feed: Feed) -> AsyncIterator[StoreClient]:
    """A store in this process whose learner has published the first weights."""
    configs_file = {"config": configs.to_dict(config), "created": 0.0, "words": []}
    (run_dir / "run.json").write_text(json.dumps(configs_file))
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    job = asyncio.ensure_future(serve(config, run_dir, feed, host="127.0.0.1", port=0, ready=address.set_result))
    await asyncio.wait([address, job], return_when=asyncio.FIRST_COMPLETED)
    if job.done():
        job.result()
    learner = await StoreClient.connect(
        run_dir / "store.addr", role="learner", name="learner", config_digest=configs.digest(config)
    )
    try:
        version = await learner.begin(None)
        await learner.publish(VersionRef(version, "tcp", "here", "digest"))
        yield learner
    finally:
        await learner.aclose()
        job.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await job


class Evaluating(sessions.Session):
    """An evaluator's session with the scripted model, whose weights need no fetch."""

    def __init__(self, args: RoleArgs, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__("evaluator", args, ScoringPool(1), loop)
        self.parts: Any = SimpleNamespace(tokenizer=TOKENIZER, follower=SimpleNamespace(relay=None, load=self._fetch))

    async def _fetch(self, ref: VersionRef, relays: Any) -> None:
        pass

    def manager(self, sampling: SamplingParams) -> RolloutManager:
        return self.rollout_manager(Model(), TOKENIZER, sampling)


async def evaluate(
    args: RoleArgs, loop: asyncio.AbstractEventLoop, seen: dict[str, Any], sets: dict[str, list[Task]]
) -> None:
    """Run an evaluator of `sets` until its first row is recorded."""
    session: Any = Evaluating(args, loop)

    async def body() -> None:
        evaluating = asyncio.ensure_future(EvaluatorLoops(session, sets).run())
        while not evaluating.done() and not evaluations(args.run_dir):
            await asyncio.sleep(0.05)
        if evaluating.done():
            await evaluating
        evaluating.cancel()

    await session.run(lambda: asyncio.sleep(0), body)


def evaluations(run_dir: Path) -> list[metrics.Row]:
    path = RunPaths(run_dir).metrics
    return [row for row in metrics.read(path) if row["kind"] == "eval"] if path.exists() else []


async def play(args: RoleArgs, loop: asyncio.AbstractEventLoop, seen: dict[str, Any]) -> None:
    """Run a sampler's tasks without an engine."""
    session = sessions.Session("sampler-0", args, ScoringPool(1), loop)

    async def body() -> None:
        manager = session.rollout_manager(Model(), TOKENIZER, SamplingParams(4, stop_tokens=(TOKENIZER.eos_id,)))

        async def version() -> Version:
            return V0

        def begin(grant: Grant):
            return lambda member, attempt, transcript: manager.run_member(grant, member, attempt, transcript=transcript)

        work = Members(session, 64, version, begin)
        try:
            await until_one_ends(work.loops())
        finally:
            await work.give_back()
            seen.update(work.counts() | episode_counts(manager, session.executors))
            session.add_row({"t": unix_s(), "role": session.role, "kind": "stats", **seen})

    await session.run(lambda: asyncio.sleep(0), body)


def run(
    run_dir: Path,
    config: Config,
    feed: Feed,
    over: Callable[[dict[str, Any]], bool],
    role: Play = play,
    limit_s: float = DEADLINE_S,
) -> tuple[dict, dict]:
    """The facts of `jaxroll inspect --json` and the sampler's counts once `over` is true of the store's status."""
    store_thread, role_thread = LoopThread("store"), LoopThread("role", hand_over_s=0.4)
    seen: dict[str, Any] = {}
    args = RoleArgs(config, run_dir, None, 0)

    async def whole() -> None:
        async with store_of(run_dir, config, feed) as learner, asyncio.timeout(limit_s):
            playing = role_thread.start(role(args, role_thread.loop, seen))
            while not over(await learner.status()):
                await asyncio.sleep(0.05)
                if playing.done():
                    playing.result()
            with contextlib.suppress(Closed):
                await learner.close_run("the test is over")
            await asyncio.wrap_future(playing)

    try:
        store_thread.start(whole()).result(limit_s)
    finally:
        for thread in (role_thread, store_thread):
            thread.close()
            thread.loop.close()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["inspect", str(run_dir), "--json"]) == 0
    return json.loads(out.getvalue()), seen


def settled(groups: int) -> Callable[[dict[str, Any]], bool]:
    """True if every group is complete or dead."""
    return lambda status: status["counts"]["READY"] + status["counts"]["DEAD"] == groups


def assert_recorded_by_cause(found: dict, ways: list[str], known: Mapping[str, tuple[Any, str]] = WAYS) -> None:
    causes = found["failures"]["causes"]
    for way in ways:
        complaint = known.get(way, (None, ""))[1]
        if complaint:
            rows = [row for row in causes if re.sub(r"\d+", "N", complaint) in row["cause"]]
            assert rows and all(row["failures"] >= 1 and row["groups"] >= 1 for row in rows), (way, causes)
    assert sum(row["failures"] for row in causes) == sum(found["failures"]["by_kind"].values())


def states(found: dict) -> Counter[str]:
    return Counter({row["state"]: row["groups"] for row in found["groups"]})


def test_each_misbehaviour_costs_its_member_and_is_counted_by_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the questions are ordinary, and all of these are answered."""
    monkeypatch.setattr(executors, "CANCEL_GRACE_S", 0.5)
    monkeypatch.setattr(executors, "CLOSE_LIMIT_S", 1.0)
    ways = [*ON_THE_LOOP, *CLOSES]
    feed = Feed(NAME.format("misbehaving"), [way for bad in ways for way in (bad, "fair")])
    groups = 2 * len(ways)
    failing = [way for way in ON_THE_LOOP if WAYS[way][1]]
    config = configured(NAME.format("misbehaving"), groups, lease_s=30.0)
    found, seen = run(tmp_path, config, feed, settled(groups))
    assert states(found) == {"READY": groups - len(failing), "DEAD": len(failing)}
    assert_recorded_by_cause(found, failing)
    assert found["conservation_residual"] == 0
    assert seen["puts_refused"] == seen["members_lost"] == 0
    assert seen["failed"]["INFRA"] >= 1 and seen["failed"]["DATA"] >= len(failing) - 1
    closes = {cause: times for cause, times in found["env_faults"].items() if cause.startswith("close: ")}
    assert len(closes) == len(CLOSES) and set(closes.values()) == {2}, found["env_faults"]
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"2\s+close: .*SystemExit", shown) and re.search(r"2\s+close: .*longer than", shown), shown
    assert seen["env_calls_abandoned"] >= 1
    assert sum(times for cause, times in found["env_faults"].items() if "blocked the event loop at" in cause) >= 6


def test_each_misbehaviour_in_a_reset_costs_its_member_and_is_counted_by_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run of its own: `inspect` shows the 40 most frequent causes."""
    monkeypatch.setattr(executors, "CANCEL_GRACE_S", 0.5)
    feed = Feed(NAME.format("misbehaving"), [way for bad in RESETS for way in (bad, "fair")])
    groups = 2 * len(RESETS)
    config = configured(NAME.format("misbehaving"), groups, lease_s=30.0)
    found, seen = run(tmp_path, config, feed, settled(groups))
    assert states(found) == {"READY": len(RESETS), "DEAD": len(RESETS)}
    assert_recorded_by_cause(found, list(RESETS), RESETS)
    assert found["conservation_residual"] == 0 and seen["puts_refused"] == seen["members_lost"] == 0


def test_each_misbehaviour_of_a_constructor_costs_its_member_and_is_counted_by_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that returns after its limit is closed."""
    monkeypatch.setattr(executors, "CANCEL_GRACE_S", 0.1)
    monkeypatch.setattr(executors, "MAKE_LIMIT_S", misbehaving.STEP_LIMIT_S)
    monkeypatch.setattr(misbehaving, "LATE", [])
    name, ways = NAME.format("making_{way}"), [way for bad in MAKES for way in (bad, "fair")]
    config = configured(name.format(way="fair"), len(ways), lease_s=30.0)

    def over(status: dict[str, Any]) -> bool:
        return settled(len(ways))(status) and len(misbehaving.LATE) == 2

    found, seen = run(tmp_path, config, Feed(name, ways), over)
    assert states(found) == {"READY": len(MAKES), "DEAD": len(MAKES)}
    assert_recorded_by_cause(found, list(MAKES), MAKES)
    assert found["conservation_residual"] == 0 and seen["puts_refused"] == seen["members_lost"] == 0
    assert misbehaving.LATE == ["is_late"] * 2 and seen["env_calls_abandoned"] == 2


def test_failures_in_an_evaluation_are_counted_by_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluator's environments misbehave, in two sets of items. The evaluation counts the other items."""
    monkeypatch.setattr(executors, "CLOSE_LIMIT_S", 1.0)
    failing = ["raises", "exit", "part none", "infra"]
    name = NAME.format("misbehaving")
    sets = {"heldout": Feed(name, [*failing, "fair", *CLOSES]).tasks(), "other": Feed(name, ["raises"]).tasks()}

    role = functools.partial(evaluate, sets=sets)
    found, _ = run(tmp_path, configured(name, 0), Feed(name, []), lambda _: bool(evaluations(tmp_path)), role)
    (row,) = evaluations(tmp_path)
    assert (row["correct"], row["n"], row["sets"]["other"]["n"]) == ("----11111", 5, 0)
    causes = found["evaluation_failures"]
    assert [(cause["failures"], cause["evaluations"]) for cause in causes] == [(2, 1), (1, 1), (1, 1), (1, 1)]
    for way in failing:
        (row,) = [cause for cause in causes if WAYS[way][1] in cause["cause"]]
        assert row["kind"] == ("INFRA" if way == "infra" else "DATA")
    assert found["failures"]["causes"] == [], "the failures of members"
    assert len(found["env_faults"]) == len(CLOSES) and set(found["env_faults"].values()) == {1}
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"== failures in evaluations by cause\n.*\n +2 +1 +DATA +.* ago +.*of mine", shown)
    assert re.search(r"1\s+close: .*SystemExit", shown)


def test_an_evaluation_can_have_several_answers_to_each_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is drawn with keys of its own, at the temperature of the evaluator."""
    name, asked = NAME.format("misbehaving"), list[tuple[int, int, float]]()
    generate = Model.generate

    async def noted(self: Model, prompt: Any, key: GenerationKey, params: SamplingParams, **kind: Any) -> Completion:
        asked.append((key.group, key.member, params.temperature))
        return await generate(self, prompt, key, params, **kind)

    monkeypatch.setattr(Model, "generate", noted)
    sets = {"heldout": Feed(name, ["fair", "raises"]).tasks(), "other": Feed(name, ["fair"]).tasks()}
    own = EvaluatorConfig(samples=3, temperature=0.7, sets={"other": {"samples": 2}})
    config = dataclasses.replace(configured(name, 0), evaluator=own)
    role = functools.partial(evaluate, sets=sets)
    run(tmp_path, config, Feed(name, []), lambda _: bool(evaluations(tmp_path)), role)
    (row,) = evaluations(tmp_path)
    assert (row["correct"], row["n"], row["samples"], row["solved"]) == ("111---", 1, 3, 1.0)
    assert row["sets"]["other"] == {"accuracy": 1.0, "n": 1, "samples": 2, "solved": 1.0, "correct": "11"}
    assert sum(row["failed_by_cause"]["DATA"].values()) == 3
    assert len(asked) == len(set(asked)) and {temperature for *_, temperature in asked} == {0.7}
    assert {(group, member) for group, member, _ in asked} >= {(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)}


def test_threads_that_environments_leave_in_an_evaluation_are_counted_in_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the last evaluation, after which none could count them."""
    monkeypatch.setattr(executors, "LEFT_S", 0.3)
    name = NAME.format("leaving")
    role = functools.partial(evaluate, sets={"heldout": Feed(name, ["thread", "fair", "thread"]).tasks()})
    try:
        found, _ = run(tmp_path, configured(name, 0), Feed(name, []), lambda _: bool(evaluations(tmp_path)), role)
    finally:
        misbehaving.RELEASED.set()
        misbehaving.RELEASED = threading.Event()
    (row,) = evaluations(tmp_path)
    assert row["correct"] == "111" and found["env_faults"] == {f"{name} left the thread kept-N running": 2}


@pytest.mark.process
def test_each_misbehaviour_in_a_process_costs_its_member_and_is_counted_by_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose close fails costs no member, but its process, and is counted as well."""
    monkeypatch.setattr(processes, "_CLOSE_LIMIT_S", 1.0)
    name, failing = NAME.format("misbehaving_in_process"), [*IN_A_PROCESS, *RESETS_IN_A_PROCESS]
    ways = [*failing, *CLOSES]
    feed = Feed(name, [way for bad in ways for way in (bad, "fair")])
    groups = 2 * len(ways)
    found, seen = run(tmp_path, configured(name, groups), feed, settled(groups))
    assert states(found) == {"READY": groups - len(failing), "DEAD": len(failing)}
    assert_recorded_by_cause(found, failing, WAYS | RESETS)
    assert seen["env_processes_replaced"] >= 1 and seen["members_lost"] == 0
    closes = {cause: times for cause, times in found["env_faults"].items() if cause.startswith("close: ")}
    assert len(closes) == len(CLOSES) and set(closes.values()) == {2}, found["env_faults"]


@pytest.mark.parametrize("name", ["leaving", "leaving_in_thread"])
def test_threads_that_an_environment_leaves_are_counted_and_its_members_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(executors, "LEFT_S", 0.0)
    try:
        feed = Feed(NAME.format(name), ["fair", "thread", "fair"])
        found, seen = run(tmp_path, configured(NAME.format(name), 3), feed, settled(3))
    finally:
        misbehaving.RELEASED.set()
        misbehaving.RELEASED = threading.Event()
    assert states(found) == {"READY": 3}, found["failures"]
    assert found["env_faults"].get(f"{NAME.format(name)} left the thread kept-N running") == 2, found["env_faults"]
    assert seen["failed"] == {} and seen["resident_bytes"] > 0


@pytest.mark.process
def test_a_process_in_which_an_environment_keeps_threads_or_memory_is_replaced(tmp_path: Path) -> None:
    """The first episode of a process does not count: libraries keep what they need."""
    name = NAME.format("leaving_in_process")
    ways = ["fair", *["thread"] * MOST_LEFT_THREADS, "fair", "memory"]
    config = dataclasses.replace(configured(name, len(ways)), sampler=SamplerConfig(env_processes=1))
    found, seen = run(tmp_path, config, Feed(name, ways), settled(len(ways)))
    assert states(found) == {"READY": len(ways)}
    threads, memory = (found["env_faults"][f"{name} {what}"] for what in KEPT_IN_A_PROCESS)
    assert threads >= MOST_LEFT_THREADS and memory >= 1
    assert seen["env_processes_replaced"] >= 2


@pytest.mark.parametrize(
    "way",
    [
        "raises",
        "exit",
        "part none",
        "infra",
        *(pytest.param(way, marks=pytest.mark.soak) for way in ("hangs", "blocks the loop")),
    ],
)
def test_a_run_whose_environment_always_fails_ends_naming_it(tmp_path: Path, way: str) -> None:
    config = configured(NAME.format("misbehaving"), 2, data_retries=2, dead_limit=10)
    feed = Feed(NAME.format("misbehaving"), [way], endless=True)
    found, _ = run(tmp_path, config, feed, lambda status: bool(status["closed"]))
    assert NAME.format("misbehaving") in found["closed"] and WAYS[way][1] in found["closed"]
    assert 10 <= states(found)["DEAD"] <= 40, "the run used up too few or too many prompts"


@pytest.mark.parametrize("way", ["exits", pytest.param("is_late", marks=pytest.mark.soak)])
def test_a_run_whose_environment_cannot_be_made_ends_naming_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(executors, "MAKE_LIMIT_S", misbehaving.STEP_LIMIT_S)
    name = NAME.format(f"making_{way}")
    config = configured(name, 2, data_retries=2, dead_limit=10)
    found, _ = run(tmp_path, config, Feed(name, [way], endless=True), lambda status: bool(status["closed"]))
    assert name in found["closed"] and MAKES[way][1] in found["closed"], found["closed"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("way", "died"), [("raises", True), ("infra", False)])
def test_a_run_with_the_default_retries_ends_too(tmp_path: Path, way: str, died: bool) -> None:
    """A member rests longer after each INFRA failure, and so does its sampler, so that an outage costs few prompts.

    So the run ends by `store.stall_abort_s` before so many have died; its last words name the environment all the same.
    """
    defaults, groups, stalled_s = StoreConfig(), 8, 120.0
    limits = {name: getattr(defaults, name) for name in ("data_retries", "infra_retries", "dead_limit")}
    config = configured(NAME.format("misbehaving"), groups, **limits, stall_abort_s=stalled_s)
    began_s = time.monotonic()
    feed = Feed(NAME.format("misbehaving"), [way], endless=True)
    found, _ = run(tmp_path, config, feed, lambda status: bool(status["closed"]), limit_s=400.0)
    assert NAME.format("misbehaving") in found["closed"] and WAYS[way][1] in found["closed"], found["closed"]
    dead = states(found).get("DEAD", 0)
    assert dead >= defaults.dead_limit if died else dead < defaults.dead_limit
    assert time.monotonic() - began_s < (stalled_s if died else 3 * stalled_s)
