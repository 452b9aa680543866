"""Two samplers at one server, both idle while the learner trained: each gets its part of the next step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll.errors import NoCredit
from jaxroll.records import Version
from jaxroll.store.client import StoreClient
from jaxroll.store.core import admission

WAIT_S = 20.0
V0, V1 = Version(0, 0), Version(0, 1)


@asynccontextmanager
async def second_step(tmp_path: Path, small: SimpleNamespace) -> AsyncIterator[tuple[StoreClient, StoreClient]]:
    """Two samplers that were idle while the learner trained its first step."""
    config = small.configured(alpha=0.0, groups_per_step=2, group_size=4, group_placement="spread", steps=3)
    async with (
        small.serving(tmp_path, config),
        small.connected(tmp_path, config, "learner") as learner,
        small.connected(tmp_path, config, "sampler", "a") as a,
        small.connected(tmp_path, config, "sampler", "b") as b,
    ):
        await learner.begin(None)
        await learner.publish(small.version_ref(V0))
        await small.produce(a, V0, 8)
        await learner.claim(0, 0, WAIT_S)
        for sampler in (a, b):
            with pytest.raises(NoCredit, match="window"):
                await sampler.lease(V0, 8)
        await learner.publish(small.version_ref(V1))
        await learner.ack(V0)
        yield a, b


def test_a_group_is_spread_over_two_samplers(tmp_path: Path, small: SimpleNamespace, run) -> None:
    async def job() -> None:
        async with second_step(tmp_path, small) as samplers:
            granted = await asyncio.gather(*(sampler.lease(V1, 8, WAIT_S) for sampler in samplers))
            shares = [small.keys(grants) for grants in granted]
            assert [Counter(group for group, _, _ in keys) for keys in shares] == [{2: 2, 3: 2}, {2: 2, 3: 2}]
            assert not set(shares[0]) & set(shares[1])

    run(job())


def test_a_sampler_that_waits_for_more_gets_it_when_it_holds_less_than_its_share(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "leaves_work", lambda *_: True)  # though its members end at once

    async def job() -> None:
        async with second_step(tmp_path, small) as (_, b):
            first = small.keys(await b.lease(V1, 8, WAIT_S))
            with pytest.raises(NoCredit, match="left to samplers that fetch"):
                await b.lease(V1, 4)
            waiting = asyncio.ensure_future(b.lease(V1, 4, 2 * WAIT_S))
            await asyncio.sleep(0)
            await b.put(small.finished(*first[0], (V1, 3)))
            assert len(small.keys(await asyncio.wait_for(waiting, WAIT_S))) == 1

    run(job())
