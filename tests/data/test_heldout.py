"""The held-out set: distinct questions from a distant range, never trained on, the same for every seed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.config import Config, EvaluatorConfig, RunConfig, SftConfig, TaskConfig
from jaxroll.data import preparation, tasks
from jaxroll.data import tasks as heldout
from jaxroll.data.tasks import PromptPipeline
from jaxroll.errors import ConfigError
from jaxroll.records import Message

CONFIG = Config()
ARITHMETIC = dataclasses.replace(
    CONFIG,
    task=TaskConfig(
        name="basic_arithmetic",
        args={
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 1,
            "max_digits": 2,
            "operators": ["+", "-"],
            "allow_parentheses": False,
            "allow_negation": False,
        },
    ),
)


@pytest.mark.parametrize("config", [CONFIG, ARITHMETIC], ids=["spell_backward", "basic_arithmetic"])
def test_512_questions_are_kept_out_of_training_and_warm_start(config: Config) -> None:
    kept_aside = tasks.tasks(config)
    assert len({task.question_hash for task in kept_aside}) == len(kept_aside) == 512
    assert all(task.index >= config.task.heldout_start for task in kept_aside)
    trained = list(itertools.islice(PromptPipeline(config), 3000))
    taught = [task for task, _ in preparation.examples(config, 3000)]
    assert tasks.overlap(kept_aside, (task.question_hash for task in trained + taught)) == frozenset()


def test_without_exclusion_by_hash_a_small_task_would_leak() -> None:
    """The reason for the hashes: distant ranges alone share questions."""
    from jaxroll.data.tasks import Candidates

    candidates = Candidates(ARITHMETIC)
    near = {candidates.at(index).task.question_hash for index in range(5000)}
    assert len(tasks.overlap(tasks.tasks(ARITHMETIC), near)) > 50


def test_the_held_out_set_is_the_same_for_every_seed() -> None:
    other = dataclasses.replace(CONFIG, run=RunConfig(seed=77))
    assert tasks.tasks(CONFIG) == tasks.tasks(other)


def test_building_it_takes_under_two_seconds() -> None:
    tasks.tasks(CONFIG)  # imports
    started = time.process_time()
    tasks.tasks(CONFIG)
    assert time.process_time() - started < 2.0


def test_a_task_with_too_few_questions_says_how_many_there_are() -> None:
    tiny = dataclasses.replace(CONFIG, task=TaskConfig(name="count_bits", args={"max_n": 30}))
    with pytest.raises(ConfigError, match="only 30 distinct"):
        tasks.tasks(tiny)


def test_none_may_be_held_out() -> None:
    assert tasks.tasks(dataclasses.replace(CONFIG, task=TaskConfig(heldout_items=0))) == ()


def test_overlap_finds_a_held_out_question() -> None:
    kept_aside = tasks.tasks(CONFIG)
    leaked = kept_aside[3].question_hash
    assert tasks.overlap(kept_aside, ["0" * 16, leaked]) == {leaked}


def test_case_and_blanks_do_not_make_another_question(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": q, "answer": "a"} for q in ("Sun", "sun", "a  b", "A b", "moon", "star")]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    config = dataclasses.replace(CONFIG, task=TaskConfig(source="jsonl", path=str(path), heldout_items=3))
    assert {task.messages[0].content for task in tasks.tasks(config)} == {"star", "moon", "A b"}
    trained = {task.messages[0].content for task in itertools.islice(PromptPipeline(config), 20)}
    assert trained == {"Sun", "sun"}


# --- the warm start


def test_worked_examples_are_questions_with_their_answers() -> None:
    found = preparation.examples(CONFIG, 200)
    assert len(found) == 200
    assert all(said == (Message("assistant", task.messages[0].content[::-1]),) for task, said in found)
    assert all(task.index >= CONFIG.sft.start for task, _ in found)
    assert found == preparation.examples(CONFIG, 200)
    other = preparation.examples(dataclasses.replace(CONFIG, run=RunConfig(seed=1)), 200)
    assert len({t.index for t, _ in found} & {t.index for t, _ in other}) < 5


def test_a_short_file_serves_the_warm_start_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": str(i)}) + "\n" for i in range(20)))
    config = dataclasses.replace(CONFIG, task=TaskConfig(source="jsonl", path=str(path), heldout_items=5))
    indices = [task.index for task, _ in preparation.examples(config, 40)]
    assert set(indices) == set(range(15))


def test_without_usable_examples_the_warm_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxroll.data import tasks as candidates

    at = candidates.Candidates.at
    monkeypatch.setattr(candidates.Candidates, "at", lambda self, i: dataclasses.replace(at(self, i), worked=()))
    with pytest.raises(ConfigError, match=r"sft\.steps.*has no answer"):
        preparation.examples(CONFIG, 1)


# --- ranges


@given(st.lists(st.integers(0, 10**9), min_size=3, max_size=3, unique=True), st.none() | st.integers(1, 2 * 10**9))
def test_ranges_never_overlap_unless_a_file_is_too_short(starts: list[int], size: int | None) -> None:
    train, held, sft = starts
    config = dataclasses.replace(
        CONFIG, task=TaskConfig(train_start=train, heldout_start=held), sft=SftConfig(start=sft)
    )
    try:
        found = tasks.of(config, size)
    except ConfigError:
        assert size is not None and (train >= size or held <= train)
        return
    spans = [found.train, found.heldout, found.sft]
    assert all(len(span) > 0 for span in spans)
    if size is None:
        assert [span[0] for span in spans] == starts
        edges = sorted((span[0], span[-1]) for span in spans)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(edges))
    else:
        assert all(0 <= index < size for span in spans for index in (span[0], span[-1]))
        assert found.train[0] == train


def test_two_ranges_with_one_start_are_refused() -> None:
    config = dataclasses.replace(CONFIG, task=TaskConfig(train_start=5, heldout_start=5))
    with pytest.raises(ConfigError, match="start at one item"):
        tasks.of(config, None)


# --- several sets

SETS = {"short": {"name": "spell_backward", "args": {"min_word_len": 3, "max_word_len": 3}, "items": 20}}


def with_sets(sets: dict, **task: Any) -> Config:
    own = TaskConfig(args={"min_word_len": 3, "max_word_len": 4}, heldout_items=8, **task)
    return dataclasses.replace(Config(), task=own, evaluator=EvaluatorConfig(sets=sets))


def test_no_question_of_any_set_is_trained_on() -> None:
    config = with_sets(SETS)
    sets = heldout.evaluated(config)
    assert {name: len(found) for name, found in sets.items()} == {"heldout": 8, "short": 20}
    assert all(len(task.messages[0].content) == 3 for task in sets["short"])
    trained = {next(stream).question_hash for stream in [PromptPipeline(config)] for _ in range(2000)}
    assert not heldout.overlap(itertools.chain(*sets.values()), trained)
    plain = PromptPipeline(with_sets({}))
    assert heldout.overlap(sets["short"], {next(plain).question_hash for _ in range(2000)})


def test_a_set_of_a_file_has_all_its_rows(tmp_path: Path) -> None:
    rows = [{"question": "ab", "answer": "ba"}] * 2 + [
        {"question": "a" * 99, "answer": "a"},
        {"question": "cd", "answer": "dc"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    entry = {"source": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    found = heldout.evaluated(with_sets({"file": entry}))["file"]
    assert [task.messages[0].content for task in found] == ["ab", "ab", "cd"]
    with pytest.raises(ConfigError, match=r"evaluator\.sets\.file\.items.*3 items.*prompt tokens"):
        heldout.evaluated(with_sets({"file": entry | {"items": 4}}))
