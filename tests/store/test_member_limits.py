"""Members that the learner could never train are refused when they are put."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from jaxroll import wire
from jaxroll.config import Config
from jaxroll.errors import StoreRefusal
from jaxroll.records import Member, Version
from jaxroll.rollout.episode import Bounds
from jaxroll.store.core.settings import Settings
from jaxroll.store.server.validation import put_request
from tests.store.conftest import finished

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


def test_the_limits_are_those_of_the_config() -> None:
    config = Config()
    settings = Settings.of(config)
    assert settings.row_tokens == config.learner.row_tokens > 0
    assert settings.prompt_tokens == config.learner.prompt_tokens


def test_without_a_limit_every_length_is_taken() -> None:
    put_request(member(100_000))


def test_a_token_id_is_not_negative() -> None:
    whole = finished(0, 0, 1, (V0, 5))
    prompt, answer = whole.outcome.segments
    spoiled = msgspec.structs.replace(answer, tokens=np.array([1, 2, -1, 3, 4], np.int32))
    outcome = msgspec.structs.replace(whole.outcome, segments=(prompt, spoiled))
    with pytest.raises(StoreRefusal, match="segment 1 has the token id -1"):
        put_request(wire.encode(Member(0, 0, 1, outcome)))
