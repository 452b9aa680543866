"""Long polls notify a sampler at once of its ended leases: once for each lease, and never of other samplers' leases."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll.records import Version
from jaxroll.store.server.keeper import Workers

V0 = Version(0, 0)
WAIT_S = 20.0


def test_samplers_that_work_on_unneeded_members_learn_of_it(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(alpha=0.0, groups_per_step=1, group_size=2, redundant_members=1, steps=2)

    async def job() -> None:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler", "a") as a,
            small.connected(tmp_path, config, "sampler", "b") as b,
        ):
            await learner.begin(None)
            await learner.publish(small.version_ref(V0))
            mine = small.keys(await a.lease(V0, 2, WAIT_S))
            (other,) = small.keys(await b.lease(V0, 2, WAIT_S))
            waiting = asyncio.ensure_future(b.ended(WAIT_S))
            for key in mine:
                assert not waiting.done()
                await a.put(small.finished(*key, (V0, 3)))
            assert await waiting == [other]
            assert await b.ended(0.0) == [], "each is reported once"
            assert await a.ended(0.0) == [], "what it put itself did not end"
            assert await b.put(small.finished(*other, (V0, 3))) == "SURPLUS"

    run(job())


def test_holders_learn_of_a_rewind_and_a_filtered_group(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(alpha=1.0, groups_per_step=1, group_size=2, steps=4)

    async def job() -> None:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler", "a") as a,
        ):
            await learner.begin(None)
            await learner.publish(small.version_ref(V0))
            await small.produce(a, V0, 2)
            await learner.claim(0, 0, WAIT_S)
            await learner.publish(small.version_ref(Version(0, 1)))
            await learner.ack(V0)
            held = small.keys(await a.lease(Version(0, 1), 2, WAIT_S))
            waiting = asyncio.ensure_future(a.ended(WAIT_S))
            async with small.connected(tmp_path, config, "learner", "again") as again:
                await again.begin(V0)
            assert await waiting == held

    run(job())


def test_a_sampler_that_leaves_gives_its_members_to_another_and_gets_none(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves by itself, or because the run does not need it any more."""
    config = small.configured()

    async def moves(folder: Path, leaving: str, giver: str) -> tuple[str, str]:
        """The samplers to which `a` with one member and `b` with two give them; `giver` waits for the other."""
        folder.mkdir()
        async with (
            small.serving(folder, config),
            small.connected(folder, config, "sampler", "a") as a,
            small.connected(folder, config, "sampler", "b") as b,
        ):
            one, other = await asyncio.gather(
                a.repack(V0, 1, 0, 10.0 if giver == "a" else 0.2, leaves=leaving == "a"),
                b.repack(V0, 2, 0, 10.0 if giver == "b" else 0.2, leaves=leaving == "b"),
            )
            return one.to, other.to

    async def job() -> None:
        assert await moves(tmp_path / "none", "", "a") == ("b", "")
        assert await moves(tmp_path / "a", "a", "a") == ("b", "")
        assert await moves(tmp_path / "b", "b", "b") == ("", "a")
        monkeypatch.setattr(Workers, "is_surplus", lambda workers, caller: caller.name == "b")
        assert await moves(tmp_path / "surplus", "", "b") == ("", "a")

    run(job())
