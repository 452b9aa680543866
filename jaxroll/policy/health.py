"""The rest of a holder whose members keep failing, as a circuit breaker. Pure: durations in, a rest out.

A holder (a sampler, or an actor) that fails `TRIP` members in a row with INFRA rests: it gets no work for a while.
After the first rest it works as before; from the second on it gets one member at a time as a trial. Each failed trial
doubles the rest, which is a multiple of the time that the member took to fail: that is what a trial may cost the run.
A put halves what was counted, so that a holder that recovers soon has all of its room again.

A holder that answers, but much more slowly than the others, is on trial at once: the learner would wait for it.

Members that it had leased before its rest began are of the same wave: that they fail too says nothing new.
"""

from __future__ import annotations

import msgspec

TRIP = 4  # members in a row
FIRST_S, LONGEST_S = 1.0, 600.0
ALONE_S = 30.0  # the longest rest when no other holder could do the work
TRIAL_FROM = 2  # rests
SLOWER = 2.5  # times the others' median, in the mean of its last members
SHORT_S = 1.0  # members that take no longer hold up no claim, however quick those of others are
SLOW = "its members take much longer than those of others"
UNRELIABLE = 0.1  # failed members of the last ones, as a share
BROKEN = 0.3  # the share from which DATA failures count too, if other holders do not have them
_OF_ONE = 0.05  # weight of the newest member in that share
KEPT_BY_CLAIM = 0.99  # of the share, so that a holder which got no work is tried again


def failing_share(before: float, *, failed: bool) -> float:
    """Failed members of the last ones, as a share, after one more."""
    return (1 - _OF_ONE) * before + _OF_ONE * failed


class Health(msgspec.Struct):
    """How a holder has done lately. `failures` in a row since its last rest or put; `error` is that of the last one."""

    failures: int = 0
    rests: int = 0
    rest_s: float = 0.0
    rested_at_s: float | None = None  # None: it does not rest, or the store was started since
    error: str = ""

    @property
    def on_trial(self) -> bool:
        """True if it gets one member at a time."""
        return self.rests >= TRIAL_FROM

    def left_s(self, now_s: float, *, alone: bool) -> float:
        """How much longer it rests; 0 when it may work."""
        if self.rested_at_s is None:
            return 0.0
        rest_s = min(self.rest_s, ALONE_S) if alone else self.rest_s
        return max(0.0, self.rested_at_s + rest_s - now_s)

    def next_rest_s(self, leased_at_s: float | None, now_s: float) -> float | None:
        """The rest that one more failure brings (0: none), of a member leased then; None when it does not count."""
        if self.is_of_older_wave(leased_at_s):
            return None
        if self.failures + 1 < (1 if self.on_trial else TRIP):
            return 0.0
        took_s = 0.0 if leased_at_s is None or not self.rests else now_s - leased_at_s
        return min(LONGEST_S, max(FIRST_S, took_s) * 2**self.rests)

    def is_of_older_wave(self, leased_at_s: float | None) -> bool:
        """True if a member leased then was leased before the rest began."""
        return self.rested_at_s is not None and leased_at_s is not None and leased_at_s <= self.rested_at_s

    def next_slow_rest_s(self, leased_at_s: float, took_s: float) -> float:
        """The rest of a holder whose members take `took_s`, much longer than others; 0 for one of an older wave."""
        if self.is_of_older_wave(leased_at_s):
            return 0.0
        return min(LONGEST_S, max(FIRST_S, took_s) * 2 ** (1 + max(TRIAL_FROM, self.rests)))

    def begin_slow_rest(self, rest_s: float, now_s: float) -> None:
        """A put that brings this rest, for it was slow."""
        self.failures, self.rests = 0, max(TRIAL_FROM, self.rests + 1)
        self.rest_s, self.rested_at_s, self.error = rest_s, now_s, SLOW

    def note_failure(self, rest_s: float, error: str, now_s: float) -> None:
        """One more failure, which counts and brings this rest (0: none)."""
        self.failures, self.error = self.failures + 1, error
        if rest_s > 0:
            self.failures, self.rests, self.rest_s, self.rested_at_s = 0, self.rests + 1, rest_s, now_s

    def note_success(self) -> None:
        """A put: what was counted halves, and a rest is over."""
        self.failures, self.rests, self.rested_at_s = 0, self.rests // 2, None
