"""The plots of a run, each a function of its figures to SVG, and their parts: scales, axes, marks."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxroll.policy.limiter import max_age
from jaxroll.report import activity
from jaxroll.report.activity import Lane, RunClock
from jaxroll.report.formats import known, number, percent, points, tick
from jaxroll.report.record import Run
from jaxroll.report.summary import evaluations, numbers, pauses, trained_steps, wilson

# --- Parts of a plot as SVG: scales, axes, marks. Colors are CSS classes, for light and dark pages
#
# Coordinates in the names: x and y are data, a frame maps them to the pixels of its viewBox.

Point = tuple[float, float]
MAX_POINTS = 1500  # of one line: more than the pixels of a plot add bytes and no ink


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] to [start, end], linearly."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / span if span else 0.5)


@dataclass(frozen=True)
class Frame:
    """A plot of `width` × `height` with its margins; x and y are the scales of its inner rectangle."""

    width: float
    height: float
    x: Scale
    y: Scale

    @classmethod
    def of(
        cls,
        x_range: Point,
        y_range: Point,
        *,
        width: float = 560,
        height: float = 250,
        left: float = 46,
        right: float = 14,
        top: float = 12,
        bottom: float = 34,
    ) -> Frame:
        """The frame that shows these ranges."""
        return cls(width, height, Scale(*x_range, left, width - right), Scale(*y_range, height - bottom, top))


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten, `about` as many as asked for."""
    rough = (high - low) / max(about, 1)
    if not rough > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def padded(values: Sequence[float], share: float = 0.06) -> Point:
    """The range of the values with some air; a range of one value gets width."""
    low, high = min(values), max(values)
    air = (high - low) * share or abs(high) * share or 1.0
    return (low - air, high + air)


def thinned(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about `limit` points: means of equal runs of points."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / limit)
    runs = (points[i : i + size] for i in range(0, len(points), size))
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def smoothed(points: Sequence[Point], reach: int) -> list[Point]:
    """Each y replaced by the mean of its neighbors, up to `reach` on either side."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    smooth = []
    for i, (x, _) in enumerate(points):
        low, high = max(0, i - reach), min(len(points), i + reach + 1)
        smooth.append((x, (sums[high] - sums[low]) / (high - low)))
    return smooth


# --- marks


def plot(frame: Frame, *children: object, label: str) -> Markup:
    """The frame as a figure's drawing; `label` is read to those who cannot see it, its scales by the page's script."""
    size = f"0 0 {frame.width:g} {frame.height:g}"
    x, y = (f"{of.low:.6g} {of.high:.6g} {of.start:g} {of.end:g}" for of in (frame.x, frame.y))
    return tag("svg", *children, class_="plot", viewBox=size, role="img", aria_label=label, data_x=x, data_y=y)


def axes(
    frame: Frame,
    y_text: Callable[[float], str] = tick,
    *,
    x_name: str = "",
    x_about: int = 6,
    y_about: int = 5,
    x_whole: bool = False,
) -> Markup:
    """Horizontal grid lines with their values, the values along x, and the name of x."""
    x, y = frame.x, frame.y
    parts = []
    for value in ticks(y.low, y.high, y_about):
        parts.append(tag("line", class_="grid", x1=x.start, x2=x.end, y1=y(value), y2=y(value)))
        parts.append(tag("text", y_text(value), class_="tick end", x=x.start - 7, y=y(value) + 3.5))
    for value in ticks(x.low, x.high, x_about):
        if not x_whole or float(value).is_integer():
            parts.append(tag("text", tick(value), class_="tick mid", x=x(value), y=y.start + 15))
    if x_name:
        parts.append(tag("text", x_name, class_="tick mid name", x=(x.start + x.end) / 2, y=frame.height - 3))
    return joined(parts)


def line(frame: Frame, points: Sequence[Point], class_: str, name: str | None = None) -> Markup:
    """The points joined; a single point becomes a dot. The values of a line with a `name` are shown at the pointer."""
    if len(points) == 1:
        return dot(frame, points[0], 2.5, class_ + " dot")
    drawn = thinned(points)
    return tag("path", class_=f"line {class_}", d=_path(frame, drawn), data_name=name) if points else raw("")


def area(frame: Frame, points: Sequence[Point], class_: str, floor: float = 0.0) -> Markup:
    """The area under the line."""
    if len(points) < 2:
        return raw("")
    few = thinned(points)
    base = frame.y(max(floor, frame.y.low))
    d = f"{_path(frame, few)}L{frame.x(few[-1][0]):.1f} {base:.1f}L{frame.x(few[0][0]):.1f} {base:.1f}Z"
    return tag("path", class_=f"area {class_}", d=d)


def _path(frame: Frame, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in points)


def dot(frame: Frame, point: Point, radius: float, class_: str, note: str = "") -> Markup:
    """One point; `note` is shown when the pointer rests on it."""
    notes = [tag("title", note)] if note else []
    return tag("circle", *notes, class_=class_, cx=frame.x(point[0]), cy=frame.y(point[1]), r=radius)


def error_bar(frame: Frame, x: float, low: float, high: float, class_: str) -> Markup:
    """An interval at x, with caps."""
    at, a, b, cap = frame.x(x), frame.y(low), frame.y(high), 3.5
    d = f"M{at:.1f} {a:.1f}V{b:.1f}M{at - cap:.1f} {a:.1f}h{2 * cap}M{at - cap:.1f} {b:.1f}h{2 * cap}"
    return tag("path", class_=f"bar-line {class_}", d=d)


def bar(frame: Frame, left: float, right: float, low: float, high: float, class_: str, note: str = "") -> Markup:
    """A rectangle between data coordinates."""
    notes = [tag("title", note)] if note else []
    x, y = frame.x(left), frame.y(high)
    return tag("rect", *notes, class_=class_, x=x, y=y, width=max(frame.x(right) - x, 0.5), height=frame.y(low) - y)


def caption(frame: Frame, point: Point, words: str, class_: str = "", dx: float = 0.0, dy: float = 0.0) -> Markup:
    """Text next to a point."""
    return tag("text", words, class_=f"note {class_}", x=frame.x(point[0]) + dx, y=frame.y(point[1]) + dy)


# --- HTML and SVG values: text that is not `Markup` is escaped
#
# Text of a model is hostile. Only `tag`, `joined` and `raw` make Markup, and `raw` is for literals of this package.

VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


class Markup(str):
    """A string that is markup already."""


def raw(literal: str) -> Markup:
    """`literal` as markup; never give it anything read from a file."""
    return Markup(literal)


def text(value: object) -> Markup:
    """`value` as text: escaped, with control characters shown by their symbols and lone surrogates replaced."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape("".join(map(_printable, str(value)))))


def _printable(char: str) -> str:
    code = ord(char)
    if code < 0x20 and char not in "\n\t":
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if 0x80 <= code < 0xA0 or 0xD800 <= code < 0xE000 or code & 0xFFFE == 0xFFFE:
        return "\ufffd"
    return char


def joined(parts: Iterable[object]) -> Markup:
    """The parts one after another."""
    return Markup("".join(map(text, parts)))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """The element `name`. `class_` is class, underscores are hyphens; None and False leave an attribute out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value not in (None, False))
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(children)}</{name}>")


def _attribute(key: str, value: object) -> str:
    name = key.removesuffix("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{text(_rounded(value))}"'


def _rounded(value: object) -> object:
    """Coordinates to a hundredth: what an eye can see, and no more bytes than that."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


# --- parts of the page's sections: the run with its figures, and the card around a section

Row = dict[str, Any]
NOTHING = raw("")


@dataclass(frozen=True)
class PlottedRun:
    """A run with what several sections need of it. `steps` and `evals` have one row each per step."""

    run: Run
    figures: Mapping[str, Any]
    steps: Sequence[Row]
    evals: Sequence[Row]
    lanes: Sequence[Lane]
    clock: RunClock

    def minutes(self, row: Row) -> float:
        """The position of a row in the run's time."""
        return self.clock(row.get("t1") or row["t"]) / 60


def view_of(run: Run, figures: Mapping[str, Any]) -> PlottedRun:
    """The view of `run` that the page shows."""
    steps = trained_steps(run.rows)
    times = [row["t"] for row in run.rows if known(row.get("t"))]
    origin = run.created_s if run.created_s is not None else min(times, default=0.0)
    clock = RunClock(origin, tuple(pauses(run.rows, steps)))
    lanes = activity.lanes(run.rows, steps, run.history.acked_groups)
    return PlottedRun(run, figures, steps, evaluations(run.rows), lanes, clock)


def card(title: str, hint: str, *content: object) -> Markup:
    """A section with a title and a sentence."""
    hints = [tag("p", hint, class_="hint")] if hint else []
    return tag("section", tag("h2", title), *hints, *content, class_="card")


def legend(*entries: tuple[str, str]) -> Markup:
    """(class of the color, meaning)."""
    return tag("div", *(tag("span", tag("i", class_=f"key {kind}"), words) for kind, words in entries), class_="legend")


def columns(*cards: Markup) -> Markup:
    """Cards side by side where the window is wide enough; those that are nothing are left out."""
    shown = [one for one in cards if one]
    return tag("div", *shown, class_="two") if shown else NOTHING


def figures_row(*entries: tuple[str, str]) -> Markup:
    """(value, what it is) as large figures."""
    return tag(
        "div",
        *(tag("div", tag("b", value), tag("span", words), class_="figure") for value, words in entries),
        class_="figures",
    )


# --- The plots of a run, each a function of its figures to SVG, and their parts

Score = tuple[float, float, float, float]  # x, accuracy, the 95 % interval
Place = Callable[[Row], float]  # the position of a row on the x axis
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
    dots = [dot(frame, at, 4, "heldout dot", _score_note(row)) for at, row in zip(held, evals, strict=True)]
    return plot(
        frame,
        axes(frame, lambda y: percent(y, 0), x_name=x_name),
        line(frame, rewards, "reward faint", "reward"),
        line(frame, smoothed(rewards, max(1, len(rewards) // 24)), "reward", "moving mean"),
        line(frame, held, "heldout thin", "held-out accuracy"),
        *(error_bar(frame, x, low, high, "heldout") for x, _, low, high in scores),
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
    return caption(frame, (x, high if above else low), percent(accuracy), class_, dx=dx, dy=-6 if above else 15)


def _share_range(values: Sequence[float]) -> Point:
    """A range with air, that does not leave [0, 1] when no value does."""
    low, high = padded(values, 0.09)
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
    sides = axes(frame, lambda y: percent(y, 0), x_name="steps: trained at − sampled at", x_whole=True)
    return plot(frame, sides, *bars, limit, words, label="Trained tokens by age")


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
    sides = axes(frame, lambda y: percent(y, 0), x_name=name, x_whole=True)
    return plot(frame, sides, *bars, label="Sampler's time by lag of its weights")


def _share_bar(frame: Frame, at: int, share: float, class_: str, note: str) -> Markup:
    words = caption(frame, (at, share), percent(share), "mid", dy=-6)
    return joined([bar(frame, at - 0.36, at + 0.36, 0.0, share, class_, note), words])


# --- over time


def throughput(stats: Sequence[Row], steps: Sequence[Row], place: Place, x_name: str) -> Markup:
    """Tokens per second: decoded by each sampler, trained by the learner."""
    samplers: dict[str, list[Point]] = {}
    for row in stats:
        if row.get("tokens_per_s") is not None and str(row.get("role", "")).startswith("sampler"):
            samplers.setdefault(row["role"], []).append((place(row), row["tokens_per_s"]))
    decoded = {role: _calmed(line) for role, line in samplers.items()}
    trained = _calmed(
        [
            (place(b), b["tokens_trained"] / (b["t1"] - a["t1"]))
            for a, b in pairwise(steps)
            if b["t1"] > a["t1"] and b.get("tokens_trained") is not None
        ]
    )
    every = [point for line in (*decoded.values(), trained) for point in line]
    if not every:
        return NOTHING
    busy_from = min((x for x, y in every if y > 0), default=0.0)
    frame = Frame.of(_from_start([busy_from, max(x for x, _ in every)]), (0.0, max(y for _, y in every) * 1.08 or 1.0))
    decoded = {role: [point for point in line if point[0] >= frame.x.low] for role, line in decoded.items()}
    drawn = [
        joined([area(frame, points, "sampler"), line(frame, points, "sampler", role)])
        for role, points in decoded.items()
    ]
    learner = line(frame, trained, "learner", "learner")
    return plot(frame, axes(frame, _short, x_name=x_name), *drawn, learner, label="Tokens per second")


def _calmed(line: Sequence[Point]) -> list[Point]:
    """The line smoothed to about as much detail as the plot has room for."""
    return smoothed(line, len(line) // 60)


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
    return plot(frame, axes(frame, lambda y: f"{tick(y)} s", x_name="step"), *drawn, label="Seconds of every step")


def _stack(frame: Frame, left: float, right: float, parts: Sequence[float], top: float) -> Markup:
    waits, computes = (f"{number(part, 2)} s" for part in parts)
    note = f"step {right:g}: waits {waits}, computes {computes}"
    gap, low, drawn = 0.12 * (right - left), 0.0, []
    for part, (_, kind) in zip(parts, STEP_PARTS, strict=True):
        high = min(low + part, top)
        if high > low:
            drawn.append(bar(frame, left + gap, right - gap, low, high, f"bar {kind}", note))
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
    ranges = (values[0][0], values[-1][0]), padded([y for _, y in values], 0.1)
    frame = Frame.of(*ranges, width=220, height=54, left=2, right=5, top=4, bottom=4)
    smooth = smoothed(values, len(values) // 40)
    return plot(frame, line(frame, smooth, "learner", ""), dot(frame, smooth[-1], 2.6, "learner dot"), label="")
