"""Settings and samples for the tests of the critic."""

from __future__ import annotations

import jax
import numpy as np

from jaxroll.algorithms.advantages import Turn
from jaxroll.config import MeshConfig
from jaxroll.learner.minibatch import Sample

CUBE = MeshConfig(data=2, fsdp=2, tensor=2)
PPO = {"algorithm": "ppo", "critic": "init", "critic_learning_rate": 2e-2}


def bits(tree) -> dict[str, bytes]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def sample_of(mask, reward, costs=0.0) -> Sample:
    mask = np.array(mask, bool)
    zeros = np.zeros(len(mask))
    turns = (Turn(1, len(mask), b"", reward),)
    return Sample(
        zeros.astype(np.int32),
        mask,
        zeros.astype(np.float32),
        zeros.astype(np.int32),
        int(mask.sum()),
        True,
        reward,
        turns,
        costs=costs,
    )
