"""An environment that writes much to its process's standard error and standard output."""

from __future__ import annotations

import sys

from jaxroll.envs import registry
from tests.harness.envs.dense_reward import DenseReward

LINES = 10_000
_said: list[bool] = []


@registry.register("talkative")
class Talkative(DenseReward):
    """A `dense_reward` environment; the first one of a process writes the output."""

    def __init__(self, pool, config):
        super().__init__(pool, config)
        if not _said:
            _said.append(True)
            for number in range(LINES):
                print(f"line {number}: é, ∑ and \N{PILE OF POO}", file=sys.stderr)
            print("." * LINES)
