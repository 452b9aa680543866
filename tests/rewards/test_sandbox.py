"""The restrictions of a worker: rule by rule in a child process, and as text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxroll.rewards import sandbox
from jaxroll.rewards.sandbox import Restrictions
from jaxroll.rewards.scoring_pool import ScoringPool

CHILD = """
import json, os, sys, threading
from jaxroll.rewards import sandbox as isolation
if sys.argv[2] == "without landlock":
    isolation._landlock = lambda libc: False
restrictions = isolation.restrict()
found = {}
def tried(name, job):
    try:
        job()
        found[name] = "done"
    except OSError as error:
        found[name] = type(error).__name__
path = sys.argv[1]
tried("read", lambda: open(path).read())
tried("write", lambda: open(path, "a"))
tried("create", lambda: open(path + ".new", "x"))
tried("null", lambda: open(os.devnull, "w"))
tried("chmod", lambda: os.chmod(path, 0))
tried("rename", lambda: os.rename(path, path + ".moved"))
tried("others' memory", lambda: open(f"/proc/{os.getppid()}/environ").read())
tried("itself", lambda: os.kill(os.getpid(), 0))
thread = threading.Thread(target=lambda: found.update(thread="done"))
thread.start(); thread.join()
os.write(1, json.dumps([list(restrictions.missing), str(restrictions), found]).encode())
"""


def child(path: Path, how: str) -> tuple[list[str], str, dict[str, str]]:
    """The missing restrictions, the description, and the result of each attempt in a restricted process."""
    path.write_text("text")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), how], capture_output=True, text=True, timeout=60, check=True
    )
    still_open, words, found = json.loads(done.stdout)
    if still_open:
        pytest.skip(f"this kernel lacks restrictions: {words}")
    assert path.read_text() == "text" and sorted(path.parent.iterdir()) == [path]
    return still_open, words, found


@pytest.mark.process
def test_files_can_be_read_and_not_changed(tmp_path: Path) -> None:
    _, words, found = child(tmp_path / "file", "")
    assert words == "no network by seccomp, no processes by seccomp, no signals by seccomp, no files by " + (
        "landlock" if "landlock" in words else "seccomp"
    )
    changes = {found[name] for name in ("write", "create", "chmod", "rename")}
    assert changes == {"PermissionError"}
    assert {found["read"], found["itself"], found["thread"]} == {"done"}
    if "landlock" in words:
        assert found["null"] == "done" and found["others' memory"] == "PermissionError"


@pytest.mark.process
def test_without_landlock_the_filter_refuses_to_open_for_writing(tmp_path: Path) -> None:
    _, words, found = child(tmp_path / "file", "without landlock")
    assert words.endswith("no files by seccomp")
    assert {found[name] for name in ("write", "create", "chmod", "rename", "null")} == {"PermissionError"}
    assert {found["read"], found["itself"], found["thread"]} == {"done"}


def test_every_machine_denies_something_of_each_kind_and_no_number_twice() -> None:
    for machine in sandbox._MACHINES.values():
        assert {*machine.denied} == {"network", "processes", "signals", "files"} == {*Restrictions().missing}
        numbers = [*(n for some in machine.denied.values() for n in some), machine.clone, *machine.kills]
        numbers += [*machine.opens, *machine.programs, *sandbox._NEW_CALLS, sandbox._CLONE3, sandbox._OPENAT2]
        assert len(numbers) == len({*numbers})
        assert len(sandbox._rules(machine, 1, True)) < 8 * 4096, "the kernel takes no longer program"


def test_missing_restrictions_are_reported() -> None:
    assert str(Restrictions("a", "b", "c", "d")) == "no network by a, no processes by b, no signals by c, no files by d"
    assert str(Restrictions("a")) == "no network by a; OPEN: processes, signals, files (resource limits only)"
    assert str(Restrictions()) == "OPEN: network, processes, signals, files (resource limits only)"


def test_a_pool_warns_once_about_missing_restrictions(caplog: pytest.LogCaptureFixture) -> None:
    pool = ScoringPool(1)
    for _ in range(2):  # a worker and its replacement
        pool._note_restrictions(Restrictions("seccomp"))
    assert [(r.levelname, "OPEN: processes, signals, files" in r.getMessage()) for r in caplog.records] == [
        ("WARNING", True)
    ]
    caplog.clear()
    ScoringPool(1)._note_restrictions(Restrictions("a", "b", "c", "d"))
    assert caplog.records == []
