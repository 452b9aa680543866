"""Records survive the wire unchanged, and nothing malformed becomes an array."""

import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll import wire
from jaxroll.records import Failed, Finished, Member, Segment, Version, VersionRun


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.integers(0, 9), st.floats(-1e6, 1e6))
def test_a_member_comes_back_equal(ids, group, reward):
    tokens = np.asarray(ids, np.int32)
    segment = Segment(tokens, np.ones(len(ids), np.uint8), np.linspace(-5, 0, len(ids)).astype(np.float32))
    outcome = Finished((segment,), "stop", reward, {"raw": 0.5}, (VersionRun(Version(1, 2), len(ids)),))
    back = wire.decode(wire.encode(Member(group, 3, 1, outcome)), Member)
    assert (back.group, back.member, back.attempt) == (group, 3, 1)
    assert isinstance(back.outcome, Finished)
    assert back.outcome.reward == reward and back.outcome.versions == outcome.versions
    for name in ("tokens", "loss_mask", "logprobs"):
        ours, theirs = getattr(segment, name), getattr(back.outcome.segments[0], name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


def test_a_failed_member_has_no_reward_to_train_on():
    back = wire.decode(wire.encode(Member(0, 0, 0, Failed("DATA", "boom"))), Member)
    assert isinstance(back.outcome, Failed) and not hasattr(back.outcome, "reward")


@pytest.mark.parametrize(
    "array",
    [
        ["int32", [3], b"\0" * 8],  # too few bytes
        ["int32", [-1], b""],
        ["object", [1], b"\0" * 8],
        ["int32", [2**40, 2**40], b""],  # refused before anything that large is made
        ["int32", [1]],
        "int32",
    ],
)
def test_a_malformed_array_is_refused(array):
    data = msgspec.msgpack.encode({"tokens": array, "loss_mask": array, "logprobs": array})
    with pytest.raises(msgspec.ValidationError):
        wire.decode(data, Segment)


def test_big_endian_arrays_travel_as_little_endian():
    value = np.arange(3, dtype=">i4")
    back = wire.decode(wire.encode(Segment(value, value.astype(np.uint8), value.astype(np.float32))), Segment)
    assert back.tokens.tolist() == [0, 1, 2]


def test_objects_without_a_schema_do_not_travel():
    with pytest.raises(NotImplementedError, match="object"):
        wire.encode(object())
    with pytest.raises(NotImplementedError, match="complex64"):
        wire.encode(np.zeros(1, np.complex64))


def test_a_digest_tells_data_apart_and_those_of_older_logs_are_known_still() -> None:
    data, other = b"one", b"two"
    assert wire.digest(data) == wire.digest(bytes(data)) != wire.digest(other) and len(wire.digest(data)) == 40
    older = hashlib.blake2b(data, digest_size=16).hexdigest()
    for said in (wire.digest(data), older):
        assert wire.is_digest(said, data) and not wire.is_digest(said, other)
    assert not any(wire.is_digest(said, data) for said in ("", older[:-1], wire.digest(data)[:-1], "0" * 40, "0" * 32))
