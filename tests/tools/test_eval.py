"""Figures of `jaxroll eval`, and its options."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

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


SEVERAL = dataclasses.replace(
    Config(), evaluator=EvaluatorConfig(sets={"hard": {"name": "gcd", "samples": 8}}, samples=4, temperature=0.5)
)


def planned(monkeypatch: pytest.MonkeyPatch, config: Config, *words: str) -> dict[str, tuple[int, float]]:
    """Answers per item and their temperature, of each set of `jaxroll eval`; nothing is generated."""
    found, temperatures = {}, []

    async def scores(manager: object, tasks: tuple[Task, ...], *args: object, samples: int, **more: object) -> list:
        found[tasks[0].env] = samples, temperatures[-1]
        return [[score("", True)]] * samples

    def sampling_params(config: Config, tokenizer: object, temperature: float) -> None:
        temperatures.append(temperature)

    sets = {name: (Task(0, (), name, "{}", 0, "h"),) for name in ("heldout", "hard")}
    pool = SimpleNamespace(start=lambda: None, close=lambda: None)
    model = SimpleNamespace(tokenizer=None, version=None, source="", proxy=None)
    monkeypatch.setattr(evaluation.heldout, "evaluated", lambda config: sets)
    monkeypatch.setattr(evaluation.registry, "scoring_pool", lambda config, run_dir: pool)
    closed = SimpleNamespace(create=None, play=None, close=lambda: asyncio.sleep(0))
    for of_environments in ("Executors", "Agents"):
        monkeypatch.setattr(evaluation, of_environments, lambda pool, config: closed)
    monkeypatch.setattr(evaluation, "load", lambda *args, **more: model)
    monkeypatch.setattr(evaluation, "ask", lambda model, play: asyncio.run(play(None)))
    monkeypatch.setattr(evaluation.episode, "scores", scores)
    monkeypatch.setattr(evaluation.episode, "sampling_params", sampling_params)
    options = cli.parser().parse_args(["eval", "runs/a", *words])
    preflight.check_options(options, config)
    evaluation.evaluated(RoleArgs(config, Path("runs/a")), options)
    return found


def test_an_evaluation_has_the_samples_and_temperature_of_the_config_unless_others_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the run's own evaluator: the figures of both can be compared."""
    assert planned(monkeypatch, CONFIG) == {"heldout": (1, 0.0), "hard": (1, 0.0)}
    assert planned(monkeypatch, SEVERAL) == {"heldout": (4, 0.5), "hard": (8, 0.5)}
    assert planned(monkeypatch, SEVERAL, "--temperature=1") == {"heldout": (4, 1.0), "hard": (8, 1.0)}
    assert planned(monkeypatch, SEVERAL, "--samples=1", "--temperature=0") == {"heldout": (1, 0.0), "hard": (1, 0.0)}
    assert planned(monkeypatch, CONFIG, "--samples=2", "--temperature=1") == {"heldout": (2, 1.0), "hard": (2, 1.0)}


@pytest.mark.parametrize(
    ("config", "words", "reason"),
    [
        (CONFIG, "--samples=2", "--samples = 2: greedy answers to an item are all the same. Add --temperature=1"),
        (SEVERAL, "--temperature=0", "evaluator.samples = 4: greedy .* Set --temperature above 0, or add --samples=1"),
        (SEVERAL, "--k=5", "--k = 5: heldout has 4 answers per item. Add --samples=5"),
        (SEVERAL, "--set=hard --k=2 --k=9", "--k = 9: hard has 8 answers per item. Add --samples=9"),
        (CONFIG, "--samples=2 --temperature=1 --k=3", "--k = 3: heldout has 2 answers per item"),
    ],
)
def test_figures_that_cannot_be_computed_are_refused(config: Config, words: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        preflight.check_options(cli.parser().parse_args(["eval", "runs/a", *words.split()]), config)
    preflight.check_options(cli.parser().parse_args(["eval", "runs/a", "--set=hard", "--k=8"]), SEVERAL)


def test_only_named_sets_with_items_are_evaluated() -> None:
    task = score("", True).task
    sets = {"heldout": (), "hard": (task,), "other": (task,)}
    assert list(evaluation.chosen(sets, [])) == ["hard", "other"]
    assert list(evaluation.chosen(sets, ["hard"])) == ["hard"]
