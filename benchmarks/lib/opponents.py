"""A game of PettingZoo against an opponent that moves at random, for the environment `pettingzoo`."""

from __future__ import annotations

from random import Random
from typing import Any


def tictactoe(**make: Any) -> Any:
    """Tictactoe in which the second player moves at random: an AECEnv with the agent `player_1` alone.

    It needs PettingZoo. The moves of the opponent follow the seed of `reset`.
    """
    from pettingzoo.classic import tictactoe_v3  # pyright: ignore[reportMissingImports]
    from pettingzoo.utils import BaseWrapper  # pyright: ignore[reportMissingImports]

    class AgainstRandom(BaseWrapper):
        """The game; the opponent answers within the step of the first player."""

        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.possible_agents = ["player_1"]

        def reset(self, seed: int | None = None, options: dict | None = None) -> None:
            super().reset(seed, options)
            self._opponent = Random(f"opponent {seed}")

        def step(self, action: Any) -> None:
            super().step(action)
            if action is None or all(self.env.terminations.values()):
                return
            legal = [place for place, free in enumerate(self.env.observe("player_2")["action_mask"]) if free]
            super().step(self._opponent.choice(legal))

    return AgainstRandom(tictactoe_v3.env(**make))
