"""Partial overlap in simulation: samplers on the learner's devices, for a time that is controlled (RLBoost)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.errors import ConfigError
from jaxroll.policy.step_times import FIRST_S, LEAST_S, LEAST_SHARE, Seeding, SeedingTime
from jaxroll.sim import costs, simulate
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, RoleFailure, SamplerCosts, TransferCosts, Workload


class Step:
    """A step of constant work: samplers and the learner's devices generate at a rate, then the learner computes."""

    def __init__(self, work: float = 600.0, rate: float = 10.0, own: float = 10.0, train_s: float = 10.0) -> None:
        self.work, self.rate, self.own, self.train_s = work, rate, own, train_s

    def play(self, seeding: SeedingTime, samplers: int) -> tuple[float, float]:
        """Seconds for which the learner and the samplers wait, over those of the step."""
        seconds, rate = seeding.begin(samplers), self.rate * samplers
        together_s = min(seconds, self.work / (rate + self.own))
        generated_s = together_s + (self.work - together_s * (rate + self.own)) / rate
        step_s = max(generated_s, together_s + self.train_s)
        waited_s = max(0.0, generated_s - together_s - self.train_s)
        seeding.end(generated_s, step_s, waited_s, 64)
        return waited_s / step_s, (step_s - generated_s) / step_s


@pytest.mark.parametrize(("samplers", "train_s"), [(1, 10.0), (2, 10.0), (4, 6.0), (2, 25.0)])
def test_with_constant_work_both_wait_for_equal_times(samplers: int, train_s: float) -> None:
    seeding, step = SeedingTime(), Step(train_s=train_s)
    for _ in range(30):
        learner_waits, samplers_wait = step.play(seeding, samplers)
    assert abs(learner_waits - samplers_wait) < 0.1 or seeding.seconds == LEAST_S


def test_a_number_of_samplers_that_returns_has_its_time_at_once() -> None:
    seeding, step = SeedingTime(), Step()
    for _ in range(30):
        step.play(seeding, 1)
    settled = seeding.seconds
    for _ in range(30):
        step.play(seeding, 4)
    assert abs(seeding.seconds - settled) > 0.2 * settled  # other numbers need another time
    assert seeding.begin(1) == pytest.approx(settled, rel=0.1)


def test_a_time_beyond_the_generation_is_cut_before_it_is_changed() -> None:
    seeding = SeedingTime()
    assert seeding.begin(2) == FIRST_S
    seeding.end(generated_s=30.0, step_s=42.0, waited_s=0.0, samples=64)
    assert seeding.begin(2) == pytest.approx(30.0 - 12.0 / 3)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0


def seeding_of(clock: Clock, *names: str) -> Seeding:
    return Seeding(names or ("sampler-2",), lambda: clock.now_s, contextlib.nullcontext())


def test_the_first_sampler_with_new_weights_begins_the_time_of_all_and_a_claim_ends_it() -> None:
    clock, told = Clock(), list[int]()
    seeding = seeding_of(clock, "sampler-2", "sampler-3")
    seeding.on_claim.append(lambda: told.append(1))
    assert seeding.begin("sampler-2", 0, 2) == FIRST_S
    clock.now_s = 10.0
    assert seeding.begin("sampler-3", 0, 2) == seeding.learner_waits_s(0) == FIRST_S - 10.0
    clock.now_s = 30.0
    assert not seeding.is_claimed(0)
    seeding.claimed(0, 64, 0.0)
    assert seeding.is_claimed(0) and told == [1] and seeding.learner_waits_s(0) == 0.0
    clock.now_s = 42.0  # the samplers waited for 12 s, the learner not at all
    assert seeding.begin("sampler-2", 1, 2) == pytest.approx(30.0 - 12.0 / 3)
    assert seeding.begin("sampler-3", 0, 2) == 0.0, "weights that are not the newest"


def test_the_learner_leaves_its_devices_until_all_have_stopped_but_not_without_end() -> None:
    clock = Clock()
    seeding = seeding_of(clock, "sampler-2", "sampler-3")
    for name in ("sampler-2", "sampler-3"):
        seeding.begin(name, 0, 2)
    clock.now_s = FIRST_S
    seeding.left("sampler-2")
    assert 0.0 < seeding.learner_waits_s(0) < 1.0
    seeding.left("sampler-3")
    assert seeding.learner_waits_s(0) == 0.0
    seeding.claimed(0, 64, 0.0)
    seeding.begin("sampler-2", 1, 2)
    seeding.begin("sampler-3", 1, 2)
    clock.now_s += 2 * FIRST_S
    assert seeding.learner_waits_s(1) == 0.0, "one that does not stop"
    seeding.claimed(1, 64, 0.0)
    seconds = seeding.begin("sampler-2", 2, 2)
    clock.now_s += seconds
    seeding.left("sampler-2")
    assert seeding.learner_waits_s(2) == 0.0, "one that worked in the step before and has no weights of this one"
    clock.now_s += 6.0
    seeding.left("sampler-2")  # again, for a member that went on
    seeding.claimed(2, 64, 0.0)
    assert seeding.begin("sampler-2", 3, 2) == pytest.approx(seconds + 6.0 / 3)


def test_the_learner_waits_for_samplers_whose_weights_do_not_come_for_that_time_at_most() -> None:
    clock = Clock()
    seeding = seeding_of(clock)
    assert seeding.learner_waits_s(0) == FIRST_S
    clock.now_s = FIRST_S - 1.0
    assert seeding.learner_waits_s(0) == 1.0
    clock.now_s = FIRST_S + 1.0
    assert seeding.learner_waits_s(0) == 0.0


def test_the_learner_is_idle_from_the_samplers_leave_on_but_for_what_it_computes() -> None:
    clock = Clock()
    seeding = seeding_of(clock)
    seeding.begin("sampler-2", 0, 2)
    clock.now_s = 20.0
    seeding.claimed(0, 64, 0.0)
    first = seeding.begin("sampler-2", 1, 2)
    assert first == 20.0
    clock.now_s = 20.0 + first + 1.0
    seeding.left("sampler-2")
    clock.now_s += 9.0
    seeding.claimed(1, 64, computed_s=3.0)
    clock.now_s += 3.0
    assert seeding.begin("sampler-2", 2, 2) == pytest.approx(first + (6.0 - 3.0) / 3)


def test_steps_of_which_the_samplers_had_no_weights_in_time_are_not_measured() -> None:
    clock = Clock()
    seeding = seeding_of(clock)
    seeding.begin("sampler-2", 4, 2)
    clock.now_s = 30.0
    seeding.claimed(4, 64, 0.0)
    clock.now_s = 80.0
    seeding.claimed(5, 64, 0.0)
    clock.now_s = 85.0
    assert seeding.begin("sampler-2", 5, 2) == 0.0
    clock.now_s = 90.0
    assert seeding.begin("sampler-2", 6, 2) == FIRST_S


def test_in_short_steps_the_least_time_is_a_share_of_the_step() -> None:
    seeding = SeedingTime()
    for _ in range(20):
        seeding.begin(1)
        seeding.end(generated_s=0.5, step_s=2.0, waited_s=0.0, samples=8)
    assert seeding.seconds == pytest.approx(LEAST_SHARE * 2.0)


# --- Whole runs: two samplers of their own and one on the learner's devices

CLUSTER = Cluster(
    sampler=SamplerCosts(flops_per_token=1.0, flops=100.0, price_per_hour=2.0),
    learner=LearnerCosts(flops_per_token=1.0, flops=400.0, samplers=1, price_per_hour=3.0),
    workload=Workload(answer_tokens=Law("lognormal", mean=60, deviation=30, least=8, most=400)),
    rpc_s=0.0005,
)


def config(**schedule: Any) -> Config:
    return costs.checked(
        configs.parse(
            {
                "schedule": {"steps": 20, "groups_per_step": 8, "group_size": 4, "alpha": 0.0} | schedule,
                "sampler": {"count": 3, "slots": 32, "decode_chunk": 1, "flush_tokens": 16},
                "sampling": {"max_tokens": 400},
                "task": {"max_prompt_tokens": 32},
                "learner": {"row_tokens": 512, "micro_batch_rows": 1, "streaming": True},
                "placement": {"learner_samplers": 1},
            }
        )
    )


def spans(found: list[Any], role: str) -> Iterator[tuple[float, float]]:
    for row in found:
        if row.get("kind") == "span" and row.get("what") == "decode" and row["role"] == role and row["tokens"]:
            yield row["t0"], row["t1"]


def test_the_learners_devices_sample_at_the_start_of_a_step_and_its_rollouts_go_on_elsewhere() -> None:
    found = simulate.simulated_rows(config(), CLUSTER, Path(), keep=False)
    steps = [row for row in found if row.get("kind") == "step"]
    assert len(steps) == 20 and max(row["age_max"] for row in steps) == 0
    own, others = list(spans(found, "sampler-2")), list(spans(found, "sampler-0"))
    assert own and others
    for before, row in itertools.pairwise(steps):
        start_s, end_s = before["t1"], row["t1"]
        worked = [t1 for t0, t1 in own if start_s <= t0 < end_s]
        assert worked, "they sample in every step"
        if row["step"] > 2:  # until then they sample to the end
            assert max(t1 for t0, t1 in others if start_s <= t0 < end_s) >= max(worked)
        assert not [1 for t0, t1 in own if t0 < row["t1"] and t1 > row["t0"]], "never while the learner trains"
    store = next(row for row in reversed(found) if row.get("kind") == "store")
    assert store["tokens_resumed"] > 0


def test_the_learners_devices_shorten_the_steps_of_a_streaming_learner_that_they_do_not_delay() -> None:
    quick = replace(CLUSTER, learner=replace(CLUSTER.learner, flops=4000.0))
    both = [simulate.scheduled_on(config(), quick, name) for name in ("stream", "partial_overlap")]
    alone, helped = (simulate.simulate(*one, Path(), keep=False) for one in both)
    assert helped["step_s"] < 0.9 * alone["step_s"]
    hours = 7.0 / 3600  # two samplers and the learner, whose devices are paid once
    for found in (alone, helped):
        assert found["cost_per_million_tokens"] == pytest.approx(hours / found["tokens_per_s"] * 1e6)


def test_the_time_is_that_of_the_samplers_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, begin = list[int](), SeedingTime.begin
    monkeypatch.setattr(SeedingTime, "begin", lambda self, samplers: counts.append(samplers) or begin(self, samplers))
    lost = (RoleFailure(40.0, "sampler-0", 60.0),)
    simulate.simulated_rows(config(), replace(CLUSTER, failures=lost), Path(), keep=False)
    assert counts[0] == counts[-1] == 2 and 1 in counts and set(counts) == {1, 2}


def test_samplers_on_the_learners_devices_are_no_relays() -> None:
    """Weights take 1 s; a receiver that waited for such a relay would wait for 5 s."""
    sends = TransferCosts(size_bytes=1e9, bytes_per_s=1e9, sender_bytes_per_s=1e9)
    relayed = replace(config(steps=6), transfer=replace(config().transfer, channel="tcp", relay="tree"))
    relayed = replace(relayed, sampler=replace(relayed.sampler, count=7))
    relayed = replace(relayed, placement=replace(relayed.placement, learner_samplers=4))
    found = simulate.simulated_rows(relayed, replace(CLUSTER, transfer=sends), Path(), keep=False)
    fetches = [row for row in found if row.get("kind") == "span" and row.get("what") == "fetch"]
    assert max(row["t1"] - row["t0"] for row in fetches) < 2.5


def test_a_failure_of_the_learners_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match="failure") as refused:
        lost = replace(CLUSTER, failures=(RoleFailure(1.0, "sampler-2"),))
        simulate.simulated_rows(config(), lost, Path(), keep=False)
    assert refused.value.key == "placement.learner_samplers"


def test_samplers_that_are_much_slower_than_the_learners_devices_work_while_those_are_away() -> None:
    """If the store counted those as present, slow ones would rest, and steps take a minute."""
    slow = replace(CLUSTER.sampler, step_overhead_s=0.1)
    devices = replace(CLUSTER, samplers=(slow, slow, replace(slow, step_overhead_s=0.02)))
    both = [simulate.scheduled_on(config(), devices, name) for name in ("stream", "partial_overlap")]
    alone, helped = (
        [r for r in simulate.simulated_rows(*one, Path(), keep=False) if r.get("kind") == "step"] for one in both
    )
    longest = max(b["t1"] - a["t1"] for a, b in itertools.pairwise(alone))
    assert all(b["t1"] - a["t1"] < longest for a, b in itertools.pairwise(helped))
    assert helped[-1]["t1"] - helped[0]["t1"] < 0.95 * (alone[-1]["t1"] - alone[0]["t1"])


def test_the_learners_devices_go_on_while_no_other_sampler_is_there() -> None:
    lost = tuple(RoleFailure(60.0, f"sampler-{index}", 2000.0) for index in range(2))
    found = simulate.simulated_rows(config(), replace(CLUSTER, failures=lost), Path(), keep=False)
    steps = [row for row in found if row.get("kind") == "step"]
    assert len(steps) == 20 and steps[-1]["t1"] - steps[0]["t0"] < 1900.0
