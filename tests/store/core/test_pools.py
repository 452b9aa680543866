"""Pools of samplers by tag: each takes the work of its pool, and that of others where none of theirs has room."""

from __future__ import annotations

import pytest

from jaxroll.config.parsing import SOURCE_ITEMS
from jaxroll.errors import NoCredit
from jaxroll.policy.routing import Pools
from jaxroll.records import Task, Version
from jaxroll.store.core import events as ev
from tests.harness.store.machine import V0, Machine

POOLS = Pools(("x", "y"), ("x", "y", ""))


class Pooled(Machine):
    """A machine whose stream takes its prompts from the sources `stream` in turn; X and Y are samplers of x and y."""

    def __init__(self, stream: tuple[int, ...] = (0, 1), pools: Pools = POOLS, **rules) -> None:
        super().__init__(pools=pools, **({"batch": 2, "size": 1, "alpha": 3.0} | rules))
        self.start()
        self.stream = stream
        for name in ("X", "Y", "X2"):
            self.ask(ev.Arrive(name, f"{name}-1", name[0].lower()))

    def take(self, name: str, members: int, offered: int = 8, version: Version = V0) -> list[int]:
        """The groups that `name` leases; the feeder has `offered` prompts ready."""
        self.requests += 1
        while True:  # as the service does
            first = self.state.next_ordinal
            prompts = tuple(self._prompt(index) for index in range(first, first + offered))
            try:
                reply = self.ask(ev.Lease(name, f"{name}-1", version, members, f"q{self.requests}", prompts))
            except NoCredit:
                return []
            if reply.grants or not reply.prompts_used:
                return [grant.group for grant in reply.grants for _ in grant.members]

    def _prompt(self, index: int) -> tuple[Task, bytes]:
        number = self.stream[index % len(self.stream)] * SOURCE_ITEMS + index
        return Task(number, (), "env", "{}", 0, f"{index:016x}"), str(index).encode()


def test_each_pool_leases_its_own_prompts_and_groups_keep_the_order_of_the_stream() -> None:
    m = Pooled()
    assert m.take("Y", 1) == [1], "X is not there yet, but Y has work of its own"
    assert m.take("X", 2) == [0, 2]
    assert m.take("Y", 2) == [3, 5]
    assert [group.task.index % SOURCE_ITEMS for group in m.state.open.values()] == [0, 1, 2, 3, 4, 5]


def test_a_sampler_without_other_work_helps_a_pool_that_is_full_at_once_and_not_one_with_room() -> None:
    m = Pooled(stream=(0,))
    assert m.take("X", 2) == [0, 1]
    assert m.take("Y", 1) == [2], "X is full"
    full = Pooled(stream=(0,))
    full.take("X", 8)
    assert full.take("X", 1) == [], "the window is full: X has room from now on"
    full.ask(ev.Release(((3, 0, 1),)))
    assert full.take("Y", 1) == [], "X has room"
    full.now += 11.0
    assert full.take("Y", 1) == [3], "X has not asked for a long time"


def test_the_pool_comes_first_where_both_kinds_of_work_wait() -> None:
    m = Pooled(stream=(0, 0, 0, 1))
    assert m.take("Y", 1) == [3], "not prompt 0, which is older"
    assert m.take("Y", 3) == [7, 0, 1], "then its own, then the oldest of the other pool"


def test_a_prompt_without_a_pool_and_a_sampler_without_one_go_anywhere() -> None:
    m = Pooled(stream=(2,))
    assert m.take("X", 1) + m.take("Y", 1) + m.take("S", 1) == [0, 1, 2]
    m = Pooled(stream=(0, 1))
    assert m.take("S", 3) == [0, 1, 2]


def test_a_sampler_of_no_pool_that_has_room_keeps_others_from_helping() -> None:
    m = Pooled(stream=(0,))
    m.take("X", 8)
    assert m.take("S", 1) == []
    m.ask(ev.Release(((0, 0, 1),)))
    assert m.take("Y", 1) == [] and m.take("S", 1) == [0]


def test_the_members_of_a_lost_sampler_go_to_its_pool() -> None:
    m = Pooled(stream=(0,))
    m.take("X", 8)
    m.take("X2", 1)
    m.ask(ev.Arrive("X", "X-9", "x"))  # it died and started again: its leases end
    assert m.take("Y", 1) == [], "X2 has room"
    assert m.take("X2", 2) == [0, 1]


def test_scarce_work_of_a_pool_is_shared_within_it() -> None:
    m = Pooled(stream=(0, 1), alpha=0.0, batch=8)
    for name in ("X", "X2", "Y"):
        assert m.take(name, 8, offered=0) == [], "no prompt is ready: they have room from now on"
    assert len(m.take("X", 8)) == 2 and len(m.take("X2", 8)) == 2 and len(m.take("Y", 8)) == 4


@pytest.mark.parametrize("pooled", [True, False])
def test_a_pool_of_long_answers_is_not_slow(pooled: bool) -> None:
    """Members of y take ten times as long as those of x; in one pool with them, Y would be put on trial."""
    m = Pooled(stream=(0, 1), pools=POOLS if pooled else Pools(), alpha=9.0, size=1, steps=1000, batch=8, lease_s=1e6)
    if not pooled:
        m.state.pools.clear()
    for _ in range(12):
        held = [(name, group) for name in ("X", "Y") for group in m.take(name, 2)]
        m.now += 3.0
        for name, group in held:
            if name == "X":
                m.put((group, 0, m.state.open[group].slots[0].attempt))
        m.now += 27.0
        for name, group in held:
            if name == "Y":
                m.put((group, 0, m.state.open[group].slots[0].attempt))
    assert ("Y" in m.state.holders) == (not pooled)


def test_pools_survive_a_restart_of_the_store_and_end_when_a_sampler_leaves() -> None:
    m = Pooled()
    m.restart()
    assert m.state.pools == {"X": "x", "Y": "y", "X2": "x"}
    m.ask(ev.Leave("X2", "X2-1"))
    m.ask(ev.Arrive("Y", "Y-1", "x"))  # a process that joined says its pool after its first request
    assert m.state.pools == {"X": "x", "Y": "x"}


def test_a_sampler_that_leaves_work_of_its_pool_to_others_helps_another_pool_meanwhile() -> None:
    """X2 fetches the new weights. X holds half of the work of x, and there is a prompt for y, whose sampler is full."""
    m = Pooled(stream=(1, 0, 0, 0, 0), alpha=0.0, batch=5, replicate="spread")
    for group in m.take("X", 4) + m.take("Y", 1):
        m.put((group, 0, 1))
    m.claim(0)
    assert m.take("X", 4) == m.take("X2", 4) == [], "both have room"
    m.publish(Version(0, 1))
    m.state.member_s["X"] = 60.0
    m.now += 0.5
    assert m.take("X", 4, version=Version(0, 1)) == [6, 7]
    assert m.take("X", 2, version=Version(0, 1)) == [5], "the rest of x is left to X2"


def test_a_sampler_leaves_the_work_of_another_pool_to_one_that_fetches_the_new_weights() -> None:
    """Y was idle and fetches them. X has no work of its own left, and does not take the prompt for y at once."""
    m = Pooled(stream=(1, 0), alpha=0.0, batch=2)
    for group in m.take("X", 1) + m.take("Y", 1):
        m.put((group, 0, 1))
    m.claim(0)
    assert m.take("X", 4) == m.take("Y", 4) == [], "both have room"
    m.now += 9.0
    m.publish(Version(0, 1))
    m.state.member_s["X"] = 60.0
    m.now += 3.0
    assert m.take("X", 4, version=Version(0, 1)) == [3]
    assert m.take("X", 4, version=Version(0, 1)) == [], "it is left to Y, which has asked for nothing for 12 s"
    m.now += 8.0
    assert m.take("X", 4, version=Version(0, 1)) == [2], "Y takes too long"
