"""Assumptions of benchmarks/grpo: answers of one length, rewards that differ, no race without agreement."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.models import transformer

WORDS = ("work", "start")


@pytest.fixture
def parts() -> dict[str, ModuleType]:
    names = {word: f"benchmarks.grpo.{word}" for word in WORDS} | {
        "race": "benchmarks.grpo.__main__",
        "report": "benchmarks.lib.report",
    }
    return {word: importlib.import_module(name) for word, name in names.items()}


@pytest.mark.parametrize("case", [pytest.param("equal", marks=pytest.mark.soak), "agentic"])
def test_every_answer_of_the_planted_model_has_one_length(parts: dict[str, ModuleType], case: str) -> None:
    """At temperature 1 and for all letters, each letter comes from the next link, and the end follows the last one."""
    work = next(each.work for each in parts["race"].CASES if each.name == case)
    start, chance = parts["start"], np.random.default_rng(0)
    weights = {name: jnp.asarray(value) for name, value in start.planted(work).items()}
    rows = jnp.array([[*work.prompt(number), *work.answer(chance)] for number in range(16)], jnp.int32)
    places = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    hidden = transformer.forward(start.SPEC, weights, rows, places, jnp.ones_like(rows))
    chances = np.asarray(
        jax.nn.softmax(transformer.logits(start.SPEC, weights, hidden)[:, work.prompt_tokens - 1 : -1])
    )
    first = parts["work"].FIRST
    of_link = chances[..., first : first + work.letters].reshape(*chances.shape[:2], work.links, work.choices)
    drawn = np.diagonal(of_link, axis1=1, axis2=2)  # [answer, letter of its link, link]
    whole = drawn.sum(1).prod(1) * chances[:, -1, parts["work"].END]
    assert whole.min() > 0.99, "one answer in a hundred ends elsewhere"
    assert drawn.max() < 2 / work.choices, "letters must stay open: rewards have to differ"


def test_a_batch_is_paid_in_groups_and_masked_where_the_environment_speaks(parts: dict[str, ModuleType]) -> None:
    made = parts["work"]
    work = made.Work(links=3, choices=4, turns=2, prompt_tokens=6)
    batch = made.batch(work)
    assert batch.prompts.shape == (64, 6) and batch.said.shape == (64, work.conversation_tokens) == (64, 10)
    assert np.array_equal(batch.prompts[0], batch.prompts[7]) and not np.array_equal(batch.prompts[7], batch.prompts[8])
    groups = batch.advantages.reshape(8, 8)
    assert np.allclose(groups.mean(1), 0, atol=1e-6) and np.allclose(groups.std(1, ddof=1), 1, atol=1e-6)
    longest = batch.said[(batch.said > 0).all(1)]
    assert (
        len(longest) and (longest[:, [3, 9]] == made.END).all() and (longest[:, 4:6] == [made.FIRST, made.TURN]).all()
    )
    assert (batch.mask == (batch.said > 0) & ~np.isin(np.arange(10), [4, 5])).all()
    assert len(set(batch.mask.sum(1).tolist())) > 1, "of one length the loss would be 0 for any reward"


def test_letters_are_read_as_they_were_written_and_paid_by_the_question(parts: dict[str, ModuleType]) -> None:
    made = parts["work"]
    work = made.Work(links=4, choices=8)
    letters = np.arange(work.letters)
    assert np.array_equal(made.letters(made.text(letters)), letters)
    assert made.letters("a\N{REPLACEMENT CHARACTER}").tolist() == [-1, -1]
    question = np.array([0, 0, 11])  # asks for the letters 3, 11, 19, 27
    first, *others = np.sqrt([1, 2, 3, 4]) / np.sqrt([1, 2, 3, 4]).sum()
    assert work.reward(question, np.array([3, 11, 19, 27])) == pytest.approx(1.0)
    assert work.reward(question, np.array([3, 8, 16, 24])) == pytest.approx(first)
    assert work.reward(question, np.array([2, 11, 19, 27])) == pytest.approx(sum(others))
    assert work.reward(question, np.array([3])) == pytest.approx(first), "of all links, however short the answer"


def race(
    parts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, path: Path, apart: float, gradients: float
) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """The result of a race of scripted arms, and their runs as (arm, setting)."""
    script, made = parts["race"], []
    rates = {"ours": [30.0, 40.0], "tunix": [10.0, 20.0]}

    def run(case: Any, folder: Path, arm: str, options: dict[str, Any]) -> dict[str, Any]:
        made.append((arm, options["at"]))
        times = dict.fromkeys(("train_s", "wait_s", "decode_s", "age_mean", "computed_share"), 1.0)
        return {"samples_per_s": rates[arm][options["at"]], "tokens_a_sample": 32.0, **times}

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script, "agreement", lambda *_: {"apart": apart, "gradients_apart": gradients})
    tries = {arm: [{"at": 0}, {"at": 1}] for arm in rates}
    case = script.Case("equal", 1.5, parts["work"].Work(4, 8), dict.fromkeys(rates, 2), tries)
    runs = parts["report"].Runs("race", {}, path / "runs.jsonl", resume=False)
    return script.race(case, path, {}, runs, 2), made


@pytest.mark.parametrize(("apart", "gradients"), [(2e-4, 0.0), (0.0, 2e-3), (float("nan"), 0.0), (0.0, float("nan"))])
def test_learners_that_compute_another_loss_are_not_raced(
    parts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, apart: float, gradients: float
) -> None:
    result, made = race(parts, monkeypatch, tmp_path, apart, gradients)
    assert not result["met"] and "no race" in result["why"] and "ratio" not in result
    assert made == []


def test_a_setting_under_which_an_arm_stalls_has_no_rate(
    parts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, hangs = parts["race"], [1]

    def run(case: Any, folder: Path, arm: str, options: dict[str, Any]) -> dict[str, Any]:
        if options["at"] in hangs:
            raise RuntimeError("gave no answer within 300 s")
        return {"samples_per_s": 10.0}

    monkeypatch.setattr(script, "run", run)
    case = script.Case("equal", 1.5, parts["work"].Work(4, 8), {"tunix": 2}, {"tunix": [{"at": 0}, {"at": 1}]})
    runs = parts["report"].Runs("race", {}, tmp_path / "runs.jsonl", resume=False)
    assert script.best(case, tmp_path, "tunix", {}, runs) == {"at": 0}
    hangs.append(0)
    with pytest.raises(RuntimeError, match="fails under every setting"):
        script.best(case, tmp_path, "tunix", {}, runs)


def test_each_arm_races_with_its_fastest_setting(
    parts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result, made = race(parts, monkeypatch, tmp_path, 0.0, 0.0)
    trials = [("ours", 0), ("ours", 1), ("tunix", 0), ("tunix", 1)]
    assert made == [*trials, ("ours", 1), ("tunix", 1), ("tunix", 1), ("ours", 1)]
    assert (result["ours"], result["peer"], result["ratio"], result["runs"]) == (40.0, 20.0, pytest.approx(2.0), 2)
    assert result["met"] and result["settings"] == {"ours": {"at": 1}, "tunix": {"at": 1}}
