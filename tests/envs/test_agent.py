"""Agents in processes: functions, commands and URLs with the real openai client, and programs that fail."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from jaxroll.config import Config, SamplerConfig, TaskConfig
from jaxroll.envs.executors import Executors
from jaxroll.protocols import SamplingParams
from jaxroll.records import Failed, Finished, Grant, Message, Outcome, Task
from jaxroll.rollout.episode import RolloutManager
from jaxroll.serving.agents import Agents
from tests.harness.http_engine import TEXT, Engine

pytestmark = pytest.mark.process
DEADLINE_S = 60.0
PROGRAM = """
import json, os, sys, time, urllib.request

def call(base_url, api_key, messages):
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps({"messages": messages}).encode())
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def two_turns(base_url, api_key, row):
    messages = row["messages"]
    for turn in range(2):
        messages += [call(base_url, api_key, messages), {"role": "tool", "content": "ok"}]
    return {"reward": 1, "turns": 2}

async def coroutine(base_url, api_key, row):
    return two_turns(base_url, api_key, row)

def hangs(base_url, api_key, row):
    call(base_url, api_key, row["messages"])
    time.sleep(1000)

def crashes(base_url, api_key, row):
    call(base_url, api_key, row["messages"])
    os._exit(3)

def raises(base_url, api_key, row):
    call(base_url, api_key, row["messages"])
    raise RuntimeError("no luck")

if __name__ == "__main__":
    if sys.argv[1:] == ["fail"]:
        sys.exit("no luck")
    print("talks")
    print(json.dumps(two_turns(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], json.load(sys.stdin))))
"""


class NoScores:
    time_limit_s, restarts, failed_starts, found_slow = 5.0, 0, 0, 0


def outcomes(*agents: str, limit_s: float = DEADLINE_S) -> list[Outcome]:
    """The outcome of one member for each of `agents`, one after the other."""

    async def play(agent: str) -> Outcome:
        task = TaskConfig(env="agent", agent=agent, agent_limit_s=limit_s)
        pool: Any = NoScores()
        places = Executors(pool, Config(task=task, sampler=SamplerConfig(env_processes=1)))
        served = Agents(pool, task)
        manager = RolloutManager(Engine("abc"), places.create, TEXT, SamplingParams(8), play=served.play)
        item = Task(0, (Message("user", "hi"),), "agent", "{}", 0, "h")
        try:
            async with asyncio.timeout(DEADLINE_S):
                return (await manager.run_member(Grant(1, item, ((0, 0),), 9.0), 0, 0)).outcome
        finally:
            await served.close()
            await places.close()

    async def play_all() -> list[Outcome]:
        return [await play(agent) for agent in agents]

    return asyncio.run(play_all())


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "an_agent.py"
    path.write_text(PROGRAM)
    return path


def test_functions_commands_and_urls_play_the_same_episode(program: Path) -> None:
    class Service(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            space: dict[str, Any] = {"__name__": "service"}
            exec(PROGRAM, space)
            body = json.dumps(space["two_turns"](job["base_url"], job["api_key"], job["row"])).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Service) as service:
        thread = threading.Thread(target=service.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{service.server_port}/"
        named = (f"file:{program}:two_turns", f"file:{program}:coroutine", f"{sys.executable} {program}", url)
        found = outcomes(*named)
        service.shutdown()
        thread.join()
    for one in found:
        assert isinstance(one, Finished), one
        assert [int(s.loss_mask.sum()) for s in one.segments] == [0, 4, 0, 4]
        assert (one.reward, one.reward_parts) == (1.0, {"turns": 2.0, "calls": 2.0, "truncated": 0.0})


def test_programs_that_fail_cost_their_member_with_its_cause(program: Path) -> None:
    names = [f"file:{program}:{name}" for name in ("raises", "crashes")]
    raised, crashed, command, absent = outcomes(*names, f"{sys.executable} {program} fail", "/nowhere/agent")
    (hung,) = outcomes(f"file:{program}:hangs", limit_s=0.5)
    for one, kind, cause in (
        (raised, "DATA", "no luck"),
        (crashed, "INFRA", "process died"),
        (command, "DATA", "ended with 1: no luck"),
        (absent, "DATA", "does not start"),
        (hung, "DATA", "longer than task.agent_limit_s = 0.5"),
    ):
        assert isinstance(one, Failed) and one.kind == kind and cause in one.error, one


def test_a_command_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """`kill -9` of a sampler ends its environment processes, and these must leave no program of theirs behind."""
    lives = tmp_path / "lives"  # its reader sees the end of the file when the last process that has it open ends
    os.mkfifo(lives)
    job = {"base_url": "", "api_key": "", "reward_url": ""}
    (program := tmp_path / "program.py").write_text(
        f"import time\nheld = open({str(lives)!r}, 'w')\nheld.write('up')\nheld.flush()\ntime.sleep(120)\n"
    )
    command = f"{sys.executable} {program}"
    starter = f"from jaxroll.envs import registry; registry._executed({command!r}, {job!r}, {{}})"
    with subprocess.Popen([sys.executable, "-c", starter]) as process:
        reading = os.open(lives, os.O_RDONLY)
        try:
            assert os.read(reading, 2) == b"up"
            process.kill()
            process.wait(DEADLINE_S)
            assert select.select([reading], [], [], DEADLINE_S)[0], "the command still runs"
            assert os.read(reading, 1) == b""
        finally:
            os.close(reading)
