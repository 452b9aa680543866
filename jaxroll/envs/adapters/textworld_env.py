"""TextWorld: household text games, generated and compiled on this machine, one per seed.

A game is compiled once (some seconds, by the Inform 7 compiler in the package) and kept in `folder`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxroll import disk
from jaxroll.envs.adapters.games import Game, GameEnvironment, GameSource, View, library
from jaxroll.envs.registry import register

_COMPILER = threading.Lock()  # the generator draws from global state
_PROMPT = ">"


@dataclass(frozen=True)
class Settings:
    """Settings of `task.args`: size of the world, length of the quest, and the folder of compiled games."""

    rooms: int = 2
    objects: int = 3
    quest_length: int = 2
    folder: str = "~/.cache/jaxroll/textworld"

    def __post_init__(self) -> None:
        if not (1 <= self.rooms <= 30 and 1 <= self.objects <= 60 and 1 <= self.quest_length <= 20):
            raise ValueError("rooms is 1 to 30, objects 1 to 60, quest_length 1 to 20")


def game_file(seed: int, settings: Settings) -> Path:
    """The compiled game of `seed`; it is made if the folder does not have it."""
    textworld = library("textworld", "textworld (Linux only)", "textworld")
    library("textworld.generator", "textworld (Linux only)", "textworld")
    size = {name: value for name, value in asdict(settings).items() if name != "folder"}
    key = hashlib.blake2b(json.dumps([textworld.__version__, seed, size]).encode(), digest_size=8).hexdigest()
    folder = Path(settings.folder).expanduser()
    path = folder / f"{key}.z8"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, _COMPILER:
        options = textworld.GameOptions()
        options.seeds, options.path = seed % 2**31, str(Path(scratch) / path.name)
        options.nb_rooms, options.nb_objects = settings.rooms, settings.objects
        options.quest_length = settings.quest_length
        compiled = Path(textworld.generator.compile_game(textworld.generator.make_game(options), options))
        for part in (compiled.with_suffix(".json"), compiled.with_suffix(".ni"), compiled):  # the game last
            if part.exists():
                with disk.replaced(folder / part.name) as draft:
                    shutil.copy(part, draft)
    return path


class TextWorldGame(Game):
    """One household game; the reward is 1 if its quest is done, and the score is a part."""

    Settings = Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._textworld = library("textworld", "textworld (Linux only)", "textworld")
        self._env: Any = None

    def start(self, seed: int) -> str:
        self.close()
        names = (
            "feedback",
            "won",
            "lost",
            "score",
            "max_score",
            "admissible_commands",
            "policy_commands",
            "objective",
            "description",
        )
        infos = self._textworld.EnvInfos(**dict.fromkeys(names, True))
        self._env = self._textworld.start(str(game_file(seed, self.settings)), infos)
        self._state = self._env.reset()
        return f"{_plain(self._state.objective)}\n{_plain(self._state.description)}"

    def play(self, answer: str) -> View:
        command = " ".join(answer.split())[:200]
        misread = command not in self._state.admissible_commands
        self._state, _, over = self._env.step(command or "look")
        score, most = self._state.score or 0, self._state.max_score or 1
        won = bool(self._state.won)
        return View(_plain(self._state.feedback), bool(over), float(won), {"score": score / most}, misread)

    def choices(self) -> Sequence[str]:
        return self._state.admissible_commands

    def advice(self) -> str | None:
        policy = self._state.policy_commands
        return policy[0] if policy else None

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _plain(text: str | None) -> str:
    """Printable ASCII without empty lines, trailing blanks and the prompt at the end."""
    lines = [line.strip() for line in (text or "").encode("ascii", "ignore").decode().splitlines()]
    return "\n".join(line for line in lines if line and line != _PROMPT)


@register("textworld")
class TextWorld(GameEnvironment):
    """Environment that plays games of TextWorld."""

    game = TextWorldGame
    place = "process"  # its interpreter is C code
    reset_limit_s = 300.0  # a game may have to be compiled


class TextWorldSource(GameSource):
    """Games of TextWorld by seed."""

    name, game = "textworld", TextWorldGame
