"""Sections on work and time: timeline, breakdown of time, token ages, throughput, weights."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxroll.report.figures import activity, summary
from jaxroll.report.figures.activity import Lane
from jaxroll.report.figures.summary import age_histogram, numbers, of_kind
from jaxroll.report.formats import duration, known, number, percent, tick
from jaxroll.report.page import plots, svg, timeline
from jaxroll.report.page.svg import Frame, Markup, tag
from jaxroll.report.page.view import NOTHING, View, card, columns, legend

Row = dict[str, Any]
SPARKS = (
    ("loss", "loss"), ("grad_norm", "gradient norm"), ("entropy", "entropy"), ("kl_behaviour", "KL to behaviour"),
    ("ess", "effective samples"), ("clip_share", "clipped share"), ("reward_std", "spread of reward"),
    ("groups_without_signal", "groups without signal"), ("age_mean", "mean age"),
    ("value_loss", "critic's loss"), ("value_explained_variance", "explained by the critic"),
    ("logprob_mismatch_max", "log-prob mismatch"), ("padding_waste", "padding"), ("learning_rate", "learning rate"),
)  # fmt: skip


def overlap(view: View) -> Markup:
    """The timeline."""
    ends = [span[1] for lane in view.lanes for spans in lane.spans.values() for span in spans]
    if not ends or view.clock(max(ends)) <= 0:
        return NOTHING
    hint = (
        "A few steps close up, and the whole run under them. Scroll to zoom, drag to move, or drag the frame over the"
        " whole run. The numbers are steps; the last lane shows when learner and samplers computed at the same time."
    )
    deaths = [(str(row.get("process")), row["t"]) for row in of_kind(view.run.rows, "restart") if known(row.get("t"))]
    figure = timeline.timeline(view.lanes, view.steps, view.clock, view.clock(max(ends)), deaths)
    return card("Activity of the processes", hint, timeline.key(view.lanes, deaths), figure)


def time_split(view: View) -> Markup:
    """Shares of the RL time by what each role was at."""
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
    keys = legend(*((kind, timeline.NAMES.get(kind, kind)) for kind in kinds))
    return card("Time breakdown", hint, keys, tag("div", *rows, class_="split"))


def _segments(split: dict[str, float]) -> list[Markup]:
    total = sum(split.values()) or 1.0
    return [_segment(kind, seconds / total, seconds) for kind, seconds in split.items() if seconds > 0]


def _segment(kind: str, share: float, seconds: float) -> Markup:
    words = percent(share, 0) if share > 0.07 else ""
    note = f"{timeline.NAMES.get(kind, kind)}: {duration(seconds)}, {percent(share)}"
    return tag("div", words, class_=f"seg {kind}", style=f"width:{100 * share:.3f}%", title=note)


def ages(view: View) -> Markup:
    """The age histogram."""
    drawn = plots.age_histogram(age_histogram(view.steps), view.figures["alpha"])
    hint = "Staleness of a token: the steps between the weights that sampled it and the step that trained on it."
    return card("Age of the trained tokens", hint, drawn) if drawn else NOTHING


def steps_and_tokens(view: View) -> Markup:
    """Durations of steps, and tokens per second."""
    return columns(_step_times(view), _throughput(view))


def _step_times(view: View) -> Markup:
    drawn = plots.step_times(view.steps)
    keys = legend(("wait", "waits for groups"), ("train", "computes"))
    hint = "The learner's time, stacked; weights are published while it waits for the next step or computes it."
    return card("Seconds of every step", hint, keys, drawn) if drawn else NOTHING


def _throughput(view: View) -> Markup:
    drawn = plots.throughput(of_kind(view.run.rows, "stats"), view.steps, view.minutes, "minutes")
    keys = legend(("sampler", "decoded by the sampler"), ("learner", "trained by the learner"))
    return (
        card("Tokens per second", "Learner and samplers over the time of the run.", keys, drawn) if drawn else NOTHING
    )


def weights_card(view: View) -> Markup:
    """Weights on their way from the learner to the sampler."""
    measured = lags(of_kind(view.run.rows, "stats"), view.run.history.published)
    drawn = plots.lag_histogram(by_lag(measured))
    if not drawn:
        return NOTHING
    hint = f"{number(len(view.run.history.published))} versions published. " + words(view.steps, view.lanes)
    return card("Weight transfers", hint, drawn)


def health(view: View) -> Markup:
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
    "age", "tokens computed", "reward", "|Δ log-prob|", "KL(behaviour‖learner)", "largest ρ", "clipped",
    "effective samples",
)  # fmt: skip
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


def section(view: View) -> Markup:
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
    drawn = [svg.line(frame, svg.smoothed(line, len(line) // 40), _colour(age)) for age, line in sorted(lines.items())]
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
        number(age), number(of["tokens"]), number(of["reward"]), number(of["logprob_delta"]),
        number(of["kl_behaviour"]), number(of["ratio_max"]), percent(of["clip_share"]), percent(of["ess"]),
    )  # fmt: skip


def _colour(age: int) -> str:
    return f"age-{min(age, COLOURS - 1)}"
