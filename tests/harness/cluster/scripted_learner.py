"""A learner without a model: its weights are the list of the groups that it has trained on.

    claim s → train → publish s+1 → ack s → (every C steps) checkpoint s+1 → durable s+1

A checkpoint is a file, written and then renamed, that holds the steps since the previous checkpoint and names that one.
The chain of checkpoints gives every group in the weights, as an optimizer state would hold their gradients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import numpy as np

from jaxroll import wire
from jaxroll.errors import Closed, NotReady
from jaxroll.records import Claim, Finished, Member, Version, VersionRef, ages
from jaxroll.store.client import StoreClient
from tests.harness.cluster.scripted_role import Journal, Orders, connected, orders_of, pair, stop_event

CLAIM_WAIT_S = 1.0
FINISHED = "finished"
GATE_POLL_S = 0.01


class LearnerOrders(Orders, frozen=True, kw_only=True):
    """Orders of a learner; `gate` is a file with the number of steps that may be trained (no file: all)."""

    checkpoints: str
    steps: int
    step_s: float = 0.01
    checkpoint_every: int = 5
    gate: str = ""


class Weights:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def latest(self) -> Version | None:
        """The newest checkpoint."""
        names = (path.name.split(".")[:2] for path in self.folder.glob("*.json"))
        return max((Version(int(lineage), int(step)) for lineage, step in names), default=None)

    def save(self, version: Version, parent: Version | None, trained: list[tuple[int, list[int]]]) -> None:
        """Write a checkpoint atomically; `trained` are the (step, groups) since `parent`."""
        path = self._path(version)
        draft = path.with_suffix(".draft")
        with draft.open("w") as file:
            json.dump({"parent": pair(parent), "trained": trained}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)

    def trained(self, version: Version | None) -> list[tuple[int, list[int]]]:
        """(step, groups) of everything in the weights of `version`, oldest first."""
        found: list[tuple[int, list[int]]] = []
        while version is not None:
            about = json.loads(self._path(version).read_text())
            found = [(step, groups) for step, groups in about["trained"]] + found
            version = Version(*about["parent"]) if about["parent"] else None
        return found

    def _path(self, version: Version) -> Path:
        return self.folder / f"{version.lineage}.{version.step}.json"


class Learner:
    """One process of the learner."""

    def __init__(self, orders: LearnerOrders, journal: Journal, store: StoreClient, stop: asyncio.Event) -> None:
        self.orders, self.journal, self.store, self.stop = orders, journal, store, stop
        self.weights = Weights(Path(orders.checkpoints))
        self.saved = self.weights.latest()
        self.since: list[tuple[int, list[int]]] = []  # trained but in no checkpoint yet

    async def run(self) -> None:
        """Train from the newest checkpoint to the last step, or until a stop is requested at the end of a step."""
        version = await self.store.begin(self.saved)
        self.journal.log("begin", durable=pair(self.saved), version=pair(version))
        await self._publish(version)
        while version.step < self.orders.steps:
            claim = await self._claim(version)
            if claim is None:
                break
            version = await self._step(version, claim)
        await self._checkpoint(version)
        if version.step >= self.orders.steps:
            with contextlib.suppress(Closed):
                await self.store.close_run(FINISHED)
        self.journal.log("end", version=pair(version))

    async def _claim(self, version: Version) -> Claim | None:
        while not self.stop.is_set():
            if version.step >= self._allowed():
                await asyncio.sleep(GATE_POLL_S)
                continue
            with contextlib.suppress(NotReady):
                return await self.store.claim(version.lineage, version.step, CLAIM_WAIT_S)
        return None

    def _allowed(self) -> int:
        try:
            return int(Path(self.orders.gate).read_text()) if self.orders.gate else self.orders.steps
        except FileNotFoundError:
            return self.orders.steps

    async def _step(self, version: Version, claim: Claim) -> Version:
        self.journal.log("claim", **_facts(claim))
        await asyncio.sleep(self.orders.step_s)
        after = Version(version.lineage, version.step + 1)
        await self._publish(after)
        await self.store.ack(version)
        self.journal.log("ack", version=pair(version))
        self.since.append((claim.step, [group.group for group in claim.groups]))
        if claim.checkpoint_wanted or after.step % self.orders.checkpoint_every == 0:
            await self._checkpoint(after)
        return after

    async def _publish(self, version: Version) -> None:
        await self.store.publish(VersionRef(version, "tcp", "nowhere", f"{version}"))
        self.journal.log("publish", version=pair(version))

    async def _checkpoint(self, version: Version) -> None:
        if self.saved != version:
            self.weights.save(version, self.saved, self.since)
            self.journal.log("checkpoint", version=pair(version))
            self.saved, self.since = version, []
        await self.store.durable(version)
        self.journal.log("durable", version=pair(version))


def _facts(claim: Claim) -> dict:
    """The claim for the journal: groups in order, each member's digest, the age of its oldest trained token."""
    groups = []
    for group in claim.groups:
        groups.append([group.group, [[m.member, m.attempt, wire.digest(wire.encode(m))] for m in group.members]])
    oldest = max(max_age(member, claim.step) for group in claim.groups for member in group.members)
    return {
        "step": claim.step,
        "lineage": claim.lineage,
        "replayed": claim.replayed,
        "groups": groups,
        "max_age": oldest,
        "wanted": claim.checkpoint_wanted,
    }


def max_age(member: Member, step: int) -> int:
    """The age of the oldest token that a step would train; sampled tokens are in the last segment."""
    assert isinstance(member.outcome, Finished)
    mask = member.outcome.segments[-1].loss_mask.astype(bool)
    trained = ages(member.outcome.versions, step)[mask]
    return int(np.max(trained, initial=0))


async def _main(orders: LearnerOrders) -> None:
    journal, stop = Journal(orders.journal), stop_event()
    try:
        async with connected(orders, journal, "learner") as store:
            await Learner(orders, journal, store, stop).run()
    except Closed as closed:
        journal.log("closed", text=str(closed))
    except Exception as error:
        journal.log("error", text=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    asyncio.run(_main(orders_of(LearnerOrders)))
