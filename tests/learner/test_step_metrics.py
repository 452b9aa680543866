"""Step metrics of every age, against numpy over the tokens one by one."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from jaxroll.config.parsing import SOURCE_ITEMS
from jaxroll.learner import minibatch, step_metrics
from jaxroll.records import Claim, ClaimedGroup, Finished, Member, Segment, Task, Version, VersionRun
from tests.harness.learner_padded import Padded

AGES = (0, 1, 2, 4)  # with α = 1.5 the buckets are 0, 1 and what is older
CAP = 1.5
FIGURES = ("logprob_delta", "kl_behaviour", "ratio_max", "clip_share", "ess")


class Figures(NamedTuple):
    """Per trained token: the keys by which tokens are grouped, and the values that are counted."""

    age: np.ndarray
    reward: np.ndarray
    computed: np.ndarray  # bool: its group has a preference
    behaviour: np.ndarray
    policy: np.ndarray

    def of(self, which: np.ndarray) -> dict[str, float]:
        """The figures of some of the tokens, as they are defined."""
        b, theta = self.behaviour[which & self.computed], self.policy[which & self.computed]
        rho = [np.exp(t) / np.exp(s) for s, t in zip(b, theta, strict=True)]
        return {
            "tokens": len(rho),
            "tokens_trained": int(which.sum()),
            "reward": np.mean(self.reward[which]),
            "logprob_delta": np.mean([abs(t - s) for s, t in zip(b, theta, strict=True)]),
            "kl_behaviour": np.mean([r - 1 - np.log(r) for r in rho]),
            "ratio_max": max(rho),
            "clip_share": np.mean([r > CAP for r in rho]),
            "ess": sum(rho) ** 2 / len(rho) / sum(r**2 for r in rho),
        }


def mixed_claim(trainer, claim: Claim) -> tuple[Claim, Figures]:
    """`claim` with answers that were begun at one age and ended at another, drawn by policies the further off the
    older, and with equal rewards in its last group."""
    chance = np.random.default_rng(0)
    samples = [sample for group in minibatch.prepare(claim, trainer.config).groups for sample in group]
    padded = Padded(trainer.spec, samples)
    policy = iter(np.asarray(padded.logprobs(trainer.state.params), np.float64)[padded.mask])
    tokens: list[tuple[float, ...]] = []
    groups = []
    for number, group in enumerate(claim.groups):
        equal = number == len(claim.groups) - 1
        rewards = [1.0] * 4 if equal else [0.0, *chance.integers(0, 2, 2).astype(float), 1.0]
        members = []
        for member, reward in zip(group.members, rewards, strict=True):
            question, answer = member.outcome.segments
            n = len(answer.tokens)
            ages = np.sort(chance.choice(AGES, n))[::-1]
            own = np.array([next(policy) for _ in range(n)])
            behaviour = (own + 0.4 * (1 + ages) * chance.normal(size=n)).astype(np.float32)
            runs = tuple(VersionRun(Version(0, claim.step - int(age)), 1) for age in ages)
            outcome = msgspec.structs.replace(
                member.outcome,
                reward=reward,
                versions=runs,
                segments=(question, msgspec.structs.replace(answer, logprobs=behaviour)),
            )
            members.append(msgspec.structs.replace(member, outcome=outcome))
            tokens += [(a, reward, not equal, b, o) for a, b, o in zip(ages, behaviour, own, strict=True)]
        groups.append(msgspec.structs.replace(group, members=tuple(members)))
    age, reward, computed, behaviour, own = (np.array(column) for column in zip(*tokens, strict=True))
    figures = Figures(age, reward, computed.astype(bool), behaviour, own)
    return msgspec.structs.replace(claim, groups=tuple(groups)), figures


@pytest.mark.parametrize("minibatches", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_every_figure_of_every_age(small_config, make_claim, make_trainer, minibatches):
    """Also with minibatches: they compare with the policy of the claim's start, not with the one of their own start."""
    config = small_config(
        alpha=1.5, correction_cap=CAP, minibatches=minibatches, micro_batch_rows=1, learning_rate=1e-5
    )
    trainer = make_trainer(config)
    claim, figures = mixed_claim(trainer, make_claim(step=9))
    row = trainer.train(claim)
    assert row["micro_batches"] > minibatches, "sums and maxima span micro-batches"
    assert row["by_age"].keys() == {"0", "1", "2"}
    for age, got in row["by_age"].items():
        want = figures.of(np.minimum(figures.age, 2) == int(age))
        assert len({round(want[name], 4) for name in FIGURES}) == len(FIGURES) and 0 < want["clip_share"] < 1
        assert got == pytest.approx(want, rel=1e-4), age
    want = figures.of(figures.age >= 0)
    assert {name: row[name] for name in FIGURES} == pytest.approx({name: want[name] for name in FIGURES}, rel=1e-4)
    assert row["reward_mean"] != pytest.approx(want["reward"], rel=1e-3), "by_age means over tokens"


def test_an_age_that_nothing_is_computed_of_has_its_reward_alone(small_config, make_claim, make_trainer):
    trainer = make_trainer(small_config(alpha=1.5, correction_cap=CAP, learning_rate=1e-5))
    claim, figures = mixed_claim(trainer, make_claim(step=9, groups=1))
    row = trainer.train(claim)
    assert set(figures.reward) == {1.0} and row["by_age"] == {
        str(age): {"tokens": 0, "tokens_trained": int((np.minimum(figures.age, 2) == age).sum()), "reward": 1.0}
        for age in sorted(set(np.minimum(figures.age, 2)))
    }


def test_samples_are_counted_by_the_source_of_their_prompt() -> None:
    def group(source: int, *members: tuple[float, int]) -> ClaimedGroup:
        """Members of (reward, sampled tokens)."""
        task = Task(source * SOURCE_ITEMS + 3, (), "single_turn", "{}", 0, "h")
        shown = Segment(np.ones(2, np.int32), np.zeros(2, np.uint8), np.zeros(2, np.float32))
        finished = [
            Finished(
                (shown, Segment(np.ones(n, np.int32), np.ones(n, np.uint8), np.zeros(n, np.float32))),
                "stop", reward, {}, (VersionRun(Version(0, 0), n),),
            )
            for reward, n in members
        ]  # fmt: skip
        return ClaimedGroup(0, task, tuple(Member(0, i, 0, outcome) for i, outcome in enumerate(finished)))

    groups = (group(1, (1.0, 4), (0.0, 2)), group(0, (0.5, 1)), group(1, (1.0, 3)))
    claim = Claim(0, 0, groups, 0, replayed=False)
    assert step_metrics.by_source(minibatch.of_claim(claim), claim, ("a", "b", "c")) == {
        "a": {"samples": 1, "reward": 0.5, "tokens": 1.0},
        "b": {"samples": 3, "reward": pytest.approx(2 / 3), "tokens": 3.0},
    }
