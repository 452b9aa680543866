"""The report's figures from a log that the store's schema wrote."""

import sqlite3

import pytest

from jaxroll.errors import DataError
from jaxroll.records import Version, VersionRef, VersionRun
from jaxroll.report import record
from jaxroll.store.core import events as ev
from jaxroll.store.log import replay
from tests.harness.run_folder import GROUPS, MEMBERS, TOKENS, LogMaker, task


def version_ref(lineage, step):
    return VersionRef(Version(lineage, step), "tcp", "h:1", "m")


@pytest.fixture
def log() -> LogMaker:
    """A run of two steps with two groups each: the first is durable, the second trained; one more group has expired.

    Another group died of a DATA failure; 3 tokens of the second step were masked.
    """
    log = LogMaker()
    log.add(ev.Began(Version(0, 0), "L"), ev.Published(version_ref(0, 0)), t=100.0)
    for group in range(GROUPS):
        log.issue(group)
    log.issue(4, tokens=5)
    log.add(ev.Claimed(0, 0, (1, 0), 7), ev.Acked(Version(0, 0)), ev.Published(version_ref(0, 1)), t=101.0)
    log.add(ev.MadeDurable(Version(0, 1)))
    log.add(ev.Expired(4, "stale"))
    log.add(
        ev.Claimed(1, 0, (2, 3), 8, masked_tokens=3), ev.Acked(Version(0, 1)), ev.Published(version_ref(0, 2)), t=102.0
    )
    log.issue(5)
    log.add(ev.Issued(6, log.state.open[5].task, MEMBERS, cursor=b"c"))
    log.add(ev.Leased(6, ((0, 1),), "sampler-0", "s", "r", 30.0))
    log.add(ev.MemberFailed(6, 0, 1, "d", "DATA", "no such <word>", 0.0), ev.Died(6, "member 0"), t=103.0)
    return log


def test_figures_of_a_log_worked_out_by_hand(tmp_path, log):
    log.write(tmp_path)
    found = record.read(tmp_path, {"h2", "h9"})
    assert found.acked_groups == {0, 1, 2, 3}
    assert found.groups_by_state == {"TRIMMED": 2, "ACKED": 2, "READY": 1, "EXPIRED": 1, "DEAD": 1}
    assert found.reasons == {"stale": 1, "member 0": 1}
    assert found.heldout_in_train == 1
    assert found.conservation_residual == 0 and found.groups_trained_twice == 0
    put, lost = 5 * MEMBERS * TOKENS + MEMBERS * 5, MEMBERS * 5 + 3
    assert found.wasted_tokens == pytest.approx(lost / put)
    assert found.published == ((100.0, "0.0"), (101.0, "0.1"), (102.0, "0.2"))
    assert [(f.group, f.kind, f.error) for f in found.failures] == [(6, "DATA", "no such <word>")]


def test_a_claim_takes_as_long_as_its_slowest_group_from_its_first_lease_to_its_last_put(tmp_path):
    log = LogMaker()
    log.add(ev.Began(Version(0, 0), "L"), ev.Published(version_ref(0, 0)), t=100.0)
    for group, (first, second) in enumerate(((3.0, 4.0), (9.0, 6.0))):
        log.add(ev.Issued(group, task(group), 2, cursor=b"c"))
        for member, took_s in enumerate((first, second)):
            log.add(ev.Leased(group, ((member, 1),), "sampler-0", "s", f"r{group}{member}", 30.0), t=100.0 + member)
            put = ev.Put(group, member, 1, f"d{group}.{member}", 100, (VersionRun(Version(0, 0), 5),))
            log.add(put, t=100.0 + member + took_s)
    log.add(ev.Claimed(0, 0, (1, 0), 7, waited_s=0.5, worked_s=2.0), t=120.0)
    log.write(tmp_path)
    assert record.read(tmp_path, None).claim_times == (record.ClaimTimes(0.5, 2.0, 9.0, (3 + 4 + 9 + 6) / 4),)


def test_a_compacted_log_gives_the_same_figures(tmp_path, log):
    log.write(tmp_path / "whole")
    log.statements += replay.rows_of(replay.Mark(log.state.position, 0), 1.0, replay.parts(log.state))
    log.statements.append(("DELETE FROM log WHERE position <= ?", (log.state.position,)))
    log.issue(7)
    log.write(tmp_path / "compacted")
    log.statements.clear()
    whole, compacted = (record.read(tmp_path / name, None) for name in ("whole", "compacted"))
    assert compacted.conservation_residual == 0 and whole.heldout_in_train is None
    assert compacted.acked_groups == whole.acked_groups and compacted.lineages == whole.lineages
    assert compacted.wasted_tokens == pytest.approx((MEMBERS * 5 + 3) / (6 * MEMBERS * TOKENS + MEMBERS * 5))


def test_a_rewound_step_is_no_longer_acknowledged(tmp_path, log):
    log.add(ev.Began(Version(1, 1), "M", parent=0))
    log.write(tmp_path)
    found = record.read(tmp_path, None)
    assert found.acked_groups == {0, 1} and len(found.lineages) == 2


def write(run_dir, *statements):
    with sqlite3.connect(run_dir / "store.db") as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def test_a_group_in_two_durable_steps_is_found(tmp_path, log):
    log.write(tmp_path)
    # The schema refuses this, but a report must find it all the same.
    write(
        tmp_path,
        "CREATE TABLE loose AS SELECT * FROM claim_groups",
        "DROP TABLE claim_groups",
        "ALTER TABLE loose RENAME TO claim_groups",
        "INSERT INTO claim_groups VALUES (0, 1, 2, 0)",
    )
    assert record.read(tmp_path, None).groups_trained_twice == 0  # step 1 is not durable
    write(tmp_path, "UPDATE claims SET durable_lineage = 0")
    assert record.read(tmp_path, None).groups_trained_twice == 1


def test_a_group_missing_from_the_tables_is_reported(tmp_path, log):
    log.write(tmp_path)
    write(tmp_path, "DELETE FROM groups WHERE id = 5")
    assert record.read(tmp_path, None).conservation_residual == 1


def test_a_store_that_is_writing_is_not_disturbed(tmp_path, log):
    log.write(tmp_path)
    writer = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE groups SET state = 'EXPIRED'")
    assert record.read(tmp_path, None).conservation_residual == 0  # uncommitted changes are invisible
    writer.execute("COMMIT")
    writer.close()
    assert record.read(tmp_path, None).conservation_residual > 0


def test_a_finished_log_in_a_folder_that_cannot_be_written_is_read_as_immutable(tmp_path, log, monkeypatch):
    log.write(tmp_path)
    for name in ("store.db-wal", "store.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)

    class ReadOnlyFolder(sqlite3.Connection):
        """Behaves like SQLite where it cannot create the -shm file; with permissions instead, root could create it."""

        def execute(self, sql, *args):
            if self.mutable:
                raise sqlite3.OperationalError("unable to open database file")
            return super().execute(sql, *args)

    def connect(address, **options):
        connection = ReadOnlyFolder(address, **options)
        connection.mutable = "immutable=1" not in address
        return connection

    monkeypatch.setattr(record.sqlite3, "connect", connect)
    assert record.read(tmp_path, None).conservation_residual == 0
    (tmp_path / "store.db-wal").touch()  # a writer is active: an immutable view of the log could be torn
    with pytest.raises(DataError, match="unable to open"):
        record.read(tmp_path, None)


def test_no_log_a_new_log_and_a_broken_log(tmp_path, log):
    assert record.read(tmp_path, None) == record.LogFacts()
    (tmp_path / "store.db").touch()
    assert record.read(tmp_path, None) == record.LogFacts()
    (tmp_path / "store.db").write_bytes(b"this is not a database, however long it may be " * 40)
    with pytest.raises(DataError, match=r"store\.db"):
        record.read(tmp_path, None)
    (tmp_path / "store.db").unlink()
    log.write(tmp_path)
    write(tmp_path, "PRAGMA user_version = 99")
    with pytest.raises(DataError, match="schema version 99"):
        record.read(tmp_path, None)
