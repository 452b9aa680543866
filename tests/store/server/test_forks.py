"""A fork through client, service, log and feeder, its rows in the tables, and the learner's version after it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from jaxroll.errors import StaleClient
from jaxroll.policy.selection import NEW_LOG
from jaxroll.records import LogStart, Version
from jaxroll.store.core.state import on_line
from jaxroll.store.log import database
from jaxroll.store.log.replay import replay_log

LINE = (
    "SELECT step FROM claims JOIN line ON line.lineage = durable_lineage AND step < upto"
    " GROUP BY step HAVING COUNT(*) > 1"
)
TWICE = (
    "SELECT group_id FROM claim_groups JOIN claims USING (lineage, step) WHERE durable_lineage IS NOT NULL"
    " GROUP BY group_id HAVING COUNT(*) > 1"
)


async def trained(small, learner, sampler, version: Version) -> list[int]:
    """One step, durable; the prompts it was made of."""
    await small.produce(sampler, version, 4)
    claim = await learner.claim(version.lineage, version.step, 5.0)
    after = Version(version.lineage, version.step + 1)
    await learner.publish(small.version_ref(after))
    await learner.ack(version)
    await learner.durable(after)
    return sorted(group.task.index for group in claim.groups)


def test_a_run_goes_on_from_below_the_trim_mark_in_a_new_lineage(tmp_path: Path, small, run) -> None:
    config, feed = small.configured(alpha=0.0), small.Feed()

    async def play() -> None:
        async with (
            small.serving(tmp_path, config, feed),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            await learner.publish(small.version_ref(await learner.begin(None)))
            for step in range(3):
                assert await trained(small, learner, sampler, Version(0, step)) == [2 * step, 2 * step + 1]
            with pytest.raises(StaleClient, match="--fork"):
                await learner.begin(Version(0, 1))
            assert await learner.begin(Version(0, 1), "again") == Version(1, 1)
            assert await learner.begin(Version(0, 1), "again") == Version(1, 1), "an answer was lost; not another one"
            await learner.publish(small.version_ref(Version(1, 1)))
            for step in (1, 2):
                assert await trained(small, learner, sampler, Version(1, step)) == [2 * step, 2 * step + 1]

    async def after_a_restart() -> None:
        async with (
            small.serving(tmp_path, config, feed),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            lines = list(learner.welcome.lineages)
            assert [on_line(lines, Version(*v)) for v in ((0, 1), (0, 2), (1, 3))] == [True, False, True]
            await learner.publish(small.version_ref(await learner.begin(Version(1, 3))))
            assert await trained(small, learner, sampler, Version(1, 3)) == [6, 7]

    run(play())
    run(after_a_restart())
    db = sqlite3.connect(tmp_path / "store.db")
    assert db.execute("SELECT lineage, step, durable_lineage, forked_by FROM claims ORDER BY 1, 2").fetchall() == [
        (0, 0, 0, None),
        (0, 1, 0, None),
        (0, 2, 0, None),
        (1, 1, 1, None),
        (1, 2, 1, None),
        (1, 3, 1, None),
    ]
    assert db.execute("SELECT lineage, upto > 1000 OR upto FROM line ORDER BY lineage").fetchall() == [(0, 1), (1, 1)]
    sql = "SELECT question_hash, issued, trained, members, reward_sum, last_step FROM questions ORDER BY 1 LIMIT 3"
    assert db.execute(sql).fetchall() == [
        (f"{0:016x}", 1, 1, 2, 2.0, 0),
        (f"{1:016x}", 1, 1, 2, 2.0, 0),
        (f"{2:016x}", 2, 2, 4, 4.0, 1),
    ], "difficulty counts all groups seen, on any line"
    assert db.execute(LINE).fetchall() == db.execute(TWICE).fetchall() == []
    assert db.execute("SELECT COUNT(*) FROM groups WHERE state = 'TRIMMED'").fetchone() == (12,)
    db.close()


def test_claims_that_a_fork_gives_up_are_marked_and_never_durable(tmp_path: Path, small, run) -> None:
    config = small.configured(alpha=1.0)

    async def play() -> dict:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            await learner.publish(small.version_ref(await learner.begin(None)))
            assert await trained(small, learner, sampler, Version(0, 0)) == [0, 1]
            await small.produce(sampler, Version(0, 1), 8)
            await learner.claim(0, 1, 5.0)
            await learner.publish(small.version_ref(Version(0, 2)))
            await learner.ack(Version(0, 1))
            await learner.publish(small.version_ref(await learner.begin(Version(0, 1), "again")))
            assert await trained(small, learner, sampler, Version(1, 1)) == [2, 3]
            return await learner.status()

    report = run(play())
    assert (report["conservation_residual"], report["counts"]["EXPIRED"]) == (0, 4 - report["counts"]["PENDING"])
    db = sqlite3.connect(tmp_path / "store.db")
    sql = "SELECT lineage, step, trained_lineage, durable_lineage, forked_by FROM claims ORDER BY 1, 2"
    assert db.execute(sql).fetchall() == [(0, 0, 0, 0, None), (0, 1, 0, None, 1), (1, 1, 1, 1, None)]
    states = dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    assert states == {name: count for name, count in report["counts"].items() if count}
    db.close()


def test_the_data_begins_again_after_it_had_ended(tmp_path: Path, small, run) -> None:
    config, feed = small.configured(alpha=0.0), small.Feed(limit=4)

    async def play() -> None:
        async with (
            small.serving(tmp_path, config, feed),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            await learner.publish(small.version_ref(await learner.begin(None)))
            for step in (0, 1):
                await trained(small, learner, sampler, Version(0, step))
            while not (await learner.status())["data_ended"]:
                pass
            await learner.publish(small.version_ref(await learner.begin(None, "again")))
            assert await trained(small, learner, sampler, Version(1, 0)) == [0, 1]

    run(play())


def test_a_new_log_begins_at_a_checkpoint_whose_log_is_lost(tmp_path: Path, small, run) -> None:
    """It trains the prompts that the lost one would have trained, at the steps and in the order of that."""
    config, lost, new = small.configured(steps=6), tmp_path / "lost", tmp_path / "new"

    async def before() -> tuple[LogStart, list[int]]:
        async with (
            small.serving(lost, config),
            small.connected(lost, config, "learner") as learner,
            small.connected(lost, config, "sampler") as sampler,
        ):
            await learner.publish(small.version_ref(await learner.begin(None)))
            for step in range(2):
                await trained(small, learner, sampler, Version(0, step))
            await small.produce(sampler, Version(0, 2), 8)  # groups of two claims, which the lost log alone has
            after = [(await learner.claim(0, 2, 5.0)).after]
            await learner.publish(small.version_ref(Version(0, 3)))
            later = await learner.claim(0, 3, 5.0)
            assert isinstance(after[0], LogStart) and (after[0].cut.ordinal, later.after.cut.ordinal) == (6, 8)
            return after[0], sorted(group.task.index for group in later.groups)

    log, prompts = run(before())
    began = (Version(0, 3), NEW_LOG, log)

    async def after() -> None:
        async with (
            small.serving(new, config),
            small.connected(new, config, "learner") as learner,
            small.connected(new, config, "sampler") as sampler,
        ):
            for unsound in (LogStart(lines=((None, 0), (1, 3))), LogStart(lines=()), LogStart(lines=((0, 0),))):
                with pytest.raises(StaleClient, match="no new log"):
                    await learner.begin(Version(0, 3), NEW_LOG, unsound)
            assert await learner.begin(*began) == Version(1, 3)
            assert await learner.begin(*began) == Version(1, 3), "the answer was lost"
            await learner.publish(small.version_ref(Version(1, 3)))
            assert await trained(small, learner, sampler, Version(1, 3)) == prompts == [6, 7]
            with pytest.raises(StaleClient, match="no new log"):
                await learner.begin(Version(0, 3), "another", log)

    async def after_a_restart() -> dict:
        async with (
            small.serving(new, config),
            small.connected(new, config, "learner") as learner,
            small.connected(new, config, "sampler") as sampler,
        ):
            assert [on_line([*learner.welcome.lineages], Version(*v)) for v in ((0, 3), (0, 4))] == [True, False]
            await learner.publish(small.version_ref(await learner.begin(Version(1, 4), NEW_LOG)))
            assert await trained(small, learner, sampler, Version(1, 4)) == [8, 9]
            return await learner.status()

    run(after())
    status = run(after_a_restart())
    assert (status["conservation_residual"], status["claims"], status["durable"]) == (0, 5, 5)
    with database.transaction(new) as db:
        assert replay_log(db).violations == []
        assert db.execute("SELECT MIN(id) FROM groups").fetchone() == (log.cut.groups,), "random keys are by group"
        assert db.execute("SELECT step FROM claims ORDER BY step").fetchall() == [(3,), (4,)]
        assert db.execute("SELECT lineage, parent, fork_step FROM lineages").fetchall() == [(0, None, 0), (1, 0, 3)]
