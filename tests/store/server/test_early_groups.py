"""Finished groups that a learner gets before their batch is complete, and the batch afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxroll import wire
from jaxroll.errors import NotReady
from jaxroll.records import Claim
from jaxroll.store import messages as msg
from tests.harness.store.machine import V0

GROUPS, SIZE = 5, 3


def numbers(claim: Claim) -> list[int]:
    return sorted(group.group for group in claim.groups)


def bodies(claims: list[Claim]) -> dict[int, bytes]:
    return {group.group: wire.encode(group) for claim in claims for group in claim.groups}


@pytest.mark.parametrize("page_bytes", [2**20, 700])
def test_every_group_of_a_batch_can_be_had_when_it_is_finished(
    tmp_path: Path, small: SimpleNamespace, run, monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    monkeypatch.setattr("jaxroll.store.server.server.PAGE_BYTES", page_bytes)
    config = small.configured(groups_per_step=GROUPS, group_size=SIZE)

    async def early() -> None:
        async with small.opened(tmp_path, config) as (learner, sampler):
            with pytest.raises(NotReady):
                await learner.claim(0, 0, known=())
            leased = small.keys(await sampler.lease(V0, GROUPS * SIZE))
            seen: list[Claim] = []
            known: list[int] = []
            for done in range(GROUPS - 1):
                waiting = asyncio.ensure_future(learner.claim(0, 0, 10.0, known=known))
                for key in [key for key in leased if key[0] == done]:
                    assert not waiting.done()
                    await sampler.put(small.finished(*key, (V0, 3)))
                claim = await waiting
                assert (claim.whole, claim.step, numbers(claim)) == (False, 0, [done])
                seen.append(claim)
                known += numbers(claim)
            with pytest.raises(NotReady):
                await learner.claim(0, 0, 0.0, known=known)
            with pytest.raises(NotReady, match="group 99 has ended"):  # between two pages
                await learner._call("Claim", msg.ClaimCall(0, 0, 0.0, early=(99,)), msg.ClaimPage)
            again = await learner.claim(0, 0, known=known[:2])
            assert numbers(again) == known[2:], "as often as asked for"
            assert (await learner.status())["claims"] == 0, "nothing is claimed"
            with pytest.raises(NotReady):
                await learner.claim(0, 0)
            for key in [key for key in leased if key[0] == GROUPS - 1]:
                await sampler.put(small.finished(*key, (V0, 3)))
            whole = await learner.claim(0, 0, 10.0, known=known)
            assert whole.whole and numbers(whole) == list(range(GROUPS))
            assert bodies([whole]).items() >= bodies([*seen, again]).items()
            assert whole.shuffle_seed == seen[0].shuffle_seed

    run(early())
