"""Fixtures of the tests of commands and of the supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.stand_in_run import StandInRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[StandInRun]:
    made = StandInRun(tmp_path)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate(timeout=10)
