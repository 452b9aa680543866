"""google-jetstream stands beside JaxRoll in one environment, and its interface works there."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(300)]


def test_its_test_engine_generates_what_can_be_worked_out(peer) -> None:
    said = peer("jetstream", "jetstream_generate.py")
    # prefill doubles (2, 65, 66), which sums to 266; then 266 + 266 / 2, then 266 + (266 + 399) / 2
    assert said["tokens"] == [266, 399, 598]
    assert said["slots"] == 2
