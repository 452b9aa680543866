"""Environments of the package verifiers, unmodified, as agents: a worker plays them against the URL of a member.

verifiers needs other versions of some packages, so it has an environment of its own. A worker program runs there
for each environment process, and ends with it. It calls `/inference/v1/generate`, or OpenAI's chat.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxroll.config import TaskConfig
from jaxroll.data.sources import PRINTABLE
from jaxroll.envs.registry import identity, settings_given, settings_of
from jaxroll.errors import ConfigError, DataError, one_line
from jaxroll.records import Item, Message

_WORKER = Path(__file__).with_name("verifiers_worker.py")
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Settings:
    """`task.args`. `env` is the config of the environment as verifiers reads it, such as {"taskset": {"id": …}}.

    The worker runs `python` with the folders `path` on its module search path. `tokenizer` is the model's folder, with
    which the client renders messages; `renderer` has its settings. `tasks` bounds the number of tasks.
    """

    python: str
    env: Mapping[str, Any]
    path: Sequence[str] = ()
    client: str = "train"  # or "eval"
    tokenizer: str = ""
    renderer: Mapping[str, Any] = field(default_factory=lambda: {"name": "auto"})
    tasks: int = 4096

    def __post_init__(self) -> None:
        if self.client not in ("train", "eval"):
            raise ValueError(f"client = {self.client!r}: use 'train' (token ids) or 'eval' (chat)")
        if self.client == "train" and not self.tokenizer:
            raise ValueError("tokenizer is missing: give the model's folder, or use client 'eval'")
        if self.tasks < 1:
            raise ValueError(f"tasks = {self.tasks!r}: give a number above 0")

    def for_worker(self) -> dict[str, Any]:
        """The settings that the worker reads."""
        renderer = {"renderer": dict(self.renderer), "renderer_model_name": os.path.abspath(self.tokenizer)}
        return {"env": self.env, "client": self.client, "tasks": self.tasks, **(renderer if self.tokenizer else {})}


class _Worker:
    """A running worker, which answers one job at a time."""

    def __init__(self, settings: Settings) -> None:
        paths = [os.path.abspath(one) for one in settings.path]
        searched = os.pathsep.join([str(Path(settings.python).parent), os.environ.get("PATH", "")])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PATH": searched, "HF_HUB_OFFLINE": "1"}
        self.lock = threading.Lock()
        try:
            self._process = subprocess.Popen(
                [settings.python, "-P", str(_WORKER), json.dumps(settings.for_worker()), str(os.getpid())],
                text=True,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        except OSError as error:
            remedy = "Run `make venv-verifiers`, and name its Python."
            raise ConfigError("task.args.python", settings.python, f"it does not start: {error}", remedy) from error

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `job`; DataError for one that failed, and for a worker that ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise DataError(f"the worker of verifiers ended with {self._process.wait()}; its reason is in the log")
        answer = json.loads(line)
        if "error" in answer:
            raise DataError(f"verifiers: {one_line(answer['error'], 300)}")
        return answer

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # closing flushes a job that the worker has not read
                pipe.close()


_workers: dict[str, _Worker] = {}


def play(base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, Any]:
    """Reward and parts of the task `row["idx"]`, for `task.agent`; the worker of these settings starts if none runs."""
    named = json.dumps(row["verifiers"], sort_keys=True)
    if named not in _workers or _workers[named].ended:
        _workers[named] = _Worker(Settings(**row["verifiers"]))
    worker = _workers[named]
    with worker.lock:
        return worker.ask({"idx": row["idx"], "base_url": base_url, "api_key": api_key})


class VerifiersSource:
    """The tasks of a taskset, which a worker lists.

    A task of the warm start needs an example: the field `worked` of its data (messages), or `answer`.
    """

    def __init__(self, cfg: TaskConfig) -> None:
        self._settings = settings_of(Settings, settings_given(cfg))
        worker = _Worker(self._settings)
        try:
            self._tasks: list[dict[str, Any]] = worker.ask({})["tasks"]
        except DataError as error:
            remedy = "Run the environment with verifiers' own `eval` first."
            raise ConfigError("task.args.env", dict(self._settings.env), str(error), remedy) from error
        finally:
            worker.close()
        if not self._tasks:
            raise ConfigError("task.args.env", dict(self._settings.env), "its taskset is empty", "Name another one.")
        self.size = len(self._tasks)
        self._args = settings_given(cfg)
        self.identity = identity("verifiers", cfg)

    def item(self, index: int) -> Item:
        """Task `index`."""
        if not 0 <= index < self.size:
            raise DataError(f"the taskset has {self.size} tasks, so there is no task {index}")
        data = self._tasks[index]
        prompt = data.get("prompt")
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        system = [{"role": "system", "content": data["system_prompt"]}] if data.get("system_prompt") else []
        messages = _messages([*system, *asked]) or (Message("user", f"task {index}"),)
        answer = data.get("answer")
        worked = _messages(data.get("worked") or ([{"role": "assistant", "content": str(answer)}] if answer else []))
        question = "\n".join(message.content for message in messages)
        return Item(
            question=question,
            compact=question,
            answer=None,
            worked=worked,
            messages=messages,
            env_args={"idx": index, "verifiers": self._args},
        )

    def alphabet(self) -> str:
        """Printable ASCII."""
        return PRINTABLE


def _messages(values: list[dict[str, Any]]) -> tuple[Message, ...]:
    """Messages with the text of their content."""
    made = []
    for value in values:
        content = value.get("content") or ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        made.append(Message(value["role"] if value.get("role") in _ROLES else "user", text))
    return tuple(made)
