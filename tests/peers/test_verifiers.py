"""Environments of the real package verifiers, unmodified, play against our endpoint and are trained on; its client
renderers reads answers of the HTTP front end."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll.data.tasks import Candidates
from jaxroll.engine.sequence import EngineStats
from jaxroll.envs.executors import Executors
from jaxroll.protocols import Completion, SamplingParams
from jaxroll.records import Finished, Grant, Version, VersionRun
from jaxroll.rollout.episode import Bounds, RolloutManager
from jaxroll.rpc import http
from jaxroll.serving.agents import Agents
from jaxroll.serving.http_answers import Served
from jaxroll.serving.http_requests import EngineLimits
from jaxroll.serving.http_server import FrontEnd
from jaxroll.text.tokenizers import HFTokenizer
from tests.harness.train_process import Train, assert_sound

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
FEW = ("--config.model.size=nano", "--config.sft.steps=3", "--config.sft.batch=8", "--config.schedule.steps=2",
       "--config.schedule.groups_per_step=2", "--config.schedule.group_size=2", "--config.task.heldout_items=0",
       "--config.evaluator.every=0", "--config.sampler.env_processes=2")  # fmt: skip


@pytest.fixture(autouse=True)
def installed() -> None:
    if not (ROOT / ".venv-verifiers/bin/python").exists():
        missing = pytest.fail if "verifiers" in os.environ.get("JAXROLL_PEERS", "").split() else pytest.skip
        missing("verifiers is not installed; run `make venv-verifiers`")


class NoScores:
    """The scoring pool of an environment that has a reward of its own."""

    time_limit_s, restarts, failed_starts, found_slow = 5.0, 0, 0, 0


class Engine:
    """Answers with `answers` of the prompt's text, and records the prompts and samples of every prompt's beginning."""

    def __init__(self, tokenizer: Any, answers: Any) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.asked: dict[str, list[tuple[list[int], Completion]]] = defaultdict(list)

    async def generate(self, prompt: np.ndarray, key: Any, params: SamplingParams, **_: Any) -> Completion:
        text = self.tokenizer.decode(prompt.tolist())
        ids = [*self.tokenizer.encode(self.answers(text)), self.tokenizer.eos_id]
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 7
        made = Completion(np.array(ids, np.int32), logprobs, (VersionRun(Version(0, 1), len(ids)),), "stop")
        self.asked[text.partition("<|answer|>")[0]].append((prompt.tolist(), made))
        return made


def reversal(text: str) -> str:
    return text.removeprefix("<|user|>").partition("<|answer|>")[0][::-1]


def products(text: str) -> str:
    asked, _, rest = text.removeprefix("<|user|>").partition("<|answer|>")
    if "<|tool|>" in rest:
        return rest.partition("<|tool|>")[2].partition("<|answer|>")[0]
    a, b = asked.split("*")
    return f'<tool_call>{{"name": "mul", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


@pytest.mark.parametrize(("name", "answers", "turns"), [("reversal", reversal, 1), ("products", products, 2)])
def test_the_recorded_tokens_are_those_that_the_engine_sampled(name: str, answers: Any, turns: int) -> None:
    config = configs.load(ROOT / f"configs/verifiers_{name}.py", ["sampler.env_processes=1"])
    candidates = Candidates(config)
    tasks = [candidates.at(index).task for index in range(3)]
    engine = Engine(candidates.tokenizer, answers)

    async def play() -> list[Any]:
        pool: Any = NoScores()
        places, served = Executors(pool, config), Agents(pool, config.task)
        bounds = Bounds(tokens=config.task.max_episode_tokens)
        manager = RolloutManager(
            engine, places.create, candidates.tokenizer, SamplingParams(64), bounds=bounds, play=served.play
        )
        try:
            return [(await manager.run_member(Grant(1, task, ((0, 0),), 9.0), 0, 0)).outcome for task in tasks]
        finally:
            await served.close()
            await places.close()

    for task, found in zip(tasks, asyncio.run(play()), strict=True):
        assert isinstance(found, Finished), found
        assert found.reward == 1.0 == found.reward_parts["right"] and found.reward_parts["turns"] == turns
        sampled = [segment for segment in found.segments if segment.loss_mask.all()]
        (calls,) = [asked for text, asked in engine.asked.items() if text == f"<|user|>{task.messages[0].content}"]
        assert len(calls) == turns == len(sampled) and not any(segment.branch for segment in found.segments)
        for segment, (_, completion) in zip(sampled, calls, strict=True):
            np.testing.assert_array_equal(segment.tokens, completion.tokens)
            np.testing.assert_array_equal(segment.logprobs, completion.logprobs)
        whole = np.concatenate([segment.tokens for segment in found.segments]).tolist()
        last, completion = calls[-1]
        assert whole == last + completion.tokens.tolist(), "verifiers' rendering extends our tokens"


def test_the_client_of_renderers_reads_the_answers_of_the_front_end(peer: Any) -> None:
    folder = ROOT / "configs/verifiers/tokenizer"
    tokenizer = HFTokenizer(folder)
    engine: Any = Engine(tokenizer, reversal)

    async def ask() -> dict[str, Any]:
        model = Served("m", engine, EngineLimits(100, tokenizer), lambda: Version(0, 1), EngineStats)
        listening = http.listen("127.0.0.1", 0)
        serving = asyncio.create_task(http.serve(FrontEnd(model, "a-token").app, listening))
        try:
            url = http.address("127.0.0.1", listening)
            return await asyncio.to_thread(peer, "verifiers", "renderers_client.py", url, "a-token", str(folder))
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    found = asyncio.run(ask())
    (((prompt, sampled),),) = engine.asked.values()
    assert found["content"] == "cba" and found["finish_reason"] == "stop" and found["overlong"]
    assert found["prompt_ids"] == prompt and found["completion_ids"] == sampled.tokens.tolist()
    assert found["completion_logprobs"] == sampled.logprobs.tolist()


@pytest.mark.parametrize("name", ["reversal", "products"])
def test_it_runs_from_training(name: str, free_run_dir: Path) -> None:
    with Train(free_run_dir, *FEW, config=f"verifiers_{name}") as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=2, alpha=1)
        last = [row for row in train.rows if row["kind"] == "stats"][-1]
        assert last["episodes"] >= 8 and last["failed"] == {}, train.logs()
        assert "right" in last["reward_parts"]
