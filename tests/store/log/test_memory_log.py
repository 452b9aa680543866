"""The log in memory against the log on disk: the same run leaves the same state, rows and bytes, without a wait."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from jaxroll.clock import ManualClock
from jaxroll.errors import NotReady
from jaxroll.records import Version, VersionRun
from jaxroll.sim.world import MemoryLog
from jaxroll.store.core import events as ev
from jaxroll.store.core.machine import Core
from jaxroll.store.log.commit_log import Log, statements
from jaxroll.store.log.database import CommitLog
from jaxroll.store.log.replay import replay_log
from jaxroll.store.server.keeper import Keeper
from tests.harness.store.recorded_log import SETTINGS, eventful_history, facts, fail, lease, publish, put


async def played(log: CommitLog) -> tuple[Core, dict[int, dict[int, bytes]], dict[tuple[int, int], object]]:
    """The machine after the history, the payloads of all groups alive, and the records of all members."""
    clock = ManualClock()
    kept = Keeper(SETTINGS, log, clock)
    for _ in eventful_history(kept, clock):
        await log.committed()
    state = kept.state
    payloads = {group: await log.payloads(group) for group in (*state.open, *state.held)}
    members = [(group, member) for group in range(state.next_group) for member in range(SETTINGS.group_size)]
    return kept.core, payloads, {key: await log.recorded(*key) for key in members}


def test_the_same_run_leaves_the_same_state_and_bytes(tmp_path: Path) -> None:
    async def both() -> None:
        disk, memory = Log(tmp_path), MemoryLog()
        left, right = await played(disk), await played(memory)
        assert facts(left[0]) == facts(right[0])
        assert left[1:] == right[1:]
        assert any(left[1].values()) and any(left[2].values())
        await disk.close()
        await memory.close()

    asyncio.run(both())


def test_its_records_and_tables_pass_the_replay() -> None:
    log = MemoryLog()
    core, _, _ = asyncio.run(played(log))
    found = replay_log(log.connection)
    assert found.violations == [] and found.whole
    assert found.last == core.state.position == found.records > 50
    log.connection.execute("UPDATE members SET attempt = attempt + 1 WHERE state = 'done'")
    assert replay_log(log.connection).violations


def test_it_never_waits_and_starts_no_thread() -> None:
    threads = threading.active_count()
    run = played(MemoryLog())
    with pytest.raises(StopIteration):
        run.send(None)  # one step suffices: no await suspends
    assert threading.active_count() == threads


def test_its_tables_agree_with_its_records_at_every_pause() -> None:
    """At the end, later events have hidden a state of a group that was not updated."""
    log, clock = MemoryLog(), ManualClock()
    for _ in eventful_history(Keeper(SETTINGS, log, clock), clock):
        assert replay_log(log.connection).violations == []


def test_its_tables_know_that_a_failed_member_waits_for_its_next_attempt() -> None:
    log = MemoryLog()
    kept = Keeper(replace(SETTINGS, data_retries=1), log, ManualClock())
    publish(kept, version := kept.decide(ev.Begin("L", None)))
    done, failed, *_ = lease(kept, 4, version, "a")
    put(kept, done, version)
    fail(kept, failed)
    assert done[0] == failed[0] and kept.state.open[failed[0]].state == "PENDING"
    assert replay_log(log.connection).violations == []


def test_the_row_of_a_put_has_its_oldest_and_newest_step_and_its_last_lineage() -> None:
    log = MemoryLog()
    kept = Keeper(SETTINGS, log, ManualClock())
    publish(kept, version := kept.decide(ev.Begin("L", None)))
    key = lease(kept, 2, version, "a")[0]
    event = ev.Put(*key, "d", 100, (VersionRun(Version(0, 2), 3), VersionRun(Version(1, 1), 1)), reward=1.0)
    log.append(statements(event, kept.state, kept.state.position + 1, 0.0))
    sql = "SELECT tokens, oldest_step, newest_step, lineage FROM members WHERE group_id = ? AND member = ?"
    assert log.connection.execute(sql, key[:2]).fetchone() == (4, 1, 2, 1)


def test_its_tables_know_that_a_group_whose_straggler_was_dropped_waits_for_a_step() -> None:
    """The group is ready before the rest of its batch: the decision that drops its member claims nothing."""
    log, clock = MemoryLog(), ManualClock()
    kept = Keeper(SETTINGS, log, clock)
    publish(kept, version := kept.decide(ev.Begin("L", None)))
    done, straggler, *_ = lease(kept, 4, version, "a")
    put(kept, done, version)
    clock.advance(SETTINGS.straggler_deadline_s)
    assert isinstance(kept.decide(ev.ClaimStep("L", 0, 0)), NotReady)
    assert done[0] == straggler[0] and kept.state.open[done[0]].state == "READY"
    assert replay_log(log.connection).violations == []
