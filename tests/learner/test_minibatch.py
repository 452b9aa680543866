"""From claims to weighted samples: advantages, denominators, minibatches, and the control with shuffled rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from jaxroll.algorithms import registry
from jaxroll.config import LearnerConfig
from jaxroll.errors import DataError
from jaxroll.learner import minibatch, packing
from jaxroll.learner.minibatch import of_claim
from jaxroll.records import Claim, ClaimedGroup, Finished, Member, Task, Version, VersionRun
from tests.harness.learner_segments import answer, prompt

GRPO = registry.build(LearnerConfig())


def rewards_and_advantages(claim: Claim, config) -> list[tuple[float, float]]:
    return [(s.reward, s.advantage) for part in minibatch.prepare(claim, config).minibatches for s in part]


def test_advantages_are_centred_in_each_group(small_config, make_claim):
    claim = make_claim(groups=3)
    (part,) = minibatch.prepare(claim, small_config()).minibatches
    for first in range(0, len(part), 4):
        group = part[first : first + 4]
        rewards = np.array([s.reward for s in group])
        want = np.zeros(4) if rewards.std() == 0 else (rewards - rewards.mean()) / rewards.std(ddof=1)
        np.testing.assert_allclose([s.advantage for s in group], want, rtol=1e-5, atol=1e-6)


def test_more_groups_than_a_step_and_groups_that_shrank(small_config, make_claim):
    """A claim may hold more groups than groups_per_step, and groups with fewer members."""
    whole = make_claim(groups=9)
    groups = (replace_members(whole.groups[0], 1), replace_members(whole.groups[1], 3), *whole.groups[2:])
    claim = Claim(1, 0, groups, 1, False)
    prepared = minibatch.prepare(claim, small_config())
    assert [len(group) for group in prepared.groups] == [1, 3, 4, 4, 4, 4, 4, 4, 4]
    only = prepared.groups[0][0]  # the only member of its group: nothing to compare it with
    assert not any(np.array_equal(only.tokens, s.tokens) for s in prepared.minibatches[0])
    alone = minibatch.prepare(Claim(1, 0, groups[:2], 1, False), small_config()).minibatches[0]
    assert [s.advantage for s in alone] == [s.advantage for s in prepared.minibatches[0][: len(alone)]]
    assert len(alone) > 0


def replace_members(group, count):
    return type(group)(group.group, group.task, group.members[:count])


def test_a_group_larger_than_the_config_says_is_refused(small_config, make_claim):
    with pytest.raises(DataError, match=r"has 5 members, schedule\.group_size is 4"):
        minibatch.prepare(make_claim(size=5), small_config())


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_weights_are_counted_over_the_whole_step(small_config, make_claim, aggregation):
    (part,) = minibatch.prepare(make_claim(), small_config(aggregation=aggregation)).minibatches
    total = sum(s.weight * s.trained_tokens for s in part)
    mean_length = sum(s.trained_tokens for s in part) / len(part)
    np.testing.assert_allclose(total, mean_length if aggregation.endswith("sum") else 1.0, rtol=1e-5)


def test_minibatches_hold_every_group_once_and_whole(small_config, make_claim):
    claim = make_claim(groups=4)
    parts = minibatch.prepare(claim, small_config(minibatches=3)).minibatches
    assert [len(part) for part in parts] == [8, 4, 4]
    tokens = sorted(tuple(s.tokens) for part in parts for s in part)
    whole = minibatch.prepare(claim, small_config()).minibatches[0]
    assert tokens == sorted(tuple(s.tokens) for s in whole)
    for part in parts:
        np.testing.assert_allclose(sum(s.weight * s.trained_tokens for s in part), 1.0, rtol=1e-5)


def test_shuffled_rewards_stay_in_their_group_and_are_a_function_of_the_claim(small_config, make_claim):
    claim = make_claim(groups=4)
    plain, control = small_config(advantage="group_mean"), small_config(advantage="group_mean", shuffle_rewards=True)
    straight, mixed = rewards_and_advantages(claim, plain), rewards_and_advantages(claim, control)
    assert [r for r, _ in straight] == [r for r, _ in mixed]  # the reward that is reported is the one that was earned
    assert [a for _, a in straight] != [a for _, a in mixed]
    for first in range(0, 16, 4):
        assert sorted(a for _, a in straight[first : first + 4]) == sorted(a for _, a in mixed[first : first + 4])
    assert rewards_and_advantages(claim, control) == mixed
    other = Claim(claim.step, 0, claim.groups, claim.shuffle_seed + 1, False)
    assert rewards_and_advantages(other, control) != mixed


def test_every_group_is_shuffled_its_own_way(small_config, make_claim):
    claim = make_claim(groups=4)
    (sample, *_), *_ = minibatch.prepare(claim, small_config()).groups
    ranked = [[sample.with_reward(float(rank)) for rank in range(16)] for _ in range(4)]
    ranks = minibatch.shuffled(ranked, claim, seed=0)
    assert len({tuple(one.reward for one in group) for group in ranks}) == 4


def test_shuffling_breaks_the_link_between_reward_and_advantage(small_config, make_claim):
    """Over many claims the correlation vanishes; unshuffled it is strong."""
    config = small_config(advantage="group_mean", shuffle_rewards=True)
    pairs = [pair for step in range(150) for pair in rewards_and_advantages(make_claim(step=step), config)]
    assert abs(np.corrcoef(np.array(pairs).T)[0, 1]) < 0.06
    straight = [pair for step in range(10) for pair in rewards_and_advantages(make_claim(step=step), small_config())]
    assert np.corrcoef(np.array(straight).T)[0, 1] > 0.7


def test_members_without_trained_tokens_carry_nothing(small_config, make_claim):
    claim = make_claim(groups=1)
    samples = [replace(sample, advantage=1.0) for sample in minibatch.prepare(claim, small_config()).groups[0]]
    masked = replace(samples[0], mask=np.zeros(len(samples[0].tokens), bool))
    kept = minibatch.weighted([masked, *samples[1:]], "seq_mean_token_mean", GRPO)
    assert len(kept) == 3
    np.testing.assert_allclose(sum(s.weight * s.trained_tokens for s in kept), 1.0, rtol=1e-5)


def test_members_without_advantage_count_in_the_denominator_only(small_config, make_claim):
    samples = [
        replace(sample, advantage=1.0) for sample in minibatch.prepare(make_claim(groups=1), small_config()).groups[0]
    ]
    all_of_them = minibatch.weighted(samples, "token_mean", GRPO)
    without = minibatch.weighted([replace(samples[0], advantage=0.0), *samples[1:]], "token_mean", GRPO)
    assert [s.weight for s in without] == [s.weight for s in all_of_them[1:]]


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"])
@pytest.mark.parametrize("algorithm", ["raft", "raft_pp"])
def test_a_kl_in_the_loss_reaches_members_without_credit(small_config, make_claim, algorithm, aggregation):
    """They pay it by its own denominators, over everyone; what the others earn keeps those over the credited."""
    claim, learner = make_claim(), {"algorithm": algorithm, "aggregation": aggregation}
    (alone,) = minibatch.prepare(claim, small_config(**learner)).minibatches
    (held,) = minibatch.prepare(claim, small_config(kl_coef=0.5, reference="init", **learner)).minibatches
    everyone = [replace(sample, advantage=1.0) for group in of_claim(claim) for sample in group]
    wanted = minibatch.weighted(everyone, aggregation, GRPO, small_config().sampling.max_tokens)
    assert 0 < len(alone) < len(held) == 16
    np.testing.assert_allclose([s.weight for s in held], [s.weight for s in wanted], rtol=1e-6)
    credited = [s for s in held if s.credited]
    assert [s.tokens.tobytes() for s in credited] == [s.tokens.tobytes() for s in alone]
    np.testing.assert_allclose([s.weight * s.advantage for s in credited], [s.weight * s.advantage for s in alone])


def test_a_critic_trains_on_members_without_an_advantage(small_config, make_claim):
    learner = {"algorithm": "raft_pp", "advantage": "gae", "critic": "init", "raw_advantages": True}
    numbers = lambda samples: [np.zeros(len(s.tokens), np.float32) for s in samples]  # noqa: E731
    (part,) = minibatch.prepare(make_claim(), small_config(**learner), values=numbers).minibatches
    assert len(part) == 16 and 0 < sum(sample.credited for sample in part) < 16
    np.testing.assert_allclose(sum(s.weight * s.trained_tokens for s in part), 1.0, rtol=1e-5)


def test_a_loss_of_ones_own_over_the_credited_stays_among_them(small_config, make_claim):
    """A loss that is not a multiple of the advantage: scaling advantages could not correct its denominators."""
    own = replace(GRPO, credited_only=True, multiple_of_advantage=False, penalised=True)
    samples = [replace(s, advantage=float(k % 2)) for k, s in enumerate(of_claim(make_claim(groups=1))[0])]
    kept = minibatch.weighted(samples, "token_mean", own)
    assert len(kept) == 2 and all(sample.advantage == 1.0 for sample in kept)


def two_turns(config, rewards, shown):
    """A claim of one group of two-turn episodes: what each turn earned, and what was shown before the second."""
    members = []
    for member, (earned, words) in enumerate(zip(rewards, shown, strict=True)):
        said = [answer(np.array([5, 6 + member]), np.array([-1.0, -1.0])) for _ in range(2)]
        segments = (prompt(np.array([4, 4])), said[0], prompt(np.array(words)), said[1])
        parts = {f"turn.{k}": reward for k, reward in enumerate(earned)}
        outcome = Finished(segments, "done", sum(earned), parts, (VersionRun(Version(0, 0), 4),))
        members.append(Member(0, member, 0, outcome))
    claim = Claim(0, 0, (ClaimedGroup(0, Task(0, (), "none", "{}", 0, "0"), tuple(members)),), 0, False)
    (samples,) = minibatch.prepare(claim, config).minibatches
    return samples


def test_step_advantages_reach_the_tokens_of_their_turns(small_config):
    """GiGPO by hand: rewards 1 and 0, standardized ±1/√2; returns of the first turn 0.5 and 0, of the second 1 and 0.

    The first turns share a state; the second turns share one if the same tokens were shown before them.
    """
    config = small_config(algorithm="gigpo", turn_discount=0.5, step_weight=2.0)
    half = 2**-0.5
    for shown, second in (([[7], [8]], 0.0), ([[7], [7]], 2 * half)):
        good, bad = two_turns(config, [(0.0, 1.0), (0.0, 0.0)], shown)
        for sample, sign in ((good, 1), (bad, -1)):
            wanted = np.array([0, 0, *[sign * 3 * half] * 2, 0, *[sign * (half + second)] * 2])
            np.testing.assert_allclose(np.where(sample.mask, sample.advantage, 0), wanted, atol=1e-4)
            assert sample.mask.tolist() == [False, False, True, True, False, True, True]
        (batch,) = packing.pack([good, bad], 32, (1,))
        rows = packing.gathered([batch], [batch.streams["advantage"]], 2)
        for sample, row in zip((good, bad), rows, strict=True):
            np.testing.assert_array_equal(row, np.asarray(sample.advantage, np.float32))


def branching(group, *, conversations: int, reward: float, member: int) -> Member:
    """A member that asks one question in several conversations."""
    segments = []
    for number in range(conversations):
        said = answer(np.array([8, 9, 10 + number]), np.full(3, -1.0))
        segments += [replace_struct(prompt(np.array([5, 6, 7])), branch=number > 0), said]
    runs = (VersionRun(Version(0, 1), 3 * conversations),)
    return Member(group, member, 0, Finished(tuple(segments), "done", reward, {}, runs))


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_conversations_of_a_member_share_its_advantage_and_its_weight(small_config, make_claim, aggregation):
    whole = make_claim(groups=1).groups[0]
    counts, rewards = (1, 3, 2, 1), (1.0, 1.0, 0.0, 0.0)
    members = tuple(
        branching(whole.group, conversations=n, reward=r, member=k)
        for k, (n, r) in enumerate(zip(counts, rewards, strict=True))
    )
    claim = Claim(1, 0, (ClaimedGroup(whole.group, whole.task, members),), 1, False)
    costs = lambda samples: [np.zeros(len(s.tokens)) for s in samples if len(s.tokens) == 6]  # noqa: E731
    prepared = minibatch.prepare(claim, small_config(aggregation=aggregation), costs=costs)
    (part,) = prepared.minibatches
    assert [len(s.tokens) for s in prepared.groups[0]] == [6, 18, 12, 6]
    assert [s.tokens.tolist() for s in part] == [[5, 6, 7, 8, 9, 10 + k] for n in counts for k in range(n)]
    owners = np.repeat(np.arange(4), counts)
    np.testing.assert_allclose([s.advantage for s in part], np.array([1, 1, -1, -1])[owners] * part[0].advantage)
    per_member = np.bincount(owners, [s.weight * s.trained_tokens for s in part])
    want = np.array(counts) if aggregation == "token_mean" else np.ones(4)
    if aggregation != "seq_mean_token_sum":
        np.testing.assert_allclose(per_member, want / want.sum(), rtol=1e-6)
    assert all((turn.start, turn.stop) == (3, 6) for s in part for turn in s.turns)
