"""The plots of a run, each a function of its figures to SVG; empty markup when there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from jaxroll.policy.limiter import max_age
from jaxroll.report.figures.summary import numbers, wilson
from jaxroll.report.formats import number, percent, points, tick
from jaxroll.report.page import svg
from jaxroll.report.page.svg import Frame, Markup, Point, joined, raw, tag

Row = dict[str, Any]
Score = tuple[float, float, float, float]  # x, accuracy, the 95 % interval
Place = Callable[[Row], float]  # the position of a row on the x axis
NOTHING = raw("")
MAX_BARS = 240
STEP_PARTS = (("wait_s", "wait"), ("train_s", "train"))


def learning(steps: Sequence[Row], evals: Sequence[Row], place: Place, x_name: str) -> Markup:
    """Reward of every step, its moving mean, and held-out accuracy with 95 % intervals."""
    rewards = [(place(row), row["reward_mean"]) for row in steps if row.get("reward_mean") is not None]
    scores = [(place(row), row["accuracy"], *wilson(row["accuracy"], row["n"])) for row in evals]
    xs = [x for x, *_ in (*rewards, *scores)]
    if not xs:
        return NOTHING
    values = [y for _, *several in (*rewards, *scores) for y in several]
    frame = Frame.of(_from_start(xs), _share_range(values), height=290)
    held = [(x, y) for x, y, *_ in scores]
    dots = [svg.dot(frame, at, 4, "heldout dot", _score_note(row)) for at, row in zip(held, evals, strict=True)]
    return svg.plot(
        frame,
        svg.axes(frame, lambda y: percent(y, 0), x_name=x_name),
        svg.line(frame, rewards, "reward faint"),
        svg.line(frame, svg.smoothed(rewards, max(1, len(rewards) // 24)), "reward"),
        svg.line(frame, held, "heldout thin"),
        *(svg.error_bar(frame, x, low, high, "heldout") for x, _, low, high in scores),
        *dots,
        *_ends(frame, scores),
        label=f"Reward and held-out accuracy by {x_name}",
    )


def _score_note(row: Row) -> str:
    low, high = wilson(row["accuracy"], row["n"])
    return f"step {row['step']}: {percent(row['accuracy'])} of {row['n']} (95 %: {percent(low)} to {percent(high)})"


def _ends(frame: Frame, scores: Sequence[Score]) -> list[Markup]:
    """The first and the last score as text, outside the curve between them."""
    if len(scores) < 2:
        return []
    rises = scores[-1][1] >= scores[0][1]
    return [
        _end(frame, scores[0], above=not rises, class_="heldout", dx=-5),
        _end(frame, scores[-1], above=rises, class_="heldout end", dx=5),
    ]


def _end(frame: Frame, score: Score, *, above: bool, class_: str, dx: float) -> Markup:
    x, accuracy, low, high = score
    return svg.caption(frame, (x, high if above else low), percent(accuracy), class_, dx=dx, dy=-6 if above else 15)


def _share_range(values: Sequence[float]) -> Point:
    """A range with air, that does not leave [0, 1] when no value does."""
    low, high = svg.padded(values, 0.09)
    inside = min(values) >= 0 and max(values) <= 1
    return (max(0.0, low), min(1.0, high)) if inside else (low, high)


def _from_start(xs: Sequence[float]) -> Point:
    """From 0 to the last, or from the first where everything up to it would take half of the plot."""
    low, high = min(xs), max(xs) or 1.0
    return (low if low < 0 or 2 * low > high else 0.0, high)


def gain_words(figures: Mapping[str, Any]) -> str:
    """`+26.3 points (95 %: +22.1 to +30.4)`."""
    if figures["accuracy_gain_low"] is None:
        return ""
    low, high = points(figures["accuracy_gain_low"]), points(figures["accuracy_gain_high"])
    return f"{points(figures['accuracy_gain'])} points (95 %: {low} to {high})"


# --- histograms


def age_histogram(histogram: Mapping[int, int], alpha: float) -> Markup:
    """Share of the trained tokens by age, and the bound ⌈α⌉."""
    total = sum(histogram.values())
    if not total:
        return NOTHING
    bound = max_age(alpha)
    last = max(bound, *histogram)
    frame = Frame.of((-0.6, last + 0.95), (0.0, 1.18 * max(histogram.values()) / total), height=220)
    counts = dict.fromkeys(range(bound + 1), 0) | dict(histogram)
    notes = {age: f"{number(count)} tokens of age {age}" for age, count in counts.items()}
    kinds = {age: "bar bad" if age > bound else "bar age" for age in counts}
    bars = [_share_bar(frame, age, count / total, kinds[age], notes[age]) for age, count in counts.items()]
    at = frame.x(bound + 0.5)
    limit = tag("path", class_="limit", d=f"M{at:.1f} {frame.y.end:.1f}V{frame.y.start:.1f}")
    words = tag("text", f"bound: α = {alpha:g}", class_="note muted", x=at + 6, y=frame.y.end + 11)
    axes = svg.axes(frame, lambda y: percent(y, 0), x_name="steps: trained at − sampled at", x_whole=True)
    return svg.plot(frame, axes, *bars, limit, words, label="Trained tokens by age")


def lag_histogram(shares: Mapping[int, float]) -> Markup:
    """Share of a sampler's time by how many steps its weights are behind the newest."""
    if not shares:
        return NOTHING
    last = max(2, *shares)
    frame = Frame.of((-0.6, last + 0.6), (0.0, 1.18 * max(shares.values())), height=220)
    bars = [
        _share_bar(frame, lag, share, "bar publish", f"{percent(share)} of the reports")
        for lag, share in shares.items()
    ]
    name = "steps the sampler's weights are behind the newest, once a second"
    axes = svg.axes(frame, lambda y: percent(y, 0), x_name=name, x_whole=True)
    return svg.plot(frame, axes, *bars, label="Sampler's time by lag of its weights")


def _share_bar(frame: Frame, at: int, share: float, class_: str, note: str) -> Markup:
    words = svg.caption(frame, (at, share), percent(share), "mid", dy=-6)
    return joined([svg.bar(frame, at - 0.36, at + 0.36, 0.0, share, class_, note), words])


# --- over time


def throughput(stats: Sequence[Row], steps: Sequence[Row], place: Place, x_name: str) -> Markup:
    """Tokens per second: decoded by each sampler, trained by the learner."""
    samplers: dict[str, list[Point]] = {}
    for row in stats:
        if row.get("tokens_per_s") is not None and str(row.get("role", "")).startswith("sampler"):
            samplers.setdefault(row["role"], []).append((place(row), row["tokens_per_s"]))
    decoded = [_calmed(line) for line in samplers.values()]
    trained = _calmed([
        (place(b), b["tokens_trained"] / (b["t1"] - a["t1"]))
        for a, b in pairwise(steps) if b["t1"] > a["t1"] and b.get("tokens_trained") is not None
    ])  # fmt: skip
    every = [point for line in (*decoded, trained) for point in line]
    if not every:
        return NOTHING
    busy_from = min((x for x, y in every if y > 0), default=0.0)
    frame = Frame.of(_from_start([busy_from, max(x for x, _ in every)]), (0.0, max(y for _, y in every) * 1.08 or 1.0))
    decoded = [[point for point in line if point[0] >= frame.x.low] for line in decoded]
    drawn = [joined([svg.area(frame, line, "sampler"), svg.line(frame, line, "sampler")]) for line in decoded]
    learner = svg.line(frame, trained, "learner")
    return svg.plot(frame, svg.axes(frame, _short, x_name=x_name), *drawn, learner, label="Tokens per second")


def _calmed(line: Sequence[Point]) -> list[Point]:
    """The line smoothed to about as much detail as the plot has room for."""
    return svg.smoothed(line, len(line) // 60)


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else tick(value)


def step_times(steps: Sequence[Row]) -> Markup:
    """Seconds of every step, stacked: waiting, computing. Publication overlaps the next step."""
    bars = step_bars(steps)
    if not bars:
        return NOTHING
    totals = sorted(sum(parts) for _, _, parts in bars)
    usual = totals[int((len(totals) - 1) * 0.98)]
    top = (
        min(totals[-1], 2.5 * usual) * 1.06 or 1.0
    )  # a first step that waited for compilation must not flatten the rest
    frame = Frame.of((bars[0][0], bars[-1][1]), (0.0, top))
    drawn = [_stack(frame, left, right, parts, top) for left, right, parts in bars]
    return svg.plot(
        frame, svg.axes(frame, lambda y: f"{tick(y)} s", x_name="step"), *drawn, label="Seconds of every step"
    )


def _stack(frame: Frame, left: float, right: float, parts: Sequence[float], top: float) -> Markup:
    waits, computes = (f"{number(part, 2)} s" for part in parts)
    note = f"step {right:g}: waits {waits}, computes {computes}"
    gap, low, drawn = 0.12 * (right - left), 0.0, []
    for part, (_, kind) in zip(parts, STEP_PARTS, strict=True):
        high = min(low + part, top)
        if high > low:
            drawn.append(svg.bar(frame, left + gap, right - gap, low, high, f"bar {kind}", note))
        low = high
    return joined(drawn)


def step_bars(steps: Sequence[Row]) -> list[tuple[float, float, tuple[float, ...]]]:
    """(from, to, mean seconds of wait, train) of each step, or of equal runs of steps when there are many."""
    size = max(1, math.ceil(len(steps) / MAX_BARS))
    runs = [steps[i : i + size] for i in range(0, len(steps), size)]
    means = [tuple(sum(numbers(run, key)) / len(run) for key, _ in STEP_PARTS) for run in runs]
    return [(run[0]["step"] - 1, run[-1]["step"], mean) for run, mean in zip(runs, means, strict=True)]


def spark(values: Sequence[Point]) -> Markup:
    """A small line without axes."""
    ranges = (values[0][0], values[-1][0]), svg.padded([y for _, y in values], 0.1)
    frame = Frame.of(*ranges, width=220, height=54, left=2, right=5, top=4, bottom=4)
    smooth = svg.smoothed(values, len(values) // 40)
    return svg.plot(frame, svg.line(frame, smooth, "learner"), svg.dot(frame, smooth[-1], 2.6, "learner dot"), label="")
