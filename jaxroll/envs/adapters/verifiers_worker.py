"""Program that plays environments of verifiers; `verifiers_env` starts it with the Python that has verifiers.

It imports nothing from JaxRoll. Its arguments are the JSON object `task.args` and the id of its parent process. It
reads jobs as JSON lines and answers each with one line: `{}` lists the tasks; a job with `idx`, `base_url` and
`api_key` plays that task.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

KEY = "JAXROLL_MEMBER_KEY"  # the environment variable from which verifiers reads the key of the endpoint
EPISODES = 64  # then the environment serves again: until it stops, verifiers keeps a client for every endpoint


def library() -> SimpleNamespace:
    """The names of verifiers that this file uses. It is missing where the rest of JaxRoll is installed."""
    import verifiers.v1 as vf
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils import loaders

    return SimpleNamespace(vf=vf, loaders=loaders, Context=ModelContext, roles=agent_config_fields)


class Player:
    """One environment, whose tool servers run while it plays."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._library, config = library(), dict(settings["env"])
        loaders, vf = self._library.loaders, self._library.vf
        for role in self._library.roles(loaders.resolve_env_config(config)):
            given = config.get(role) or {}
            config[role] = {"runtime": {"type": "subprocess"}, **given}  # the default is a hosted sandbox
        self._env = loaders.load_environment(loaders.resolve_env_config(config))
        self._tasks = list(itertools.islice(self._env.taskset, settings["tasks"]))
        self._client = {key: settings[key] for key in ("renderer", "renderer_model_name") if settings.get(key)}
        self._kind = vf.TrainClientConfig if settings["client"] == "train" else vf.EvalClientConfig
        self._serving, self._played = AsyncExitStack(), 0

    def task_list(self) -> dict[str, Any]:
        """The data of the tasks, without the keys that have no value."""
        return {"tasks": [task.data.model_dump(mode="json", exclude_none=True) for task in self._tasks]}

    async def play(self, idx: int, base_url: str, api_key: str) -> dict[str, Any]:
        """Play task `idx` and return reward and parts: means over its traces. RuntimeError if the episode failed."""
        if self._played % EPISODES == 0:
            await self._serving.aclose()
            await self._serving.enter_async_context(self._env.serving())
        self._played += 1
        os.environ[KEY] = api_key
        client = self._kind(base_url=base_url, api_key_var=KEY, **self._client)
        sampling = self._library.vf.SamplingConfig()
        context = self._library.Context(client=client, model="policy", sampling=sampling)
        (slot,) = self._env.slots(self._tasks[idx])
        episode = await self._env.run_slot(slot, context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
        parts: dict[str, list[float]] = {}
        for trace in episode.traces:
            scores = {name: reward and reward.score for name, reward in trace.rewards.items()}
            for name, value in {**scores, **trace.metrics, "turns": trace.num_turns}.items():
                if value is not None:
                    parts.setdefault(name, []).append(float(value))
        means = {name: sum(values) / len(values) for name, values in parts.items() if name != "reward"}
        return {"reward": sum(trace.reward for trace in episode.traces) / len(episode.traces), **means}

    async def close(self) -> None:
        """Stop the tool servers."""
        await self._serving.aclose()


async def answer_jobs(jobs: AsyncIterator[bytes], settings: dict[str, Any], out: Any) -> None:
    """Answer every job with one line on `out`."""
    player = Player(settings)
    try:
        async for line in jobs:
            job = json.loads(line)
            try:
                found = await player.play(**job) if job else player.task_list()
            except Exception as error:  # noqa: BLE001 - user code may raise anything; it fails only this episode
                found = {"error": f"{type(error).__name__}: {error}"[-2000:]}
            out.write(json.dumps(found) + "\n")
            out.flush()
    finally:
        await player.close()


async def main(out: Any) -> None:
    """Answer the jobs of the standard input until it ends."""
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await answer_jobs(reader, json.loads(sys.argv[1]), out)


def end_with(parent: int) -> None:
    """End this process soon after its parent, process `parent`, also in the middle of an episode."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    if os.getppid() != int(sys.argv[2]):  # the parent ended before this process could watch it
        os._exit(1)
    threading.Thread(target=end_with, args=(int(sys.argv[2]),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # environments that print do not write among the answers
    asyncio.run(main(answers))
