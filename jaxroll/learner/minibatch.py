"""From a claim's groups to what each optimizer step trains on: a function of the claim and the config alone.

G is the group size, N the number of groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxroll.config import Config
from jaxroll.errors import DataError
from jaxroll.learner.samples import Sample, of_claim
from jaxroll.math import advantage, aggregate
from jaxroll.records import Claim

_centred = jax.jit(jax.vmap(advantage.group_centred, in_axes=(0, 0, None)), static_argnums=2)


@dataclass(frozen=True)
class Prepared:
    """`groups` as they came, rewards untouched; `substeps` the weighted samples of each optimizer step, in order."""

    groups: list[list[Sample]]
    substeps: list[list[Sample]]


def prepare(claim: Claim, config: Config) -> Prepared:
    """Samples of `claim` with advantages and weights, divided into `learner.substeps` optimizer steps.

    The denominators of a step are counted over all its samples, before any micro-batch is made.
    """
    learner, groups = config.learner, of_claim(claim)
    rewards = [np.array([sample.reward for sample in group], np.float32) for group in groups]
    if learner.shuffle_rewards:
        rewards = shuffled(rewards, claim, config.run.seed)
    shape = (config.schedule.groups_per_step, config.schedule.group_size)
    advantages = group_advantages(rewards, shape, learner.advantage == "group_std")
    credited = [
        [replace(sample, advantage=float(a)) for sample, a in zip(group, of_group, strict=True)]
        for group, of_group in zip(groups, advantages, strict=True)
    ]
    parts = divided(credited, learner.substeps, claim.shuffle_seed)
    return Prepared(groups, [weighted(part, learner.aggregation) for part in parts])


def group_advantages(rewards: list[np.ndarray], shape: tuple[int, int], divide_by_std: bool) -> list[np.ndarray]:
    """float32 [Gᵢ] for every group; computed in blocks of `shape` [N, G], so that one program serves every claim."""
    block, size = shape
    largest = max((len(group) for group in rewards), default=0)
    if largest > size:
        raise DataError(f"a claimed group has {largest} members, schedule.group_size is {size}")
    out = []
    for first in range(0, len(rewards), block):
        padded, mask = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for row, group in enumerate(rewards[first : first + block]):
            padded[row, : len(group)], mask[row, : len(group)] = group, 1.0
        result = np.asarray(_centred(padded, mask, divide_by_std))
        out += [result[row, : len(group)] for row, group in enumerate(rewards[first : first + block])]
    return out


def shuffled(rewards: list[np.ndarray], claim: Claim, seed: int) -> list[np.ndarray]:
    """`rewards` permuted inside each group, the same way whenever this claim is trained: the control of a run."""
    key = (seed, claim.shuffle_seed, claim.step)
    return [
        np.random.default_rng([abs(int(part)) for part in (*key, group.group)]).permutation(of_group)
        for group, of_group in zip(claim.groups, rewards, strict=True)
    ]


def divided(groups: list[list[Sample]], substeps: int, shuffle_seed: int) -> list[list[Sample]]:
    """`substeps` lists of samples; groups stay whole and are dealt by the claim's logged seed."""
    if substeps == 1:
        return [[sample for group in groups for sample in group]]
    order = np.random.default_rng(abs(shuffle_seed)).permutation(len(groups))
    return [[sample for index in part for sample in groups[index]] for part in np.array_split(order, substeps)]


def weighted(samples: list[Sample], aggregation: str) -> list[Sample]:
    """Those of `samples` that move the parameters, with the weight that `aggregation` gives each of their tokens.

    Every loss here is a multiple of the advantage, so a sample whose advantage is 0 has no gradient: it counts in the
    denominators, like any other, and is not computed. Groups whose members all did equally well cost nothing.
    """
    samples = [sample for sample in samples if sample.mask.any()]
    weights = aggregate.sequence_weights(np.array([sample.trained_tokens for sample in samples]), aggregation)
    credited = zip(samples, weights, strict=True)
    return [replace(sample, weight=float(w)) for sample, w in credited if sample.advantage != 0.0]
