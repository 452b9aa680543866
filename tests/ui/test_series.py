"""Metric rows in columns: what is drawn equals a slow computation on the rows, also while the file grows."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxroll.ui import series
from jaxroll.ui.series import ActivitySpans, Content, RunMetrics


def step_row(step: int, **fields: object) -> dict:
    return {
        "t": 100.0 + step,
        "role": "learner",
        "kind": "step",
        "step": step,
        "t0": 99.5 + step,
        "t1": 99.9 + step,
        "train_s": 0.4,
        "wait_s": 0.1,
        "publish_s": 0.1,
        "age_hist": {"0": 2},
        **fields,
    }


def curve(content: Content, name: str, x: str = "step", points: int = 500) -> dict:
    (found,) = series.curves(content, [name], x, points, (None, None))[name]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_shares_of_time_equal_those_of_a_fine_grid(seed: int) -> None:
    rng = random.Random(seed)
    spans, fine = ActivitySpans(), np.zeros(1000, bool)
    for _ in range(rng.randrange(12)):
        start, length = rng.randrange(1000), rng.randrange(200)
        spans.add(float(start), float(min(start + length, 1000)))
        fine[start : start + length] = True
    edges = np.array(sorted({0, 1000, *(rng.randrange(1001) for _ in range(6))}), float)
    expected = [fine[int(a) : int(b)].mean() for a, b in pairwise(edges)]
    assert spans.shares(edges) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("count", [1, 7, 10, 11, 999])
def test_merged_points_keep_mean_and_extremes(count: int) -> None:
    rng = np.random.default_rng(count)
    xs, ys = np.arange(count, dtype=float), rng.normal(size=count)
    found = series.reduced(xs, ys, 10)
    if count <= 10:
        assert found == {"x": pytest.approx(xs), "y": pytest.approx(ys, rel=1e-6)}
        return
    assert len(found["x"]) == 10 and found["x"][-1] == count - 1
    assert min(found["low"]) == pytest.approx(ys.min(), rel=1e-6)
    assert max(found["high"]) == pytest.approx(ys.max(), rel=1e-6)
    starts = [0, *(int(x) + 1 for x in found["x"])]
    for i, mean in enumerate(found["y"]):
        assert mean == pytest.approx(ys[starts[i] : starts[i + 1]].mean(), abs=1e-6)


def test_numbers_appear_late_and_a_step_counts_once() -> None:
    content = Content()
    for row in (step_row(1, loss=1.0), step_row(2, loss=2.0, ess=0.5), step_row(3), step_row(2, loss=5.0, ess=None)):
        content.take(row)
    assert curve(content, "step/loss") == {"role": "learner", "x": [1, 2], "y": [1, 5]}
    assert series.curves(content, ["step/ess"], "step", 9, (None, None)) == {
        "step/ess": []
    }  # the last row of step 2 has none
    assert series.age_histogram(content, None) == {0: 6} and series.age_histogram(content, 1) == {0: 2}


def test_rows_without_a_step_are_placed_between_steps_by_their_time() -> None:
    content = Content()
    for step in (1, 2, 3):
        content.take(step_row(step))
        content.take(
            {
                "t": 100.5 + step,
                "role": "sampler-0",
                "kind": "stats",
                "tokens_per_s": 10.0 * step,
                "version": f"0.{step}",
            }
        )
    assert curve(content, "stats/tokens_per_s")["x"] == [1.5, 2.5, 3]
    assert curve(content, "stats/weights_step", "time") == {"role": "sampler-0", "x": [0.5, 1.5, 2.5], "y": [1, 2, 3]}


def test_a_file_that_grows_is_followed_and_one_that_is_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run = RunMetrics(tmp_path)
    assert not run.read()
    path.write_text(json.dumps(step_row(1, loss=1.0)) + "\nnot a row\n" + json.dumps(step_row(2, loss=2.0))[:30])
    assert run.read() and run.content.rows == 1 and run.skipped == 1
    with path.open("a") as file:
        file.write(json.dumps(step_row(2, loss=2.0))[30:] + "\n")
    assert run.read() and curve(run.content, "step/loss")["y"] == [1, 2] and not run.read()
    other = tmp_path / "other"
    other.write_text(json.dumps(step_row(9, loss=9.0)) + "\n")
    other.replace(path)
    assert run.read() and curve(run.content, "step/loss") == {"role": "learner", "x": [9], "y": [9]}


def test_a_file_of_many_names_is_bounded() -> None:
    content = Content()
    for i in range(3 * series.MAX_COLUMNS):
        content.take(step_row(i + 1, **{f"n{i}": 1.0}))
    for i in range(3 * series.MAX_TABLES):
        content.take({"t": 1.0, "role": f"r{i}", "kind": "stats", "x": 1.0})
    assert len(series.names(content)) <= series.MAX_COLUMNS + 3 and len(content.tables) <= series.MAX_TABLES + 1


def test_time_in_which_the_learner_streams_is_drawn_as_training() -> None:
    content, edges = Content(), np.array([0.0, 10.0, 30.0, 40.0, 50.0, 57.0, 60.0])
    times = {"t0": 57.0, "t1": 60.0, "wait_s": 27.0, "train_s": 33.0, "streamed": [[10.0, 30.0], [40.0, 50.0]]}
    content.take(step_row(1, **times))
    waits, trains = (content.spans["learner", what].shares(edges) for what in ("wait", "train"))
    assert waits == pytest.approx([1, 0, 1, 0, 1, 0]) and trains == pytest.approx([0, 1, 0, 1, 0, 1])
