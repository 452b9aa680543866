"""A sampler's engine served to actors: where it listens, and when that ends.

RUN/sampler-0.addr holds the address. It waits for calls, and ends when the run is closed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from jaxroll.clock import unix_s
from jaxroll.config import RoleArgs
from jaxroll.config.rules import episode_tokens, sampler_members
from jaxroll.records import Grant, Version
from jaxroll.roles import session as sessions
from jaxroll.roles.members import MemberPlayer, Members, episode_counts, training_params, until_one_ends
from jaxroll.roles.session import EngineSession
from jaxroll.rpc import auth, protocol, tls
from jaxroll.rpc.server import RawServer
from jaxroll.serving import service

LOOK_S = 2.0  # between two looks whether the run is over
_GRACE_S = 0.5
_TOKEN_BYTES = 4  # of a prompt on the wire


def address_file(run_dir: Path, name: str) -> Path:
    """Where the address of the sampler `name` stands."""
    return run_dir / f"{name}.addr"


class Serving:
    """The service beside the engine of `session`."""

    def __init__(self, session: EngineSession) -> None:
        self._session, self._args, self._config = session, session.args, session.config
        self._service = service.Serving(
            session.proxy, session.parts.follower, run_id=session.store.welcome.run_id,
            config_digest=session.args.config_digest,
        )  # fmt: skip

    def loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """What is to run side by side until the run is over."""
        return (self._serve(), self._until_closed())

    def counts(self) -> dict[str, int]:
        """Requests of actors: held now, and answered since the start."""
        return {"open": self._service.open, "served": self._service.served}

    async def give_back(self) -> None:
        """Nothing is leased here."""

    async def _serve(self) -> None:
        args, kept = self._args, self._config.store
        server = RawServer(
            service.SERVICE, self._service.methods(), secret=auth.load_secret(args.run_dir),
            max_message_bytes=kept.max_message_mb * 2**20, tls=tls.load(args.run_dir), mutual_tls=kept.mutual_tls,
            calls_per_connection=protocol.GENERATIONS_PER_CONNECTION,
            held_bytes=service.MAX_OPEN * _TOKEN_BYTES * episode_tokens(self._config),
        )  # fmt: skip
        port = server.bind(args.host, args.port, insecure=args.insecure)
        await server.start()
        try:
            address = protocol.address(args.host, port)
            _write(address_file(args.run_dir, self._session.role), address)
            self._session.progress(f"serves actors on {address}")
            await asyncio.Event().wait()
        finally:
            await server.stop(_GRACE_S)

    async def _until_closed(self) -> None:
        while not (await self._session.store.status())["closed"]:
            await asyncio.sleep(LOOK_S)


def _write(path: Path, address: str) -> None:
    """Readers see the old address or the new one, never half of it."""
    draft = path.with_suffix(".addr.tmp")
    draft.write_text(address + "\n", encoding="utf-8")
    os.replace(draft, path)


# --- The sampler role: leases groups, plays their members against its engine, puts the finished ones; or serves actors
#
# The main thread dispatches JAX (one of its own where roles share a process); everything here runs on the loop thread
# (see `jaxroll.roles.session`):
#
# - *follow* waits for the learner's snapshots and flips the engine;
# - *lease*, *ended* and *renew* are those of `jaxroll.roles.members`; an aborted member's slot is free at once;
# - *report* sends metrics every second.
#
# With `placement.actors` the episodes are played in processes of their own (`jaxroll.roles.actor`): it leases nothing
# then and only serves its engine (`jaxroll.roles.sampler`).
#
# It waits for the store (leases) and, before its first token, for the learner's first snapshot. It ends when the run is
# closed or on SIGTERM, giving unfinished leases back.

REPORT_EVERY_S = 1.0


def main(args: RoleArgs) -> int:
    """Sample until the run is closed."""
    return sessions.main(part(args), args)


def part(args: RoleArgs) -> sessions.RoleSpec:
    """What a sampler plays."""
    config = args.config
    return sessions.RoleSpec(
        f"sampler-{args.index}", lambda session: SamplerLoops(session).run(),
        mesh=config.sampler.mesh, slots=config.sampler.slots, flip=config.schedule.flip,
    )  # fmt: skip


class RolloutPlay:
    """Members that are leased and played here."""

    def __init__(self, session: sessions.EngineSession) -> None:
        self._session = session
        self._manager = session.manager(training_params(session, session.parts.tokenizer))
        self._members = Members(session, sampler_members(session.config), self._version, self._begin)
        self.loops, self.give_back = self._members.loops, self._members.give_back

    def counts(self) -> dict[str, Any]:
        """What the `stats` rows say of members and episodes."""
        return self._members.counts() | episode_counts(self._manager, self._session.places)

    async def _version(self) -> Version:
        follower = self._session.parts.follower
        await follower.first.wait()
        assert follower.version is not None, "`first` says that there are weights"
        return follower.version

    def _begin(self, grant: Grant) -> MemberPlayer:
        return lambda member, attempt, said: self._manager.run_member(grant, member, attempt, transcript=said)


class SamplerLoops:
    """The engine, its weights, who asks it, and the loops around them."""

    def __init__(self, session: sessions.EngineSession) -> None:
        self.session, self.store = session, session.store
        self.engine = session.parts.engine
        self.asking = Serving(session) if session.config.placement.actors else RolloutPlay(session)
        self._reported = (time.monotonic(), self.engine.stats())

    async def run(self) -> None:
        """All loops, until one of them ends; then unfinished leases go back."""
        follow = self.session.parts.follower.follow(self.store)
        try:
            await until_one_ends((follow, *self.asking.loops(), self._report()))
        finally:
            self._add_rows()  # before, or what is given back would be counted among what nobody needs
            await self.asking.give_back()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._add_rows()

    def _add_rows(self) -> None:
        """What happened since the last call, as rows that the session sends."""
        (last_t, last), (now_t, now) = self._reported, (time.monotonic(), self.engine.stats())
        self._reported = (now_t, now)
        for row in self._rows(max(now_t - last_t, 1e-9), last, now):
            self.session.add_row({"t": unix_s(), "role": self.session.role, **row})

    def _rows(self, elapsed_s: float, last, now) -> list[dict]:
        rows: list[dict] = [
            {"kind": "span", "what": "decode", "t0": t0, "t1": t1, "tokens": tokens}
            for t0, t1, tokens in self.session.parts.host.spans.take()
        ]
        if intervals := self.session.proxy.take_intervals():
            rows.append({"kind": "members", "rows": [list(row) for row in intervals]})
        total = now.slot_steps_total_while_waiting - last.slot_steps_total_while_waiting
        busy = now.slot_steps_busy_while_waiting - last.slot_steps_busy_while_waiting
        rows.append({
            "kind": "stats", "version": str(now.version), "queue_depth": now.queue_depth, "active": now.active,
            "tokens_per_s": (now.tokens_decoded - last.tokens_decoded) / elapsed_s,
            "slot_steps_busy": busy, "slot_steps_total": total, "slot_occupancy": busy / total if total else None,
            "compiles": now.compiles, "host_share": now.host_share, "prefix_hits": now.prefix_hits,
            "preemptions": now.preemptions, "tokens_discarded": now.tokens_discarded,
            "prefill_tokens": now.prefill_tokens, "tokens_aborted": now.tokens_aborted, **self.asking.counts(),
            **self.engine.latencies.percentiles(),
        })  # fmt: skip
        return rows
