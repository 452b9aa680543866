"""Control of a run from the dashboard: the store obeys its calls, and only the holder of the run is stopped."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxroll.errors import ConfigError, InfraError, NoCredit
from jaxroll.records import Version
from jaxroll.rpc import protocol
from jaxroll.ui import runs
from tests.harness.store.builders import DEADLINE_S, configured, connected, serving, version_ref

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "ab")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_pause_and_resume_reach_the_store_with_the_token_of_the_run(tmp_path: Path) -> None:
    config = configured()
    protocol.create(tmp_path)

    async def acts() -> None:
        async with (
            serving(tmp_path, config),
            connected(tmp_path, config, "learner") as learner,
            connected(tmp_path, config, "sampler") as sampler,
        ):
            await learner.publish(version_ref(await learner.begin(None)))
            assert "no leases" in await runs.control(tmp_path, "pause")
            with pytest.raises(NoCredit, match="paused"):
                await sampler.lease(Version(0, 0), 4, 0.0)
            assert await runs.control(tmp_path, "resume") == "Resumed."
            assert await sampler.lease(Version(0, 0), 4, 5.0)
            assert "checkpoint" in await runs.control(tmp_path, "checkpoint")

    asyncio.run(asyncio.wait_for(acts(), DEADLINE_S))


def test_a_store_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PATIENCE_S", 0.1)
    with pytest.raises(InfraError, match="no store yet"):
        asyncio.run(runs.control(tmp_path, "pause"))
    (tmp_path / "store.addr").write_text("127.0.0.1:1\n")
    with pytest.raises(InfraError):
        asyncio.run(runs.control(tmp_path, "resume"))
    with pytest.raises(ConfigError, match="pause, resume, checkpoint, stop"):
        asyncio.run(runs.control(tmp_path, "kill"))


@pytest.mark.process
def test_stop_signals_the_holder_of_the_run_and_no_other(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            assert "supervisor" in asyncio.run(runs.control(tmp_path, "stop"))
            assert holder.wait(DEADLINE_S) == -signal.SIGTERM
        finally:
            holder.kill()
    with pytest.raises(InfraError, match="no supervisor"):  # the file is there, but no process holds it
        asyncio.run(runs.control(tmp_path, "stop"))


@pytest.mark.process
def test_stop_looks_again_for_the_holder_before_it_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor may have ended in between, and another process may have its number."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        try:
            found = iter([other.pid, None])
            monkeypatch.setattr(runs.record, "supervisor_pid", lambda path: next(found))
            with pytest.raises(InfraError, match="has just ended"):
                asyncio.run(runs.control(tmp_path, "stop"))
            assert other.poll() is None
        finally:
            other.kill()
