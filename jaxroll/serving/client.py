"""Client of sampler engines in other processes, for actors: endpoints, their weight versions, routing.

A conversation is an `LLMProxy` that stays with one sampler as long as that lives, for what its cache holds. When it
dies the request is made again, at another sampler or at the same one once it is back: nothing of the episode is lost,
since keys and prompt decide what is drawn. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from types import TracebackType

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.errors import DataError, InfraError, StaleClient, Unauthorized
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version
from jaxroll.rollout.episode import GENERATION_LIMIT_S
from jaxroll.rpc.client import RawClient
from jaxroll.serving.service import GenerateCall, GenerateReply, VersionCall, VersionReply

WAIT_S, CALL_S = 10.0, 10.0  # of one call for the version: held for, and answered within
LOOK_FIRST_S, LOOK_MAX_S = 0.1, 1.0  # between two looks for a sampler that is not there
_ELSEWHERE = (InfraError, StaleClient, Unauthorized)  # what another sampler, or this one later, may answer otherwise


class _Remote:
    """One sampler as far as it is known."""

    def __init__(self, name: str, raw: RawClient) -> None:
        self.name, self.raw = name, raw
        self.version: Version | None = None  # None: it is not there, or has no weights yet
        self.seated = 0  # conversations


class Samplers:
    """The samplers of a run, by name. `follow` keeps up with them; until it runs there are none."""

    def __init__(self, clients: Mapping[str, RawClient], replicate: str, say: Callable[[str], object]) -> None:
        self._remotes = {name: _Remote(name, raw) for name, raw in clients.items()}
        self._replicate, self._say = replicate, say
        self._changed = asyncio.Event()
        self.repeated = 0  # requests that had to be made again

    async def follow(self) -> None:
        """Know every sampler's version, forever."""
        async with asyncio.TaskGroup() as group:
            for remote in self._remotes.values():
                group.create_task(self._follow(remote))

    async def close(self) -> None:
        """Close the connections."""
        for remote in self._remotes.values():
            await remote.raw.close()

    async def newer_than(self, known: Version | None) -> Version:
        """The newest version that a sampler has, as soon as it is newer than `known`."""
        while True:
            found = [r.version for r in self._remotes.values() if r.version is not None]
            if found and (known is None or max(found) > known):
                return max(found)
            await self._changed.wait()

    async def has(self, floor: Version) -> None:
        """Return when there is a sampler at `floor` or a later version."""
        while not self._at(floor):
            await self._changed.wait()

    def table(self, floor: Version) -> Table:
        """Conversations for the members of one group, which are sampled at `floor` or later."""
        return Table(self, floor)

    def seated(self) -> dict[str, int]:
        """Number of conversations of each sampler."""
        return {remote.name: remote.seated for remote in self._remotes.values()}

    def _at(self, floor: Version) -> dict[str, int]:
        return {r.name: r.seated for r in self._remotes.values() if r.version is not None and r.version >= floor}

    async def seat(self, floor: Version, group: str) -> _Remote:
        """The sampler for one more conversation of a group whose last member went to `group`, once there is one."""
        await self.has(floor)
        return self._remotes[seat(self._at(floor), group, self._replicate)]

    def _heard(self, remote: _Remote, version: Version | None) -> None:
        if version == remote.version:
            return
        remote.version = version
        self._changed.set()  # wakes all current waiters; later ones wait for the next change
        self._changed = asyncio.Event()

    async def _follow(self, remote: _Remote) -> None:
        pause_s, said = LOOK_FIRST_S, ""
        while True:
            call = wire.encode(VersionCall(remote.version, WAIT_S))
            try:
                body = await remote.raw.call("Version", call, WAIT_S + CALL_S, patience_s=0.0)
                self._heard(remote, wire.decode(body, VersionReply).version)
                pause_s, said = LOOK_FIRST_S, ""
            except (*_ELSEWHERE, msgspec.MsgspecError) as error:
                if type(error).__name__ != said:
                    said = type(error).__name__
                    self._say(f"{remote.name} cannot be asked: {said}: {error}")
                self._heard(remote, None)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LOOK_MAX_S)


class Table:
    """The samplers of one group's members."""

    def __init__(self, samplers: Samplers, floor: Version) -> None:
        self.samplers, self.floor = samplers, floor
        self.last = ""  # the sampler that its last member went to

    def conversation(self) -> Conversation:
        """One member's requests. Use it as a context manager: its slot is free again at the end."""
        return Conversation(self)


class Conversation:
    """An `LLMProxy` over one of the samplers, the same one as long as it is there."""

    def __init__(self, table: Table) -> None:
        self._table, self._samplers = table, table.samplers
        self._seat: _Remote | None = None

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._leave()

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        """The completion of `prompt`; cancelling the call aborts the request in its sampler.

        Waits for a sampler as long as there is none. DataError if the request itself cannot be served.
        """
        call = wire.encode(GenerateCall(np.asarray(prompt, np.int32), key, params, keep, self._table.floor))
        for failures in itertools.count():
            remote = self._seat or await self._taken()
            try:
                body = await remote.raw.call("Generate", call, GENERATION_LIMIT_S, patience_s=0.0)
                reply = wire.decode(body, GenerateReply)
                break
            except (*_ELSEWHERE, msgspec.MsgspecError):
                self._leave()
                self._samplers.repeated += 1
                await asyncio.sleep(min(LOOK_FIRST_S * 2 ** min(failures, 4), LOOK_MAX_S))  # 2**1024 is no float
        if reply.completion is None:
            raise DataError(reply.error)
        return reply.completion

    async def _taken(self) -> _Remote:
        table = self._table
        self._seat = remote = await self._samplers.seat(table.floor, table.last)
        table.last = remote.name
        remote.seated += 1
        return remote

    def _leave(self) -> None:
        if self._seat is not None:
            self._seat.seated -= 1
            self._seat = None


# --- routing of an actor's conversations to samplers: counts in, a name out
#
# Members of a group kept together on one sampler have their prompt computed once; spread out they finish sooner. What
# `replicate` means for groups and samplers that lease for themselves (`jaxroll.policy.order`) holds here as well.


def seat(seated: Mapping[str, int], groups: str, replicate: str) -> str:
    """The sampler for one more conversation, out of those that may serve it, with how many each has now.

    `groups` is where the last member of its group went ('' for the first). `together` goes there, as long as it may
    serve; `spread` to the sampler with fewest; `auto` where the group is, unless another one has nothing to do.
    """
    fewest = min(seated, key=lambda name: seated[name])
    if groups not in seated or replicate == "spread":
        return fewest
    return fewest if replicate == "auto" and not seated[fewest] else groups
