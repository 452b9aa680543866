"""The actor role: leases groups, plays their members against samplers' engines, puts the finished ones.

No JAX and no device: environments, scoring and the history of tokens, for environments that are too heavy to live
beside an engine. One event loop, on a thread of its own; the main thread waits for its end and gets the signals:

- *samplers* keeps up with every sampler's version (`jaxroll.serving.client`);
- *tell* says to the store which version the newest of them has: leases are granted for that one, and their members are
  sampled at it or at a later one, so that both guards on age hold;
- *lease*, *ended* and *renew* are those of `jaxroll.roles.members`;
- *report* sends metrics every second.

It waits for the store (leases) and for samplers. It ends when the run is closed or on SIGTERM, giving unfinished leases
back; when it dies, the store gives them to others.
"""

from __future__ import annotations

import asyncio

from jaxroll.clock import unix_s
from jaxroll.config import RoleArgs
from jaxroll.config.rules import actor_members
from jaxroll.data import sources
from jaxroll.envs import registry
from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.protocols import Tokenizer
from jaxroll.records import Grant, Member, Version
from jaxroll.roles import session as sessions
from jaxroll.roles.members import MemberPlayer, Members, episode_counts, training_params, until_one_ends
from jaxroll.roles.sampler import address_file
from jaxroll.rollout.episode import Transcript
from jaxroll.rpc import auth, tls
from jaxroll.rpc.client import RawClient
from jaxroll.serving import service
from jaxroll.serving.client import Samplers
from jaxroll.text import tokenizers

REPORT_EVERY_S = 1.0


def main(args: RoleArgs) -> int:
    """Play until the run is closed."""
    pool = registry.scoring_pool(args.config)
    pool.start()
    thread = sessions.loop_thread(f"actor-{args.index}", args.config)
    try:
        session = sessions.Session(f"actor-{args.index}", args, pool, thread.loop)
        told_to = sessions.install_signal_handlers(session)
        sessions.ended(thread.start(_run(session)))
        return EXIT_INTERRUPTED if told_to.is_set() else 0
    finally:
        thread.close()
        pool.close()


async def _run(session: sessions.Session) -> None:
    config = session.config
    tokenizer = tokenizers.build(config.tokenizer, sources.alphabet(config.task))
    await session.run(asyncio.sleep(0), lambda: ActorLoops(session, tokenizer).run())


class ActorLoops:
    """The members in flight, the samplers that they ask, and the loops around both."""

    def __init__(self, session: sessions.Session, tokenizer: Tokenizer) -> None:
        self.session, self.config, self.store = session, session.config, session.store
        self.samplers = Samplers(self._clients(), self.config.schedule.replicate, session.progress)
        self.manager = session.play_roles(None, tokenizer, training_params(session, tokenizer))
        self.members = Members(session, actor_members(self.config), self._version, self._begin)
        self.version: Version | None = None  # what the store is told: it never goes back
        self._first = asyncio.Event()

    async def run(self) -> None:
        """All loops, until one of them ends; then unfinished leases go back."""
        try:
            await until_one_ends((self.samplers.follow(), self._tell(), *self.members.loops(), self._report()))
        finally:
            await self.members.give_back()
            self._add_row()
            await self.samplers.close()

    def _clients(self) -> dict[str, RawClient]:
        args = self.session.args
        files = [address_file(args.run_dir, f"sampler-{index}") for index in range(self.config.sampler.count)]
        clients = {}
        for index, address in enumerate(args.samplers or files):
            clients[f"sampler-{index}"] = client = RawClient(
                service.SERVICE, address, role="actor", name=self.session.role, token=auth.load(args.run_dir),
                patience_s=0.0, max_message_bytes=self.config.store.max_message_mb * 2**20,
                config_digest=args.config_digest, tls=tls.load(args.run_dir),
            )  # fmt: skip
            client.run_id = self.store.welcome.run_id
        return clients

    async def _tell(self) -> None:
        while True:
            self.version = await self.samplers.newer_than(self.version)
            await self.store.published(self.version)  # a lease call that waits with the weights before may be granted
            self._first.set()

    async def _version(self) -> Version:
        await self._first.wait()
        assert self.version is not None, "`first` says that a sampler has weights"
        await self.samplers.has(self.version)  # nothing is leased while nobody could sample it
        return self.version

    def _begin(self, grant: Grant) -> MemberPlayer:
        assert self.version is not None, "nothing was granted before a version was told"
        table = self.samplers.table(self.version)

        async def play(member: int, attempt: int, said: Transcript) -> Member:
            with table.conversation() as proxy:
                return await self.manager.run_member(grant, member, attempt, proxy, said)

        return play

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self._add_row()

    def _add_row(self) -> None:
        counts = self.members.counts() | episode_counts(self.manager, self.session.places)
        self.session.add_row(
            {"t": unix_s(), "role": self.session.role, "kind": "stats", **counts,
             "samplers": self.samplers.seated(), "repeated": self.samplers.repeated}
        )  # fmt: skip
