"""How figures are written for a person; a dash where nothing is known."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TypeGuard

UNKNOWN = "–"


def known(value: object) -> TypeGuard[float]:
    """Whether `value` is a number one can show."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def percent(share: float | None, digits: int = 1) -> str:
    """0.4712 as `47.1 %`."""
    return f"{100 * share:.{digits}f} %" if known(share) else UNKNOWN


def points(difference: float | None, digits: int = 1) -> str:
    """0.213 as `+21.3`: a difference of shares in percentage points."""
    return f"{100 * difference:+.{digits}f}".replace("-", "−") if known(difference) else UNKNOWN


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits; thousands are set apart, and integers stay whole."""
    if not known(value):
        return UNKNOWN
    if value == 0 or (float(value).is_integer() and abs(value) < 1e15):
        return f"{value:,.0f}".replace("-", "−")
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size >= 15:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    return f"{value:,.{max(0, digits - 1 - size)}f}".replace("-", "−")


def tick(value: float) -> str:
    """A round value beside an axis."""
    return f"{value:,.10g}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """`4 min 12 s`, `12.3 s`, `2 h 05 min`."""
    if not known(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def moment(unix_s: float | None) -> str:
    """A date and a time of day, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if known(unix_s) else UNKNOWN


def mesh(axes: Mapping[str, int]) -> str:
    """`fsdp 2 × tensor 2`; axes of one device are left out."""
    return " × ".join(f"{name} {size}" for name, size in axes.items() if size != 1) or "1 device"
