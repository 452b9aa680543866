"""A machine that refuses a thread: before Python 3.12 asyncio starts one to wait for each process."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from jaxroll import lifeline
from jaxroll.config import TaskConfig
from jaxroll.envs.processes import EnvProcess
from jaxroll.errors import InfraError

pytestmark = pytest.mark.process


@pytest.fixture
def no_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started that waits for a process."""
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if "waitpid" in self.name:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel has no descriptors of processes")
def test_a_process_of_environments_needs_no_thread_that_waits_for_it(no_thread_waits: None) -> None:
    """If a thread were needed and refused, the process would run without being waited for, and never end."""

    async def started() -> None:
        process = await asyncio.wait_for(EnvProcess.start({"single_turn": TaskConfig()}), 60)
        await asyncio.wait_for(process.kill(), 60)
        assert not process.is_alive

    asyncio.run(started())


def test_a_refused_thread_is_a_failure_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*words: str, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)

    async def started() -> None:
        with pytest.raises(OSError, match="can't start new thread"):
            await lifeline.child(sys.executable, "-c", "")
        with pytest.raises(InfraError, match="can't start new thread"):
            await EnvProcess.start({"single_turn": TaskConfig()})

    asyncio.run(started())
