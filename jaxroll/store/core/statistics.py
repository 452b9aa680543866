"""Difficulty of questions and speed of lease holders: running means that are part of the state.

Every group that is claimed, or rejected by the filter, counts once, however often a learner trains on the claim. Only
the questions touched last are kept here; the table `questions` of the database has all of them.
"""

from __future__ import annotations

import msgspec

QUESTIONS_KEPT = 20_000


class Question(msgspec.Struct, array_like=True):
    """What became of one question: groups issued, groups claimed; finished members judged, the sum of their rewards."""

    issued: int = 0
    trained: int = 0
    members: int = 0
    reward_sum: float = 0.0
    last_step: int | None = None  # the claim that took it last

    @property
    def reward_mean(self) -> float | None:
        """Over all members that were claimed or rejected by the filter; None before the first."""
        return self.reward_sum / self.members if self.members else None


class Lengths(msgspec.Struct):
    """Tokens and finished members of the groups that were claimed and of those that ended otherwise.

    `reissues` counts prompts that were issued again, by the length class of the group that ended: tokens of its longest
    finished member, rounded up to a power of two.
    """

    trained_tokens: int = 0
    trained_members: int = 0
    lost_tokens: int = 0
    lost_members: int = 0
    reissues: dict[int, int] = {}


def touch(questions: dict[str, Question], question_hash: str) -> Question:
    """The question's row, made the newest; the oldest of too many is forgotten."""
    row = questions.pop(question_hash, None) or Question()
    questions[question_hash] = row
    if len(questions) > QUESTIONS_KEPT:
        del questions[next(iter(questions))]
    return row


def length_class(tokens: int) -> int:
    """The smallest power of two that is at least `tokens`; 0 for none."""
    return 1 << (tokens - 1).bit_length() if tokens > 0 else 0


# --- durations: means over the last few

_HOLDERS_KEPT = 1000  # samplers whose speed is remembered


def lately(before_s: float, now_s: float) -> float:
    """The mean of the last few durations, the newest being `now_s`; `before_s` 0 says that it is the first."""
    return now_s if before_s == 0.0 else 0.8 * before_s + 0.2 * now_s


_RECENT = 20  # members


class Recent(msgspec.Struct):
    """The mean duration of the last `_RECENT` members of a holder, the newer ones weighing more."""

    mean_s: float = 0.0
    count: int = 0

    def add(self, took_s: float) -> None:
        """Include one more member."""
        self.count = min(self.count + 1, _RECENT)
        self.mean_s += (took_s - self.mean_s) / self.count

    def at_least_s(self, took_s: float, running_s: list[float]) -> float:
        """A lower estimate of the mean: one more member took `took_s`, and others run for `running_s` already.

        Members that end soon are put first, so the finished ones alone make a slow holder look quick.
        """
        longer = [run_s for run_s in running_s if run_s > self.mean_s]
        return (self.count * self.mean_s + took_s + sum(longer)) / (self.count + 1 + len(longer))

    def at_most_s(self, running_s: list[float]) -> float:
        """An upper estimate of the mean: each member that still runs is expected to need the mean once more."""
        expected = sum(running_s) + len(running_s) * self.mean_s
        return (self.count * self.mean_s + expected) / (self.count + len(running_s))


def note(durations: dict[str, float], name: str, took_s: float) -> None:
    """Remember that something of `name` took so long; who was not heard of for longest is forgotten."""
    durations[name] = lately(durations.pop(name, 0.0), took_s)
    while len(durations) > _HOLDERS_KEPT:
        del durations[next(iter(durations))]
