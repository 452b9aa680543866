"""For .venv-openenv: `play URL` with OpenEnv's own client, or `serve` a small environment by OpenEnv's own server."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient


class Guess(Action):
    """A number as text."""

    text: str


class Reply(Observation):
    """The answer to a guess."""

    reply: str


class Higher(Environment):
    """Guess the seed modulo 10; every wrong guess costs 0.25."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Reply:
        self._hidden, self._state = (seed or 0) % 10, State(episode_id=episode_id, step_count=0)
        return Reply(reply=f"game {seed}")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Reply:
        self._state.step_count += 1
        guess = int(action.text)
        if guess == self._hidden:
            return Reply(reply="right", done=True, reward=1.0)
        return Reply(reply="higher" if self._hidden > guess else "lower", reward=-0.25)

    @property
    def state(self) -> State:
        return self._state


def serve() -> None:
    """Serve until killed; the first line of the output is the URL."""
    app = create_app(Higher, Guess, Reply, env_name="higher", max_concurrent_envs=8)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # clients may connect from the next line on
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="error")).serve(sockets=[listening]))


async def play(url: str) -> dict[str, Any]:
    """One episode of FrozenLake with OpenEnv's client, and an action that is refused."""
    async with GenericEnvClient(base_url=url) as env:
        first, again = await env.reset(seed=3), await env.reset(seed=3)
        refused = ""
        try:
            await env.step({"answer": 5})
        except RuntimeError as error:
            refused = str(error)
        found, steps = await env.step({"answer": "right"}), 1
        while not found.done:
            found, steps = await env.step({"answer": "down"}), steps + 1
        state = await env.state()
    shown = [result.observation["messages"] for result in (first, again)]
    return {
        "same": shown[0] == shown[1] != [],
        "refused": refused,
        "steps": steps,
        "state": state,
        "reward": found.reward,
        "parts": found.observation["parts"],
    }


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        print(json.dumps(asyncio.run(play(sys.argv[2]))))
