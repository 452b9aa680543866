"""The adapter of verifiers with a scripted worker; tests/peers/test_verifiers.py has the real package."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxroll.config import TaskConfig
from jaxroll.envs.adapters import verifiers_env
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Message

pytestmark = pytest.mark.process
WORKER = """
import json, os, sys
settings = json.loads(sys.argv[1])
for line in sys.stdin:
    job = json.loads(line)
    if not job:
        found = {"tasks": [{"prompt": "12*3", "answer": "36", "system_prompt": "short"},
                           {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
                            "worked": [{"role": "assistant", "content": "b"}]}, {"idx": 2}][: settings["tasks"]]}
    elif job["idx"] == 1:
        found = {"error": "ProviderError: no room"}
    elif job["idx"] == 2:
        sys.exit(5)
    else:
        found = {"reward": 0.5, "pid": os.getpid(), "settings": settings, "asked": job,
                 "environ": {name: os.environ.get(name) for name in ("PYTHONPATH", "HF_HUB_OFFLINE")}}
    print(json.dumps(found), flush=True)
"""
WORKER_FILE = verifiers_env._WORKER
ARGS = {"python": sys.executable, "env": {"taskset": {"id": "products"}}, "tokenizer": "a/folder"}


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (path := tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(verifiers_env, "_WORKER", path)
    yield
    for one in verifiers_env._workers.values():
        one.close()
    verifiers_env._workers.clear()


def source(**more: Any) -> verifiers_env.VerifiersSource:
    return verifiers_env.VerifiersSource(
        TaskConfig(source="game", name="verifiers", env="agent", args={**ARGS, **more})
    )


def test_tasks_of_the_taskset_are_items_with_their_example() -> None:
    found = source()
    assert found.size == 3
    first, second, third = (found.item(index) for index in range(3))
    assert first.messages == (Message("system", "short"), Message("user", "12*3"))
    assert first.worked == (Message("assistant", "36"),) and first.env_args == {"idx": 0, "verifiers": ARGS}
    assert second.messages == (Message("user", "a"),) and second.worked == (Message("assistant", "b"),)
    assert third.worked == () and third.compact == "task 2", "a task without a prompt has a name of its own"
    assert source(tasks=1).size == 1
    with pytest.raises(DataError, match="no task 3"):
        found.item(3)


def test_episodes_share_a_worker_which_is_replaced_when_it_ends() -> None:
    def played(index: int) -> Any:
        return verifiers_env.play("http://u/v1", "key", {"idx": index, "verifiers": ARGS})

    first = played(0)
    assert first["asked"] == {"idx": 0, "base_url": "http://u/v1", "api_key": "key"} and first["reward"] == 0.5
    assert first["settings"] == {
        "client": "train",
        "env": ARGS["env"],
        "renderer": {"name": "auto"},
        "tasks": 4096,
        "renderer_model_name": str(Path("a/folder").resolve()),
    }
    with pytest.raises(DataError, match="no room"):
        played(1)
    assert played(0)["pid"] == first["pid"]
    with pytest.raises(DataError, match="ended with 5"):
        played(2)
    assert played(0)["pid"] != first["pid"]


def test_every_setting_reaches_the_worker() -> None:
    more = {"path": ["mine", "/other"], "client": "eval", "renderer": {"name": "qwen3"}, "tasks": 7}
    found: Any = verifiers_env.play("http://u/v1", "key", {"idx": 0, "verifiers": {**ARGS, **more}})
    settings = found["settings"]
    assert (settings["client"], settings["renderer"], settings["tasks"]) == ("eval", {"name": "qwen3"}, 7)
    assert found["environ"] == {"PYTHONPATH": f"{Path('mine').resolve()}:/other", "HF_HUB_OFFLINE": "1"}


PARENT = """
import subprocess, sys, time
child = "import os; parent = os.getppid(); from jaxroll.envs.adapters.verifiers_worker import end_with;"
subprocess.Popen([sys.executable, "-c", child + "print(os.getpid(), flush=True); end_with(parent)"])
time.sleep(600)
"""


def test_a_worker_ends_when_its_environment_process_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            assert child.is_running()
            parent.kill()
            psutil.wait_procs([child], timeout=60)
            assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        finally:
            parent.kill()
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def test_a_worker_whose_environment_process_has_ended_before_it_starts_ends_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as parent:
        pass
    command = [sys.executable, "-P", str(WORKER_FILE), "{}", str(parent.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as started:
        assert started.stderr is not None
        assert started.stderr.read() == b"", "it ends before it looks for verifiers"
        assert started.wait(60) == 1


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"python": "/nowhere/python"}, "does not start"),
        ({"tokenizer": ""}, "tokenizer is missing"),
        ({"client": "chat"}, "use 'train'"),
        ({"tasks": 0}, "above 0"),
        ({"taskset": "x"}, "nothing reads it"),
    ],
)
def test_wrong_settings_are_refused(args: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        source(**args)
