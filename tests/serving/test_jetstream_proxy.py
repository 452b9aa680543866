"""The proxy over an engine with JetStream's verbs; google-jetstream is not needed for it."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxroll.config import Config
from jaxroll.errors import ConfigError, DataError, InfraError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRun
from jaxroll.serving.jetstream_proxy import JetStreamProxy, check_training

VERSION, KEY = Version(0, 3), GenerationKey(0, 0)
ROOM = 6  # new tokens in a slot of the fake


@dataclass(frozen=True)
class Result:
    """JetStream's ResultTokens, as far as it is used."""

    rows: dict[int, tuple[int, bool]]

    def convert_to_numpy(self) -> Result:
        return self

    def get_result_at_slot(self, slot: int) -> SimpleNamespace:
        token, valid = self.rows.get(slot, (0, False))
        return SimpleNamespace(tokens=np.array([[token]]), valid=np.array([[int(valid)]]))


@dataclass
class Counting:
    """Answers a prompt of sum s with s + 1, s + 2, … in two slots; raises at the steps in `breaks`.

    A state that is passed in is used up, as donated arrays are.
    """

    breaks: tuple[int, ...] = ()
    steps: int = 0
    padded: list[int] = field(default_factory=list)
    inserted: list[tuple[int, int]] = field(default_factory=list)  # (slot, sum of the prompt)
    max_concurrent_decodes = 2
    max_prefill_length = 20
    samples_per_slot = 1

    def init_decode_state(self) -> dict[str, dict[int, tuple[int, int]]]:
        return {"slots": {}}

    def prefill(self, *, params: Any, padded_tokens: Any, true_length: int) -> int:
        self.padded.append(len(padded_tokens))
        assert not np.any(padded_tokens[true_length:])
        return int(padded_tokens[:true_length].sum()) * params

    def insert(self, prefix: int, state: dict, slot: int) -> dict:
        self.inserted.append((slot, prefix))
        return {"slots": state.pop("slots") | {slot: (prefix, 0)}}

    def generate(self, params: Any, state: dict) -> tuple[dict, Result]:
        self.steps += 1
        slots = state.pop("slots")
        if self.steps in self.breaks:
            raise RuntimeError("out of memory")
        after = {slot: (start, count + 1) for slot, (start, count) in slots.items()}
        return {"slots": after}, Result(
            {slot: (start + count, count <= ROOM) for slot, (start, count) in after.items()}
        )


def greedy(max_tokens: int, *stops: int) -> SamplingParams:
    return SamplingParams(max_tokens, 0.0, stop_tokens=stops)


async def ask(proxy: JetStreamProxy, prompt: list[int], params: SamplingParams) -> Completion:
    async with asyncio.timeout(60):
        return await proxy.generate(np.array(prompt, np.int32), KEY, params)


@pytest.fixture
def proxy_of():
    made: list[JetStreamProxy] = []

    def make(engine: Counting, **options) -> JetStreamProxy:
        made.append(JetStreamProxy(engine, 1, VERSION, **({"trained_by": None} | options)))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


def test_more_requests_than_slots_each_get_their_own_tokens(proxy_of) -> None:
    async def main() -> list[Completion]:
        return await asyncio.gather(
            ask(proxy, [10], greedy(3)),
            ask(proxy, [20, 1], greedy(5, 23)),
            ask(proxy, [30], greedy(9)),
            ask(proxy, [40] * 17, greedy(1)),
            ask(proxy, [50] * 20, greedy(2, 1001)),
        )

    engine = Counting()
    proxy = proxy_of(engine)
    answers = asyncio.run(main())
    assert [(answer.tokens.tolist(), answer.finish) for answer in answers] == [
        ([11, 12, 13], "length"),
        ([22, 23], "stop"),
        ([31, 32, 33, 34, 35, 36], "length"),
        ([681], "length"),
        ([1001], "stop"),
    ]
    for answer in answers:
        assert answer.versions == (VersionRun(VERSION, len(answer.tokens)),)
        assert answer.tokens.dtype == np.int32 and len(answer.logprobs) == len(answer.tokens)
    assert [start for _, start in engine.inserted] == [10, 21, 30, 680, 1000], "first come, first served"
    assert engine.padded == [16, 16, 16, 20, 20]
    assert engine.steps == 9, "one after the other it would be 3 + 2 + 7 + 1 + 1"


def test_a_cancelled_request_leaves_its_slot_and_the_queue(proxy_of) -> None:
    async def main() -> list[int]:
        calls = [asyncio.create_task(ask(proxy, [start], greedy(6))) for start in (10, 20, 30, 40)]
        async with asyncio.timeout(60):
            while engine.steps < 2:
                await asyncio.sleep(0)
        calls[0].cancel()
        calls[2].cancel()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in done] == [True, False, True, False]
        return [done[1].tokens.tolist(), done[3].tokens.tolist()]

    engine = Counting()
    proxy = proxy_of(engine)
    assert asyncio.run(main()) == [[21, 22, 23, 24, 25, 26], [41, 42, 43, 44, 45, 46]]
    assert engine.inserted == [(0, 10), (1, 20), (0, 40)]


def test_an_engine_that_raises_fails_all_and_serves_the_next(proxy_of) -> None:
    async def main() -> None:
        calls = [ask(proxy, [start], greedy(6)) for start in (10, 20, 30)]
        for one in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(one, InfraError) and "RuntimeError: out of memory" in str(one)
        assert (await ask(proxy, [30], greedy(2))).tokens.tolist() == [31, 32]

    proxy = proxy_of(Counting(breaks=(2,)))
    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([], greedy(1), "0 tokens"),
        ([1] * 21, greedy(1), "21 tokens: this JetStream engine takes 1 to 20"),
        ([1], SamplingParams(1, 0.7), r"temperature=0.0.*temperature=0.7"),
        ([1], SamplingParams(1, 0.0, top_k=5), "top_k=5"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(proxy_of, prompt, params, said: str) -> None:
    with pytest.raises(DataError, match=said):
        asyncio.run(ask(proxy_of(Counting()), prompt, params))


def trained(alpha: float, correction: str) -> Config:
    config = Config()
    return dataclasses.replace(
        config,
        schedule=dataclasses.replace(config.schedule, alpha=alpha),
        learner=dataclasses.replace(config.learner, correction=correction),
    )


@pytest.mark.parametrize(
    ("alpha", "correction", "key"),
    [
        (1.0, "decoupled", "schedule.alpha"),
        (0.5, "none", "schedule.alpha"),
        (0.0, "decoupled", "learner.correction"),
        (0.0, "tis", "learner.correction"),
    ],
)
def test_training_that_needs_log_probs_is_refused(proxy_of, alpha: float, correction: str, key: str) -> None:
    with pytest.raises(ConfigError, match="gives no") as refusal:
        proxy_of(Counting(), trained_by=trained(alpha, correction))
    assert refusal.value.key == key
    assert "'none'" in refusal.value.remedy


def test_training_on_fresh_samples_with_recomputed_log_probs_is_allowed(proxy_of) -> None:
    check_training(trained(0.0, "none"))
    proxy_of(Counting(), trained_by=trained(0.0, "none"))
