"""google-tunix, a peer of the benchmarks, trains in its own environment."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(300)]


def test_tunix_takes_two_steps_of_grpo(peer) -> None:
    said = peer("tunix", "tunix_step.py", "2")
    assert len(said["rewards"]) == 2
    assert all(0 < reward < 1 for reward in said["rewards"])
    assert said["moved"] > 1e-4
