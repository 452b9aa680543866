"""A store whose own clock jumps, or runs faster or slower than that of the roles: whole runs in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jaxroll.sim import world
from jaxroll.sim.network import run
from tests.harness.store.builders import configured
from tests.harness.virtual_run import Behaviour, VirtualRun

STEPS = 20
CLOCKS: dict[str, Callable[[float], float]] = {
    "jumps by an hour": lambda s: s + 3600.0 * (s > 10.99),
    "jumps by an hour three times": lambda s: s + 3600.0 * sum(s > at_s for at_s in (10.99, 11.5, 20.2)),
    "goes back by an hour": lambda s: s + 3600.0 * (s <= 10.99),
    "goes back by a second": lambda s: s - 1.0 * (s > 10.99),
    "runs twice as fast": lambda s: 2.0 * s,
    "runs at half the rate": lambda s: 0.5 * s,
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_run_whose_store_has_a_wrong_clock_loses_nothing_and_samples_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    class Wrong(world.LoopClock):
        def now_s(self) -> float:
            # Rounded, so that no wait is shorter than a step of the loop's clock.
            return math.floor(1024 * CLOCKS[clock](super().now_s())) / 1024

    monkeypatch.setattr(world, "LoopClock", Wrong)
    config = configured(steps=STEPS, lease_s=10.0, rpc_deadline_s=3.0, straggler="wait", alpha=1.0)
    config = replace(config, sft=replace(config.sft, steps=0), evaluator=replace(config.evaluator, every=0))

    async def job() -> None:
        async with VirtualRun(config, tmp_path) as at:
            for index in range(2):
                at.sampler(index, Behaviour(lambda key: 1.0 + key.group % 3))
            training = at.learner()
            await asyncio.wait([training], timeout=1000.0)
            assert training.done() and training.result() == 0, at.store.status()["waits"]
            assert [one.step for one in at.trained] == list(range(STEPS))
            assert at.store.status()["conservation_residual"] == 0
            assert max(one.age for one in at.trained) <= 1
            assert not at.store.sql("SELECT * FROM log WHERE kind = 'lease_ended'"), "no lease ended early"
            events = [row.get("text") for row in at.store.metrics.rows if row.get("kind") == "event"]
            assert not [text for text in events if text and "no progress" in text], "no false alarm"

    run(job())
