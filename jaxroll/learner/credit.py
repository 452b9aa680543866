"""Advantages of a claim: by the algorithm's own rule, or by the estimator that `learner.advantage` names.

G is the group size, N the number of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import numpy as np

from jaxroll.config import Config, LearnerConfig
from jaxroll.config.algorithms import settled
from jaxroll.config.rules import sample_tokens
from jaxroll.errors import DataError
from jaxroll.learner.samples import Sample
from jaxroll.math import advantage, credit
from jaxroll.math.credit import Advantage, Group

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
        return lambda groups: [credit.segment_return(group, learner.discount) for group in groups]
    if kind == "gigpo":
        return lambda groups: [credit.gigpo(group, learner.discount, learner.step_weight) for group in groups]
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
