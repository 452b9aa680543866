"""Shares of the work that equal and unequal samplers get, in simulations where load decides how long members take."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.sim import costs, network, simulate
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, SamplerCosts, Workload

# The time of a token is proportional to the members that are decoded: so loads decide how long a member takes.
COMPUTING = Cluster(
    sampler=SamplerCosts(flops_per_token=1.0, flops=100.0),
    learner=LearnerCosts(flops_per_token=1.0, flops=400.0),
    workload=Workload(answer_tokens=Law("lognormal", mean=60, deviation=30, least=8, most=400)),
    rpc_s=0.0005,
)


def computing(samplers: int, alpha: float) -> Config:
    return costs.checked(
        configs.parse(
            {
                "run": {"seed": 3},
                "schedule": {"steps": 30, "groups_per_step": 8, "group_size": 4, "alpha": alpha},
                "sampler": {"count": samplers, "slots": 32, "decode_chunk": 1, "prefill_rows": 8},
                "sampling": {"max_tokens": 400},
                "task": {"max_prompt_tokens": 32},
                "learner": {"row_tokens": 512, "micro_batch_rows": 1},
            }
        )
    )


def test_equal_samplers_share_every_step_though_their_members_take_as_long_as_the_learner() -> None:
    for counts in begun_by_step(simulate.simulated_rows(computing(3, alpha=0.0), COMPUTING, Path(), keep=False)):
        assert sum(counts.values()) == 32 and max(counts.values()) <= 12, counts


@pytest.mark.parametrize("placement", ["spread", "auto", "together"])
def test_a_sampler_that_has_the_weights_first_leaves_the_others_their_part(
    monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """It asks for more work at once, the others a second later."""

    async def fetch(self: network.Links, receiver: str, version: Any, relays: list[str]) -> Any:
        await asyncio.sleep(1.0 if receiver != "sampler-0" else 0.0)
        return await original(self, receiver, version, relays)

    original = network.Links.fetch
    monkeypatch.setattr(network.Links, "fetch", fetch)
    config = computing(3, alpha=0.0)
    config = replace(config, schedule=replace(config.schedule, group_placement=placement))
    for counts in begun_by_step(simulate.simulated_rows(config, COMPUTING, Path(), keep=False)):
        assert sum(counts.values()) == 32 and max(counts.values()) <= 12, counts


def begun_by_step(rows: list[dict]) -> list[Counter[str]]:
    """The members that each sampler began between two steps of training."""
    steps = [row for row in rows if row.get("kind") == "step"]
    begun = [
        (row["role"], start_s) for row in rows if row.get("kind") == "members" for _, _, start_s, *_ in row["rows"]
    ]
    return [
        Counter(role for role, start_s in begun if before["t1"] <= start_s < row["t1"])
        for before, row in itertools.pairwise(steps)
    ]


def test_a_sampler_with_more_members_at_once_is_not_taken_for_a_slow_one() -> None:
    """At first one sampler leases 48 members and the other 16, which take a third of the time."""
    sync, bounded = (simulate.simulate(computing(2, alpha), COMPUTING, Path(), keep=False) for alpha in (0.0, 1.0))
    assert bounded["step_s"] < 0.9 * sync["step_s"]


def test_a_sampler_that_got_most_of_the_first_work_is_not_slow_ever_after() -> None:
    base = computing(4, alpha=2.0)
    roomy = replace(base, sampler=replace(base.sampler, slots=64))
    found = simulate.simulated_rows(roomy, COMPUTING, Path(), keep=False)
    members = Counter(row["role"] for row in found if row.get("kind") == "members" for _ in row["rows"])
    assert min(members.values()) > max(members.values()) / 2, members


def test_a_sampler_that_takes_three_times_as_long_delays_few_steps() -> None:
    """Decode steps take equal times for any number of members, so a slow sampler has more of them at once."""
    quick = SamplerCosts(step_overhead_s=0.05)
    slow = replace(COMPUTING, learner=LearnerCosts(step_overhead_s=2.0), sampler=quick,
                   samplers=(quick, replace(quick, step_overhead_s=0.15)))  # fmt: skip
    base = computing(2, alpha=2.0)
    roomy = replace(base, sampler=replace(base.sampler, slots=64), schedule=replace(base.schedule, steps=16))
    found = simulate.simulated_rows(roomy, slow, Path(), keep=False)
    members = Counter(row["role"] for row in found if row.get("kind") == "members" for _ in row["rows"])
    assert members["sampler-1"] < members["sampler-0"] / 3
