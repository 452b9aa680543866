"""Which finished groups have something to teach (dynamic filtering): a judgement on a group's rewards alone.

Advantages compare the members of a group, so a group whose rewards are all equal has no gradient, and one that the
model nearly always solves, or never, has little. Such a group is rejected the moment it is complete, and another prompt
takes its place. Rewards r of the n members that count, in the order of the members:

    mean_band   low < Σr/n < high
    pass_rate   low < (share of members with r ≥ 1) < high
    min_std     √(Σ(r − r̄)²/n) > low
    a hook      `module:function`, of the tuple of rewards: '' or None keeps the group, a text says why not

After Yu et al. 2025 (DAPO, arXiv 2503.14476), 3.2.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxroll.errors import ConfigError

KINDS = ("none", "mean_band", "pass_rate", "min_std")
_HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_REASON_CHARS = 100
_TRIED = (0.0, 1.0)  # rewards with which a hook is tried before the run


@dataclass(frozen=True)
class Verdict:
    """Why a group is rejected; '' when it is kept. `broken` says that the hook itself failed."""

    reason: str = ""
    broken: bool = False


@dataclass(frozen=True)
class Filter:
    """What groups must be like, and how many may be rejected between two claims (`windows` times the full window).

    Beyond that the filter would spin on a task that teaches nothing: `at_limit` says whether the run then stops, or
    groups are delivered as they are until the next claim.
    """

    kind: str = "none"
    low: float = 0.0
    high: float = 1.0
    windows: int = 10
    at_limit: str = "stop"

    def __post_init__(self) -> None:
        if self.kind not in KINDS and not _HOOK.fullmatch(self.kind):
            raise ConfigError("schedule.filter", self.kind, "no such filter",
                              f"Use one of {', '.join(KINDS)}, or module:function of your own.")  # fmt: skip
        if self.kind in ("mean_band", "pass_rate") and not self.low < self.high:
            raise ConfigError("schedule.filter_low", self.low,
                              f"nothing lies between it and schedule.filter_high = {self.high:g}",
                              "Set it below schedule.filter_high.")  # fmt: skip

    def verdict(self, rewards: Sequence[float]) -> Verdict:
        """What becomes of a group with these rewards."""
        if self.kind in _BUILT_IN:
            return Verdict(_BUILT_IN[self.kind](self, rewards))
        try:
            said = hook(self.kind)(tuple(rewards))
        except Exception as error:  # noqa: BLE001 - foreign code; what it could not judge is not trained on
            return Verdict(f"{self.kind} raised {type(error).__name__}: {error}"[:_REASON_CHARS], broken=True)
        if said is None or isinstance(said, str):
            return Verdict((said or "")[:_REASON_CHARS])
        return Verdict(f"{self.kind} answered {said!r}, a text or None is due"[:_REASON_CHARS], broken=True)

    def check(self) -> None:
        """Raise ConfigError when a hook cannot be loaded or fails on a first group."""
        if self.kind in _BUILT_IN:
            return
        try:
            hook(self.kind)
        except Exception as error:  # importing foreign code may raise anything
            raise ConfigError("schedule.filter", self.kind, f"cannot be loaded: {type(error).__name__}: {error}",
                              "Install or mend the module, or run where it can be found.") from error  # fmt: skip
        if (tried := self.verdict(_TRIED)).broken:
            raise ConfigError("schedule.filter", self.kind, f"with the rewards {_TRIED}: {tried.reason}",
                              "It takes a tuple of rewards and returns '' or a reason.")  # fmt: skip


@functools.cache
def hook(name: str) -> Callable[[tuple[float, ...]], str | None]:
    """The function `module:function`; imports its module. Whatever the import raises passes through."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _band(value: float, low: float, high: float, what: str) -> str:
    return f"{what} too low" if value <= low else f"{what} too high" if value >= high else ""


def _spread(rewards: Sequence[float]) -> float:
    if min(rewards) == max(rewards):
        return 0.0  # exactly, whatever rounding makes of the mean
    mean = _mean(rewards)
    return math.sqrt(_mean([(reward - mean) ** 2 for reward in rewards]))


_BUILT_IN: dict[str, Callable[[Filter, Sequence[float]], str]] = {
    "none": lambda f, rewards: "",
    "mean_band": lambda f, rewards: _band(_mean(rewards), f.low, f.high, "mean reward"),
    "pass_rate": lambda f, rewards: _band(_mean([float(r >= 1.0) for r in rewards]), f.low, f.high, "pass rate"),
    "min_std": lambda f, rewards: "rewards too alike" if _spread(rewards) <= f.low else "",
}
