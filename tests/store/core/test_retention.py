"""Acknowledgements, durable steps and retention."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from jaxroll import config, wire
from jaxroll.errors import NoCredit, StaleClient
from jaxroll.records import Finished, Member, Version
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings, checkpoint_wanted
from tests.harness.store.builders import finished
from tests.harness.store.machine import V0, Machine


def test_acks_come_in_order_and_again_without_effect(machine: Machine) -> None:
    machine.fill(8)
    machine.train(0)
    machine.ask(ev.Ack("L", V0))
    with pytest.raises(StaleClient):
        machine.ask(ev.Ack("L", Version(0, 1)))
    with pytest.raises(StaleClient):
        machine.ask(ev.Ack("L", Version(1, 0)))


def test_durable_trims_what_it_covers_and_no_more(machine: Machine) -> None:
    machine.fill(8)
    machine.train(0)
    machine.train(1)
    with pytest.raises(StaleClient):
        machine.ask(ev.Durable("L", Version(0, 3)))
    machine.ask(ev.Durable("L", Version(0, 1)))
    assert machine.states() == {"TRIMMED": 2, "ACKED": 2}
    machine.ask(ev.Durable("L", Version(0, 1)))
    machine.ask(ev.Durable("L", V0))
    with pytest.raises(StaleClient, match="trimmed"):
        machine.claim(0)
    assert machine.states() == {"TRIMMED": 2, "ACKED": 2}


def test_a_full_budget_stops_leases_beyond_the_next_claim_only() -> None:
    m = Machine(alpha=4, retention_bytes=1000)
    m.start()
    for key in m.lease(4):
        m.put(key, size_bytes=400)
    with pytest.raises(NoCredit, match="retention"):
        m.lease(2)
    m.train(0)
    assert len(m.lease(4, Version(0, 1))) == 4, "the next claim always gets its groups"
    with pytest.raises(NoCredit, match="retention"):
        m.lease(2, Version(0, 1))
    m.ask(ev.Durable("L", Version(0, 1)))
    with pytest.raises(NoCredit, match="retention"):
        m.lease(2, Version(0, 1))  # open leases reserve as much as the largest member seen


def settings_of(steps: int, groups: int, size: int, tokens: int, *overrides: str) -> Settings:
    """The store's settings for a config file with these sizes and members of up to `tokens`, and `overrides`."""
    lengths = [f"sampling.max_tokens={tokens - 512}", "task.max_prompt_tokens=512", f"learner.row_tokens={tokens}"]
    sizes = [f"schedule.steps={steps}", f"schedule.groups_per_step={groups}", f"schedule.group_size={size}"]
    given = [*lengths, *sizes, *overrides]
    return Settings.of(config.parse(config.override(config.defaults().to_dict(), given), given))


def full_member_bytes(tokens: int) -> int:
    """The bytes of a stored member of so many tokens, with a mask of stale ones."""
    outcome = finished(0, 0, 1, (V0, tokens - 4)).outcome
    assert isinstance(outcome, Finished)
    prompt, answer = outcome.segments
    marked = msgspec.structs.replace(answer, sampled=answer.loss_mask)
    return len(wire.encode(Member(0, 0, 1, msgspec.structs.replace(outcome, segments=(prompt, marked)))))


@pytest.mark.parametrize(
    ("sizes", "overrides", "forces"),
    [
        ((45, 4, 4, 262_144), (), False),
        ((45, 4, 4, 262_144), ("store.retention_mb=512",), True),
    ],
)
def test_members_of_full_length_force_no_checkpoint_before_its_turn(sizes, overrides, forces: bool) -> None:
    """With the automatic `store.retention_mb`; 512 MB, which was the default, force one at nearly every step."""
    (steps, groups, size, tokens), settings = sizes, settings_of(*sizes, *overrides)
    size_bytes, forced = full_member_bytes(tokens), 0
    m = Machine(batch=groups, size=size, steps=steps, retention_bytes=settings.retention_bytes)
    m.prompts = (steps + 3) * groups
    m.start()
    for step in range(steps):
        with contextlib.suppress(NoCredit):  # until the in-flight window is full
            while keys := m.lease(groups * size, Version(0, step)):
                for key in keys:
                    m.put(key, Version(0, step), size_bytes=size_bytes)
        m.train(step)
        forced += checkpoint_wanted(settings, m.state)
        if step > 2 and (step - 1) % 20 == 0:  # the checkpoint after 20 steps is on disk two steps later
            m.ask(ev.Durable("L", Version(0, step - 1)))
    assert forced > steps // 2 if forces else forced == 0


@pytest.mark.parametrize(
    ("overrides", "factor"),
    [
        (("schedule.redundant_groups=4",), 2.0),
        (("schedule.redundant_members=4",), 2.0),
        (("sampling.top_k=5",), 3.0),
        (("schedule.alpha=1000",), 68 / 24),
    ],
)
def test_the_automatic_budget_has_room_for(overrides: tuple[str, ...], factor: float) -> None:
    """Surplus groups and members, recorded support, and no more steps than the run has."""
    sizes = (45, 4, 4, 262_144)
    found = settings_of(*sizes, *overrides).retention_bytes / settings_of(*sizes).retention_bytes
    assert found == pytest.approx(factor, rel=0.01)
    assert settings_of(4, 1, 2, 1024).retention_bytes == 512 * 2**20, "the least"
