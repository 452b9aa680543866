"""What every channel offers: a Sender on the learner's side, a Reader on the sampler's, and a deadline for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxroll.clock import Clock, MonotonicClock
from jaxroll.errors import TransferError
from jaxroll.transfer.host_snapshot import HostSnapshot
from jaxroll.transfer.manifest import Manifest
from jaxroll.transfer.plan import Box


class Part(NamedTuple):
    """One slice to fetch: `box` of leaf number `leaf`, which lies in its source box `source`.

    `into` is where it goes: a writable view of shape `box` in the dtype of the leaf's bits. `checked` asks the
    channel to vouch for the bytes itself, because the receiver holds too little of the leaf to compare its digest.
    """

    leaf: int
    source: int
    box: Box
    into: np.ndarray
    checked: bool


class Sender(Protocol):
    """The publishing end. `offer` returns the address that Readers open; old versions go when newer ones come."""

    name: str

    def offer(self, snapshot: HostSnapshot) -> str: ...

    def close(self) -> None: ...


class Reader(Protocol):
    """One transfer of one version; used by one thread, closed at the end."""

    def manifest(self) -> bytes:
        """The manifest's bytes, unchecked. Raises VersionGone when the version is not kept."""
        ...

    def read(self, manifest: Manifest, parts: Sequence[Part]) -> None:
        """Nothing, after filling every part. Raises TransferError and its kinds."""
        ...

    def close(self) -> None: ...


class Deadline:
    """The moment a transfer gives up."""

    def __init__(self, limit_s: float, doing: str, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._limit_s, self._doing = limit_s, doing
        self._end_s = self._clock.now_s() + limit_s

    def left_s(self) -> float:
        """Seconds left, more than 0; raises TransferError when there are none."""
        left_s = self._end_s - self._clock.now_s()
        if left_s <= 0:
            raise self.passed()
        return left_s

    def passed(self) -> TransferError:
        """The error of a wait that outlived this deadline."""
        return TransferError(f"{self._doing}: not done within {self._limit_s:g} s")
