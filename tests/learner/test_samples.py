"""Members as flat streams: a hand-worked episode of two turns, masks of stale tokens, and records that lie."""

from __future__ import annotations

import numpy as np
import pytest

from jaxroll.errors import DataError
from jaxroll.learner import samples
from jaxroll.records import Failed, Finished, Member, Segment, Version, VersionRun


def segment(tokens, mask, logprobs):
    return Segment(np.array(tokens, np.int32), np.array(mask, np.uint8), np.array(logprobs, np.float32))


def member(segments, runs, finish="stop"):
    return Member(7, 2, 0, Finished(tuple(segments), finish, 1.0, {}, tuple(runs)))


TWO_TURNS = [
    segment([5, 6], [0, 0], [0, 0]),
    segment([7, 8, 2], [1, 1, 1], [-0.1, -0.2, -0.3]),
    segment([9], [0], [0]),
    segment([4, 2], [1, 1], [-0.4, -0.5]),
]
RUNS = [VersionRun(Version(0, 3), 2), VersionRun(Version(0, 4), 3)]


def test_two_turns_end_to_end():
    got = samples.of_member(member(TWO_TURNS, RUNS), trained_at=Version(0, 4))
    np.testing.assert_array_equal(got.tokens, [5, 6, 7, 8, 2, 9, 4, 2])
    np.testing.assert_array_equal(got.mask, [0, 0, 1, 1, 1, 0, 1, 1])
    np.testing.assert_allclose(got.behaviour, [0, 0, -0.1, -0.2, -0.3, 0, -0.4, -0.5])
    np.testing.assert_array_equal(got.ages, [0, 0, 1, 1, 0, 0, 0, 0])
    assert (got.sampled_tokens, got.trained_tokens, got.fresh, got.reward) == (5, 5, False, 1.0)


def test_fresh_means_wholly_of_the_trained_version():
    now = [VersionRun(Version(1, 4), 5)]
    assert samples.of_member(member(TWO_TURNS, now), trained_at=Version(1, 4)).fresh
    assert not samples.of_member(member(TWO_TURNS, now), trained_at=Version(1, 5)).fresh
    assert not samples.of_member(member(TWO_TURNS, now), trained_at=Version(2, 4)).fresh, "the weights of another life"


def test_stale_tokens_lose_their_mask_and_the_others_keep_their_age():
    masked = [TWO_TURNS[0], segment([7, 8, 2], [0, 0, 1], [-0.1, -0.2, -0.3]), *TWO_TURNS[2:]]
    got = samples.of_member(member(masked, RUNS), trained_at=Version(0, 4))
    np.testing.assert_array_equal(got.ages, [0, 0, 1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(got.mask, [0, 0, 0, 0, 1, 0, 1, 1])
    np.testing.assert_array_equal(got.behaviour[:4], np.zeros(4))
    assert (got.sampled_tokens, got.trained_tokens) == (5, 3)


@pytest.mark.parametrize(
    ("segments", "runs", "reason"),
    [
        ([], [], "no segments"),
        ([segment([2], [1], [-1])], [VersionRun(Version(0, 0), 1)], "starts with a sampled token"),
        ([segment([1, 2], [0, 1], [0, np.nan])], [VersionRun(Version(0, 0), 1)], "not finite"),
        ([segment([1, 2], [0], [0, 0])], [], "differ in length"),
        (TWO_TURNS, RUNS[:1], "versions cover 2 tokens"),
    ],
)
def test_a_record_that_contradicts_itself_is_named(segments, runs, reason):
    with pytest.raises(DataError, match=f"group 7, member 2.*{reason}"):
        samples.of_member(member(segments, runs), trained_at=Version(0, 0))


def test_a_failed_member_cannot_be_trained_on():
    with pytest.raises(DataError, match="scorer died"):
        samples.of_member(Member(7, 2, 0, Failed("DATA", "scorer died")), trained_at=Version(0, 0))


def test_supervised_trains_on_the_answer_alone():
    got = samples.supervised([([1, 5, 3], False), ([6, 2], True)])
    np.testing.assert_array_equal(got.mask, [0, 0, 0, 1, 1])
    assert got.advantage == 1.0
