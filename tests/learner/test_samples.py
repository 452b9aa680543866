"""Members as flat streams: a hand-worked episode of two turns, masks of stale tokens, and records that lie."""

from __future__ import annotations

import numpy as np
import pytest

from jaxroll import wire
from jaxroll.errors import DataError
from jaxroll.learner import minibatch
from jaxroll.records import UNMARKED, Failed, Finished, Member, Segment, Version, VersionRun
from jaxroll.store.server import puts
from jaxroll.tools import sft


def segment(tokens, mask, logprobs, sampled=UNMARKED):
    marks = (np.array(tokens, np.int32), np.array(mask, np.uint8), np.array(logprobs, np.float32))
    return Segment(*marks, np.asarray(sampled, np.uint8))


def as_claimed(one, trained_at, max_age):
    """`one` as a learner gets it from a store that masks stale tokens."""
    return wire.decode(puts.masked(wire.encode(one), trained_at.step, max_age), Member)


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
    got = minibatch.of_member(member(TWO_TURNS, RUNS), trained_at=Version(0, 4))
    np.testing.assert_array_equal(got.tokens, [5, 6, 7, 8, 2, 9, 4, 2])
    np.testing.assert_array_equal(got.mask, [0, 0, 1, 1, 1, 0, 1, 1])
    np.testing.assert_allclose(got.behaviour, [0, 0, -0.1, -0.2, -0.3, 0, -0.4, -0.5])
    np.testing.assert_array_equal(got.ages, [0, 0, 1, 1, 0, 0, 0, 0])
    assert (got.sampled_tokens, got.trained_tokens, got.fresh, got.reward) == (5, 5, False, 1.0)


def test_fresh_means_wholly_of_the_trained_version():
    now = [VersionRun(Version(1, 4), 5)]
    assert minibatch.of_member(member(TWO_TURNS, now), trained_at=Version(1, 4)).fresh
    assert not minibatch.of_member(member(TWO_TURNS, now), trained_at=Version(1, 5)).fresh
    assert not minibatch.of_member(member(TWO_TURNS, now), trained_at=Version(2, 4)).fresh, (
        "the weights of another lineage"
    )


def test_stale_tokens_lose_their_mask_and_the_others_keep_their_age():
    now = Version(0, 4)
    got = minibatch.of_member(as_claimed(member(TWO_TURNS, RUNS), now, max_age=0), trained_at=now)
    np.testing.assert_array_equal(got.ages, [0, 0, 1, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(got.mask, [0, 0, 0, 0, 1, 0, 1, 1])
    np.testing.assert_array_equal(got.behaviour[:4], np.zeros(4))
    assert (got.sampled_tokens, got.trained_tokens) == (5, 3)


def test_a_stale_answer_whose_log_probs_are_zero_is_not_taken_for_prompt_text():
    """A token that is certain has log-prob 0, as text that was shown has: only the marks tell them apart."""
    certain = segment([7, 8, 2], [1, 1, 1], [0, 0, 0])
    now, runs = Version(0, 4), [VersionRun(Version(0, 2), 3), VersionRun(Version(0, 4), 2)]
    got = minibatch.of_member(as_claimed(member([TWO_TURNS[0], certain, *TWO_TURNS[2:]], runs), now, max_age=1), now)
    np.testing.assert_array_equal(got.mask, [0, 0, 0, 0, 0, 0, 1, 1])
    np.testing.assert_array_equal(got.ages, [0, 0, 2, 2, 2, 0, 0, 0])
    assert (got.sampled_tokens, got.trained_tokens) == (5, 2)
    assert [(turn.start, turn.stop) for turn in got.turns] == [(2, 5), (6, 8)]


def test_marks_tell_shown_tokens_from_stale_ones_inside_one_segment():
    mixed = [segment([5, 6], [0, 0], [0, 0]), segment([7, 8, 2, 4], [1, 0, 1, 1], [-0.1, 0, 0, -0.2])]
    runs, now = [VersionRun(Version(0, 0), 2), VersionRun(Version(0, 3), 1)], Version(0, 3)
    got = minibatch.of_member(as_claimed(member(mixed, runs), now, max_age=1), now)
    np.testing.assert_array_equal(got.mask, [0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(got.ages, [0, 0, 3, 0, 3, 0])


@pytest.mark.parametrize("seed", range(20))
def test_ages_and_masks_follow_the_versions_for_any_log_probs(seed):
    rng = np.random.default_rng(seed)
    segments = [segment(rng.integers(1, 9, 3), [0] * 3, [0] * 3)]
    for _ in range(int(rng.integers(1, 6))):
        count = int(rng.integers(1, 5))
        drawn = rng.random(count) < 0.6
        segments.append(segment(rng.integers(1, 9, count), drawn, np.where(drawn, rng.choice([0.0, -1.0], count), 0)))
    drawn = np.concatenate([one.loss_mask for one in segments]).astype(bool)
    steps, now = np.sort(rng.integers(0, 6, drawn.sum())), Version(0, 6)
    if not drawn.any():
        return
    one = member(segments, [VersionRun(Version(0, int(step)), 1) for step in steps])
    got = minibatch.of_member(as_claimed(one, now, max_age=2), now)
    np.testing.assert_array_equal(got.ages[drawn], 6 - steps)
    np.testing.assert_array_equal(got.mask[drawn], 6 - steps <= 2)
    assert not got.mask[~drawn].any() and not got.ages[~drawn].any()


@pytest.mark.parametrize(
    ("segments", "runs", "reason"),
    [
        ([], [], "no segments"),
        ([segment([2], [1], [-1])], [VersionRun(Version(0, 0), 1)], "starts with a sampled token"),
        ([segment([1, 2], [0, 1], [0, np.nan])], [VersionRun(Version(0, 0), 1)], "not finite"),
        ([segment([1, 2], [0], [0, 0])], [], "differ in length"),
        ([segment([1, 2], [0, 1], [0, 0], [1])], [VersionRun(Version(0, 0), 1)], "differ in length"),
        (TWO_TURNS, RUNS[:1], "versions cover 2 tokens"),
    ],
)
def test_a_record_that_contradicts_itself_is_named(segments, runs, reason):
    with pytest.raises(DataError, match=f"group 7, member 2.*{reason}"):
        minibatch.of_member(member(segments, runs), trained_at=Version(0, 0))


def test_a_failed_member_cannot_be_trained_on():
    with pytest.raises(DataError, match="scorer died"):
        minibatch.of_member(Member(7, 2, 0, Failed("DATA", "scorer died")), trained_at=Version(0, 0))


def test_supervised_trains_on_the_answer_alone():
    got = sft.supervised([([1, 5, 3], False), ([6, 2], True)])
    np.testing.assert_array_equal(got.mask, [0, 0, 0, 1, 1])
    assert got.advantage == 1.0
