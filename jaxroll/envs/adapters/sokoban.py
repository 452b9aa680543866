"""Sokoban in text: push all boxes onto goals, with one move or several per answer. Own rules, levels and teacher."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from jaxroll.envs.adapters.games import UNREAD, Game, GameEnvironment, GameSource, View, chosen
from jaxroll.envs.registry import register
from jaxroll.protocols import Place

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
FLOOR, WALL, BOX, GOAL, PLAYER, BOX_ON_GOAL, PLAYER_ON_GOAL = ".", "#", "$", "G", "@", "*", "+"
RULES = (
    "Sokoban: you are @, push every box ($) onto a goal (G). * is a box on a goal, + is you on a goal, # is a wall, "
    "and beyond the edge are walls. You cannot pull a box, nor push two. "
    "Answer with one word: up, down, left or right.\n"
)
_TRIES = 200
_MAX_STATES = 20_000  # that the teacher looks at


@dataclass(frozen=True)
class Settings:
    """Settings of `task.args`: rows and columns, boxes, the share of cells that are walls, pulls of the generator."""

    rows: int = 4
    columns: int = 4
    boxes: int = 1
    walls: float = 0.0
    pulls: int = 6

    def __post_init__(self) -> None:
        fits = 3 <= self.rows <= 12 and 3 <= self.columns <= 12 and 1 <= self.boxes <= 4
        if not (fits and 0 <= self.walls <= 0.4 and 1 <= self.pulls <= 100):
            raise ValueError("rows and columns are 3 to 12, boxes 1 to 4, walls 0 to 0.4, pulls 1 to 100")


Cell = tuple[int, int]


@dataclass(frozen=True)
class Level:
    """A state of a level; cells are (row, column)."""

    rows: int
    columns: int
    walls: frozenset[Cell]
    goals: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def solved(self) -> bool:
        """True if every box is on a goal."""
        return self.boxes == self.goals

    def free(self, cell: Cell) -> bool:
        """True if `cell` is inside and holds neither a wall nor a box."""
        inside = 0 <= cell[0] < self.rows and 0 <= cell[1] < self.columns
        return inside and cell not in self.walls and cell not in self.boxes

    def after(self, move: str) -> Level:
        """The state after `move`; the same one if a wall or a second box is in the way."""
        step = MOVES[move]
        ahead = _plus(self.player, step)
        if self.free(ahead):
            return replace(self, player=ahead)
        beyond = _plus(ahead, step)
        if ahead in self.boxes and self.free(beyond):
            return replace(self, player=ahead, boxes=self.boxes - {ahead} | {beyond})
        return self

    def before(self, move: str) -> Level:
        """The state from which `move` pushes a box here: the player steps back and pulls; else the same state."""
        step = MOVES[move]
        back, pulled = (self.player[0] - step[0], self.player[1] - step[1]), _plus(self.player, step)
        if not self.free(back):
            return self
        boxes = self.boxes - {pulled} | {self.player} if pulled in self.boxes else self.boxes
        return replace(self, player=back, boxes=boxes)

    def text(self) -> str:
        """The level as text, one line per row."""
        rows = ([(row, column) for column in range(self.columns)] for row in range(self.rows))
        return "\n".join("".join(map(self._sign, row)) for row in rows)

    def _sign(self, cell: Cell) -> str:
        goal = cell in self.goals
        if cell in self.boxes:
            return BOX_ON_GOAL if goal else BOX
        if cell == self.player:
            return PLAYER_ON_GOAL if goal else PLAYER
        return WALL if cell in self.walls else GOAL if goal else FLOOR


def _plus(cell: Cell, step: Cell) -> Cell:
    return cell[0] + step[0], cell[1] + step[1]


def level(seed: int, settings: Settings) -> Level:
    """Level `seed`: boxes on goals, then random pulls, so that a solution exists. Not solved at the start."""
    random = Random(f"sokoban {seed}")
    cells = [(row, column) for row in range(settings.rows) for column in range(settings.columns)]
    for _ in range(_TRIES):
        walls = frozenset(cell for cell in cells if random.random() < settings.walls)
        left = [cell for cell in cells if cell not in walls]
        if len(left) < settings.boxes + 1:
            continue
        *goals, player = random.sample(left, settings.boxes + 1)
        found = Level(settings.rows, settings.columns, walls, frozenset(goals), frozenset(goals), player)
        found = _walked(_pulled(found, random, random.randint(1, settings.pulls)), random)
        if not found.solved:
            return found
    raise ValueError(f"seed {seed} gives no level: use fewer walls or boxes, or more cells")


def _pulled(state: Level, random: Random, pulls: int) -> Level:
    """A state from which pushes lead to `state`: `pulls` pulls before it, or fewer where the player is stuck."""
    for _ in range(50 * pulls):
        earlier = state.before(random.choice(tuple(MOVES)))
        pulls -= earlier.boxes != state.boxes
        state = earlier
        if not pulls:
            break
    return state


def _walked(state: Level, random: Random) -> Level:
    """`state` after a walk without a push, which can be undone."""
    for _ in range(random.randrange(2 * state.rows * state.columns)):
        following = state.after(random.choice(tuple(MOVES)))
        state = following if following.boxes == state.boxes else state
    return state


def solution(start: Level) -> list[str] | None:
    """A shortest list of moves that solves `start`; None if there is none among the first states of the search."""
    came: dict[Level, tuple[Level, str] | None] = {start: None}
    queue = deque([start])
    while queue and len(came) < _MAX_STATES:
        state = queue.popleft()
        if state.solved:
            moves = list[str]()
            while (step := came[state]) is not None:
                state, move = step
                moves.append(move)
            return moves[::-1]
        for move in MOVES:
            following = state.after(move)
            if following not in came:
                came[following] = (state, move)
                queue.append(following)
    return None


class SokobanGame(Game):
    """One level; the reward is 1 once it is solved."""

    Settings = Settings
    alphabet = FLOOR + WALL + BOX + GOAL + PLAYER + BOX_ON_GOAL + PLAYER_ON_GOAL + UNREAD + "\n" + "".join(MOVES)
    rules = RULES

    def start(self, seed: int) -> str:
        self._level = level(seed, self.settings)
        return self._level.text()

    def play(self, answer: str) -> View:
        place = chosen(answer, tuple(MOVES))
        if place is not None:
            self._level = self._level.after(tuple(MOVES)[place])
        solved, text = self._level.solved, self._level.text()
        on_goals = len(self._level.boxes & self._level.goals) / len(self._level.goals)
        parts = {"solved": float(solved), "on_goals": on_goals}
        return View(text if place is not None else f"{UNREAD}\n{text}", solved, float(solved), parts, place is None)

    def choices(self) -> Sequence[str]:
        return tuple(MOVES)

    def advice(self) -> str | None:
        moves = solution(self._level)
        return moves[0] if moves else None


@register("sokoban")
class Sokoban(GameEnvironment):
    """Sokoban, one move per answer."""

    game = SokobanGame
    place: Place = "loop"  # a move takes microseconds


class SokobanSource(GameSource):
    """Levels by seed."""

    name, game = "sokoban", SokobanGame
