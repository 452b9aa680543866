"""Selection of prompts (curriculum), of groups (dynamic filtering) and of the best checkpoint. Pure.

Filters reject finished groups whose rewards carry little or no gradient.

Advantages compare the members of a group. So a group with equal rewards has no gradient, and one that the model nearly
always or never solves has little. Such a group is rejected as soon as it is complete, and another prompt replaces it.
With rewards r of the n members that count, in the order of the members, a group is kept if:

    mean_band   low < Σr/n < high
    pass_rate   low < (share of members with r ≥ 1) < high
    min_std     √(Σ(r − r̄)²/n) > low
    a hook      `module:function` of the tuple of rewards returns '' or None; another text is the reason to reject it

After Yu et al. 2025 (DAPO, arXiv 2503.14476), 3.2.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import re
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxroll.errors import ConfigError
from jaxroll.records import LogStart, Version

# --- The best checkpoint by a held-out metric, and the checkpoints that may be removed. Pure
#
# The evaluator measures a version later than the learner writes its checkpoint. Three rules make the choice sound:
#
# 1. The evaluator measures only versions of which the learner writes a checkpoint (`is_kept`).
# 2. A checkpoint stays while the evaluator measures its version, until its value is known.
# 3. The best version is the one with the highest value among those that have a checkpoint; of equal ones the earliest.

Measured = dict[Version, float]
ACCURACY = "accuracy"  # of the set of task.heldout_items


def metrics_of(sets: Iterable[str]) -> tuple[str, ...]:
    """The metrics that a run with the held-out sets `sets` has, as paths into a row of the evaluator."""
    return (ACCURACY, *(f"sets.{name}.{ACCURACY}" for name in sets))


def measured(rows: Iterable[Mapping[str, Any]], metric: str) -> Measured:
    """The values of `metric` by version, from rows of the evaluator; the last row of a version counts."""
    found: Measured = {}
    for row in rows:
        if row.get("kind") == "eval":
            value = _value(row, metric)
            if value is not None:
                found[Version(row.get("lineage") or 0, row["step"])] = value
    return found


def _value(row: Mapping[str, Any], metric: str) -> float | None:
    if metric == ACCURACY:
        return row.get(ACCURACY)
    name = metric.removeprefix("sets.").removesuffix(f".{ACCURACY}")  # a name may contain dots
    return ((row.get("sets") or {}).get(name) or {}).get(ACCURACY)


def best(values: Measured, versions: Collection[Version]) -> Version | None:
    """The version of `versions` with the highest value, of equal ones the earliest; None if none has a value."""
    candidates = sorted(version for version in versions if version in values)
    return max(candidates, key=values.__getitem__, default=None)


def is_kept(step: int, every: int, last: int) -> bool:
    """True if the learner writes a checkpoint of each version with this step: every `every` steps, and the last."""
    return step % every == 0 or step == last


def removable(
    versions: Sequence[Version], durable: Version, kept: int, spared: Collection[Version] = ()
) -> list[Version]:
    """The checkpoints to remove, so that `kept` with `durable` and the older ones are left, and those in `spared`."""
    older = sorted(version for version in versions if version < durable)
    return [version for version in older[: max(0, len(older) - (kept - 1))] if version not in spared]


# --- The checkpoint to start from: the newest on the run's lineage, or the one that `--fork` names
#
# A fork has a name (STEP@NAME), so that a learner that dies and is started with the same arguments continues the fork
# that the store knows by that name, instead of making another. The beginning of a new log after a lost one is a fork,
# too (`NEW_LOG`): with `--new-log` it is made only in a log without a claim, and then the log is like any other.

NEW_LOG = "new-log"


class Checkpoints(Protocol):
    """The checkpoints of a run; `learner.checkpoint.Checkpoints` documents the methods."""

    def versions(self) -> tuple[Version, ...]: ...
    def latest(self, usable: Callable[[Version], bool]) -> Version | None: ...
    def at(self, name: str) -> Version | None: ...
    def path(self, version: Version) -> Path: ...


class Line(Protocol):
    """A lineage; `fork` is the name of the fork that began it."""

    @property
    def fork(self) -> str: ...


def start_of(
    checkpoints: Checkpoints,
    lines: Sequence[Line],
    claims: int,
    fork: str | None,
    on_line: Callable[[Version], bool],
    new_log: bool = False,
) -> tuple[Version | None, str]:
    """The checkpoint to restore (None: none) and the name of the fork to make there ("": none).

    `lines` are the lineages that the store knows, `claims` the number of claims on the newest, and `on_line` is true
    for versions on that. ConfigError if `fork` names no checkpoint, or if the store's log does not belong to the
    checkpoints; with `new_log` it may be a new one.
    """
    newest = checkpoints.latest(lambda version: True)
    if new_log and len(lines) == 1 and not claims and newest is not None and newest > Version(0, 0):
        return newest, NEW_LOG
    _check_known(checkpoints, len(lines), on_line, claims if fork is None else None)
    if fork is not None:
        where, _, name = fork.partition("@")
        name = name or uuid.uuid4().hex
        if all(line.fork != name for line in lines):
            return checkpoints.at(where), name
    return checkpoints.latest(on_line), ""


def _check_known(checkpoints: Checkpoints, lines: int, on_line: Callable[[Version], bool], claims: int | None) -> None:
    """Raise ConfigError if the store's log is not the one under which these checkpoints were written.

    With a log that is missing or restored from an old copy the run would begin at an older step and reuse lineage
    numbers: its new checkpoints would be mistaken for the existing ones, or look older.
    """
    for version in reversed(checkpoints.versions()):
        ahead = claims is not None and version.step > claims and on_line(version)
        if version.lineage >= lines or ahead:
            known = f"lineages below {lines}" + (f" and {claims} claims" if ahead else "")
            reason = f"store.db knows only {known}: it is missing, or older than this checkpoint"
            is_new = lines == 1 and claims == 0
            remedy = (
                "Put back the store.db that belongs to the checkpoints, or move the newer checkpoints away. "
                f"If it is lost,{'' if is_new else ' move this one away and'} add --new-log: a new log then begins at "
                "the newest checkpoint."
            )
            raise ConfigError("checkpoints", str(checkpoints.path(version)), reason, remedy)


def lost_with_log(rows: Sequence[Mapping[str, Any]], version: Version, log: LogStart) -> list[str]:
    """Sentences about a run that begins a new log at the checkpoint `version`: what it has, and what is lost.

    `rows` are the metrics of the run, of which some or all may be lost, too.
    """
    steps = [row["step"] for row in rows if row.get("kind") == "step" and isinstance(row.get("step"), int)]
    stored = next((row for row in reversed(rows) if row.get("kind") == "store"), {})
    last, in_flight = max(steps, default=0), stored.get("groups_in_flight")
    passed = f" without the {len(log.cut.passed)} later ones that had been used" if log.cut.passed else ""
    later = f"steps {version.step + 1} to {last}" if last > version.step else "no step that is in the metrics"
    later = later if steps else "the steps after it, which no metrics are left to count"
    flight = "the groups in flight" if in_flight is None else f"the groups in flight ({in_flight} at the last report)"
    return [
        f"begins a new log at checkpoint {version}, because the old one is lost: parameters, optimizer and step are "
        f"those after step {version.step}, and prompts continue at number {log.cut.ordinal:,}{passed}",
        f"lost: {later}; {flight}; texts, rewards and versions of the {log.cut.groups:,} groups before the checkpoint; "
        "results by question (curriculum, lengths), the measured window and speeds, and all counters of the store "
        f"(expired, stale and masked tokens among them); {'' if rows else 'the metrics; '}prompts that were drawn "
        "after the checkpoint are drawn again",
    ]


# --- Curriculum: admit or skip the next prompt of the stream by the results of its question so far
#
# With r̄ the mean reward of the question's members so far and s the next claim, a question is admitted if
#
#     band           low < r̄ < high
#     easy_to_hard   r̄ ≥ high − (high − low)·min(1, s/steps)
#
# and, for every kind, if at least `rest` claims were made since the one that took it last. A question without results
# is admitted. Of the others the share `explore` is admitted all the same: results go out of date while the model
# learns, and a stream of skipped questions alone would give no prompts. The draw depends on `seed` and the prompt's
# ordinal only, so equal histories give equal orders.
#
# Sources: bands of difficulty as in DAPO's filter (Yu et al. 2025, arXiv 2503.14476, 3.2), applied before sampling;
# curricula from easy to hard: Bengio et al. 2009.


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
            raise ConfigError(
                "schedule.curriculum_low",
                self.low,
                f"there is no value between it and schedule.curriculum_high = {self.high:g}",
                "Set it below schedule.curriculum_high.",
            )

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


# --- Dynamic filtering of groups. Pure

KINDS = ("none", "mean_band", "pass_rate", "min_std")
_HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_REASON_CHARS = 100
_TRIED = (0.0, 1.0)  # rewards for the test call of a hook before the run


@dataclass(frozen=True)
class Verdict:
    """Reason to reject a group; '' keeps it. `broken`: the hook itself failed."""

    reason: str = ""
    broken: bool = False


@dataclass(frozen=True)
class Filter:
    """Rule for groups, and the number that may be rejected between two claims (`windows` times the full window).

    Beyond that number (the task may have no useful groups) `at_limit` decides: "stop" ends the run, "deliver" accepts
    all groups until the next claim.
    """

    kind: str = "none"
    low: float = 0.0
    high: float = 1.0
    windows: int = 10
    at_limit: str = "stop"

    def __post_init__(self) -> None:
        if self.kind not in KINDS and not _HOOK.fullmatch(self.kind):
            raise ConfigError(
                "schedule.filter",
                self.kind,
                "no such filter",
                f"Use one of {', '.join(KINDS)}, or module:function of your own.",
            )
        if self.kind in ("mean_band", "pass_rate") and not self.low < self.high:
            raise ConfigError(
                "schedule.filter_low",
                self.low,
                f"there is no value between it and schedule.filter_high = {self.high:g}",
                "Set it below schedule.filter_high.",
            )

    def verdict(self, rewards: Sequence[float]) -> Verdict:
        """The verdict on a group with these rewards."""
        if self.kind in _BUILT_IN:
            return Verdict(_BUILT_IN[self.kind](self, rewards))
        try:
            reason = hook(self.kind)(tuple(rewards))
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything; its group is not trained
            return Verdict(f"{self.kind} raised {type(error).__name__}: {error}"[:_REASON_CHARS], broken=True)
        if reason is None or isinstance(reason, str):
            return Verdict((reason or "")[:_REASON_CHARS])
        return Verdict(f"{self.kind} returned {reason!r} instead of a text or None"[:_REASON_CHARS], broken=True)

    def check(self) -> None:
        """Raise ConfigError if a hook cannot be loaded or fails on a test group."""
        if self.kind in _BUILT_IN:
            return
        try:
            hook(self.kind)
        except Exception as error:  # importing foreign code may raise anything
            raise ConfigError(
                "schedule.filter",
                self.kind,
                f"cannot be loaded: {type(error).__name__}: {error}",
                "Install or fix the module, or run where it can be imported.",
            ) from error
        if (tried := self.verdict(_TRIED)).broken:
            raise ConfigError(
                "schedule.filter",
                self.kind,
                f"with the rewards {[*_TRIED]}: {tried.reason}",
                "It takes a tuple of rewards and returns '' or a reason.",
            )


@functools.cache
def hook(name: str) -> Callable[[tuple[float, ...]], str | None]:
    """Import and return the function `module:function`; errors of the import pass through."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _band(value: float, low: float, high: float, what: str) -> str:
    return f"{what} too low" if value <= low else f"{what} too high" if value >= high else ""


def _spread(rewards: Sequence[float]) -> float:
    if min(rewards) == max(rewards):
        return 0.0  # exactly, regardless of rounding in the mean
    mean = _mean(rewards)
    return math.sqrt(_mean([(reward - mean) ** 2 for reward in rewards]))


_BUILT_IN: dict[str, Callable[[Filter, Sequence[float]], str]] = {
    "none": lambda f, rewards: "",
    "mean_band": lambda f, rewards: _band(_mean(rewards), f.low, f.high, "mean reward"),
    "pass_rate": lambda f, rewards: _band(_mean([float(r >= 1.0) for r in rewards]), f.low, f.high, "pass rate"),
    "min_std": lambda f, rewards: "rewards too alike" if _spread(rewards) <= f.low else "",
}


# --- Instances for long answers (StreamRL, arXiv 2504.15930, algorithm 2), and a predictor of the order of lengths


@dataclass(frozen=True)
class LengthDispatch:
    """Instances for the longest answers and for the others, the answers of both by index, and the seconds in all."""

    long_instances: int
    other_instances: int
    long: tuple[int, ...]
    others: tuple[int, ...]
    seconds: float


def dispatch(
    lengths: Sequence[float],
    instances: int,
    token_s: Callable[[int], float],
    slots: int,
    *,
    share: float = 0.2,
    combine: Callable[[Sequence[float]], float] = max,
) -> LengthDispatch:
    """The instances that get the `share` longest answers by predicted `lengths`; none if one group is faster.

    An instance of m answers with s slots takes token_s(min(m, s)) · length · ⌈m / s⌉, with the 90th percentile of all
    lengths for the long answers and the median for the others. Both groups run at once, so `combine` is max; StreamRL's
    text can be read as their sum.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])  # longest first
    ranked = [lengths[index] for index in order]
    cut = math.ceil(share * len(order))
    at = [ranked[min(len(ranked) - 1, math.floor(part * len(ranked)))] for part in (0.1, 0.5)]

    def group_s(members: int, number: int, length: float) -> float:
        each = math.ceil(members / number)
        return token_s(min(each, slots)) * length * math.ceil(each / slots)

    # Without a split an instance decodes long and short answers together, until the longest ends.
    best = LengthDispatch(0, instances, (), tuple(order), group_s(len(order), instances, at[0]))
    for number in range(1, instances) if 0 < cut < len(order) else ():
        both = (group_s(cut, number, at[0]), group_s(len(order) - cut, instances - number, at[1]))
        if (seconds := combine(both)) < best.seconds:
            best = LengthDispatch(number, instances - number, tuple(order[:cut]), tuple(order[cut:]), seconds)
    return best


PRIOR_MEMBERS = 4  # weight of a coarser mean, in members


def predicted_tokens(*seen: tuple[int, int]) -> float:
    """The predicted length of an answer in tokens, from the (members, tokens) of its question, its source and the run.

    Each mean is drawn towards that of the next coarser one, which counts as `PRIOR_MEMBERS` members; so a question
    without answers is predicted by its source, and one of a new source by the run. 0 before the first answer.
    """
    mean = 0.0
    for members, tokens in reversed(seen):
        prior = PRIOR_MEMBERS if mean else 0
        mean = (tokens + prior * mean) / (members + prior) if members + prior else 0.0
    return mean


def longest_first(places: Sequence[int], predicted: Sequence[float], batch: int) -> list[int]:
    """The indices of groups in the order of their leases; `places` are their positions in the order of claims.

    Groups of an earlier claim (of `batch` groups) come first; within a claim the longest by `predicted`, and of equal
    ones the older. The last to finish delays its claim, so it should start first (Graham 1969: within 4/3 of the best).
    """
    return sorted(range(len(places)), key=lambda index: (places[index] // batch, -predicted[index], places[index]))


class LengthRanker:
    """Order of answer lengths by their prompts: ridge regression of log lengths on hashed parts of the prompt."""

    def __init__(self, features: int = 256, ridge: float = 1.0) -> None:
        self._features, self._ridge = features, ridge
        self._weights = np.zeros(features)

    def _row(self, prompt: str) -> np.ndarray:
        row = np.zeros(self._features)
        row[0], row[1], row[2] = 1.0, math.log1p(len(prompt)), math.log1p(len(prompt.split()))
        for size in (1, 2, 3):
            for start in range(len(prompt) - size + 1):
                row[3 + zlib.crc32(prompt[start : start + size].encode()) % (self._features - 3)] += 1.0 / size
        return row

    def fit(self, prompts: Sequence[str], lengths: Sequence[float]) -> LengthRanker:
        """Fit to answers that were generated; return self."""
        rows = np.array([self._row(prompt) for prompt in prompts])
        normal = rows.T @ rows + self._ridge * np.eye(self._features)
        self._weights = np.linalg.solve(normal, rows.T @ np.log1p(np.asarray(lengths, float)))
        return self

    def predict(self, prompts: Sequence[str]) -> list[float]:
        """Predicted lengths in tokens. Their order is what counts."""
        return [float(np.expm1(self._row(prompt) @ self._weights)) for prompt in prompts]
