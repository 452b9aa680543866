"""Sections on work and time: timeline, breakdown of time, token ages, throughput, weights."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxroll.report import activity, plots, summary
from jaxroll.report import plots as svg
from jaxroll.report.activity import Interval, Lane, RunClock, closed, computing, intersection, union
from jaxroll.report.formats import duration, known, number, percent, tick
from jaxroll.report.plots import NOTHING, Frame, Markup, PlottedRun, card, columns, legend, tag
from jaxroll.report.summary import age_histogram, numbers, of_kind
from jaxroll.run_paths import lives_in, names_of_learner

Row = dict[str, Any]
SPARKS = (
    ("loss", "loss"), ("grad_norm", "gradient norm"), ("entropy", "entropy"), ("kl_behaviour", "KL to behavior"),
    ("ess", "effective samples"), ("clip_share", "clipped share"), ("reward_std", "spread of reward"),
    ("groups_without_signal", "groups without signal"), ("age_mean", "mean age"),
    ("value_loss", "critic's loss"), ("value_explained_variance", "explained by the critic"),
    ("logprob_mismatch_max", "log-prob mismatch"), ("padding_waste", "padding"), ("learning_rate", "learning rate"),
)  # fmt: skip


def overlap(view: PlottedRun) -> Markup:
    """The timeline."""
    ends = [span[1] for lane in view.lanes for spans in lane.spans.values() for span in spans]
    if not ends or view.clock(max(ends)) <= 0:
        return NOTHING
    hint = (
        "A few steps close up, and the whole run under them. Zoom with two fingers, with Ctrl and the wheel, or with"
        " + and −; drag to move, or drag the frame over the whole run. The numbers are steps; the last lane shows when"
        " learner and samplers computed at the same time."
    )
    died = [(str(row.get("process")), row["t"]) for row in of_kind(view.run.rows, "restart") if known(row.get("t"))]
    theirs = [(name, t) for one, t in died if one == "learner" for name in names_of_learner(view.run.config)]
    deaths = died + theirs
    figure = timeline(view.lanes, view.steps, view.clock, view.clock(max(ends)), deaths)
    return card("Activity of the processes", hint, key(view.lanes, deaths), figure)


def time_split(view: PlottedRun) -> Markup:
    """Shares of the RL time by role and activity."""
    window = activity.training_window(view.steps)
    if window is None or window[0] == window[1]:
        return NOTHING
    pause_s = sum(end - start for start, end in view.clock.pauses if start < window[1])
    splits = {lane.role: activity.time_split(lane, window, pause_s) for lane in view.lanes}
    kinds = dict.fromkeys(kind for split in splits.values() for kind, seconds in split.items() if seconds > 0)
    rows = [
        part
        for role, split in splits.items()
        for part in (tag("div", role), tag("div", *_segments(split), class_="segments"))
    ]
    hint = f"Over the {duration(window[1] - window[0] - pause_s)} of reinforcement learning."
    if too_little := summary.words(view.figures["alpha"], view.figures["alpha_wanted"]):
        hint += f" {too_little}."
    if view.figures["bottleneck"]:
        hint += f" Bottleneck: {activity.Bottleneck(**view.figures['bottleneck']).text()}."
    keys = legend(*((kind, NAMES.get(kind, kind)) for kind in kinds))
    return card("Time breakdown", hint, keys, tag("div", *rows, class_="split"))


def _segments(split: dict[str, float]) -> list[Markup]:
    total = sum(split.values()) or 1.0
    return [_segment(kind, seconds / total, seconds) for kind, seconds in split.items() if seconds > 0]


def _segment(kind: str, share: float, seconds: float) -> Markup:
    words = percent(share, 0) if share > 0.07 else ""
    note = f"{NAMES.get(kind, kind)}: {duration(seconds)}, {percent(share)}"
    return tag("div", words, class_=f"seg {kind}", style=f"width:{100 * share:.3f}%", title=note)


def ages(view: PlottedRun) -> Markup:
    """The age histogram."""
    drawn = plots.age_histogram(age_histogram(view.steps), view.figures["alpha"])
    hint = "Staleness of a token: the steps between the weights that sampled it and the step that trained on it."
    return card("Age of the trained tokens", hint, drawn) if drawn else NOTHING


def steps_and_tokens(view: PlottedRun) -> Markup:
    """Durations of steps, and tokens per second."""
    return columns(_step_times(view), _throughput(view))


def _step_times(view: PlottedRun) -> Markup:
    drawn = plots.step_times(view.steps)
    keys = legend(("wait", "waits for groups"), ("train", "computes"))
    hint = "The learner's time, stacked; weights are published while it waits for the next step or computes it."
    return card("Seconds of every step", hint, keys, drawn) if drawn else NOTHING


def _throughput(view: PlottedRun) -> Markup:
    drawn = plots.throughput(of_kind(view.run.rows, "stats"), view.steps, view.minutes, "minutes")
    keys = legend(("sampler", "decoded by the sampler"), ("learner", "trained by the learner"))
    return (
        card("Tokens per second", "Learner and samplers over the time of the run.", keys, drawn) if drawn else NOTHING
    )


def weights_card(view: PlottedRun) -> Markup:
    """Weights on their way from the learner to the sampler."""
    measured = lags(of_kind(view.run.rows, "stats"), view.run.history.published)
    drawn = plots.lag_histogram(by_lag(measured))
    if not drawn:
        return NOTHING
    hint = f"{number(len(view.run.history.published))} versions published. " + words(view.steps, view.lanes)
    return card("Weight transfers", hint, drawn)


def health(view: PlottedRun) -> Markup:
    """Small plots of the learner's step metrics."""
    sparks = [spark for name, words in SPARKS if (spark := _spark(view.steps, name, words))]
    hint = "Over all steps, with the last value."
    return card("Training metrics", hint, tag("div", *sparks, class_="sparks")) if sparks else NOTHING


def _spark(steps: Sequence[Row], name: str, words: str) -> Markup:
    values = [(float(row["step"]), float(row[name])) for row in steps if known(row.get(name))]
    if len(values) < 2:
        return NOTHING
    head = tag("div", tag("span", words, class_="muted"), tag("b", number(values[-1][1])), class_="head")
    return tag("div", head, plots.spark(values))


# --- weight lag of the samplers, and the cost of publishing


def lags(stats: Sequence[Row], published: Sequence[tuple[float, str]]) -> list[int]:
    """The lag in each report of a sampler: the newest published step less the step of its weights.

    Reports from before the first weights, and of a lineage that ended, are left out.
    """
    times = [t for t, _ in published]
    found = []
    for row in stats:
        place = bisect_right(times, row["t"]) - 1
        held = _version(row.get("version"))
        newest = _version(published[place][1]) if place >= 0 else None
        if held and newest and held[0] == newest[0] and held[1] <= newest[1]:
            found.append(newest[1] - held[1])
    return found


def by_lag(found: Sequence[int]) -> dict[int, float]:
    """Share of the reports by lag."""
    counts = Counter(found)
    return {lag: counts[lag] / len(found) for lag in sorted(counts)}


def words(steps: Sequence[Row], lanes: Sequence[Lane]) -> str:
    """Median durations of publication (during the learner's next step), fetch and weight swap."""
    times = {"Publishing": [row for row in numbers(steps, "publish_s") if row > 0]}
    for kind, name in (("fetch", "fetching"), ("weight_swap", "swapping weights")):
        times[name] = [end - start for lane in lanes for start, end in lane.spans.get(kind, ())]
    parts = [f"{name} takes {duration(sorted(found)[len(found) // 2])}" for name, found in times.items() if found]
    return ", ".join(parts) + (" (median)." if parts else "")


def _version(text: object) -> tuple[int, int] | None:
    lineage, _, step = str(text).partition(".")
    return (int(lineage), int(step)) if lineage.isdigit() and step.isdigit() else None


# --- off-policy figures by token age

COLOURS = 4  # the last one is for all older ages
MEANS = ("logprob_delta", "kl_behaviour", "clip_share", "ess")
HEADS = (
    "age",
    "tokens computed",
    "reward",
    "|Δ log-prob|",
    "KL(behaviour‖learner)",
    "largest ρ",
    "clipped",
    "effective samples",
)
LINES = (("ess", "effective samples"), ("kl_behaviour", "KL(behaviour‖learner)"), ("clip_share", "clipped share"))


def totals(steps: Sequence[Row]) -> dict[int, dict[str, float | None]]:
    """For each age, over all steps: `tokens`, the largest `ratio_max`, and the means weighted by computed tokens.

    The reward is that of all trained tokens, computed or not, and weighted by these.
    """
    found: dict[int, dict[str, float | None]] = {}
    for age in sorted({int(age) for row in steps for age in _ages(row)}):
        rows = [_ages(row)[str(age)] for row in steps if str(age) in _ages(row)]
        largest = [row["ratio_max"] for row in rows if known(row.get("ratio_max"))]
        found[age] = {
            "tokens": sum(row.get("tokens") or 0 for row in rows),
            "ratio_max": max(largest, default=None),
            "reward": _mean(rows, "reward", "tokens_trained"),
            **{name: _mean(rows, name, "tokens") for name in MEANS},
        }
    return found


def section(view: PlottedRun) -> Markup:
    """The card."""
    found = totals(view.steps)
    if not found:
        return NOTHING
    rows = [tag("tr", *(tag("td", words) for words in _written(age, of)), class_="age") for age, of in found.items()]
    table = tag("table", tag("tr", *(tag("th", head) for head in HEADS)), *rows, class_="by-age")
    keys = legend(*((_colour(age), f"age {age}") for age in found))
    plots = [drawn for name, words in LINES if (drawn := plot(view.steps, name, words))]
    hint = (
        "Distance of the trained policy from the policy that sampled a token. ρ is the ratio of the two probabilities;"
        " the effective samples are the share of the tokens that still counts after weighting by ρ."
    )
    return card("Off-policy by age", hint, tag("div", table, class_="scroll"), keys, tag("div", *plots, class_="two"))


def plot(steps: Sequence[Row], name: str, words: str) -> Markup:
    """One line for each age, over the steps."""
    lines: dict[int, list[svg.Point]] = {}
    for row in steps:
        for age, of in _ages(row).items():
            if known(of.get(name)):
                lines.setdefault(int(age), []).append((float(row["step"]), float(of[name])))
    every = [point for line in lines.values() for point in line]
    if not every:
        return NOTHING
    low, high = svg.padded([y for _, y in every], 0.08)
    xs = [x for x, _ in every]
    frame = Frame.of((min(xs), max(xs)), (max(low, 0.0), high), height=210)
    drawn = [
        svg.line(frame, svg.smoothed(line, len(line) // 40), _colour(age), f"age {age}")
        for age, line in sorted(lines.items())
    ]
    figure = svg.plot(frame, svg.axes(frame, tick, x_name="step"), *drawn, label=f"{words} by age")
    return tag("div", tag("h3", words), figure)


def _ages(row: Row) -> Mapping[str, Row]:
    return row.get("by_age") or {}


def _mean(rows: Sequence[Row], name: str, weight_by: str) -> float | None:
    pairs = [(row[name], row.get(weight_by) or 0) for row in rows if known(row.get(name))]
    weight = sum(tokens for _, tokens in pairs)
    if not pairs:
        return None
    return sum(v * n for v, n in pairs) / weight if weight else sum(v for v, _ in pairs) / len(pairs)


def _written(age: int, of: Mapping[str, float | None]) -> tuple[str, ...]:
    return (
        number(age),
        number(of["tokens"]),
        number(of["reward"]),
        number(of["logprob_delta"]),
        number(of["kl_behaviour"]),
        number(of["ratio_max"]),
        percent(of["clip_share"]),
        percent(of["ess"]),
    )


def _colour(age: int) -> str:
    return f"age-{min(age, COLOURS - 1)}"


# --- timeline: the activity of each role, over the whole run and close up
#
# The lanes are drawn once, in seconds along x; the close-up and the overview are two windows on the same drawing, so
# zooming is a change of `viewBox`. The page's script moves the window; without it the close-up shows what is set here.

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
        class_="timeline",
        data_end=f"{end_s:.3f}",
        data_from=f"{window.start:.3f}",
        data_span=f"{window.span:.3f}",
        data_steps=json.dumps(spans, separators=(",", ":")),
    )


def key(lanes: Sequence[Lane], deaths: Sequence[object]) -> Markup:
    """The meaning of the colors that occur."""
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
