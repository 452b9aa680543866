"""A whole run in which the second sampler fetches the weights from the first."""

from __future__ import annotations

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from tests.harness.train_process import LEARNING, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
WORDS = (
    *LEARNING, "--config.schedule.steps=5000", "--config.schedule.alpha=2", "--config.sampler.count=2",
    "--config.transfer.channel=tcp", "--config.transfer.relay=tree",
)  # fmt: skip


def fetched(rows: list[dict], role: str) -> list[dict[str, int]]:
    """The bytes of each fetch of a sampler, by source."""
    found = [row for row in rows if row["kind"] == "span" and row["what"] == "fetch" and row["role"] == role]
    return [row["sources"] for row in found]


@pytest.mark.soak
def test_the_second_sampler_fetches_from_the_first(free_run_dir) -> None:
    with Train(free_run_dir, *WORDS) as train:
        train.until(lambda rows: last_step(rows) >= 8, "eight steps")
        train.until(
            lambda rows: all(len(fetched(rows, role)) >= 4 for role in ("sampler-0", "sampler-1")), "fetches of both"
        )
        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=2)
    sources = [list(one) for role in ("sampler-0", "sampler-1") for one in fetched(train.rows, role)]
    relayed = [one for one in sources if one in (["sampler-0"], ["sampler-1"])]
    assert len(relayed) >= 3 and all(len(one) == 1 for one in sources), sources
    sent = [row["relay_sent_bytes"] for row in train.rows if row["kind"] == "stats" and "relay_sent_bytes" in row]
    assert max(sent) > 0
    steps = [row["weights_sent_bytes"] for row in train.rows if row["kind"] == "step"]
    assert steps == sorted(steps) and steps[-1] > 0
