"""A run's log made by the real keeper: every kind of event, real members as payloads, no server and no waiting."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxroll import wire
from jaxroll.clock import ManualClock
from jaxroll.errors import StoreRefusal
from jaxroll.policy.limiter import AgeLimiter
from jaxroll.records import Failed, Finished, Member, Message, Segment, Task, Version, VersionRef, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings
from jaxroll.store.core.machine import Core
from jaxroll.store.log import commit_log
from jaxroll.store.log.commit_log import Log
from jaxroll.store.server.keeper import Keeper
from jaxroll.store.server.puts import put_request

SETTINGS = Settings(AgeLimiter(1.0, 2), group_size=2, steps=6, straggler_deadline_s=5.0, data_retries=0)
ALPHABET = "abcdefghij"  # token 4 + i is letter i (jaxroll.text: CharTokenizer)

Key = tuple[int, int, int]


def task(index: int) -> Task:
    messages = (Message("user", f"spell {ALPHABET[index % 10]}"),)
    return Task(index, messages, "single_turn", '{"entry": {"answer": "x"}}', index, f"{index:016x}")


def finished(key: Key, version: Version, *, tokens: int = 4, reward: float = 1.0) -> Member:
    """A prompt of three tokens and an answer of `tokens`, whose first letter tells the group."""
    group, member, attempt = key
    shown = np.array([1, 4 + group % 10, 3], np.int32)
    said = np.full(tokens, 4 + group % 10, np.int32)
    prompt = Segment(shown, np.zeros(3, np.uint8), np.zeros(3, np.float32))
    answer = Segment(said, np.ones(tokens, np.uint8), np.linspace(-1, 0, tokens, dtype=np.float32))
    parts = {"exact": reward, "format": 0.5}
    return Member(
        group, member, attempt, Finished((prompt, answer), "stop", reward, parts, (VersionRun(version, tokens),))
    )


def put(kept: Keeper, key: Key, version: Version, *, tokens: int = 4, reward: float = 1.0) -> object:
    """The store's answer to the put of a finished member."""
    member = finished(key, version, tokens=tokens, reward=reward)
    body = wire.encode(member)
    return kept.decide(put_request(body), commit_log.payload(key[0], key[1], body))


def fail(kept: Keeper, key: Key, error: str = "scorer raised") -> object:
    """The store's answer to a member that broke on its data."""
    member = Member(*key, Failed("DATA", error))
    return kept.decide(put_request(wire.encode(member)))


def lease(kept: Keeper, members: int, version: Version, request: str, name: str = "S") -> list[Key]:
    """Members granted, with as many new prompts on offer."""
    fed = kept.state.prompts_issued
    offered = tuple((task(i), b"cursor%d" % (i + 1)) for i in range(fed, fed + members))
    reply = kept.decide(ev.Lease(name, f"{name}-1", version, members, request, offered))
    return [] if isinstance(reply, StoreRefusal) else [(g.group, m, a) for g in reply.grants for m, a in g.members]


def publish(kept: Keeper, version: Version) -> None:
    kept.decide(ev.Publish("L", VersionRef(version, "tcp", "here", "d")))


def eventful_history(kept: Keeper, clock: ManualClock) -> Iterator[None]:
    """A run with every kind of event; pauses between requests."""
    v = kept.decide(ev.Begin("L", None))
    publish(kept, v)
    yield
    for key in lease(kept, 6, v, "a"):
        put(kept, key, v, reward=float(key[1]))
        yield
    for step in (0, 1):
        kept.decide(ev.ClaimStep("L", 0, step))
        publish(kept, Version(0, step + 1))
        kept.decide(ev.Ack("L", Version(0, step)))
        yield
        for i, key in enumerate(lease(kept, 4, Version(0, step + 1), f"b{step}")):
            fail(kept, key) if i == 3 else put(kept, key, Version(0, step + 1))
            yield
    kept.decide(ev.Durable("L", Version(0, 1)))
    lease(kept, 3, Version(0, 2), "c")
    yield
    clock.advance(SETTINGS.lease_s)
    kept.decide(ev.Tick())
    yield
    v = kept.decide(ev.Begin("L", Version(0, 1)))
    publish(kept, v)
    kept.decide(ev.ClaimStep("L", 1, 1))
    publish(kept, Version(1, 2))
    kept.decide(ev.Ack("L", Version(1, 1)))
    yield
    kept.decide(ev.Arrive("S", "S-1"))
    for key in lease(kept, 8, Version(1, 2), "d")[:5]:
        put(kept, key, Version(1, 2))
        yield
    clock.advance(6.0)
    kept.decide(ev.ClaimStep("L", 1, 2))
    kept.decide(ev.EndData())
    kept.decide(ev.Close("enough"))
    yield


async def recorded_run(run_dir: Path, *, compact_every: int = 0, **budgets: int) -> Core:
    """The machine at the end of the history whose log is in `run_dir`; all upkeep done.

    With `compact_every` the log is compacted after as many pauses of the history, and each time that is waited for.
    """
    clock = ManualClock()
    log = Log(run_dir, **budgets)
    kept = Keeper(SETTINGS, log, clock)
    for i, _ in enumerate(eventful_history(kept, clock)):
        await log.committed()
        if compact_every and i % compact_every == compact_every - 1:
            log.compact()
            await log.tidy()
    await log.tidy()
    await log.close()
    return kept.core


async def long_run(
    run_dir: Path, steps: int, *, groups: int = 4, tokens: int = 64, durable_every: int = 4, **budgets: int
) -> Core:
    """A run of `steps` steps at α = 1 with groups of two; nothing is left undone by the log when it returns."""
    settings = Settings(AgeLimiter(1.0, groups), group_size=2, steps=steps)
    log = Log(run_dir, **budgets)
    kept = Keeper(settings, log, ManualClock())
    version = kept.decide(ev.Begin("L", None))
    publish(kept, version)
    for step in range(steps):
        for key in lease(kept, 2 * groups * 2, version, f"r{step}"):
            put(kept, key, version, tokens=tokens)
        kept.decide(ev.ClaimStep("L", 0, step))
        version = Version(0, step + 1)
        publish(kept, version)
        kept.decide(ev.Ack("L", Version(0, step)))
        if version.step % durable_every == 0:
            kept.decide(ev.Durable("L", version))
        await log.committed()
        await log.tidy()  # a compaction that began is over: what is kept does not depend on the machine
    await log.close()
    return kept.core


def recovered(run_dir: Path) -> Core:
    async def read() -> Core:
        log = Log(run_dir)
        core = Core.recovered(SETTINGS, log.recovered.state, log.recovered.events, 0.0)
        await log.close()
        return core

    return asyncio.run(read())


def facts(core: Core) -> dict:
    """The state without its clock."""
    state = core.state
    groups = {
        g.id: (g.state, g.note, g.step, [(s.status, s.attempt, s.digest) for s in g.slots])
        for g in (*state.open.values(), *state.held.values())
    }
    names = (
        "position",
        "next_group",
        "next_claim",
        "acked",
        "durable",
        "lineages",
        "published",
        "cursor",
        "closed",
        "expired",
        "dead",
        "trimmed",
        "receipts",
        "data_ended",
        "learner",
        "tokens_put",
    )
    return {name: getattr(state, name) for name in names} | {"groups": groups}


def _child(script: str, run_dir: Path) -> subprocess.Popen:
    words = [sys.executable, "-c", script, str(run_dir), str(os.getpid())]
    root = Path(__file__).parents[3]
    return subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
