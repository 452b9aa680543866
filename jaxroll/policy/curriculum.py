"""Curriculum: admit or skip the next prompt of the stream by the results of its question so far. Pure.

With r̄ the mean reward of the question's members so far and s the next claim, a question is admitted if

    band           low < r̄ < high
    easy_to_hard   r̄ ≥ high − (high − low)·min(1, s/steps)

and, for every kind, if at least `rest` claims were made since the one that took it last. A question without results is
admitted. Of the others the share `explore` is admitted all the same: results go out of date while the model learns, and
a stream of skipped questions alone would give no prompts. The draw depends on `seed` and the prompt's ordinal only, so
equal histories give equal orders.

Sources: bands of difficulty as in DAPO's filter (Yu et al. 2025, arXiv 2503.14476, 3.2), applied before sampling;
curricula from easy to hard: Bengio et al. 2009.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from jaxroll.errors import ConfigError

KINDS = ("none", "band", "easy_to_hard")


@dataclass(frozen=True)
class Curriculum:
    """Rule for prompts. `steps` is the number of claims over which `easy_to_hard` lowers its bound."""

    kind: str = "none"
    low: float = 0.0
    high: float = 1.0
    rest: int = 0
    explore: float = 0.1
    steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind != "none" and not self.low < self.high:
            raise ConfigError("schedule.curriculum_low", self.low,
                              f"there is no value between it and schedule.curriculum_high = {self.high:g}",
                              "Set it below schedule.curriculum_high.")  # fmt: skip

    @property
    def is_off(self) -> bool:
        """True if it admits every prompt."""
        return self.kind == "none" and not self.rest

    def admits(self, reward_mean: float | None, last_step: int | None, step: int, ordinal: int) -> bool:
        """True if prompt `ordinal` of the stream becomes a group before claim `step`.

        `reward_mean` is that of its question (None: no result yet), `last_step` the claim that took it last.
        """
        if self.is_off:
            return True
        rests = last_step is not None and step - last_step < self.rest
        if not rests and (reward_mean is None or self._fits(reward_mean, step)):
            return True
        return self._draw(ordinal) < self.explore

    def _fits(self, reward_mean: float, step: int) -> bool:
        if self.kind == "band":
            return self.low < reward_mean < self.high
        if self.kind == "easy_to_hard":
            return reward_mean >= self.high - (self.high - self.low) * min(1.0, step / self.steps)
        return True

    def _draw(self, ordinal: int) -> float:
        """A number in [0, 1) determined by the seed and the ordinal."""
        digest = hashlib.blake2b(f"{self.seed}/curriculum/{ordinal}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64
