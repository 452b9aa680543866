"""ROLL Flash's controller: get a batch, suspend, update and resume the samplers, train. The loops are the real ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxroll.config import Config
from jaxroll.config.derived import with_mode
from jaxroll.records import Claim, Version
from jaxroll.roles.sampler import SamplerLoops
from jaxroll.sim.network import run
from jaxroll.sim.world import MemoryPublisher
from jaxroll.store.log.replay import replay_log
from tests.harness.virtual_run import DelayTrainer, VirtualRun
from tests.roles import test_migration
from tests.roles.test_migration import TokenEngine

STEPS, TRAIN_S, DEADLINE_S = 8, 2.0, 5.0
Trace = list[tuple[Any, ...]]  # what, the sampler or step, time


class TracedEngine(TokenEngine):
    """An engine that notes when it is suspended, updated and resumed."""

    def __init__(self, number: int, slots: int, trace: Trace) -> None:
        super().__init__(number, slots, [])
        self._trace = trace

    def _note(self, what: str) -> None:
        self._trace.append((what, self._number, asyncio.get_running_loop().time()))

    async def pause(self, mode: str) -> None:
        assert mode == "keep" and self.paused is None
        self.paused = mode
        self._note("suspend")

    def resume(self) -> None:
        self.paused = None
        self._note("resume")

    def swap(self, version: Version, params: object) -> None:
        super().swap(version, params)
        self._note(f"update {version.step}")


class TracedTrainer(DelayTrainer):
    """A trainer that notes when it gets a batch and when it starts to train."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(TRAIN_S)
        self._trace = trace

    def prepare(self, claim: Claim) -> Any:
        self._trace.append(("get_batch", claim.step, asyncio.get_running_loop().time()))
        return SimpleNamespace(claim=claim)

    def dispatch_step(self, ready: Any) -> Any:
        self._trace.append(("train", ready.claim.step, asyncio.get_running_loop().time()))
        return super().dispatch_step(ready)


def config(mode: str) -> Config:
    made = test_migration.config(flush_tokens=0, steps=STEPS)
    return replace(
        made,
        schedule=replace(with_mode(made.schedule, mode), mode=mode),
        transfer=replace(made.transfer, deadline_s=DEADLINE_S),
    )


def traced(folder: Path, mode: str, kill_at: int = -1) -> tuple[Trace, list[TracedEngine], dict[str, Any]]:
    """A run with two samplers: its trace, engines and last status. Sampler 1 dies when step `kill_at` starts."""
    trace, engines = Trace(), list[TracedEngine]()

    async def job() -> dict[str, Any]:
        async with VirtualRun(config(mode), folder) as at:
            for number in range(2):
                engines.append(TracedEngine(number, at.config.sampler.slots, trace))
                at.start_engine(f"sampler-{number}", engines[-1], lambda session: SamplerLoops(session).run())
            learner = at.start_learner(TracedTrainer(trace), MemoryPublisher())
            while kill_at >= 0 and not any(one[:2] == ("train", kill_at) for one in trace):
                await asyncio.sleep(0.1)
            if kill_at >= 0:
                await at.kill("sampler-1")
            assert await learner == 0
            assert not (found := replay_log(at.store._log.connection)).violations, found.violations
            return at.store.status()

    status = run(job())
    return trace, engines, status


def place(trace: Trace, what: str, which: int) -> int:
    return next(k for k, one in enumerate(trace) if one[:2] == (what, which))


def test_each_step_gets_its_batch_updates_the_suspended_samplers_and_then_trains(tmp_path: Path) -> None:
    trace, engines, status = traced(tmp_path, "async_controller")
    assert status["conservation_residual"] == 0
    overlapped = 0
    for step in range(1, STEPS):
        got, starts = place(trace, "get_batch", step), place(trace, "train", step)
        for number in range(2):
            seen = [what for what, which, _ in trace[got + 1 : starts] if which == number]
            assert seen == ["suspend", f"update {step}", "resume"], f"step {step}: {trace[got : starts + 1]}"
        between = trace[starts + 1 : place(trace, "get_batch", step + 1) if step + 1 < STEPS else starts + 1]
        assert between == [], "the samplers go on while the learner trains and waits for its batch"
        starts_s = trace[starts][2]
        overlapped += any(starts_s < at_s < starts_s + TRAIN_S for engine in engines for at_s in engine.drawn_s)
    assert overlapped >= STEPS // 2, "the samplers do not generate while the learner trains"
    suspended = [one for one in trace if one[0] in ("suspend", "resume")]
    for engine in engines:
        times = [at_s for _, number, at_s in suspended if number == engine._number]
        for begin_s, end_s in zip(times[::2], times[1::2], strict=True):
            assert not any(begin_s < at_s < end_s for at_s in engine.drawn_s)


def test_without_it_no_sampler_is_suspended_and_updates_do_not_wait_for_the_batch(tmp_path: Path) -> None:
    trace, _, _ = traced(tmp_path, "async")
    assert not any(what in ("suspend", "resume") for what, _, _ in trace)
    assert any(place(trace, f"update {step}", 0) < place(trace, "get_batch", step) for step in range(1, STEPS))


def test_a_sampler_that_died_delays_one_step_by_the_deadline(tmp_path: Path) -> None:
    trace, _, status = traced(tmp_path, "async_controller", kill_at=3)
    assert status["conservation_residual"] == 0
    waits = [
        trace[place(trace, "train", step)][2] - trace[place(trace, "get_batch", step)][2] for step in range(1, STEPS)
    ]
    late = [wait_s for wait_s in waits if wait_s >= DEADLINE_S]
    assert len(late) == 1 and late[0] < DEADLINE_S + 2.0
