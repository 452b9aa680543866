"""Check of a user's environment and reward against their contract: `jaxroll env check`, and `check_environment`.

The environment is played by the same code as in a run (`RolloutManager`, `Executors`, the scoring pool, a role's event
loop), with a model that answers from a script. A violation is a behavior that would cost a run members, time or
memory, or make the members of a group incomparable.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.config.parsing import task_parts
from jaxroll.data.tasks import Candidates
from jaxroll.envs import registry
from jaxroll.envs.executors import EnvironmentCalls, Executors
from jaxroll.errors import ConfigError, DataError, InfraError, described
from jaxroll.loop_thread import LoopThread
from jaxroll.protocols import Tokenizer
from jaxroll.records import Failed, Finished, Grant, Message, Outcome, Task
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.rollout.episode import RolloutManager, bounds_of, sampling_params
from jaxroll.testing.observed import (
    ByteTokenizer,
    HeldResources,
    Observed,
    ScriptedModel,
    SlowCallbacks,
    remedy,
    scripts,
)

TASKS, EPISODES = 4, 32
BLOCKED_S, BLOCKED_TIMES = 0.25, 2  # more than once, because a busy machine sometimes delays a single callback
SLOW_CLOSE_S = 1.0
AT_ONCE = 8
LEAK_EPISODES, LEAK_LEAST, LEAK_BUDGET_S = 24, 8, 20.0  # per window; a leak must grow in both of two windows
LEAKED_BYTES = 160 << 10  # of memory per episode
CANCEL_WAIT_S = 2.0
LIMIT_S = 600.0
_NUMBER = re.compile(r"\d+")


class ContractViolation(msgspec.Struct, frozen=True):
    """A violation of the contract: what happened, where it happened first, and what to do."""

    what: str
    where: str
    do: str
    times: int = 1


class CheckResult(msgspec.Struct, frozen=True):
    """The result of a check: the violations, and the number of episodes."""

    environment: str
    episodes: int
    violations: tuple[ContractViolation, ...]


def check_environment(
    name: str, config: str | Path | Config | None = None, *, tasks: Sequence[Task] = (), episodes: int = EPISODES
) -> list[ContractViolation]:
    """The violations of the environment `name` (`module:name`), as in `assert check_environment(…) == []`.

    The tasks are those of `config` (a config file, or a Config), or `tasks`; each is played with several scripts.
    ConfigError when the environment cannot be loaded or there are no tasks.
    """
    return list(report(name, config, tasks=tasks, episodes=episodes).violations)


def report(
    name: str,
    config: str | Path | Config | None = None,
    *,
    overrides: Sequence[str] = (),
    tasks: Sequence[Task] = (),
    episodes: int = EPISODES,
) -> CheckResult:
    """As `check_environment`, with the number of episodes. `overrides` are `key=value` overrides of the config."""
    registry.factory(name)
    settings = settings_for(name, config, overrides)
    plays = _plays(settings, tasks, episodes, in_bytes=config is None)
    library = () if tasks or settings.task.source != "reasoning_gym" else ("reasoning_gym",)
    programs = registry.runs_programs(name)
    pool = ScoringPool(1, libraries=library, modules=registry.scorer_modules(name), programs=programs)
    pool.start()
    thread = LoopThread("env check", blocked_s=LIMIT_S, hand_over_s=math.inf)
    check = _Check(name, settings, plays, pool)
    try:
        _wait_for_scorers(pool, thread, name)
        thread.start(check.run()).result(LIMIT_S)
        check.add_escapes(thread.escapes)
    except TimeoutError:
        check.add("the check took too long", name, f"it ends within {LIMIT_S:g} s: let calls take less time")
    except InfraError as error:
        check.add(str(error), name, 'declare place = "thread" or "process", or await')
    finally:
        thread.close()
        pool.close()
    return CheckResult(name, check.episodes, tuple(check.violations.values()))


def text(found: CheckResult) -> str:
    """The report as text for the terminal."""
    head = f"{found.environment}: {found.episodes} episodes, "
    if not found.violations:
        return head + "no violations"
    lines = [head + f"{len(found.violations)} violations"]
    for violation in found.violations:
        times = f" ({violation.times} times)" if violation.times > 1 else ""
        lines += [f"- {violation.what}{times}", f"    where: {violation.where}", f"    do: {violation.do}"]
    return "\n".join(lines)


def _wait_for_scorers(pool: ScoringPool, thread: LoopThread, name: str) -> None:
    """Wait until the pool has loaded the user's module, so that loading does not count towards a step's limit."""
    try:
        thread.start(pool.score('{"scorer": "exact", "answer": "ok"}', "ok")).result(LIMIT_S)
    except InfraError as error:
        reason = f"its scorers cannot be loaded: {error}"
        remedy = "Fix the module, or start the check in a folder from which it can be imported."
        raise ConfigError("task.env", name, reason, remedy) from error


def settings_for(name: str, config: str | Path | Config | None, overrides: Sequence[str]) -> Config:
    """The config with the environment `name`; without one, the default task in full prompts of any length.

    Of a mixture it is the first source with this environment, or else the first.
    """
    if isinstance(config, Config):
        found = config
    elif config is not None:
        found = configs.load(config, overrides)
    else:
        room = ["task.max_prompt_tokens=4096", "sampling.max_tokens=1024", "task.max_episode_tokens=65536"]
        room += ["learner.row_tokens=65536"]  # for any tokenizer
        given = configs.override(configs.to_dict(configs.parse(configs.defaults())), [*room, *overrides])
        found = configs.parse(given)
    parts = task_parts(found.task)
    task = next((part.task for part in parts if part.task.env == name), parts[0].task)
    return dataclasses.replace(found, task=dataclasses.replace(task, env=name))


@dataclasses.dataclass(frozen=True)
class _Play:
    """One episode: its task and the answers, as ids."""

    task: Task
    answers: list[list[int]]
    tokenizer: Tokenizer

    def shown(self, turn: int) -> str:
        """The answer of a turn as text, at most 60 characters."""
        return self.tokenizer.decode(self.answers[min(max(turn, 0), len(self.answers) - 1)])[:60]


def _plays(config: Config, tasks: Sequence[Task], episodes: int, *, in_bytes: bool) -> list[_Play]:
    tokenizer: Tokenizer = ByteTokenizer()
    known: list[tuple[Task, Sequence[Message]]] = [(task, ()) for task in tasks]
    if not known:
        candidates = Candidates(config)
        tokenizer = tokenizer if in_bytes else candidates.tokenizer
        for index in candidates.ranges.train[: 16 * TASKS]:
            with contextlib.suppress(DataError):
                found = candidates.at(index)
                known.append((found.task, found.worked))
            if len(known) == TASKS:
                break
    if not known:
        raise ConfigError("task", config.task.name, "it gives no prompts", "See `jaxroll train` with this config.")
    most = sampling_params(config, tokenizer).max_tokens
    each = [
        [_Play(task, script, tokenizer) for script in scripts(task, worked, tokenizer, most)] for task, worked in known
    ]
    longest = max(map(len, each))
    return [plays[place] for place in range(longest) for plays in each if place < len(plays)][:episodes]


class _Check:
    """One check: plays the environment on one event loop and collects violations."""

    def __init__(self, name: str, config: Config, plays: list[_Play], pool: ScoringPool) -> None:
        self._name, self._config, self._plays, self._pool = name, config, plays, pool
        self.violations: dict[str, ContractViolation] = {}
        self.episodes = 0

    def add(self, what: str, where: str, do: str) -> None:
        """Add a violation, or count a repetition (the same text except for numbers)."""
        key = _NUMBER.sub("N", what)[:200]
        known = self.violations.get(key)
        times = 1 if known is None else known.times + 1
        self.violations[key] = msgspec.structs.replace(known or ContractViolation(what, where, do), times=times)

    def add_escapes(self, times: int) -> None:
        """Add a violation for each exit that left the event loop."""
        for _ in range(times):
            self.add(
                "SystemExit, KeyboardInterrupt or loop.stop() left the event loop",
                self._name,
                "raise DataError, also in tasks that the environment starts",
            )

    async def run(self) -> None:
        """Run all checks; those with several episodes use only plays that finish alone."""
        self._executors = Executors(self._pool, self._config)
        try:
            began_s = time.monotonic()
            with self._watching_the_loop():
                ends = [(play, *await self._alone(play)) for play in self._plays]
            good = [(play, env, outcome) for play, env, outcome in ends if isinstance(outcome, Finished)]
            if not good:
                return
            each_s = (time.monotonic() - began_s) / len(ends)
            await self._lifecycle(good[0][0])
            await self._again(good)
            await self._restored(good)
            await self._at_once(good)
            await self._cancelled(good[0][0])
            await self._leaks([play for play, _, _ in good], min(LEAK_EPISODES, int(LEAK_BUDGET_S / 3 / each_s)))
        finally:
            await self._executors.close()
            left = asyncio.all_tasks() - {asyncio.current_task()}  # of the environment
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=CANCEL_WAIT_S)

    # --- one episode

    async def _played(self, play: _Play) -> tuple[Observed | None, Outcome, RolloutManager]:
        made: list[Observed] = []

        def make(name: str) -> Observed:
            made.append(Observed(self._executors.create(name)))
            return made[-1]

        sampling = sampling_params(self._config, play.tokenizer, 1.0)
        model = ScriptedModel(play.answers, play.tokenizer.eos_id)
        manager = RolloutManager(model, make, play.tokenizer, sampling, bounds=bounds_of(self._config))
        self.episodes += 1
        grant = Grant(play.task.index, msgspec.structs.replace(play.task, env=self._name), ((0, 1),), 60.0)
        try:
            member = await manager.run_member(grant, 0, 1)
        finally:
            self.abandoned = manager.env_calls.abandoned
        return made[0] if made else None, member.outcome, manager

    async def _alone(self, play: _Play) -> tuple[Observed | None, Outcome]:
        env, outcome, manager = await self._played(play)
        if isinstance(outcome, Failed):
            self._failed(play, env, outcome)
        if env is not None and env.close_error:
            self.add(f"close() raised {env.close_error}", self._where(play, env), "close must always succeed")
        elif any(cause.startswith("close") for cause in manager.env_calls.faults):
            self.add("close() failed or took too long", self._where(play, env), "close must return at once")
        for cause in manager.env_calls.faults:
            if cause.startswith("state: "):
                do = "keep less in it, or return the name of a snapshot"
                self.add(f"StepResult.state has {cause.removeprefix('state: ')}", self._where(play, env), do)
        if env is not None and env.close_s > SLOW_CLOSE_S:
            self.add(
                f"close() took {env.close_s:.1f} s",
                self._where(play, env),
                "the member's place is free only afterwards: let it return at once",
            )
        if manager.env_calls.abandoned:
            self.add("a call goes on after it was cancelled", self._where(play, env), "let CancelledError pass")
        return env, outcome

    def _failed(self, play: _Play, env: Observed | None, outcome: Failed) -> None:
        error = outcome.error
        self.add(f"the member fails ({outcome.kind}): {error[:300]}", self._where(play, env), remedy(error))

    def _where(self, play: _Play, env: Observed | None) -> str:
        if env is None:
            return f"task {play.task.index}, making the environment"
        if env.calls <= 1:
            return f"task {play.task.index}, reset"
        return f"task {play.task.index}, step {env.calls - 1}, answer {play.shown(env.calls - 2)!a}"

    @contextlib.contextmanager
    def _watching_the_loop(self) -> Iterator[None]:
        """Report callbacks that block the event loop during this block, by asyncio's debug mode."""
        loop, watch, log = asyncio.get_running_loop(), SlowCallbacks(), logging.getLogger("asyncio")
        before_s, level = loop.slow_callback_duration, log.level
        loop.slow_callback_duration = BLOCKED_S
        loop.set_debug(True)
        log.addHandler(watch)
        log.setLevel(logging.WARNING)
        try:
            yield
        finally:
            loop.set_debug(False)
            loop.slow_callback_duration = before_s
            log.removeHandler(watch)
            log.setLevel(level)
        for where, times in watch.times.items():
            if times >= BLOCKED_TIMES or watch.longest_s[where] >= 4 * BLOCKED_S:
                self.add(
                    f"it blocks the event loop for {watch.longest_s[where]:.2f} s",
                    f"{where.removeprefix('Observed.')}, {times} times",
                    'await instead, or declare place = "thread" (waits) or "process" (computes)',
                )

    # --- several episodes

    async def _lifecycle(self, play: _Play) -> None:
        """Close without a reset, reset twice as a retry does, and reset after close."""
        task, asking = play.task, EnvironmentCalls()

        async def closed_unused() -> None:
            await asking.close(await asking.make(self._executors.create, self._name))

        async def reset_twice() -> None:
            env = await asking.make(self._executors.create, self._name)
            try:
                first, second = await asking.reset(env, task), await asking.reset(env, task)
            finally:
                await asking.close(env)
            if tuple(first) != tuple(second):
                self.add(
                    "a second reset of the same instance shows another prompt",
                    f"task {task.index}",
                    "reset must set everything that depends on the task and the seed",
                )

        async def reset_after_close() -> None:
            env = await asking.make(self._executors.create, self._name)
            first = await asking.reset(env, task)
            await asking.close(env)
            with contextlib.suppress(Exception):  # user code may refuse it by any exception
                if tuple(await asking.reset(env, task)) != tuple(first):
                    self.add(
                        "a reset after close shows another prompt",
                        f"task {task.index}",
                        "refuse it, or begin as for the first time",
                    )
            with contextlib.suppress(Exception):  # only the first close is checked
                await asking.close(env)

        for what, job in (
            ("close() before any reset", closed_unused),
            ("two resets", reset_twice),
            ("reset, then close", reset_after_close),
        ):
            try:
                await job()
            except Exception as error:  # noqa: BLE001 - foreign code; it becomes a violation
                self.add(
                    f"{what} raised {described(error)[:300]}",
                    f"task {task.index}",
                    "episodes are cancelled, and calls repeated, at any moment",
                )

    async def _again(self, good: Sequence[tuple[_Play, Observed | None, Outcome]]) -> None:
        """Play again with the same task, seed and answers: the members of a group must see the same results."""
        for play, env, outcome in good[: 2 * TASKS]:
            again, second = await self._alone(play)
            if env is None or again is None:
                continue
            if env.first != again.first:
                self.add(
                    "two instances show different prompts for one task and seed",
                    f"task {play.task.index}",
                    "the members of a group are compared: take all chance from the seed of reset",
                )
            elif _comparable(outcome) != _comparable(second):
                self.add(
                    "the same answers have other consequences in another instance",
                    self._where(play, again),
                    "take all chance from the seed of reset",
                )

    async def _restored(self, good: Sequence[tuple[_Play, Observed | None, Outcome]]) -> None:
        """Restore another instance after a turn of each play: its next result must be that of the first instance."""
        for play, env, _ in good[: 2 * TASKS]:
            turns = [] if env is None else [k for k, one in enumerate(env.results[:-1]) if one.state is not None]
            if env is None or not turns:
                continue
            asking, other = EnvironmentCalls(), None
            where, result = f"task {play.task.index}, restored after step {turns[-1] + 1}", env.results[turns[-1] + 1]
            do = "the state must hold everything that the steps changed, random generators included"
            try:
                other = await asking.make(self._executors.create, self._name)
                await asking.reset(other, play.task)
                await asking.restore(other, env.results[turns[-1]].state or b"")
                found = await asking.step(other, env.answers[turns[-1] + 1])
                same = (found.done, found.messages, found.reward) == (result.done, result.messages, result.reward)
                if not same or found.state != result.state:
                    self.add("a restored instance answers the next step in another way", where, do)
            except Exception as error:  # noqa: BLE001 - foreign code; it becomes a violation
                self.add(f"restoring raised {described(error)[:300]}", where, do)
            finally:
                with contextlib.suppress(Exception):  # its close is checked elsewhere
                    if other is not None:
                        await asking.close(other)

    async def _at_once(self, good: Sequence[tuple[_Play, Observed | None, Outcome]]) -> None:
        """Play several instances at the same time, as in a run."""
        for start in range(0, len(good), AT_ONCE):
            some = good[start : start + AT_ONCE]
            ends = await asyncio.gather(*(self._played(play) for play, _, _ in some))
            for (play, _, alone), (env, outcome, _) in zip(some, ends, strict=True):
                if isinstance(outcome, Failed) or _comparable(outcome) != _comparable(alone):
                    why = outcome.error[:200] if isinstance(outcome, Failed) else "another outcome than alone"
                    self.add(
                        f"instances that play at the same time disturb one another: {why}",
                        self._where(play, env),
                        "keep all state in the instance, none in the module or the class",
                    )

    async def _cancelled(self, play: _Play) -> None:
        """Cancel a step while the environment works on it."""
        asking, made = EnvironmentCalls(), list[Observed]()

        def make(name: str) -> Observed:
            made.append(Observed(self._executors.create(name)))
            return made[-1]

        try:
            await asking.reset(await asking.make(make, self._name), play.task)
        except Exception as error:  # noqa: BLE001 - foreign code; it becomes a violation
            what = f"another instance for the same task raised {described(error)[:300]}"
            self.add(what, f"task {play.task.index}", remedy(str(error)))
            with contextlib.suppress(Exception):  # checked below for an instance that was reset
                await asyncio.gather(*map(asking.close, made))
            return
        env = made[0]
        step = asyncio.ensure_future(asking.step(env, play.shown(0)))
        entering = asyncio.ensure_future(env.entered.wait())
        await asyncio.wait([step, entering], return_when=asyncio.FIRST_COMPLETED, timeout=CANCEL_WAIT_S)
        step.cancel()
        entering.cancel()
        await asyncio.gather(step, entering, return_exceptions=True)
        if asking.counts.abandoned:
            self.add("a step goes on after it was cancelled", f"task {play.task.index}", "let CancelledError pass")
        try:
            await asking.close(env)
        except Exception as error:  # noqa: BLE001 - foreign code; it becomes a violation
            self.add(
                f"close() after a cancelled step raised {described(error)[:300]}",
                f"task {play.task.index}",
                "close must always succeed",
            )

    async def _leaks(self, plays: list[_Play], window: int) -> None:
        """Report resources that grow in both of two windows of episodes, after a first one. Skipped if too slow."""
        held = []
        if window < LEAK_LEAST:
            return
        for _ in range(3):
            for number in range(window):
                env, outcome, _ = await self._played(play := plays[number % len(plays)])
                if isinstance(outcome, Failed):
                    self._failed(play, env, outcome)
            await asyncio.sleep(0.05)  # let ended tasks and threads disappear
            held.append(HeldResources.now(self._executors.processes.pids))
        for kind in held[0].counts:
            grown = [after.counts[kind] - before.counts[kind] for before, after in itertools.pairwise(held)]
            if min(grown) >= window // 2:
                self.add(
                    f"{kind} leak: {sum(grown)} more after {2 * window} episodes",
                    self._name,
                    "end in close() what reset() or step() began",
                )
        grown = [after.memory_bytes - before.memory_bytes for before, after in itertools.pairwise(held)]
        if min(grown) >= LEAKED_BYTES * window:
            each = sum(grown) / (2 * window) / 2**20
            self.add(
                f"memory leaks: {each:.2f} MB an episode",
                self._name,
                "keep nothing of an episode in the module or the class",
            )


def _comparable(outcome: Outcome) -> Any:
    """The tokens, reward and reward parts of an episode (or its error), for comparison."""
    if isinstance(outcome, Failed):
        return outcome.error
    return ([segment.tokens.tolist() for segment in outcome.segments], outcome.reward, outcome.reward_parts)
