"""A small shop: search, look at items, buy the one that fits the wish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from jaxroll.envs.adapters.games import UNREAD, Game, GameEnvironment, GameSource, View
from jaxroll.envs.registry import register
from jaxroll.protocols import Place

KINDS, COLOURS = ("mug", "hat", "pen", "bag"), ("red", "tan", "sky", "oak")
RULES = (
    "Buy what the first line wishes: kind, colour and the highest price. Answers: search KIND lists items by number, "
    "open NUMBER shows colour and price of an item, buy NUMBER ends the game.\n"
)


@dataclass(frozen=True)
class Settings:
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

    Settings = Settings
    alphabet = "".join(KINDS + COLOURS) + "search open buy <?\n0123456789"
    rules = RULES
    hidden = True  # the shelves differ for one wish

    def start(self, seed: int) -> str:
        random = Random(f"shop {seed}")
        self._shelf = [
            Goods(kind, random.choice(COLOURS), random.randint(1, 9))
            for kind in KINDS
            for _ in range(self.settings.items)
        ]
        self._wanted = random.choice(self._shelf)  # so one item fits
        self._limit = self._wanted.price + 1
        self._found: list[Goods] = []
        self._opened: list[Goods] = []
        return f"{self._wanted.kind} {self._wanted.colour} <{self._limit}"

    def play(self, answer: str) -> View:
        verb, _, word = answer.strip().lower().partition(" ")
        if verb == "search" and word in KINDS:
            self._found, self._opened = [goods for goods in self._shelf if goods.kind == word], []
            return View("\n".join(f"{number} {goods.kind}" for number, goods in enumerate(self._found, 1)))
        item = self._numbered(word)
        if item is None or verb not in ("open", "buy"):
            return View(UNREAD, misread=True)
        if verb == "open":
            self._opened.append(item)
            return View(f"{item.colour} {item.price}")
        kind, colour, price = self._fits(item)
        parts = {"kind": float(kind), "colour": float(colour), "price": float(price)}
        return View("", True, float(kind and colour and price), parts)

    def _numbered(self, word: str) -> Goods | None:
        number = int(word) if word.isascii() and word.isdigit() and len(word) < 3 else 0
        return self._found[number - 1] if 1 <= number <= len(self._found) else None

    def _fits(self, item: Goods) -> tuple[bool, bool, bool]:
        return item.kind == self._wanted.kind, item.colour == self._wanted.colour, item.price < self._limit

    def choices(self) -> Sequence[str]:
        numbers = range(1, len(self._found) + 1)
        return [*(f"search {kind}" for kind in KINDS), *(f"{verb} {n}" for verb in ("open", "buy") for n in numbers)]

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


@register("shop")
class Shop(GameEnvironment):
    """The shop."""

    game = ShopGame
    place: Place = "loop"  # an answer takes microseconds


class ShopSource(GameSource):
    """Wishes by seed."""

    name, game = "shop", ShopGame
