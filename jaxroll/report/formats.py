"""Formatting of figures and tables for people; a dash for an unknown value."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from rich.console import Console
from rich.table import Table
from rich.text import Text

UNKNOWN = "–"


def known(value: object) -> TypeGuard[float]:
    """True if `value` is a finite number."""
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
    """A round value next to an axis."""
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


# --- titled tables: drawn on a terminal, plain aligned lines elsewhere, so that `grep` and `less` work

_GAP = "  "


@dataclass(frozen=True)
class Section:
    """A table with a title; without headings it is pairs of name and value. `note` is below it."""

    title: str
    headings: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = field(default_factory=list)
    note: str = ""
    right: frozenset[int] = frozenset()  # columns of numbers


def show(sections: Sequence[Section], console: Console) -> None:
    """Print the sections that have rows or a note."""
    for section in sections:
        if section.rows or section.note:
            if console.is_terminal:
                _draw(section, console)
            else:
                console.file.write("\n".join(plain(section)) + "\n")


def plain(section: Section) -> list[str]:
    """The lines of a section without a terminal: every cell on one line, columns aligned except the last."""
    rows = [tuple(safe(cell).replace("\n", "\\n") for cell in row) for row in section.rows]
    lines = [f"== {section.title}"] if section.title else []
    table = [section.headings, *rows] if section.headings else rows
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))] if table else []
    for row in table:
        cells = [
            c.rjust(w) if i in section.right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(_GAP.join(cells).rstrip())
    return [*lines, *([safe(section.note)] if section.note else []), ""]


def _draw(section: Section, console: Console) -> None:
    if section.title:
        console.print(Text(section.title, style="bold"))
    table = Table(box=None, pad_edge=False, show_header=bool(section.headings), header_style="dim")
    width = len(section.headings) or max((len(row) for row in section.rows), default=0)
    for i in range(width):
        heading = section.headings[i] if section.headings else ""
        style = "dim" if i == 0 and not section.headings else None
        table.add_column(heading, justify="right" if i in section.right else "left", style=style, overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(safe(cell)) for cell in row))
    if section.rows:
        console.print(table)
    if section.note:
        console.print(Text(safe(section.note), style="dim"))
    console.print()


def safe(text: str) -> str:
    """`text` with control characters written out: text of a model must not control the terminal."""
    return "".join(char if char.isprintable() or char in "\n " else repr(char)[1:-1] for char in text)


def short(text: str, length: int = 60) -> str:
    """The beginning of `text` on one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def figures_of_run(found: Mapping[str, Any]) -> list[str]:
    """The figures of a run for a person, by `sim.simulate.figures`."""
    tokens = max(sum(found["age_hist"].values()), 1)
    ages = ", ".join(f"{age}: {count / tokens:.0%}" for age, count in found["age_hist"].items())
    cost = found.get("cost_per_million_tokens")
    return [
        f"step time    {found['step_s']:.3f} s (median {found['step_s_median']:.3f} s, {found['steps']} steps)",
        f"throughput   {found['tokens_per_s']:.1f} trained tokens/s, {found['samples_per_s']:.2f} samples/s",
        f"utilization  samplers {found['sampler_busy']:.0%}, learner {found['learner_busy']:.0%}",
        f"waits        learner {found['learner_wait']:.0%} of the time",
        f"staleness    mean {found['age_mean']:.2f}, largest {found['age_max']} ({ages})",
        *([f"cost         {cost:.4g} per million trained tokens"] if cost else []),
    ]
