"""The fixture that fails a `process` test for what it leaves behind, tried on tests that leave something behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.process

_PLANTED = """
import json, os, pathlib, socket, subprocess, sys
import pytest

pytestmark = pytest.mark.process
HERE = pathlib.Path(__file__).parent
KEEP = []
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

@pytest.fixture
def stopped_in_teardown():
    child = subprocess.Popen(SLEEP)
    yield child
    child.kill(); child.wait()

def test_clean(stopped_in_teardown):
    with socket.create_server(("127.0.0.1", 0)):
        subprocess.run([sys.executable, "-c", ""], check=True)

def test_child():
    KEEP.append(subprocess.Popen(SLEEP))
    (HERE / "child").write_text(json.dumps(KEEP[-1].pid))

def test_orphan_in_its_own_session():
    code = (
        "import pathlib, subprocess, sys\\n"
        "child = subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=subprocess.DEVNULL)\\n"
        "while not pathlib.Path(f'/proc/{child.pid}/environ').read_bytes(): pass\\n"  # it starts without one
        "print(child.pid)"
    )
    out = subprocess.run([sys.executable, "-c", code, *SLEEP], check=True, stdout=subprocess.PIPE, text=True).stdout
    (HERE / "orphan").write_text(out)

def test_listener():
    KEEP.append(socket.create_server(("127.0.0.1", 0)))
    (HERE / "listener").write_text(json.dumps(KEEP[-1].getsockname()[1]))

def test_block():
    path = pathlib.Path("/dev/shm") / f"jaxroll-test-{os.getpid()}"
    path.write_bytes(b"x")
    (HERE / "block").write_text(json.dumps(str(path)))

@pytest.mark.soak
def test_not_selected():
    raise AssertionError

def test_after_the_others_is_not_blamed_for_them():
    pass
"""


def _run(folder: Path) -> str:
    """The output of pytest on the planted tests, with this repository's conftest."""
    (folder / "tests").mkdir()
    conftest = Path(__file__).with_name("conftest.py").read_text()
    patient, hasty = "_GRACE_S = 5.0", "_GRACE_S = 0.5"
    assert patient in conftest
    (folder / "tests" / "conftest.py").write_text(conftest.replace(patient, hasty))
    (folder / "tests" / "test_planted.py").write_text(textwrap.dedent(_PLANTED))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  process: x\n  soak: x\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rE", "-m", "not soak", "tests"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])  # the conftest imports tests.harness
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=folder, env=environment, timeout=120, check=False, **streams)
    assert done.returncode == 1, done.stdout
    return done.stdout


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm on this system")
def test_processes_that_a_test_leaves_are_reported_and_ended(tmp_path: Path) -> None:
    output = _run(tmp_path)
    left = {
        name: json.loads((tmp_path / "tests" / name).read_text()) for name in ("child", "orphan", "listener", "block")
    }

    assert "6 passed, 1 deselected, 4 errors" in output
    assert f"process {left['child']}: " in output
    assert f"process {left['orphan']}: " in output
    assert f"listening socket 127.0.0.1:{left['listener']} " in output
    assert f"shared memory {left['block']}" in output

    assert not psutil.pid_exists(left["child"])
    assert not psutil.pid_exists(left["orphan"]) or psutil.Process(left["orphan"]).status() == psutil.STATUS_ZOMBIE
    assert not Path(left["block"]).exists()
