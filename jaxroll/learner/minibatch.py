"""Optimizer batches of a claim, with their advantages, and rows that store each prompt once for all of its answers.

Rewards as earned → shuffled (in control runs) → shaped (overlong answers, KL to the reference) → advantages → weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxroll.algorithms import advantages as estimators
from jaxroll.algorithms import registry
from jaxroll.algorithms.advantages import Advantage, Group, overlong_penalty
from jaxroll.algorithms.registry import Algorithm
from jaxroll.config import Config, LearnerConfig
from jaxroll.config.derived import (
    overlong_tokens,
    reward_shuffle_seed,
    sample_tokens,
    settled,
    support_tokens,
)
from jaxroll.errors import ConfigError, DataError
from jaxroll.kernels.attention import SharedRows
from jaxroll.learner.packing import (
    PROMPT_IDS,
    MicroBatch,
    Placement,
    empty_streams,
    sharded,
    split_rows,
    work,
    write,
)
from jaxroll.learner.samples import PerToken, Sample, conversations, of_claim, per_conversation
from jaxroll.records import Claim

Groups = list[list[Sample]]


@dataclass(frozen=True)
class Prepared:
    """`groups` as claimed, with unshaped rewards; `minibatches`: the weighted samples of each optimizer step."""

    groups: Groups
    minibatches: list[list[Sample]]


@dataclass(frozen=True)
class Settings:
    """Values that every claim of a run needs, derived from its config once."""

    learner: LearnerConfig  # with the algorithm's values in place of "auto" and 0
    algorithm: Algorithm
    credit: estimators.Credit | None  # groups → advantages; None if a critic gives them
    overlong_tokens: int  # below `sampling.max_tokens`, at which the penalty of long answers begins; 0: no penalty
    support_tokens: int
    shuffle_seed: int | None  # of rewards exchanged between members; None: they are not

    @classmethod
    def of(cls, config: Config) -> Settings:
        """The settings of this config."""
        learner: LearnerConfig = settled(config.learner)
        algorithm = registry.build(config.learner)
        credit = algorithm.credit or (None if learner.advantage == "gae" else estimator(learner))
        return cls(
            learner,
            algorithm,
            credit,
            overlong_tokens(config),
            support_tokens(config.sampling),
            reward_shuffle_seed(config),
        )


def prepare(
    claim: Claim,
    config: Config,
    *,
    settings: Settings | None = None,
    costs: PerToken | None = None,
    values: PerToken | None = None,
) -> Prepared:
    """Samples of `claim` with advantages and weights, divided into `learner.minibatches` optimizer steps.

    The denominators of a step are counted over all its samples, before they are split into micro-batches.
    `costs` returns per-token costs (a KL penalty in the reward), which are subtracted before advantages are computed.
    Members of several conversations are divided into them at the end: they share the member's advantage and weight.
    `values` returns the critic's values, in a run that has a critic. `settings` are the config's, derived here if None.
    """
    settings = settings or Settings.of(config)
    learner, algorithm, groups = settings.learner, settings.algorithm, of_claim(claim)
    if (values or algorithm.together > 1) and any(sample.branches for group in groups for sample in group):
        raise DataError("members of several conversations have no critic values and no pairs: use another algorithm")
    check_sizes(groups, config.schedule.group_size)
    check_supports(groups, settings.support_tokens)
    length = config.sampling.max_tokens
    shaped = groups if settings.shuffle_seed is None else shuffled(groups, claim, settings.shuffle_seed)
    shaped = _shaped(shaped, length, settings.overlong_tokens)
    if costs:
        priced = iter(per_conversation(costs)([sample for group in shaped for sample in group]))
        shaped = [[sample.with_costs(next(priced)) for sample in group] for group in shaped]
    if values:
        samples = [sample for group in shaped for sample in group]
        valued = iter(critic_advantages(samples, values(samples), config))
        credited = [
            [replace(next(valued), reward=sample.reward, turns=sample.turns) for sample in group] for group in groups
        ]
    else:
        assert settings.credit is not None  # a run without one has a critic, whose values are given
        advantages = settings.credit(shaped)
        credited = [
            [replace(sample, advantage=a) for sample, a in zip(group, of_group, strict=True)]
            for group, of_group in zip(groups, advantages, strict=True)
        ]
    parts = divided(credited, learner.minibatches, claim.shuffle_seed)
    with_weights = [weighted(part, learner.aggregation, algorithm, length) for part in parts]
    return Prepared(groups, [[each for sample in part for each in conversations(sample)] for part in with_weights])


def shuffled(groups: Groups, claim: Claim, seed: int) -> Groups:
    """`groups` with the rewards permuted inside each group, for control runs; the same claim is permuted alike."""
    key, out = (seed, claim.shuffle_seed, claim.step), []
    for claimed, group in zip(claim.groups, groups, strict=True):
        order = np.random.default_rng([abs(int(part)) for part in (*key, claimed.group)]).permutation(len(group))
        out.append([sample.with_reward(group[other].reward) for sample, other in zip(group, order, strict=True)])
    return out


def divided(groups: Groups, minibatches: int, shuffle_seed: int) -> list[list[Sample]]:
    """`minibatches` lists of samples; groups stay whole and are assigned at random by the claim's logged seed."""
    if minibatches == 1:
        return [[sample for group in groups for sample in group]]
    order = np.random.default_rng(abs(shuffle_seed)).permutation(len(groups))
    return [[sample for index in part for sample in groups[index]] for part in np.array_split(order, minibatches)]


def weighted(samples: list[Sample], aggregation: str, algorithm: Algorithm, length: int = 1) -> list[Sample]:
    """The samples that contribute a gradient, with the per-token weight of `aggregation`.

    If the loss is a multiple of the advantage, a sample with advantage 0 has no gradient and is not computed. It still
    counts in the denominators, unless the algorithm counts only samples with an advantage. So a group whose members
    all earned the same reward costs no computation. With a KL penalty in the loss, or with a critic, every sample is
    computed and counts in those denominators; `_rescaled` then corrects the denominators of the policy loss.
    """
    samples = [sample for sample in samples if sample.mask.any()]
    credited = [sample for sample in samples if sample.credited]
    skips = algorithm.multiple_of_advantage
    needs_all = algorithm.penalised or any(sample.target is not None for sample in samples)
    if algorithm.credited_only and not (needs_all and skips):
        return _with_weights(credited, aggregation, length)
    with_weights = _with_weights(samples, aggregation, length)
    if algorithm.credited_only:
        return _rescaled(with_weights, _with_weights(credited, aggregation, length))
    return [sample for sample in with_weights if sample.credited or not skips or needs_all]


def _with_weights(samples: list[Sample], aggregation: str, length: int) -> list[Sample]:
    """`samples` with weights whose denominators count exactly these samples."""
    counts = np.array([sample.trained_tokens for sample in samples])
    weights = estimators.sequence_weights(counts, aggregation, length)
    return [replace(sample, weight=float(w)) for sample, w in zip(samples, weights, strict=True)]


def _rescaled(samples: list[Sample], credited: list[Sample]) -> list[Sample]:
    """`samples` with advantages scaled so that weight · advantage is the same as among the `credited` alone."""
    # A token has one weight, which also applies to a penalty averaged over all samples. The policy loss is a multiple
    # of the advantage, so the ratio of the two denominators can go into the advantage.
    weights = iter(sample.weight for sample in credited)
    return [
        replace(sample, advantage=sample.advantage * (next(weights) / sample.weight)) if sample.credited else sample
        for sample in samples
    ]


def _shaped(groups: Groups, limit: int, last: int) -> Groups:
    """`groups` with the penalty for answers in the `last` tokens before `limit`; 0: no penalty."""
    if not last:
        return groups

    def shaped(sample: Sample) -> Sample:
        cost = np.zeros(len(sample.mask))
        longest = max((turn.stop - turn.start for turn in sample.turns), default=0)
        cost[np.flatnonzero(sample.mask)[-1:]] = -overlong_penalty(longest, limit, last)
        return sample.with_costs(cost)

    return [[shaped(sample) for sample in group] for group in groups]


# --- advantages of a claim: the algorithm's rule, or the estimator that `learner.advantage` names
#
# G is the group size, N the number of groups.

_GAE = jax.jit(jax.vmap(estimators.gae, in_axes=(0, 0, 0, None, None)))

_PER_GROUP: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {  # (rewards, trainable) → advantages
    "group_std": lambda rewards, _: estimators.standardised(rewards),
    "group_mean": lambda rewards, _: estimators.standardised(rewards, divide_by_std=False),
    "leave_one_out": lambda rewards, _: estimators.leave_one_out(rewards),
    "positive": lambda rewards, _: estimators.positive(rewards),
    "best": estimators.best,
    "best_worst": estimators.best_worst,
}


def estimator(learner: LearnerConfig) -> estimators.Credit:
    """groups → the advantage of every member, by the settled `learner.advantage`; see `critic_advantages` for GAE."""
    kind = learner.advantage
    if kind in ("batch_std", "group_mean_batch_std"):
        baseline = kind == "group_mean_batch_std"
        return lambda groups: _listed(estimators.batch_standardised(_rewards(groups), group_baseline=baseline))
    if kind == "segment_return":
        return lambda groups: [estimators.segment_return(group, learner.turn_discount) for group in groups]
    if kind == "gigpo":
        return lambda groups: [estimators.gigpo(group, learner.turn_discount, learner.step_weight) for group in groups]
    of_group = _PER_GROUP[kind]
    return lambda groups: _listed([of_group(_of(group), _trainable(group)) for group in groups])


def warmup(config: Config) -> None:
    """Compile the estimator, if it is a program."""
    if settled(config.learner).advantage == "gae":
        _gae(config, np.zeros((3, *_gae_shape(config)), np.float32))


def critic_advantages(samples: Sequence[Sample], values: Sequence[np.ndarray], config: Config) -> list[Sample]:
    """`samples` with advantages A from the critic's `values` (V [T] of each sample), with V and its targets A + V.

    A is GAE over the trained tokens of an episode. Tokens of the environment, and sampled tokens that are not trained
    on, are not steps of the chain: the next step is the next trained token. Costs (a KL penalty in the reward, an
    overlong answer) count at their tokens; the whole episode's reward counts at the last trained token, regardless of
    the rewards of single turns. Without `learner.raw_advantages` the advantages (not the targets) are then
    standardised over all trained tokens of `samples`.
    """
    block, tokens = _gae_shape(config)
    advantages: list[np.ndarray] = []
    for first in range(0, len(samples), block):
        part = samples[first : first + block]
        given = np.zeros((3, block, tokens), np.float32)  # rewards, values, mask
        for row, (sample, value) in enumerate(zip(part, values[first : first + block], strict=True)):
            given[:, row, : len(sample.mask)] = token_rewards(sample), np.where(sample.mask, value, 0.0), sample.mask
        found = _gae(config, given)
        advantages += [found[row, : len(sample.mask)] for row, sample in enumerate(part)]
    targets = [a + np.where(s.mask, v, np.float32(0)) for s, a, v in zip(samples, advantages, values, strict=True)]
    if not config.learner.raw_advantages:
        advantages = whitened(samples, advantages)
    found = zip(samples, advantages, values, targets, strict=True)
    return [replace(sample, advantage=a, value=v, target=t) for sample, a, v, t in found]


def token_rewards(sample: Sample) -> np.ndarray:
    """float64 [T]: the reward at every token; the sum is `sample.reward`, or 0 if no token is trained."""
    earned = np.where(sample.mask, -np.asarray(sample.costs), 0.0)
    earned[np.flatnonzero(sample.mask)[-1:]] += sample.reward - earned.sum()
    return earned


def whitened(samples: Sequence[Sample], advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The advantages ([T] of each sample), standardised over the trained tokens of all samples; 0 elsewhere."""
    each = [a[sample.mask] for sample, a in zip(samples, advantages, strict=True)]
    every = estimators.standardised(np.concatenate([np.zeros(0), *each]))
    out, first = [], 0
    for sample in samples:
        spread = np.zeros(len(sample.mask), np.float32)
        spread[sample.mask] = every[first : first + sample.trained_tokens]
        out.append(spread)
        first += sample.trained_tokens
    return out


def _gae_shape(config: Config) -> tuple[int, int]:
    """The numbers of samples and tokens of a block; with a fixed shape, one program serves every claim."""
    return config.schedule.groups_per_step * config.schedule.group_size, sample_tokens(config.learner)


def _gae(config: Config, given: np.ndarray) -> np.ndarray:
    """Advantages, float32 [N, T], from rewards, values and mask [3, N, T]."""
    learner = config.learner
    return np.asarray(_GAE(*given, np.float32(learner.gae_discount), np.float32(learner.gae_lambda)))


def check_sizes(groups: Sequence[Group], size: int) -> None:
    """Raise DataError if a group is larger than `schedule.group_size`."""
    largest = max((len(group) for group in groups), default=0)
    if largest > size:
        raise DataError(f"a claimed group has {largest} members, schedule.group_size is {size}")


def check_supports(groups: Groups, most: int) -> None:
    """Raise DataError unless samples were truncated exactly if the run truncates (`most` > 0), to `most` ids or fewer.

    The learner would otherwise compute log-probs of another distribution than the sampler's.
    """
    for sample in (sample for group in groups for sample in group):
        sizes = np.zeros(len(sample.mask), np.int64) if sample.supports is None else sample.supports.sizes
        found = sizes[sample.mask]
        if len(found) and (found.max() > most or (most and not found.min())):
            raise DataError(
                f"a trained token was sampled from {found.min()} to {found.max()} tokens (0: all), but this learner "
                f"expects {f'1 to {most}' if most else 'no truncation'}: sampling.top_k, top_p and min_p differ"
            )


def _of(group: Group) -> np.ndarray:
    return np.array([sample.reward for sample in group], np.float32)


def _rewards(groups: Sequence[Group]) -> list[np.ndarray]:
    return [_of(group) for group in groups]


def _trainable(group: Group) -> np.ndarray:
    return np.array([sample.mask.any() for sample in group], bool)


def _listed(advantages: Sequence[np.ndarray]) -> list[list[Advantage]]:
    return [[float(value) for value in of_group] for of_group in advantages]


# --- Packing of samples into rows that store each prompt once for all of its answers. Pure, like `packing`
#
# Answers share their prompt except its last token. That token is copied, because the hidden state at it predicts an
# answer's first token: so every trained token has its own previous state, and losses and statistics do not depend on
# sharing. If the answers of a prompt do not fit into one row, they go into several rows, each with a copy of the
# prompt.


@dataclass(frozen=True)
class PromptGroup:
    """Samples whose first `shared` tokens are equal and stored once; `shared` is 0 for a sample that shares none.

    `lengths` are the numbers of their other tokens; `cost` is the group's total, in the units of `packing.work`.
    """

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    shared: int
    cost: float

    @classmethod
    def of(cls, members: Iterable[tuple[int, int]], shared: int, quadratic: float) -> PromptGroup:
        """The group of `members`: (sample, number of its own tokens)."""
        samples, lengths = zip(*members, strict=True)
        own = work(lengths, quadratic) + 2 * quadratic * shared * np.asarray(lengths)
        return cls(samples, lengths, shared, float(own.sum() + work([shared], quadratic)[0]))


class _Row:
    """A partly filled row, with its free space."""

    def __init__(self, rows: SharedRows) -> None:
        self.groups: list[PromptGroup] = []
        self.answers: list[list[tuple[int, PromptGroup]]] = [[] for _ in range(rows.stretches)]  # samples by stretch
        self.cost = 0.0
        self._prompts, self._left = rows.prompt_tokens, [rows.tokens] * rows.stretches

    def places(self, group: PromptGroup) -> dict[int, int]:
        """The stretch for each sample of `group` that fits: longest sample first, into the fullest stretch."""
        left, found = list(self._left), {}
        if group.shared > self._prompts:
            return found
        for length, index in sorted(zip(group.lengths, group.samples, strict=True), key=lambda p: (-p[0], p[1])):
            fits = [(room, stretch) for stretch, room in enumerate(left) if room >= length]
            if fits:
                found[index] = stretch = min(fits)[1]
                left[stretch] -= length
        return found

    def put(self, group: PromptGroup) -> bool:
        """Add the whole group; return False and add nothing if it does not fit."""
        if sum(group.lengths) > sum(self._left):
            return False
        places = self.places(group)
        if len(places) < len(group.samples):
            return False
        self.groups.append(group)
        self.cost += group.cost
        self._prompts -= group.shared
        for index, length in zip(group.samples, group.lengths, strict=True):
            self.answers[places[index]].append((index, group))
            self._left[places[index]] -= length
        return True


def prompt_groups(samples: Sequence[Sample], rows: SharedRows, quadratic: float = 0.0) -> list[PromptGroup]:
    """`samples` grouped by equal prompts, in order of first appearance."""
    found: dict[tuple[int, bytes], list[int]] = {}
    for index, sample in enumerate(samples):
        shared = prompt_tokens(sample) - 1
        own = shared <= 0 or shared > rows.prompt_tokens
        key = (-1 - index, b"") if own else (shared, sample.tokens[:shared].tobytes())
        found.setdefault(key, []).append(index)
    return [
        PromptGroup.of([(i, len(samples[i].tokens) - max(shared, 0)) for i in members], max(shared, 0), quadratic)
        for (shared, _), members in found.items()
    ]


def prompt_tokens(sample: Sample) -> int:
    """The number of tokens before the first one that the model sampled."""
    first = int(np.argmax(sample.mask)) if sample.mask.any() else len(sample.tokens)
    return min([first, *(turn.start for turn in sample.turns[:1])])


def pack(
    samples: Sequence[Sample],
    rows: SharedRows,
    buckets: Sequence[int],
    *,
    shards: int = 1,
    quadratic: float = 0.0,
    support: int = 0,
) -> list[MicroBatch]:
    """Micro-batches that contain every answer exactly once, and every prompt in as few rows as its answers allow.

    The arguments are those of `packing.pack`; buckets count rows of `rows.row_tokens`. ConfigError when an answer is
    longer than a row.
    """
    units = prompt_groups(samples, rows, quadratic)
    _check(max((length for unit in units for length in unit.lengths), default=0), rows)
    filled = _first_fit(units, rows, quadratic)
    batches = []
    for count in split_rows(len(filled), buckets):
        part, filled = _balanced(filled[:count], count, rows), filled[count:]
        costs = np.array([row.cost for row in part])
        order = sharded([[at] for at in range(count)], costs, shards)
        batches.append(_filled(samples, [part[at] for (at,) in order], rows, support))
    return batches


def _check(longest: int, rows: SharedRows) -> None:
    if longest > rows.tokens:
        raise ConfigError(
            "learner.row_tokens",
            rows.tokens,
            f"an answer of {longest} tokens does not fit into a row",
            f"Use at least {longest}, or lower sampling.max_tokens; a prompt of more than learner.shared_prompt_tokens "
            f"= {rows.prompt_tokens} tokens is copied for each of its answers.",
        )


def _first_fit(units: Sequence[PromptGroup], rows: SharedRows, quadratic: float) -> list[_Row]:
    """Rows that hold all units.

    The most expensive unit goes first, into the first row with room for all of it, or into a new row. A unit that does
    not fit into one row is split over several.
    """
    filled: list[_Row] = []
    for unit in sorted(units, key=lambda unit: (-unit.cost, unit.samples)):
        left = unit
        while not any(row.put(left) for row in filled):
            filled.append(row := _Row(rows))
            first = row.places(left)
            if len(first) < len(left.samples):
                pairs = list(zip(left.samples, left.lengths, strict=True))
                taken = PromptGroup.of([pair for pair in pairs if pair[0] in first], left.shared, quadratic)
                assert row.put(taken), "an empty row has room for the samples that `places` returned"
                left = PromptGroup.of([pair for pair in pairs if pair[0] not in first], left.shared, quadratic)
    return filled


def _balanced(given: Sequence[_Row], count: int, rows: SharedRows) -> list[_Row]:
    """The groups of `given` in `count` rows of more even cost; `given` itself, padded, if that is not better.

    The most expensive group goes first, into the cheapest row with room for it.
    """
    even = [_Row(rows) for _ in range(count)]
    groups = sorted((unit for row in given for unit in row.groups), key=lambda unit: (-unit.cost, unit.samples))
    fits = all(any(row.put(unit) for row in sorted(even, key=lambda row: row.cost)) for unit in groups)
    if fits and max(row.cost for row in even) < max(row.cost for row in given):
        return even
    return [*given, *(_Row(rows) for _ in range(count - len(given)))]


def _filled(samples: Sequence[Sample], filled: Sequence[_Row], rows: SharedRows, support: int) -> MicroBatch:
    """The micro-batch of `filled`; segments are numbered in order, prompts first."""
    streams = empty_streams(len(filled), rows.row_tokens, support)
    streams[PROMPT_IDS] = np.zeros((len(filled), rows.row_tokens), np.int32)
    answers, prompts = [], []
    for at, row in enumerate(filled):
        start, shared = 0, [unit for unit in row.groups if unit.shared]
        number = {unit.samples: segment for segment, unit in enumerate(shared, start=1)}
        for unit in shared:
            prompts.append(Placement(unit.samples[0], at, start, unit.shared))
            write(streams, prompts[-1], samples[unit.samples[0]], number[unit.samples])
            start += unit.shared
        segment = len(shared)
        for stretch, held in enumerate(row.answers):
            start = rows.prompt_tokens + stretch * rows.tokens
            for index, unit in held:
                segment += 1
                place = Placement(index, at, start, len(samples[index].tokens) - unit.shared, unit.shared)
                write(streams, place, samples[index], segment)
                streams[PROMPT_IDS][at, start : start + place.length] = number.get(unit.samples, 0)
                answers.append(place)
                start += place.length
    return MicroBatch(streams, tuple(answers), tuple(prompts))
