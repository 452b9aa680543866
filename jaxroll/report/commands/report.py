"""`jaxroll report RUN`: prints the summary of a finished or live run and writes its page."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxroll import disk, metrics
from jaxroll.report.figures import record
from jaxroll.report.figures import summary as ahead
from jaxroll.report.figures.activity import Bottleneck
from jaxroll.report.figures.record import Run, checks
from jaxroll.report.figures.summary import state_of, summary, warnings
from jaxroll.report.formats import UNKNOWN, duration, mesh, number, percent
from jaxroll.report.page.page import page
from jaxroll.report.page.plots import gain_words
from jaxroll.run_paths import RunPaths


def main(run_dir: Path, *, as_json: bool) -> int:
    """Write RUN/report.html and print the summary, as JSON or for a person; 0. ConfigError when there is no run."""
    run = record.load(run_dir)
    figures = summary(run) | ({"class": "S"} if run.is_simulated else {})
    written = write_page(run, figures)
    if as_json:
        print(json.dumps(json.loads(metrics.dumps(figures)), indent=2))
        print(f"page: {written}", file=sys.stderr)
    else:
        show(run, figures, Console())
        print(f"\nThe page: {os.path.relpath(written)}")
    return 0


def write_page(run: Run, figures: Mapping[str, Any]) -> Path:
    """Write the page; return its path."""
    path = RunPaths(run.path).page
    disk.replace_text(path, page(run, figures))
    return path


def show(run: Run, figures: Mapping[str, Any], console: Console) -> None:
    """The summary on a terminal or in a pipe."""
    console.print(Text(f"{run.name}: {state_of(run)}{', simulated (S)' * run.is_simulated}", style="bold"))
    console.print(_pairs(figures))
    console.print(_promises(run, figures))


def lines(f: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of the most important figures."""
    accuracy = f"{percent(f['accuracy_start'])} → {percent(f['accuracy_end'])}"
    gain = gain_words(f) if f["accuracy_start"] is not None else ""
    too_little = ahead.words(f["alpha"], f["alpha_wanted"])
    rejected, failed = _listed(f["answers_rejected"]), _listed(f["scoring_failed"])
    skipped, best = _listed(f["prompts_skipped"]), f["best_checkpoint"]
    return [
        ("held-out accuracy", accuracy if f["accuracy_start"] is not None else UNKNOWN),
        ("gain", gain or UNKNOWN),
        *((f"accuracy, {name}", f"{percent(a)} → {percent(b)} of {number(n)}")
          for found in (f["accuracy_by_set"], f["accuracy_by_source"]) for name, (a, b, n) in (found or {}).items()),
        *([("best checkpoint", f"{best['version']}: {best['metric']} {percent(best['value'])}")] if best else []),
        ("reward", f"{number(f['reward_first'])} → {number(f['reward_last'])} (first and last 10 steps)"),
        ("steps", f"{number(f['steps'])} of {number(f['steps_wanted'])}"),
        ("time", f"{duration(f['seconds'])}, of which RL {duration(f['rl_seconds'])}"),
        ("sampler", f"{mesh(f['sampler_mesh'])}; {number(f['tokens_per_s'])} tokens/s, "
                    f"busy {percent(f['sampler_busy_share'])}"),
        ("learner", f"{mesh(f['learner_mesh'])}; {number(f['train_tokens_per_s'])} tokens/s, "
                    f"{number(f['samples_per_s'])} samples/s, waits {percent(f['learner_wait_share'])}"),
        ("age", f"mean {number(f['age_mean'])}, largest {number(f['age_max'])} (α = {f['alpha']:g})"),
        *([("alpha", too_little)] if too_little else []),
        *([("prompts skipped", skipped)] if skipped else []),
        *([("bottleneck", Bottleneck(**f["bottleneck"]).text())] if f["bottleneck"] else []),
        *([("rejected answers", rejected)] if rejected else []),
        *([("without a score", failed)] if failed else []),
        *(("warning", sentence) for sentence in warnings(f)),
        ("restarts", number(f["restarts"])),
    ]  # fmt: skip


def _listed(counts: Mapping[str, int] | None) -> str:
    return ", ".join(f"{number(n)} {reason}" for reason, n in (counts or {}).items())


def _pairs(figures: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in lines(figures):
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _promises(run: Run, figures: Mapping[str, Any]) -> Table:
    signs = {True: ("ok", "green"), False: ("NO", "bold red"), None: ("-", "dim")}
    table = Table(title="invariants", title_justify="left", title_style="dim", box=None, pad_edge=False)
    for heading, justify in (("", "left"), ("", "left"), ("found", "right"), ("bound", "right")):
        table.add_column(heading, justify=justify, header_style="dim")  # type: ignore[arg-type]
    for check in checks(figures, run.config):
        words, style = signs[check.holds]
        table.add_row(Text(words, style=style), Text(check.name), Text(check.found), Text(check.bound, style="dim"))
    return table
