"""Every loss, packed several sequences to a row, against numpy; hand-worked numbers; identities; extreme inputs."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxroll.algorithms import advantages, registry
from jaxroll.algorithms import losses as clipped
from jaxroll.algorithms import losses as ratios
from jaxroll.algorithms.advantages import TokenLoss, Tokens
from jaxroll.config import LearnerConfig
from jaxroll.config.derived import PRESETS, settled
from jaxroll.errors import ConfigError
from tests.harness import numpy_losses as plain

STREAMS = ("logp", "prox", "beh", "ref", "adv")
ROW = 12  # tokens of a packed row in these tests


def configs() -> dict[str, LearnerConfig]:
    """Every algorithm as it comes, and with what it can be combined with."""
    named = {name: LearnerConfig(algorithm=name) for name in PRESETS if name != "dpo"}
    grpo = LearnerConfig()
    return named | {
        "grpo-dual": replace(grpo, dual_clip=3.0),
        "grpo-mask": replace(grpo, correction_mode="mask", correction_cap=1.5),
        "grpo-none": replace(grpo, correction="none"),
        "grpo-cap": replace(grpo, correction_cap=1.1),
        "icepop-narrow": replace(named["icepop"], correction_cap=1.4, correction_floor=0.8),
        "tis-sequence": replace(named["tis"], ratio_level="sequence", correction_cap=1.3),
        "cispo-mask": replace(named["cispo"], correction_mode="mask", clip_high=0.3, clip_low=0.4),
        "topr-token": replace(named["topr"], ratio_level="token"),
        "topr-weighted": replace(named["topr"], positive_weight=0.5, negative_weight=2.0),
        "gspo-none": replace(named["gspo"], correction="none", clip_low=0.3, clip_high=0.2),
        "gspo-mask": replace(named["gspo"], correction_mode="mask", clip_low=0.3, clip_high=0.2),
        "grpo-kl": replace(grpo, kl_coef=0.3, reference="init"),
        "grpo-k3": replace(grpo, kl_coef=0.3, reference="init", kl_estimator="k3"),
    }


CONFIGS = configs()
every = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def compiled(config: LearnerConfig):
    objective = registry.build(config).objective

    def summed(logprob, tokens):
        token = objective(tokens._replace(logprob=logprob))
        return jnp.where(tokens.mask, token.loss, 0.0).sum(), token

    return jax.jit(lambda tokens: jax.grad(summed, has_aux=True)(tokens.logprob, tokens))


def sequences(seed: int, lengths=(3, 1, 4), spread: float = 0.6) -> list[dict[str, np.ndarray]]:
    """Log-probs of trained tokens that differ between the policies, one advantage a sequence."""
    rng, out = np.random.default_rng(seed), []
    for length in lengths:
        beh = -3 * rng.random(length) - 0.1
        one = {"beh": beh, "prox": beh + spread * rng.normal(size=length), "ref": beh + rng.normal(size=length)}
        one["logp"] = one["prox"] + spread * rng.normal(size=length)
        out.append(one | {"adv": np.full(length, rng.normal())})
    return out


def packed(made: list[dict[str, np.ndarray]], holes: bool = True) -> tuple[Tokens, list[np.ndarray]]:
    """A row of the sequences, with one prompt token before each and random values at untrained tokens; their slices."""
    row = {key: np.full(ROW, 7.0) for key in STREAMS}
    mask, ids, places, start = np.zeros(ROW, bool), np.zeros(ROW, np.int32), [], 0
    for number, one in enumerate(made, start=1):
        stop = start + len(one["logp"]) + holes
        at = np.arange(start + holes, stop)
        mask[at], ids[start:stop] = True, number
        for key in STREAMS:
            row[key][at] = one[key]
        places.append(at)
        start = stop
    given = {key: np.asarray(row[key][None], np.float32) for key in STREAMS}
    return Tokens(
        logprob=given["logp"],
        proximal=given["prox"],
        behaviour=given["beh"],
        reference=given["ref"],
        advantage=given["adv"],
        mask=mask[None],
        segments=ids[None],
    ), places


def losses(config: LearnerConfig, made) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Loss, gradient by log π and what is bounded, of every sequence."""
    tokens, places = packed(made)
    grad, token = compiled(config)(tokens)
    return tuple([np.asarray(array)[0, at] for at in places] for array in (token.loss, grad, token.bounded))


def reference(config: LearnerConfig, one: dict[str, np.ndarray]) -> np.ndarray:
    c = settled(config)
    return plain.LOSSES[c.algorithm](one, c) + (plain.kl_penalty(one, c) if c.kl_coef else 0.0)


@every
@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_agrees_with_numpy_sequence_by_sequence(name, seed):
    """Three sequences in a row with prompts between: each has the loss that it has alone."""
    config, made = CONFIGS[name], sequences(seed)
    for got, one in zip(losses(config, made)[0], made, strict=True):
        want = reference(config, one)
        nudged = {key: value * (1 + 1e-5) for key, value in one.items()}
        if np.abs(reference(config, nudged) - want).max() > 1e-3 * (1 + np.abs(want).max()):
            continue  # at the edge of a bound, rounding decides on which side
        np.testing.assert_allclose(got, want, rtol=5e-4, atol=1e-5)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_dpo_agrees_with_numpy_at_every_token_of_both_answers(seed):
    config = LearnerConfig(algorithm="dpo", reference="init", dpo_beta=0.7)
    made = sequences(seed, (3, 1, 2, 1))
    for one, sign in zip(made, (1, -1, -1, 1), strict=True):
        one["adv"] = np.full(len(one["logp"]), sign * 1.0)
    got = losses(config, made)[0]
    for (first, second), (a, b) in zip((made[:2], made[2:]), (got[:2], got[2:]), strict=True):
        better, worse = (first, second) if first["adv"][0] > 0 else (second, first)
        want = plain.dpo(better, worse, config)
        np.testing.assert_allclose(np.concatenate([a, b]), want, rtol=1e-4, atol=1e-5)


def dpo_pair(seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A better answer and a worse one."""
    better, worse = sequences(seed, (3, 2))
    better["adv"], worse["adv"] = np.ones(3), -np.ones(2)
    return better, worse


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_dpo_at_the_reference_is_log_two_and_turned_round_it_differs_by_the_margin(seed):
    """log σ(−x) − log σ(x) = −x; the slope at 0 is β/2, counted at each of the pair's five tokens."""
    config = LearnerConfig(algorithm="dpo", reference="init", dpo_beta=0.7)
    better, worse = dpo_pair(seed)
    turned = [one | {"adv": -one["adv"]} for one in (better, worse)]
    loss, other = (np.concatenate(losses(config, pair)[0]) for pair in ([better, worse], turned))
    margin = (better["logp"] - better["ref"]).sum() - (worse["logp"] - worse["ref"]).sum()
    np.testing.assert_allclose(loss - other, -0.7 * margin, rtol=1e-4, atol=1e-5)
    at_home = [one | {"logp": one["ref"]} for one in (better, worse)]
    loss, grad, _ = (np.concatenate(got) for got in losses(config, at_home))
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-5)
    np.testing.assert_allclose(grad, [*[-0.7 / 2 * 5] * 3, *[0.7 / 2 * 5] * 2], rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_dpo_agrees_with_finite_differences(seed):
    config, eps = LearnerConfig(algorithm="dpo", reference="init", dpo_beta=0.7), 1e-6
    pair = dpo_pair(seed)
    _, grad, _ = losses(config, list(pair))
    for which in (0, 1):
        for t in range(len(grad[which])):
            value = []
            for sign in (1, -1):
                moved = [dict(one) for one in pair]
                moved[which]["logp"] = pair[which]["logp"] + sign * eps * (np.arange(len(grad[which])) == t)
                value.append(5 * plain.dpo(*moved, config))  # at every token of both
            np.testing.assert_allclose(grad[which][t], (value[0] - value[1]) / (2 * eps), rtol=2e-3, atol=2e-4)


def test_dpo_worked_by_hand():
    # Margins: better +0.5 − 0.0, worse −0.3: 0.8·β = 0.4 at β = 0.5; −log σ(0.4) = 0.513015.
    config = LearnerConfig(algorithm="dpo", reference="init", dpo_beta=0.5)
    zero = {"beh": np.zeros(1), "prox": np.zeros(1)}
    made = [
        zero | {"logp": np.array([-1.0]), "ref": np.array([-1.5]), "adv": np.ones(1)},
        zero | {"logp": np.array([-2.0]), "ref": np.array([-1.7]), "adv": -np.ones(1)},
    ]
    loss, grad, _ = losses(config, made)
    np.testing.assert_allclose(np.concatenate(loss), [0.513015, 0.513015], rtol=1e-5)
    # −β·σ(−0.4) for the better one; each token of the pair holds the pair's loss, so the sum counts it twice.
    np.testing.assert_allclose(np.concatenate(grad), [-0.401312, 0.401312], rtol=1e-5)


def test_the_clip_worked_by_hand():
    # r = 2: with A > 0 the clip at 1.28 binds (loss -1.28, no gradient); with A < 0 the larger loss 2 counts.
    config = LearnerConfig(correction="none")
    one = {key: np.log([0.2]) for key in ("prox", "beh", "ref")} | {"logp": np.log([0.4])}
    loss, grad, bounded = losses(config, [one | {"adv": np.array([a])} for a in (1.0, -1.0)])
    np.testing.assert_allclose(np.concatenate(loss), [-1.28, 2.0], rtol=1e-5)
    np.testing.assert_allclose(np.concatenate(grad), [0.0, 2.0], rtol=1e-5)
    np.testing.assert_array_equal(np.concatenate(bounded), [True, False])


def test_the_dual_clip_worked_by_hand():
    # r = 5, A = -1: the loss 5 is held at 3, and the token has no gradient.
    token = clipped.surrogate(jnp.array([5.0, 2.0, 5.0]), jnp.array([-1.0, -1.0, 1.0]), 0.2, 0.2, dual=3.0)
    np.testing.assert_allclose(token.loss, [3.0, 2.0, -1.2], rtol=1e-6)
    np.testing.assert_array_equal(token.bounded, [True, False, True])


def test_weights_worked_by_hand():
    # π_prox/π_b = 3 and 1/4, A = 1, r = 1. Truncated at 2; masked above 2; IcePop keeps [0.5, 5].
    one = {"logp": np.log([0.3, 0.1]), "prox": np.log([0.3, 0.1]), "beh": np.log([0.1, 0.4]), "ref": np.zeros(2)}
    one["adv"] = np.ones(2)
    for config, want, bounded in (
        (LearnerConfig(), [-2.0, -0.25], [True, False]),
        (LearnerConfig(correction_mode="mask", correction_cap=2.0), [0.0, -0.25], [True, False]),
        (LearnerConfig(algorithm="icepop"), [-3.0, 0.0], [False, True]),
        (LearnerConfig(algorithm="gspo"), [-0.75, -0.75], [False, False]),  # the sequence's 3 · 1/4
    ):
        loss, _, at = losses(config, [one])
        np.testing.assert_allclose(loss[0], want, rtol=1e-5)
        np.testing.assert_array_equal(at[0], bounded)


def test_the_second_step_worked_by_hand():
    # One answer drawn at π_b = 0.1, begun at π_prox = 0.15, now at 0.3, 0.165 and 0.075: w = 1.5, r = 2, 1.1 and 1/2,
    # ρ = 3, 1.65 and 0.75. The clip to [0.8, 1.28] stops 2 from rising and 1/2 from falling, for any w and ρ.
    one = {key: np.log([p] * 3) for key, p in (("prox", 0.15), ("beh", 0.1), ("ref", 0.1))}
    one["logp"] = np.log([0.3, 0.165, 0.075])
    s = 1.1 ** (1 / 3)
    for config, adv, want in (
        (LearnerConfig(correction="none"), 1.0, [0.0, -1.1, -0.5]),
        (LearnerConfig(), 1.0, [0.0, -1.65, -0.75]),
        (LearnerConfig(), -1.0, [3.0, 1.65, 0.0]),
        (LearnerConfig(dual_clip=1.8), -1.0, [0.0, 1.65, 0.0]),
        (LearnerConfig(correction_cap=1.2), 1.0, [0.0, -1.32, -0.6]),
        (LearnerConfig(correction_cap=1.2, correction_mode="mask"), 1.0, [0.0, 0.0, 0.0]),
        (LearnerConfig(algorithm="icepop", correction_cap=1.6), -1.0, [3.0, 1.65, 0.0]),  # asks w, not ρ
        (LearnerConfig(algorithm="icepop", correction_cap=1.4), -1.0, [0.0, 0.0, 0.0]),
        (LearnerConfig(algorithm="gspo"), 1.0, [0.0, 0.0, 0.0]),  # s = 1.03 is beyond 1.0004
        (LearnerConfig(algorithm="gspo"), -1.0, [2 * s] * 3),  # of the sequence w = 1.5³, capped at 2
        (LearnerConfig(algorithm="gspo", correction_cap=4.0), -1.0, [3.375 * s] * 3),
        (LearnerConfig(algorithm="tis"), 1.0, [-2.0, -1.65, -0.75]),
        (LearnerConfig(algorithm="cispo"), 1.0, [-3.0, -1.65, -0.75]),
        (LearnerConfig(algorithm="topr", ratio_level="token"), -1.0, [1.0, 1.0, 0.75]),
    ):
        _, grad, _ = losses(config, [one | {"adv": np.full(3, adv)}])
        np.testing.assert_allclose(grad[0], want, rtol=1e-5, err_msg=str(config))


def test_cispo_and_topr_worked_by_hand():
    # ρ = 6 and 1/2 (of the sequence: 3); gradients by log π are −weight·A.
    one = {"logp": np.log([0.6, 0.2]), "prox": np.log([0.6, 0.2]), "beh": np.log([0.1, 0.4]), "ref": np.zeros(2)}
    for config, adv, want in (
        (LearnerConfig(algorithm="cispo"), 1.0, [-4.0, -0.5]),
        (LearnerConfig(algorithm="cispo", correction_mode="mask"), 1.0, [0.0, -0.5]),
        (LearnerConfig(algorithm="cispo", correction_mode="mask"), -1.0, [4.0, 0.5]),
        (LearnerConfig(algorithm="topr"), 1.0, [-1.0, -1.0]),
        (LearnerConfig(algorithm="topr", ratio_level="token"), 1.0, [-1.0, -1.0]),
        (LearnerConfig(algorithm="topr"), -1.0, [1.0, 1.0]),
        (LearnerConfig(algorithm="topr", ratio_level="token"), -1.0, [1.0, 0.5]),
        (LearnerConfig(algorithm="topr", negative_weight=0.5), -1.0, [0.5, 0.5]),
        (LearnerConfig(algorithm="tis", correction_cap=1.0), 1.0, [-1.0, -0.5]),
        (LearnerConfig(algorithm="tis", ratio_level="sequence"), 1.0, [-2.0, -2.0]),
    ):
        _, grad, _ = losses(config, [one | {"adv": np.full(2, adv)}])
        np.testing.assert_allclose(grad[0], want, rtol=1e-5, err_msg=str(config))


@every
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_on_policy_every_loss_is_the_policy_gradient(name, seed):
    """π_θ = π_prox = π_b = π_ref (α = 0, first step): ratios are 1, corrections and penalties vanish, ∇ = −A."""
    made = sequences(seed, spread=0.0)
    for one in made:
        one["logp"], one["ref"] = one["beh"].copy(), one["beh"].copy()
        one["prox"] = one["beh"].copy()
    config = CONFIGS[name]
    _, grad, bounded = losses(config, made)
    scale = {"topr-weighted": lambda a: np.where(a > 0, 0.5, 2.0)}.get(name, lambda a: 1.0)
    for got, one in zip(grad, made, strict=True):
        # GSPO's loss of a sequence is the loss of each of its tokens, each of which has a share of the mean's gradient.
        np.testing.assert_allclose(got, -one["adv"] * scale(one["adv"]), rtol=2e-5, atol=1e-6)
    assert not np.concatenate(bounded).any()


@every
@pytest.mark.parametrize(("spread", "seeds"), [(0.05, 1), (0.8, 8)], ids=["near", "far"])
def test_gradients_agree_with_finite_differences(name, spread, seeds):
    """Policies close to each other, and so far apart that clips and caps affect only some tokens."""
    config, bounded = CONFIGS[name], []
    for seed in range(5, 5 + seeds):
        made = sequences(seed, spread=spread)
        _, grad, at = losses(config, made)
        bounded += at
        for got, one in zip(grad, made, strict=True):
            np.testing.assert_allclose(got, differences(config, one), rtol=2e-3, atol=2e-4)
    if spread > 0.5 and name != "raft":  # which bounds nothing
        assert 0 < np.concatenate(bounded).mean() < 1


def differences(config: LearnerConfig, one: dict[str, np.ndarray]) -> np.ndarray:
    """The gradient of a sequence's loss by log π, from numpy's loss at two places.

    Where a weight is a constant of the loss (ρ of TIS, CISPO, TOPR and of the KL) it is held at its value.
    """
    c, eps = settled(config), 1e-6
    if c.algorithm in ("cispo", "topr", "raft") or c.correction == "tis":
        return reference(config, one) / one["logp"]  # the loss is linear in log π
    want = np.zeros(len(one["logp"]))
    for t in range(len(want)):
        moved = [one | {"logp": one["logp"] + sign * eps * (np.arange(len(want)) == t)} for sign in (1, -1)]
        up, down = (reference(config, each).sum() for each in moved)
        want[t] = (up - down) / (2 * eps)
        if c.kl_coef:
            rho = np.minimum(np.exp(one["logp"] - one["beh"]), c.correction_cap)
            ups, downs = (plain.kl_penalty(each, c).sum() for each in moved)
            apart = one["logp"] - one["ref"]
            slope = {"k2": apart, "k3": -np.expm1(-apart)}[c.kl_estimator]
            want[t] += (c.kl_coef * rho * slope)[t] - (ups - downs) / (2 * eps)
    return want


@pytest.mark.parametrize("name", [*CONFIGS, "dpo"])
def test_extreme_log_probs_stay_finite(name):
    config = CONFIGS.get(name, LearnerConfig(algorithm="dpo", reference="init"))
    extremes = [0.0, -1e-7, -30.0, -1e4, -1e30, -np.inf]
    rows = np.array(list(itertools.product(extremes[:-1], extremes, extremes, (0.0, -np.inf), (-1e3, 0.0, 1e3))))
    columns = (np.asarray(column, np.float32).reshape(-1, ROW) for column in rows.T)
    ids = np.tile(np.arange(ROW) // 2 + 1, (len(rows) // ROW, 1))  # sequences of two tokens, and of six pairs a row
    tokens = Tokens(*columns, np.ones(ids.shape, bool), ids)
    grad, token = compiled(config)(tokens)
    assert np.isfinite(grad).all() and np.isfinite(token.loss).all()


@pytest.mark.parametrize("name", [*CONFIGS, "dpo"])
def test_a_row_without_trained_tokens_has_no_gradient(name):
    config = CONFIGS.get(name, LearnerConfig(algorithm="dpo", reference="init"))
    tokens, _ = packed(sequences(1))
    empty = tokens._replace(mask=np.zeros_like(tokens.mask), segments=np.zeros_like(tokens.segments))
    grad, token = compiled(config)(empty)
    np.testing.assert_array_equal(grad, np.zeros((1, ROW)))
    assert np.isfinite(token.loss).all()


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_totals_of_segments(lengths, seed):
    """Against a loop, padded to one shape; the gradient of Σ totals is each segment's length."""
    ids = np.zeros(72, np.int32)
    ids[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    values = np.random.default_rng(seed).normal(size=72).astype(np.float32)
    want = [values[ids == number].sum() for number in ids]
    np.testing.assert_allclose(TOTALS(values, ids), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(TOTALS_GRAD(values, ids), [(ids == number).sum() for number in ids])


TOTALS = jax.jit(advantages.totals)
TOTALS_GRAD = jax.jit(jax.grad(lambda values, ids: advantages.totals(values, ids).sum()))


def test_an_algorithm_that_is_registered_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jaxroll.algorithms import registry\nfrom jaxroll.algorithms.advantages import TokenLoss\n"
        "@registry.register('half')\n"
        "def half(learner):\n"
        "    return registry.Algorithm(lambda t: TokenLoss(-0.5 * t.advantage * t.logprob, t.mask),"
        " needs_reference=True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = registry.build(LearnerConfig(algorithm="mine:half", reference="init"))
    assert isinstance(made.objective(packed(sequences(0))[0]), TokenLoss)
    for learner, words in (
        (LearnerConfig(algorithm="mine:half"), "reference model"),
        (LearnerConfig(algorithm="mine:halve"), "Did you mean 'half'"),
        (LearnerConfig(algorithm="not_there:half"), "cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=words):
            registry.build(learner)
    with pytest.raises(ValueError, match="already"):
        registry.register("half")(lambda learner: made)


def test_an_algorithm_that_gives_credit_wants_no_critic(monkeypatch: pytest.MonkeyPatch, tmp_path):
    (tmp_path / "judge.py").write_text(
        "from jaxroll.algorithms import registry\n"
        "@registry.register('judge')\n"
        "def judge(learner):\n"
        "    return registry.Algorithm(print, lambda groups: [])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    learner = LearnerConfig(algorithm="judge:judge", advantage="gae", critic="init")
    with pytest.raises(ConfigError, match=r"learner\.critic = 'init'.*computes advantages itself"):
        registry.build(learner)


@pytest.mark.parametrize("estimator", ["k1", "k4"])
def test_no_other_estimator_is_a_loss(estimator):
    with pytest.raises(ConfigError, match="k2"):
        ratios.loss(estimator, jnp.zeros(1), jnp.zeros(1))
