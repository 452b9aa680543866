"""The traps that the contract names: each scenario is run as it is and with the trap put back, where it must fail.

A trap is a plausible simplification that a simulation of the contract fell into. `trapped` puts it into the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from jaxroll.errors import ConfigError, NoCredit, NotReady, StoreRefusal
from jaxroll.policy.limiter import AgeLimiter, Share
from jaxroll.records import Version
from jaxroll.store.core import events as ev
from jaxroll.store.core import leases, training
from jaxroll.store.core.admission import MemberChooser
from jaxroll.store.core.state import State, base_step
from tests.harness.store.machine import Machine


class Greedy:
    """Samplers that take every lease at once and a learner that trains whenever it can, without faults."""

    def __init__(self, machine: Machine, hold_back: Callable[[int], int] = lambda group: 0) -> None:
        """`hold_back(group)` is for how many rounds a group's members are not put."""
        self.machine, self.hold_back = machine, hold_back
        self.version, self.session = machine.start(), "L"
        self.serving = self.version
        self.work: dict[ev.Key, int] = {}
        self.drawn: dict[ev.Key, Version] = {}
        self.age_max = 0

    def round(self) -> bool:
        """One lease, the puts that are due, one step of the learner; whether the step was trained."""
        m = self.machine
        try:
            for key in m.lease(1000, self.serving):
                self.work[key], self.drawn[key] = self.hold_back(key[0]), self.serving
        except StoreRefusal:
            pass
        for key, left in list(self.work.items()):
            self.work[key] = left - 1
            if left <= 0:
                del self.work[key]
                m.put(key, self.drawn.pop(key))
        try:
            batch = m.claim(self.version.step, self.version.lineage, self.session)
        except NotReady:
            return False
        for gid in batch.groups:
            self.age_max = max(self.age_max, self.version.step - m.state.held[gid].oldest_step)
        after = Version(self.version.lineage, self.version.step + 1)
        if after.step % m.core.settings.limiter.publish_every == 0:
            m.publish(after, self.session)
            self.serving = after
        m.ask(ev.Ack(self.session, self.version))
        self.version = after
        return True

    def run(self, steps: int) -> None:
        """Until `steps` are trained; AssertionError when nothing moves any more."""
        still = 0
        while self.version.step < steps:
            still = 0 if self.round() else still + 1
            assert still < 30, f"deadlock at {self.version}: {self.machine.states()}"


def clean(play: Callable[[], Greedy]) -> None:
    """The run ends, nothing was wasted, and no token was older than the bound."""
    greedy = play()
    assert greedy.machine.state.expired == {}
    assert greedy.age_max <= math.ceil(greedy.machine.core.settings.limiter.alpha)


# --- fractional α


def fractional() -> Greedy:
    greedy = Greedy(Machine(alpha=0.5, batch=4, size=1, steps=30))
    greedy.run(20)
    return greedy


def test_fractional_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is ⌊(α + 1)·B⌋, so a token may be ⌈α⌉ old: a bound of ⌊α⌋ throws away what admission let in."""
    clean(fractional)
    assert fractional().age_max == 1
    monkeypatch.setattr(AgeLimiter, "max_age", property(lambda limiter: math.floor(limiter.alpha)))
    with pytest.raises(AssertionError):
        clean(fractional)


def test_fractional_windows_are_rounded_down() -> None:
    """Rounded up, (1 + 0.5)·3 = 4.5 would admit a fifth group; with α = 0.1 and B = 10 floats must not lose one."""
    for alpha, batch, window in ((0.5, 3, 4), (0.1, 10, 11), (0.7, 10, 17), (0.99, 1, 1)):
        m = Machine(alpha=alpha, batch=batch, size=1, steps=100)
        m.start()
        assert len(m.lease(1000)) == window


# --- publish_every


def seldom_published(every: int) -> Greedy:
    machine = Machine(alpha=1.0, batch=2, size=1, steps=30)
    object.__setattr__(machine.core.settings.limiter, "publish_every", every)  # past the constructor that refuses it
    greedy = Greedy(machine)
    greedy.run(12)
    return greedy


def test_publish_every() -> None:
    """With ⌊α + 1⌋ claims between publications the run goes on; with one more the claims in flight fill the window."""
    clean(lambda: seldom_published(2))
    with pytest.raises(ConfigError, match="publish_every"):
        Machine(alpha=1.0, batch=2, publish_every=3)
    with pytest.raises(AssertionError, match="deadlock"):
        seldom_published(3)


# --- retries behind new prompts


def only_when_no_prompt_is_left(settings, state: State, r: ev.Lease, share: Share, taker: MemberChooser, now_s: float):
    """The trap: what is free in open groups waits until no new prompt may be issued."""
    used, events, grants, refused = leases._lease_prompts(settings, state, r, share, r.max_members)
    return events, grants, r.max_members - sum(len(g.members) for g in grants), refused or ("later" if used else "")


def test_retries_come_before_new_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    m = Machine(alpha=2.0, batch=2, size=1)
    m.start()
    keys = m.lease(3)
    m.ask(ev.Release((keys[0],)))
    assert m.lease(2) == [(0, 0, 2), (3, 0, 1)]
    m.ask(ev.Release(((0, 0, 2),)))
    assert m.lease(1) == [(0, 0, 3)]
    m.ask(ev.Release(((0, 0, 3),)))
    monkeypatch.setattr(leases, "_lease_open", only_when_no_prompt_is_left)
    assert m.lease(1) == [(4, 0, 1)], "with the trap the head waits for every prompt behind it"


def test_retries_are_admitted_though_the_window_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry is asked with the groups before it, not with all: its own group already holds its credit."""

    def lost_in_a_full_window() -> list[ev.Key]:
        m = Machine(alpha=1.0, batch=2, size=1)
        m.start()
        keys = m.lease(100)
        m.ask(ev.Release((keys[0],)))
        return m.lease(1)

    assert lost_in_a_full_window() == [(0, 0, 2)]
    monkeypatch.setattr(leases, "groups_ahead", lambda policy, place, total: total)
    with pytest.raises(NoCredit):
        lost_in_a_full_window()


# --- skipped heads


def long_head() -> Greedy:
    """Every fifth group takes six rounds, the others one."""
    greedy = Greedy(Machine(alpha=1.0, batch=2, size=1, steps=60), lambda group: 6 if group % 5 == 0 else 0)
    greedy.run(30)
    return greedy


def skipping(policy: str, candidates, batch: int, redundant: int, last: bool) -> training.Pick:
    """The trap: the head is passed over when it is not ready, as if the next one were as good."""
    ready = [c for c in candidates if c.ready_place is not None]
    return true_pick(policy, ready if len(ready) >= batch else candidates, batch, redundant, last)


true_pick = training.pick


def test_heads_are_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is passed over grows stale, and its long prompt comes again and again."""
    clean(long_head)
    monkeypatch.setattr(training, "pick", skipping)
    with pytest.raises(AssertionError):
        clean(long_head)
    lengths = long_head().machine.state
    assert lengths.expired["stale"] > 0


# --- redundancy


def racing() -> Greedy:
    """One group in four is slow; with one redundant group a claim need not wait for it."""
    greedy = Greedy(Machine(alpha=0.0, batch=3, redundant=1, size=1, steps=60), lambda g: 5 if g % 4 == 0 else 0)
    rounds = 0
    while greedy.version.step < 20:
        greedy.round()
        rounds += 1
    assert rounds <= 22, f"{rounds} rounds for 20 claims: no group raced"
    assert greedy.machine.state.expired == {"surplus": 20}
    assert greedy.age_max == 0
    return greedy


def test_redundant_groups_are_inside_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """R is part of the window and of the claim's head; a window without it never leases them, and no group races."""
    racing()
    window = AgeLimiter.window
    monkeypatch.setattr(AgeLimiter, "window", lambda limiter, lag: window(limiter, lag) - limiter.redundant_groups)
    with pytest.raises(AssertionError):
        racing()


def test_the_surplus_ends_with_its_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Surplus that lives on grows older than the bound; the trap keeps it for the next claim."""
    kept = Machine(alpha=0.0, batch=3, redundant=1, size=1, steps=60)
    monkeypatch.setattr(training, "_surplus", lambda head, chosen, redundant: ())
    greedy = Greedy(kept, lambda g: 1 if g % 4 == 0 else 0)
    for _ in range(40):
        greedy.round()
    assert kept.state.expired.get("stale", 0) > 0
    assert "surplus" not in kept.state.expired


# --- replays


def replaying() -> Greedy:
    """The learner dies far ahead of its checkpoint; samplers go on from the weights of the new lineage."""
    m = Machine(alpha=1.0, batch=2, size=1, steps=60)
    greedy = Greedy(m)
    greedy.run(6)
    greedy.work.clear()
    greedy.drawn.clear()
    greedy.session = "L2"
    greedy.version = greedy.serving = m.start(Version(0, 1), "L2")
    assert m.state.next_claim == 6, "five claims to be replayed"
    m.now = 100.0
    m.ask(ev.Tick())
    before = dict(m.state.expired)
    greedy.run(14)
    assert m.state.expired == before, "what was sampled during the replay is trained"
    assert greedy.age_max <= 1
    return greedy


def without_replays(state: State) -> int:
    """The trap: only claims since the learner began count as claimed and not yet published."""
    first = max(base_step(state), state.replay_until)
    return sum(len(state.batches[step].groups) for step in range(first, state.next_claim))


def test_replays_count_as_outstanding(monkeypatch: pytest.MonkeyPatch) -> None:
    replaying()
    monkeypatch.setattr(leases, "unpublished_groups", without_replays)
    with pytest.raises(AssertionError):
        replaying()


# --- the bound itself, off by one


def test_alpha_off_by_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission alone holds the bound (nothing expires); one group too many and something does, or is too old."""
    play = lambda: _ran(Greedy(Machine(alpha=1.0, batch=2, size=1, steps=60)))  # noqa: E731
    clean(play)
    window = AgeLimiter.window
    monkeypatch.setattr(AgeLimiter, "window", lambda limiter, lag: window(limiter, lag) + 1)
    with pytest.raises(AssertionError):
        clean(play)


def _ran(greedy: Greedy) -> Greedy:
    greedy.run(20)
    return greedy


def test_guard_b_alone_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """And delivery alone holds it too, at the price of waste: the two guards are independent."""
    monkeypatch.setattr(AgeLimiter, "window", lambda limiter, lag: 100)
    greedy = _ran(Greedy(Machine(alpha=1.0, batch=2, size=1, steps=60, reissues=100)))
    assert greedy.age_max <= 1
    assert greedy.machine.state.expired["stale"] > 0
