"""Optimizer batches of a claim, with their advantages: a pure function of the claim and the config.

Rewards as earned → shuffled (in control runs) → shaped (overlong answers, KL to the reference) → advantages → weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxroll.algorithms import advantages as estimators
from jaxroll.algorithms import registry
from jaxroll.algorithms.advantages import Advantage, Group, overlong_penalty
from jaxroll.algorithms.registry import Algorithm
from jaxroll.config import Config, LearnerConfig
from jaxroll.config.derived import preset, sample_tokens, settled, support_tokens
from jaxroll.errors import DataError
from jaxroll.learner.samples import PerToken, Sample, conversations, of_claim, per_conversation
from jaxroll.records import Claim

Groups = list[list[Sample]]


@dataclass(frozen=True)
class Prepared:
    """`groups` as claimed, with unshaped rewards; `minibatches`: the weighted samples of each optimizer step."""

    groups: Groups
    minibatches: list[list[Sample]]


def prepare(
    claim: Claim,
    config: Config,
    *,
    algorithm: Algorithm | None = None,
    costs: PerToken | None = None,
    values: PerToken | None = None,
) -> Prepared:
    """Samples of `claim` with advantages and weights, divided into `learner.minibatches` optimizer steps.

    The denominators of a step are counted over all its samples, before they are split into micro-batches.
    `costs` returns per-token costs (a KL penalty in the reward), which are subtracted before advantages are computed.
    Members of several conversations are divided into them at the end: they share the member's advantage and weight.
    `values` returns the critic's values, in a run that has a critic. `algorithm` is the config's, built here if None.
    """
    learner: LearnerConfig = settled(config.learner)
    groups = of_claim(claim)
    algorithm = algorithm or registry.build(config.learner)
    if (values or algorithm.together > 1) and any(sample.branches for group in groups for sample in group):
        raise DataError("members of several conversations have no critic values and no pairs: use another algorithm")
    check_sizes(groups, config.schedule.group_size)
    check_supports(groups, support_tokens(config.sampling))
    shaped = _shaped(shuffled(groups, claim, config.run.seed) if learner.shuffle_rewards else groups, config)
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
        advantages = (algorithm.credit or estimator(config))(shaped)
        credited = [
            [replace(sample, advantage=a) for sample, a in zip(group, of_group, strict=True)]
            for group, of_group in zip(groups, advantages, strict=True)
        ]
    parts = divided(credited, learner.minibatches, claim.shuffle_seed)
    length = config.sampling.max_tokens
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


def _shaped(groups: Groups, config: Config) -> Groups:
    """`groups` with the penalty for answers close to the token limit."""
    limit = config.sampling.max_tokens
    last = config.learner.overlong_tokens
    if not last and preset(config.learner.algorithm).overlong:
        last = max(limit // 5, 1)
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


def estimator(config: Config) -> estimators.Credit:
    """groups → the advantage of every member, by `learner.advantage`; with a critic see `critic_advantages`."""
    learner: LearnerConfig = settled(config.learner)
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
