"""Games of textarena: one-player games, and games of several players that one policy plays against itself.

textarena draws from Python's global `random`, which it seeds when a game begins. Here each game has a state of its own,
which is exchanged with the global one during its calls, under a lock. An episode makes its own environment, because
`reset` of some wrappers of textarena keeps earlier observations. Answers go to the game as they are (`[right]`).
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxroll.envs.adapters.games import Game, GameEnvironment, GameSource, View, library, player_parts
from jaxroll.envs.registry import register
from jaxroll.errors import ConfigError

_GLOBAL_RANDOM = threading.Lock()


@dataclass(frozen=True)
class Settings:
    """Settings of `task.args`.

    `id` names a game without its suffix, as in FrozenLake-v0; `players` is the number of players, and the policy plays
    all of them. `moves` are the answers of the warm start's random play. `hidden` says that different seeds can begin
    with the same text.
    """

    id: str = "FrozenLake-v0"
    players: int = 1
    moves: Sequence[str] = ()
    hidden: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.players <= 15:
            raise ValueError("players is 1 to 15")


class TextArenaGame(Game):
    """A game of textarena; the reward is that of the first player."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.hidden, self._state = settings.hidden, None
        with self._own_random():  # what textarena imports draws from the global random, too
            self._textarena = library("textarena", "textarena", "envs-more")
        name = f"{settings.id}-raw"  # without wrappers: each observation holds what is new
        if name not in self._textarena.envs.registration.ENV_REGISTRY:
            remedy = "Give an id of textarena without its suffix, such as FrozenLake-v0."
            raise ConfigError("task.args.id", settings.id, "textarena has no such game", remedy)
        self._name, self._state = name, None

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        with _GLOBAL_RANDOM:
            others = random.getstate()
            if self._state is not None:
                random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(others)

    def start(self, seed: int) -> str:
        with self._own_random():
            try:
                self._env: Any = self._textarena.make(self._name)
            except (ImportError, LookupError, SyntaxError, TypeError, ValueError) as error:
                reason = f"textarena cannot make it here: {type(error).__name__}: {error}"
                raise ConfigError("task.args.id", self.settings.id, reason, "Use another game.") from error
            self._env.reset(num_players=self.settings.players, seed=seed)
            self._player, text = self._seen()
        self._turns_of: list[int] = []
        return text

    def play(self, answer: str) -> View:
        with self._own_random():
            self._turns_of.append(self._player)
            over, _ = self._env.step(answer)
            if over:
                rewards, info = self._env.close()
                misread = bool((info or {}).get(self._player, {}).get("invalid_move", False))
                earned = {player: float((rewards or {}).get(player, 0.0)) for player in range(self.settings.players)}
                parts = player_parts(self._turns_of, earned) if len(earned) > 1 else {}
                return View("", True, earned[0], parts, misread)
            self._player, text = self._seen()
        return View(text)

    def _seen(self) -> tuple[int, str]:
        """The player whose turn it is, and the messages that are new to them, without their own answers."""
        player, messages = self._env.get_observation()
        return player, "\n".join(str(text).strip("\n") for sender, text, _ in messages if sender != player)

    def choices(self) -> Sequence[str]:
        return self.settings.moves


@register("textarena")
class TextArena(GameEnvironment):
    """Environment that plays a game of textarena."""

    game = TextArenaGame


class TextArenaSource(GameSource):
    """A game of textarena by seed."""

    name, game = "textarena", TextArenaGame
