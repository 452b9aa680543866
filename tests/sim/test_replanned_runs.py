"""Simulated runs that plan the number of their samplers: what it costs, what it saves, and when nothing is planned."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxroll import config as configs
from jaxroll.sim import costs, simulate
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, RoleFailure, SamplerCosts, Workload

TRAIN_S, NEVER_S = 4.0, 1e6
# Answers of 6 tokens of 0.5 s; a sampler has room for 4 of the 8 of a step, so that three are enough at α = 1.
CLUSTER = Cluster(
    source="made up",
    sampler=SamplerCosts(step_overhead_s=0.5, price_per_hour=3.6),
    learner=LearnerCosts(step_overhead_s=TRAIN_S, price_per_hour=3.6),
    workload=Workload(answer_tokens=Law(mean=6)),
    rpc_s=0.0,
    start_s=20.0,
)


@functools.cache
def rows(count: int, least: int, steps: int, failures: tuple[RoleFailure, ...] = ()) -> Sequence[Mapping[str, Any]]:
    cluster = replace(CLUSTER, failures=failures)
    return simulate.simulated_rows(config(count, least, steps), cluster, Path(), keep=False)


def config(count: int, least: int, steps: int) -> configs.Config:
    return costs.checked(configs.parse({
        "run": {"seed": 3},
        "schedule": {"steps": steps, "groups_per_step": 4, "group_size": 2, "alpha": 1.0},
        "sampler": {"slots": 4, "count": count, "least_count": least, "decode_chunk": 1, "prefill_rows": 8},
        "sampling": {"max_tokens": 16}, "task": {"max_prompt_tokens": 32},
    }))  # fmt: skip


def figures(count: int, least: int, steps: int, failures: tuple[RoleFailure, ...] = ()) -> simulate.Figures:
    return simulate.figures(rows(count, least, steps, failures), config(count, least, steps), CLUSTER)


def plans(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in found if row.get("what") == "plan"]


def test_samplers_that_shorten_no_step_leave_and_are_not_paid() -> None:
    fixed, planned = figures(6, 0, 40), figures(6, 1, 40)
    (plan,) = plans(rows(6, 1, 40))
    assert plan["needed"] == 3 and len(plan["leave"]) == 3
    assert planned["step_s"] == pytest.approx(fixed["step_s"], rel=0.02) and fixed["samplers_paid"] == 6
    assert 3 < planned["samplers_paid"] < 4.7
    assert planned["cost_per_million_tokens"] < 0.8 * fixed["cost_per_million_tokens"]


def test_the_store_shows_the_plan_and_no_member_is_drawn_again() -> None:
    status = [row for row in rows(6, 1, 40) if row.get("kind") == "store"][-1]
    assert status["conservation_residual"] == 0 and not status["reissues_by_length"] and status["wasted_tokens"] == 0
    assert status["plan"] == {"needed": 3, "present": 3, "missing": 0, "leaving": 0}


def test_where_all_samplers_are_needed_the_run_is_the_same() -> None:
    fixed, planned = figures(3, 0, 20), figures(3, 1, 20)
    assert not plans(rows(3, 1, 20)) and planned == fixed


@pytest.mark.soak
def test_lost_samplers_are_replaced_by_those_that_had_left() -> None:
    lost = tuple(RoleFailure(120.0, f"sampler-{n}", NEVER_S) for n in (1, 3))
    planned = figures(6, 1, 60, lost)
    released, *asked = plans(rows(6, 1, 60, lost))
    assert not {one.role for one in lost} & set(released["leave"]) and len(released["leave"]) == 3
    assert sum(row["more"] for row in asked) == 2 and not any(row["leave"] for row in asked)
    fixed = figures(3, 0, 60, tuple(replace(one, role=f"sampler-{n}") for n, one in enumerate(lost)))
    assert fixed["step_s"] > 1.1 * planned["step_s"] and planned["samplers_paid"] < 5
