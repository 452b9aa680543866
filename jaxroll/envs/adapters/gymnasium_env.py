"""Environments of gymnasium and games of PettingZoo, as text with text or discrete actions.

`TextWrapper` is a gymnasium wrapper whose observations and actions are text; the environment of an episode plays
through it, and gymnasium's `check_env` accepts it.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxroll.data.sources import PRINTABLE
from jaxroll.envs.adapters.games import (
    UNREAD,
    Game,
    GameEnvironment,
    GameSource,
    GameView,
    chosen,
    library,
    player_parts,
)
from jaxroll.envs.registry import register
from jaxroll.errors import ConfigError

gymnasium = library("gymnasium", "gymnasium", "envs-more")
spaces = gymnasium.spaces

MAX_NUMBERS = 64  # of an observation that is shown as numbers
_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MAX_TEXT = 65_536


@dataclass(frozen=True)
class Settings:
    """Settings of `task.args`.

    `id` and `make` are the arguments of `gymnasium.make`. `observation` is "numbers", "ansi" (the rendered text;
    colored characters are put into brackets) or `package.module:function` of (observation, env). `actions` names
    discrete actions in order. The reward is the sum of the environment's rewards or, with `goal`, 1 if the episode ends
    with at least that, else 0. `rules` precedes the first observation in full prompts; `hidden` says that different
    seeds can begin with the same observation.
    """

    id: str = "Blackjack-v1"
    make: dict = field(default_factory=dict)
    observation: str = "numbers"
    actions: Sequence[str] = ()
    goal: float | None = None
    rules: str = ""
    hidden: bool = False


class TextWrapper(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    """The environment `env` with text as observations and actions. ConfigError for spaces without a text.

    An answer without an action leaves the environment as it is and shows the observation again, after `UNREAD`.
    """

    def __init__(self, env: Any, observation: str = "numbers", actions: Sequence[str] = ()) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self, observation=observation, actions=tuple(actions))
        gymnasium.Wrapper.__init__(self, env)
        self._inner, self._shown = env.action_space, _formatter(observation, env)
        self.labels = _labels(self._inner, actions)
        self.observation_space = spaces.Text(max_length=_MAX_TEXT, min_length=0, charset=_characters())
        self.action_space = spaces.Text(max_length=64, min_length=0, charset=_characters())
        self._last = ""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """The first observation as text, and the environment's info."""
        found, info = self.env.reset(seed=seed, options=options)
        self._last = self._shown(found, self.env)
        return self._last, {**info, "misread": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """gymnasium's step, with text; `info["misread"]` is True if the text names no action."""
        if not self.labels:  # a text space
            taken: Any = action
        elif (place := chosen(action, self.labels)) is None:
            return f"{UNREAD}\n{self._last}", 0.0, False, False, {"misread": True}
        else:
            taken = place + int(self._inner.start)
        found, reward, terminated, truncated, info = self.env.step(taken)
        self._last = self._shown(found, self.env)
        return self._last, float(reward), bool(terminated), bool(truncated), {**info, "misread": False}


def text_env(settings: Settings) -> TextWrapper:
    """The environment of `settings` in text. ConfigError if gymnasium cannot make it."""
    made = dict(settings.make)
    if settings.observation == "ansi":
        made.setdefault("render_mode", "ansi")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*not in the possible render_modes")  # an error follows
            env = gymnasium.make(settings.id, **made)
        if made.get("render_mode") == "ansi" and "ansi" not in env.metadata.get("render_modes", ()):
            raise ConfigError("task.args.observation", "ansi", "this environment renders no text", 'Use "numbers".')
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        reason = f"gymnasium cannot make it: {str(error).rstrip('.')}"
        raise ConfigError("task.args.id", settings.id, reason, "See gymnasium.registry, or give module:Id.") from error
    return TextWrapper(env, settings.observation, settings.actions)


def shown(space: Any, value: Any) -> str:
    """An observation of `space` as text. ConfigError for a space that has no form as short text."""
    if isinstance(space, spaces.Text):
        return str(value)
    if isinstance(space, spaces.Discrete):
        return str(int(value))
    if isinstance(space, spaces.Tuple):
        return " ".join(shown(part, each) for part, each in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{name}: {shown(part, value[name])}" for name, part in space.spaces.items())
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary) and value.size <= MAX_NUMBERS:
        return " ".join(f"{round(float(number), 2):g}" for number in value.ravel())
    remedy = 'Set observation to "ansi", or to a function "package.module:name" of (observation, env).'
    raise ConfigError("task.args.observation", str(space), "there is no text for such an observation", remedy)


def _formatter(observation: str, env: Any) -> Callable[[Any, Any], str]:
    if observation == "numbers":
        return lambda value, _: shown(env.observation_space, value)
    if observation == "ansi":
        return lambda _, world: _plain(world.render())
    module, _, name = observation.rpartition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = 'Use "numbers", "ansi" or "package.module:function".'
        raise ConfigError("task.args.observation", observation, f"there is no such function: {error}", remedy) from None


def _plain(rendered: str) -> str:
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", rendered)).strip("\n")


def _labels(space: Any, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(space, spaces.Text):
        return ()
    if not isinstance(space, spaces.Discrete):
        remedy = "Wrap the environment, so that its actions are Discrete or Text."
        raise ConfigError("task.args.id", str(space), "its actions are neither discrete nor text", remedy)
    if names and len({name.lower() for name in names}) != space.n:
        raise ConfigError("task.args.actions", list(names), f"there are {space.n} actions", "Give each its own name.")
    return tuple(names) or tuple(str(int(space.start) + action) for action in range(space.n))


def _characters() -> frozenset[str]:
    return frozenset(PRINTABLE)


class GymnasiumGame(Game):
    """A gymnasium environment as a game."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.rules, self.hidden = settings.rules, settings.hidden
        self._env = text_env(settings)
        self._sum = 0.0

    def start(self, seed: int) -> str:
        self._sum = 0.0
        return self._env.reset(seed=seed % 2**32)[0]

    def play(self, answer: str) -> GameView:
        text, reward, terminated, truncated, info = self._env.step(answer)
        self._sum += reward
        goal, ended = self.settings.goal, terminated or truncated
        total = self._sum if goal is None else float(ended and self._sum >= goal)
        return GameView(text, ended, total, {"return": self._sum}, info["misread"])

    def choices(self) -> Sequence[str]:
        return self._env.labels

    def close(self) -> None:
        self._env.close()


@register("gymnasium")
class Gymnasium(GameEnvironment):
    """Environment that plays a gymnasium environment in text."""

    game = GymnasiumGame


class GymnasiumSource(GameSource):
    """A gymnasium environment by seed."""

    name, game = "gymnasium", GymnasiumGame


# --- PettingZoo games (AEC API) in text, played by one policy against itself
#
# The policy answers for every player in turn, in one conversation: the game must show all players the same. Each turn
# earns the reward of its player, as the reward part `turn.k`; with `learner.advantage = "segment_return"` and
# `learner.turn_discount = 0` the turns of the winner are reinforced and those of the loser are not.


@dataclass(frozen=True)
class AECSettings:
    """Settings of `task.args`.

    `env` is the function that makes the game, as `package.module:name`, and `make` its arguments. `observation` is a
    function `package.module:name` of (env, player) that returns text. `actions` names discrete actions in order. With
    `forfeit` an answer without a legal action ends the game and costs its player 1, as the reward of that turn alone:
    otherwise a player who is about to lose gains by such answers.
    """

    env: str = "pettingzoo.classic.tictactoe_v3:env"
    make: dict = field(default_factory=dict)
    observation: str = "jaxroll.envs.adapters.gymnasium_env:board"
    actions: Sequence[str] = ()
    forfeit: bool = False


def board(env: Any, player: str) -> str:
    """The board of PettingZoo's tictactoe: the mark of the player that moves, then three rows of x, o and dots."""
    marks = "".join(".xo"[mark] for mark in env.unwrapped.board.squares)  # column by column
    mine = "xo"[env.possible_agents.index(player)]
    return "\n".join([mine, *(marks[row::3] for row in range(3))])


def numbers(env: Any, player: str) -> str:
    """The observation of the player as numbers, without its action mask."""
    space, value = env.observation_space(player), env.observe(player)
    if isinstance(value, dict) and "observation" in value:
        space, value = space["observation"], value["observation"]
    return shown(space, value)


def text_aec(settings: AECSettings) -> Any:
    """The game of `settings` as an AECEnv whose observations and actions are text; PettingZoo's `api_test` accepts it.

    An observation is a dict with the key `text`, because `api_test` asks any other observation for its dtype.

    An answer without a legal action loses nothing and changes nothing: the player is asked again, after `UNREAD`.
    """
    pettingzoo = library("pettingzoo", "pettingzoo", "envs-more")
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
    texts = spaces.Dict({"text": spaces.Text(max_length=_MAX_TEXT, min_length=0, charset=frozenset(PRINTABLE))})
    short = spaces.Text(max_length=64, min_length=0, charset=frozenset(PRINTABLE))

    class TextAEC(pettingzoo.utils.BaseWrapper):
        """The game in text."""

        def reset(self, seed: int | None = None, options: dict | None = None) -> None:
            super().reset(seed=seed, options=options)
            self.misread = False

        def observation_space(self, agent: str) -> Any:
            return texts

        def action_space(self, agent: str) -> Any:
            return short

        def observe(self, agent: str) -> dict[str, str]:
            seen = look(self.env, agent)
            again = self.misread and agent == self.agent_selection
            return {"text": f"{UNREAD}\n{seen}" if again else seen}

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

    Settings = AECSettings
    hidden = True  # most games begin in one state

    def __init__(self, settings: AECSettings) -> None:
        super().__init__(settings)
        self._env = text_aec(settings)

    def start(self, seed: int) -> str:
        self._env.reset(seed=seed % 2**32)
        self._turns_of: list[int] = []
        self._earned = dict.fromkeys(range(len(self._env.possible_agents)), 0.0)
        return self._env.observe(self._env.agent_selection)["text"]

    def play(self, answer: str) -> GameView:
        env = self._env
        self._turns_of.append(env.possible_agents.index(env.agent_selection))
        env.step(answer)
        misread = env.misread
        if not misread:
            for player, agent in enumerate(env.possible_agents):
                self._earned[player] += float(env.rewards.get(agent, 0.0))
        over = all(env.terminations[agent] or env.truncations[agent] for agent in env.agents)
        parts = player_parts(self._turns_of, self._earned) if over else {}
        if misread and self.settings.forfeit:
            over, last = True, self._turns_of[-1]
            parts = player_parts(self._turns_of, self._earned) | {f"turn.{len(self._turns_of) - 1}": -1.0}
            self._earned[last] -= 1.0
            parts[f"player.{last}"] = self._earned[last]
        view = "" if over else env.observe(env.agent_selection)["text"]
        return GameView(view, over, self._earned[0], parts, misread)

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
