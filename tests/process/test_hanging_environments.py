"""Environments that hang in threads: each costs its member and a thread; a restart of the sampler frees the threads."""

from __future__ import annotations

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from tests.harness.train_process import SMALL, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
THREADS = 24  # of which six may hang


def restarts(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["kind"] == "restart"]


@pytest.mark.soak
def test_a_sampler_without_threads_is_started_again_as_often_as_it_takes(free_run_dir) -> None:
    env = "--config.task.env=tests.harness.envs.hanging:hanging_env"
    words = (
        *SMALL,
        env,
        f"--config.sampler.env_threads={THREADS}",
        "--config.schedule.steps=5000",
        "--config.supervisor.max_restarts=0",
        "--config.supervisor.backoff_s=0.1",
    )
    with Train(free_run_dir, *words) as train:
        train.until(lambda rows: len(restarts(rows)) >= 2, "two restarts for lack of threads")
        reached = last_step(train.rows)
        train.until_step(reached + 2)
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
        assert {row["process"] for row in restarts(train.rows)} == {"sampler-0"}
        assert "because too many of its threads hang in environments" in train.output.read_text()
        lost = train.query("SELECT COUNT(*) FROM failures WHERE kind = 'DATA'")[0][0]
        assert lost >= 2 * THREADS // 4, "an environment that hung has no record"
