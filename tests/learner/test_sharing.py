"""Prompts stored once for all their answers: the same results as with a copy before each, for fewer tokens."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError
from jaxroll.kernels import attention
from jaxroll.kernels.attention import SharedRows
from jaxroll.learner import minibatch, packing, shared_prompts
from jaxroll.learner.minibatch import Sample

ROWS = SharedRows(prompt_tokens=12, stretches=3, tokens=16)


def sample(prompt: np.ndarray, answer: int, number: int) -> Sample:
    """A sample of `answer` tokens behind `prompt`; every number in it says whose it is."""
    T = len(prompt) + answer
    mask = np.arange(T) >= len(prompt)
    own = np.where(mask, number + np.arange(T) / 1000, 0.0).astype(np.float32)
    return Sample(
        tokens=np.concatenate([prompt, 1000 + 20 * number + np.arange(answer)]).astype(np.int32),
        mask=mask,
        behaviour=own,
        ages=np.where(mask, number, 0).astype(np.int32),
        sampled_tokens=answer,
        fresh=True,
        reward=0.0,
        advantage=own * 2,
        weight=number + 1.0,
    )


# Groups: the tokens of a prompt (some too long to be shared), and of each of its answers.
groups = st.lists(
    st.tuples(st.integers(1, 14), st.lists(st.integers(1, 14), min_size=1, max_size=7)), min_size=1, max_size=9
)


def samples_of(wanted) -> list[Sample]:
    found = []
    for number, (prompt, answers) in enumerate(wanted):
        words = 100 * (number + 1) + np.arange(prompt)
        room = ROWS.tokens - (1 if prompt - 1 <= ROWS.prompt_tokens else prompt)
        found += [sample(words, min(answer, room), len(found) + i) for i, answer in enumerate(answers)]
    return found


@given(groups, st.sampled_from([((8, 4, 2), 1), ((4, 2), 2), ((1,), 1), ((8,), 4)]))
def test_every_answer_is_packed_once_behind_its_prompt(wanted, mesh):
    buckets, shards = mesh
    samples = samples_of(wanted)
    batches = shared_prompts.pack(samples, ROWS, buckets, shards=shards, quadratic=0.01)
    assert sorted(place.sample for batch in batches for place in batch.placements) == list(range(len(samples)))
    for batch in batches:
        assert batch.rows in buckets and batch.streams["tokens"].shape == (batch.rows, ROWS.row_tokens)
        covered = np.zeros((batch.rows, ROWS.row_tokens), int)
        for place in (*batch.placements, *batch.prompts):
            covered[place.row, place.start : place.start + place.length] += 1
        assert np.array_equal(covered, batch.streams["segment_ids"] > 0), "tokens over one another, or without a place"
        for place in batch.placements:
            assert_stands_there(batch, place, samples[place.sample])
        assert batch.streams["mask"].sum() == sum(samples[place.sample].mask.sum() for place in batch.placements)


def assert_stands_there(batch, place, of: Sample) -> None:
    """Its own tokens at its place within one stretch, those before them in the prompt that its tokens name."""
    at = (place.row, slice(place.start, place.start + place.length))
    first, last = ((t - ROWS.prompt_tokens) // ROWS.tokens for t in (place.start, place.start + place.length - 1))
    assert first == last >= 0
    for name, value in {
        "tokens": of.tokens,
        "mask": of.mask,
        "behaviour": of.behaviour,
        "ages": of.ages,
        "fresh": of.mask,
        "advantage": of.advantage,
        "weight": np.where(of.mask, of.weight, 0),
        "positions": np.arange(len(of.tokens)),
    }.items():
        assert np.array_equal(batch.streams[name][at], np.asarray(value)[place.skipped :]), name
    (number,) = set(batch.streams["prompt_ids"][at].tolist())
    prompt = (batch.streams["segment_ids"][place.row] == number) & (number > 0)
    assert prompt.sum() == place.skipped and not prompt[ROWS.prompt_tokens :].any()
    assert np.array_equal(batch.streams["tokens"][place.row][prompt], of.tokens[: place.skipped])
    assert np.array_equal(batch.streams["positions"][place.row][prompt], np.arange(place.skipped))
    assert not of.mask[: place.skipped + 1].any(), "the last token of a prompt lies with its answer, the others before"


@given(groups)
def test_per_token_values_are_gathered_by_sample(wanted):
    samples = samples_of(wanted)
    batches = shared_prompts.pack(samples, ROWS, (4, 2))
    values = [sample.behaviour for sample in samples]
    rows = [packing.spread(batch, values) for batch in batches]
    assert all(np.array_equal(a, b) for a, b in zip(packing.gathered(batches, rows, len(samples)), values, strict=True))


def test_a_group_shares_its_prompt_and_one_too_large_for_a_row_shares_two_copies():
    words = np.arange(10)
    (batch,) = shared_prompts.pack([sample(words, 7, i) for i in range(6)], ROWS, (1,))
    assert len(batch.prompts) == 1 and {place.skipped for place in batch.placements} == {9}
    assert packing.shared_tokens([batch]) == pytest.approx(1 - (9 + 6 * 8) / (6 * 17))
    batches = shared_prompts.pack([sample(words, 7, i) for i in range(8)], ROWS, (2, 1))
    assert sum(len(batch.prompts) for batch in batches) == 2
    assert sum(len(batch.placements) for batch in batches) == 8


def test_tokens_that_were_sampled_are_no_prompt_although_none_is_trained():
    """If stale tokens are masked, an answer begins before its first trained token."""
    from jaxroll.algorithms.advantages import Turn

    one = sample(np.arange(5), 6, 0)
    late = replace(one, mask=np.arange(11) >= 9, turns=(Turn(5, 11, b"", 1.0),))
    assert shared_prompts.prompt_tokens(one) == shared_prompts.prompt_tokens(late) == 5
    assert shared_prompts.prompt_tokens(replace(late, turns=())) == 9


def test_an_answer_that_is_too_long_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"learner\.row_tokens") as caught:
        shared_prompts.pack([sample(np.arange(5), 16, 0)], ROWS, (1,))
    assert "17" in str(caught.value)
    assert shared_prompts.pack([], ROWS, (1,)) == []


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_get_equal_work_of_groups_that_are_unequal(shards):
    rng = np.random.default_rng(1)
    rows, found = SharedRows(96, 8, 256), []
    for group in range(96):
        words = 1000 * group + np.arange(int(rng.integers(8, 33)))
        found += [sample(words, int(min(n, 250)), 0) for n in rng.lognormal(np.log(48), 0.8, 8)]
    batches = shared_prompts.pack(found, rows, packing.row_buckets(8 * 8, shards, 8), shards=shards, quadratic=0.002)
    assert packing.shard_imbalance(batches, shards, 0.002) <= 1.05
    assert packing.padding_waste(batches) < 0.25


@pytest.mark.parametrize(("seed", "window"), [(0, 0), (1, 0), (2, 5)])
def test_attention_is_that_of_each_sample_by_itself(seed, window):
    rng = np.random.default_rng(seed)
    wanted = [(int(rng.integers(1, 12)), rng.integers(1, 12, rng.integers(1, 6)).tolist()) for _ in range(4)]
    samples = samples_of(wanted)
    (batch,) = shared_prompts.pack(samples, ROWS, (8,))
    width = {"q": (4, 8), "k": (2, 8), "v": (2, 8)}
    given = [
        {name: rng.normal(size=(len(s.tokens), *shape)).astype(np.float32) for name, shape in width.items()}
        for s in samples
    ]
    for family in shared_prompts.prompt_groups(samples, ROWS):  # what is the same token has the same numbers
        for index in family.samples[1:]:
            for name in width:
                given[index][name][: family.shared] = given[family.samples[0]][name][: family.shared]
    rows = {name: np.zeros((8, ROWS.row_tokens, *shape), np.float32) for name, shape in width.items()}
    for place in (*batch.placements, *batch.prompts):
        for name, value in rows.items():
            own = given[place.sample][name][place.skipped : place.skipped + place.length]
            value[place.row, place.start : place.start + place.length] = own
    streams = {name: jax.numpy.asarray(value) for name, value in (batch.streams | rows).items()}
    attend = attention.attention(ROWS, streams["segment_ids"], streams["prompt_ids"], streams["positions"], window)
    seen = np.asarray(attend(streams["q"], streams["k"], streams["v"]))
    longest = ROWS.prompt_tokens + ROWS.tokens  # no token sees the padding after it
    by_itself = jax.jit(lambda q, k, v: attention.grouped(q, k, v, attention.visible(longest, None, window)))
    for place in (*batch.placements, *batch.prompts):
        alone = given[place.sample].values()
        q, k, v = (np.pad(value, ((0, longest - len(value)), (0, 0), (0, 0)))[None] for value in alone)
        expected = np.asarray(by_itself(q, k, v))[0, : len(samples[place.sample].tokens)]
        got = seen[place.row, place.start : place.start + place.length]
        np.testing.assert_allclose(got, expected[place.skipped : place.skipped + place.length], atol=2e-6)


SHARED = {"shared_prompt_tokens": 16, "shared_prompt_rows": 4, "row_tokens": 16, "micro_batch_rows": 8}
MESHES = {"one": MeshConfig(), "many": MeshConfig(data=1, fsdp=2, tensor=2)}
WARM = {("one", "gspo"), ("many", "grpo")}  # each mesh and each algorithm once: a warm-up compiles every bucket


def gradients(trainer, config, claim) -> dict[str, np.ndarray]:
    """Those of the claim's first optimizer step, as the trainer would pack it."""
    samples = minibatch.prepare(claim, config).minibatches[0]
    accumulator = trainer.programs.zeros()
    for batch in trainer.packed(samples):
        streams = trainer.programs.placed(batch.streams)
        accumulator = trainer.programs.accumulate(trainer.state.params, accumulator, streams, trainer.base)
    return jax.device_get(accumulator.grads)


@pytest.mark.parametrize(
    ("mesh", "algorithm"),
    [
        ("one", "gspo"),
        *(
            pytest.param(*other, marks=pytest.mark.soak)
            for other in (("many", "grpo"), ("one", "grpo"), ("many", "gspo"))
        ),
    ],
)
def test_the_gradient_is_that_of_samples_with_a_prompt_each(small_config, make_claim, make_trainer, mesh, algorithm):
    claim = make_claim(groups=6, size=5, age=1)
    config = small_config(algorithm=algorithm, mesh=MESHES[mesh])
    config = replace(config, schedule=replace(config.schedule, group_size=5))
    sharing_ = replace(config, learner=replace(config.learner, **SHARED))
    plain, once = make_trainer(config), make_trainer(sharing_, alone=True)
    theirs, ours = gradients(plain, config, claim), gradients(once, sharing_, claim)
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, atol=2e-6 * max(1.0, np.abs(expected).max()), err_msg=name)
    plain_row = plain.train(claim)
    warm = (mesh, algorithm) in WARM
    if warm:
        once.warmup()
    rows = [plain_row, once.train(claim)]
    assert rows[0]["shared_tokens"] == 0 and 0.2 < rows[1]["shared_tokens"] < 0.8
    for key in ("loss", "grad_norm", "entropy", "kl_behaviour", "clip_share"):
        assert rows[1][key] == pytest.approx(rows[0][key], rel=1e-4, abs=1e-6), key
    assert rows[0]["tokens_trained"] == rows[1]["tokens_trained"]
    assert rows[1]["compiles"] == 0 or not warm


@pytest.mark.parametrize(
    "learner",
    [
        pytest.param({"minibatches": 2}, marks=pytest.mark.soak),
        pytest.param({"algorithm": "ppo", "critic": "init"}, marks=pytest.mark.soak),
        pytest.param(
            {"reference": "init", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}, marks=pytest.mark.soak
        ),
        pytest.param({"reference": "init", "kl_coef": 0.1}, marks=pytest.mark.soak),
        pytest.param({"lora_rank": 4}, marks=pytest.mark.soak),
    ],
    ids=["minibatches", "critic", "kl in reward", "kl in loss", "lora"],
)
def test_all_that_reads_rows_reads_shared_ones(small_config, make_claim, make_trainer, learner):
    """Several steps, so that reference, critic and proximal policy are others than the trained one."""
    claims = [make_claim(step, age=1) for step in (1, 2, 3)]
    states = []
    for more in ({}, SHARED | {"micro_batch_rows": 12}):
        config = small_config(**learner, **more)
        trainer = make_trainer(config)
        rows = [trainer.train(claim) for claim in claims]
        states.append((jax.device_get(trainer.params()), [row["loss"] for row in rows]))
    (plain, losses), (once, again) = states
    np.testing.assert_allclose(again, losses, rtol=2e-3, atol=2e-5)
    for name, expected in plain.items():
        np.testing.assert_allclose(once[name], expected, atol=2e-4, err_msg=name)


def test_samples_that_are_compared_may_not_share_a_prompt(small_config, make_trainer):
    with pytest.raises(ConfigError, match=r"learner\.shared_prompt_tokens"):
        make_trainer(small_config(algorithm="dpo", reference="init", **SHARED))
