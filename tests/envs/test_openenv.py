"""The OpenEnv client and `jaxroll env serve`, against one another; tests/peers/test_openenv.py has the real package."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from jaxroll import config as configs
from jaxroll.config import TaskConfig
from jaxroll.data.tasks import Candidates
from jaxroll.envs import registry
from jaxroll.envs.adapters import openenv_env
from jaxroll.envs.executors import EnvironmentCalls
from jaxroll.errors import ConfigError, DataError, InfraError
from jaxroll.rpc import http
from jaxroll.testing import openenv_server
from jaxroll.testing.environments import check_environment

ROOT = Path(__file__).resolve().parents[2]
CONFIG = configs.load(ROOT / "configs/agentic_frozen_lake.py")
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of FrozenLake, served on another thread."""
    ready: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop, pool = asyncio.Event(), registry.scoring_pool(CONFIG)  # which FrozenLake does not need to start
        server = openenv_server.Server("frozen_lake", CONFIG, pool, "secret")
        listening = http.listen("127.0.0.1", 0)
        serving = asyncio.create_task(http.serve(server.app, listening, sockets=True))
        address = http.address("127.0.0.1", listening).replace("//", "//user:secret@")
        ready.set_result((address, asyncio.get_running_loop(), stop))
        await stop.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    address, loop, stop = ready.result(DEADLINE_S)
    yield address
    loop.call_soon_threadsafe(stop.set)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def game(url: str, **more: Any) -> openenv_env.OpenEnvGame:
    return openenv_env.OpenEnvGame(openenv_env.Settings(url=url, action="answer", **more))


def test_an_episode_over_the_socket_is_the_episode_in_this_process(url: str) -> None:
    candidate = Candidates(CONFIG).at(CONFIG.task.train_start + 2)
    answers = [message.content for message in candidate.worked if message.role == "assistant"]
    alone: Any = registry.factory("frozen_lake")(None, CONFIG.task)  # type: ignore[arg-type]
    far = game(url)
    try:
        assert far.start(2) == "\n".join(message.content for message in alone.reset(candidate.task, 2))
        for turn, answer in enumerate(answers, 1):
            near, view = alone.step(answer), far.play(answer)
            assert view.text == "\n".join(message.content for message in near.messages)
            assert (view.over, view.reward) == (near.done, near.reward if near.done else 0.0)
            assert not view.over or view.parts == {"steps": turn}
        assert far.start(2) and not far.play(answers[0]).misread, "the session begins again"
    finally:
        far.close()


def test_the_reward_of_an_episode_is_the_sum_of_the_servers_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """FrozenLake gives one reward, at the end; this server gives one with every step."""
    rewards = iter([0.25, None, -1.0, 4.0, 0.5])

    class Session:
        def __init__(self, address: str) -> None:
            assert address == "ws://127.0.0.1:9/ws"

        def ask(self, kind: str, data: Any = None) -> dict[str, Any]:
            if kind == "state":
                return {"step_count": 4}
            reward = next(rewards) if kind == "step" else 7.0  # that of a reset is no reward of an action
            return {"observation": "seen", "reward": reward, "done": reward == 4.0}

        def close(self) -> None:
            pass

    monkeypatch.setattr(openenv_env, "ServerSession", Session)
    far = game("http://127.0.0.1:9")
    far.start(0)
    assert [far.play("go").reward for _ in range(4)] == [0.25, 0.25, -0.75, 3.25]
    far.start(1)
    assert far.play("go").reward == 0.5, "the sum begins again with the episode"


def test_every_setting_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    class Session:
        def __init__(self, address: str) -> None:
            pass

        def ask(self, kind: str, data: Any = None) -> dict[str, Any]:
            asked.append((kind, data))
            return {"observation": {"board": "seen", "text": "other"}, "reward": None, "done": False}

        def close(self) -> None:
            asked.append(("close", None))

    monkeypatch.setattr(openenv_env, "ServerSession", Session)
    far = game("http://h:1", observation="board", reset={"level": 2}, moves=["a", "b"], rules="Win.", hidden=True)
    assert far.start(7) == "seen" and far.play("go").text == "seen"
    assert asked == [("reset", {"seed": 7, "level": 2}), ("step", {"answer": "go"})]
    assert (list(far.choices()), far.rules, far.hidden) == (["a", "b"], "Win.", True)


def test_a_server_has_a_limit_of_sessions_and_closes_the_environment_of_each(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, free = threading.Event(), openenv_env.ServerSession(openenv_env.Settings(url=url).address)
    close = EnvironmentCalls.close

    async def noting(self: EnvironmentCalls, env: Any) -> None:
        await close(self, env)
        closed.set()

    monkeypatch.setattr(EnvironmentCalls, "close", noting)
    free.ask("reset", {"seed": 1})
    monkeypatch.setattr(openenv_server, "SESSIONS", 1)
    try:
        with pytest.raises(InfraError, match="no room for another session: 1 of 1 sessions are open"):
            openenv_env.ServerSession(openenv_env.Settings(url=url).address).ask("reset", {"seed": 1})
    finally:
        free.close()
    assert closed.wait(DEADLINE_S)


def test_it_is_an_environment_with_tasks(url: str) -> None:
    overrides = [f"task.args={json.dumps({'url': url, 'action': 'answer', 'max_turns': 4})}", "task.name=openenv"]
    config = configs.parse(configs.override(configs.to_dict(CONFIG), [*overrides, "task.env=openenv"]))
    candidates = Candidates(config)
    first, second = candidates.at(0).task, candidates.at(1).task
    assert first.question_hash != second.question_hash and first == Candidates(config).at(0).task
    assert check_environment("openenv", config, episodes=6) == []


@pytest.mark.parametrize("shown", ["", "user:other@", "user:@", "secret@"])
def test_nothing_is_served_without_the_token(url: str, shown: str) -> None:
    bare = url.replace("user:secret@", shown)
    for path in ("metadata", "schema", "openapi.json", "state", "other"):
        assert httpx.get(f"{bare}/{path}").status_code == 401
    for path in ("reset", "step", "mcp"):
        assert httpx.post(f"{bare}/{path}", json={}).status_code == 401
    with pytest.raises(InfraError, match=r"403|without password") as refused:
        openenv_env.ServerSession(openenv_env.Settings(url=bare).address)
    assert "secret" not in str(refused.value) and "other" not in str(refused.value)
    assert httpx.get(f"{bare}/health").status_code == httpx.get(f"{url}/metadata").status_code == 200
    bearer = {"Authorization": "Bearer secret"}
    assert httpx.get(f"{url.replace('user:secret@', '')}/metadata", headers=bearer).status_code == 200


def test_messages_and_actions_that_are_refused(url: str) -> None:
    session = openenv_env.ServerSession(openenv_env.Settings(url=url).address)
    try:
        assert session.ask("step", {"answer": "left"})["code"] == "EXECUTION_ERROR"  # before the reset
        assert session.ask("dance")["code"] == "UNKNOWN_TYPE"
        assert session.ask("reset", {"seed": -1})["code"] == "VALIDATION_ERROR"
        assert session.ask("reset", {"seed": 1, "episode_id": "mine"})["done"] is False
        assert session.ask("step", {"answer": 1})["code"] == "VALIDATION_ERROR"
        assert session.ask("step", {"answer": "left", "speed": 2})["code"] == "VALIDATION_ERROR"
        assert session.ask("state") == {"episode_id": "mine", "step_count": 0, "task": 1}
        session._socket.send("no json")
        assert json.loads(session._socket.recv(DEADLINE_S))["data"]["code"] == "INVALID_JSON"
    finally:
        session.close()
    plain = openenv_env.OpenEnvGame(openenv_env.Settings(url=url))
    shown = plain.start(1)
    assert plain.play("left") == openenv_env.GameView(f"?\n{shown}", misread=True), "the answer is no JSON object"
    assert not plain.play('{"answer": "left"}').misread
    plain.close()
    with pytest.raises(DataError, match="no field 'board'"):
        game(url, observation="board").start(0)


def test_endpoints_without_a_session(url: str) -> None:
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as api:
        assert api.get("/health").json() == {"status": "healthy"}
        assert api.post("/step", json={"action": {"answer": "left"}}).status_code == 409
        first = api.post("/reset", json={"seed": 4}).json()
        assert first["observation"]["messages"][0]["role"] == "user" and first["done"] is False
        assert api.post("/step", json={"action": {"answer": "left"}}).status_code == 200
        assert api.get("/state").json()["step_count"] == 1
        assert api.post("/step", content=b"{").status_code == 422


def test_resets_at_once_without_a_session_leave_one_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, make, close = Counter[str](), EnvironmentCalls.make, EnvironmentCalls.close

    async def making(self: EnvironmentCalls, factory: Any, name: str) -> Any:
        counts["made"] += 1
        await asyncio.sleep(0.01)
        return await make(self, factory, name)

    async def closing(self: EnvironmentCalls, env: Any) -> None:
        counts["closed"] += 1
        await close(self, env)

    monkeypatch.setattr(EnvironmentCalls, "make", making)
    monkeypatch.setattr(EnvironmentCalls, "close", closing)
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as api, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda seed: api.post("/reset", json={"seed": seed}), range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        counts["before"] = counts["closed"]
        api.post("/reset", json={"seed": 0})
    assert counts["made"] == 5 and counts["closed"] == counts["before"] + 1 and counts["before"] >= 3, counts


def test_an_environment_that_raises_anything_is_answered_with_an_error(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raising(self: EnvironmentCalls, *words: Any) -> Any:
        raise ValueError("of the environment")

    far = openenv_env.ServerSession(openenv_env.Settings(url=url).address)
    with monkeypatch.context() as patch, httpx.Client(base_url=url, timeout=DEADLINE_S) as api:
        assert api.post("/reset", json={"seed": 1}).status_code == 200
        assert "error" not in far.ask("reset", {"seed": 1})
        patch.setattr(EnvironmentCalls, "step", raising)
        patch.setattr(EnvironmentCalls, "close", raising)
        answer = api.post("/step", json={"action": {"answer": "left"}})
        assert answer.status_code == 409 and "of the environment" in answer.json()["detail"]["message"]
        found = far.ask("step", {"answer": "left"})
        assert found["code"] == "EXECUTION_ERROR" and "of the environment" in found["error"]
        assert "error" not in far.ask("reset", {"seed": 2}), "a close that fails ends no session"
    far.close()


def test_a_server_that_cannot_be_reached_is_a_failure_of_the_infrastructure() -> None:
    listening = http.listen("127.0.0.1", 0)
    address = http.address("127.0.0.1", listening)
    listening.close()
    with pytest.raises(InfraError, match="cannot be reached"):
        game(address).start(0)
    with pytest.raises(ConfigError, match="not a URL"):
        openenv_env.OpenEnvSource(TaskConfig(source="game", name="openenv", env="openenv", args={"url": "here"}))
