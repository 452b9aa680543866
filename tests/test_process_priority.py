"""On a CPU all roles except the learner lower their priority, and that of their session."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from jaxroll import lifeline
from jaxroll.control.program import ProcessSpec
from jaxroll.errors import ConfigError
from tests.harness.process_specs import built

SAID = """
import json, os
from pathlib import Path
from jaxroll import lifeline
assert lifeline.give_way()
group = Path("/proc/self/autogroup")
print(json.dumps([os.getpriority(os.PRIO_PROCESS, 0), group.read_text().split() if group.exists() else None]))
"""


def said(nice: str | None, *, session: bool) -> tuple[int, int | None]:
    """The priority of a process that gave way, and that of its session, if the kernel knows such a thing."""
    env = {"PATH": "", **({lifeline.NICE_ENV: nice} if nice is not None else {})}
    done = subprocess.run(
        [sys.executable, "-c", SAID],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        start_new_session=session,
    )
    own, group = json.loads(done.stdout)
    return own, group and int(group[-1])


@pytest.mark.parametrize("nice", [None, "", "0"])
def test_a_process_without_a_nice_value_keeps_its_priority(nice: str | None) -> None:
    assert said(nice, session=True) == said(None, session=True)


@pytest.mark.parametrize("nice", ["a lot", "-5", "20", "1.5"])
def test_an_invalid_priority_is_refused(nice: str) -> None:
    with pytest.raises(ConfigError, match="from 0 to 19"):
        lifeline.give_way({lifeline.NICE_ENV: nice})


def test_a_process_with_a_nice_value_lowers_its_session() -> None:
    before, _ = said(None, session=True)
    own, group = said("12", session=True)
    assert own == max(12, before)
    assert group in (own, None), "else a session of its own has the full share of a core"


WORKER = """
import os, time
from pathlib import Path
os.nice(12 - min(12, os.nice(0)))
from jaxroll.rewards.processes import ScoringProcess
from jaxroll.rewards.processes import WorkerSettings
worker = ScoringProcess(WorkerSettings(os.getpid(), 5.0, 2**30))
group, until = Path(f"/proc/{worker.pid}/autogroup"), time.monotonic() + 30
while group.exists() and group.read_text().split()[-1] == "0" and time.monotonic() < until:
    time.sleep(0.02)
print(group.read_text().split()[-1] if group.exists() else "unknown", os.nice(0))
worker.kill()
"""


@pytest.mark.process
def test_a_worker_in_its_own_session_has_the_priority_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    group, own = done.stdout.split()
    assert group in (own, "unknown")


def test_a_refused_write_of_the_priority_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel does to all but root, when many begin at once."""

    class Busy:
        def __init__(self) -> None:
            self.answers: list[type[BlockingIOError] | None] = [BlockingIOError, BlockingIOError, None]

        def write_text(self, text: str, encoding: str) -> None:
            if error := self.answers.pop(0):
                raise error

    busy: Any = Busy()
    monkeypatch.setattr(lifeline.os, "getpriority", lambda *_: 12)
    monkeypatch.setattr(lifeline.os, "getsid", lambda _: lifeline.os.getpid())
    assert lifeline.lower_session(busy) and not busy.answers
    busy.answers = [BlockingIOError] * 1000
    monkeypatch.setattr(lifeline, "_LIMIT_S", 0.2)
    assert not lifeline.lower_session(busy)


def test_a_session_led_by_another_process_is_left_alone() -> None:
    _, before = said(None, session=False)
    _, after = said("12", session=False)
    assert after == before


def test_only_the_learner_does_not_give_way_and_only_on_a_cpu() -> None:
    def asked(specs: tuple[ProcessSpec, ...]) -> set[str]:
        return {spec.name for spec in specs if spec.env.get(lifeline.NICE_ENV)}

    everyone = {spec.name for spec in built("cpu")}
    assert asked(built("cpu")) == everyone - {"learner"}
    assert asked(built("gpus")) == asked(built("tpu")) == set()
