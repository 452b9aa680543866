"""Actor role: leases prompt groups, generates their rollouts through samplers' engines and stores the finished ones.

It runs environments and scoring without JAX, for environments that are too heavy for a sampler's process.

Threads: the main thread handles signals; this module runs on the asyncio loop thread.
Tasks: follow every sampler's weight version and report the newest of them to the store; find samplers that join; the
tasks of `sampler.Members` (request leases, receive cancellations, renew leases); report metrics every second.
Waits for: leases from the store, and samplers that have weights.
Stops: when the run is closed or on SIGTERM, after returning unfinished leases. If it dies, its leases expire and the
store grants them again.

Leases are granted for the newest version that a sampler has, and their tokens are sampled at that version or at a later
one, so that the limit on the age of tokens holds.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from jaxroll.clock import unix_s
from jaxroll.config import RoleArgs, section_rules
from jaxroll.config.derived import actor_members, max_message_bytes, sampler_names, slots_of_actor
from jaxroll.config.parsing import SOURCE_ITEMS
from jaxroll.data import sources
from jaxroll.envs import registry
from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.loop_thread import ended, until_one_ends
from jaxroll.protocols import Tokenizer
from jaxroll.records import Grant, Member, Version
from jaxroll.roles import session as sessions
from jaxroll.roles.sampler import MemberPlayer, Members
from jaxroll.rollout.episode import Transcript, sampling_params
from jaxroll.rpc import protocol, tls
from jaxroll.rpc.client import RawClient
from jaxroll.serving import service
from jaxroll.serving.service import Samplers
from jaxroll.text import tokenizers

REPORT_EVERY_S = 1.0
FIND_EVERY_S = 2.0  # between two looks for samplers that have joined or left


def main(args: RoleArgs) -> int:
    """Generate rollouts until the run is closed; the exit code."""
    pool = registry.scoring_pool(args.config, args.run_dir)
    pool.start()
    thread = sessions.loop_thread(f"actor-{args.index}", args.config)
    try:
        session = sessions.Session(f"actor-{args.index}", args, pool, thread.loop)
        interrupted = sessions.install_signal_handlers(session)
        config = args.config  # not on the loop: loading a task's library can take longer than a loop may be blocked
        tokenizer = tokenizers.build(config.tokenizer, sources.alphabet(config.task))
        ended(thread.start(_run(session, tokenizer)))
        return EXIT_INTERRUPTED if interrupted.is_set() else 0
    finally:
        thread.close()
        pool.close()


async def _run(session: sessions.Session, tokenizer: Tokenizer) -> None:
    await session.run(lambda: asyncio.sleep(0), lambda: ActorLoops(session, tokenizer).run())


class ActorLoops:
    """The members in flight, the connections to the samplers, and the tasks around both."""

    def __init__(self, session: sessions.Session, tokenizer: Tokenizer) -> None:
        self.session, self.config, self.store = session, session.config, session.store
        self.pools = section_rules.pools(self.config)
        room = slots_of_actor(self.config) if self.pools else math.inf
        clients, placement = self._clients(), self.config.schedule.group_placement
        own = {name: self.pools.of_role(name) for name in clients}
        self.samplers = Samplers(clients, placement, session.progress, own, room)
        self.manager = session.rollout_manager(None, tokenizer, sampling_params(session.config, tokenizer))
        self.members = Members(
            session, actor_members(self.config, len(self.samplers.names)), self._version, self._begin
        )
        self.version: Version | None = None  # reported to the store; it never decreases
        self._first = asyncio.Event()

    async def run(self) -> None:
        """Run all tasks until one of them ends, then return unfinished leases."""
        try:
            await until_one_ends(
                (
                    self.samplers.follow(),
                    self._find_samplers(),
                    self._report_version(),
                    *self.members.loops(),
                    self._report(),
                )
            )
        finally:
            await self.members.give_back()
            self._add_row()
            await self.samplers.close()

    def _clients(self) -> dict[str, RawClient]:
        args = self.session.args
        files = [args.paths.sampler_address(name) for name in sampler_names(self.config)]
        return {f"sampler-{index}": self._client(address) for index, address in enumerate(args.samplers or files)}

    def _client(self, address: str | Path) -> RawClient:
        args = self.session.args
        client = RawClient(
            service.SERVICE,
            address,
            role="actor",
            name=self.session.role,
            token=protocol.load(args.run_dir),
            patience_s=0.0,
            max_message_bytes=max_message_bytes(self.config),
            config_digest=args.config_digest,
            tls=tls.load(args.run_dir),
        )
        client.run_id = self.store.welcome.run_id
        return client

    async def _find_samplers(self) -> None:
        """Use samplers that join the run, until they leave; those that it started with may come back."""
        started, joined = self.samplers.names, dict[str, str]()
        while True:
            status = await self.store.status()
            serving: dict[str, str] = status["serving"]
            for name, address in list(joined.items()):
                moved = serving.get(name, address) != address
                if moved or (name not in serving and not self.samplers.is_reachable(name)):
                    self.samplers.remove(name)
                    del joined[name]
            for name in serving.keys() - started - joined.keys():
                joined[name] = serving[name]
                self.samplers.add(name, self._client(serving[name]))
            self.samplers.set_pools({name: pool for pool, of in status["pools"].items() for name in of["samplers"]})
            self.members.capacity = actor_members(self.config, len(self.samplers.names))
            self.members.room.set()
            await asyncio.sleep(FIND_EVERY_S)

    async def _report_version(self) -> None:
        while True:
            self.version = await self.samplers.newer_than(self.version)
            await self.store.published(self.version)  # may grant a lease call that waits with the previous version
            self._first.set()

    async def _version(self) -> Version:
        await self._first.wait()
        assert self.version is not None, "`_first` is set once a sampler has weights"
        await self.samplers.has(self.version)  # lease nothing that no sampler could generate
        return self.version

    def _begin(self, grant: Grant) -> MemberPlayer:
        assert self.version is not None, "no lease is granted before a version is reported"
        group = self.samplers.group(self.version, self.pools.of_work(grant.task.index // SOURCE_ITEMS))

        async def play(member: int, attempt: int, transcript: Transcript) -> Member:
            with group.conversation() as proxy:
                return await self.manager.run_member(grant, member, attempt, proxy, transcript)

        return play

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._add_row()

    def _add_row(self) -> None:
        counts = self.members.counts() | sessions.episode_counts(self.manager, self.session.executors)
        self.session.add_row(
            {
                "t": unix_s(),
                "role": self.session.role,
                "kind": "stats",
                **counts,
                "samplers": self.samplers.conversations(),
                "requests_retried": self.samplers.repeated,
                "conversations_elsewhere": self.samplers.elsewhere,
            }
        )
