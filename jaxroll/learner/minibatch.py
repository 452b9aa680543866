"""From a claim's groups to what each optimizer step trains on: a function of the claim and the config alone.

Rewards as earned → shuffled (the control) → shaped (overlong answers, KL to the reference) → advantages → weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxroll.config import Config, LearnerConfig
from jaxroll.config.algorithms import preset, settled
from jaxroll.learner import credit
from jaxroll.learner.samples import Sample, of_claim
from jaxroll.math import aggregate, algorithms
from jaxroll.math.algorithms import Algorithm
from jaxroll.math.credit import overlong_penalty
from jaxroll.records import Claim

Groups = list[list[Sample]]
Numbers = Callable[[Sequence[Sample]], list[np.ndarray]]  # of each sample a number for every token, float [T]


@dataclass(frozen=True)
class Prepared:
    """`groups` as they came, rewards untouched; `substeps` the weighted samples of each optimizer step, in order."""

    groups: Groups
    substeps: list[list[Sample]]


def prepare(
    claim: Claim,
    config: Config,
    *,
    algorithm: Algorithm | None = None,
    costs: Numbers | None = None,
    values: Numbers | None = None,
) -> Prepared:
    """Samples of `claim` with advantages and weights, divided into `learner.substeps` optimizer steps.

    The denominators of a step are counted over all its samples, before any micro-batch is made. `costs` prices tokens
    before advantages are taken: a KL penalty in the reward. `values` is what the critic says, in a run that has one.
    `algorithm` is the config's, built here if it is not given.
    """
    learner: LearnerConfig = settled(config.learner)
    groups = of_claim(claim)
    algorithm = algorithm or algorithms.build(config.learner)
    credit.check_sizes(groups, config.schedule.group_size)
    shaped = _shaped(shuffled(groups, claim, config.run.seed) if learner.shuffle_rewards else groups, config)
    if costs:
        priced = iter(costs([sample for group in shaped for sample in group]))
        shaped = [[sample.charged(next(priced)) for sample in group] for group in shaped]
    if values:
        everyone = [sample for group in shaped for sample in group]
        judged = iter(credit.by_critic(everyone, values(everyone), config))
        credited = [
            [replace(next(judged), reward=sample.reward, turns=sample.turns) for sample in group] for group in groups
        ]
    else:
        advantages = (algorithm.credit or credit.estimator(config))(shaped)
        credited = [
            [replace(sample, advantage=a) for sample, a in zip(group, of_group, strict=True)]
            for group, of_group in zip(groups, advantages, strict=True)
        ]
    parts = divided(credited, learner.substeps, claim.shuffle_seed)
    length = config.sampling.max_tokens
    return Prepared(groups, [weighted(part, learner.aggregation, algorithm, length) for part in parts])


def shuffled(groups: Groups, claim: Claim, seed: int) -> Groups:
    """`groups` with rewards permuted inside each, the same way whenever this claim is trained: the control of a run."""
    key, out = (seed, claim.shuffle_seed, claim.step), []
    for claimed, group in zip(claim.groups, groups, strict=True):
        order = np.random.default_rng([abs(int(part)) for part in (*key, claimed.group)]).permutation(len(group))
        out.append([sample.earning(group[other].reward) for sample, other in zip(group, order, strict=True)])
    return out


def divided(groups: Groups, substeps: int, shuffle_seed: int) -> list[list[Sample]]:
    """`substeps` lists of samples; groups stay whole and are dealt by the claim's logged seed."""
    if substeps == 1:
        return [[sample for group in groups for sample in group]]
    order = np.random.default_rng(abs(shuffle_seed)).permutation(len(groups))
    return [[sample for index in part for sample in groups[index]] for part in np.array_split(order, substeps)]


def weighted(samples: list[Sample], aggregation: str, algorithm: Algorithm, length: int = 1) -> list[Sample]:
    """Those of `samples` that move the parameters, with the weight that `aggregation` gives each of their tokens.

    Where the loss is a multiple of the advantage, a sample whose advantage is 0 has no gradient: it counts in the
    denominators, like any other (unless they count those with an advantage only), and is not computed. Groups whose
    members all did equally well cost nothing. With a KL penalty in the loss, or a critic that has something to learn
    of it, every sample is computed, and counts in their denominators; see `_raised` for those of the policy.
    """
    samples = [sample for sample in samples if sample.mask.any()]
    credited = [sample for sample in samples if sample.credited]
    skips = algorithm.multiple_of_advantage
    everyone = algorithm.penalised or any(sample.target is not None for sample in samples)
    if algorithm.credited_only and not (everyone and skips):
        return _weighed(credited, aggregation, length)
    weighed = _weighed(samples, aggregation, length)
    if algorithm.credited_only:
        return _raised(weighed, _weighed(credited, aggregation, length))
    return [sample for sample in weighed if sample.credited or not skips or everyone]


def _weighed(samples: list[Sample], aggregation: str, length: int) -> list[Sample]:
    """`samples` with the weights that they have among each other."""
    counts = np.array([sample.trained_tokens for sample in samples])
    weights = aggregate.sequence_weights(counts, aggregation, length)
    return [replace(sample, weight=float(w)) for sample, w in zip(samples, weights, strict=True)]


def _raised(samples: list[Sample], credited: list[Sample]) -> list[Sample]:
    """`samples` with advantages so much larger that weight times advantage is what it is among the `credited` alone.

    A token has one weight, for a penalty that is counted over everyone too. The loss is a multiple of the advantage, so
    its denominators can stand there.
    """
    weights = iter(sample.weight for sample in credited)
    return [
        replace(sample, advantage=sample.advantage * (next(weights) / sample.weight)) if sample.credited else sample
        for sample in samples
    ]


def _shaped(groups: Groups, config: Config) -> Groups:
    """`groups` with the penalty for answers that come near the limit of their length."""
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
        return sample.charged(cost)

    return [[shaped(sample) for sample in group] for group in groups]
