"""`jaxroll report RUN`: prints the summary of a finished or live run and writes its page."""

from __future__ import annotations

import base64
import hashlib
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
from jaxroll.report import record, work
from jaxroll.report import sections as page_sections
from jaxroll.report import summary as ahead
from jaxroll.report.activity import Bottleneck
from jaxroll.report.formats import UNKNOWN, duration, mesh, number, percent
from jaxroll.report.plots import Markup, PlottedRun, columns, gain_words, raw, tag, view_of
from jaxroll.report.record import Run, checks
from jaxroll.report.summary import state_of, summary, warnings
from jaxroll.run_paths import RunPaths

# --- The HTML page of a run: one file that opens offline and loads nothing


def page(run: Run, figures: Mapping[str, Any]) -> str:
    """The whole HTML document."""
    view = view_of(run, figures)
    body = tag("body", tag("main", *sections(view), _footer(view)), tag("script", raw(SCRIPT)))
    return "<!doctype html>\n" + tag("html", _head(run.name), body, lang="en")


def sections(view: PlottedRun) -> list[Markup]:
    """The sections in order; one without data is empty."""
    return [
        page_sections.header(view),
        page_sections.key_figures(view),
        page_sections.learning(view),
        work.overlap(view),
        columns(page_sections.promises(view), tag("div", work.time_split(view), work.ages(view))),
        page_sections.before_and_after(view),
        work.steps_and_tokens(view),
        work.section(view),
        work.health(view),
        columns(work.weights_card(view), page_sections.groups(view)),
        page_sections.events(view),
        page_sections.settings(view),
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


def _footer(view: PlottedRun) -> Markup:
    version = view.run.about.get("jaxroll", "")
    return tag("footer", f"JaxRoll {version} · ", tag("span", view.run.path, class_="mono"))


# --- style sheet: light and dark colors, one color per role

LIGHT = """
  --page: #f6f7fa; --card: #ffffff; --ink: #171b26; --muted: #667087; --grid: #e7e9f0; --edge: #e2e5ee;
  --learner: #4f5bd5; --sampler: #0b9b8a; --sampler-dim: #a9dcd5; --evaluator: #c2418f; --wait: #d3d7e3;
  --publish: #ee9b1f; --both: #7a5af8; --warm: #c98b5b; --compile: #aab3c9; --good: #13804a; --good-soft: #e3f5ea;
  --bad: #cf2f26; --bad-soft: #fdeceb;
  --shadow: 0 1px 2px rgb(20 25 50 / 5%), 0 6px 24px rgb(20 25 50 / 5%);
"""
DARK = """
  --page: #0d1018; --card: #151a25; --ink: #e8ebf3; --muted: #93a0b8; --grid: #232a3a; --edge: #232a3a;
  --learner: #8d98ff; --sampler: #34d3bd; --sampler-dim: #1d5f58; --evaluator: #f08cc6; --wait: #333c50;
  --publish: #fbbf4b; --both: #a48bff; --warm: #b98a66; --compile: #55607a; --good: #4bd08b; --good-soft: #12301f;
  --bad: #ff7b72; --bad-soft: #3a1a1b;
  --shadow: none;
"""

STYLE = (
    ":root { color-scheme: light dark;" + LIGHT + "}\n"
    "@media (prefers-color-scheme: dark) { :root {" + DARK + "} }\n"
    """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", sans-serif; font-variant-numeric: tabular-nums; -webkit-font-smoothing: antialiased; }
main { max-width: 1200px; margin: 0 auto; padding: 34px 22px 60px; }
h1, h2, h3, p { margin: 0; }
h2 { margin-bottom: 4px; font-size: 16px; font-weight: 650; letter-spacing: -.005em; }
h3 { font-size: 13px; font-weight: 600; color: var(--muted); }
.muted, .hint { color: var(--muted); }
.hint { font-size: 13px; }
code, pre, .mono { font-family: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace;
  font-size: .92em; }

header { display: grid; gap: 6px; margin-bottom: 26px; }
.title { display: flex; flex-wrap: wrap; align-items: center; gap: 12px; color: var(--muted); font-size: 14px; }
.title b { color: var(--ink); font-weight: 650; }
.state { padding: 1px 10px; border-radius: 99px; font-size: 12.5px; font-weight: 600;
  border: 1px solid currentColor; }
.state.finished { color: var(--good); } .state.live { color: var(--learner); } .state.stopped { color: var(--bad); }
h1 { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 18px; font-size: clamp(34px, 6vw, 58px);
  line-height: 1.15;
  font-weight: 700; letter-spacing: -.03em; }
h1 .from { color: var(--muted); font-weight: 500; } h1 .arrow { color: var(--muted); font-weight: 300; }
h1 .gain { font-size: 17px; font-weight: 600; letter-spacing: 0; color: var(--muted); background: var(--grid);
  padding: 3px 12px; border-radius: 99px; align-self: center; }
h1 .gain.up { color: var(--good); background: var(--good-soft); }
h1 .gain.down { color: var(--bad); background: var(--bad-soft); }
.lead { max-width: 78ch; color: var(--muted); }
.lead b { color: var(--ink); font-weight: 600; }

.card { background: var(--card); border: 1px solid var(--edge); border-radius: 14px; padding: 18px 20px; min-width: 0;
  box-shadow: var(--shadow); margin-bottom: 18px; }
.card > .hint { margin: -2px 0 10px; max-width: 92ch; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 0 18px; }
.card.flush { padding: 0; overflow: hidden; }
.figures { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1px; background: var(--edge); }
@media (max-width: 820px) { .figures { grid-template-columns: repeat(2, 1fr); } }
.figure { background: var(--card); padding: 14px 18px; }
.figure b { display: block; font-size: 23px; font-weight: 650; letter-spacing: -.02em; line-height: 1.3; }
.figure span { color: var(--muted); font-size: 12.5px; }

.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0 8px; font-size: 12.5px; color: var(--muted); }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.plot { display: block; width: 100%; max-width: 680px; height: auto; overflow: visible; }
.plot { touch-action: pan-y pinch-zoom; outline-offset: 3px; }
.plot .cursor { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 2 3; pointer-events: none; }
.values { min-height: 1.5em; font-size: 12.5px; color: var(--muted); overflow-wrap: anywhere; }
.plot text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--muted); }
.plot .end { text-anchor: end; } .plot .mid { text-anchor: middle; }
.plot .note { font-size: 12px; font-weight: 600; fill: var(--ink); }
.plot .note.muted { fill: var(--muted); font-weight: 400; }
.grid { stroke: var(--grid); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.thin { stroke-width: 1.4; stroke-dasharray: 4 4; }
.line.faint { opacity: .28; stroke-width: 1.2; }
.bar-line { fill: none; stroke-width: 1.6; }
.limit { stroke: var(--bad); stroke-width: 1.4; stroke-dasharray: 3 4; fill: none; }
.reward, .learner { stroke: var(--learner); } .heldout { stroke: var(--evaluator); }
.sampler { stroke: var(--sampler); }
.line.age-0 { stroke: var(--sampler); } .line.age-1 { stroke: var(--learner); }
.line.age-2 { stroke: var(--publish); } .line.age-3 { stroke: var(--bad); }
.dot { stroke: var(--card); stroke-width: 1.5; }
.dot.heldout { fill: var(--evaluator); } .dot.learner, .dot.reward { fill: var(--learner); }
.dot.sampler { fill: var(--sampler); }
.plot text.heldout { fill: var(--evaluator); stroke: none; }
.area { stroke: none; opacity: .13; } .area.sampler { fill: var(--sampler); } .area.learner { fill: var(--learner); }
rect.bar { stroke: none; } rect.age { fill: var(--sampler); } rect.bad { fill: var(--bad); }
rect.train { fill: var(--learner); } rect.wait { fill: var(--wait); } rect.publish { fill: var(--publish); }

.key.wait, .seg.wait { background: var(--wait); } .key.train, .seg.train { background: var(--learner); }
.key.publish, .seg.publish { background: var(--publish); } .key.decode, .seg.decode { background: var(--sampler); }
.key.decode_other, .seg.decode_other { background: var(--sampler-dim); } .key.both { background: var(--both); }
.key.eval, .seg.eval { background: var(--evaluator); } .key.fetch, .seg.fetch { background: var(--publish); }
.key.weight_swap, .seg.weight_swap { background: var(--bad); } .key.rest, .seg.rest { background: var(--grid); }
.key.reward { background: var(--learner); } .key.heldout { background: var(--evaluator); }
.key.age-0 { background: var(--sampler); } .key.age-1 { background: var(--learner); }
.key.age-2 { background: var(--publish); } .key.age-3 { background: var(--bad); }
.key.learner { background: var(--learner); }
.key.sampler { background: var(--sampler); } .key.warm, .seg.warm { background: var(--warm); }
.key.compile, .seg.compile { background: var(--compile); }
.key.died { background: var(--bad); width: 3px; height: 14px; }

.timeline { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0 14px; }
.lane-names { font-size: 12.5px; font-weight: 600; padding-top: 20px; }
.lane-names div { height: 38px; display: flex; align-items: center; }
.lane-names.small { font-weight: 400; color: var(--muted); padding: 0; align-self: center; }
.lane-names.small div { height: auto; }
.detail, .overview { position: relative; touch-action: pan-y; user-select: none; -webkit-user-select: none; }
.detail { cursor: grab; padding: 20px 0 26px; outline-offset: 3px; }
.detail:active { cursor: grabbing; }
.detail svg { display: block; width: 100%;
  background: repeating-linear-gradient(var(--grid) 0 1px, transparent 1px 38px); }
.overview { cursor: ew-resize; background: var(--page); border-radius: 8px; overflow: hidden; }
.overview svg { display: block; width: 100%; height: 74px; }
.brush { position: absolute; top: 0; bottom: 0; min-width: 3px; border: 2px solid var(--ink); border-radius: 6px;
  background: color-mix(in srgb, var(--ink) 10%, transparent); pointer-events: none; }
.ticks span, .steps span { position: absolute; transform: translateX(-50%); font-size: 11px; color: var(--muted);
  white-space: nowrap; }
.ticks span { bottom: 4px; } .steps span { top: 2px; color: var(--learner); font-weight: 600; }
.span.wait { fill: var(--wait); } .span.train { fill: var(--learner); } .span.publish { fill: var(--publish); }
.span.decode { fill: var(--sampler); } .span.decode_other { fill: var(--sampler-dim); }
.span.eval { fill: var(--evaluator); }
.span.fetch { fill: var(--publish); } .span.weight_swap { fill: var(--bad); } .span.both { fill: var(--both); }
.span.warm { fill: var(--warm); } .span.compile { fill: var(--compile); }
.died { stroke: var(--bad); stroke-width: 3; fill: none; }

.split { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 10px 14px; align-items: center;
  margin: 12px 0 4px; }
.split > div:nth-child(odd) { font-size: 12.5px; font-weight: 600; }
.segments { display: flex; height: 26px; border-radius: 7px; overflow: hidden; background: var(--grid); }
.seg { display: flex; align-items: center; justify-content: center; overflow: hidden; font-size: 12px;
  font-weight: 600;
  color: #fff; white-space: nowrap; min-width: 0; }
.seg.wait, .seg.rest { color: var(--muted); }
@media (prefers-color-scheme: dark) { .seg { color: #0d1018; } }

.sparks { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 20px 30px;
  margin-top: 12px; }
.sparks b { font-weight: 600; } .sparks .head { display: flex; justify-content: space-between; font-size: 13px;
  gap: 8px; }

table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-size: 12.5px; font-weight: 600; color: var(--muted); padding: 6px 10px; }
td { padding: 7px 10px; border-top: 1px solid var(--edge); vertical-align: top; }
.scroll { overflow-x: auto; }
.answers td { width: 33%; } .answers bdi { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.right, .wrong { border-left: 3px solid; padding: 2px 9px; border-radius: 4px; display: inline-block;
  max-width: 100%; }
.right { border-color: var(--good); background: var(--good-soft); }
.wrong { border-color: var(--bad); background: var(--bad-soft); }
.right::before, .wrong::before { font-weight: 700; margin-right: 7px; }
.right::before { content: "✓"; color: var(--good); } .wrong::before { content: "✗"; color: var(--bad); }
.checks td:first-child { width: 26px; padding-right: 0; font-weight: 700; }
.checks td:nth-child(3) { font-weight: 650; }
.checks td { padding: 6px 10px; } .checks td:nth-child(n + 3) { white-space: nowrap; }
.checks .hint { display: block; }
.ok { color: var(--good); } .no { color: var(--bad); } .open { color: var(--muted); }
details summary { cursor: pointer; font-weight: 600; font-size: 14px; margin-top: 4px; }
details[open] summary { margin-bottom: 10px; }
.config { columns: 320px; column-gap: 30px; font-size: 13px; }
.config section { break-inside: avoid; margin-bottom: 14px; } .config h3 { margin-bottom: 3px; color: var(--ink); }
.config .pair { display: flex; justify-content: space-between; gap: 12px; border-top: 1px solid var(--edge);
  padding: 2px 0; }
.config .pair span:last-child { text-align: right; overflow-wrap: anywhere; } .config .pair { color: var(--muted); }
.config .changed { color: var(--ink); font-weight: 650; }
.facts td:last-child { text-align: right; font-weight: 650; width: 1%; }
.facts { margin-bottom: 8px; }
.events td:first-child { white-space: nowrap; color: var(--muted); width: 1%; }
.events td:nth-child(2) { white-space: nowrap; width: 1%; }
.events td { font-size: 13px; overflow-wrap: anywhere; }
footer { color: var(--muted); font-size: 12.5px; margin-top: 24px; }
@media (max-width: 620px) {
  main { padding: 20px 12px 40px; } .card { padding: 14px; }
  .plot text, .plot .note { font-size: 21px; } .plot .tick.mid { transform: translateY(7px); }
  .plot .tick.name { transform: translateY(18px); } .plot { margin-bottom: 16px; }
  .plot .note.muted { font-size: 20px; letter-spacing: -.04em; }
  .lane-names { max-width: 84px; overflow-wrap: anywhere; } .ticks span:nth-child(even) { display: none; }
}
@media print { .card { box-shadow: none; break-inside: avoid; } }
"""
)


# --- script: shows the values of plots and moves the timeline's window; the page's policy allows no other

SCRIPT = """
for (const plot of document.querySelectorAll(".plot")) {
  const lines = [...plot.querySelectorAll("[data-name]")].map(path =>
    [path.dataset.name, path.getAttribute("d").slice(1).split("L").map(point => point.split(" ").map(Number))]);
  if (!lines.length && !plot.querySelector("title")) continue;
  const values = document.createElement("p"), cursor = document.createElementNS(plot.namespaceURI, "path");
  const data = (name, at) => {
    const [low, high, start, end] = plot.dataset[name].split(" ").map(Number);
    return low + (high - low) * (at - start) / (end - start);
  };
  const share = plot.querySelector(".tick.end")?.textContent.endsWith("%");
  const shown = y => share ? (100 * y).toFixed(1) + " %" : +y.toPrecision(3) + "";
  const axis = (plot.querySelector(".name")?.textContent ?? "step").split(" ")[0];
  const nearest = (points, x) =>
    points.reduce((best, one) => Math.abs(one[0] - x) < Math.abs(best[0] - x) ? one : best);
  values.className = "values";
  cursor.setAttribute("class", "cursor");
  plot.append(cursor);
  plot.after(values);
  const read = x => {
    const at = nearest(lines[0][1], x)[0];
    cursor.setAttribute("d", `M${at} 0V${plot.viewBox.baseVal.height}`);
    const near = lines.map(([name, points]) => [name, nearest(points, at)]);
    const found = near.map(([name, point]) => `${name} ${shown(data("y", point[1]))}`.trim());
    const where = data("x", at);
    values.textContent = `${axis} ${axis === "step" ? Math.round(where) : +where.toPrecision(4)}: ${found.join(", ")}`;
    plot.setAttribute("aria-label", values.textContent);
    return at;
  };
  const point = event => {
    const note = event.target.querySelector?.(":scope > title");
    const area = plot.getBoundingClientRect();
    if (note) values.textContent = note.textContent;
    else if (lines.length) read((event.clientX - area.left) * plot.viewBox.baseVal.width / area.width);
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  if (!lines.length) continue;
  let place = -1;
  plot.tabIndex = 0;
  plot.addEventListener("keydown", event => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], points = lines[0][1];
    if (!move) return;
    event.preventDefault();
    place = Math.min(Math.max(place + move, 0), points.length - 1);
    read(points[place][0]);
  });
}
(() => {
  const box = document.querySelector(".timeline");
  if (!box) return;
  const end = +box.dataset.end, steps = JSON.parse(box.dataset.steps);
  let from = +box.dataset.from, span = +box.dataset.span;
  const detail = box.querySelector(".detail"), view = detail.querySelector("svg");
  const ticks = detail.querySelector(".ticks"), labels = detail.querySelector(".steps");
  const overview = box.querySelector(".overview"), brush = overview.querySelector(".brush");
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const mark = (at, words) => {
    const node = document.createElement("span");
    node.style.left = (100 * (at - from) / span) + "%";
    node.textContent = words;
    return node;
  };
  const tickStep = () => {
    const rough = span / 8, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map(m => m * power).find(step => step >= rough * 0.999999);
  };
  const draw = () => {
    span = clamp(span, Math.min(0.2, end), end);
    from = clamp(from, 0, end - span);
    view.setAttribute("viewBox", `${from} 0 ${span} ${view.dataset.height}`);
    brush.style.left = (100 * from / end) + "%";
    brush.style.width = (100 * span / end) + "%";
    const step = tickStep(), marks = [];
    for (let i = Math.ceil(from / step); i * step <= from + span; i++) {
      marks.push(mark(i * step, +(i * step).toFixed(3) + " s"));
    }
    ticks.replaceChildren(...marks);
    const shown = steps.filter(([a, b]) => a >= from && b <= from + span && b - a > 0.025 * span);
    labels.replaceChildren(...shown.map(([a, b, number]) => mark((a + b) / 2, number)));
  };
  const share = (event, node) => {
    const area = node.getBoundingClientRect();
    return (event.clientX - area.left) / area.width;
  };
  const zoom = (at, by) => {  // the second under `at` stays there
    const pinned = from + span * at;
    span = clamp(span * by, Math.min(0.2, end), end);
    from = pinned - span * at;
  };
  detail.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;  // the page scrolls
    event.preventDefault();
    zoom(share(event, detail), Math.exp(event.deltaY / 400));
    draw();
  }, { passive: false });
  detail.addEventListener("keydown", event => {
    const move = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key], by = { "+": 0.7, "-": 1.4 }[event.key];
    if (move) from += move * span;
    if (by) zoom(0.5, by);
    if (move || by) { event.preventDefault(); draw(); }
  });
  const fingers = new Map();
  detail.addEventListener("pointerdown", event => fingers.set(event.pointerId, share(event, detail)));
  for (const kind of ["pointerup", "pointercancel", "pointerleave"]) {
    detail.addEventListener(kind, event => fingers.delete(event.pointerId));
  }
  detail.addEventListener("pointermove", event => {
    if (!fingers.has(event.pointerId)) return;
    const at = share(event, detail), before = fingers.get(event.pointerId);
    const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
    if (other === undefined) from -= (at - before) * span;
    else if (Math.abs(at - other) > 0.02) zoom(other, Math.abs(before - other) / Math.abs(at - other));
    fingers.set(event.pointerId, at);
    draw();
  });
  const center = event => {
    from = share(event, overview) * end - span / 2;
    draw();
  };
  overview.addEventListener("pointerdown", event => {
    overview.setPointerCapture(event.pointerId);
    center(event);
  });
  overview.addEventListener("pointermove", event => event.buttons && center(event));
  draw();
})();
"""


def policy() -> str:
    """The page's Content-Security-Policy: no external source; this script by its hash, and the styles of the page."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


# --- `jaxroll report RUN`


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
        *((f"reward, {name}", f"{number(a)} → {number(b)}, {number(n)} tokens at the end")
          for name, (a, b, n) in (f["reward_by_source"] or {}).items()),
        *([("failed members", _listed(f["failed_by_source"]))] if any((f["failed_by_source"] or {}).values()) else []),
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
