"""A sampler without a model, as a process of benchmarks/store: it leases and puts members of a given size.

    python -m benchmarks.store.client puts|loop FOLDER NAME PARENT_PID SETTINGS_JSON

`puts` leases its share, prints "ready", waits for a line, then puts with `in_flight` concurrent calls. `loop` leases
and puts until the run is closed, as a sampler does. The last line is one JSON object. The same program talks to the
floor.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxroll import lifeline, wire
from jaxroll.errors import Closed, InfraError, NoCredit
from jaxroll.records import Finished, Member, Segment, Version, VersionRun
from jaxroll.store.client import StoreClient
from jaxroll.store.messages import Key

PROMPT_TOKENS = 256
_LEASE_MEMBERS = 256  # at once, before the puts are timed
_PAUSE_S = 0.005  # after a lease that found no room


def outcome(payload_bytes: int, version: Version) -> Finished:
    """A finished rollout whose member takes about `payload_bytes` on the wire: a prompt and one long answer."""
    answer_tokens = max(1, (payload_bytes - 200) // 9 - PROMPT_TOKENS)
    random = np.random.default_rng(0)
    prompt = Segment(
        random.integers(0, 150_000, PROMPT_TOKENS, np.int32),
        np.zeros(PROMPT_TOKENS, np.uint8),
        np.zeros(PROMPT_TOKENS, np.float32),
    )
    answer = Segment(
        random.integers(0, 150_000, answer_tokens, np.int32),
        np.ones(answer_tokens, np.uint8),
        -random.exponential(size=answer_tokens).astype(np.float32),
    )
    return Finished((prompt, answer), "stop", 1.0, {"raw_score": 1.0}, (VersionRun(version, answer_tokens),))


class Sampler:
    """Measurements of one process: seconds of each call, and every acknowledged put."""

    def __init__(self, client: StoreClient, settings: dict[str, Any]) -> None:
        self.client, self.settings = client, settings
        self.put_s: list[float] = []
        self.lease_s: list[float] = []
        self.acknowledged: list[tuple[int, int, str]] = []
        self.bytes = 0

    async def lease(self, version: Version, count: int) -> list[Key]:
        """Lease `count` members and return their keys; raises NoCredit."""
        started = time.perf_counter()
        grants = await self.client.lease(version, count)
        self.lease_s.append(time.perf_counter() - started)
        return [(grant.group, member, attempt) for grant in grants for member, attempt in grant.members]

    async def put_all(self, keys: Iterator[Key], done: Finished) -> None:
        """Put a member for every key, `in_flight` at a time."""
        await asyncio.gather(*(self._put_some(keys, done) for _ in range(self.settings["in_flight"])))

    async def _put_some(self, keys: Iterator[Key], done: Finished) -> None:
        for key in keys:
            member = Member(*key, done)
            started = time.perf_counter()
            result = await self.client.put(member)
            self.put_s.append(time.perf_counter() - started)
            if result == "OK":
                self._note(member)

    def _note(self, member: Member) -> None:
        digest = ""
        if self.settings.get("digests"):
            digest = wire.digest(wire.encode(member))
        self.acknowledged.append((member.group, member.member, digest))

    async def current(self) -> Version:
        """The newest published version."""
        ref = await self.client.published(None, 30.0)
        assert ref is not None, "nothing is published"
        return ref.version

    def report(self, started: float, ended: float) -> dict[str, Any]:
        """The object that the parent reads."""
        measured = {"put_s": self.put_s, "lease_s": self.lease_s, "acknowledged": self.acknowledged}
        return measured | {"started": started, "ended": ended, "payload_bytes": self.bytes}


async def puts(sampler: Sampler) -> dict[str, Any]:
    """Lease, wait for a line, put; a store that dies ends it early."""
    settings, version = sampler.settings, await sampler.current()
    done, keys = outcome(settings["payload_bytes"], version), list[Key]()
    while len(keys) < settings["puts"]:
        try:
            keys += await sampler.lease(version, min(_LEASE_MEMBERS, settings["puts"] - len(keys)))
        except NoCredit:  # the feeder has not delivered the prompts yet
            await asyncio.sleep(_PAUSE_S)
    sampler.bytes = len(wire.encode(Member(*keys[0], done)))
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    started = time.time()
    try:
        await sampler.put_all(iter(keys), done)
    except InfraError:
        if not settings.get("may_die"):
            raise
    return sampler.report(started, time.time())


async def loop(sampler: Sampler) -> dict[str, Any]:
    """Lease, put and check for newer weights until the run is closed."""
    settings, version = sampler.settings, await sampler.current()
    done = outcome(settings["payload_bytes"], version)
    print("ready", flush=True)
    started = time.time()
    while True:
        try:
            keys = await sampler.lease(version, settings["lease_members"])
            sampler.bytes = sampler.bytes or len(wire.encode(Member(*keys[0], done)))
            await sampler.put_all(iter(keys), done)
        except NoCredit:
            await asyncio.sleep(_PAUSE_S)
        except Closed:
            return sampler.report(started, time.time())
        newer = await sampler.client.published(version)
        if newer is not None:
            version = newer.version
            runs = (VersionRun(version, done.versions[0].count),)
            done = msgspec.structs.replace(done, versions=runs)


async def main() -> None:
    """Run the mode that the command line names."""
    kind, folder, name, parent, text = sys.argv[1:]
    lifeline.bind(int(parent))
    settings = json.loads(text)
    client = await StoreClient.connect(
        Path(folder) / "store.addr",
        role="sampler",
        name=name,
        config_digest=settings["config_digest"],
        patience_s=settings["patience_s"],
    )
    result = await {"puts": puts, "loop": loop}[kind](Sampler(client, settings))
    print(json.dumps(result), flush=True)
    await client.aclose()


if __name__ == "__main__":
    asyncio.run(main())
