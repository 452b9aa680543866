"""Shared parts of the page's sections: the run with its figures, and the card around a section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxroll.report.figures import activity
from jaxroll.report.figures.activity import Lane, RunClock
from jaxroll.report.figures.record import Run
from jaxroll.report.figures.summary import evaluations, pauses, trained_steps
from jaxroll.report.formats import known
from jaxroll.report.page.svg import Markup, raw, tag

Row = dict[str, Any]
NOTHING = raw("")


@dataclass(frozen=True)
class View:
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


def view_of(run: Run, figures: Mapping[str, Any]) -> View:
    """The view of `run` that the page shows."""
    steps = trained_steps(run.rows)
    times = [row["t"] for row in run.rows if known(row.get("t"))]
    origin = run.created_s if run.created_s is not None else min(times, default=0.0)
    clock = RunClock(origin, tuple(pauses(run.rows, steps)))
    lanes = activity.lanes(run.rows, steps, run.history.acked_groups)
    return View(run, figures, steps, evaluations(run.rows), lanes, clock)


def card(title: str, hint: str, *content: object) -> Markup:
    """A section with a title and a sentence."""
    hints = [tag("p", hint, class_="hint")] if hint else []
    return tag("section", tag("h2", title), *hints, *content, class_="card")


def legend(*entries: tuple[str, str]) -> Markup:
    """(class of the colour, meaning)."""
    return tag("div", *(tag("span", tag("i", class_=f"key {kind}"), words) for kind, words in entries), class_="legend")


def columns(*cards: Markup) -> Markup:
    """Cards side by side where the window is wide enough; those that are nothing are left out."""
    shown = [one for one in cards if one]
    return tag("div", *shown, class_="two") if shown else NOTHING


def figures_row(*entries: tuple[str, str]) -> Markup:
    """(value, what it is) as large figures."""
    return tag("div", *(tag("div", tag("b", value), tag("span", words), class_="figure") for value, words in entries),
               class_="figures")  # fmt: skip
