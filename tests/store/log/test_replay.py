"""`replay`: a sound log passes, and every way to damage a copy of it is found, by name and place."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from jaxroll import wire
from jaxroll.control import cli
from jaxroll.records import Version, VersionRef, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.invariants import Known
from jaxroll.store.core.state import State
from jaxroll.store.log import database
from jaxroll.store.log.replay import broken_by, replay_log
from jaxroll.store.server import keeper
from tests.harness.store.recorded_log import long_run, recorded_run
from tests.harness.store_model.checked_store import Disk, Waiting
from tests.harness.store_model.world import World

Damage = Callable[[sqlite3.Connection], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An eventful run whose history is whole, with snapshots in the middle of it."""
    run_dir = tmp_path_factory.mktemp("sound")
    asyncio.run(recorded_run(run_dir, compact_every=12))
    return run_dir


def test_a_sound_log_passes(sound: Path) -> None:
    with database.transaction(sound) as db:
        found = replay_log(db)
    assert found.violations == []
    assert found.whole and found.first == 1 and found.last == found.records
    assert found.checkpoints >= 1 and found.ages_checked and found.largest_age == 1
    assert found.kinds["put"] > 10 and {"claimed", "began", "durable", "died", "expired"} <= set(found.kinds)
    assert found.tables["payloads"] > 10 and found.tables["claims"] == 2


def test_a_compacted_log_says_from_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "COMPACT_EVERY", 100)
    asyncio.run(long_run(tmp_path, 12, history_bytes=6_000))
    with database.transaction(tmp_path) as db:
        found = replay_log(db)
        (base,) = db.execute("SELECT MIN(position) FROM snapshots").fetchone()
    assert found.violations == [] and not found.whole
    assert found.first == base + 1 > 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_store_decides_passes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of random runs with crashes, rewinds and forks: a check that cries wolf would be worth nothing."""
    written: list[bytes] = []
    write = Disk.write

    def remembering(disk: Disk, waiting: list[Waiting]) -> None:
        written.extend(itertools.chain.from_iterable(entry.events for entry in waiting))
        write(disk, waiting)

    monkeypatch.setattr(Disk, "write", remembering)
    world = World(seed, 300)
    world.run()
    state, seen = State(), Known(world.store.settings)
    for body in written:
        event = wire.decode(body, ev.Event)  # type: ignore[arg-type]
        assert broken_by(state, seen, event) == "", f"record {state.position}: {event}"
    assert state.position == world.store.core.state.position


def altered(kind: str, index: int, change: Callable[..., ev.Event]) -> Damage:
    """Replace the `index`-th record of a kind by the result of `change`."""

    def damage(db: sqlite3.Connection) -> None:
        rows = db.execute("SELECT position, body FROM log WHERE kind = ? ORDER BY position", (kind,)).fetchall()
        position, body = rows[index]
        event = change(wire.decode(body, ev.Event))  # type: ignore[arg-type]
        db.execute("UPDATE log SET body = ? WHERE position = ?", (wire.encode(event), position))

    return damage


def set_fields(**values: object) -> Callable[..., ev.Event]:
    return lambda event: msgspec.structs.replace(event, **values)


def run_sql(sql: str) -> Damage:
    return lambda db: db.execute(sql) and None


def _flip_a_payload_bit(db: sqlite3.Connection) -> None:
    group, member, body = db.execute(
        "SELECT group_id, member, body FROM payloads ORDER BY 1, 2 LIMIT 1 OFFSET 3"
    ).fetchone()
    body = body[:200] + bytes([body[200] ^ 1]) + body[201:]
    db.execute("UPDATE payloads SET body = ? WHERE group_id = ? AND member = ?", (body, group, member))


def _first_claim_again(event: ev.Claimed) -> ev.Claimed:
    return msgspec.structs.replace(event, groups=(1, 0))


TABLES = ("payloads", "groups", "members", "cursor", "lineages", "claim_groups", "questions")


def both(*damages: Damage) -> Damage:
    return lambda db: [damage(db) for damage in damages] and None


_OLD = (VersionRun(Version(0, 0), 4),)
_FUTURE = VersionRef(Version(0, 9), "tcp", "here", "d")

# name → (damage, in what it is found, why)
DAMAGES: dict[str, tuple[Damage, str, str]] = {
    "a claim twice": (altered("claimed", 1, _first_claim_again), "claimed", "which an earlier claim took"),
    "a claim out of order": (altered("claimed", 1, set_fields(step=2)), "claimed", "claim 2, the next is 1"),
    "a group twice in a claim": (altered("claimed", 1, set_fields(groups=(2, 2))), "claimed", "1 of them different"),
    "a short claim": (altered("claimed", 1, set_fields(groups=(2,))), "claimed", "has 1 groups, a step trains 2"),
    "a claim of an unfinished group": (altered("claimed", 2, set_fields(groups=(8, 10))), "claimed", "misses members"),
    "an ack of the future": (
        altered("acked", 1, set_fields(version=Version(0, 5))), "acked", "of which no claim was made"),
    "an ack twice": (altered("acked", 1, set_fields(version=Version(0, 0))), "acked", "the next is 1"),
    "durable before trained": (altered("durable", 0, set_fields(version=Version(0, 3))), "durable", "are acknowledged"),
    "old tokens": (
        both(run_sql("DELETE FROM snapshots"), altered("put", -5, set_fields(runs=_OLD))), "claimed", "older than 1"),
    "weights from the future": (altered("published", 1, set_fields(ref=_FUTURE)), "published", "after 1 claims"),
    "a put at unpublished weights": (
        altered("put", 0, set_fields(runs=(VersionRun(Version(0, 7), 4),))), "put", "never published"),
    "a put by an attempt that was not granted": (altered("put", 3, set_fields(attempt=9)), "put", "1 was granted"),
    "another kind of record": (altered("lease_ended", 0, lambda e: ev.DataEnded()), "lease_ended", "kind or group"),
    "a lease of a leased member": (
        both(altered("lease_ended", 0, lambda e: ev.Leased(e.group, ((e.members[0], 9),), "x", "x", "x", 1.0)),
             run_sql("UPDATE log SET kind = 'leased' WHERE position = (SELECT MIN(position) FROM log WHERE kind ="
                     " 'lease_ended')")), "leased", "which is leased"),
    "a lineage from nowhere": (altered("began", 1, set_fields(version=Version(4, 1))), "began", "the lineage is 1"),
    "a group issued twice": (altered("issued", 3, set_fields(group=1)), "issued", "kind or group"),
    "a record is missing": (run_sql("DELETE FROM log WHERE position = 30"), "", "records are missing"),
    "a record that is noise": (run_sql("UPDATE log SET body = x'c1c1' WHERE position = 12"), "", "cannot be read"),
    "a payload byte": (_flip_a_payload_bit, "payloads", "are not those that were put"),
    "a payload is lost": (run_sql("DELETE FROM payloads WHERE group_id = 2"), "payloads", r"lost its members \[0, 1\]"),
    "a table says another state": (
        run_sql("UPDATE groups SET state = 'DEAD' WHERE id = 0"), "groups", "are DEAD, 2 by the log"),
    "a table swaps two groups": (
        run_sql("UPDATE groups SET claim_step = 4 WHERE id = 2"), "groups", r"group 2 is \('ACKED', 4\)"),
    "a table forgets a digest": (
        run_sql("UPDATE members SET digest = 'x' WHERE group_id = 3"), "members", "it was put"),
    "a claim's groups change places": (
        run_sql("UPDATE claim_groups SET place = 10 - place WHERE step = 1"), "claim_groups", "claim 1 is"),
    "the prompts' cursor": (run_sql("UPDATE cursor SET state = x'00'"), "cursor", "prompt pipeline"),
    "how hard a question was": (
        run_sql("UPDATE questions SET trained = trained + 1 WHERE members > 0"), "questions", "by the log"),
    "a lineage's fork": (run_sql("UPDATE lineages SET fork_step = 0 WHERE lineage = 1"), "lineages", "by the log"),
    "a snapshot": (
        run_sql("UPDATE snapshot_parts SET body = (SELECT body FROM snapshot_parts p WHERE field = 'held') WHERE field"
                " = 'open' AND position = (SELECT MIN(position) FROM snapshots)"),
        "state checkpoint", "differs from the log"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(sound: Path, tmp_path: Path, name: str) -> None:
    damage, kind, said = DAMAGES[name]
    run_dir = shutil.copytree(sound, tmp_path / "run")
    db = sqlite3.connect(run_dir / "store.db")
    damage(db)
    db.commit()
    db.close()
    with database.transaction(run_dir) as db:
        found = replay_log(db)
    assert found.violations, name
    first = found.violations[0]
    assert first.kind == kind or not kind
    assert re.search(said, first.why)
    assert (first.position is None) == (kind in TABLES)


def test_the_command_says_what_it_checked_and_ends_with_1_when_something_is_wrong(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(sound)]) == 0
    said = capsys.readouterr().out
    assert "everything holds" in said and "no token older than the bound" in said and "17 put" in said
    run_dir = shutil.copytree(sound, tmp_path / "run")
    with sqlite3.connect(run_dir / "store.db") as db:
        _flip_a_payload_bit(db)
    db.close()
    assert cli.main(["replay", str(run_dir)]) == 1
    said = capsys.readouterr().out
    assert "1 violations" in said and "are not those that were put" in said
    assert cli.main(["replay", str(run_dir), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["violations"][0]["kind"] == "payloads"
    (run_dir / "store.db").unlink()
    assert cli.main(["replay", str(run_dir)]) == 64
    assert "no run here" in capsys.readouterr().err
