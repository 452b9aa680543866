"""How off-policy the tokens of each age came in: a table over the run, and lines over its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxroll.report import svg
from jaxroll.report.formats import known, number, percent, tick
from jaxroll.report.markup import Markup, tag
from jaxroll.report.svg import Frame
from jaxroll.report.view import NOTHING, View, card, legend

Row = dict[str, Any]
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
        "How far the policy that is trained had moved from the one that drew a token. ρ is the ratio of the two; the"
        " effective samples are the share of the tokens that weighting by ρ leaves in effect."
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
