"""Circuit breaker for lease holders whose members keep failing. Pure: durations in, a rest out.

A holder (a sampler or an actor) that fails `TRIP` members in a row with INFRA rests: it gets no leases for a while.
After the first rest it works as before; from the second on it gets one member at a time, as a trial. Each failed trial
doubles the rest, which is a multiple of the time that the member took to fail; this bounds the cost of trials. A put
halves the number of rests, so that a holder that recovers gets all its leases again soon.

The failures of a holder that never succeeded count against it alone while other holders may do better: see
`jaxroll.store.core.admission.is_broken_alone`.

A holder that succeeds, but much more slowly than the others, goes on trial at once, because the learner would wait for
it.

Members that were leased before the rest began belong to the same wave: their failures do not count again.
"""

from __future__ import annotations

import msgspec

TRIP = 4  # members in a row
FIRST_S, LONGEST_S = 1.0, 600.0
ALONE_S = 30.0  # the longest rest when no other holder could do the work
TRIAL_FROM = 2  # rests
SLOWER = 2.5  # a holder is slow if the mean of its last members exceeds the others' median by this factor
SHORT_S = 1.0  # members this short delay no claim, however quick those of others are
SLOW = "its members take much longer than those of others"
UNRELIABLE = 0.1  # share of the last members that failed
BROKEN = 0.3  # share above which DATA failures count too, if other holders do not have them
_OF_ONE = 0.05  # weight of the newest member in that share
KEPT_BY_CLAIM = 0.99  # each claim multiplies the share by this, so that a holder without leases is tried again


def failing_share(before: float, *, failed: bool) -> float:
    """The share of the last members that failed, after one more member."""
    return (1 - _OF_ONE) * before + _OF_ONE * failed


class Health(msgspec.Struct):
    """Health of a holder: `failures` in a row since its last rest or put, and the `error` of the last one."""

    failures: int = 0
    rests: int = 0
    rest_s: float = 0.0
    rested_at_s: float | None = None  # start of its rest; None: not resting, or the store has restarted since
    error: str = ""

    @property
    def on_trial(self) -> bool:
        """True if the holder gets one member at a time."""
        return self.rests >= TRIAL_FROM

    def left_s(self, now_s: float, *, alone: bool) -> float:
        """The remaining rest in seconds; 0 if the holder may work."""
        if self.rested_at_s is None:
            return 0.0
        rest_s = min(self.rest_s, ALONE_S) if alone else self.rest_s
        return max(0.0, self.rested_at_s + rest_s - now_s)

    def next_rest_s(self, leased_at_s: float | None, now_s: float) -> float | None:
        """The rest after one more failure, of a member leased at `leased_at_s` (0: none); None if it does not count."""
        if self.is_of_older_wave(leased_at_s):
            return None
        if self.failures + 1 < (1 if self.on_trial else TRIP):
            return 0.0
        took_s = 0.0 if leased_at_s is None or not self.rests else now_s - leased_at_s
        return min(LONGEST_S, max(FIRST_S, took_s) * 2**self.rests)

    def is_of_older_wave(self, leased_at_s: float | None) -> bool:
        """True if a member leased at `leased_at_s` was leased before the rest began."""
        return self.rested_at_s is not None and leased_at_s is not None and leased_at_s <= self.rested_at_s

    def next_slow_rest_s(self, leased_at_s: float, took_s: float) -> float:
        """The rest of a slow holder whose members take `took_s`; 0 if this one was leased before its rest began."""
        if self.is_of_older_wave(leased_at_s):
            return 0.0
        return min(LONGEST_S, max(FIRST_S, took_s) * 2 ** (1 + max(TRIAL_FROM, self.rests)))

    def begin_slow_rest(self, rest_s: float, now_s: float) -> None:
        """Start a rest because of a slow put."""
        self.failures, self.rests = 0, max(TRIAL_FROM, self.rests + 1)
        self.rest_s, self.rested_at_s, self.error = rest_s, now_s, SLOW

    def note_failure(self, rest_s: float, error: str, now_s: float) -> None:
        """Count one more failure and start a rest of `rest_s` (0: none)."""
        self.failures, self.error = self.failures + 1, error
        if rest_s > 0:
            self.failures, self.rests, self.rest_s, self.rested_at_s = 0, self.rests + 1, rest_s, now_s

    def note_success(self) -> None:
        """Count a put: end the rest, reset the failures and halve the number of rests."""
        self.failures, self.rests, self.rested_at_s = 0, self.rests // 2, None
