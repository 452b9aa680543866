"""Pools of samplers in whole runs, in virtual time: the real loops, with engines that only take time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.config.parsing import SOURCE_ITEMS
from jaxroll.errors import ConfigError
from jaxroll.records import Task
from jaxroll.sim.network import run
from jaxroll.sim.world import Feed
from tests.harness.virtual_run import ENV, Behaviour, VirtualRun

POOLS: Mapping[str, object] = {"x": {"samplers": 1, "tags": ["a"]}, "y": {"samplers": 1, "tags": ["b"]}}
STEPS = 12


class Mixed(Feed):
    """Prompts of two sources in turn."""

    def _task(self, index: int) -> Task:
        task = super()._task(index)
        return Task(index % 2 * SOURCE_ITEMS + index, *(getattr(task, name) for name in Task.__struct_fields__[1:]))


def config(pools: Mapping[str, object], **schedule: object) -> Config:
    """A run of four groups of two a step; each sampler has room for half of them."""
    spell = {"source": "reasoning_gym", "name": "spell_backward"}
    made = configs.parse(
        {
            "schedule": {"steps": STEPS, "groups_per_step": 4, "group_size": 2, "alpha": 1.0} | schedule,
            "sampler": {"count": 2, "slots": 4, "concurrent_episodes": 4},
            "task": {"mixture": [spell | {"label": "a"}, spell | {"label": "b"}], "env": ENV},
            "placement": {"pools": dict(pools)},
            "evaluator": {"every": 0},
        }
    )
    return replace(made, task=replace(made.task, env=ENV))


def trained(tmp_path: Path, made: Config, *, kill: str = "", train_s: float = 0.5) -> tuple[float, dict, float]:
    """The share of members that a sampler of their pool finished, the status, and the seconds of the run.

    Answers take 1 s at the sampler of their pool and 3 s at the other. `kill` dies in the middle of the run.
    """

    async def job() -> tuple[float, dict, float]:
        at = VirtualRun(made, tmp_path)
        at.store._feed = lambda: Mixed(ENV)
        async with at:
            for index in range(2):
                answer_s = lambda key, index=index: 1.0 if key.group % 2 == index else 3.0  # noqa: E731
                at.sampler(index, Behaviour(answer_s=answer_s))
            training = at.learner(train_s)
            if kill:
                while at.store.keeper.state.acked < STEPS // 2:
                    await _pause()
                await at.kill(kill)
            assert await training == 0
            now_s = at.store.keeper.now_s()
            held = at.store.sql("SELECT holder, group_id FROM members WHERE tokens > 0")
            steps = [one.groups for one in at.trained]
            assert [sorted(groups) for groups in steps] == [[*range(4 * i, 4 * i + 4)] for i in range(STEPS)]
            home = sum(holder == f"sampler-{group % 2}" for holder, group in held) / len(held)
            return home, at.store.status(), now_s

    found = run(job(), 1e5)
    assert found[1]["conservation_residual"] == 0
    return found


async def _pause() -> None:
    await asyncio.sleep(0.25)


def test_members_are_sampled_in_their_pool_and_claims_keep_the_order(tmp_path: Path) -> None:
    home, _, pooled_s = trained(tmp_path, config(POOLS))
    assert home > 0.9
    anywhere, _, mixed_s = trained(tmp_path, config({}))
    assert anywhere < 0.75 and pooled_s < 0.75 * mixed_s


def test_a_pool_that_is_gone_starves_nothing(tmp_path: Path) -> None:
    home, status, _ = trained(tmp_path, config(POOLS), kill="sampler-1")
    assert 0.6 < home < 0.9 and status["acked"] == STEPS


def test_a_sampler_of_an_unknown_pool_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def job(pool: str) -> object:
        monkeypatch.setenv("JAXROLL_POOL", pool)
        async with VirtualRun(config(POOLS), tmp_path) as at:
            sampler = at.sampler(0)
            await _pause()
            if sampler.done():
                sampler.result()
            return at.store.status()["pools"]["y"]["samplers"]

    assert run(job("y"), 1e5) == ["sampler-0"], "not the pool of its number"
    with pytest.raises(ConfigError, match="no such pool"):
        run(job("z"), 1e5)
