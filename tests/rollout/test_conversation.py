"""A conversation with a real engine: only what is new is computed, with the tokens of an engine without memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import Config, MeshConfig, TaskConfig
from jaxroll.data.sources import open_source
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.envs.executors import Executors
from jaxroll.learner import minibatch
from jaxroll.models import families, params
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Finished, Grant, Member, Message, Segment, Task, Version
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.rollout.episode import Bounds, RolloutManager
from jaxroll.serving.agents import Branches
from jaxroll.serving.engine_thread import EngineHost, EngineProxy
from jaxroll.text.tokenizers import CharTokenizer

CONFIG = Config(task=TaskConfig(source="game", name="frozen_lake", env="frozen_lake", args={"size": 3, "max_turns": 5}))
TOKENS, DEADLINE_S = 160, 120.0
SPEC = families.spec("nano")
WEIGHTS: list[params.Params] = []


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    mesh = sharding.build(MeshConfig())
    weights = params.init(SPEC, jax.random.key(3), mesh, sharding.SAMPLER)
    config = EngineConfig(
        slots=2,
        max_tokens=TOKENS,
        prefill_rows=2,
        prefill_buckets=(16,),
        decode_chunk=4,
        seed=1,
        page_tokens=8,
        cache_pages=80,
        max_stops=16,
    )
    engine = Engine(SPEC, mesh, sharding.SAMPLER, config)
    WEIGHTS[:] = [weights]
    engine.warmup(weights)
    engine.swap(Version(0, 0), weights)
    made = EngineHost(engine)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join(DEADLINE_S)


def forget(host: EngineHost) -> None:
    """Make the engine forget every beginning it knows, as new weights do."""
    host.call(lambda: (host.engine.swap(Version(0, 0), WEIGHTS[0]), host.engine.step())).result(DEADLINE_S)


class Forgetful:
    """The same engine, asked to keep nothing."""

    def __init__(self, proxy: EngineProxy) -> None:
        self._proxy = proxy

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        return await self._proxy.generate(prompt, key, params)


def played(host: EngineHost, group: int, *, keep: bool) -> Finished:
    """One episode on lake `group`, in which the model babbles."""
    item = open_source(CONFIG.task).item(group)
    text = CharTokenizer(open_source(CONFIG.task).alphabet())
    task = Task(group, (Message("user", item.compact),), "frozen_lake", json.dumps(item.env_args), group, "h")

    async def play() -> Member:
        proxy = EngineProxy(host, asyncio.get_running_loop())
        places = Executors(ScoringPool(1), CONFIG)
        sampling = SamplingParams(max_tokens=12, stop_tokens=tuple(range(2, 18)))  # babble ends soon, and by itself
        manager = RolloutManager(
            proxy if keep else Forgetful(proxy), places.create, text, sampling, bounds=Bounds(tokens=TOKENS)
        )
        async with asyncio.timeout(DEADLINE_S):
            return await manager.run_member(Grant(group, task, ((0, 0),), 30.0), 0, 0)

    outcome = asyncio.run(play()).outcome
    assert isinstance(outcome, Finished), outcome
    return outcome


def test_every_turn_computes_only_what_is_new(host: EngineHost) -> None:
    """The prefilled tokens of an episode are its tokens less those that decoding put into the cache."""
    seen = 0
    for group in range(30):
        forget(host)
        before = host.engine.stats()
        outcome = played(host, group, keep=True)
        after = host.engine.stats()
        lengths = [len(segment.tokens) for segment in outcome.segments]
        shown, said = sum(lengths[::2]), lengths[1::2]
        turns = len(said)
        if 1 in said:  # an answer without words: a prompt alone is no beginning of a conversation
            continue
        # The last token of an answer is drawn and never computed: it comes with the next prompt.
        assert after.prefill_tokens - before.prefill_tokens == shown + turns - 1
        assert after.prefix_hits - before.prefix_hits == turns - 1
        seen += turns
    assert seen > 20, "episodes of several turns"


def test_the_tokens_are_those_of_an_engine_without_memory(host: EngineHost) -> None:
    for group in range(10, 13):
        kept, computed = played(host, group, keep=True), played(host, group, keep=False)
        assert kept.reward_parts == computed.reward_parts and kept.versions == computed.versions
        for ours, theirs in zip(kept.segments, computed.segments, strict=True):
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            np.testing.assert_array_equal(ours.loss_mask, theirs.loss_mask)
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_the_learner_trains_on_the_sampled_tokens_only(host: EngineHost) -> None:
    outcome = played(host, 20, keep=True)
    sample = minibatch.of_member(Member(20, 0, 0, outcome), Version(0, 0))
    said = np.concatenate([np.full(len(segment.tokens), k % 2 == 1) for k, segment in enumerate(outcome.segments)])
    np.testing.assert_array_equal(sample.mask, said)
    np.testing.assert_array_equal(sample.tokens, np.concatenate([segment.tokens for segment in outcome.segments]))
    assert sample.sampled_tokens == said.sum() == sum(run.count for run in outcome.versions)


class Recording(Forgetful):
    """The engine without memory, and what it sampled."""

    def __init__(self, proxy: EngineProxy) -> None:
        super().__init__(proxy)
        self.prompts: list[list[int]] = []
        self.sampled: list[tuple[list[int], GenerationKey, Completion]] = []

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        self.prompts.append(prompt.tolist())
        found = await self._proxy.generate(prompt, key, params, keep=keep)
        self.sampled.append((prompt.tolist(), key, found))
        return found


class WithoutHistory(CharTokenizer):
    """A template that shows earlier answers without their text."""

    def render(self, messages: tuple[Message, ...], **options: Any) -> list[int]:
        shown = [Message(m.role, "" if m.role == "assistant" else m.content) for m in messages]
        return super().render(tuple(shown), **options)


def test_branches_of_an_agent_are_recorded_as_the_engine_sampled_them(host: EngineHost) -> None:
    text = WithoutHistory(open_source(CONFIG.task).alphabet())
    view = Message("user", open_source(CONFIG.task).item(1).compact)
    sampling = SamplingParams(max_tokens=12, stop_tokens=tuple(range(3, 18)))

    async def play() -> tuple[Finished, Recording]:
        proxy = Recording(EngineProxy(host, asyncio.get_running_loop()))
        calls = Branches(proxy, GenerationKey(7, 0), text, sampling, Bounds(tokens=TOKENS))

        async def ask(*messages: Message) -> tuple[Message, ...]:
            call = await calls.chat(messages, [], calls.sampling)
            calls.record_answer(call, Message("assistant", text.decode(call.completion.tokens.tolist()[:-1])))
            return (*messages, Message("assistant", calls.answer))

        async with asyncio.timeout(DEADLINE_S):
            first = await ask(view)
            second = await ask(*first, view)
            await ask(*second, view)
            await asyncio.gather(ask(*first, Message("user", "?")), ask(view))
        return calls.finished("done", 1.0, {}), proxy

    forget(host)
    found, proxy = asyncio.run(play())
    made: list[list[Segment]] = []
    for segment in found.segments:
        made += [[]] if segment.branch or not made else []
        made[-1].append(segment)
    assert len(made) == 3 and len(proxy.sampled) == 5
    after = [[*prompt, *completion.tokens.tolist()] for prompt, _, completion in proxy.sampled]
    for call, before in ((1, 0), (2, 1), (3, 0)):  # its context begins with all tokens of the call before
        assert proxy.prompts[call][: len(after[before])] == after[before]
    recorded = [
        (np.concatenate([s.tokens for s in conversation[:k]]).tolist(), segment)
        for conversation in made
        for k, segment in enumerate(conversation)
        if segment.loss_mask.any()
    ]
    assert len(recorded) == 5
    for prompt, segment in recorded:
        same = [c for asked, _, c in proxy.sampled if asked == prompt and c.tokens.tolist() == segment.tokens.tolist()]
        assert len(same) == 1, "the context is what the engine got, the answer what it sampled"
        np.testing.assert_array_equal(segment.logprobs, same[0].logprobs)
    assert sum(run.count for run in found.versions) == sum(len(c.tokens) for _, _, c in proxy.sampled)
    forget(host)

    async def again(prompt: list[int], key: GenerationKey) -> Completion:
        proxy = EngineProxy(host, asyncio.get_running_loop())
        with_stop = SamplingParams(12, stop_tokens=(*sampling.stop_tokens, text.eos_id))
        return await proxy.generate(np.array(prompt, np.int32), key, with_stop)

    for prompt, key, completion in proxy.sampled:  # whole contexts, computed without the cache
        computed = asyncio.run(again(prompt, key))
        np.testing.assert_array_equal(computed.tokens, completion.tokens)
        np.testing.assert_allclose(computed.logprobs, completion.logprobs, atol=1e-4)
