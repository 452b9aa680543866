"""Whose calls belong to this run: the facts of the first message, which every later call carries again.

What a hello proves (same protocol, same config, this run) is in the metadata of every call, so that a store that
started again can check it too; a caller learns the run's id only from the answer to its hello. Of samplers and learners
the log also knows the names that said hello.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from jaxroll import wire
from jaxroll.errors import StaleClient, Unauthorized
from jaxroll.rpc.server import Caller
from jaxroll.rpc.throttle import Credit, Crowded
from jaxroll.store.messages import Hello

NAMES_KEPT = 1024  # of which something is remembered that nothing depends on
_ARRIVALS, _ARRIVALS_PER_S = 512.0, 2.0  # each is a record of the log: a whole pod at once, but no stream of them
_WITHOUT_CONFIG = frozenset({"observer", "admin"})  # may come without a config; with one, it must be the run's

V = TypeVar("V")


class Guests:
    """Refuses callers of other runs and configs, and a stream of newcomers."""

    def __init__(self, run_id: str, config_digest: str) -> None:
        self._run_id, self._config_digest = run_id, config_digest
        self._arrivals = Credit(_ARRIVALS, _ARRIVALS_PER_S)

    def check_hello(self, caller: Caller, hello: Hello) -> None:
        """Raises Unauthorized unless `caller` may join."""
        if hello.protocol != wire.PROTOCOL_VERSION:
            raise Unauthorized(
                f"the store speaks protocol {wire.PROTOCOL_VERSION}, the caller {hello.protocol}: "
                "install the same JaxRoll on both sides"
            )
        self._check_config(caller, hello.config_digest)

    def count_arrival(self, now_s: float) -> None:
        """Raises Crowded when more processes join than a run can have: is something looping?"""
        if not self._arrivals.take(now_s):
            raise Crowded("too many processes join this run; try again")

    def check_call(self, caller: Caller, greeted: bool) -> None:
        """Raises StaleClient or Unauthorized unless `caller` has been welcomed; `greeted`: its name has said hello."""
        if not (caller.run_id and greeted):
            raise StaleClient(f"this is run {self._run_id}, the caller has not said Hello, its first message")
        if caller.run_id != self._run_id:
            raise StaleClient(
                f"this is run {self._run_id}, the caller belongs to {caller.run_id[:64]}: start it again for this run"
            )
        self._check_config(caller, caller.config_digest)

    def _check_config(self, caller: Caller, said: str) -> None:
        if said == self._config_digest or (not said and caller.right in _WITHOUT_CONFIG):
            return
        raise Unauthorized(
            f"the store runs config {self._config_digest[:12]}, the caller {said[:12] or 'none'}: "
            "start both from the same config (`jaxroll config` prints its digest)"
        )


class Recent(OrderedDict[str, V], Generic[V]):
    """A dict of the `size` keys written last: what callers choose must not grow without end."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: str, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._size:
            self.popitem(last=False)
