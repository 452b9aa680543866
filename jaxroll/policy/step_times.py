"""Seconds of a training step under a schedule, by a recursion over drawn rollouts.

Step k has been trained at T(k) = max(T(k−1), E(k)) + t, where t is the time of training and E(k) the end of the longest
of its rollouts. They begin at S(k) = T(k−α−1) + f: the age bound α admits them when the step α + 1 before has been
trained, and f is the time until its weights have arrived. E(k) = S(k) + L(k), with L(k) the longest of the drawn
rollouts. So a step takes at least t, and at least (f + L + t)/(α + 1) in the mean.

ROLL Flash's proposition 2 (arXiv 2510.11345) is max(t, N·μ/K + L/(α + 1)): it leaves t and f out of the second term.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

StepCost = Callable[[int, float], float]  # seconds of a decode step by its sequences and their tokens of context
Range = tuple[float, float, float]  # a mean and the 10th and 90th percentile
ITERATIONS = 20  # of the fixed point at most
RESTARTS = 100  # of a rollout, after which it is counted as finished


@dataclass(frozen=True)
class Engines:
    """Equal engines: a decode step, their number and slots; rollouts of a step on each, and seconds of their prefill.

    Each is lost every `lost_every_s` in the mean, for `down_s`; its rollouts begin again `noticed_s` after the loss.
    """

    step: StepCost
    number: int
    slots: int
    members: float
    prefill_s: float = 0.0
    lost_every_s: float = math.inf
    down_s: float = 0.0
    noticed_s: float = 0.0


@dataclass(frozen=True)
class Rules:
    """A schedule. The rollouts of a step begin `sends_s` after the step `alpha` + 1 before has been trained.

    With `drains` an engine first ends those that ran when these weights came, with `barrier` all engines do. Training
    takes `train_s`, in the order of steps, after all rollouts of the step. With `barrier` engines take `fetch_s` of
    `sends_s` after the rollouts of the step before, and training waits for that, too.
    """

    alpha: int
    train_s: float
    sends_s: float = 0.0
    drains: bool = False
    barrier: bool = False
    fetch_s: float = 0.0

    @property
    def at_once(self) -> int:
        """The most steps whose rollouts run on an engine at once."""
        return 1 if self.drains or self.barrier else self.alpha + 1


@dataclass(frozen=True)
class Rollouts:
    """Drawn rollouts, a row for each step: decode steps of each, and seconds in which its environment takes time.

    `prompt` and `context`: mean tokens before the answer, and over all decode steps. `tokens`: those that are sampled.
    """

    answers: np.ndarray
    waits: np.ndarray
    prompt: float
    context: float
    tokens: np.ndarray

    def stepped(self, engines: Sequence[Engines], rules: Rules, steps: int) -> tuple[Range, float]:
        """Seconds of a step, with the range of its mean over a run of `steps` steps; seconds of a step's generation.

        The time of a decode step depends on how many rollouts of other steps run, which is their time over that of a
        step (Little's law): a fixed point.
        """
        period_s, states = math.inf, [_State() for _ in engines]
        warm = min(2 * (rules.alpha + 1), len(self.answers) // 3)
        trained, lasting = np.zeros(0), np.zeros(0)
        deal, full = _Deal(engines, self.answers.shape[1]), all(each.slots < 1.5 * each.members for each in engines)
        work, waits = (self.answers, self.waits) if self.waits.any() else (deal.longest(self.answers), None)
        edges, left = self._left
        for _ in range(ITERATIONS):
            parts = []
            for number, (engine, state) in enumerate(zip(engines, states, strict=True)):
                passed, before_s = self._passed(engine, state, rules, period_s, edges, left)
                part = np.interp(work, edges, passed) + before_s
                part = deal.of_kind(part if waits is None else deal.longest(part + waits), number)
                state.follow(engine, float(part.max(axis=1).mean()), period_s)
                parts.append(part)
            lasting = np.concatenate(parts, axis=1)
            queued_s = statistics.mean(each.mean_s for each in states) if full else 0.0
            trained = np.array(_trained(lasting, engines, rules, queued_s))
            least_s = max(of.mean_s * each.members / each.slots for of, each in zip(states, engines, strict=True))
            new_s = max(float(trained[-1] - trained[warm - 1]) / (len(trained) - warm), least_s)
            settled = abs(new_s - period_s) < 1e-3 * new_s and max(each.moved for each in states) < 1e-2
            period_s = new_s
            if settled:
                break
        cycles = trained[warm - 1 :: rules.alpha + 1]
        off_s = 1.2816 * float(np.std(np.diff(cycles)) / (rules.alpha + 1)) * math.sqrt((rules.alpha + 1) / steps)
        generation_s = float(lasting[warm:].max(axis=1).mean()) / rules.at_once
        low_s = min(period_s, max(period_s - off_s, rules.train_s))
        return (period_s, low_s, period_s + off_s), generation_s

    @functools.cached_property
    def _left(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of decode steps, and the share of rollouts that are left between two of them."""
        ranked = np.sort(self.answers, axis=None)
        edges = np.unique([0.0, *ranked[np.linspace(0, ranked.size - 1, 65).round().astype(int)]])
        return edges, 1 - np.searchsorted(ranked, (edges[1:] + edges[:-1]) / 2) / ranked.size

    def _passed(
        self, engine: Engines, state: _State, rules: Rules, period_s: float, edges: np.ndarray, left: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """Seconds until a rollout has sampled each of `edges` tokens, and those before its first token."""
        members = state.members(engine)
        own = members * left * state.share  # the others wait for their environments
        count = np.minimum(own + state.others, engine.slots)
        context = own * (self.prompt + edges[:-1]) + state.others * self.context
        context *= count / np.maximum(own + state.others, 1e-9)
        step_s = [engine.step(max(1, round(n)), max(c, 1.0)) for n, c in zip(count, context, strict=True)]
        passed = np.concatenate([[0.0], np.cumsum(np.diff(edges) * step_s)])
        state.decodes_s = float(left @ np.diff(passed))
        state.mean_s = state.decodes_s + float(self.waits.mean())
        queued_s = max(0.0, engine.members * rules.at_once / engine.slots - 1) * state.mean_s
        return passed, queued_s + engine.prefill_s * max(1.0, state.alive_s / period_s)


@dataclass
class _State:
    """The load of an engine: rollouts of other steps that decode, and the share of the own ones that do.

    `alive_s`: until the last rollout of a step ends; `mean_s`: of a rollout, with `decodes_s` of decoding; `moved`: the
    last change of `others` for each member.
    """

    others: float = 0.0
    share: float = 1.0
    alive_s: float = 1.0
    mean_s: float = 0.0
    decodes_s: float = 0.0
    moved: float = 0.0

    def members(self, engine: Engines) -> float:
        """The rollouts of a step, with those of engines that are lost."""
        return engine.members * (1 + engine.down_s / engine.lost_every_s)

    def follow(self, engine: Engines, alive_s: float, period_s: float) -> None:
        """Become the load that follows from these times."""
        self.alive_s, self.share = alive_s, self.decodes_s / self.mean_s
        others = self.members(engine) * self.decodes_s * max(0.0, 1 / period_s - 1 / alive_s)
        self.moved, self.others = abs(others - self.others) / engine.members, (others + self.others) / 2


class _Deal:
    """The rollouts of a step that each engine gets, by their numbers of members."""

    def __init__(self, engines: Sequence[Engines], size: int) -> None:
        shares = np.cumsum([each.members for each in engines for _ in range(each.number)])
        self._order = np.argsort(np.arange(size) * 0.6180339887 % 1.0)  # a group's members go to different engines
        starts = np.round(np.concatenate([[0.0], shares[:-1]]) / shares[-1] * size).astype(int)
        self._starts = np.minimum(starts, size - 1)
        self._kinds = np.cumsum([0, *(each.number for each in engines)])

    def longest(self, values: np.ndarray) -> np.ndarray:
        """The largest value of each row on each engine."""
        return np.maximum.reduceat(values[:, self._order], self._starts, axis=1)

    def of_kind(self, values: np.ndarray, number: int) -> np.ndarray:
        """The columns of the engines of one kind."""
        return values[:, self._kinds[number] : self._kinds[number + 1]]


def _trained(lasting: np.ndarray, engines: Sequence[Engines], rules: Rules, queued_s: float) -> list[float]:
    """The times at which steps have been trained. `queued_s`: until rollouts find a free slot on other engines."""
    every = [each for each in engines for _ in range(each.number)]
    losing = any(math.isfinite(each.lost_every_s) for each in every)
    trained, running = [0.0] * (rules.alpha + 1), list[tuple[np.ndarray, np.ndarray]]()
    if not (losing or rules.drains or rules.barrier):
        for longest_s in lasting.max(axis=1).tolist():
            end_s = trained[-rules.alpha - 1] + rules.sends_s + longest_s
            trained.append(max(trained[-1], end_s) + rules.train_s)
        return trained[rules.alpha + 1 :]
    alone = None if len(every) == 1 else queued_s
    losses = [_Losses(each, index, alone) for index, each in enumerate(every)] if losing else []
    for row in lasting:
        ready_s = trained[-rules.alpha - 1] + rules.sends_s
        begins = np.full(len(row), ready_s)
        if rules.barrier and running:
            begins[:] = max(ready_s - rules.fetch_s, running[-1][1].max()) + rules.fetch_s
        elif rules.drains:
            for began, ended in running[-rules.alpha - 1 :]:
                begins = np.where(began < ready_s, np.maximum(begins, ended), begins)
        ends = begins + row
        if losing:
            ends = np.array([each.end(*times) for each, *times in zip(losses, begins, row, strict=True)])
        running.append((begins, ends))
        published_s = trained[-1] + (rules.sends_s - rules.fetch_s) * rules.barrier
        trained.append(max(published_s, float(ends.max())) + rules.fetch_s + rules.train_s)
    return trained[rules.alpha + 1 :]


class _Losses:
    """The losses of an engine, drawn as they are needed.

    Other engines take the rollouts of a lost one, after `queued_s` if they have no free slot; alone it takes them when
    it is back (`queued_s` None).
    """

    def __init__(self, engine: Engines, index: int, queued_s: float | None) -> None:
        self._engine, self._queued_s, self._drawn = engine, queued_s, random.Random(repr(("loss", index)))
        alone = queued_s is None
        self._again_s = max(engine.noticed_s, engine.down_s) if alone else engine.noticed_s
        self._at_s: list[float] = []

    def _at(self, index: int) -> float:
        if math.isinf(self._engine.lost_every_s):
            return math.inf
        if index == len(self._at_s):
            before_s = self._at_s[-1] + self._engine.down_s if self._at_s else 0.0
            self._at_s.append(before_s + self._drawn.expovariate(1 / self._engine.lost_every_s))
        return self._at_s[index]

    def end(self, begin_s: float, lasting_s: float) -> float:
        """The end of the rollout of so many seconds that should begin at `begin_s`."""
        index = restarts = 0
        while restarts < RESTARTS and (at_s := self._at(index)) < begin_s + lasting_s:
            back_s, index = at_s + self._engine.down_s, index + 1
            if at_s >= begin_s:
                begin_s, restarts = at_s + self._again_s, restarts + 1
            elif back_s > begin_s:
                begin_s = back_s if self._queued_s is None else min(back_s, begin_s + self._queued_s)
        return begin_s + lasting_s


# --- samplers that a running run needs
#
# A run with `sampler.least_count` plans again when its membership changes: a sampler joins, leaves or is lost. The cost
# model is that of the planner with what the store measures in place of drawn rollouts:
#
#     step_s(n) = max(t, R·m/(n·c), (m + t + q)/(α + 1)),   q = max(0, (α + 1)·R/(n·c) − 1)·m
#
# where R rollouts of a step take m seconds in the mean, a sampler has room for c of them, and q is the time for which a
# rollout waits for room. The longest rollout and the time of new weights are not measured, so that the third term is
# too small, and m grows where a full engine is slower. So a plan is checked: if steps take longer after samplers have
# been released, the run asks for them again.

STEADY_S = 10.0  # a loss must last so long before another sampler is asked for
STEPS, MOST_STEPS = 8, 256  # measured under one membership before a plan; before a release twice as many per request
WITHIN, WORSE = 0.05, 0.10  # a step may be so much longer than with more samplers; than before a release


@dataclass(frozen=True)
class StepLoad:
    """Measured: seconds of training and, in the mean, of a rollout; rollouts of a step; a sampler's room for them."""

    train_s: float
    rollout_s: float
    rollouts: int
    room: int
    alpha: float

    def step_s(self, samplers: int) -> float:
        """The seconds of a step with so many samplers."""
        ahead, room = self.alpha + 1, samplers * self.room
        queued_s = max(0.0, ahead * self.rollouts / room - 1) * self.rollout_s
        latency_s = (self.rollout_s + self.train_s + queued_s) / ahead
        return max(self.train_s, self.rollouts * self.rollout_s / room, latency_s)

    def needed(self, least: int = 1) -> int:
        """The smallest number of samplers, at least `least`, with which a step takes as long as with any number."""
        enough = math.ceil((self.alpha + 1) * self.rollouts / self.room)  # none waits for room
        limit_s = (1 + WITHIN) * self.step_s(max(least, enough))
        return next((n for n in range(least, enough) if self.step_s(n) <= limit_s), max(least, enough))


@dataclass(frozen=True)
class SamplerPlan:
    """A decision: the samplers that the run needs, those that leave, how many more are asked for, and why."""

    needed: int
    leave: tuple[str, ...]
    more: int
    reason: str


class Replanner:
    """Plans the number of samplers of a running run. Pure: the caller passes time, membership and measurements.

    Between two changes that others make it makes at most 2·n + 1 plans, with n the most samplers that were present:
    releases come first, each of at least one sampler, and after it has asked for one it releases none. Each request
    doubles the steps that the next release waits for, so that a sampler that comes and goes causes ever fewer plans.
    """

    def __init__(self, least: int, settling: int, needed: int = 0, most: int = 0) -> None:
        """`settling`: steps that were begun before a change. `needed` and `most` are those of an earlier process."""
        self.least, self.needed, self.most, self.missing = least, needed, most, 0
        self._settling, self._known = settling, frozenset[str]()
        self._changed_s: float | None = None  # time of the last change of the membership; None before the first
        self._since_step = 0
        self._marks = list[tuple[float, int]]()  # times at which steps had been trained, with their number
        self._asked = False  # since the last change that others made
        self._patience = 2 * STEPS  # steps measured before a release; the first ones of a run are slower
        self._before: tuple[int, float] | None = None  # samplers and seconds of a step before the last release

    def plan(
        self, now_s: float, present: Collection[str], steps: int, load: StepLoad | None, victims: Sequence[str]
    ) -> SamplerPlan | None:
        """The plan that is due now; None: all stays as it is.

        `present`: names of the samplers that have not been asked to leave. `steps` have been trained. `victims`: their
        names, the first to be released first.
        """
        steady_s = self._follow(now_s, frozenset(present), steps)
        count = len(self._known)
        if self.needed - count > self.missing and steady_s >= STEADY_S:
            return self._ask(steps, self.needed, f"{count} of {self.needed} samplers are left")
        if load is None or (step_s := self._measured_s(now_s, steps)) is None:
            return None
        before, self._before = self._before, None
        wanted = min(load.needed(self.least), max(self.most, self.least))
        if before is not None and step_s > (1 + WORSE) * before[1]:
            reason = f"a step takes {step_s:.3g} s, and took {before[1]:.3g} s with {before[0]} samplers"
            return self._ask(steps, before[0], reason)
        if wanted > count:
            least_s = load.step_s(wanted)
            if step_s > (1 + WORSE) * least_s and wanted - count > self.missing:
                return self._ask(steps, wanted, f"with {wanted} samplers a step would take {least_s:.3g} s")
        elif wanted < count and not self._asked:
            measured = self._marks[-1][1] - self._marks[0][1]
            return self._release(steps, wanted, step_s, victims) if measured >= self._patience else None
        self.needed = max(self.needed, count) if self._asked else count
        self.missing = self.missing if self._asked else 0
        self._restart(steps)
        return None

    def _follow(self, now_s: float, present: frozenset[str], steps: int) -> float:
        """Take note of the membership; the seconds for which it has been as it is."""
        if present == self._known:
            return now_s - self._changed_s if self._changed_s is not None else 0.0
        arrived, gone = present - self._known, self._known - present
        expected = min(len(arrived), self.missing)
        self.missing -= expected
        if gone or len(arrived) > expected:
            self._asked, self._before = False, None
        if len(present) >= self.needed:
            self.missing = 0
        self._known, self.most, self._changed_s = present, max(self.most, len(present)), now_s
        self._restart(steps)
        return 0.0

    def _restart(self, steps: int) -> None:
        """Measure from now on."""
        self._since_step, self._marks = steps, []

    def _measured_s(self, now_s: float, steps: int) -> float | None:
        """The median seconds of the last `STEPS` steps if the last change has settled before them; None until then."""
        first = self._since_step + self._settling + 1
        if steps >= first and (not self._marks or steps > self._marks[-1][1]):
            self._marks.append((now_s, steps))
        if len(self._marks) < 2 or self._marks[-1][1] - self._marks[0][1] < STEPS:
            return None
        last = itertools.pairwise(self._marks[-STEPS - 1 :])
        return statistics.median((t - s) / (m - n) for (s, n), (t, m) in last)

    def _ask(self, steps: int, needed: int, reason: str) -> SamplerPlan:
        self.needed, self._asked, self._patience = needed, True, min(2 * self._patience, MOST_STEPS)
        missing, self.missing = self.missing, max(0, needed - len(self._known))
        self._restart(steps)
        return SamplerPlan(needed, (), self.missing - missing, reason)

    def _release(self, steps: int, wanted: int, step_s: float, victims: Sequence[str]) -> SamplerPlan:
        count = len(self._known)
        leave = tuple(name for name in victims if name in self._known)[: count - wanted]
        self.needed, self.missing, self._before = wanted, 0, (count, step_s)
        self._known -= set(leave)
        self._restart(steps)
        return SamplerPlan(wanted, leave, 0, f"{wanted} of {count} samplers keep a step at {step_s:.3g} s")


# --- seconds for which the learner's devices sample (partial overlap: RLBoost's T_seed, arXiv 2510.19225)
#
# At the start of a step they sample, too; after T seconds their unfinished rollouts go on elsewhere, and they train on
# what is finished. Where they would wait for rollouts longer than samplers wait for the step's end, T grows by a third
# of the difference, otherwise it shrinks. The best T depends on the number of samplers, so it is kept for each number.

FIRST_S, LEAST_S = 150.0, 5.0  # RLBoost's
LEAVE_S, POLL_S = 10.0, 0.1  # for samplers to leave after T; between two looks of the learner meanwhile
LEAST_SHARE = 0.05  # of a step, where that is less than `LEAST_S`: steps may be short here
SHARE, NEWEST = 1 / 3, 0.2  # of the difference; weight of a T that is added to the one kept for a number of samplers


class SeedingTime:
    """The seconds T of the next step. Pure: the caller passes measurements of each step."""

    def __init__(self, first_s: float = FIRST_S, least_s: float = LEAST_S) -> None:
        self.seconds, self._least_s = first_s, least_s
        self._kept: dict[int, float] = {}  # T by number of samplers
        self._samplers: int | None = None
        self._best: tuple[float, float] | None = None  # most samples per second with this number, and its T

    def begin(self, samplers: int) -> float:
        """The T of a step that begins with so many samplers; the one kept for this number, if it has changed."""
        if self._samplers is not None and samplers != self._samplers:
            if self._best is not None:
                kept = self._kept.get(self._samplers, self._best[1])
                self._kept[self._samplers] = (1 - NEWEST) * kept + NEWEST * self._best[1]
            self.seconds, self._best = self._kept.get(samplers, self.seconds), None
        self._samplers = samplers
        return self.seconds

    def end(self, generated_s: float, step_s: float, waited_s: float, samples: int) -> None:
        """Note a step: seconds from its start to its last rollout, and to its end; those for which the learner waited
        after it had sampled. A T beyond `generated_s` has the effect of that time, so it is cut there first."""
        rate = samples / max(step_s, 1e-9)
        if self._best is None or rate > self._best[0]:
            self._best = (rate, min(self.seconds, generated_s))
        samplers_wait_s = max(0.0, step_s - generated_s)
        changed = min(self.seconds, generated_s) + SHARE * (waited_s - samplers_wait_s)
        self.seconds = max(min(self._least_s, LEAST_SHARE * step_s), changed)


class Seeding:
    """When samplers work on the learner's devices: for T seconds from the weights of a step on, or until its claim.

    Clock and lock are the caller's, whose threads may all call. `on_claim` are called after each claim.
    """

    def __init__(self, names: Collection[str], now_s: Callable[[], float], lock: AbstractContextManager) -> None:
        self.names, self.on_claim = frozenset(names), list[Callable[[], object]]()
        self._now_s, self._time, self._lock = now_s, SeedingTime(), lock
        self._step, self._asked, self._claimed = -1, -1, -1
        self._begun_s = self._end_s = self._left_s = self._asked_s = self._claimed_s = self._waited_s = 0.0
        self._working, self._samples = set[str](), 0

    def begin(self, name: str, step: int, samplers: int) -> float:
        """Note that one of them has the weights of `step` while `samplers` others are there; the seconds that it has.

        The first one begins the time of all.
        """
        with self._lock:
            now_s = self._now_s()
            if step > self._step:
                if self._step == self._claimed >= 0 and self._claimed_s >= self._begun_s:
                    times = self._claimed_s - self._begun_s, now_s - self._begun_s
                    self._time.end(*times, self._waited_s, self._samples)
                self._step, self._begun_s, self._working = step, now_s, set()
                seconds = self._time.begin(samplers) if step > self._claimed else 0.0
                self._end_s = self._left_s = now_s + seconds
            if step <= max(self._claimed, self._step - 1):
                return 0.0
            self._working.add(name)
            return max(0.0, self._end_s - now_s)

    def left(self, name: str) -> None:
        """Note that one of them has stopped."""
        with self._lock:
            self._left_s = self._now_s() if name in self._working else self._left_s
            self._working.discard(name)

    def learner_waits_s(self, step: int) -> float:
        """Seconds for which the learner, which waits for the claim of `step`, leaves its devices to them.

        They are over when all have stopped, or `LEAVE_S` after T. While none has the weights it waits for T at most.
        """
        with self._lock:
            now_s = self._now_s()
            if step > self._step:
                self._asked_s, self._asked = (self._asked_s if step == self._asked else now_s), step
                return max(0.0, self._asked_s + self._time.seconds - now_s)
            if step < self._step or step <= self._claimed or not self._working:
                return 0.0
            left_s = self._end_s - now_s
            return left_s if left_s > 0 else max(0.0, min(POLL_S, left_s + LEAVE_S))

    def is_claimed(self, step: int) -> bool:
        """True if the learner has the batch of `step`."""
        return step <= self._claimed

    def claimed(self, step: int, samples: int, computed_s: float) -> None:
        """Note the claim of `step`, of which the learner has computed `computed_s` since they left the devices."""
        with self._lock:
            self._claimed, self._claimed_s, self._samples = step, self._now_s(), samples
            idle_s = self._claimed_s - self._left_s - computed_s
            self._waited_s = max(0.0, idle_s) if step == self._step and not self._working else 0.0
            self._end_s = min(self._end_s, self._claimed_s)
        for wake in self.on_claim:
            wake()
