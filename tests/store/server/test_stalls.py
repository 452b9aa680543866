"""A suspended store or machine: leases are extended by the suspended time. The clock is the test's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll.clock import ManualClock
from jaxroll.errors import NotReady
from jaxroll.records import Version

HOURS = 3600.0
V0 = Version(0, 0)


@pytest.mark.parametrize("asks", ["learner", "sampler", "nobody"])
def test_hours_that_pass_at_once_end_no_lease_and_shrink_no_group(
    tmp_path: Path, small: SimpleNamespace, run, asks: str
) -> None:
    """A machine that slept with all processes, regardless of the first caller after it wakes."""
    config, clock = small.configured(group_size=4, straggler="shrink", straggler_deadline_s=60.0), ManualClock()

    async def sleeps() -> None:
        async with (
            small.serving(tmp_path, config, clock=clock),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            await learner.publish(small.version_ref(await learner.begin(None)))
            keys = small.keys(await sampler.lease(V0, 8, 5.0))
            early = [key for key in keys if key[1] < 2]  # enough of each group to close it with
            for key in early:
                await sampler.put(small.finished(*key, (V0, 3)))
            clock.advance(5 * HOURS)
            if asks == "learner":
                with pytest.raises(NotReady):
                    await learner.claim(0, 0, 0.0)
            late = [key for key in keys if key not in early]
            if asks == "nobody":
                await asyncio.sleep(2.5)  # the store looks at its clock every second
            assert await sampler.renew(late) == []
            for key in late:
                assert await sampler.put(small.finished(*key, (V0, 3))) == "OK"
            claim = await learner.claim(0, 0, 0.0)
            assert [len(group.members) for group in claim.groups] == [4, 4]
            report = await learner.status()
            assert not report["closed"] and report["conservation_residual"] == 0

    run(sleeps())


def test_a_clock_that_stops_ends_nothing_either(tmp_path: Path, small: SimpleNamespace, run) -> None:
    config, clock = small.configured(lease_s=12.0, stall_s=1.0, stall_abort_s=1.5), ManualClock()

    async def stands() -> None:
        async with (
            small.serving(tmp_path, config, clock=clock),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            await learner.publish(small.version_ref(await learner.begin(None)))
            keys = small.keys(await sampler.lease(V0, 4, 5.0))
            await asyncio.sleep(2.0)
            with pytest.raises(NotReady):
                await learner.claim(0, 0, 0.0)
            clock.advance(5.0)  # and it goes on, less than the lease
            assert await sampler.renew(keys) == []
            for key in keys:
                assert await sampler.put(small.finished(*key, (V0, 3))) == "OK"
            assert len((await learner.claim(0, 0, 0.0)).groups) == 2

    run(stands())
