"""Figures as SVG files: values with their intervals, one row each, the kinds of a row side by side in colors.

A benchmark writes its figure next to its runs; docs/results shows those that benchmarks/figures/draw.py draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxroll.report import plots
from jaxroll.report.formats import tick
from jaxroll.report.plots import Markup, joined, tag

COLOURS = ("#3b6ea5", "#c8662b", "#4b8f4a", "#8a5aa0", "#7a7a7a")
WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM, KEY = 430, 170, 14, 30, 22, 26, 26
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333} .name{text-anchor:end} .title{font-weight:600}"
    " .tick{text-anchor:middle;fill:#777;font-size:11px} .grid{stroke:#e4e4e4} .at{stroke:#777;stroke-dasharray:4 3}"
    " .bar-line{fill:none;stroke-width:1.5}"
    + "".join(f" .k{i}{{stroke:{colour}}} circle.k{i}{{fill:{colour}}}" for i, colour in enumerate(COLOURS))
)


class Value(NamedTuple):
    """A value with its interval, if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


Rows = Mapping[str, Mapping[str, Value]]  # row → kind → value


class Panel(NamedTuple):
    """One plot; `at` is the value of the line that means "no difference"."""

    title: str
    rows: Rows
    at: float | None = None


def write(path: Path, panels: Sequence[Panel], kinds: Sequence[str], columns: int = 2) -> None:
    """Write the panels in `columns`, with a key to the kinds above them; kinds without a value are left out."""
    if len(kinds) > len(COLOURS):
        raise ValueError(f"{len(kinds)} kinds need more than the {len(COLOURS)} colors: draw fewer in one figure")
    panels = [panel for panel in panels if any(panel.rows.values())]
    height = TOP + ROW * max(len(panel.rows) for panel in panels) + BOTTOM
    lines = -(-len(panels) // columns)
    width, total = WIDTH * min(columns, len(panels)), KEY + height * lines
    key = [
        tag("g", _mark(10 + 90 * i, KEY / 2, i), tag("text", kind, x=18 + 90 * i, y=KEY / 2 + 4))
        for i, kind in enumerate(kinds)
    ]
    drawn = [
        tag("g", _panel(panel, kinds), transform=f"translate({WIDTH * (i % columns)} {KEY + height * (i // columns)})")
        for i, panel in enumerate(panels)
    ]
    paper = tag("rect", width=width, height=total, fill="#ffffff")
    size = {"viewBox": f"0 0 {width} {total}", "width": width, "height": total}
    whole = tag("svg", tag("style", STYLE), paper, *key, *drawn, xmlns="http://www.w3.org/2000/svg", **size)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(whole + "\n", encoding="utf-8")


def _panel(panel: Panel, kinds: Sequence[str]) -> Markup:
    every = [end for row in panel.rows.values() for one in row.values() for end in one if end is not None]
    x = plots.Scale(*plots.padded([*every, *([] if panel.at is None else [panel.at])]), LEFT, WIDTH - RIGHT)
    bottom = TOP + ROW * len(panel.rows)
    parts = [tag("text", panel.title, class_="title", x=LEFT, y=TOP - 12)]
    for value in plots.ticks(x.low, x.high, 5):
        parts.append(tag("line", class_="grid", x1=x(value), x2=x(value), y1=TOP, y2=bottom))
        parts.append(tag("text", tick(value), class_="tick", x=x(value), y=bottom + 15))
    if panel.at is not None:
        parts.append(tag("line", class_="at", x1=x(panel.at), x2=x(panel.at), y1=TOP, y2=bottom))
    shown = [kind for kind in kinds if any(kind in row for row in panel.rows.values())]
    apart = min(5.0, (ROW - 6) / max(len(shown) - 1, 1))
    for number, (name, row) in enumerate(panel.rows.items()):
        middle = TOP + ROW * (number + 0.5)
        parts.append(tag("text", name, class_="name", x=LEFT - 8, y=middle + 4))
        for place, kind in enumerate(shown):
            if one := row.get(kind):
                y, colour = middle + (place - (len(shown) - 1) / 2) * apart, kinds.index(kind)
                parts.append(_interval(x, one, y, colour))
                parts.append(_mark(x(one.value), y, colour, f"{name}, {kind}: {one.value:.4g}"))
    return joined(parts)


def _interval(x: plots.Scale, one: Value, y: float, kind: int) -> Markup:
    if one.low is None or one.high is None:
        return joined([])
    return tag("path", class_=f"bar-line k{kind}", d=f"M{x(one.low):.1f} {y:.1f}H{x(one.high):.1f}")


def _mark(at: float, y: float, kind: int, note: str = "") -> Markup:
    return tag("circle", *([tag("title", note)] if note else []), class_=f"k{kind}", cx=at, cy=y, r=3)
