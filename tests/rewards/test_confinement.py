"""Confinement of programs under other users, in a user namespace, and on kernels without landlock or seccomp.

Each case runs the real sandbox in a process that lacks the feature: a filter of system calls makes the kernel answer as
one without landlock or seccomp does.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxroll.rewards import sandbox

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import ctypes, json, os, sys, tempfile
from pathlib import Path
from jaxroll.errors import DataError
from jaxroll.rewards.programs import Run, SandboxedPrograms
from benchmarks.lib import hacks

folder, code = Path(sys.argv[1]), bytes.fromhex(sys.argv[2])
if code:
    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(Filter(len(code) // 8, code)), 0, 0) == 0
try:
    programs = SandboxedPrograms()
except DataError as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit()
who = "import os; print(list(os.getresuid()), os.getgroups())"
read = "print(open(" + repr(os.__file__) + ").read(9))"
runs = programs.run([Run("print(6 * 7)"), Run("import json; print(json.dumps([1]))"), Run(who), Run(read)])
found = {"runs": [[run.output.decode(), run.failure] for run in runs], "escaped": []}
status = Path(f"/proc/{programs.pid}/status").read_text().splitlines()
found["status"] = {line.split(":")[0]: line.split(":")[1].split() for line in status}
with hacks.targets(folder) as targets:
    for name, escape in hacks.ESCAPES.items():
        (outcome,) = programs.run([Run(targets.filled(escape.program))])
        if any(mark.encode() in outcome.output for mark in hacks.MARKS) or escape.has_effect(targets):
            found["escaped"].append([name, outcome.output.decode("utf-8", "replace")[:500]])
programs.close()
print(json.dumps(found))
"""


def found_by(folder: Path, *prefix: str, code: bytes = b"") -> dict[str, Any]:
    """The findings of `CHILD`, started with the words of `prefix`, under the filter `code`."""
    command = [*prefix, sys.executable, "-c", CHILD, str(folder), code.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def kernel_without(*numbers: int, error: int = errno.ENOSYS) -> bytes:
    """A filter in which these system calls fail."""
    refuse = sandbox._step(sandbox._RETURN, sandbox._ERRNO | error)
    rules = [rule for number in numbers for rule in (sandbox._step(sandbox._EQUAL, number, 0, 1), refuse)]
    return b"".join([sandbox._step(sandbox._LOAD, 0), *rules, sandbox._step(sandbox._RETURN, sandbox._ALLOW)])


RIGHT = [["42\n", ""], ["[1]\n", ""]]


@pytest.mark.process
def test_programs_started_by_root_run_as_the_user_nobody_without_capabilities(tmp_path: Path) -> None:
    found = found_by(tmp_path)
    assert (found["runs"][:2], found["escaped"]) == (RIGHT, [])
    user = 65534 if os.getuid() == 0 else os.getuid()
    assert found["runs"][2][0].startswith(f"{[user] * 3}")
    assert found["status"]["Uid"][:3] == [str(user)] * 3
    assert {int(found["status"][name][0], 16) for name in ("CapEff", "CapPrm", "CapAmb")} == {0}
    assert found["runs"][3][1] == "", "programs cannot read Python's libraries"


@pytest.mark.process
def test_an_ordinary_user_is_confined(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("the test above runs as an ordinary user")
    os.chown(tmp_path, 1234, 1234)
    # It may read all files until the sandbox takes that away, because this Python may be in a folder of root.
    capability = "+dac_read_search"
    assert shutil.which("setpriv")
    found = found_by(
        tmp_path,
        "setpriv",
        "--reuid=1234",
        "--regid=1234",
        "--clear-groups",
        f"--inh-caps={capability}",
        f"--ambient-caps={capability}",
    )
    assert (found["runs"][:2], found["escaped"]) == (RIGHT, [])
    assert found["runs"][2][0] == "[1234, 1234, 1234] []\n"
    assert int(found["status"]["CapEff"][0], 16) == 0


@pytest.mark.process
@pytest.mark.parametrize("mapping", ["--map-root-user", "--user"])
def test_a_user_namespace_without_other_users_is_enough(tmp_path: Path, mapping: str) -> None:
    prefix = ("unshare", "--user", *([mapping] if mapping != "--user" else []))
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this system allows no user namespaces")
    found = found_by(tmp_path, *prefix)
    assert (found["runs"][:2], found["escaped"]) == (RIGHT, [])
    assert int(found["status"]["CapEff"][0], 16) == 0


@pytest.mark.process
def test_without_landlock_programs_open_no_file(tmp_path: Path) -> None:
    io_uring = 425  # without which forks are only slower
    found = found_by(tmp_path, code=kernel_without(sandbox._CREATE_RULESET, io_uring))
    assert (found["runs"][:2], found["escaped"]) == (RIGHT, [])
    assert found["runs"][3] == ["", "exit status 1"]
    if os.getuid() == 0:
        assert set(found["status"]["Uid"]) == {"65534"}


@pytest.mark.process
def test_without_seccomp_programs_are_refused(tmp_path: Path) -> None:
    found = found_by(tmp_path, code=kernel_without(sandbox._MACHINES[platform.machine()].prctl, error=errno.EINVAL))
    assert "seccomp" in found["refused"] and "`code`" in found["refused"]
