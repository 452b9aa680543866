"""Samples of a claim with their advantages and weights, divided into optimizer steps.

Records → samples (flat per-token streams) → rewards as earned → shuffled (in control runs) → shaped (overlong answers,
KL to the reference) → advantages → weights. No other module of the learner reads the records of members.

T is the number of tokens of one member, prompt included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import jax
import numpy as np

from jaxroll.algorithms import advantages as estimators
from jaxroll.algorithms import registry
from jaxroll.algorithms.advantages import Advantage, Group, Turn, overlong_penalty
from jaxroll.algorithms.registry import Algorithm
from jaxroll.config import Config, LearnerConfig
from jaxroll.config.derived import overlong_tokens, reward_shuffle_seed, sample_tokens, settled, support_tokens
from jaxroll.errors import DataError
from jaxroll.protocols import Supports
from jaxroll.records import Claim, Finished, Member, Segment, Version, ages

# --- samples: the records of members as flat per-token streams


@dataclass(frozen=True)
class Sample:
    """One trainable sequence. `weight`, and an `advantage` that is one number, apply to each trained token."""

    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T]: trained on
    behaviour: np.ndarray  # float32 [T]: log-prob under the policy that sampled, 0 where not sampled
    ages: np.ndarray  # int32 [T]: trained step minus sampled step, 0 where not sampled
    sampled_tokens: int  # sampled, including those masked as stale
    fresh: bool  # all tokens were sampled by the version (lineage included) that is being trained
    reward: float
    turns: tuple[Turn, ...] = ()
    advantage: Advantage = 0.0
    weight: float = 0.0
    costs: float | np.ndarray = 0.0  # per token, float [T]; already subtracted from `reward`
    value: np.ndarray | None = None  # float32 [T]: the critic's value at the start of the claim
    target: np.ndarray | None = None  # float32 [T]: the regression target of that value
    supports: Supports | None = None  # of all T tokens, if some of them were truncated when they were sampled
    experts: np.ndarray | None = None  # [E, X]: chosen experts of the first E tokens (`records.Finished`)
    branches: tuple[int, ...] = ()  # the first token of every conversation after the first one (`Segment.branch`)

    @property
    def trained_tokens(self) -> int:
        """Number of tokens that carry loss."""
        return int(self.mask.sum())

    @property
    def credited(self) -> bool:
        """True if some trained token has an advantage other than 0."""
        return bool(np.any(np.where(self.mask, self.advantage, 0.0)))

    def with_reward(self, reward: float) -> Sample:
        """The same sample with `reward` as the reward of its last turn, and 0 for the other turns."""
        last = len(self.turns) - 1
        turns = tuple(turn._replace(reward=reward if k == last else 0.0) for k, turn in enumerate(self.turns))
        return replace(self, reward=reward, turns=turns)

    def with_costs(self, costs: np.ndarray) -> Sample:
        """The same sample with the `costs` (float [T]) of trained tokens subtracted from all its rewards."""
        costs = np.where(self.mask, costs, 0.0)
        turns = tuple(
            turn._replace(reward=turn.reward - float(costs[turn.start : turn.stop].sum())) for turn in self.turns
        )
        return replace(self, reward=self.reward - float(costs.sum()), turns=turns, costs=self.costs + costs)


PerToken = Callable[[Sequence[Sample]], list[np.ndarray]]  # samples → one number per token of each, float [T]


def of_member(member: Member, trained_at: Version) -> Sample:
    """The sample of a finished member whose claim is trained at `trained_at`.

    DataError when the member failed or its record is inconsistent.
    """
    where = f"group {member.group}, member {member.member}"
    outcome = member.outcome
    if not isinstance(outcome, Finished):
        raise DataError(
            f"{where} failed ({outcome.error}) and cannot be trained on; a claim holds finished members only"
        )
    tokens, mask, behaviour = _streams(outcome.segments, where)
    sampled = _sampled_positions(outcome.segments, sum(run.count for run in outcome.versions), where)
    token_ages = np.zeros(len(tokens), np.int32)
    token_ages[sampled] = ages(outcome.versions, trained_at.step)
    return Sample(
        tokens=tokens,
        mask=mask,
        behaviour=np.where(mask, behaviour, np.float32(0)),
        ages=token_ages,
        sampled_tokens=len(sampled),
        fresh=all(run.version == trained_at for run in outcome.versions),
        reward=float(outcome.reward),
        turns=_turns(outcome.segments, sampled, float(outcome.reward), outcome.reward_parts),
        supports=_supports(outcome.segments),
        experts=outcome.experts if outcome.experts.size else None,
        branches=_branches(outcome.segments, mask, where),
    )


def conversations(sample: Sample) -> list[Sample]:
    """`sample` as one sample per conversation that has trained tokens, each with the advantages of its tokens.

    Losses treat them as sequences of their own; the denominators of the weights count members.
    """
    if not sample.branches:
        return [sample]
    bounds = (0, *sample.branches, len(sample.tokens))
    pieces = [_between(sample, start, stop) for start, stop in pairwise(bounds)]
    return [piece for piece in pieces if piece.mask.any()]


def per_conversation(per_token: PerToken) -> PerToken:
    """`per_token` for samples of several conversations: each one is evaluated without the others."""

    def joined(samples: Sequence[Sample]) -> list[np.ndarray]:
        bounds = [(0, *sample.branches, len(sample.tokens)) for sample in samples]
        pieces = [
            _between(sample, start, stop)
            for sample, of in zip(samples, bounds, strict=True)
            for start, stop in pairwise(of)
        ]
        found = iter(per_token(pieces))
        return [np.concatenate([next(found) for _ in of[1:]]) for of in bounds]

    return joined


def _between(sample: Sample, start: int, stop: int) -> Sample:
    """The tokens [start, stop) of `sample`."""
    if (start, stop) == (0, len(sample.tokens)):
        return sample
    cut = lambda values: values[start:stop] if isinstance(values, np.ndarray) and values.ndim else values  # noqa: E731
    turns = tuple(
        turn._replace(start=turn.start - start, stop=turn.stop - start)
        for turn in sample.turns
        if start <= turn.start < stop
    )
    return replace(
        sample,
        tokens=cut(sample.tokens),
        mask=cut(sample.mask),
        behaviour=cut(sample.behaviour),
        ages=cut(sample.ages),
        sampled_tokens=sum(turn.stop - turn.start for turn in turns),
        turns=turns,
        advantage=cut(sample.advantage),
        costs=cut(sample.costs),
        branches=(),
        supports=sample.supports and sample.supports.part(start, stop),
    )


def of_claim(claim: Claim) -> list[list[Sample]]:
    """The samples of every group of `claim`, in the claim's order."""
    trained_at = Version(claim.lineage, claim.step)
    return [[of_member(member, trained_at) for member in group.members] for group in claim.groups]


def _turns(
    segments: tuple[Segment, ...], sampled: np.ndarray, reward: float, parts: Mapping[str, float]
) -> tuple[Turn, ...]:
    """One turn per sampled segment; its state is the bytes of the tokens shown since the previous sampled segment.

    Turn k earns the reward part `turn.k`. If the environment gives no such part, the last turn earns the whole reward.
    """
    is_sampled = np.zeros(sum(len(segment.tokens) for segment in segments), bool)
    is_sampled[sampled] = True
    found: list[tuple[int, int, bytes]] = []
    start, shown = 0, b""
    for segment in segments:
        stop = start + len(segment.tokens)
        if is_sampled[start:stop].any():
            found.append((start, stop, shown))
            shown = b""
        else:
            shown += segment.tokens.astype(np.int32).tobytes()
        start = stop
    names = [f"turn.{k}" for k in range(len(found))]
    earned = [parts.get(name, 0.0) for name in names]
    if found and not any(name in parts for name in names):
        earned[-1] = reward
    return tuple(Turn(*place, float(r)) for place, r in zip(found, earned, strict=True))


def _streams(segments: tuple[Segment, ...], where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, mask and behavior log-probs of all segments, concatenated."""
    for segment in segments:
        if not len(segment.tokens) == len(segment.loss_mask) == len(segment.logprobs) == len(segment.sampled_mask):
            raise DataError(f"{where}: a segment's tokens, loss_mask, logprobs and sampled marks differ in length")
    if not segments:
        raise DataError(f"{where} has no segments")
    tokens = np.concatenate([segment.tokens for segment in segments]).astype(np.int32)
    mask = np.concatenate([segment.loss_mask for segment in segments]).astype(bool)
    behaviour = np.concatenate([segment.logprobs for segment in segments]).astype(np.float32)
    if len(tokens) == 0 or mask[0]:
        raise DataError(f"{where} starts with a sampled token; a prompt must precede it, since its log-prob needs one")
    if not np.isfinite(behaviour[mask]).all():
        raise DataError(f"{where} has a sampled token whose behavior log-prob is not finite")
    return tokens, mask, behaviour


def _branches(segments: tuple[Segment, ...], mask: np.ndarray, where: str) -> tuple[int, ...]:
    """The first token of every conversation after the first one. DataError if it is a sampled one."""
    starts = np.cumsum([0, *(len(segment.tokens) for segment in segments)]).tolist()
    found = tuple(start for start, segment in zip(starts, segments, strict=False) if start and segment.branch)
    if any(start < len(mask) and mask[start] for start in found):
        raise DataError(f"{where} has a conversation that starts with a sampled token; a prompt must precede it")
    return found


def _supports(segments: tuple[Segment, ...]) -> Supports | None:
    """The supports of all tokens; None if none was truncated. DataError if a serialized one is malformed."""
    if not any(segment.support.size for segment in segments):
        return None
    each = []
    for segment in segments:
        sampled = segment.sampled_mask
        found = Supports.decoded(segment.support, segment.tokens[sampled])
        sizes = np.zeros(len(sampled), np.int64)
        sizes[sampled] = found.sizes
        each.append(Supports(sizes, found.ids))
    return Supports.joined(each)


def _sampled_positions(segments: tuple[Segment, ...], count: int, where: str) -> np.ndarray:
    """int [count]: the positions of the sampled tokens, including those masked as stale."""
    sampled = np.concatenate([segment.sampled_mask for segment in segments])
    if sampled.sum() != count:
        raise DataError(f"{where}: versions cover {count} tokens, its segments hold {int(sampled.sum())} sampled ones")
    return np.flatnonzero(sampled)


# --- optimizer steps

Groups = list[list[Sample]]


@dataclass(frozen=True)
class Prepared:
    """`groups` as claimed, with unshaped rewards; `minibatches`: the weighted samples of each optimizer step.

    With `learner.streaming`, weights lack the step's denominator; `counted` is the part of these samples in it.
    """

    groups: Groups
    minibatches: list[list[Sample]]
    counted: float = 0.0


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
        credit = algorithm.credit or (None if learner.advantage == "gae" else estimators.estimator(learner))
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
    count, counted = (1.0, _counted(parts[0], learner.aggregation, algorithm)) if learner.streaming else (None, 0.0)
    with_weights = [weighted(part, learner.aggregation, algorithm, length, count) for part in parts]
    pieces = [[each for sample in part for each in conversations(sample)] for part in with_weights]
    return Prepared(groups, pieces, counted)


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


def weighted(
    samples: list[Sample], aggregation: str, algorithm: Algorithm, length: int = 1, count: float | None = None
) -> list[Sample]:
    """The samples that contribute a gradient, with the per-token weight of `aggregation`.

    If the loss is a multiple of the advantage, a sample with advantage 0 has no gradient and is not computed. It still
    counts in the denominators, unless the algorithm counts only samples with an advantage. So a group whose members
    all earned the same reward costs no computation. With a KL penalty in the loss, or with a critic, every sample is
    computed and counts in those denominators; `_rescaled` then corrects the denominators of the policy loss.
    `count` takes the place of the step's denominator.
    """
    samples = [sample for sample in samples if sample.mask.any()]
    credited = [sample for sample in samples if sample.credited]
    skips = algorithm.multiple_of_advantage
    needs_all = algorithm.penalised or any(sample.target is not None for sample in samples)
    if algorithm.credited_only and not (needs_all and skips):
        return _with_weights(credited, aggregation, length, count)
    with_weights = _with_weights(samples, aggregation, length, count)
    if algorithm.credited_only:
        return _rescaled(with_weights, _with_weights(credited, aggregation, length, count))
    return [sample for sample in with_weights if sample.credited or not skips or needs_all]


def _counted(samples: Sequence[Sample], aggregation: str, algorithm: Algorithm) -> float:
    """The part of `samples` in a step's denominator; 0 if they have no token that counts."""
    counts = [sample.trained_tokens for sample in samples if sample.credited or not algorithm.credited_only]
    return estimators.denominator(np.array(counts), aggregation) if any(counts) else 0.0


def _with_weights(samples: list[Sample], aggregation: str, length: int, count: float | None) -> list[Sample]:
    """`samples` with weights whose denominators count exactly these samples, unless there is a `count`."""
    counts = np.array([sample.trained_tokens for sample in samples])
    weights = estimators.sequence_weights(counts, aggregation, length, count)
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
    standardized over all trained tokens of `samples`.
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
    """The advantages ([T] of each sample), standardized over the trained tokens of all samples; 0 elsewhere."""
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
