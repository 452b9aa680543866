"""Figures of the documentation: each committed SVG is the drawing of its committed JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.figures import draw

ROOT = Path(__file__).resolve().parents[2]
DATA = sorted((ROOT / "benchmarks" / "figures").glob("*.json"))
FIGURES = ROOT / "docs" / "results" / "figures"


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_a_committed_figure_is_the_drawing_of_its_data(path: Path, tmp_path: Path) -> None:
    draw.draw(json.loads(path.read_text(encoding="utf-8")), tmp_path / "drawn.svg")
    drawn, committed = (tmp_path / "drawn.svg").read_text(), (FIGURES / f"{path.stem}.svg").read_text()
    assert drawn == committed, "run python -m benchmarks.figures.draw"


def test_every_figure_has_its_data() -> None:
    assert [path.stem for path in DATA] == sorted(path.stem for path in FIGURES.glob("*.svg"))


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_data_names_its_command_commit_and_evidence_class(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["command"] and (data.get("commit") or data.get("commits")) and data["class"] in ("P", "R", "S")
