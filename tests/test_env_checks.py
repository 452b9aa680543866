"""Values that environments return are converted if nothing is lost, and otherwise refused with the field's name."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from jaxroll import protocols, wire
from jaxroll.errors import DataError, described
from jaxroll.protocols import StepResult
from jaxroll.records import MAX_LABEL_CHARS, MAX_PARTS, Message


def ended(**fields: Any) -> StepResult:
    return StepResult(done=True, **fields)


@pytest.mark.parametrize(
    "reward",
    [1, True, np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.array(1.0), np.array(1), Decimal(1)],
    ids=lambda reward: type(reward).__name__ + str(getattr(reward, "dtype", "")),
)
def test_numbers_of_other_libraries_become_floats(reward: Any) -> None:
    found = protocols.step_result(ended(reward=reward, reward_parts={"exact": reward, "same": reward == 1}))
    assert (found.reward, found.reward_parts) == (1.0, {"exact": 1.0, "same": 1.0})
    assert {type(value) for value in (found.reward, *found.reward_parts.values())} == {float}
    assert wire.decode(wire.encode(found), StepResult) == found


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (ended(reward=None), "the reward is None"),
        (ended(reward="1.0"), "the reward is a value of type str"),
        (ended(reward=float("nan")), "the reward is nan"),
        (ended(reward=np.float32("inf")), "the reward is inf"),
        (ended(reward=10**400), "the reward is a value of type int"),
        (ended(reward=np.array([1.0])), "the reward is a value of type ndarray"),
        (ended(reward=np.array("1.0")), "the reward is a value of type ndarray"),
        (ended(reward=1j), "the reward is a value of type complex"),
        (ended(reward=np.complex64(1)), "the reward is a value of type complex64"),
        (ended(reward_parts=None), "reward_parts is None"),
        (ended(reward_parts=[("a", 1.0)]), "reward_parts is a value of type list"),
        (ended(reward_parts={"a": None}), "reward part 'a' is None"),
        (ended(reward_parts={"a": float("nan")}), "reward part 'a' is nan"),
        (ended(reward_parts={1: 1.0}), "label .* type int"),
        (ended(reward_parts={"x" * (MAX_LABEL_CHARS + 1): 1.0}), "label .* has 129 characters"),
        (ended(reward_parts={"\ud800": 1.0}), "label .* lone surrogate"),
        (ended(reward_parts={str(i): 1.0 for i in range(MAX_PARTS)}), "reward_parts has 256 entries"),
        (StepResult(done=False, state="3"), "StepResult.state is a value of type str, not bytes"),  # type: ignore[arg-type]
        (StepResult(done="yes"), "done is a value of type str"),  # type: ignore[arg-type]
        (StepResult(done=None), "done is None"),  # type: ignore[arg-type]
        (StepResult(done=False, messages=None), r"messages is None"),  # type: ignore[arg-type]
        (StepResult(done=False, messages="again"), r"messages is a value of type str"),  # type: ignore[arg-type]
        (StepResult(done=False, messages=("again",)), r"messages\[0\] is a value of type str"),  # type: ignore[arg-type]
        (StepResult(done=False, messages=(Message("user", None),)), r"\[0\]\.content is None"),  # type: ignore[arg-type]
        (StepResult(done=False, messages=(Message(b"user", "x"),)), r"\[0\]\.role .* bytes"),  # type: ignore[arg-type]
        (StepResult(done=False, messages=(Message("user", "a\udfffb"),)), r"\[0\]\.content .* surrogate .* at 1"),
        (StepResult(done=False, messages=(Message("user", "x" * (2**20 + 1)),)), "1048577 characters"),
        (StepResult(done=False, messages=(Message("user", "x" * 2**19),) * 3), "1572864 characters in one turn"),
        (("messages", 1.0, True, {}), "step.. returned a value of type tuple"),
        (None, "step.. returned None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_results_are_refused_with_the_field(result: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        protocols.step_result(result)


def test_messages_of_an_ended_episode_are_never_shown_and_never_refused() -> None:
    assert protocols.step_result(StepResult(done=True, messages=None)).messages == ()  # type: ignore[arg-type]


def test_a_list_of_messages_will_do() -> None:
    assert protocols.messages([Message("user", "x")], "it") == (Message("user", "x"),)


def test_an_error_with_any_text_is_described() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert described(Silent()) == "Silent: ?"
    assert described(ValueError("a\ud800b")) == "ValueError: a?b"
    assert len(described(ValueError("x" * 10**6))) == 1000
