"""Generation service of a sampler for actors.

`Generate` is held until its completion is ready. If the caller cancels it or dies, the request is aborted. It may be
repeated, here or at another sampler: the same key draws the same tokens at the same version. `Version` returns the
engine's weight version, and is held until it differs from the one that the caller knows.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from jaxroll import wire
from jaxroll.errors import DataError, InfraError, StaleClient, Unauthorized
from jaxroll.protocols import Completion, GenerationKey, LLMProxy, SamplingParams
from jaxroll.records import Version
from jaxroll.rpc import protocol
from jaxroll.rpc.intake import Busy
from jaxroll.rpc.server import Caller, Method

SERVICE = "jaxroll.Sampler"
CALLERS = frozenset({"sampler", "admin"})  # an actor has the right of a sampler
MAX_OPEN = 16_384  # requests of all actors at one sampler
_REPLY_MARGIN_S = 0.5  # a reply is sent this long before its caller's deadline


class GenerateCall(msgspec.Struct, frozen=True):
    """One request (`LLMProxy.generate`). Every token is drawn at version `floor` or at a later one."""

    prompt: np.ndarray  # int32 [P]
    key: GenerationKey
    params: SamplingParams
    keep: bool
    floor: Version


class GenerateReply(msgspec.Struct, frozen=True):
    """The completion of the engine; or the reason why no sampler can serve this request."""

    completion: Completion | None
    error: str = ""


class VersionCall(msgspec.Struct, frozen=True):
    """Wait until the engine's version differs from `known`."""

    known: Version | None
    wait_s: float


class VersionReply(msgspec.Struct, frozen=True):
    """New requests are sampled at this version or a later one; None before the first weights."""

    version: Version | None


class Weights(Protocol):
    """The weight version of an engine: new requests are sampled at `version` or a later one."""

    version: Version | None

    async def other_than(self, known: Version | None, wait_s: float) -> Version | None:
        """The version, as soon as it differs from `known` or after `wait_s`."""
        ...


class Serving:
    """Answers the actors of one run. Belongs to one event loop."""

    def __init__(self, proxy: LLMProxy, weights: Weights, *, run_id: str, config_digest: str) -> None:
        self._proxy, self._weights = proxy, weights
        self._run_id, self._config_digest = run_id, config_digest
        self.open = self.served = self.aborted = 0

    def methods(self) -> dict[str, Method]:
        """Every method with its allowed callers."""
        return {"Generate": Method(self._generate, CALLERS), "Version": Method(self._version, CALLERS, held=True)}

    async def _generate(self, caller: Caller, body: bytes) -> bytes:
        self._check(caller)
        call = wire.decode(body, GenerateCall)
        version = self._weights.version
        if version is None or version < call.floor:
            raise InfraError(f"the weights here are {version}, the request asks for {call.floor} or later")
        if self.open >= MAX_OPEN:
            raise Busy(f"{self.open} requests are held already")
        self.open += 1
        completion = None
        try:
            completion = await self._proxy.generate(call.prompt, call.key, call.params, keep=call.keep)
        except DataError as error:
            return wire.encode(GenerateReply(None, str(error)))
        finally:
            self.open -= 1
            self.served += completion is not None
        return wire.encode(GenerateReply(completion))

    async def _version(self, caller: Caller, body: bytes) -> bytes:
        self._check(caller)
        call = wire.decode(body, VersionCall)
        wait_s = max(0.0, min(call.wait_s, protocol.MAX_WAIT_S, caller.deadline_s - _REPLY_MARGIN_S))
        return wire.encode(VersionReply(await self._weights.other_than(call.known, wait_s)))

    def _check(self, caller: Caller) -> None:
        """Raise StaleClient or Unauthorized for a caller of another run or config."""
        if caller.run_id != self._run_id:
            raise StaleClient(f"this sampler is of run {self._run_id}, the caller of {caller.run_id[:64] or 'none'}")
        if caller.config_digest != self._config_digest:
            raise Unauthorized(
                "the sampler and the caller have different configs: start both from the same config file"
            )
