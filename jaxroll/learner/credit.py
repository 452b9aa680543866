"""Advantages of a claim: by the algorithm's own rule, or by the estimator that `learner.advantage` names.

G is the group size, N the number of groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxroll.config import Config, LearnerConfig
from jaxroll.config.algorithms import settled
from jaxroll.errors import DataError
from jaxroll.math import advantage, credit
from jaxroll.math.credit import Advantage, Group

_BLOCKS = {
    "group_std": jax.jit(jax.vmap(functools.partial(advantage.group_centred, divide_by_std=True))),
    "group_mean": jax.jit(jax.vmap(functools.partial(advantage.group_centred, divide_by_std=False))),
    "leave_one_out": jax.jit(jax.vmap(advantage.leave_one_out)),
}

_PER_GROUP: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {  # rewards, who can be trained on
    "positive": lambda rewards, _: credit.positive(rewards),
    "best": credit.best,
    "best_worst": credit.best_worst,
}


def estimator(config: Config) -> credit.Credit:
    """groups → the advantage of every member, by `learner.advantage`."""
    learner: LearnerConfig = settled(config.learner)
    kind = learner.advantage
    shape = (config.schedule.groups_per_step, config.schedule.group_size)
    if kind in _BLOCKS:
        return lambda groups: _listed(group_advantages(_rewards(groups), shape, kind))
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
    kind = settled(config.learner).advantage
    if kind in _BLOCKS:
        shape = (config.schedule.groups_per_step, config.schedule.group_size)
        group_advantages([np.zeros(1, np.float32)], shape, kind)


def group_advantages(rewards: list[np.ndarray], shape: tuple[int, int], kind: str) -> list[np.ndarray]:
    """float32 [Gᵢ] for every group; computed in blocks of `shape` [N, G], so that one program serves every claim."""
    block, _ = shape
    out = []
    for first in range(0, len(rewards), block):
        padded, mask = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for row, group in enumerate(rewards[first : first + block]):
            padded[row, : len(group)], mask[row, : len(group)] = group, 1.0
        result = np.asarray(_BLOCKS[kind](padded, mask))
        out += [result[row, : len(group)] for row, group in enumerate(rewards[first : first + block])]
    return out


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
