"""The page of a run: one HTML file that opens offline, asks nobody for anything and runs no script but its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxroll.report import by_age
from jaxroll.report import head_sections as head
from jaxroll.report import log_sections as log
from jaxroll.report import work_sections as work
from jaxroll.report.markup import Markup, raw, tag
from jaxroll.report.record import Run
from jaxroll.report.script import SCRIPT, policy
from jaxroll.report.style import STYLE
from jaxroll.report.view import View, columns, view_of


def page(run: Run, figures: Mapping[str, Any]) -> str:
    """The whole HTML document."""
    view = view_of(run, figures)
    body = tag("body", tag("main", *sections(view), _footer(view)), tag("script", raw(SCRIPT)))
    return "<!doctype html>\n" + tag("html", _head(run.name), body, lang="en")


def sections(view: View) -> list[Markup]:
    """From the result to its grounds; what a run has nothing to say on is empty."""
    return [
        head.header(view),
        head.key_figures(view),
        head.learning(view),
        work.overlap(view),
        columns(log.promises(view), tag("div", work.time_split(view), work.ages(view))),
        head.before_and_after(view),
        work.steps_and_tokens(view),
        by_age.section(view),
        work.health(view),
        columns(work.weights_card(view), log.groups(view)),
        log.events(view),
        log.settings(view),
    ]


def _head(title: str) -> Markup:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy()),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title} · JaxRoll"),
        tag("style", raw(STYLE)),
    )


def _footer(view: View) -> Markup:
    version = view.run.about.get("jaxroll", "")
    return tag("footer", f"JaxRoll {version} · ", tag("span", view.run.path, class_="mono"))
