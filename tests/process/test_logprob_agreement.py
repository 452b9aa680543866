"""Whole runs in which sampler and learner must agree on log-probs: truncation, experts, divided rows, curriculum."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from jaxroll import wire
from jaxroll.records import Finished, Member
from jaxroll.store.log.replay import replay_log
from tests.harness.train_process import Train, assert_sound

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
STEPS = 5
QUESTIONS = ("stream", "planet", "window", "copper", "garden", "rocket", "silver", "little")
RUN = (
    "--config.sft.steps=0",
    "--config.evaluator.every=0",
    f"--config.schedule.steps={STEPS}",
    "--config.task.env=tests.harness.envs.dense_reward:dense_reward",
)
TOP_P = ("--config.sampling.top_p=0.9",)
TOP_K = ("--config.sampling.top_k=5",)
EXPERTS = (
    "--config.model.size=tiny_moe",
    "--config.learner.mesh.expert=2",
    "--config.learner.routing_replay=True",
)
SEQUENCE = ("--config.learner.mesh.sequence=2",)
RESTING = ("--config.schedule.curriculum_rest=3", "--config.schedule.curriculum_explore=0.3")
BAND = ("--config.schedule.curriculum=band", "--config.schedule.curriculum_high=0.5")


def questions(folder: Path) -> tuple[str, ...]:
    """Overrides for a dataset of eight questions, which return in every pass: two steps take them all."""
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": word, "answer": word[::-1]}) + "\n" for word in QUESTIONS))
    return "--config.task.source=jsonl", f"--config.task.path={path}", "--config.task.heldout_items=0"


def finished(train: Train) -> list[Finished]:
    """The members whose bytes the store still has."""
    outcomes = [wire.decode(body, Member).outcome for (body,) in train.query("SELECT body FROM payloads")]
    return [outcome for outcome in outcomes if isinstance(outcome, Finished)]


def assert_agreement(train: Train) -> None:
    """Assert that a run ends, accounts for every group, learns, and that log-probs agree: 1e-4·max(1, sd of logits)."""
    assert train.finish() == 0, train.logs()
    assert_sound(train, steps=STEPS, alpha=1)
    with sqlite3.connect(f"{(train.run_dir / 'store.db').absolute().as_uri()}?mode=ro", uri=True) as db:
        assert replay_log(db).violations == []
    steps = [row for row in train.rows if row["kind"] == "step"]
    compared = [row for row in steps if row["logprob_mismatch_tokens"]]
    assert compared and any(row["grad_norm"] > 0 for row in steps)
    bounds = [(row["logprob_mismatch_max"], 1e-4 * max(1.0, row["logits_std"])) for row in compared]
    assert all(found < bound for found, bound in bounds), bounds


def assert_recorded(train: Train, words: tuple[str, ...]) -> None:
    """Assert that the members have what the learner needs: the ids kept for every token, the experts of every token."""
    outcomes = finished(train)
    sampled = [segment for outcome in outcomes for segment in outcome.segments if segment.loss_mask.any()]
    assert sampled
    assert all(bool(len(one.support)) == ({*TOP_P, *TOP_K} & {*words} != set()) for one in sampled)
    tokens = [sum(len(segment.tokens) for segment in outcome.segments) for outcome in outcomes]
    recorded = [len(outcome.experts) for outcome in outcomes]
    assert recorded == ([count - 1 for count in tokens] if set(EXPERTS) <= {*words} else [0] * len(tokens))


@pytest.mark.soak
def test_truncated_samples_of_experts_on_two_devices_with_a_curriculum(free_run_dir):
    words = (*RUN, *TOP_P, *EXPERTS, *RESTING, *questions(free_run_dir.parent))
    with Train(free_run_dir, *words) as train:
        assert_agreement(train)
        assert_recorded(train, words)
        assert train.report()["prompts_skipped"]["curriculum"] > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "words",
    [TOP_P, TOP_K, EXPERTS, SEQUENCE, (*TOP_P, *EXPERTS, *SEQUENCE)],
    ids=["top_p", "top_k", "experts", "sequence", "all"],
)
def test_a_run_agrees(free_run_dir, words):
    with Train(free_run_dir, *RUN, *words) as train:
        assert_agreement(train)
        assert_recorded(train, words)


@pytest.mark.soak
def test_a_run_samples_questions_of_the_band_and_a_share_of_the_others(free_run_dir):
    with Train(free_run_dir, *RUN, *BAND, *questions(free_run_dir.parent)) as train:
        assert_agreement(train)
        found = train.query("SELECT reward_sum / members FROM questions WHERE members > 0")
        assert not all(0 < mean < 0.5 for (mean,) in found), "every question is in the band"
        assert train.report()["prompts_skipped"]["curriculum"] > 0
