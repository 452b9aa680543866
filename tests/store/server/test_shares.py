"""Two samplers at one server, both idle while the learner trained: each gets its part of every group."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll.errors import NoCredit
from jaxroll.records import Version

WAIT_S = 20.0


def test_a_group_is_spread_over_two_samplers(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config = small.configured(alpha=0.0, groups_per_step=2, group_size=4, group_placement="spread", steps=3)
    v0, v1 = Version(0, 0), Version(0, 1)

    async def job() -> None:
        async with (
            small.serving(tmp_path, config),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler", "a") as a,
            small.connected(tmp_path, config, "sampler", "b") as b,
        ):
            await learner.begin(None)
            await learner.publish(small.version_ref(v0))
            await small.produce(a, v0, 8)
            await learner.claim(0, 0, WAIT_S)
            for sampler in (a, b):
                with pytest.raises(NoCredit, match="window"):
                    await sampler.lease(v0, 8)
            await learner.publish(small.version_ref(v1))
            await learner.ack(v0)
            granted = await asyncio.gather(*(sampler.lease(v1, 8, WAIT_S) for sampler in (a, b)))
            shares = [small.keys(grants) for grants in granted]
            assert [Counter(group for group, _, _ in keys) for keys in shares] == [{2: 2, 3: 2}, {2: 2, 3: 2}]
            assert not set(shares[0]) & set(shares[1])

    run(job())
