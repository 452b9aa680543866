"""Sampling against a slow numpy truncation, by frequencies, and by the identity behind a token's key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.algorithms import sampling

RUN_KEY = jax.random.key(7)
sample = jax.jit(sampling.sample)


def numpy_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The probabilities left by temperature, then top-k, then top-p, one word at a time in float64."""
    scaled = np.asarray(logits, np.float64) / temperature
    best_first = sorted(range(len(scaled)), key=lambda word: (-scaled[word], word))
    if top_k > 0:
        best_first = best_first[:top_k]
    weight = {word: np.exp(scaled[word] - scaled.max()) for word in best_first}
    total = sum(weight.values())
    if top_p < 1.0:
        kept, mass = [], 0.0
        for word in best_first:
            kept.append(word)
            mass += weight[word] / total
            if mass >= top_p:
                break
        best_first = kept
    probability = np.zeros(len(scaled))
    for word in best_first:
        probability[word] = weight[word]
    return probability / probability.sum()


def keys(count: int, offset: int = 0) -> jax.Array:
    fold = jax.vmap(sampling.token_key, (None, None, None, None, 0))
    return fold(RUN_KEY, 0, 0, 0, jnp.arange(offset, offset + count))


def full(count: int, value: float, dtype=jnp.float32) -> jax.Array:
    return jnp.full(count, value, dtype)


@given(
    seed=st.integers(0, 2**16),
    temperature=st.sampled_from([0.4, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 12, 40]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
)
def test_log_probs_are_of_the_truncated_distribution(seed, temperature, top_k, top_p):
    rng = np.random.default_rng(seed)
    logits = rng.permuted(np.tile(np.linspace(-3, 3, 12, dtype=np.float32), (16, 1)), axis=1)
    tokens, logprobs = sample(
        logits, keys(16, seed), full(16, temperature), full(16, top_k, jnp.int32), full(16, top_p)
    )
    for row in range(16):
        probability = numpy_distribution(logits[row], temperature, top_k, top_p)
        assert probability[tokens[row]] > 0
        np.testing.assert_allclose(logprobs[row], np.log(probability[tokens[row]]), atol=2e-5)


def test_ties_keep_exactly_k_tokens_lower_index_first():
    kept = sampling.support(jnp.zeros((1, 6)), jnp.array([4]), jnp.array([1.0]))
    np.testing.assert_array_equal(kept, [[True, True, True, True, False, False]])


def test_the_best_word_survives_any_nucleus():
    kept = sampling.support(jnp.array([[0.0, 5.0, 1.0]]), jnp.array([0]), jnp.array([0.0]))
    np.testing.assert_array_equal(kept, [[False, True, False]])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8)]
)
def test_frequencies_follow_the_distribution(temperature, top_k, top_p):
    draws = 20_000
    logits = np.random.default_rng(5).normal(size=8).astype(np.float32)
    tokens, _ = sample(
        jnp.tile(logits, (draws, 1)),
        keys(draws),
        full(draws, temperature),
        full(draws, top_k, jnp.int32),
        full(draws, top_p),
    )
    probability = numpy_distribution(logits, temperature, top_k, top_p)
    counts = np.bincount(np.asarray(tokens), minlength=8)
    possible = probability > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - draws * probability)[possible] ** 2 / (draws * probability)[possible]).sum()
    assert chi_square < 29.9  # exceeded with probability 1e-4 at 7 degrees of freedom, the most there are here


def test_greedy_takes_the_first_best_word_with_its_untempered_log_prob():
    logits = jnp.array([[0.0, 2.0, 2.0, -1.0]])
    tokens, logprobs = sample(logits, keys(1), full(1, 0.0), full(1, 1, jnp.int32), full(1, 0.1))
    assert tokens[0] == 1
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits)[:, 1], rtol=1e-6)


def test_logits_that_are_no_numbers_give_a_word_of_the_vocabulary_and_say_so():
    logits = jnp.zeros((2, 5)).at[0].set(jnp.nan)
    tokens, logprobs = sample(logits, jax.random.split(RUN_KEY, 2), jnp.ones(2), jnp.zeros(2, int), jnp.ones(2))
    assert all(0 <= token < 5 for token in tokens.tolist())
    assert np.isnan(np.asarray(logprobs)).tolist() == [True, False]


def test_a_row_does_not_feel_its_neighbours_or_its_slot():
    logits = jax.random.normal(jax.random.key(1), (8, 24))
    temperature = jnp.array([1.0, 0.0, 0.5, 1.0, 1.0, 2.0, 1.0, 1.0])
    top_k, top_p = full(8, 0, jnp.int32).at[1].set(2), full(8, 1.0)  # row 1 is greedy: its top-k means nothing
    alone = sample(logits, keys(8), temperature, top_k, top_p)
    beside_truncated = sample(logits, keys(8), temperature, top_k.at[6:].set(3), top_p.at[7].set(0.4))
    for plain, mixed in zip(alone, beside_truncated, strict=True):
        np.testing.assert_array_equal(plain[:6], mixed[:6])
    order = jnp.array([5, 2, 7, 0, 1, 6, 3, 4])
    moved = sample(logits[order], keys(8)[order], temperature[order], top_k[order], top_p)
    for plain, elsewhere in zip(alone, moved, strict=True):
        np.testing.assert_array_equal(plain[order], elsewhere)


def test_raw_key_data_and_typed_keys_draw_the_same():
    logits = jax.random.normal(jax.random.key(2), (6, 16))
    settings = (full(6, 1.0), full(6, 0, jnp.int32), full(6, 1.0))
    typed = sample(logits, keys(6), *settings)
    raw = sample(logits, jax.random.key_data(keys(6)), *settings)
    np.testing.assert_array_equal(typed[0], raw[0])
    from_raw = sampling.token_key(jax.random.key_data(RUN_KEY), 1, 2, 3, 4)
    assert from_raw == sampling.token_key(RUN_KEY, 1, 2, 3, 4)


def test_a_token_key_depends_on_each_part_of_its_identity_and_on_nothing_else():
    identities = [(g, m, s, p) for g in range(3) for m in range(3) for s in range(2) for p in range(4)]
    parts = [jnp.array(part) for part in zip(*identities, strict=True)]
    many = jax.jit(jax.vmap(sampling.token_key, (None, 0, 0, 0, 0)))(RUN_KEY, *parts)
    assert len({tuple(data) for data in np.asarray(jax.random.key_data(many)).tolist()}) == len(identities)
    for index in (0, 17, 71):
        assert sampling.token_key(RUN_KEY, *identities[index]) == many[index]
        request = sampling.request_key(RUN_KEY, *identities[index][:3])
        assert sampling.position_key(request, identities[index][3]) == many[index]
    assert sampling.token_key(jax.random.key(8), *identities[0]) != many[0]


def test_token_keys_never_change_between_releases():
    """A golden: a run that is resumed or replayed by a later release must draw the same tokens."""
    assert jax.random.key_data(sampling.token_key(jax.random.key(0), 1, 2, 3, 4)).tolist() == [475719223, 648082777]


# --- truncation with its support

SIZE = 6
CUT = [(0, 0.9, 0.0), (3, 1.0, 0.0), (0, 1.0, 0.2), (5, 0.8, 0.05), (0, 0.999, 0.0)]
supported = jax.jit(sampling.sample_with_support, static_argnums=6)


def numpy_support(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The probabilities over the support: top-k and top-p of the whole distribution, min-p, and the `SIZE` best."""
    probability = numpy_distribution(logits, temperature, top_k, top_p)
    probability[probability < min_p * probability.max()] = 0
    probability[np.argsort(-probability, kind="stable")[SIZE:]] = 0
    return probability / probability.sum()


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), CUT)
@pytest.mark.parametrize("temperature", [0.5, 1.4])
def test_supports_are_those_of_the_definition_and_log_probs_are_over_them(temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(64, 24), scale=1.5).astype(np.float32)
    how = full(64, temperature), full(64, top_k, jnp.int32), full(64, top_p), full(64, min_p)
    tokens, logprobs, ids = supported(logits, keys(64), *how, SIZE)
    widths = set()
    for row in range(64):
        probability = numpy_support(logits[row], temperature, top_k, top_p, min_p)
        kept = [id for id in ids[row].tolist() if id >= 0]
        assert sorted(kept) == np.flatnonzero(probability).tolist()
        np.testing.assert_allclose(logprobs[row], np.log(probability[tokens[row]]), atol=2e-5)
        widths.add(len(kept))
    assert max(widths) <= SIZE and (len(widths) > 1 or temperature > 1 or top_k == 3)


def test_a_support_limit_that_is_not_reached_changes_no_token():
    logits = jax.random.normal(jax.random.key(1), (64, 24))
    how = full(64, 0.8), full(64, 0, jnp.int32), full(64, 0.7), full(64, 0.0)
    tokens, logprobs = sample(logits, keys(64), *how)
    other, theirs, _ = supported(logits, keys(64), *how, SIZE * 4)
    np.testing.assert_array_equal(tokens, other)
    np.testing.assert_allclose(logprobs, theirs, atol=2e-6)


def test_rows_that_do_not_truncate_have_no_support():
    logits = jnp.array([[0.0, 2.0, 2.0, -1.0]] * 3).at[2].set(jnp.nan)
    temperature, top_p = jnp.array([0.0, 1.0, 1.0]), jnp.array([0.1, 1.0, 0.5])
    tokens, logprobs, ids = supported(logits, keys(3), temperature, full(3, 0, jnp.int32), top_p, full(3, 0.0), 2)
    assert tokens[0] == 1, "greedy: the first of equals"
    np.testing.assert_array_equal(ids[:2], -1)
    np.testing.assert_allclose(logprobs[:2], jax.nn.log_softmax(logits)[jnp.arange(2), tokens[:2]], rtol=1e-6)
    assert 0 <= tokens[2] < 4 and np.isnan(logprobs[2])


def test_of_equals_the_lower_indices_are_kept():
    _, _, ids = supported(jnp.zeros((1, 6)), keys(1), full(1, 1), full(1, 0, jnp.int32), full(1, 0.9), full(1, 0.0), 4)
    assert ids.tolist() == [[0, 1, 2, 3]]
