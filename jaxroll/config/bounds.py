"""Types of config values: numbers with the bounds that `parsing.check_bounds` enforces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

MAX_ITEM = 10**15  # far above any number of items drawn, and exact as an index


@dataclass(frozen=True)
class Bounds:
    """Allowed values of a number: `least` ≤ value ≤ `most` and value > `above`, where they are given."""

    least: float | None = None
    most: float | None = None
    above: float | None = None


NonNegativeInt = Annotated[int, Bounds(least=0)]
PositiveInt = Annotated[int, Bounds(least=1)]
ItemIndex = Annotated[int, Bounds(least=0, most=MAX_ITEM)]
NonNegativeFloat = Annotated[float, Bounds(least=0)]
PositiveFloat = Annotated[float, Bounds(above=0)]
UnitFloat = Annotated[float, Bounds(least=0, most=1)]
Seconds = Annotated[float, Bounds(least=1)]
