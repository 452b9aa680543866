"""Base of the adapters: a game that shows text, takes text, and is determined by its seed; a shop as the smallest one.

A subclass of `Game` holds the rules; `GameEnvironment` plays it in an episode, and `GameSource` makes one task of each
seed, with the play of a teacher for the warm start. Index and seed are the same number, so the members of a group play
the same game, and held-out games are never trained on.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from jaxroll.config import TaskConfig
from jaxroll.config.derived import is_compact
from jaxroll.data.sources import PRINTABLE
from jaxroll.envs.registry import identity, settings_given, settings_of, share
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import Place, StepResult
from jaxroll.records import Item, Message, Task
from jaxroll.rewards.scoring_pool import ScoringPool

MAX_TURNS = 32
UNREAD = "?"  # begins the view after an answer without a move


@dataclass(frozen=True)
class GameView:
    """The state after an answer: its text, whether the game is over, the reward so far, and parts of the reward.

    `misread` marks an answer without a move; `role` is the sender of the text.
    """

    text: str
    over: bool = False
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    misread: bool = False
    role: str = "user"


class Game(ABC):
    """One game; `settings` is made from `task.args`."""

    Settings: ClassVar[type]
    alphabet: ClassVar[str] = PRINTABLE  # all characters of views and moves
    rules = ""  # the text before the first view in full prompts
    hidden = False  # True if games with different seeds can begin with the same view
    settings: Any

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def question(self, view: str) -> str:
        """The full prompt of a game that begins with `view`."""
        return self.rules + view

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of tools, which full prompts show through the chat template."""
        return ()

    @abstractmethod
    def start(self, seed: int) -> str:
        """The first view of the game `seed`, which begins."""

    @abstractmethod
    def play(self, answer: str) -> GameView:
        """The view after `answer`."""

    def choices(self) -> Sequence[str]:
        """The moves of the teacher's random play; none if there is no such list."""
        return ()

    def advice(self) -> str | None:
        """A good move; None if the game knows none."""
        return None

    def close(self) -> None:
        """Release resources; may be called again."""
        return None


class GameEnvironment:
    """Environment that plays `game`; after `max_turns` answers the episode ends with the reward so far."""

    game: ClassVar[type[Game]]
    place: Place = "thread"
    step_limit_s = 60.0

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        args = settings_given(config)
        share(args, "noise")
        _count(args, "games")
        self._turns = self.max_turns = _count(args, "max_turns") or MAX_TURNS
        self._settings = settings_of(self.game.Settings, args)
        self._game: Game | None = None
        self._taken = self._misread = 0

    def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The task's messages; the game begins from the seed of the task."""
        self.close()
        self._game = self.game(self._settings)
        self._game.start(int(task.args()["seed"]))
        self._taken = self._misread = 0
        return task.messages

    def step(self, answer: str) -> StepResult:
        """The view after one answer, or the end of the episode with its reward."""
        if self._game is None:
            raise DataError("step() before reset(): there is no game")
        view = self._game.play(answer)
        self._taken, self._misread = self._taken + 1, self._misread + view.misread
        if not view.over and self._taken < self._turns:
            return StepResult(done=False, messages=(Message(view.role, view.text),))
        parts = {**view.parts, "turns": float(self._taken), "misread": float(self._misread)}
        return StepResult(done=True, reward=view.reward, reward_parts=parts)

    def close(self) -> None:
        """End the game."""
        game, self._game = self._game, None
        if game is not None:
            game.close()


class GameSource:
    """Games by seed: without an end, or `games` of them, which are played again and again.

    `task.args`: the settings of the game, `max_turns`, `games`, and `noise`, the share of random moves in the play of
    the teacher, who otherwise takes the game's advice.
    """

    name: ClassVar[str]
    game: ClassVar[type[Game]]

    def __init__(self, cfg: TaskConfig) -> None:
        args = settings_given(cfg)
        self._noise = share(args, "noise")
        self._turns = _count(args, "max_turns") or MAX_TURNS
        self.size = _count(args, "games")
        self._settings = settings_of(self.game.Settings, args)
        self._as_compact = is_compact(cfg)
        self.game(self._settings).close()  # refuses a missing package before the run begins
        self.identity = identity(self.name, cfg)

    def item(self, index: int) -> Item:
        """Game `index`."""
        game = self.game(self._settings)
        try:
            view = game.start(index)
            question = game.question(view)
            return Item(
                question=question,
                compact=f"{view}\n{index}" if game.hidden else view,  # identifies the question
                answer=None,
                env_args={"seed": index, **({"tools": [*game.tools]} if game.tools and not self._as_compact else {})},
                worked=self._worked(game, index),
                messages=(Message("user", view if self._as_compact else question),),
            )
        finally:
            game.close()

    def alphabet(self) -> str:
        """The characters of views and moves; printable ASCII too for full prompts."""
        return "".join(sorted(set(self.game.alphabet + ("" if self._as_compact else PRINTABLE))))

    def _worked(self, game: Game, index: int) -> tuple[Message, ...]:
        """The teacher's play from the current state: answers and views in turn, an answer first and last."""
        random, messages = Random(f"teacher {index}"), list[Message]()
        for _ in range(self._turns):
            choices = game.choices()
            anything = random.choice(choices) if choices else None
            advice = None if random.random() < self._noise and choices else game.advice()
            move = anything if advice is None else advice
            if move is None:
                break
            messages.append(Message("assistant", move))
            view = game.play(move)
            if view.over:
                break
            messages.append(Message(view.role, view.text))
        return tuple(messages[:-1] if messages and messages[-1].role != "assistant" else messages)


def _count(args: dict[str, Any], name: str) -> int | None:
    """Remove the number `name` from `args` and return it; None if it is not there."""
    if name not in args:
        return None
    count = args.pop(name)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(
            f"task.args.{name}", count, "it must be an integer above 0", f"Give {MAX_TURNS}, for example."
        )
    return count


def library(name: str, package: str, extra: str) -> Any:
    """The module `name` of an optional package. ConfigError that names the extra where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # packages fail at import in several ways
        reason = f"it needs {package}, which cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError("task.env", package, reason, f"pip install 'jaxroll[{extra}]'.") from error


def player_parts(players: Sequence[int], earned: Mapping[int, float]) -> dict[str, float]:
    """Reward parts of a game of several players: `player.p` of each player, and `turn.k` of each turn of a player.

    `players` are the players of the turns in order.
    """
    parts = {f"player.{player}": reward for player, reward in earned.items()}
    return parts | {f"turn.{turn}": earned[player] for turn, player in enumerate(players)}


def chosen(answer: str, labels: Sequence[str]) -> int | None:
    """The position of the label that `answer` is, or else of the last label that it contains as a word; or None."""
    text = answer.strip().lower()
    lowered = [label.lower() for label in labels]
    if text in lowered:
        return lowered.index(text)
    words = "".join(char if char.isalnum() or char in "_-" else " " for char in text).split()
    return next((lowered.index(word) for word in reversed(words) if word in lowered), None)


# --- The smallest game of its own: a shop. Search, look at items, buy the one that fits the wish

SHOP_KINDS, COLOURS = ("mug", "hat", "pen", "bag"), ("red", "tan", "sky", "oak")
SHOP_RULES = (
    "Buy what the first line wishes: kind, color and the highest price. Answers: search KIND lists items by number, "
    "open NUMBER shows color and price of an item, buy NUMBER ends the game.\n"
)


@dataclass(frozen=True)
class ShopSettings:
    """Settings of `task.args`: items of each kind in the shop."""

    items: int = 3

    def __post_init__(self) -> None:
        if not 2 <= self.items <= 9:
            raise ValueError("items is 2 to 9")


@dataclass(frozen=True)
class Goods:
    """An item of the shop."""

    kind: str
    colour: str
    price: int


class ShopGame(Game):
    """One wish; the reward is 1 for an item that fits, and parts say which attributes do."""

    Settings = ShopSettings
    alphabet = "".join(SHOP_KINDS + COLOURS) + "search open buy <?\n0123456789"
    rules = SHOP_RULES
    hidden = True  # the shelves differ for one wish

    def start(self, seed: int) -> str:
        random = Random(f"shop {seed}")
        self._shelf = [
            Goods(kind, random.choice(COLOURS), random.randint(1, 9))
            for kind in SHOP_KINDS
            for _ in range(self.settings.items)
        ]
        self._wanted = random.choice(self._shelf)  # so one item fits
        self._limit = self._wanted.price + 1
        self._found: list[Goods] = []
        self._opened: list[Goods] = []
        return f"{self._wanted.kind} {self._wanted.colour} <{self._limit}"

    def play(self, answer: str) -> GameView:
        verb, _, word = answer.strip().lower().partition(" ")
        if verb == "search" and word in SHOP_KINDS:
            self._found, self._opened = [goods for goods in self._shelf if goods.kind == word], []
            return GameView("\n".join(f"{number} {goods.kind}" for number, goods in enumerate(self._found, 1)))
        item = self._numbered(word)
        if item is None or verb not in ("open", "buy"):
            return GameView(UNREAD, misread=True)
        if verb == "open":
            self._opened.append(item)
            return GameView(f"{item.colour} {item.price}")
        kind, colour, price = self._fits(item)
        parts = {"kind": float(kind), "colour": float(colour), "price": float(price)}
        return GameView("", True, float(kind and colour and price), parts)

    def _numbered(self, word: str) -> Goods | None:
        number = int(word) if word.isascii() and word.isdigit() and len(word) < 3 else 0
        return self._found[number - 1] if 1 <= number <= len(self._found) else None

    def _fits(self, item: Goods) -> tuple[bool, bool, bool]:
        return item.kind == self._wanted.kind, item.colour == self._wanted.colour, item.price < self._limit

    def choices(self) -> Sequence[str]:
        numbers = range(1, len(self._found) + 1)
        return [
            *(f"search {kind}" for kind in SHOP_KINDS),
            *(f"{verb} {n}" for verb in ("open", "buy") for n in numbers),
        ]

    def advice(self) -> str:
        """Search the kind, open one item after the other, and buy the first that fits."""
        if not self._found or self._found[0].kind != self._wanted.kind:
            return f"search {self._wanted.kind}"
        for number, goods in enumerate(self._found, 1):
            if goods not in self._opened:
                return f"open {number}"
            if all(self._fits(goods)):
                return f"buy {number}"
        return f"search {self._wanted.kind}"


class Shop(GameEnvironment):
    """The shop as an environment."""

    game = ShopGame
    place: Place = "loop"  # an answer takes microseconds


class ShopSource(GameSource):
    """Wishes by seed."""

    name, game = "shop", ShopGame
