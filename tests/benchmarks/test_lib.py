"""Parts that benchmarks share: races between arms, ratios, runs and figures."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxroll import config as configs

ROOT = Path(__file__).resolve().parents[2]


class Arm:
    """A child with scripted answers, which refuses other commands."""

    def __init__(self, answers: dict[str, dict]) -> None:
        self.answers, self.asked = answers, []

    def ask(self, command: str) -> dict:
        self.asked.append(command)
        return self.answers[command]

    def close(self) -> None:
        """Nothing runs."""


def test_arms_that_differ_are_not_raced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: ModuleType) -> None:
    """With other greedy tokens or other gradients the result says so, and no run is made."""
    arms, engine, learner = (
        importlib.import_module(name)
        for name in ("benchmarks.lib.arms", "benchmarks.engine.__main__", "benchmarks.learner.__main__")
    )
    same = [[1, 2], [3, 4], [5, 6]]
    assert engine.agreement(same, same) == 1.0
    assert engine.agreement(same, [[1, 2], [3, 9], [5, 6]]) == pytest.approx(2 / 3)
    threads = {"ours": 1, "tunix": 1}
    runs = report.Runs("race", {}, tmp_path / "runs.jsonl", resume=False)

    said = {"ours": Arm({"greedy": {"tokens": same}}), "tunix": Arm({"greedy": {"tokens": [[1, 2], [3, 9], [5, 6]]}})}
    case = next(case for case in engine.CASES if case.name == "tunix_equal")
    with arms.Arms(lambda arm, _: said[arm]) as started:
        result = engine.race(case, started, runs, threads, 2)
    assert not result["met"] and "no race" in result["why"] and "ratio" not in result
    assert [arm.asked for arm in said.values()] == [["greedy"], ["greedy"]]

    case = next(case for case in learner.CASES if case.name == "tunix_equal")
    for arm, value in (("ours", 1.0), ("tunix", 1.1)):
        np.savez(tmp_path / f"{case.name}.{arm}.npz", embed=np.full(3, value))
    silent = {arm: Arm({}) for arm in threads}
    with arms.Arms(lambda arm, _: silent[arm]) as started:
        result = learner.race(case, started, tmp_path, runs, threads, 2)
    assert not result["met"] and result["gradients_apart"] == pytest.approx(0.1) and "ratio" not in result
    assert [arm.asked for arm in silent.values()] == [[], []]


def test_a_race_tells_both_rates_and_their_ratio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: ModuleType
) -> None:
    arms = importlib.import_module("benchmarks.lib.arms")
    rates = {("ours", 1): 10.0, ("ours", 2): 12.0, ("peer", 1): 6.0, ("peer", 2): 5.0}
    run = lambda arm, threads: {"tokens_per_s": rates[arm, threads], "cpu_s": threads / rates[arm, threads]}  # noqa: E731
    runs = report.Runs("race", {}, tmp_path / "runs.jsonl", resume=False)
    best = {arm: arms.best_threads("case", arm, {}, runs, run) for arm in ("ours", "peer")}
    assert best == {"ours": 2, "peer": 1}
    assert arms.best_threads("case", "ours", {"ours": 1}, runs, run) == 1, "what is ordered is not tried"
    result, of = arms.raced("case", best, runs, run, 3)
    assert (result["ours"], result["peer"], result["runs"], result["against"]) == (12.0, 6.0, 3, "peer")
    assert result["low"] == result["high"] == result["ratio"] == pytest.approx(2.0)
    assert result["per_cpu_second"]["value"] == pytest.approx(1.0)
    assert [len(one) for one in of.values()] == [3, 3]


def test_a_figure_shows_every_value_of_every_row_at_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures, algorithms, synchrony = (
        importlib.import_module(n)
        for n in ("benchmarks.lib.figures", "benchmarks.algorithms.__main__", "benchmarks.schedules.__main__")
    )
    path = tmp_path / "figure.svg"
    of = {"gain": 0.2, "gain_95": [0.1, 0.3], "ess": 0.9, "clip_share": 0.01, "kl_behaviour": None}
    algorithms.draw(path, {"grpo": {"0": of, "8": of | {"gain": -0.1}}, "raft": {"1": of | {"gain_95": None}}})
    drawn = ElementTree.parse(path).getroot()
    notes = [one.text for one in drawn.findall(".//{*}title")]
    assert notes[:3] == ["grpo, α = 0: 20", "grpo, α = 8: -10", "raft, α = 1: 20"] and len(notes) == 9
    at = [float(circle.get("cx", "")) for circle in drawn.findall(".//{*}circle") if len(circle)][:3]
    assert at[1] < at[0] == at[2], "equal values must have the same position, and a smaller one must be to the left"

    race = {"ratio": 2.0, "low": 1.5, "high": 2.5, "ceiling": 4.0}
    synchrony.draw(path, {"constant": {"arms": {}, "1": race}, "queue": race | {"null": race | {"ratio": 1.0}}})
    notes = [one.text for one in ElementTree.parse(path).getroot().findall(".//{*}title")]
    assert notes[:2] == ["constant, α = 1: 2", "constant, α = 1: 0.5"]
    assert notes[2:] == ["queue, where it helps: 2", "queue, where it cannot: 1"]
    with pytest.raises(ValueError, match="6 kinds need more than the 5 colors"):
        figures.write(path, [], list("abcdef"))


def test_a_ratio_is_paired_and_its_interval_holds_it(report: ModuleType) -> None:
    theirs = np.array([100.0, 200.0, 50.0, 400.0])
    exact = report.ratio(2 * theirs, theirs)
    assert exact == {key: pytest.approx(2.0) for key in ("value", "low", "high")}
    ours = theirs * [1.0, 2.0, 4.0, 2.0]
    found = report.ratio(ours, theirs)
    assert found["value"] == pytest.approx(2.0)  # the geometric mean of 1, 2, 4, 2
    assert 1.0 <= found["low"] < 2.0 < found["high"] <= 4.0
    with pytest.raises(ValueError, match="3 runs cannot be paired with 4"):
        report.ratio(ours[:3], theirs)


def test_runs_alternate_and_an_interrupted_benchmark_goes_on(
    tmp_path: Path, report: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "commit", lambda: "abc")
    made: list[str] = []

    def alternate(settings: int, *, resume: bool, rounds: int, most: int = 99) -> dict[str, list[dict]]:
        """Runs of a and b; the one after the first `most` is interrupted."""
        made.clear()

        def measured(arm: str) -> dict[str, str]:
            if len(made) == most:
                raise KeyboardInterrupt
            made.append(arm)
            return {"arm": arm}

        runs = report.Runs("b", {"settings": settings}, tmp_path / "runs.jsonl", resume)
        return runs.alternate({arm: lambda arm=arm: measured(arm) for arm in "ab"}, rounds)

    with pytest.raises(KeyboardInterrupt):
        alternate(1, resume=False, rounds=3, most=3)
    assert made == ["a", "b", "b"]
    results = alternate(1, resume=True, rounds=3)
    assert made == ["a", "a", "b"], "a run was made twice, or left out"
    assert results == {"a": [{"arm": "a"}] * 3, "b": [{"arm": "b"}] * 3}
    alternate(2, resume=True, rounds=1)
    assert made == ["a", "b"], "runs with other settings were taken"
    alternate(1, resume=False, rounds=1)
    assert made == ["a", "b"], "without resume every run is made"


def test_points_of_a_curve_are_means_of_consecutive_steps() -> None:
    curves = importlib.import_module("benchmarks.curves")
    steps = [{"step": 1 + number, "reward_mean": float(number)} for number in range(7)]
    assert curves.points(steps, 3) == [
        {"step": 3, "reward_mean": 1.0},
        {"step": 5, "reward_mean": 3.5},
        {"step": 7, "reward_mean": 5.5},
    ]
    assert [point["reward_mean"] for point in curves.points(steps)] == [*range(7)], "no more points than steps"
    assert curves.points([]) == []


def test_every_task_of_the_curves_has_a_config_that_is_accepted_and_enough_steps() -> None:
    curves = importlib.import_module("benchmarks.curves")
    for task in curves.TASKS.values():
        config = configs.load(ROOT / "configs" / f"{task.config}.py", list(task.changes))
        assert config.schedule.steps >= curves.POINTS
