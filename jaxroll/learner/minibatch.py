"""Optimizer batches of a claim, with their advantages: a function of the claim and the config alone.

Rewards as earned → shuffled (the control) → shaped (overlong answers, KL to the reference) → advantages → weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxroll.algorithms import advantages as advantage
from jaxroll.algorithms import advantages as credit
from jaxroll.algorithms import registry, tokens
from jaxroll.algorithms.advantages import Advantage, Group, overlong_penalty
from jaxroll.algorithms.registry import Algorithm
from jaxroll.config import Config, LearnerConfig
from jaxroll.config.presets import preset, settled
from jaxroll.config.rules import sample_tokens
from jaxroll.errors import DataError
from jaxroll.learner.samples import Sample, of_claim
from jaxroll.records import Claim

Groups = list[list[Sample]]
Numbers = Callable[[Sequence[Sample]], list[np.ndarray]]  # of each sample a number for every token, float [T]


@dataclass(frozen=True)
class Prepared:
    """`groups` as they came, rewards untouched; `minibatches` the weighted samples of each optimizer step, in order."""

    groups: Groups
    minibatches: list[list[Sample]]


def prepare(
    claim: Claim,
    config: Config,
    *,
    algorithm: Algorithm | None = None,
    costs: Numbers | None = None,
    values: Numbers | None = None,
) -> Prepared:
    """Samples of `claim` with advantages and weights, divided into `learner.minibatches` optimizer steps.

    The denominators of a step are counted over all its samples, before any micro-batch is made. `costs` prices tokens
    before advantages are taken: a KL penalty in the reward. `values` is what the critic says, in a run that has one.
    `algorithm` is the config's, built here if it is not given.
    """
    learner: LearnerConfig = settled(config.learner)
    groups = of_claim(claim)
    algorithm = algorithm or registry.build(config.learner)
    check_sizes(groups, config.schedule.group_size)
    shaped = _shaped(shuffled(groups, claim, config.run.seed) if learner.shuffle_rewards else groups, config)
    if costs:
        priced = iter(costs([sample for group in shaped for sample in group]))
        shaped = [[sample.charged(next(priced)) for sample in group] for group in shaped]
    if values:
        everyone = [sample for group in shaped for sample in group]
        judged = iter(by_critic(everyone, values(everyone), config))
        credited = [
            [replace(next(judged), reward=sample.reward, turns=sample.turns) for sample in group] for group in groups
        ]
    else:
        advantages = (algorithm.credit or estimator(config))(shaped)
        credited = [
            [replace(sample, advantage=a) for sample, a in zip(group, of_group, strict=True)]
            for group, of_group in zip(groups, advantages, strict=True)
        ]
    parts = divided(credited, learner.minibatches, claim.shuffle_seed)
    length = config.sampling.max_tokens
    return Prepared(groups, [weighted(part, learner.aggregation, algorithm, length) for part in parts])


def shuffled(groups: Groups, claim: Claim, seed: int) -> Groups:
    """`groups` with rewards permuted inside each, the same way whenever this claim is trained: the control of a run."""
    key, out = (seed, claim.shuffle_seed, claim.step), []
    for claimed, group in zip(claim.groups, groups, strict=True):
        order = np.random.default_rng([abs(int(part)) for part in (*key, claimed.group)]).permutation(len(group))
        out.append([sample.earning(group[other].reward) for sample, other in zip(group, order, strict=True)])
    return out


def divided(groups: Groups, minibatches: int, shuffle_seed: int) -> list[list[Sample]]:
    """`minibatches` lists of samples; groups stay whole and are dealt by the claim's logged seed."""
    if minibatches == 1:
        return [[sample for group in groups for sample in group]]
    order = np.random.default_rng(abs(shuffle_seed)).permutation(len(groups))
    return [[sample for index in part for sample in groups[index]] for part in np.array_split(order, minibatches)]


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
    weights = tokens.sequence_weights(counts, aggregation, length)
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


# --- advantages of a claim: the algorithm's own rule, or the estimator that `learner.advantage` names
#
# G is the group size, N the number of groups.

_GAE = jax.jit(jax.vmap(advantage.gae, in_axes=(0, 0, 0, None, None)))

_PER_GROUP: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {  # rewards, who can be trained on
    "group_std": lambda rewards, _: credit.standardised(rewards),
    "group_mean": lambda rewards, _: credit.standardised(rewards, divide_by_std=False),
    "leave_one_out": lambda rewards, _: credit.leave_one_out(rewards),
    "positive": lambda rewards, _: credit.positive(rewards),
    "best": credit.best,
    "best_worst": credit.best_worst,
}


def estimator(config: Config) -> credit.Credit:
    """groups → the advantage of every member, by `learner.advantage`; with a critic see `by_critic`."""
    learner: LearnerConfig = settled(config.learner)
    kind = learner.advantage
    if kind in ("batch_std", "group_mean_batch_std"):
        baseline = kind == "group_mean_batch_std"
        return lambda groups: _listed(credit.batch_standardised(_rewards(groups), group_baseline=baseline))
    if kind == "segment_return":
        return lambda groups: [credit.segment_return(group, learner.turn_discount) for group in groups]
    if kind == "gigpo":
        return lambda groups: [credit.gigpo(group, learner.turn_discount, learner.step_weight) for group in groups]
    of_group = _PER_GROUP[kind]
    return lambda groups: _listed([of_group(_of(group), _trainable(group)) for group in groups])


def warmup(config: Config) -> None:
    """Compile the estimator, if it is a program."""
    if settled(config.learner).advantage == "gae":
        _gae(config, np.zeros((3, *_gae_shape(config)), np.float32))


def by_critic(samples: Sequence[Sample], values: Sequence[np.ndarray], config: Config) -> list[Sample]:
    """`samples` with the advantages that `values` (of each the critic's V [T]) make, with V and its targets A + V.

    A is GAE over the trained tokens of an episode, one after the other whoever speaks between them: what an environment
    or another speaker says is no action and has no step in the chain, and neither has a token that was drawn and is not
    trained on. Costs (a KL in the reward, an answer too long) are paid at their tokens; the reward of the whole episode
    is earned at the last trained token, whatever turns may have earned. Without `learner.raw_advantages` they, not the
    targets, are then standardised over all trained tokens of `samples`.
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
    """float64 [T]: what is earned at every token; the sum is `sample.reward`, 0 where nothing is trained."""
    earned = np.where(sample.mask, -np.asarray(sample.costs), 0.0)
    earned[np.flatnonzero(sample.mask)[-1:]] += sample.reward - earned.sum()
    return earned


def whitened(samples: Sequence[Sample], advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The advantages ([T] of each), standardised over the trained tokens of all samples; 0 elsewhere."""
    each = [a[sample.mask] for sample, a in zip(samples, advantages, strict=True)]
    every = credit.standardised(np.concatenate([np.zeros(0), *each]))
    out, first = [], 0
    for sample in samples:
        spread = np.zeros(len(sample.mask), np.float32)
        spread[sample.mask] = every[first : first + sample.trained_tokens]
        out.append(spread)
        first += sample.trained_tokens
    return out


def _gae_shape(config: Config) -> tuple[int, int]:
    """Samples and tokens of a block: one program serves every claim."""
    return config.schedule.groups_per_step * config.schedule.group_size, sample_tokens(config.learner)


def _gae(config: Config, given: np.ndarray) -> np.ndarray:
    """float32 [N, T] of rewards, values and mask [3, N, T]."""
    learner = config.learner
    return np.asarray(_GAE(*given, np.float32(learner.gae_discount), np.float32(learner.gae_lambda)))


def check_sizes(groups: Sequence[Group], size: int) -> None:
    """DataError for a group larger than the config says."""
    largest = max((len(group) for group in groups), default=0)
    if largest > size:
        raise DataError(f"a claimed group has {largest} members, schedule.group_size is {size}")


def _of(group: Group) -> np.ndarray:
    return np.array([sample.reward for sample in group], np.float32)


def _rewards(groups: Sequence[Group]) -> list[np.ndarray]:
    return [_of(group) for group in groups]


def _trainable(group: Group) -> np.ndarray:
    return np.array([sample.mask.any() for sample in group], bool)


def _listed(advantages: Sequence[np.ndarray]) -> list[list[Advantage]]:
    return [[float(value) for value in of_group] for of_group in advantages]
