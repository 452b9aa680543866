"""PettingZoo games (AEC API) in text, played by one policy against itself.

The policy answers for every player in turn, in one conversation: the game must show all players the same. Each turn
earns the reward of its player, as the reward part `turn.k`; with `learner.advantage = "segment_return"` and
`learner.turn_discount = 0` the turns of the winner are reinforced and those of the loser are not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxroll.data.sources import PRINTABLE
from jaxroll.envs.adapters.games import UNREAD, Game, GameEnvironment, GameSource, View, chosen, library, player_parts
from jaxroll.envs.registry import register
from jaxroll.errors import ConfigError

_MAX_TEXT = 65_536


@dataclass(frozen=True)
class Settings:
    """Settings of `task.args`.

    `env` is the function that makes the game, as `package.module:name`, and `make` its arguments. `observation` is a
    function `package.module:name` of (env, player) that returns text. `actions` names discrete actions in order.
    """

    env: str = "pettingzoo.classic.tictactoe_v3:env"
    make: dict = field(default_factory=dict)
    observation: str = "jaxroll.envs.adapters.pettingzoo_env:board"
    actions: Sequence[str] = ()


def board(env: Any, player: str) -> str:
    """The board of PettingZoo's tictactoe: the mark of the player that moves, then three rows of x, o and dots."""
    marks = "".join(".xo"[mark] for mark in env.unwrapped.board.squares)  # column by column
    mine = "xo"[env.possible_agents.index(player)]
    return "\n".join([mine, *(marks[row::3] for row in range(3))])


def numbers(env: Any, player: str) -> str:
    """The observation of the player as numbers, without its action mask."""
    from jaxroll.envs.adapters.gymnasium_env import shown

    space, value = env.observation_space(player), env.observe(player)
    if isinstance(value, dict) and "observation" in value:
        space, value = space["observation"], value["observation"]
    return shown(space, value)


def text_aec(settings: Settings) -> Any:
    """The game of `settings` as an AECEnv whose observations and actions are text; PettingZoo's `api_test` accepts it.

    An observation is a dict with the key `text`, because `api_test` asks any other observation for its dtype.

    An answer without a legal action loses nothing and changes nothing: the player is asked again, after `UNREAD`.
    """
    pettingzoo = library("pettingzoo", "pettingzoo", "envs-more")
    spaces = library("gymnasium", "gymnasium", "envs-more").spaces
    made, look = _function("env", settings.env)(**settings.make), _function("observation", settings.observation)
    agents = made.possible_agents
    if not all(isinstance(made.action_space(agent), spaces.Discrete) for agent in agents):
        remedy = "Use a game with Discrete actions."
        raise ConfigError("task.args.env", settings.env, "its actions are not discrete", remedy)
    count = int(made.action_space(agents[0]).n)
    if settings.actions and len({name.lower() for name in settings.actions}) != count:
        reason = f"there are {count} actions"
        raise ConfigError("task.args.actions", list(settings.actions), reason, "Give each its own name.")
    labels = tuple(settings.actions) or tuple(map(str, range(count)))
    seen = spaces.Dict({"text": spaces.Text(max_length=_MAX_TEXT, min_length=0, charset=frozenset(PRINTABLE))})
    short = spaces.Text(max_length=64, min_length=0, charset=frozenset(PRINTABLE))

    class TextAEC(pettingzoo.utils.BaseWrapper):
        """The game in text."""

        def reset(self, seed: int | None = None, options: dict | None = None) -> None:
            super().reset(seed=seed, options=options)
            self.misread = False

        def observation_space(self, agent: str) -> Any:
            return seen

        def action_space(self, agent: str) -> Any:
            return short

        def observe(self, agent: str) -> dict[str, str]:
            shown = look(self.env, agent)
            again = self.misread and agent == self.agent_selection
            return {"text": f"{UNREAD}\n{shown}" if again else shown}

        def legal(self) -> list[str]:
            """The actions that the player in turn may take."""
            mask = self._mask()
            return [label for place, label in enumerate(labels) if mask is None or mask[place]]

        def step(self, action: str | None) -> None:
            self.misread = False
            if action is None or self.terminations[self.agent_selection] or self.truncations[self.agent_selection]:
                return super().step(None)
            place, mask = chosen(action, labels), self._mask()
            if place is None or (mask is not None and not mask[place]):
                self.misread = True  # PettingZoo's convention: a step takes the rewards of the player who moves
                self.env.unwrapped._clear_rewards()
                self.env.unwrapped._cumulative_rewards[self.agent_selection] = 0
                return None
            return super().step(place)

        def _mask(self) -> Any:
            given = self.env.observe(self.agent_selection)
            return given.get("action_mask") if isinstance(given, dict) else None

    return TextAEC(made)


def _function(key: str, name: str) -> Callable[..., Any]:
    module, _, attribute = name.rpartition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = "Give package.module:function, and pip install 'jaxroll[envs-more]'."
        raise ConfigError(f"task.args.{key}", name, f"it cannot be loaded: {error}", remedy) from error


class PettingZooGame(Game):
    """A game against oneself; the reward is that of the first player."""

    Settings = Settings
    hidden = True  # most games begin in one state

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._env = text_aec(settings)

    def start(self, seed: int) -> str:
        self._env.reset(seed=seed % 2**32)
        self._turns_of: list[int] = []
        self._earned = dict.fromkeys(range(len(self._env.possible_agents)), 0.0)
        return self._env.observe(self._env.agent_selection)["text"]

    def play(self, answer: str) -> View:
        env = self._env
        self._turns_of.append(env.possible_agents.index(env.agent_selection))
        env.step(answer)
        misread = env.misread
        if not misread:
            for player, agent in enumerate(env.possible_agents):
                self._earned[player] += float(env.rewards.get(agent, 0.0))
        over = all(env.terminations[agent] or env.truncations[agent] for agent in env.agents)
        parts = player_parts(self._turns_of, self._earned) if over else {}
        view = "" if over else env.observe(env.agent_selection)["text"]
        return View(view, over, self._earned[0], parts, misread)

    def choices(self) -> Sequence[str]:
        return self._env.legal()

    def close(self) -> None:
        self._env.close()


@register("pettingzoo")
class PettingZoo(GameEnvironment):
    """Environment in which one policy plays all players of a PettingZoo game."""

    game = PettingZooGame


class PettingZooSource(GameSource):
    """A PettingZoo game by seed."""

    name, game = "pettingzoo", PettingZooGame
