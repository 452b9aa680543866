"""Environments and a scorer for real samplers, given by module path: an ordinary one and faulty ones."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jaxroll.config import TaskConfig
from jaxroll.envs.registry import register
from jaxroll.errors import InfraError
from jaxroll.protocols import StepResult
from jaxroll.records import Message, Task
from jaxroll.rewards import scorers
from jaxroll.rewards.scoring_pool import ScoringPool

STEP_LIMIT_S = 30.0
QUICK_MISDEEDS = ("fork", "allocate", "connect", "truncate")  # misdeeds that end before the time limit
MISDEED_VARIABLE = "JAXROLL_TEST_MISDEED_FOLDER"


def coin(text: str) -> float:
    """A pseudo-random 0 or 1 that is a function of the answer."""
    return float(hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % 2)


class _Coin:
    """Shows the question; the reward is `coin` of the answer."""

    step_limit_s = STEP_LIMIT_S

    def __init__(self, pool: ScoringPool, config: TaskConfig) -> None:
        self._pool = pool

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        return task.messages

    async def step(self, answer: str) -> StepResult:
        return StepResult(done=True, reward=coin(answer), reward_parts={"raw_score": coin(answer)})

    async def close(self) -> None:
        return None


register("coin")(_Coin)
_CALLS: Counter[int] = Counter()


@register("misfortune")
class Misfortune(_Coin):
    """An environment in which question i first suffers `fate(i)`."""

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        what = fate(task.index)
        if what == "poisoned":
            raise ValueError(f"question {task.index} is poisoned")
        if what in QUICK_MISDEEDS:
            await self._pool.score(misdeed(what, os.environ[MISDEED_VARIABLE]), "ok")
        _CALLS[task.index] += 1
        if what == "flaky" and random.Random(f"{task.index} {_CALLS[task.index]}").random() < 0.5:
            raise InfraError("the machinery is gone")
        return task.messages


def fate(index: int) -> str:
    """The fate of a question: `poisoned` always raises, `flaky` fails in about half of the attempts, or a misdeed."""
    if index % 5 == 4:
        return "poisoned"
    if index % 5 == 2:
        return QUICK_MISDEEDS[index // 5 % len(QUICK_MISDEEDS)]
    return "flaky"


def misdeed(what: str, folder: str, port: int = 9) -> str:
    """The arguments of the scorer below. `folder` holds a file named `precious`."""
    return json.dumps({"scorer": "misdeed", "what": what, "folder": folder, "port": port})


@scorers.register("misdeed")
def do(args: Mapping[str, Any], answer: str) -> float:
    """Try the misdeed; return 1.0 if it succeeded."""
    precious = os.path.join(args["folder"], "precious")
    match args["what"]:
        case "loop":
            for _ in itertools.count():
                pass
        case "sleep":
            time.sleep(3600)
        case "fork":
            if os.fork() == 0:
                os.setsid()
                time.sleep(3600)
        case "run":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
        case "allocate":
            return float(len(bytearray(10 << 30)) > 0)
        case "connect":
            socket.create_connection(("127.0.0.1", args["port"]), 5).sendall(b"secrets")
        case "listen":
            socket.create_server(("127.0.0.1", 0))
        case "truncate":
            open(precious, "w").close()
        case "remove":
            os.remove(precious)
        case "mkdir":
            os.mkdir(os.path.join(args["folder"], "mine"))
        case "kill":
            os.kill(os.getppid(), 0)  # signal 0 only checks the permission
        case "thread":
            threading.Thread(target=time.sleep, args=(3600,), daemon=False).start()
    return 1.0
