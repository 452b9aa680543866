"""Whole training steps: determinism, no recompilation, minibatches, metrics, and claims that are nearly empty."""

from __future__ import annotations

import inspect
import itertools
import re
import threading
import weakref
from dataclasses import fields, replace

import jax
import msgspec
import numpy as np
import pytest

from jaxroll.algorithms import advantages, losses, registry
from jaxroll.config import LearnerConfig, MeshConfig
from jaxroll.errors import ConfigError, JaxRollError
from jaxroll.learner import minibatch, packing
from jaxroll.learner import state as states
from jaxroll.learner.critic import Critic
from jaxroll.learner.step import CompileCounter
from jaxroll.learner.trainer import TrainingPrograms
from jaxroll.records import Claim, Segment, Version, VersionRun


def trained(trainer, claims):
    return [trainer.train(claim) for claim in claims]


def same_bits(first, second) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


def with_outcomes(claim: Claim, change) -> Claim:
    """`claim` with `change(outcome)` in place of every outcome."""
    groups = tuple(
        msgspec.structs.replace(
            group, members=tuple(msgspec.structs.replace(m, outcome=change(m.outcome)) for m in group.members)
        )
        for group in claim.groups
    )
    return msgspec.structs.replace(claim, groups=groups)


def test_compilations_of_other_threads_are_not_counted():
    """In a shared process the evaluator's engine compiles while the learner trains."""
    counter = CompileCounter()
    try:
        compiled = lambda factor: jax.jit(lambda x: factor * x).lower(1.0).compile()  # noqa: E731
        other = threading.Thread(target=compiled, args=(3.0,))
        other.start()
        other.join(60)
        assert counter.count == 0
        compiled(5.0)
        assert counter.count == 1
    finally:
        counter.close()


@pytest.mark.parametrize("minibatches", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_same_claims_give_the_same_bits(small_config, make_claim, make_trainer, minibatches):
    config = small_config(mesh=MeshConfig(fsdp=2), micro_batch_rows=4, minibatches=minibatches)
    claims = [make_claim(step, age=1) for step in (1, 2)]
    first, second = make_trainer(config), make_trainer(config)
    rows = [trained(trainer, claims) for trainer in (first, second)]
    assert same_bits(jax.device_get(first.state), jax.device_get(second.state))
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    assert int(first.state.step) == 2 * minibatches
    replayed = make_trainer(config)
    trained(replayed, [msgspec.structs.replace(claim, replayed=True, lineage=1) for claim in claims])
    assert same_bits(jax.device_get(first.state), jax.device_get(replayed.state))


def test_no_loss_reads_a_setting_over_which_programs_are_shared(host_settings):
    """Otherwise a trainer of these tests would compute with another's setting."""
    source = inspect.getsource(losses) + inspect.getsource(registry.penalised)
    assert {"clip_low", "kl_coef"} < (read := set(re.findall(r"learner\.(\w+)", source)))
    assert not read & host_settings and host_settings < {field.name for field in fields(LearnerConfig)}


class Unread:
    """A value that nothing can be done with."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} of a field that a program does not read")

    def __bool__(self):
        raise AssertionError("a field that a program does not read decides")

    __call__ = __iter__ = __len__ = __bool__


def test_no_program_reads_a_field_over_which_it_is_shared(small_config, make_recipe, unread_fields):
    recipe, learner = make_recipe(small_config()), LearnerConfig(critic="init")
    for name in ("zeros", "apply", "accumulate", "logprobs", "values"):
        made = Critic(learner, recipe) if name == "values" else TrainingPrograms(recipe)
        made.recipe = replace(made.recipe, **dict.fromkeys(unread_fields[name], Unread()))
        assert made.lowered(name, 3).as_text()
    made = TrainingPrograms(recipe)
    made.recipe = replace(recipe, temperature=Unread())
    with pytest.raises((AssertionError, TypeError)):
        made.lowered("accumulate", 3)


@pytest.mark.parametrize("minibatches", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_nothing_compiles_after_the_warm_up(small_config, make_claim, make_trainer, minibatches):
    config = small_config(mesh=MeshConfig(fsdp=2), micro_batch_rows=4, minibatches=minibatches)
    trainer, said = make_trainer(config, alone=True), []
    trainer.warmup(said.append)
    assert len([text for text in said if text.startswith("compiled")]) == 2 + 2 * minibatches
    counter = CompileCounter()
    counts = set()
    for step, (groups, size) in enumerate([(4, 4), (1, 1), (2, 3), (8, 4), (3, 2)], start=1):
        row = trainer.train(make_claim(step, groups, size, age=step % 2))
        counts.add(row["micro_batches"])
        assert row["compiles"] == 0
    counter.close()
    assert counter.count == 0
    assert len(counts) > 1


def test_a_step_makes_good_answers_likelier(small_config, make_claim, make_trainer):
    config = small_config(alpha=0.0, correction="none")
    trainer, claim = make_trainer(config), make_claim()
    (samples,) = minibatch.prepare(claim, config).minibatches
    batches = packing.pack(samples, 64, trainer.buckets)

    def gain() -> float:
        """Σ advantage · log π."""
        streams = [(batch.streams, trainer.programs.placed(batch.streams)) for batch in batches]
        return sum(
            float((host["advantage"] * trainer.programs.logprobs(trainer.state.params, at)).sum())
            for host, at in streams
        )

    before = gain()
    trained(trainer, [claim] * 3)
    assert gain() > before + 1.0


def test_the_row_of_a_step(small_config, make_claim, make_trainer):
    claim = make_claim(step=5, age=1)
    row = make_trainer(small_config()).train(claim)
    rewards = [m.outcome.reward for g in claim.groups for m in g.members]
    tokens = sum(int(s.loss_mask.sum()) for g in claim.groups for m in g.members for s in m.outcome.segments)
    assert row["reward_mean"] == pytest.approx(np.mean(rewards))
    assert row["reward_std"] == pytest.approx(np.std(rewards))
    assert (row["samples"], row["tokens_trained"], row["masked_tokens"]) == (16, tokens, 0)
    assert (row["age_mean"], row["age_max"], row["age_hist"]) == (1.0, 1, {"1": tokens})
    assert row["by_age"]["1"]["tokens"] == tokens
    lengths = [int(s.loss_mask.sum()) for g in claim.groups for m in g.members for s in m.outcome.segments]
    by_token = np.repeat(rewards, [n for n in lengths if n])
    assert row["by_age"].keys() == {"1"} and row["by_age"]["1"]["reward"] == pytest.approx(by_token.mean())
    assert 0 < row["ess"] < 1 and row["grad_norm"] > 0 and row["learning_rate"] == pytest.approx(1e-2)
    assert 0 <= row["padding_waste"] < 1 and row["logits_std"] > 0 and row["clip_share"] >= 0
    assert row["logprob_mismatch_max"] is None
    assert row["entropy"] == pytest.approx(np.log(24), rel=0.2)  # a fresh model is nearly uniform
    msgspec.json.encode(row)  # goes into a JSON line


@pytest.mark.soak
@pytest.mark.parametrize("minibatches", [1, 2])
def test_mismatch_is_read_off_members_of_the_trained_version(small_config, make_claim, make_trainer, minibatches):
    """Behavior log-probs taken from the trainer itself: mismatch 0, ess 1, KL 0; shift one token and it shows."""
    config = small_config(minibatches=minibatches)
    trainer, claim = make_trainer(config), make_claim(step=3)
    true = own_logprobs(trainer, claim)
    row = trainer.train(with_logprobs(claim, true))
    assert row["logprob_mismatch_tokens"] == row["tokens_trained"]
    assert row["logprob_mismatch_max"] < 1e-5
    assert row["ess"] == pytest.approx(1.0, abs=1e-5) and row["kl_behaviour"] < 1e-6
    off = [true[0] + 0.25, *true[1:-1], true[-1] + 5.0]
    row = make_trainer(config).train(with_logprobs(claim, off))
    assert row["logprob_mismatch_max"] == pytest.approx(5.0, abs=1e-4)
    row = make_trainer(config).train(last_member_began_earlier(with_logprobs(claim, off)))
    assert row["logprob_mismatch_max"] == pytest.approx(
        0.25, abs=1e-4
    )  # its other tokens are of age 0, and do not count
    assert row["age_hist"]["1"] == 1 and row["by_age"]["1"]["tokens"] == 1


@pytest.mark.soak
def test_the_shards_of_a_mesh_get_equal_work(small_config, make_claim, make_trainer, monkeypatch):
    """Very unequal lengths on four devices: the work of each, counted off what lies on it, and the metric says so."""
    config = small_config(mesh=MeshConfig(data=2, fsdp=2), micro_batch_rows=8, row_tokens=256)
    trainer, there = make_trainer(config), []
    place = trainer.programs.placed
    monkeypatch.setattr(trainer.programs, "placed", lambda streams: there.append(place(streams)) or there[-1])
    lengths = np.random.default_rng(3).lognormal(np.log(16), 1.0, 24 * 4)
    row = trainer.train(with_lengths(make_claim(groups=24), lengths))
    share = packing.attention_share(trainer.spec)
    held = [work_by_device(streams["segment_ids"], share) for streams in there]
    assert row["micro_batches"] == len(held) > 1
    assert all(len(of_batch) == 4 for of_batch in held)
    busiest, mean = (sum(of(list(of_batch.values())) for of_batch in held) for of in (max, np.mean))
    assert row["shard_imbalance"] == pytest.approx(busiest / mean, rel=1e-9)
    assert row["shard_imbalance"] <= 1.05


def with_lengths(claim: Claim, lengths) -> Claim:
    """`claim` with answers of these lengths (2 to 240), every other of them right."""
    rest, rewards = iter(np.clip(lengths, 2, 240).astype(int)), itertools.cycle((0.0, 1.0))

    def change(outcome):
        (question, sampled), (run,), count = outcome.segments, outcome.versions, int(next(rest))
        said = Segment(*(np.resize(part, count) for part in (sampled.tokens, sampled.loss_mask, sampled.logprobs)))
        return msgspec.structs.replace(
            outcome, segments=(question, said), versions=(VersionRun(run.version, count),), reward=next(rewards)
        )

    return with_outcomes(claim, change)


def work_by_device(segment_ids: jax.Array, share: float) -> dict[int, float]:
    """The work of every device that holds rows: n + share·n² of each segment of n tokens, summed."""
    rows = {shard.device.id: np.asarray(shard.data) for shard in segment_ids.addressable_shards}
    return {
        device: float(sum(n + share * n * n for row in held for n in np.bincount(row)[1:]))
        for device, held in rows.items()
    }


def last_member_began_earlier(claim: Claim) -> Claim:
    """`claim`, where the first token of the very last member is one version older than the rest."""
    last = claim.groups[-1].members[-1].outcome

    def change(outcome):
        if outcome is not last:
            return outcome
        (run,) = outcome.versions
        runs = (VersionRun(Version(0, run.version.step - 1), 1), VersionRun(run.version, run.count - 1))
        return msgspec.structs.replace(outcome, versions=runs)

    return with_outcomes(claim, change)


def own_logprobs(trainer, claim):
    """The trainer's log-probs of every member's sampled tokens, in the claim's order."""
    samples = [sample for group in minibatch.prepare(claim, trainer.config).groups for sample in group]
    out = [None] * len(samples)
    for batch in packing.pack(samples, 64, trainer.buckets):
        values = np.asarray(trainer.programs.logprobs(trainer.state.params, trainer.programs.placed(batch.streams)))
        for place in batch.placements:
            row = values[place.row, place.start : place.start + place.length]
            out[place.sample] = row[samples[place.sample].mask]
    return out


def with_logprobs(claim: Claim, logprobs) -> Claim:
    """`claim` with these behavior log-probs on its sampled segments."""
    rest = iter(logprobs)

    def change(outcome):
        question, sampled = outcome.segments
        return msgspec.structs.replace(
            outcome, segments=(question, msgspec.structs.replace(sampled, logprobs=next(rest)))
        )

    return with_outcomes(claim, change)


def test_minibatches_take_several_optimizer_steps_with_real_ratios(small_config, make_claim, make_trainer):
    """With several minibatches r ≠ 1 from the second on, so a tight clip binds somewhere; with one it never does."""
    tight = {"correction": "none", "clip_low": 1e-4, "clip_high": 1e-4, "learning_rate": 5e-2}
    once, twice = (make_trainer(small_config(minibatches=n, **tight)).train(make_claim(age=1)) for n in (1, 2))
    assert once["clip_share"] == 0.0
    assert twice["clip_share"] > 0.0
    assert twice["tokens_trained"] == once["tokens_trained"]


@pytest.mark.parametrize("groups", [0, 1])
def test_claims_with_nothing_to_learn_stay_finite(small_config, make_claim, make_trainer, groups):
    trainer = make_trainer(small_config())
    row = trainer.train(make_claim(groups=groups, size=1))
    assert row["loss"] == 0.0 and row["grad_norm"] == 0.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(trainer.state)))


def test_equal_rewards_do_not_move_the_parameters(small_config, make_claim, make_trainer):
    trainer = make_trainer(small_config())
    before = jax.device_get(trainer.state.params)
    claim = with_outcomes(make_claim(), lambda outcome: msgspec.structs.replace(outcome, reward=1.0))
    row = trainer.train(claim)
    assert row["groups_without_signal"] == 4
    assert same_bits(before, jax.device_get(trainer.state.params))


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_leaving_out_members_without_advantage_changes_nothing(
    small_config, make_claim, make_trainer, monkeypatch, aggregation
):
    """The same gradient as when every member is computed, for less work.

    Not the same parameters: Adam's first step makes a whole step of a gradient that is all but rounding.
    """
    config, summed, applied = small_config(aggregation=aggregation), [], TrainingPrograms.apply

    def noting(self, state, accumulator):
        summed.append(jax.device_get(accumulator.grads))
        return applied(self, state, accumulator)

    monkeypatch.setattr(TrainingPrograms, "apply", noting)
    claim = make_claim(groups=4)
    equal = msgspec.structs.replace(claim, groups=claim.groups[:2])
    equal = with_outcomes(equal, lambda outcome: msgspec.structs.replace(outcome, reward=1.0))
    claim = msgspec.structs.replace(claim, groups=(*equal.groups, *claim.groups[2:]))
    trainer = make_trainer(config)
    row = trainer.train(claim)

    def all_of_them(samples, how, algorithm, length, count):
        weights = advantages.sequence_weights(np.array([s.trained_tokens for s in samples]), how)
        return [replace(s, weight=float(w)) for s, w in zip(samples, weights, strict=True)]

    monkeypatch.setattr(minibatch, "weighted", all_of_them)
    trainer = make_trainer(config)
    full = trainer.train(claim)
    assert row["tokens_computed"] < full["tokens_computed"] == row["tokens_trained"]
    less, every = summed
    for name, grad in every.items():
        np.testing.assert_allclose(less[name], grad, atol=1e-5 * np.abs(grad).max(), rtol=1e-4)
    np.testing.assert_allclose(row["grad_norm"], full["grad_norm"], rtol=1e-4)


def test_masked_tokens_are_counted_and_not_trained(small_config, make_claim, make_trainer):
    def stale(outcome):
        question, sampled = outcome.segments
        mask = sampled.loss_mask.copy()
        mask[0] = 0
        return msgspec.structs.replace(
            outcome, segments=(question, msgspec.structs.replace(sampled, loss_mask=mask, sampled=sampled.loss_mask))
        )

    row = make_trainer(small_config()).train(with_outcomes(make_claim(age=1), stale))
    assert row["masked_tokens"] == 16


def test_behaviour_log_probs_of_minus_a_thousand_stay_finite(small_config, make_claim, make_trainer):
    claim = make_claim(age=1)
    counts = [int(m.outcome.segments[1].loss_mask.sum()) for g in claim.groups for m in g.members]
    row = make_trainer(small_config()).train(with_logprobs(claim, [np.full(n, -1e3, np.float32) for n in counts]))
    assert np.isfinite(row["loss"]) and np.isfinite(row["grad_norm"]) and row["clip_share"] == 1.0


def test_a_gradient_that_is_not_finite_stops_the_learner(small_config, make_claim, make_trainer):
    trainer = make_trainer(small_config())
    params = jax.device_get(trainer.state.params)
    trainer.set_params(params | {"embed": np.full_like(params["embed"], np.nan)})
    with pytest.raises(JaxRollError, match="step 1, minibatch 0: the gradient is not finite"):
        trainer.train(make_claim())


def test_parameters_of_another_model_are_refused(small_config, make_trainer):
    trainer = make_trainer(small_config())
    params = jax.device_get(trainer.state.params)
    with pytest.raises(ConfigError, match="embed has shape"):
        trainer.set_params(params | {"embed": params["embed"][:-8]})
    with pytest.raises(ConfigError, match=r"lack.*embed"):
        trainer.set_params({name: value for name, value in params.items() if name != "embed"})


def test_the_old_state_is_released_before_new_parameters_are_placed(small_config, make_trainer, monkeypatch):
    """Two states at once would need 24 bytes per parameter."""
    trainer, place, alive = make_trainer(small_config()), states.placed, []
    params = {name: np.array(value) for name, value in jax.device_get(trainer.state.params).items()}
    old = [weakref.ref(leaf) for leaf in jax.tree.leaves(trainer.state)]

    def placed(*given):
        alive.append(sum(leaf() is not None for leaf in old))
        return place(*given)

    monkeypatch.setattr(states, "placed", placed)
    trainer.set_params(params)
    assert alive == [0] and len(old) > 60


def test_host_arrays_given_as_parameters_survive_the_donation(small_config, make_claim, make_trainer):
    trainer = make_trainer(small_config())
    params = {name: np.array(value) for name, value in jax.device_get(trainer.state.params).items()}
    kept = {name: value.copy() for name, value in params.items()}
    trainer.set_params(params)
    trainer.train(make_claim())
    assert same_bits(params, kept)


def test_ages_across_lineages_count_by_step(small_config, make_claim, make_trainer):
    row = make_trainer(small_config()).train(make_claim(step=7, version=Version(0, 6)))
    assert row["age_hist"].keys() == {"1"}


@pytest.mark.parametrize("settings", [{}, {"minibatches": 2}, {"kl_in": "loss", "kl_coef": 0.1, "reference": "init"}])
def test_a_claim_laid_out_while_the_step_before_is_computed_changes_no_bit(
    small_config, make_claim, make_trainer, settings
):
    """Packing evaluates no model; log-probs for minibatches or a reference are computed when the step starts."""
    config, claims = small_config(**settings), [make_claim(step, age=1) for step in (1, 2, 3)]
    one_by_one, ahead = make_trainer(config), make_trainer(config)
    want = [one_by_one.train(claim) for claim in claims]
    assert ahead.prepares_ahead
    got, ready = [], ahead.prepare(claims[0])
    for after in (*claims[1:], None):
        running = ahead.dispatch_step(ready)
        ready = ahead.prepare(after) if after else None
        got.append(ahead.await_step(running))
        assert running.is_done()
    assert got == [row | {"compiles": after["compiles"]} for row, after in zip(want, got, strict=True)]
    assert same_bits(one_by_one.state, ahead.state)


def test_claims_that_need_a_model_are_not_prepared_ahead(small_config, make_trainer):
    assert not make_trainer(small_config(kl_in="reward", kl_coef=0.1, reference="init")).prepares_ahead
    assert not make_trainer(small_config(algorithm="ppo", critic="init")).prepares_ahead


@pytest.mark.parametrize(
    "advantage",
    [
        "batch_std",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("group_std", "group_mean", "leave_one_out")),
    ],
)
def test_a_claim_is_laid_out_while_a_device_is_busy(small_config, make_claim, make_trainer, advantage):
    """A device runs programs in order, so a caller that fetches a number waits for the step."""
    trainer, x = make_trainer(small_config(advantage=advantage)), jax.numpy.eye(256)
    long = jax.jit(lambda x: jax.lax.fori_loop(0, 3000, lambda _, y: jax.numpy.tanh(y @ y), x)).lower(x).compile()
    busy = long(x)
    ready = trainer.prepare(make_claim(1))
    assert not busy.is_ready()
    assert trainer.await_step(trainer.dispatch_step(ready))["compiles"] >= 0
