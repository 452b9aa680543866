"""Failures that users of other stacks have published, as tests of this one. Each docstring names the public thread.

The tests run the store's state machine on a manual clock, because its decisions and its log prevent each failure. Real
processes have the same guarantees: learners killed in a step, between publish and ack, in a checkpoint
(test_learner_faults), stores killed (test_store_killed), logs cut at every byte (test_log_cut), samplers killed
(test_sampler_faults), generations that fail or hang (test_environment_faults), partitions (test_network_faults).
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from jaxroll.errors import NoCredit, NotReady, StaleClient
from jaxroll.records import Version, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import waits
from jaxroll.store.core.machine import Core
from jaxroll.store.core.state import counts
from jaxroll.store.server.keeper import Keeper, Wakeups
from tests.harness.store.machine import Machine


def trained(steps: int, durable: int, **rules) -> Machine:
    """A run that trained `steps` steps, of which a checkpoint holds the first `durable`."""
    m = Machine(size=2, batch=2, alpha=2.0, **rules)
    m.start()
    for step in range(steps):
        filled(m, Version(0, step))
        m.train(step)
        if step + 1 == durable:
            m.ask(ev.Durable("L", Version(0, durable)))
    return m


def filled(m: Machine, version: Version) -> None:
    """Make every group that the window admits ready."""
    try:
        m.fill(100, version)
    except NoCredit:
        return


def prompts_of(m: Machine, groups: tuple[int, ...]) -> list[int]:
    issued = {e.group: e.task.index for e in m.log if isinstance(e, ev.Issued)}
    return [issued[group] for group in groups]


def test_a_resumed_run_goes_on_at_its_checkpoint_and_not_at_step_0() -> None:
    """verl 7952: a resumed run starts at step 0 although its checkpoint was loaded."""
    m = trained(steps=5, durable=3)
    m.restart()
    version = m.start(Version(0, 3), session="L2")
    assert version.step == 3
    for step in range(3):
        with pytest.raises(StaleClient, match="trimmed"):
            m.claim(step, version.lineage, "L2")
    assert m.claim(3, version.lineage, "L2").step == 3


def test_a_step_counts_once_however_often_it_is_acknowledged_or_resumed() -> None:
    """verl 7933: the step that a resumed run repeats is counted twice."""
    m = trained(steps=4, durable=2)
    m.ask(ev.Ack("L", Version(0, 3)))
    assert m.state.acked == 4
    before = {step: m.state.batches[step].groups for step in (2, 3)}
    m.restart()
    version = m.start(Version(0, 2), session="L2")
    assert m.state.acked == 2, "steps after the checkpoint were not rewound"
    for step in (2, 3):
        batch = m.train(step, version.lineage, "L2")
        assert batch.groups == before[step], "the repeated step has another batch"
    assert (m.state.acked, m.state.next_claim) == (4, 4)
    assert m.state.lengths.trained_members == 4 * 2 * 2


def test_a_dropped_stale_group_does_not_hold_the_data_position_back() -> None:
    """TRL 7274: one group that is dropped as stale pins the position that every later checkpoint saves."""
    m = Machine(alpha=1.0, batch=1, size=1, reissues=0, order="ready_first", steps=12)
    m.start()
    (slow,) = m.lease(1)
    for step in range(4):
        m.fill(1, Version(0, step))
        m.train(step)
    m.put(slow, Version(0, 0))
    m.fill(1, Version(0, 4))
    m.train(4)
    assert m.state.expired == {"stale": 1}
    m.ask(ev.Durable("L", Version(0, 5)))
    cut = m.state.cuts["0.5"]
    assert cut.ordinal == m.state.next_ordinal, "the checkpoint's data position is behind"
    m.start(Version(0, 5), session="L2", fork="again")
    assert m.state.next_ordinal == cut.ordinal


def test_rollouts_that_wait_to_be_trained_survive_learner_and_store() -> None:
    """OpenRLHF 1322: rollouts in the buffer are lost when the run resumes."""
    m = trained(steps=2, durable=2)
    filled(m, Version(0, 2))
    ready = [g.id for g in m.state.open.values() if g.ready]
    assert len(ready) >= 2
    m.restart()
    m.start(Version(0, 2), session="L2")
    assert [g.id for g in m.state.open.values() if g.ready] == ready
    assert sorted(m.claim(2, 0, "L2").groups) == ready[:2]


def test_no_prompt_is_skipped_or_repeated_when_the_store_dies() -> None:
    """NeMo-RL 3599: prompts are skipped, as the data's position and the rollouts are saved at different moments."""
    m = trained(steps=4, durable=2)
    for cut in range(len(m.log) + 1):
        core = Core.recovered(m.core.settings, None, m.log[:cut], 0.0)
        issued = [e.task.index for e in m.log[:cut] if isinstance(e, ev.Issued)]
        assert issued == list(range(core.state.next_ordinal))
        assert core.state.cursor == (str(issued[-1]).encode() if issued else None)


def test_rollouts_and_unfinished_prompts_come_back_from_one_log() -> None:
    """NeMo-RL 3480: rows and their index are saved apart, and prompts in flight with neither: a restart loses some."""
    m = Machine(size=2, batch=2, alpha=2.0)
    m.start()
    keys = m.lease(6)
    for key in keys[:3]:  # one group is complete, one is half done, of one there is nothing
        m.put(key)
    issued = {key[0] for key in keys}
    for cut in range(len(m.log) + 1):
        found = Core.recovered(m.core.settings, None, m.log[:cut], 0.0).state
        logged = {(e.group, e.member) for e in m.log[:cut] if isinstance(e, ev.Put)}
        held = {(gid, number) for gid, group in found.open.items() for number, _ in group.done()}
        assert held == logged, "the index and the rows differ"
        assert len(found.open) == found.next_ordinal, "the data's position is ahead of the prompts that are held"
    m.restart()
    m.now += 11.0
    m.ask(ev.Tick())
    again = m.lease(3)
    assert {key[:2] for key in again} == {key[:2] for key in keys[3:]}, "unfinished members are not sampled again"
    for key in again:
        m.put(key)
    first = m.train(0).groups
    assert set(first) | {gid for gid, group in m.state.open.items() if group.ready} == issued


@pytest.mark.parametrize("turns", range(3))
def test_no_waiting_call_misses_the_change_that_it_waits_for(turns: int) -> None:
    """NeMo-RL 3410: an event between the check of a condition and the wait for it is lost, and the run hangs."""

    async def job() -> str:
        loop, wakeups, replies = asyncio.get_running_loop(), Wakeups(), [NoCredit("the window is full", 1.0), "granted"]
        keeper = SimpleNamespace(wakeups=wakeups, _clock=SimpleNamespace(now_s=loop.time), log=Committed())

        def changes(left: int) -> None:
            if left:
                loop.call_soon(changes, left - 1)
            else:
                wakeups.notify("lease")

        def ask() -> object:
            if len(replies) == 2:
                loop.call_soon(changes, turns)  # the earliest instants after the refusal
            return replies.pop(0)

        return await Keeper.answer_when_ready(keeper, ask, "lease", 20.0)  # pyright: ignore[reportArgumentType]

    assert asyncio.run(asyncio.wait_for(job(), 5.0)) == "granted"


class Committed:
    """A log that has written everything."""

    async def committed(self) -> None:
        """Return at once."""


@pytest.mark.parametrize("kind", ["INFRA", "DATA"])
def test_a_failed_generation_costs_its_member_and_not_the_worker(kind: str) -> None:
    """TRL 7176: a single generation that fails ends the rollout worker."""
    m = Machine(size=2, batch=1, alpha=0.0)
    m.start()
    first, second = m.lease(2)
    assert m.fail(first, kind) == "OK"
    m.now += 1.0
    (again,) = m.lease(2)
    assert again == (*first[:2], 2)
    m.put(again)
    m.put(second)
    assert m.claim(0).groups == (first[0],)


def test_a_straggler_does_not_delay_a_step_forever() -> None:
    """NeMo-RL 3238: one member that never finishes delays the step forever."""
    m = Machine(size=3, batch=1, alpha=0.0, straggler_deadline_s=60.0)
    m.start()
    keys = m.lease(3)
    for key in keys[:2]:
        m.put(key)
    with pytest.raises(NotReady, match=r"misses members 2"):
        m.claim(0)
    m.now += 61.0
    assert m.claim(0).groups == (keys[0][0],)
    assert m.put(keys[2]) == "SURPLUS", "the straggler's late put is surplus"


def test_leases_wait_for_the_next_published_weights() -> None:
    """prime-rl 3050: batches run ahead of the trainer's published weights, and both sides wait for each other."""
    m = Machine(size=1, batch=2, alpha=1.0, steps=6)
    m.start()
    for step in range(6):
        filled(m, Version(0, min(step, 5)))
        ahead = m.state.next_claim + sum(g.ready for g in m.state.open.values()) / 2 - step
        assert ahead <= 2, "more than α + 1 steps of samples before the next publication"
        m.train(step)
    assert m.state.acked == 6


@pytest.mark.parametrize("stage", ["begin", "publish", "lease", "put", "claim"])
def test_the_store_names_what_a_run_waits_for(stage: str) -> None:
    """verl 5815: an asynchronous run hangs, and no message names the process that it waits for."""
    m = Machine(size=1, batch=1, alpha=0.0)
    missing = {"begin": "learner", "publish": "learner", "lease": "samplers", "put": "S", "claim": "learner"}
    for name in ("begin", "publish", "lease", "put", "claim"):
        if name == stage:
            break
        if name == "begin":
            m.ask(ev.Begin("L", None))
        elif name == "publish":
            m.publish(Version(0, 0))
        elif name == "lease":
            keys = m.lease(1)
        else:
            m.put(keys[0])
    assert list(waits(m.core.settings, m.state)) == [missing[stage]]


def test_staleness_is_counted_by_token_and_the_counts_add_up() -> None:
    """slime 1781 and 2278: rollouts across weight updates count as one version, or not at all."""
    m = Machine(alpha=1.0, batch=1, size=1, on_stale="mask", order="ready_first", steps=12)
    m.start()
    (key,) = m.lease(1)
    for step in range(3):
        m.fill(1, Version(0, step))
        m.train(step)
    runs = tuple(VersionRun(Version(0, step), 2 + step) for step in range(4))
    m.ask(ev.PutMember(*key, "d", 100, runs))
    batch = m.claim(3)
    assert batch.groups == (key[0],)
    (claimed,) = [e for e in m.log if isinstance(e, ev.Claimed) and e.step == 3]
    assert claimed.masked_tokens == 2 + 3, (
        "the tokens of steps 0 and 1 are masked; those of 2 and 3 are within the bound"
    )
    assert m.state.tokens_masked == 5
    assert m.state.tokens_put == 3 * 5 + 2 + 3 + 4 + 5


def test_every_group_is_in_exactly_one_state() -> None:
    """All of the above: no group is lost without a record, so the states add up to the issued groups."""
    m = trained(steps=4, durable=2)
    m.restart()
    assert sum(counts(m.state).values()) == m.state.issued
