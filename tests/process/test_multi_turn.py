"""A run with episodes of several turns: real roles, a real game, and the engine's prefix cache."""

import pytest

from tests.harness.train_process import Train, assert_sound

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
SMALL = ("--config.model.size=nano", "--config.sft.steps=3", "--config.schedule.steps=3", "--config.sft.batch=8",
         "--config.schedule.groups_per_step=4", "--config.schedule.group_size=4", "--config.task.heldout_items=8",
         "--config.evaluator.every=0", "--config.sampler.slots=8", "--config.sampler.concurrent_episodes=24",
         "--config.sampler.cache_pages=600")  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_question_and_a_game_are_trained_in_one_run(free_run_dir):
    # After fewer steps of warm start hardly any answer ends, so that no lake has an end.
    steps = ("--config.schedule.steps=6", "--config.evaluator.every=3", "--config.sft.steps=60")
    with Train(free_run_dir, *SMALL, *steps, config="two_tasks") as train:
        assert train.finish(900.0) == 0, train.logs()
        assert_sound(train, steps=6, alpha=1)
        trained = [row["sources"] for row in train.rows if row["kind"] == "step"]
        assert [{name: of["samples"] for name, of in sources.items()} for sources in trained] == [
            {"gcd": 4, "lake": 12}
        ] * 6
        last = [row for row in train.rows if row["kind"] == "stats"][-1]
        assert min(of["episodes"] for of in last["sources"].values()) >= 6 * 4 and last["failed_by_source"] == {}
        assert {"reasoning_gym", "correct", "success", "turns"} <= last["reward_parts"].keys()
        assert {*[row for row in train.rows if row["kind"] == "eval"][-1]["sources"]} == {"gcd", "lake"}
        assert max(sources["gcd"]["reward"] for sources in trained) <= 0.5, "half a point for a right divisor"


def test_an_agent_is_trained_on_conversations(free_run_dir):
    with Train(free_run_dir, *SMALL, config="agentic_frozen_lake") as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=3, alpha=1)
        last = [row for row in train.rows if row["kind"] == "stats"][-1]
        assert last["episodes"] >= 3 * 16 and last["failed"] == {}, train.logs()
        assert last["env_calls"] > last["episodes"], "episodes did not have a reset and several steps"
        assert last["prefix_hits"] > 0
        assert 0 <= last["reward_parts"]["truncated"] <= 1
