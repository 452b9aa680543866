"""Control of a live run: pause, resume and checkpoint are calls to its store, stop is a signal to its supervisor.

An RPC to the store checks the run's token, records the caller and answers at once; a file in the run's folder would
not. A run whose store does not answer grants no leases anyway.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from jaxroll.errors import ConfigError, InfraError
from jaxroll.report.figures import record
from jaxroll.run_paths import RunPaths
from jaxroll.store.client import StoreClient

PATIENCE_S, CALL_S = 3.0, 5.0
DONE = {
    "pause": "Paused: no leases are granted. Running rollouts finish, and the learner trains complete groups.",
    "resume": "Resumed.",
    "checkpoint": "The learner writes a checkpoint after the next step that it claims.",
    "stop": "The supervisor stops the roles, the learner after its step and a checkpoint.",
}


async def control(path: Path, action: str) -> str:
    """Do `action` (a key of `DONE`) with the run and return what follows.

    ConfigError for an unknown action, InfraError if the store or the supervisor cannot be reached from this machine.
    """
    if action not in DONE:
        raise ConfigError("action", action[:40], "there is no such action", f"Use one of {', '.join(DONE)}.")
    if action == "stop":
        _stop(path)
    else:
        await _call(path, action)
    return DONE[action]


async def _call(path: Path, action: str) -> None:
    address = RunPaths(path).store_address
    if not address.is_file():
        raise InfraError(f"{address} is not there: the run has no store yet")
    client = await StoreClient.connect(address, role="supervisor", name="ui", patience_s=PATIENCE_S, call_s=CALL_S)
    try:
        await client.control(action)  # type: ignore[arg-type]  # `DONE` has the actions
    finally:
        await client.aclose()


def _stop(path: Path) -> None:
    """Send SIGTERM to the process that holds the run's lock, and never to a later process with the same pid."""
    pid = record.supervisor_pid(path)
    if pid is None:
        raise InfraError(f"{path.name}: no supervisor on this machine runs it; stop its roles where they run")
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise InfraError(f"{path.name}: its supervisor has just ended") from None
    try:
        if record.supervisor_pid(path) != pid:
            raise InfraError(f"{path.name}: its supervisor has just ended")
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError:
        raise InfraError(f"{path.name}: its supervisor (pid {pid}) belongs to another user") from None
    finally:
        os.close(process)
