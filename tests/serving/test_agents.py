"""Agents that know only a base_url: what is recorded of their calls, and what a misbehaving one costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2 as httpx
import msgspec
import numpy as np
import openai
import pytest

from jaxroll.config import TaskConfig
from jaxroll.errors import InfraError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, StepResult
from jaxroll.records import Failed, Finished, Grant, Message, Task, Version, VersionRun
from jaxroll.rollout.episode import Bounds, RolloutManager
from jaxroll.serving.agents import Agents
from tests.harness.http_engine import TEXT

DEADLINE_S = 30.0
TASK = Task(0, (Message("user", "hi"),), "agent", '{"answer": "b"}', 0, "h")
Program = Callable[[openai.AsyncOpenAI, dict[str, str]], Awaitable[Any]]


class Rewriting:
    """The tokenizer with a template that drops the text before `!` of earlier answers and shows tools."""

    def __init__(self) -> None:
        self.vocab_size, self.pad_id, self.eos_id = TEXT.vocab_size, TEXT.pad_id, TEXT.eos_id
        self.encode, self.decode = TEXT.encode, TEXT.decode

    def render(self, messages: tuple[Message, ...], *, first: bool = True, tools: Any = ()) -> list[int]:
        kept = [
            msgspec.structs.replace(m, content=m.content.rpartition("!")[2]) if m.role == "assistant" else m
            for m in messages
        ]
        shown = json.dumps(tools) if tools and first else ""
        return TEXT.encode(shown) + TEXT.render(tuple(kept), first=first)


class Engine:
    """Answers with the next of `answers`; records the prompts and the samples. It waits for `go` before each."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.go = list(answers), asyncio.Event()
        self.go.set()
        self.asked: list[tuple[list[int], GenerationKey, SamplingParams]] = []
        self.sampled: list[np.ndarray] = []
        self.waiting, self.cancelled = asyncio.Event(), asyncio.Event()

    async def generate(self, prompt, key, params, *, keep=False) -> Completion:
        self.asked.append((prompt.tolist(), key, params))
        answer = self.answers.pop(0)
        self.waiting.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if answer == "broken":
            raise InfraError("the engine is gone")
        ids = [*TEXT.encode(answer), TEXT.eos_id][: params.max_tokens]
        finish = "stop" if ids[-1] == TEXT.eos_id else "length"
        self.sampled.append(np.array(ids, np.int32))
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / len(self.sampled)
        return Completion(self.sampled[-1], logprobs, (VersionRun(Version(0, len(self.sampled)), len(ids)),), finish)


class InLoop:
    """An environment that runs a program on the event loop."""

    step_limit_s = DEADLINE_S

    def __init__(self, program: Program) -> None:
        self._program = program

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        return ()

    async def step(self, answer: str) -> StepResult:
        job = json.loads(answer)
        async with openai.AsyncOpenAI(base_url=job["base_url"], api_key=job["api_key"], max_retries=0) as client:
            found = await self._program(client, job)
        return StepResult(done=False) if found is None else StepResult(done=True, reward=found)

    async def close(self) -> None:
        pass


class Pool:
    """A scoring pool that compares."""

    time_limit_s = 5.0

    async def score(self, env_args: str, answer: str) -> float:
        return float(json.loads(env_args)["answer"] == answer)


def outcome(program: Program, engine: Engine, *, limit_s: float = DEADLINE_S, bounds: Bounds = Bounds()) -> Any:  # noqa: B008
    async def play() -> Any:
        agents = Agents(Pool(), TaskConfig(env="agent", agent="a:b", agent_limit_s=limit_s))  # type: ignore[arg-type]
        sampling = SamplingParams(8, temperature=0.7)
        manager = RolloutManager(
            engine, lambda name: InLoop(program), Rewriting(), sampling, bounds=bounds, play=agents.play
        )
        try:
            return (await manager.run_member(Grant(5, TASK, ((3, 0),), 9.0), 3, 0)).outcome
        finally:
            await agents.close()

    return asyncio.run(asyncio.wait_for(play(), DEADLINE_S))


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def ask(client: openai.AsyncOpenAI, *messages: dict[str, str], **more: Any) -> Any:
    found = await client.chat.completions.create(model="any", messages=list(messages), **more)  # type: ignore[arg-type]
    return found.choices[0]


def conversations(found: Finished) -> list[list[tuple[list[int], bool]]]:
    """(tokens, sampled) of the segments of every conversation."""
    made: list[list[tuple[list[int], bool]]] = []
    for segment in found.segments:
        made += [[]] if segment.branch or not made else []
        made[-1].append((segment.tokens.tolist(), bool(segment.loss_mask.all())))
    return made


HI, NEXT = said("user", "hi"), said("tool", "ok")


def test_turns_keep_their_sampled_tokens_where_the_template_rewrites_history() -> None:
    engine = Engine("a!b", "c!b", "b")

    async def program(client: openai.AsyncOpenAI, job: dict[str, str]) -> None:
        history = [HI]
        for _ in range(2):
            answer = await ask(client, *history, logprobs=True)
            history += [said("assistant", answer.message.content), NEXT]
        await ask(client, *history)

    found = outcome(program, engine)
    assert isinstance(found, Finished), found
    first, second, third = (one.tolist() for one in engine.sampled)
    shown = TEXT.render((Message("user", "hi"),)), TEXT.render((Message("tool", "ok"),), first=False)
    ((p, q, r, s, t, u),) = conversations(found)
    assert [p, r, t] == [(shown[0], False), (shown[1], False), (shown[1], False)]
    assert [q, s, u] == [(first, True), (second, True), (third, True)]
    assert engine.asked[2][0] == shown[0] + first + shown[1] + second + shown[1], "no answer was rewritten"
    logprobs = np.concatenate([s.logprobs for s in found.segments if s.loss_mask.any()])
    want = [-np.arange(1, len(ids) + 1, dtype=np.float32) / n for n, ids in enumerate((first, second, third), 1)]
    np.testing.assert_array_equal(logprobs, np.concatenate(want))
    assert found.versions == tuple(VersionRun(Version(0, n), len(s)) for n, s in enumerate((first, second, third), 1))
    assert (found.reward, found.reward_parts["calls"], found.reward_parts["truncated"]) == (1.0, 3.0, 0.0)


def test_another_continuation_is_a_branch_that_begins_with_the_recorded_answer() -> None:
    engine = Engine("a!b", "x", "y", "z")

    async def program(client: openai.AsyncOpenAI, job: dict[str, str]) -> float:
        answer = said("assistant", (await ask(client, HI)).message.content)
        await ask(client, HI, answer, NEXT)
        await ask(client, HI, answer, said("user", "no"))  # a fork after the first answer
        await ask(client, said("system", "sub"), HI)  # a sub-agent
        return 0.5

    found = outcome(program, engine)
    assert isinstance(found, Finished), found
    main, fork, sub = conversations(found)
    assert [sampled for _, sampled in main] == [False, True, False, True]
    assert fork[0] == (main[0][0] + main[1][0], False) and [sampled for _, sampled in fork] == [False, False, True]
    assert engine.asked[2][0] == fork[0][0] + fork[1][0]
    assert [sampled for _, sampled in sub] == [False, True]
    keys = [key.salt for _, key, _ in engine.asked]
    assert keys[0] == keys[1] == 0 and len(set(keys)) == 3 and found.reward == 0.5


def test_concurrent_equal_calls_are_conversations_of_their_own() -> None:
    engine = Engine("a", "a", "a")

    async def program(client: openai.AsyncOpenAI, job: dict[str, str]) -> float:
        await asyncio.gather(*(ask(client, HI) for _ in range(3)))
        return 1.0

    found = outcome(program, engine)
    assert len(conversations(found)) == 3 and len({key.salt for _, key, _ in engine.asked}) == 3


def test_a_stream_with_tools_and_stop_strings_and_a_posted_reward() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    engine = Engine(call, "abc")
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    async def program(client: openai.AsyncOpenAI, job: dict[str, str]) -> None:
        stream = await client.chat.completions.create(
            model="m",
            messages=[HI],  # type: ignore[list-item]
            tools=tools,
            stream=True,
            temperature=0.1,  # type: ignore[list-item]
        )
        calls = [c async for chunk in stream for c in chunk.choices[0].delta.tool_calls or ()]
        assert calls[0].function.name == "f"
        named = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        echo: Any = {"role": "assistant", "content": None, "tool_calls": [named]}
        await ask(client, HI, echo, NEXT, tools=tools, stop=["q"], max_tokens=4)
        async with httpx.AsyncClient() as http:
            assert (await http.post(job["reward_url"], json={"reward": 0.25, "style": True})).status_code == 200

    engine_limit = Engine.generate

    async def generous(self, prompt, key, params, *, keep=False):
        return await engine_limit(self, prompt, key, msgspec.structs.replace(params, max_tokens=99), keep=keep)

    Engine.generate = generous  # type: ignore[method-assign]
    try:
        found = outcome(program, engine)
    finally:
        Engine.generate = engine_limit  # type: ignore[method-assign]
    assert isinstance(found, Finished), found
    assert len(conversations(found)) == 1 and (found.reward, found.reward_parts["style"]) == (0.25, 1.0)
    assert [params.temperature for _, _, params in engine.asked] == [0.7, 0.7], "samples are training data"


def test_token_ids_in_and_out_extend_a_conversation() -> None:
    engine = Engine("a", "b")

    async def program(client: openai.AsyncOpenAI, job: dict[str, str]) -> float:
        url, ids = job["base_url"].removesuffix("/v1") + "/inference/v1/generate", [4, 5]
        async with httpx.AsyncClient() as http:
            for _ in range(2):
                answer = (await http.post(url, json={"token_ids": ids, "sampling_params": {"logprobs": 1}})).json()
                ids = [*ids, *answer["choices"][0]["token_ids"], 6]
        return 1.0

    ((a, b, c, d),) = conversations(outcome(program, engine))
    assert [a, c] == [([4, 5], False), ([6], False)] and b[1] and d[1]


def test_a_conversation_without_room_is_truncated() -> None:
    engine = Engine("abcdef", "x", "y")

    async def program(client: openai.AsyncOpenAI, job: dict[str, str]) -> float:
        answer = said("assistant", (await ask(client, HI, max_tokens=3)).message.content)
        await ask(client, HI, answer, NEXT)
        await ask(client, HI, answer, NEXT, said("assistant", "x"), NEXT)
        raise AssertionError("there was room")

    found = outcome(program, engine, bounds=Bounds(tokens=16))
    assert isinstance(found, Finished), found
    assert (found.finish, found.reward, found.reward_parts) == ("length", 0.0, {"truncated": 1.0})
    ((_, cut, after, _),) = conversations(found)
    assert cut[0][-1] != TEXT.eos_id == after[0][0], "the cut answer is ended, by a token that is not trained on"


@pytest.mark.parametrize(
    ("case", "kind", "cause"),
    [
        ("raises", "DATA", "ValueError"),
        ("never calls", "DATA", "without an answer of the model"),
        ("hangs", "DATA", "longer than task.agent_limit_s = 0.2"),
        ("bad reward", "DATA", "not a finite number"),
        ("engine", "INFRA", "the engine is gone"),
    ],
)
def test_a_misbehaving_agent_costs_its_member_only(case: str, kind: str, cause: str) -> None:
    engine = Engine("broken" if case == "engine" else "b")

    async def program(client: openai.AsyncOpenAI, job: dict[str, str]) -> Any:
        if case == "raises":
            raise ValueError("no")
        if case == "never calls":
            return 1.0
        await ask(client, HI)
        if case == "hangs":
            await asyncio.Event().wait()
        return float("nan")

    found = outcome(program, engine, limit_s=0.2 if case == "hangs" else DEADLINE_S)
    assert isinstance(found, Failed) and found.kind == kind and cause in found.error, found


def test_calls_that_disconnect_or_come_late_are_not_recorded() -> None:
    engine, late = Engine("gone", "b"), {}

    async def program(client: openai.AsyncOpenAI, job: dict[str, str]) -> float:
        engine.go.clear()
        call = asyncio.ensure_future(ask(client, HI))
        await engine.waiting.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await engine.cancelled.wait()
        engine.go.set()
        await ask(client, HI)
        late.update(job)
        return 1.0

    async def play() -> None:
        agents = Agents(Pool(), TaskConfig(env="agent", agent="a:b"))  # type: ignore[arg-type]
        manager = RolloutManager(engine, lambda name: InLoop(program), Rewriting(), SamplingParams(8), play=agents.play)
        found = (await manager.run_member(Grant(5, TASK, ((3, 0),), 9.0), 3, 0)).outcome
        assert isinstance(found, Finished) and len(engine.sampled) == 1 and len(conversations(found)) == 1
        async with openai.AsyncOpenAI(base_url=late["base_url"], api_key="k", max_retries=0) as client:
            with pytest.raises(openai.APIStatusError, match="takes no more calls") as refused:
                await ask(client, HI)
        assert refused.value.status_code == 410
        await agents.close()

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
