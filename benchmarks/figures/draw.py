"""Draw the figures of the documentation from the JSON files in this folder.

    python -m benchmarks.figures.draw                        # docs/results/figures/NAME.svg for every NAME.json
    python -m benchmarks.figures.draw --record=runs/demo     # learning_curve.json from a run, then draw

Each JSON file holds the values of one figure and the command, commit and evidence class that they come from.
`tests/docs/test_figures.py` checks that the committed figures equal the output of this script.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib import figures
from benchmarks.lib.figures import Panel, Value
from jaxroll.report import plots
from jaxroll.report.plots import tag

ROOT = Path(__file__).resolve().parents[2]
DATA, FIGURES = ROOT / "benchmarks" / "figures", ROOT / "docs" / "results" / "figures"

CURVE_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333} .end{text-anchor:end} .mid{text-anchor:middle}"
    " .tick{fill:#777;font-size:11px} .grid{stroke:#e4e4e4} .line{fill:none;stroke-width:2} .reward{stroke:#c8662b}"
    " .faint{opacity:.3;stroke-width:1} .heldout{stroke:#3b6ea5} .thin{stroke-width:1.2} circle.heldout{fill:#3b6ea5}"
    " .bar-line{fill:none;stroke-width:1.5} text.note{stroke:none;fill:#3b6ea5;font-weight:600}"
    " text.key{font-weight:600} text.reward{stroke:none;fill:#c8662b} text.heldout{stroke:none;fill:#3b6ea5}"
)
CURVE_WIDTH, CURVE_HEIGHT, CURVE_KEY = 560, 290, 24
RUN_FIGURES = (
    "accuracy_start",
    "accuracy_end",
    "accuracy_gain",
    "accuracy_gain_low",
    "accuracy_gain_high",
    "heldout_items",
    "seconds",
    "rl_seconds",
    "overlap",
    "alpha",
    "age_max",
    "steps",
)
STEP_KEYS, EVAL_KEYS = ("step", "reward_mean"), ("step", "accuracy", "n")


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write the figure that `data` describes; `data["drawn"]` names the kind of drawing."""
    DRAWINGS[data["drawn"]](data, path)


def intervals(data: Mapping[str, Any], path: Path) -> None:
    """Draw values with their intervals, one line per row and one color per kind."""
    panels = [
        Panel(
            panel["title"],
            {name: {kind: Value(*ends) for kind, ends in row.items()} for name, row in panel["rows"].items()},
            panel["at"],
        )
        for panel in data["panels"]
    ]
    figures.write(path, panels, data["kinds"])


def learning_curve(data: Mapping[str, Any], path: Path) -> None:
    """Draw reward and held-out accuracy over the training steps of one run."""
    curve = plots.learning(data["steps"], data["evals"], lambda row: row["step"], "training step")
    key = [
        tag("text", "held-out accuracy, 95 % interval", class_="key heldout", x=46, y=16),
        tag("text", "training reward, mean of a step", class_="key reward", x=280, y=16),
    ]
    height = CURVE_KEY + CURVE_HEIGHT
    paper = tag("rect", width=CURVE_WIDTH, height=height, fill="#ffffff")
    moved = tag("svg", curve, y=CURVE_KEY, width=CURVE_WIDTH, height=CURVE_HEIGHT)
    size = {"viewBox": f"0 0 {CURVE_WIDTH} {height}", "width": CURVE_WIDTH, "height": height}
    whole = tag("svg", tag("style", CURVE_STYLE), paper, *key, moved, xmlns="http://www.w3.org/2000/svg", **size)
    path.write_text(whole + "\n", encoding="utf-8")


PANELS, PANEL_WIDTH, PANEL_HEIGHT = 3, 250, 150  # in a row; of one


def learning_curves(data: Mapping[str, Any], path: Path) -> None:
    """Draw one panel per task, with the training reward and the held-out accuracy of each of its runs."""
    panels = []
    for number, (name, runs) in enumerate(data["curves"].items()):
        rewards = [[(row["step"], row["reward_mean"]) for row in run["steps"]] for run in runs]
        held = [[(row["step"], row["accuracy"]) for row in run["evals"]] for run in runs]
        values = [y for line in (*rewards, *held) for _, y in line]
        last = max(x for line in (*rewards, *held) for x, _ in line)
        size = {"width": PANEL_WIDTH, "height": PANEL_HEIGHT, "left": 40, "top": 24, "bottom": 22}
        frame = plots.Frame.of((0, last), plots.padded(values, 0.09), **size)
        marks = [plots.line(frame, line, "reward") for line in rewards]
        marks += [plots.line(frame, line, "heldout thin") for line in held]
        marks += [plots.dot(frame, point, 2.5, "heldout") for line in held for point in line]
        title = tag("text", name, class_="key", x=40, y=15)
        row, column = divmod(number, PANELS)
        moved = f"translate({column * PANEL_WIDTH} {CURVE_KEY + row * PANEL_HEIGHT})"
        panels.append(tag("g", title, plots.axes(frame, x_about=4, y_about=4), *marks, transform=moved))
    key = [
        tag("text", "held-out accuracy", class_="key heldout", x=40, y=16),
        tag("text", "training reward, mean of several steps", class_="key reward", x=200, y=16),
    ]
    width, height = PANELS * PANEL_WIDTH, CURVE_KEY - (-len(panels) // PANELS) * PANEL_HEIGHT
    size = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    paper = tag("rect", width=width, height=height, fill="#ffffff")
    whole = tag("svg", tag("style", CURVE_STYLE), paper, *key, *panels, xmlns="http://www.w3.org/2000/svg", **size)
    path.write_text(whole + "\n", encoding="utf-8")


DRAWINGS: Mapping[str, Callable[[Mapping[str, Any], Path], None]] = {
    "intervals": intervals,
    "learning_curve": learning_curve,
    "learning_curves": learning_curves,
}


def recorded(run_dir: Path) -> dict[str, Any]:
    """The values of a run's learning curve, with the command and commit that made the run."""
    from jaxroll.report import record, summary

    run = record.load(run_dir)
    description = json.loads((run_dir / "run.json").read_text())
    figures = summary.summary(run)
    evals = sorted((row for row in run.rows if row["kind"] == "eval"), key=lambda row: row["step"])
    return {
        "drawn": "learning_curve",
        "command": [f"jaxroll demo --seed={description['config']['run']['seed']}"],
        "commit": description.get("commit"),
        "class": "R",
        "figures": {name: figures[name] for name in RUN_FIGURES},
        "steps": [{name: _short(row[name]) for name in STEP_KEYS} for row in summary.trained_steps(run.rows)],
        "evals": [{name: _short(row[name]) for name in EVAL_KEYS} for row in evals],
    }


def _short(value: float) -> float:
    return round(value, 5)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` with each innermost list or object on one line."""
    text = json.dumps(data, ensure_ascii=False, indent=1)
    innermost = re.compile(r"([\[{])\s*\n([^\[\]{}]*)\n\s*([\]}])")
    one_line = innermost.sub(lambda found: found[1] + " ".join(found[2].split()) + found[3], text)
    path.write_text(one_line + "\n", encoding="utf-8")


def main() -> int:
    """Draw every figure; with --record, read the learning curve of a run first."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="RUN", help="a finished run to read learning_curve.json from")
    options = parser.parse_args()
    if options.record is not None:
        write_json(DATA / "learning_curve.json", recorded(options.record))
    for path in sorted(DATA.glob("*.json")):
        draw(json.loads(path.read_text(encoding="utf-8")), FIGURES / f"{path.stem}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
