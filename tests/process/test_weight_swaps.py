"""`schedule.weight_swap` in whole runs: running requests at a weight swap; samplers during an evaluation."""

from __future__ import annotations

import itertools

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from tests.harness.train_process import LEARNING, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(600)]
# Many steps: the test ends a run when it has observed the event, however busy the machine is.
ENDLESS = (*LEARNING, "--config.schedule.steps=5000", "--config.schedule.alpha=1", "--config.sampling.max_tokens=48")


def mixed(train: Train) -> int:
    """The number of members that were sampled at several versions."""
    return train.query("SELECT COUNT(*) FROM members WHERE state = 'done' AND newest_step > oldest_step")[0][0]


def discarded(rows: list[dict]) -> int:
    """Tokens that were discarded at weight swaps."""
    return max((row["tokens_discarded"] for row in rows if row["kind"] == "stats"), default=0)


def sampled_during_an_evaluation(rows: list[dict]) -> bool:
    """True if a decode span of a sampler is within an evaluation."""
    within = [(row["t0"], row["t1"]) for row in rows if row["kind"] == "eval"]
    return any(
        began <= row["t0"] and row["t1"] <= ended
        for row in rows
        if row["kind"] == "span" and row["what"] == "decode" and row["role"] == "sampler-0" and row["tokens"]
        for began, ended in within
    )


@pytest.mark.parametrize(
    ("weight_swap", "evaluated"),
    [
        ("reprefill", True),
        *((weight_swap, False) for weight_swap in ("keep_kv", "restart", "drain")),
    ],
)
def test_running_requests_go_on_by_the_policy_of_the_weight_swap(free_run_dir, weight_swap, evaluated):
    words = (*ENDLESS, f"--config.schedule.weight_swap={weight_swap}", f"--config.evaluator.every={int(evaluated)}")
    goes_on, throws_away = weight_swap in ("reprefill", "keep_kv"), weight_swap == "restart"
    with Train(free_run_dir, *words) as train:
        train.until(lambda rows: last_step(rows) >= 4, "four steps")
        train.until(lambda rows: not goes_on or mixed(train) > 0, "a member of several versions")
        train.until(lambda rows: not throws_away or discarded(rows) > 0, "discarded tokens")
        train.until(lambda rows: not evaluated or sampled_during_an_evaluation(rows), "rollouts during an evaluation")
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
        assert (mixed(train) > 0) == goes_on and (discarded(train.rows) > 0) == throws_away
        compared = [row for row in train.rows if row["kind"] == "step" and row["logprob_mismatch_tokens"]]
        assert compared and max(row["logprob_mismatch_max"] for row in compared) < 1e-3


def test_the_async_controller_trains_when_all_samplers_have_the_newest_version(free_run_dir):
    """Every claim comes first, then the swap of each sampler, then the training; running requests continue."""
    # At α = 1 no member of a later step may begin before a claim is complete, so that none runs at its swap.
    words = ("--config.schedule.mode=async_controller", "--config.schedule.alpha=2", "--config.sampler.count=2")
    with Train(free_run_dir, *ENDLESS, *words) as train:
        train.until(lambda rows: last_step(rows) >= 8, "eight steps")
        train.until(lambda rows: mixed(train) > 0, "a member of several versions")
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=2)
        swapped = {
            (row["role"], row["version"]): row["t1"]
            for row in train.rows
            if row["kind"] == "span" and row["what"] == "weight_swap" and row["role"] != "evaluator"
        }
        steps = [row for row in train.rows if row["kind"] == "step"]
        assert len(steps) >= 8 and {role for role, _ in swapped} == {"sampler-0", "sampler-1"}
        for before, row in itertools.pairwise(steps):
            for sampler in ("sampler-0", "sampler-1"):
                assert before["t1"] < swapped[sampler, f"0.{before['step']}"] <= row["t0"], (sampler, row["step"])
            assert "0" not in row["age_hist"], "a token of the batch is from after the swap that follows it"


@pytest.mark.parametrize("weight_swap", ["reprefill", "trajectory"])
def test_conversations_have_one_version_where_a_swap_waits_for_them(free_run_dir, weight_swap):
    words = (
        *("--config.model.size=nano", "--config.sft.steps=3", "--config.sft.batch=8", "--config.evaluator.every=0"),
        *("--config.schedule.steps=5000", "--config.schedule.groups_per_step=4", "--config.schedule.group_size=4"),
        *("--config.sampler.slots=8", "--config.sampler.concurrent_episodes=24", "--config.sampler.cache_pages=600"),
        f"--config.schedule.weight_swap={weight_swap}",
    )
    with Train(free_run_dir, *words, config="agentic_frozen_lake") as train:
        train.until(lambda rows: last_step(rows) >= 8, "eight steps")
        train.until(lambda rows: weight_swap == "trajectory" or mixed(train) > 0, "a member of several versions")
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
        assert (mixed(train) > 0) == (weight_swap == "reprefill") and not discarded(train.rows)
