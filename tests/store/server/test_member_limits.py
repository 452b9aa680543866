"""Members that the learner could never train are refused when they are put."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxroll import wire
from jaxroll.config import Config
from jaxroll.errors import StoreRefusal
from jaxroll.records import Member, Version
from jaxroll.rollout.episode import Bounds
from jaxroll.store.core.admission import Settings
from jaxroll.store.server.puts import put_request
from tests.harness.store.builders import finished

V0 = Version(0, 0)


def member(sampled: int) -> bytes:
    """A member of four prompt tokens and so many sampled ones."""
    return wire.encode(finished(0, 0, 1, (V0, sampled)))


@pytest.mark.parametrize(("row_tokens", "prompt_tokens"), [(10, 0), (10, 2), (10, 3), (10, 100)])
def test_the_longest_member_that_an_episode_may_have_is_the_longest_that_is_taken(
    row_tokens: int, prompt_tokens: int
) -> None:
    limits = {"row_tokens": row_tokens, "prompt_tokens": prompt_tokens}
    most = Bounds(**limits).most(4) - 4
    put_request(member(most), **limits)
    with pytest.raises(StoreRefusal, match=r"do not fit into learner\.row_tokens = 10"):
        put_request(member(most + 1), **limits)


def test_every_conversation_of_a_member_has_a_row_of_its_own() -> None:
    whole = finished(0, 0, 1, (V0, 5))
    first, second = whole.outcome.segments
    other = (msgspec.structs.replace(first, branch=True), second)
    runs = whole.outcome.versions * 2

    def put(segments: tuple[Any, ...]) -> None:
        outcome = msgspec.structs.replace(whole.outcome, segments=segments, versions=runs)
        put_request(wire.encode(Member(0, 0, 1, outcome)), row_tokens=9)

    put((first, second, *other))
    with pytest.raises(StoreRefusal, match="18 tokens, 0 of them"):
        put((first, second, first, second))
    with pytest.raises(StoreRefusal, match="it starts with a sampled token"):
        put((first, second, msgspec.structs.replace(second, branch=True)))


def test_the_limits_are_those_of_the_config() -> None:
    config = Config()
    settings = Settings.of(config)
    assert settings.row_tokens == config.learner.row_tokens > 0
    assert settings.prompt_tokens == config.learner.shared_prompt_tokens


def test_without_a_limit_every_length_is_taken() -> None:
    put_request(member(100_000))


def spoiled(token: int) -> bytes:
    """A member that has `token` in its answer."""
    whole = finished(0, 0, 1, (V0, 5))
    prompt, answer = whole.outcome.segments
    answer = msgspec.structs.replace(answer, tokens=np.array([1, 2, token, 3, 4], np.int32))
    return wire.encode(Member(0, 0, 1, msgspec.structs.replace(whole.outcome, segments=(prompt, answer))))


def test_a_token_id_is_not_negative() -> None:
    with pytest.raises(StoreRefusal, match="segment 1 has the token id -1"):
        put_request(spoiled(-1))


def test_a_token_id_is_one_of_the_model() -> None:
    put_request(spoiled(31), vocab_size=32)
    put_request(spoiled(2**31 - 1))  # of an unknown model
    with pytest.raises(StoreRefusal, match=r"segment 1 has the token id 32; the model's ids are 0 to 31"):
        put_request(spoiled(32), vocab_size=32)


def test_the_store_looks_at_token_ids_as_soon_as_the_model_is_known(
    tmp_path: Path, small: SimpleNamespace, run: Callable[[Any], Any]
) -> None:
    config, known = small.configured(), [0]

    async def puts() -> None:
        async with (
            small.serving(tmp_path, config, vocab_size=lambda: known[0]),
            small.connected(tmp_path, config, "learner") as learner,
            small.connected(tmp_path, config, "sampler") as sampler,
        ):
            await learner.publish(small.version_ref(await learner.begin(None)))
            first, second = small.keys(await sampler.lease(V0, 2))
            assert await sampler.put(finished(*first, (V0, 3))) == "OK"
            known[0] = 4  # those of the prompt are 0 to 3, that of the answer is 100 times the group and the member
            with pytest.raises(StoreRefusal, match="segment 1 has the token id"):
                await sampler.put(msgspec.structs.replace(finished(7, 7, 1, (V0, 3)), group=0, member=1))
            failure = small.failed(*second, "DATA", "the store refuses this member")
            assert await sampler.put(failure) == "OK"

    run(puts())
