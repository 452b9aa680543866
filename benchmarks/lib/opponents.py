"""Tasks that a tiny model learns in minutes: a game against a random opponent, and a question about one item."""

from __future__ import annotations

from random import Random
from typing import Any

from jaxroll.envs.adapters.tool_calls import Problem, Tool, stocktaking


def tictactoe(**make: Any) -> Any:
    """Tictactoe in which the second player moves at random: an AECEnv with the agent `player_1` alone.

    It needs PettingZoo. The moves of the opponent follow the seed of `reset`. A game not won has reward 0: where
    a lost one costs more than an unfinished one, a policy learns to answer nothing once its position is bad.
    """
    from pettingzoo.classic import tictactoe_v3  # pyright: ignore[reportMissingImports]
    from pettingzoo.utils import BaseWrapper  # pyright: ignore[reportMissingImports]

    class AgainstRandom(BaseWrapper):
        """The game; the opponent answers within the step of the first player."""

        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.possible_agents = ["player_1"]

        @property
        def rewards(self) -> dict[str, float]:
            return {agent: max(0.0, reward) for agent, reward in self.env.rewards.items()}

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


def one_item(seed: int) -> Problem:
    """The question of `stocktaking` about the item `abc`, with numbers of one digit: the tool is to be chosen.

    A tiny model cannot copy the name of an item that it has not seen, so its calls in `stocktaking` find nothing.
    """
    random = Random(f"one item {seed}")
    wanted, numbers = random.choice(("price", "stock")), dict[str, int]()
    numbers["price"], numbers["stock"] = random.sample(range(10), 2)
    tools = tuple(
        Tool(tool.name, tool.description, tool.parameters, lambda item, of=tool.name: numbers[of])
        for tool in stocktaking(0).tools
    )
    calls = {name: (name, {"item": "abc"}) for name in numbers}
    question = f"What is the {wanted} of abc? Answer with the number alone."
    return Problem(question, f"{wanted} abc", str(numbers[wanted]), tools, (calls[wanted],), tuple(calls.values()))
