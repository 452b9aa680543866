"""FrozenLake in text: the model sees the lake, answers with a direction, and sees the lake again."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

from jaxroll.config import TaskConfig
from jaxroll.config.derived import is_compact
from jaxroll.data.sources import PRINTABLE
from jaxroll.envs.registry import register, settings_given, settings_of, share
from jaxroll.errors import DataError
from jaxroll.protocols import Place, StepResult
from jaxroll.records import Item, Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool


@register("frozen_lake")
class FrozenLake:
    """FrozenLake, with reward 1 at the goal and 0 in a hole or after the last turn.

    An answer without a direction costs a turn. The members of a group play the same lake with the same seed, so the
    same moves slip in the same way.
    """

    place: Place = "loop"  # a step takes microseconds
    step_limit_s = 10.0

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self._game: Game | None = None
        self._turns = self._misread = self._left = 0

    def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's messages: the lake with the player at its start."""
        args = task.args()
        self._game = Game(Lake(args["cells"]), bool(args["slippery"]), seed)
        self._turns, self._misread, self._left = 0, 0, int(args["max_turns"])
        return task.messages

    def step(self, answer: str) -> StepResult:
        """The view after one move, or the end of the episode with its reward."""
        game = self._game
        if game is None:
            raise DataError("step() before reset(): there is no lake")
        self._turns, self._left = self._turns + 1, self._left - 1
        self._misread += action_in(answer) is None
        view = game.act(answer)
        if not game.over and self._left > 0:
            state = json.dumps([game.place, self._turns, self._misread]).encode()
            return StepResult(done=False, messages=(Message("user", view),), state=state)
        parts = {
            "success": float(game.won),
            "fell": float(game.over and not game.won),
            "turns": float(self._turns),
            "misread": float(self._misread),
        }
        return StepResult(done=True, reward=float(game.won), reward_parts=parts)

    def restore(self, state: bytes) -> None:
        """Continue the game after an earlier step; DataError for a state that no step returned."""
        game, (place, turns, misread) = self._game, json.loads(state)
        if game is None or not (0 <= place < len(game.lake.cells) and 0 <= misread <= turns < self._left):
            raise DataError(f"{state[:60]!r} is no state of this game")
        game.skip(turns - misread)
        game.place, self._turns, self._misread, self._left = place, turns, misread, self._left - turns

    def close(self) -> None:
        """Forget the game."""
        self._game = None


# --- rules: the dynamics of gymnasium's FrozenLake-v1
#
# A lake is a square of cells: start, ice, holes, goal. An action moves one cell, or none at the edge. On slippery ice
# the move goes in the intended direction with probability 1/3, and to either side of it with 1/3 each. Holes and the
# goal end the game; only the goal has a reward. Cells are numbered row by row.

ACTIONS = ("left", "down", "right", "up")  # in gymnasium's order
ICE, HOLE, GOAL, PLAYER = ".", "O", "G", "@"
NOT_AN_ACTION = "?"
RULES = (
    "You are @ on a frozen lake of N rows. Walk over the ice (.) to the goal (G); a hole (O) ends the game. "
    "Answer with one word: left, down, right or up.\n"
)
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
_ACTION = re.compile(r"\b(left|down|right|up)\b")
_MAX_SIZE = 16


@dataclass(frozen=True)
class Lake:
    """A map: `size` rows of `size` cells, the start in the first one and the goal in the last."""

    cells: str

    @cached_property
    def size(self) -> int:
        """Cells of a row."""
        return round(len(self.cells) ** 0.5)

    def to(self, place: int, action: int) -> int:
        """The cell that `action` leads to from `place` on ice that is not slippery."""
        row, column = divmod(place, self.size)
        down, right = _MOVES[action]
        row, column = min(max(row + down, 0), self.size - 1), min(max(column + right, 0), self.size - 1)
        return row * self.size + column

    def ends(self, place: int) -> bool:
        """True if the game is over at `place`."""
        return self.cells[place] in (HOLE, GOAL)

    @cached_property
    def distances(self) -> Mapping[int, int]:
        """Number of steps to the goal over ice, for every cell from which it can be reached."""
        goal = len(self.cells) - 1
        found, queue = {goal: 0}, deque([goal])
        while queue:
            place = queue.popleft()
            for action in range(len(ACTIONS)):  # moves are symmetric, except at the edge
                before = self.to(place, action)
                if before not in found and not self.ends(before):
                    found[before] = found[place] + 1
                    queue.append(before)
        return found

    def shown(self, place: int) -> str:
        """The lake as text with the player in it, one line per row."""
        cells = self.cells[:place] + PLAYER + self.cells[place + 1 :]
        return "\n".join(cells[start : start + self.size] for start in range(0, len(cells), self.size))


@dataclass(frozen=True)
class Settings:
    """Parameters of lakes: `size` cells a side, each cell ice with probability `ice`, slippery ice or not."""

    size: int = 4
    ice: float = 0.8
    slippery: bool = False
    max_turns: int = 0  # 0: four times the size

    def __post_init__(self) -> None:
        if not 2 <= self.size <= _MAX_SIZE or not 0 < self.ice <= 1 or self.max_turns < 0:
            raise ValueError(f"size is 2..{_MAX_SIZE}, ice in (0, 1], max_turns 0 or more; not {self}")

    @property
    def turns(self) -> int:
        """The maximum number of moves of a game."""
        return self.max_turns or 4 * self.size


def lake(seed: int, settings: Settings) -> Lake:
    """The lake of `seed`, whose goal can always be reached."""
    random = Random(f"lake {seed}")
    while True:
        cells = [ICE if random.random() < settings.ice else HOLE for _ in range(settings.size**2)]
        cells[0], cells[-1] = ICE, GOAL
        made = Lake("".join(cells))
        if 0 in made.distances:
            return made


def executed_action(action: int, slippery: bool, random: Random) -> int:
    """The action that is executed for `action`: on slippery ice it or one of its two neighbors, with equal chances."""
    return (action + random.choice((-1, 0, 1))) % len(ACTIONS) if slippery else action


def action_in(answer: str) -> int | None:
    """The last action that `answer` names; None if it names none."""
    found = _ACTION.findall(answer.lower())
    return ACTIONS.index(found[-1]) if found else None


class Game:
    """One game on a lake."""

    def __init__(self, lake: Lake, slippery: bool, seed: int) -> None:
        self.lake, self.place = lake, 0
        self._slippery, self._random = slippery, Random(f"ice {seed}")

    @property
    def over(self) -> bool:
        """True if the player is in a hole or at the goal."""
        return self.lake.ends(self.place)

    @property
    def won(self) -> bool:
        """True if the player is at the goal."""
        return self.lake.cells[self.place] == GOAL

    def skip(self, actions: int) -> None:
        """Draw the chances of `actions` earlier actions."""
        for _ in range(actions):
            executed_action(0, self._slippery, self._random)

    def act(self, answer: str) -> str:
        """Execute `answer` and return the view, which marks an answer without an action; that changes nothing."""
        action = action_in(answer)
        if action is None:
            return f"{NOT_AN_ACTION}\n{self.lake.shown(self.place)}"
        self.place = self.lake.to(self.place, executed_action(action, self._slippery, self._random))
        return self.lake.shown(self.place)


def worked(lake: Lake, settings: Settings, seed: int, noise: float) -> tuple[Message, ...]:
    """An example game of a player who takes a shortest path but, with probability `noise`, moves at random.

    Answers and views alternate; the first and the last message are answers.
    """
    game, random = Game(lake, settings.slippery, seed), Random(f"player {seed}")
    messages: list[Message] = []
    for _ in range(settings.turns):
        answer = ACTIONS[_chosen(lake, game.place, random, noise)]
        messages.append(Message("assistant", answer))
        view = game.act(answer)
        if game.over:
            break
        messages.append(Message("user", view))
    return tuple(messages if messages[-1].role == "assistant" else messages[:-1])


def _chosen(lake: Lake, place: int, random: Random, noise: float) -> int:
    anywhere = random.randrange(len(ACTIONS))
    if random.random() < noise:
        return anywhere
    far = len(lake.cells)
    steps = [lake.distances.get(lake.to(place, action), far) for action in range(len(ACTIONS))]
    return random.choice([action for action, count in enumerate(steps) if count == min(steps)])


def arguments(lake: Lake, settings: Settings) -> dict[str, Any]:
    """The environment's arguments for a game on `lake`."""
    return {"cells": lake.cells, "slippery": settings.slippery, "max_turns": settings.turns}


# --- the source of lakes


class FrozenLakeSource:
    """Lakes by index. The question is the map, so a held-out map is never trained on, even under another index.

    `task.args`: `size`, `ice`, `slippery`, `max_turns` of the game, and `noise`, the share of random moves in the
    example games of the warm start.
    """

    size = None

    def __init__(self, cfg: TaskConfig) -> None:
        args = settings_given(cfg)
        self._noise = share(args, "noise")
        self._settings = settings_of(Settings, args)
        self._as_compact = is_compact(cfg)
        self.identity = f"frozen_lake/{json.dumps(dataclasses.asdict(self._settings))}"

    def item(self, index: int) -> Item:
        """Lake `index`."""
        drawn = lake(index, self._settings)
        return Item(
            question=RULES + drawn.shown(0),
            compact=drawn.shown(0),
            answer=None,
            env_args=arguments(drawn, self._settings),
            worked=worked(drawn, self._settings, index, self._noise),
        )

    def alphabet(self) -> str:
        """The characters of maps and actions; printable ASCII for full prompts."""
        signs = ICE + HOLE + GOAL + PLAYER + NOT_AN_ACTION
        extra = "" if self._as_compact else PRINTABLE
        return "".join(sorted(set(signs + "\n" + "".join(ACTIONS) + extra)))
