"""The window in force: the smallest at which the learner does not wait (STORE.md, promise 7).

The age limiter says how far samplers may run ahead at most: the full window. Beyond what keeps the learner busy,
running ahead buys nothing but age. So the window shrinks while the learner finds its claims ready and grows when it
waits, between what the next publication needs and the full window.

"Does not wait" is a share of its time, remembered over about a hundred claims: narrower below `TOLERATED`/2, wider
above `TOLERATED`. So what trying a smaller window costs is bounded, and when the learner would wait under any window
(samplers are too slow, or a few answers are very long), the full one stays. All of it depends on the logged claims
alone: how long the learner waited for each, and how long it had worked before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

TOLERATED = 0.01  # share of the learner's time that it may wait
_KEPT = 0.99  # of the past, at each claim


@dataclass(frozen=True)
class Pace:
    """The window in force (`groups`; 0 before the first claim: the full one) and what it was learned from.

    `hold` claims pass before it changes again: a change shows only when the groups leased under it are claimed. `step`
    is by how much it grows next; it doubles while growing does not help.
    """

    groups: int = 0
    hold: int = 0
    step: int = 0
    waited_s: float = 0.0
    worked_s: float = 0.0

    @property
    def waiting_share(self) -> float:
        """The share of its recent time that the learner waited for claims."""
        whole = self.waited_s + self.worked_s
        return self.waited_s / whole if whole > 0 else 0.0


def adapted(pace: Pace, least: int, most: int, batch: int, waited_s: float, worked_s: float) -> Pace:
    """The pace after a claim for which the learner waited `waited_s` after working `worked_s` (0: not known).

    `least` and `most` are the bounds of the window, `batch` the groups of a claim.
    """
    if pace.groups == 0:  # until the pipeline has filled, waiting says nothing
        return Pace(most, _settling(most, batch))
    groups = min(max(pace.groups, least), most)
    if worked_s <= 0:
        return replace(pace, groups=groups)
    waited_s = min(waited_s, worked_s)  # one long wait, as when a sampler died, must not count for ever
    past = (_KEPT * pace.waited_s + waited_s, _KEPT * pace.worked_s + worked_s)
    return _changed(replace(pace, groups=groups, waited_s=past[0], worked_s=past[1]), least, most, batch, waited_s > 0)


def _changed(pace: Pace, least: int, most: int, batch: int, waited: bool) -> Pace:
    if pace.hold > 0:
        return replace(pace, hold=pace.hold - 1)
    first_step = math.ceil(batch / 8)
    if waited and pace.waiting_share > TOLERATED:
        wider = min(most, pace.groups + max(first_step, pace.step))
        hold = _settling(wider, batch) if wider > pace.groups else 0
        return replace(pace, groups=wider, hold=hold, step=2 * max(first_step, pace.step) if hold else pace.step)
    if pace.waiting_share < TOLERATED / 2 and pace.groups > least:
        narrower = max(least, pace.groups - first_step)
        return replace(pace, groups=narrower, hold=_settling(pace.groups, batch), step=first_step)
    return pace if waited else replace(pace, step=first_step)


def _settling(groups: int, batch: int) -> int:
    """Claims until the groups that are in work now have been claimed."""
    return math.ceil(groups / batch) + 1
