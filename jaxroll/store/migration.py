"""Brings a database of an older schema up to date, in one transaction: all of it or nothing.

Tables whose definition did not change (the payloads, above all) stay where they are. The others are made anew and take
over the columns that both have.
"""

from __future__ import annotations

import sqlite3

from jaxroll import wire
from jaxroll.records import Task
from jaxroll.store import events as ev
from jaxroll.store import schema, snapshots
from jaxroll.store.state import State

FROM = (1,)


def migrate(connection: sqlite3.Connection) -> None:
    """From version 1. sqlite3.Error or MsgspecError when the old rows do not make sense; then nothing is changed."""
    wanted = _definitions()
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
        _fill_snapshot(connection)
        _fill_log(connection)
        _fill_tasks(connection)
        for name in (*(f"old_{name}" for name in changed), "snapshot"):
            connection.execute(f"DROP TABLE {name}")
        connection.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _definitions() -> dict[str, dict[str, str]]:
    """The statements that make today's tables, indexes and views, as SQLite keeps them."""
    fresh = sqlite3.connect(":memory:")
    fresh.executescript(schema.TABLES)
    found: dict[str, dict[str, str]] = {"table": {}, "index": {}, "view": {}}
    written = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
    for kind, name, sql in fresh.execute(written):
        found[kind][name] = sql
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


def _fill_snapshot(connection: sqlite3.Connection) -> None:
    """The one snapshot of version 1 was a single value."""
    row = connection.execute("SELECT position, body FROM snapshot").fetchone()
    if row is None:
        return
    mark = snapshots.Mark(row[0], 0)
    for sql, values in snapshots.rows_of(mark, 0.0, snapshots.parts(wire.decode(row[1], State))):
        connection.execute(sql, values)


def _fill_log(connection: sqlite3.Connection) -> None:
    """The groups that the records name."""
    for position, body in connection.execute("SELECT position, body FROM log").fetchall():
        group = getattr(wire.decode(body, ev.Event), "group", None)
        connection.execute("UPDATE log SET group_id = ? WHERE position = ?", (group, position))


def _fill_tasks(connection: sqlite3.Connection) -> None:
    """What the groups alive were asked: from the snapshot and from the records since."""
    found: dict[int, Task] = {}
    if kept := snapshots.newest(connection):
        found = {gid: g.task for gid, g in (*kept[1].open.items(), *kept[1].held.items())}
    for (body,) in connection.execute("SELECT body FROM log WHERE kind = 'issued'"):
        event = wire.decode(body, ev.Event)
        found[event.group] = event.task
    alive = {gid for (gid,) in connection.execute("SELECT id FROM groups WHERE ended_unix_s IS NULL")}
    for gid in sorted(alive & found.keys()):
        connection.execute(*schema.task(gid, found[gid]))
