"""The number of samplers that a running run needs: the cost model, the plans, and that they do not flap."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from jaxroll.policy.step_times import MOST_STEPS, STEADY_S, STEPS, Replanner, SamplerPlan, StepLoad

# 64 rollouts of 5 s a step, 16 at once on a sampler, α = 1; without training 20 s of one sampler.
LOAD = StepLoad(train_s=10.0, rollout_s=5.0, rollouts=64, room=16, alpha=1.0)


class Fleet:
    """Samplers of which a plan releases some, and starts them again if they are asked for."""

    def __init__(self, count: int, load: StepLoad = LOAD, true: StepLoad | None = None, least: int = 1) -> None:
        self.now_s, self.steps, self.load, self.true = 0.0, 0, load, true or load
        self.present, self.spare = {f"sampler-{n}" for n in range(count)}, list[str]()
        self.replanner = Replanner(least, 2)
        self.plans = list[SamplerPlan]()

    def step(self, starts: bool = True) -> SamplerPlan | None:
        """One training step, or 10 s without samplers."""
        if self.present:
            self.now_s, self.steps = self.now_s + self.true.step_s(len(self.present)), self.steps + 1
        else:
            self.now_s += 10.0
        plan = self.replanner.plan(self.now_s, self.present, self.steps, self.load, sorted(self.present))
        if plan is not None:
            self.plans.append(plan)
            self.present -= set(plan.leave)
            self.spare += plan.leave
            if starts:
                self.present |= {self.spare.pop() for _ in range(min(plan.more, len(self.spare)))}
        return plan

    def run(self, steps: int, starts: bool = True) -> list[SamplerPlan]:
        """The plans of so many steps."""
        return [plan for _ in range(steps) if (plan := self.step(starts)) is not None]


@pytest.mark.parametrize(
    ("samplers", "step_s"),
    [
        (1, (10.0 + 5.0 + (2 * 64 / 16 - 1) * 5.0) / 2),  # rollouts wait for room
        (4, 10.0),  # training bounds it
        (100, 10.0),
    ],
)
def test_the_seconds_of_a_step(samplers: int, step_s: float) -> None:
    assert LOAD.step_s(samplers) == pytest.approx(step_s)


def test_generation_bounds_a_step_of_a_quick_learner() -> None:
    quick = StepLoad(0.1, 5.0, 64, 16, 1.0)
    assert quick.step_s(2) == pytest.approx(64 * 5.0 / 32, rel=0.01) and quick.needed() == 8  # none waits for room


@pytest.mark.parametrize("seed", range(3))
def test_the_needed_samplers_are_the_fewest_that_keep_the_time_of_a_step(seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(200):
        load = StepLoad(drawn.uniform(0.1, 20), drawn.uniform(0.1, 20), drawn.randint(1, 300), drawn.randint(1, 64),
                    drawn.choice((0.0, 0.5, 1.0, 4.0)))  # fmt: skip
        least = drawn.randint(1, 3)
        fastest_s = load.step_s(10_000)
        assert load.needed(least) == next(n for n in itertools.count(least) if load.step_s(n) <= 1.05 * fastest_s)


def test_samplers_that_shorten_no_step_leave_and_replace_one_that_is_lost() -> None:
    fleet = Fleet(7)
    (plan,) = fleet.run(60)
    assert plan.needed == LOAD.needed() == 4 == len(fleet.present) and len(plan.leave) == 3
    fleet.present.remove("sampler-6")
    fleet.step()  # a loss may be over soon
    (asked,) = fleet.run(60)
    assert (asked.needed, asked.more, len(fleet.present)) == (4, 1, 4)


def test_the_slower_steps_at_the_start_of_a_run_do_not_hide_that_a_release_made_steps_longer() -> None:
    start = StepLoad(20.0, 5.0, 64, 16, 1.0)
    fleet = Fleet(6, true=start)
    fleet.run(14)
    fleet.true = StepLoad(10.0, 12.0, 64, 16, 1.0)
    released, asked = fleet.run(100)
    assert released.leave and asked.more == len(released.leave)


def test_without_a_change_of_the_membership_nothing_is_planned() -> None:
    fleet = Fleet(LOAD.needed())
    assert not fleet.run(500) and fleet.replanner.needed == LOAD.needed()


def test_a_release_that_makes_steps_longer_is_taken_back_for_good() -> None:
    """Full engines are slower than the model knows."""
    fleet = Fleet(6, true=StepLoad(10.0, 12.0, 64, 16, 1.0))
    released, asked = fleet.run(300)
    assert len(released.leave) == 2 and asked.more == 2 and len(fleet.present) == 6


def test_answers_that_become_longer_bring_released_samplers_back() -> None:
    fleet = Fleet(8)
    fleet.run(30)
    assert len(fleet.present) == 4
    fleet.load = fleet.true = StepLoad(10.0, 9.0, 64, 16, 1.0)
    fleet.run(60)
    assert len(fleet.present) == fleet.load.needed() > 4


def test_the_least_number_stays() -> None:
    fleet = Fleet(7, least=6)
    (plan,) = fleet.run(100)
    assert plan.needed == 6 == len(fleet.present)


def test_an_earlier_process_of_the_store_may_have_planned() -> None:
    fleet = Fleet(3)
    fleet.replanner = Replanner(1, 2, needed=4, most=7)
    fleet.spare = ["sampler-9"]
    asked, *_ = fleet.run(5)
    assert (asked.more, len(fleet.present)) == (1, 4)


def test_a_sampler_that_comes_and_goes_quickly_causes_no_plan() -> None:
    quick = StepLoad(0.5, 0.25, 64, 16, 1.0)
    fleet = Fleet(4, quick)
    fleet.run(100)
    for count in range(400):  # every 2 s
        (fleet.present.add if count % 2 else fleet.present.discard)("sampler-0")
        fleet.run(4)
    assert STEADY_S > 2.0 and STEPS > 4 and not fleet.plans


def flapping(seed: int) -> Iterator[tuple[Fleet, int]]:
    """A fleet whose members come and go at random, and the plans between two changes."""
    drawn = random.Random(seed)
    load = StepLoad(drawn.uniform(0.1, 12), drawn.uniform(0.5, 12), 64, 16, drawn.choice((0.0, 1.0, 3.0)))
    slower = StepLoad(load.train_s, load.rollout_s * drawn.choice((1.0, 1.0, 2.0)), 64, 16, load.alpha)
    fleet = Fleet(drawn.randint(1, 10), load, slower, drawn.randint(1, 2))
    starts, pause = drawn.random() < 0.8, drawn.choice((2, 15, 60, 400))
    for number in range(40):
        made = len(fleet.run(drawn.randint(1, pause), starts))
        yield fleet, made
        if fleet.present and drawn.random() < 0.5:
            fleet.present.remove(drawn.choice(sorted(fleet.present)))
        elif fleet.spare and drawn.random() < 0.5:
            fleet.present.add(fleet.spare.pop())
        else:
            fleet.present.add(f"sampler-{100 + number}")


@pytest.mark.parametrize("seed", range(20))
def test_the_plans_of_a_change_are_few_however_members_come_and_go(seed: int) -> None:
    for fleet, made in flapping(seed):
        assert made <= 2 * fleet.replanner.most + 1
        assert fleet.replanner.missing >= 0 and fleet.replanner.needed <= max(fleet.replanner.most, 2)
        assert not fleet.steps or fleet.present or not any(plan.leave for plan in fleet.plans[-1:])  # it keeps one


def test_one_that_comes_and_goes_slowly_causes_ever_fewer_plans() -> None:
    """It is there for 40 steps and away for 40, which is longer than the run waits at first."""
    fleet = Fleet(5)
    fleet.run(40)
    made = []
    for _ in range(12):
        mine = next(iter(sorted(fleet.present)))
        fleet.present.remove(mine)
        before = len(fleet.plans)
        fleet.run(40)
        fleet.present.add(mine)
        fleet.run(40)
        made.append(len(fleet.plans) - before)
    assert MOST_STEPS > 40 and sum(made) <= 6 and not any(made[6:])
