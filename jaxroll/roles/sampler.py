"""Sampler role: leases prompt groups, generates their rollouts and stores the finished ones.

Threads: the main thread runs JAX (in a colocated run, a thread of its own); this module runs on the asyncio loop thread
(`jaxroll.roles.session`).
Tasks: follow new weights; the tasks of `jaxroll.roles.members` (request leases, receive cancellations, renew leases);
report metrics every second.
Waits for: leases from the store, and the learner's first weights before its first token.
Stops: when the run is closed or on SIGTERM, after returning unfinished leases.

With `placement.actors` > 0 it leases nothing and only serves generation requests of actors (`jaxroll.roles.actor`);
RUN/sampler-0.addr holds the address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from jaxroll import disk
from jaxroll.clock import unix_s
from jaxroll.config import RoleArgs
from jaxroll.config.derived import cache_tokens, episode_tokens, sampler_members
from jaxroll.records import Grant, Version
from jaxroll.roles import session as sessions
from jaxroll.roles.members import MemberPlayer, Members, episode_counts, training_params, until_one_ends
from jaxroll.roles.session import EngineSession
from jaxroll.roles.weights import Progress
from jaxroll.rpc import auth, protocol, tls
from jaxroll.rpc.server import RawServer
from jaxroll.serving import service

STATUS_EVERY_S = 2.0  # between two checks if the run is closed
_GRACE_S = 0.5
_TOKEN_BYTES = 4  # of a prompt on the wire
LOOPBACK = "127.0.0.1"


class Serving:
    """Generation service for actors over the engine of `session`."""

    def __init__(self, session: EngineSession) -> None:
        self._session, self._args, self._config = session, session.args, session.config
        self._service = service.Serving(
            session.proxy, session.parts.follower, run_id=session.store.welcome.run_id,
            config_digest=session.args.config_digest,
        )  # fmt: skip

    def loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """The tasks to run concurrently until the run is closed."""
        return (self._serve(), self._until_closed())

    def counts(self) -> dict[str, int]:
        """Requests of actors: open now, and answered since the start."""
        return {"requests_in_flight": self._service.open, "requests_served": self._service.served}

    async def give_back(self) -> None:
        """Do nothing: actors hold the leases."""

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
            disk.replace_text(args.paths.sampler_address(self._session.role), address + "\n")
            self._session.progress(f"serves actors on {address}")
            await asyncio.Event().wait()
        finally:
            await server.stop(_GRACE_S)

    async def _until_closed(self) -> None:
        while not (await self._session.store.status())["closed"]:
            await asyncio.sleep(STATUS_EVERY_S)


async def serve_http(session: EngineSession) -> None:
    """Answer HTTP requests with the engine of `session`; the address and the token are in the run's folder."""
    from jaxroll.rpc import http
    from jaxroll.serving import http_server  # loads JAX, which must come after the scoring pool
    from jaxroll.serving.http_layouts import Served
    from jaxroll.serving.http_requests import Room

    args, parts = session.args, session.parts
    port = session.config.sampler.http_port
    listening = http.listen(LOOPBACK, port + args.index if port else 0)
    token = http.token(auth.load_secret(args.run_dir), args.paths.http_token)
    room = Room(cache_tokens(session.config), parts.tokenizer)
    served = Served(args.run_dir.name, session.proxy, room, lambda: parts.engine.version, parts.engine.stats,
                    parts.engine.latencies.percentiles)  # fmt: skip
    address = http.address(LOOPBACK, listening)
    disk.replace_text(args.paths.http_address(session.role), address + "\n")
    session.progress(f"serves HTTP on {address}")
    await http.serve(http_server.FrontEnd(served, token).app, listening)


# --- The role

REPORT_EVERY_S = 1.0


def main(args: RoleArgs) -> int:
    """Sample until the run is closed; the exit code."""
    return sessions.main(role_spec(args), args)


def compile_programs(args: RoleArgs, progress: Progress) -> None:
    """Compile a sampler's programs into the compilation cache."""
    sessions.compile_engine(role_spec(args), args.config, progress)


def role_spec(args: RoleArgs) -> sessions.RoleSpec:
    """The sampler `args.index` as a role with an engine."""
    config = args.config
    return sessions.RoleSpec(
        f"sampler-{args.index}", lambda session: SamplerLoops(session).run(),
        mesh=config.sampler.mesh, slots=config.sampler.slots, weight_swap=config.schedule.weight_swap,
    )  # fmt: skip


class RolloutPlay:
    """Members that this process leases and generates."""

    def __init__(self, session: sessions.EngineSession) -> None:
        self._session = session
        self._manager = session.manager(training_params(session, session.parts.tokenizer))
        self._members = Members(session, sampler_members(session.config), self._version, self._begin)
        self.loops, self.give_back = self._members.loops, self._members.give_back

    def counts(self) -> dict[str, Any]:
        """Counts of members and episodes for the `stats` rows."""
        return self._members.counts() | episode_counts(self._manager, self._session.executors)

    async def _version(self) -> Version:
        follower = self._session.parts.follower
        await follower.first.wait()
        assert follower.version is not None, "`first` is set once there are weights"
        return follower.version

    def _begin(self, grant: Grant) -> MemberPlayer:
        return lambda member, attempt, transcript: self._manager.run_member(
            grant, member, attempt, transcript=transcript
        )


class SamplerLoops:
    """The engine, its weights, the source of its requests, and the tasks around them."""

    def __init__(self, session: sessions.EngineSession) -> None:
        self.session, self.store = session, session.store
        self.engine = session.parts.engine
        self.requests = Serving(session) if session.config.placement.actors else RolloutPlay(session)
        self._reported = (session.loop.time(), self.engine.stats())

    async def run(self) -> None:
        """Run all tasks until one of them ends, then return unfinished leases."""
        follow = self.session.parts.follower.follow(self.store)
        front = (serve_http(self.session),) if self.session.config.sampler.http_port >= 0 else ()
        try:
            await until_one_ends((follow, *self.requests.loops(), self._report(), *front))
        finally:
            self._add_rows()  # first: returned leases must not count as aborted members
            await self.requests.give_back()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._add_rows()

    def _add_rows(self) -> None:
        """Append metric rows for the interval since the last report."""
        (last_t, last), (now_t, now) = self._reported, (self.session.loop.time(), self.engine.stats())
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
            "prefill_tokens": now.prefill_tokens, "tokens_aborted": now.tokens_aborted, **self.requests.counts(),
            **self.engine.latencies.percentiles(),
        })  # fmt: skip
        return rows
