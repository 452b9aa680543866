"""The sections on work and time: the timeline, where the time went, ages, throughput, weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxroll.report import activity, ahead, plots, timeline, weights
from jaxroll.report.formats import duration, known, number, percent
from jaxroll.report.markup import Markup, tag
from jaxroll.report.summary import age_histogram, of_kind
from jaxroll.report.view import NOTHING, View, card, columns, legend

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
        " whole run. The numbers are steps; the last lane shows when both sides were at work."
    )
    deaths = [(str(row.get("who")), row["t"]) for row in of_kind(view.run.rows, "restart") if known(row.get("t"))]
    figure = timeline.timeline(view.lanes, view.steps, view.clock, view.clock(max(ends)), deaths)
    return card("Who was at work, when", hint, timeline.key(view.lanes, deaths), figure)


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
    if too_little := ahead.words(view.figures["alpha"], view.figures["alpha_wanted"]):
        hint += f" {too_little}."
    keys = legend(*((kind, timeline.NAMES.get(kind, kind)) for kind in kinds))
    return card("Where the time went", hint, keys, tag("div", *rows, class_="split"))


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
    hint = "How many steps old the weights were that drew a token, when it was trained on."
    return card("Age of the trained tokens", hint, drawn) if drawn else NOTHING


def steps_and_tokens(view: View) -> Markup:
    """How long steps take, and tokens per second."""
    return columns(_step_times(view), _throughput(view))


def _step_times(view: View) -> Markup:
    drawn = plots.step_times(view.steps)
    keys = legend(("wait", "waits for groups"), ("train", "computes"))
    hint = "The learner's time, stacked; weights are published while it waits for the next step or computes it."
    return card("Seconds of every step", hint, keys, drawn) if drawn else NOTHING


def _throughput(view: View) -> Markup:
    drawn = plots.throughput(of_kind(view.run.rows, "stats"), view.steps, view.minutes, "minutes")
    keys = legend(("sampler", "decoded by the sampler"), ("learner", "trained by the learner"))
    return card("Tokens a second", "Both sides of the run over its time.", keys, drawn) if drawn else NOTHING


def weights_card(view: View) -> Markup:
    """Weights on their way from the learner to the sampler."""
    lags = weights.lags(of_kind(view.run.rows, "stats"), view.run.history.published)
    drawn = plots.lag_histogram(weights.by_lag(lags))
    if not drawn:
        return NOTHING
    hint = f"{number(len(view.run.history.published))} versions published. " + weights.words(view.steps, view.lanes)
    return card("Weights on their way", hint, drawn)


def health(view: View) -> Markup:
    """Small plots of what the learner says about its steps."""
    sparks = [spark for name, words in SPARKS if (spark := _spark(view.steps, name, words))]
    hint = "Over all steps, with the last value."
    return card("The learner's health", hint, tag("div", *sparks, class_="sparks")) if sparks else NOTHING


def _spark(steps: Sequence[Row], name: str, words: str) -> Markup:
    values = [(float(row["step"]), float(row[name])) for row in steps if known(row.get(name))]
    if len(values) < 2:
        return NOTHING
    head = tag("div", tag("span", words, class_="muted"), tag("b", number(values[-1][1])), class_="head")
    return tag("div", head, plots.spark(values))
