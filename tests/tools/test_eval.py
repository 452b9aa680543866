"""Figures of `jaxroll eval`, and its options."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxroll.config import Config, EvaluatorConfig, RoleArgs
from jaxroll.control import cli, preflight
from jaxroll.errors import ConfigError
from jaxroll.records import Task
from jaxroll.report.summary import wilson
from jaxroll.rollout.episode import Score
from jaxroll.tools import generate as evaluation

CONFIG = dataclasses.replace(Config(), evaluator=EvaluatorConfig(sets={"hard": {"name": "gcd"}}))


def score(source: str, right: bool, pinned: bool = True) -> Score:
    args = {"source": source} if source else {}
    return Score(Task(0, (), "e", json.dumps(args), 0, "h"), "", right, pinned)


def test_one_greedy_answer_has_an_accuracy_with_wilsons_interval() -> None:
    found = evaluation.figures([[score("", True), score("", False), score("", True, pinned=False)]], ())
    assert found == {"items": 3, "scored": 2, "accuracy": [0.5, *wilson(0.5, 2)]}
    assert evaluation.lines("heldout", found) == ["heldout: accuracy 50.0 % (9.5 to 90.5) of 2 items"]


def test_several_samples_have_mean_and_pass_at_k_by_source() -> None:
    one = [score("a", True), score("a", False), score("b", False)]
    two = [score("a", True), score("a", True), score("b", False)]
    found = evaluation.figures([one, two], (1, 2))
    assert found["mean@2"][0] == found["pass@1"][0] == pytest.approx(0.5)
    assert found["pass@2"][0] == pytest.approx(2 / 3)
    assert found["sources"] == {"a": [0.75, 2], "b": [0.0, 1]}
    assert evaluation.lines("hard", found)[-2:] == ["hard, a: 75.0 % of 2 items", "hard, b: 0.0 % of 1 items"]


def test_nothing_that_counts_is_reported_as_such() -> None:
    found = evaluation.figures([[score("", True, pinned=False)]], ())
    assert evaluation.lines("heldout", found) == ["heldout: no item could be scored"]


def test_only_the_json_is_on_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Compilation is reported elsewhere, and an environment may print."""

    def evaluated(args: object, options: object) -> tuple[str, dict]:
        print("an environment prints")
        return "the warm start", {"heldout": {"items": 0, "scored": 0}}

    monkeypatch.setattr(evaluation, "evaluated", evaluated)
    options = cli.parser().parse_args(["eval", "runs/a", "--json"])
    assert evaluation.evaluate(RoleArgs(CONFIG, Path("runs/a")), options) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["weights"] == "the warm start" and err == "an environment prints\n"


def test_a_held_out_set_that_the_config_does_not_have_is_refused_with_the_known_ones() -> None:
    options = cli.parser().parse_args(["eval", "runs/a", "--set=hrad"])
    with pytest.raises(ConfigError, match=r"--set = 'hrad': there is no such held-out set.*Use heldout, hard"):
        preflight.check_options(options, CONFIG)
    preflight.check_options(cli.parser().parse_args(["eval", "runs/a", "--set=hard"]), CONFIG)


def test_only_named_sets_with_items_are_evaluated() -> None:
    task = score("", True).task
    sets = {"heldout": (), "hard": (task,), "other": (task,)}
    assert list(evaluation.chosen(sets, [])) == ["hard", "other"]
    assert list(evaluation.chosen(sets, ["hard"])) == ["hard"]
