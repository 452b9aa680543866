"""Text games: Sokoban, with own rules, levels and teacher; textarena (one player, or several that one policy plays
against itself) and TextWorld, of two packages.

textarena draws from Python's global `random`, which it seeds when a game begins. Here each game has a state of its own,
which is exchanged with the global one during its calls, under a lock. An episode makes its own environment, because
`reset` of some wrappers of textarena keeps earlier observations. Answers go to the game as they are (`[right]`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from jaxroll import disk
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
from jaxroll.errors import ConfigError
from jaxroll.protocols import Place

# --- Sokoban: push all boxes onto goals, with one move or several per answer

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
FLOOR, WALL, BOX, GOAL, PLAYER, BOX_ON_GOAL, PLAYER_ON_GOAL = ".", "#", "$", "G", "@", "*", "+"
SOKOBAN_RULES = (
    "Sokoban: you are @, push every box ($) onto a goal (G). * is a box on a goal, + is you on a goal, # is a wall, "
    "and beyond the edge are walls. You cannot pull a box, nor push two. "
    "Answer with one word: up, down, left or right.\n"
)
_TRIES = 200
_MAX_STATES = 20_000  # that the teacher looks at


@dataclass(frozen=True)
class SokobanSettings:
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


def level(seed: int, settings: SokobanSettings) -> Level:
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

    Settings = SokobanSettings
    alphabet = FLOOR + WALL + BOX + GOAL + PLAYER + BOX_ON_GOAL + PLAYER_ON_GOAL + UNREAD + "\n" + "".join(MOVES)
    rules = SOKOBAN_RULES

    def start(self, seed: int) -> str:
        self._level = level(seed, self.settings)
        return self._level.text()

    def play(self, answer: str) -> GameView:
        place = chosen(answer, tuple(MOVES))
        if place is not None:
            self._level = self._level.after(tuple(MOVES)[place])
        solved, text = self._level.solved, self._level.text()
        on_goals = len(self._level.boxes & self._level.goals) / len(self._level.goals)
        parts = {"solved": float(solved), "on_goals": on_goals}
        return GameView(text if place is not None else f"{UNREAD}\n{text}", solved, float(solved), parts, place is None)

    def choices(self) -> Sequence[str]:
        return tuple(MOVES)

    def advice(self) -> str | None:
        moves = solution(self._level)
        return moves[0] if moves else None


class Sokoban(GameEnvironment):
    """Sokoban, one move per answer."""

    game = SokobanGame
    place: Place = "loop"  # a move takes microseconds


class SokobanSource(GameSource):
    """Levels by seed."""

    name, game = "sokoban", SokobanGame


# --- textarena and TextWorld

_GLOBAL_RANDOM = threading.Lock()


@dataclass(frozen=True)
class TextArenaSettings:
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

    Settings = TextArenaSettings

    def __init__(self, settings: TextArenaSettings) -> None:
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

    def play(self, answer: str) -> GameView:
        with self._own_random():
            self._turns_of.append(self._player)
            over, _ = self._env.step(answer)
            if over:
                rewards, info = self._env.close()
                misread = bool((info or {}).get(self._player, {}).get("invalid_move", False))
                earned = {player: float((rewards or {}).get(player, 0.0)) for player in range(self.settings.players)}
                parts = player_parts(self._turns_of, earned) if len(earned) > 1 else {}
                return GameView("", True, earned[0], parts, misread)
            self._player, text = self._seen()
        return GameView(text)

    def _seen(self) -> tuple[int, str]:
        """The player whose turn it is, and the messages that are new to them, without their own answers."""
        player, messages = self._env.get_observation()
        return player, "\n".join(str(text).strip("\n") for sender, text, _ in messages if sender != player)

    def choices(self) -> Sequence[str]:
        return self.settings.moves


class TextArena(GameEnvironment):
    """Environment that plays a game of textarena."""

    game = TextArenaGame


class TextArenaSource(GameSource):
    """A game of textarena by seed."""

    name, game = "textarena", TextArenaGame


# --- TextWorld: household text games, generated and compiled on this machine, one per seed
#
# A game is compiled once (some seconds, by the Inform 7 compiler in the package) and kept in `folder`.

_COMPILER = threading.Lock()  # the generator draws from global state
_PROMPT = ">"


@dataclass(frozen=True)
class TextWorldSettings:
    """Settings of `task.args`: size of the world, length of the quest, style of the texts, folder of compiled games.

    The theme `basic` has short texts with names such as box66; `house` describes rooms at length. With `numbered`, the
    commands that the game accepts are listed after every text, and an answer is the number of one.
    """

    rooms: int = 2
    objects: int = 3
    quest_length: int = 2
    theme: str = "house"
    numbered: bool = False
    folder: str = "~/.cache/jaxroll/textworld"

    def __post_init__(self) -> None:
        if not (1 <= self.rooms <= 30 and 1 <= self.objects <= 60 and 1 <= self.quest_length <= 20):
            raise ValueError("rooms is 1 to 30, objects 1 to 60, quest_length 1 to 20")
        if self.theme not in ("house", "basic"):
            raise ValueError(f"theme is house or basic, not {self.theme}")


def game_file(seed: int, settings: TextWorldSettings) -> Path:
    """The compiled game of `seed`; it is made if the folder does not have it."""
    textworld = library("textworld", "textworld (Linux only)", "textworld")
    library("textworld.generator", "textworld (Linux only)", "textworld")
    size = {name: value for name, value in asdict(settings).items() if name not in ("folder", "numbered")}
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
        options.quest_length, options.grammar.theme = settings.quest_length, settings.theme
        options.kb = textworld.generator.KnowledgeBase.default()  # else each game parses all rules again
        compiled = Path(textworld.generator.compile_game(textworld.generator.make_game(options), options))
        for part in (compiled.with_suffix(".json"), compiled.with_suffix(".ni"), compiled):  # the game last
            if part.exists():
                with disk.replaced(folder / part.name) as draft:
                    shutil.copy(part, draft)
    return path


class TextWorldGame(Game):
    """One household game; the reward is 1 if its quest is done, and the score is a part."""

    Settings = TextWorldSettings

    def __init__(self, settings: TextWorldSettings) -> None:
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
        return self._listed(f"{_plain(self._state.objective)}\n{_plain(self._state.description)}")

    def play(self, answer: str) -> GameView:
        answer = " ".join(answer.split())[:200]
        by_answer = dict(zip(self.choices(), self._state.admissible_commands, strict=True))
        misread = answer not in by_answer
        command = by_answer.get(answer, "look" if self.settings.numbered else answer)
        self._state, _, over = self._env.step(command or "look")
        score, most = self._state.score or 0, self._state.max_score or 1
        text = _plain(self._state.feedback)
        return GameView(
            text if over else self._listed(text),
            bool(over),
            float(bool(self._state.won)),
            {"score": score / most},
            misread,
        )

    def choices(self) -> Sequence[str]:
        commands = self._state.admissible_commands
        return [str(number + 1) for number in range(len(commands))] if self.settings.numbered else commands

    def advice(self) -> str | None:
        policy, commands = self._state.policy_commands, self._state.admissible_commands
        if not policy or not self.settings.numbered:
            return policy[0] if policy else None
        return str(commands.index(policy[0]) + 1) if policy[0] in commands else None

    def _listed(self, text: str) -> str:
        """`text`, and the commands under their numbers if answers are numbers."""
        if not self.settings.numbered:
            return text
        rows = zip(self.choices(), self._state.admissible_commands, strict=True)
        return "\n".join([text, *(f"{number} {command}" for number, command in rows)])

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


def _plain(text: str | None) -> str:
    """Printable ASCII without empty lines, trailing blanks and the prompt at the end."""
    lines = [line.strip() for line in (text or "").encode("ascii", "ignore").decode().splitlines()]
    return "\n".join(line for line in lines if line and line != _PROMPT)


class TextWorld(GameEnvironment):
    """Environment that plays games of TextWorld."""

    game = TextWorldGame
    place = "process"  # its interpreter is C code
    reset_limit_s = 300.0  # a game may have to be compiled


class TextWorldSource(GameSource):
    """Games of TextWorld by seed."""

    name, game = "textworld", TextWorldGame
