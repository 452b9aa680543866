"""Gradients of groups that are finished before their batch is complete (`learner.streaming`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll.config import Config, MeshConfig
from jaxroll.errors import ConfigError
from jaxroll.learner import packing
from jaxroll.learner.trainer import Trainer, TrainingPrograms
from jaxroll.records import Claim
from tests.learner.test_packing import sample
from tests.learner.test_trainer import same_bits

GROUPS = 8
Arrivals = Sequence[Sequence[int]]  # places of the groups that arrive together


def part_of(claim: Claim, places: Sequence[int]) -> Claim:
    return msgspec.structs.replace(claim, groups=tuple(claim.groups[place] for place in places), whole=False)


@pytest.fixture
def stepped(
    make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[dict[str, Any], dict[str, np.ndarray], Trainer]]:
    """The row, the gradients before the update and the trainer after a step on a claim, of which parts come first."""
    summed, applied = [], TrainingPrograms.apply

    def noting(self: Any, state: Any, accumulator: Any) -> Any:
        summed.append(jax.device_get(accumulator.grads))
        return applied(self, state, accumulator)

    monkeypatch.setattr(TrainingPrograms, "apply", noting)

    def step(config: Config, claim: Claim, arrivals: Arrivals = (), trainer: Trainer | None = None) -> Any:
        trainer = trainer or make_trainer(config)
        for places in arrivals:
            trainer.stream(part_of(claim, places))
        return trainer.train(claim), summed[-1], trainer

    return step


def assert_same(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    for name, grad in two.items():
        np.testing.assert_allclose(one[name], grad, atol=2e-5 * np.abs(grad).max(), rtol=1e-3, err_msg=name)


def orders(count: int) -> Iterator[Arrivals]:
    """Random orders of arrival, of all groups or of some, one or several at a time; the first has all, one by one."""
    yield [[place] for place in reversed(range(GROUPS))]
    for seed in range(count):
        drawn = random.Random(seed)
        places = drawn.sample(range(GROUPS), drawn.randint(1, GROUPS))
        cuts = sorted(drawn.sample(range(len(places) + 1), min(len(places), drawn.randint(0, 4))))
        yield [places[a:b] for a, b in zip([0, *cuts], [*cuts, len(places)], strict=True)]


SMALL: dict[str, Any] = {"micro_batch_rows": 1, "row_tokens": 48}  # some 20 tokens a group are computed
LEARNERS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "means of sequences": {"aggregation": "seq_mean_token_mean"},
    "constant length": {"algorithm": "dr_grpo"},
    "credited members only": {"algorithm": "raft_pp"},
    "pairs and a reference": {"algorithm": "dpo", "reference": "init"},
    "KL in the loss": {"reference": "init", "kl_coef": 0.1},
    "shared prompts": {"shared_prompt_tokens": 16},
    "adapters": {"lora_rank": 2},
    "shards": {"mesh": MeshConfig(fsdp=2, tensor=2), "micro_batch_rows": 2},
    "rows of several sizes": {"micro_batch_rows": 4},
    "control": {"shuffle_rewards": True},
}


@pytest.mark.parametrize("learner", LEARNERS.values(), ids=LEARNERS)
def test_gradients_do_not_depend_on_the_order_of_arrival(
    small_config: Any, make_claim: Any, stepped: Any, learner: dict[str, Any]
) -> None:
    claim = make_claim(groups=GROUPS, age=1)
    equal = claim.groups[0].members  # a group without advantages
    equal = tuple(msgspec.structs.replace(m, outcome=msgspec.structs.replace(m.outcome, reward=1.0)) for m in equal)
    first = msgspec.structs.replace(claim.groups[0], members=equal)
    claim = msgspec.structs.replace(claim, groups=(first, *claim.groups[1:]))
    small = SMALL | learner
    row, wanted, _ = stepped(small_config(**small), claim)
    assert row["micro_batches_early"] == 0
    early = []
    for arrivals in orders(4):
        found, grads, _ = stepped(small_config(**small, streaming=True), claim, arrivals)
        assert_same(grads, wanted)
        assert found["micro_batches"] <= row["micro_batches"] + 1, "as full as those of the whole batch"
        early.append(found["micro_batches_early"])
        for name in ("loss", "grad_norm", "entropy", "kl_behaviour"):
            assert found[name] == pytest.approx(row[name], rel=1e-3, abs=1e-6), name
        for name in ("tokens_trained", "tokens_computed", "reward_mean", "samples"):
            assert found[name] == row[name], name
    assert max(early) > 0, "some were computed before the claim"


def test_a_group_that_the_claim_lacks_leaves_no_trace(
    small_config: Any, make_claim: Any, make_trainer: Any, stepped: Any
) -> None:
    config, claim = small_config(streaming=True, **SMALL), make_claim(groups=GROUPS)
    kept = part_of(claim, range(1, GROUPS))
    _, wanted, fresh = stepped(config, kept)
    row, found, trainer = stepped(config, kept, [range(GROUPS - 1)])
    assert row["micro_batches_early"] > 4, "the control: others were computed"
    trainer = make_trainer(config)
    trainer.stream(claim)
    row, found, _ = stepped(config, kept, trainer=trainer)
    assert row["micro_batches_early"] == 0 and all(np.array_equal(found[name], grad) for name, grad in wanted.items())
    assert same_bits(jax.device_get(trainer.state), jax.device_get(fresh.state))


def test_groups_of_the_next_claim_are_computed_with_the_parameters_after_this_one(
    small_config: Any, make_claim: Any, make_trainer: Any
) -> None:
    config = small_config(streaming=True, **SMALL)
    first, second = (make_claim(step, groups=GROUPS, age=step) for step in (1, 2))
    states = []
    for ahead in (False, True):
        trainer = make_trainer(config)
        running = trainer.dispatch_step(trainer.prepare(first))
        if not ahead:
            trainer.await_step(running)
        trainer.stream(second)
        if ahead:
            trainer.await_step(running)
        row = trainer.train(second)
        assert row["micro_batches_early"] > 4
        states.append(jax.device_get(trainer.state))
    assert same_bits(*states)


def test_new_parameters_drop_what_was_streamed(
    small_config: Any, make_claim: Any, make_trainer: Any, stepped: Any
) -> None:
    config, claim = small_config(streaming=True, **SMALL), make_claim(groups=GROUPS)
    other = {name: 0.9 * np.asarray(value) for name, value in make_trainer(config).state.params.items()}
    fresh, trainer = make_trainer(config), make_trainer(config)
    fresh.set_params(other)
    _, wanted, _ = stepped(config, claim, trainer=fresh)
    trainer.stream(part_of(claim, range(6)))
    trainer.set_params(other)
    row, found, _ = stepped(config, claim, trainer=trainer)
    assert row["micro_batches_early"] == 0 and all(np.array_equal(found[name], grad) for name, grad in wanted.items())


def test_nothing_is_compiled_after_the_start(small_config: Any, make_claim: Any, make_trainer: Any) -> None:
    trainer = make_trainer(small_config(streaming=True, **SMALL), alone=True)
    trainer.warmup()
    claim = make_claim(groups=GROUPS)
    for places in (range(3), range(3, 6)):
        trainer.stream(part_of(claim, places))
    row = trainer.train(claim)
    assert row["compiles"] == 0 and row["micro_batches_early"] > 0


REFUSED = {
    "learner.algorithm=tests.harness.algorithms:mine": "of your own",
    "learner.advantage=batch_std": "compares the groups",
    "learner.algorithm=ppo learner.critic=init": "critic",
    "learner.reference=init learner.kl_coef=0.1 learner.kl_in=reward": "KL in the reward",
    "learner.algorithm=raft_pp learner.reference=init learner.kl_coef=0.1": "weight of the KL",
    "learner.router_loss=0.001": "routers",
    "learner.minibatches=2": "minibatch",
    "schedule.order=freshest_first": "left out",
    "schedule.mode=interval": "order of arrival",
    "schedule.mode=async_controller": "before the weights",
    "placement.colocated=true": "devices",
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.items(), ids=REFUSED)
def test_what_needs_the_whole_batch_is_refused(changes: str, words: str) -> None:
    given = configs.override(configs.to_dict(Config()), changes.split())
    configs.parse(given)  # the control
    with pytest.raises(ConfigError, match=words) as refused:
        configs.parse(configs.override(given, ["learner.streaming=true"]))
    assert refused.value.key == "learner.streaming"


@pytest.mark.parametrize(("rows", "shards"), [(1, 1), (2, 2), (4, 4), (8, 1), (8, 4), (8, 8)])
def test_streamed_micro_batches_are_as_full_as_those_of_a_whole_batch(rows: int, shards: int) -> None:
    """96 groups of eight answers arrive one by one."""
    drawn, capacity = np.random.default_rng(rows + 100 * shards), 512
    lengths = [int(tokens) for tokens in np.clip(drawn.lognormal(4.3, 0.6, 96 * 8), 8, capacity)]
    samples = [sample(tokens, number) for number, tokens in enumerate(lengths)]
    buckets = packing.row_buckets(rows, shards)
    pack = partial(packing.pack, row_tokens=capacity, buckets=buckets, shards=shards)
    waiting, early = list[Any](), 0
    for first in range(0, len(samples), 8):
        waiting += samples[first : first + 8]
        full = packing.full_batches(pack(waiting, by_rows=True), buckets[0])
        computed = {place.sample for batch in full for place in batch.placements}
        assert sum(len(batch.placements) for batch in full) == len(computed)
        waiting, early = [one for place, one in enumerate(waiting) if place not in computed], early + len(full)
    whole = len(pack(samples))
    assert early >= 0.8 * whole - 2 and early + len(pack(waiting)) <= 1.1 * whole + 1
