"""The timeline: the activity of each role, over the whole run and close up.

The lanes are drawn once, in seconds along x; the close-up and the overview are two windows on the same drawing, so
zooming is a change of `viewBox`. The page's script moves the window; without it the close-up shows what is set here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxroll.config.derived import lives_in
from jaxroll.report.figures.activity import Interval, Lane, RunClock, closed, computing, intersection, union
from jaxroll.report.page import svg
from jaxroll.report.page.svg import Markup, tag
from jaxroll.report.page.view import legend

Row = dict[str, Any]
LANE_HEIGHT, BAR_HEIGHT = 38, 24
CLOSE_UP_STEPS = 8
CLOSE_UP_S = (4.0, 20.0)
MAX_SPANS = 8000  # of one kind in one lane; beyond it gaps too short to see are filled
NAMES = {
    "wait": "waits for groups", "train": "computes", "publish": "publishes weights",
    "decode": "decodes (trained later)", "decode_other": "decodes (not trained)",
    "fetch": "fetches weights", "weight_swap": "swaps weights", "eval": "evaluates",
    "both": "computes and decodes at once", "warm": "warm start", "compile": "builds and compiles",
    "rest": "nothing reported", "died": "died",
}  # fmt: skip
BOTH = "both"
THIN = frozenset({"fetch", "weight_swap"})  # drawn over a busy bar


@dataclass(frozen=True)
class Window:
    """The first view of the close-up, in seconds of the run."""

    start: float
    span: float


def timeline(
    lanes: Sequence[Lane], steps: Sequence[Row], clock: RunClock, end_s: float, deaths: Sequence[tuple[str, float]] = ()
) -> Markup:
    """The whole figure. `deaths` are (role, unix time) of processes that died."""
    rows = [*lanes, _both(lanes, steps)]
    height = LANE_HEIGHT * len(rows)
    spans = [(round(clock(row["t0"]), 3), round(clock(row["t1"]), 3), row["step"]) for row in steps]
    window = close_up(spans, end_s)
    drawn = [_lane(lane, place, clock, deaths) for place, lane in enumerate(rows)]
    drawing = tag("g", *drawn, id="lanes")
    names = [tag("div", lane.role) for lane in rows]
    close = (_view(drawing, window, height), _step_labels(spans, window), _ticks(window))
    whole = (_view(tag("use", href="#lanes"), Window(0.0, end_s), height), _brush(window, end_s))
    return tag(
        "div",
        tag("div", *names, class_="lane-names"),
        tag("div", *close, class_="detail", tabindex=0, aria_label="Close-up of the timeline"),
        tag("div", tag("div", "whole run"), class_="lane-names small"),
        tag("div", *whole, class_="overview"),
        class_="timeline", data_end=f"{end_s:.3f}", data_from=f"{window.start:.3f}", data_span=f"{window.span:.3f}",
        data_steps=json.dumps(spans, separators=(",", ":")),
    )  # fmt: skip


def key(lanes: Sequence[Lane], deaths: Sequence[object]) -> Markup:
    """The meaning of the colours that occur."""
    kinds = dict.fromkeys(kind for lane in lanes for kind, spans in lane.spans.items() if spans)
    return legend(*((kind, NAMES.get(kind, kind)) for kind in [*kinds, BOTH, *(["died"] if deaths else [])]))


def close_up(spans: Sequence[tuple[float, float, int]], end_s: float) -> Window:
    """A few usual steps from the middle of the run, beginning a little before one of them; all of it before any."""
    if not spans:
        return Window(0.0, end_s)
    gaps = sorted(b[0] - a[0] for a, b in pairwise(spans)) or [end_s]
    span = min(max(CLOSE_UP_STEPS * gaps[len(gaps) // 2], CLOSE_UP_S[0]), CLOSE_UP_S[1], end_s)
    start = spans[len(spans) // 2][0] - 0.04 * span
    return Window(max(0.0, min(start, end_s - span)), span)


def _both(lanes: Sequence[Lane], steps: Sequence[Row]) -> Lane:
    decoding = union(part for lane in lanes for part in lane.spans.get("decode", ()))
    return Lane("both at work", {BOTH: intersection(computing(steps), decoding)})


def _lane(lane: Lane, place: int, clock: RunClock, deaths: Sequence[tuple[str, float]]) -> Markup:
    top = place * LANE_HEIGHT + (LANE_HEIGHT - BAR_HEIGHT) / 2
    paths = []
    for kind, spans in lane.spans.items():
        if kind in THIN:
            paths.append(tag("path", class_=f"span {kind}", d=bars(clock.spans(spans), top - 4, 7)))
        else:
            paths.append(tag("path", class_=f"span {kind}", d=bars(clock.spans(spans), top, BAR_HEIGHT)))
    died = "".join(
        f"M{clock(t):.3f} {top - 6:g}v{BAR_HEIGHT + 12}" for process, t in deaths if lives_in(lane.role, process)
    )
    if died:  # a line of pixels, however far the seconds are stretched
        paths.append(tag("path", class_="died", d=died, vector_effect="non-scaling-stroke"))
    return tag("g", *paths)


def bars(intervals: list[Interval], top: float, height: float) -> str:
    """One path of rectangles in seconds × pixels."""
    gap_s = 0.001
    while len(intervals) > MAX_SPANS:
        intervals, gap_s = closed(intervals, gap_s), 2 * gap_s
    return "".join(f"M{a:.3f} {top:g}H{b:.3f}V{top + height:g}H{a:.3f}Z" for a, b in intervals)


def _view(drawing: Markup, window: Window, height: int) -> Markup:
    box = f"{window.start:.3f} 0 {window.span:.3f} {height}"
    return tag("svg", drawing, viewBox=box, preserveAspectRatio="none", height=height, data_height=height)


def _percent(value: float) -> str:
    return f"{100 * value:.3f}%"


def _ticks(window: Window) -> Markup:
    """Seconds under the close-up."""
    values = svg.ticks(window.start, window.start + window.span, 8)
    marks = [tag("span", f"{t:g} s", style=f"left:{_percent((t - window.start) / window.span)}") for t in values]
    return tag("div", *marks, class_="ticks")


def _step_labels(spans: Sequence[tuple[float, float, int]], window: Window) -> Markup:
    """The number of each step over its computation, where there is room."""
    marks = [
        tag("span", str(step), style=f"left:{_percent((a + b - 2 * window.start) / 2 / window.span)}")
        for a, b, step in spans
        if a >= window.start and b <= window.start + window.span and b - a > 0.025 * window.span
    ]
    return tag("div", *marks, class_="steps")


def _brush(window: Window, end_s: float) -> Markup:
    style = f"left:{_percent(window.start / end_s)};width:{_percent(window.span / end_s)}"
    return tag("div", class_="brush", style=style)
