"""Small worlds for the store's tests: tasks, members, a feeder, a server in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.store.builders import (
    DEADLINE_S,
    Feed,
    configured,
    connected,
    contents,
    failed,
    finished,
    keys,
    opened,
    produce,
    serving,
    task,
    version_ref,
)


@pytest.fixture
def small() -> SimpleNamespace:
    """The builders above, for test modules (which cannot import one another)."""
    return SimpleNamespace(
        task=task,
        finished=finished,
        failed=failed,
        keys=keys,
        version_ref=version_ref,
        Feed=Feed,
        configured=configured,
        serving=serving,
        connected=connected,
        opened=opened,
        produce=produce,
        contents=contents,
        DEADLINE_S=DEADLINE_S,
    )


@pytest.fixture
def run() -> Callable[[Any], Any]:
    """Run a coroutine under a deadline."""
    return lambda job: asyncio.run(asyncio.wait_for(job, 3 * DEADLINE_S))
