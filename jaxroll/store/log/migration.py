"""Migration of a database with an older schema, in one transaction.

Tables whose definition did not change (in particular the payloads) stay as they are. The others are created again and
take over the columns that both versions have.
"""

from __future__ import annotations

import functools
import sqlite3

import msgspec

from jaxroll import wire
from jaxroll.records import Task
from jaxroll.store.core import events as ev
from jaxroll.store.core.machine import replay
from jaxroll.store.core.state import State
from jaxroll.store.log import schema, state_checkpoints

FROM = (1,)


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate from version 1. sqlite3.Error or MsgspecError if the old rows are inconsistent; then nothing changes."""
    wanted = definitions()
    connection.execute("BEGIN IMMEDIATE")
    try:
        old = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
        for kind, name in connection.execute("SELECT type, name FROM sqlite_master WHERE type != 'table'").fetchall():
            if not name.startswith("sqlite_"):
                connection.execute(f"DROP {kind} {name}")
        changed = [name for name, sql in wanted["table"].items() if name in old and old[name] != sql]
        for name in changed:
            connection.execute(f"ALTER TABLE {name} RENAME TO old_{name}")
        for kind in ("table", "index", "view"):
            for name, sql in wanted[kind].items():
                if kind != "table" or name not in old or name in changed:
                    connection.execute(sql)
        for name in changed:
            _take_over(connection, name)
        ordinals = _ordinals(connection)
        _fill_snapshot(connection, ordinals)
        _fill_log(connection, ordinals)
        _fill_tasks(connection)
        _fill_questions(connection)
        for name in (*(f"old_{name}" for name in changed), "snapshot"):
            connection.execute(f"DROP TABLE {name}")
        connection.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except KeyError as missing:
        connection.execute("ROLLBACK")
        raise sqlite3.DatabaseError(f"a row names group {missing}, which is not in the table of groups") from missing
    except BaseException:
        connection.execute("ROLLBACK")
        raise


@functools.cache
def definitions() -> dict[str, dict[str, str]]:
    """The statements that create the current tables, indexes and views, as SQLite stores them."""
    fresh = sqlite3.connect(":memory:")
    fresh.executescript(schema.TABLES)
    found: dict[str, dict[str, str]] = {"table": {}, "index": {}, "view": {}}
    written = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
    for kind, name, sql in fresh.execute(written):
        found[kind][name] = sql
    fresh.close()
    return found


@functools.cache
def columns() -> dict[str, frozenset[str]]:
    """The columns of the current tables."""
    fresh = sqlite3.connect(":memory:")
    fresh.executescript(schema.TABLES)
    found = {name: frozenset(_columns(fresh, name)) for name in definitions()["table"]}
    fresh.close()
    return found


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]


def _take_over(connection: sqlite3.Connection, name: str) -> None:
    before = _columns(connection, f"old_{name}")
    shared = [column for column in _columns(connection, name) if column in before]
    source = f"old_{name}"
    values = list(shared)
    if name == "claim_groups" and "lineage" not in before and "lineage" in _columns(connection, name):
        shared, values = [*shared, "lineage"], [*shared, "lineage"]
        source = f"old_{name} JOIN claims USING (step)"
    connection.execute(f"INSERT INTO {name} ({', '.join(shared)}) SELECT {', '.join(values)} FROM {source}")


def _ordinals(connection: sqlite3.Connection) -> dict[int, int]:
    """The position of each group's prompt in the stream. Version 1 had no forks, so new prompts came in order."""
    found: dict[int, int] = {}
    prompts = 0
    for group, original in connection.execute("SELECT id, reissue_of FROM groups ORDER BY id"):
        found[group] = prompts if original is None else found[original]
        prompts += original is None
    return found


def _fill_snapshot(connection: sqlite3.Connection, ordinals: dict[int, int]) -> None:
    """Write the checkpoint of version 1 in parts.

    It was a single value and held only the position of the newest prompt, so the others come from `ordinals`.
    """
    row = connection.execute("SELECT position, body FROM snapshot").fetchone()
    if row is None:
        return
    mark, state = state_checkpoints.Mark(row[0], 0), wire.decode(row[1], State)
    for group in (*state.open.values(), *state.held.values()):
        group.ordinal = ordinals[group.id]
    state.next_ordinal = state.prompts_issued
    if state.cursor is not None:
        state.stream = {state.next_ordinal - 1: state.cursor}
    for sql, values in state_checkpoints.rows_of(mark, 0.0, state_checkpoints.parts(state)):
        connection.execute(sql, values)


def _fill_log(connection: sqlite3.Connection, ordinals: dict[int, int]) -> None:
    """Add the group to each record, and the position of its prompt to each issue."""
    for position, body in connection.execute("SELECT position, body FROM log").fetchall():
        event = wire.decode(body, ev.Event)
        if isinstance(event, ev.Issued):
            body = wire.encode(msgspec.structs.replace(event, ordinal=ordinals[event.group]))
        filled = (getattr(event, "group", None), body, position)
        connection.execute("UPDATE log SET group_id = ?, body = ? WHERE position = ?", filled)


def _fill_questions(connection: sqlite3.Connection) -> None:
    """Fill the table of questions from the checkpoint and the records since; version 1 did not count questions."""
    mark, state = state_checkpoints.newest(connection) or (state_checkpoints.Mark(0, 0), State())
    later = connection.execute("SELECT body FROM log WHERE position > ? ORDER BY position", (mark.position,))
    replay(state, (wire.decode(body, ev.Event) for (body,) in later), 0.0)
    for question, known in state.questions.items():
        values = (question, known.issued, known.trained, known.members, known.reward_sum, known.last_step)
        connection.execute(
            "INSERT INTO questions (question_hash, issued, trained, members, reward_sum, last_step)"
            " VALUES (?, ?, ?, ?, ?, ?)", values,
        )  # fmt: skip


def _fill_tasks(connection: sqlite3.Connection) -> None:
    """Fill the table of tasks for the groups alive, from the checkpoint and the records since."""
    found: dict[int, Task] = {}
    if kept := state_checkpoints.newest(connection):
        found = {gid: g.task for gid, g in (*kept[1].open.items(), *kept[1].held.items())}
    for (body,) in connection.execute("SELECT body FROM log WHERE kind = 'issued'"):
        event = wire.decode(body, ev.Event)
        found[event.group] = event.task
    alive = {gid for (gid,) in connection.execute("SELECT id FROM groups WHERE ended_unix_s IS NULL")}
    for gid in sorted(alive & found.keys()):
        connection.execute(*schema.task(gid, found[gid]))
