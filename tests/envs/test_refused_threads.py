"""A machine that refuses a thread: asyncio starts one to wait for each process (on Python 3.11)."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from jaxroll.config import TaskConfig
from jaxroll.envs.processes import EnvProcess
from jaxroll.errors import InfraError


@pytest.mark.process
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="processes are waited for without threads")
def test_a_process_of_environments_without_a_thread_to_wait_for_it_is_a_failure_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if "waitpid" in self.name:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)

    async def started() -> None:
        with pytest.raises(InfraError, match="can't start new thread"):
            await asyncio.wait_for(EnvProcess.started(TaskConfig()), 60)

    asyncio.run(started())
