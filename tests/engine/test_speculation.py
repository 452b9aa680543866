"""Speculative decoding: the same tokens, log-probs and supports as one token at a time, and the target's distribution.

The engines of this file verify every draft, however unlikely, and draft after a single equal token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.config import MeshConfig
from jaxroll.engine import decoding
from jaxroll.engine.engine import EngineConfig
from jaxroll.engine.programs import check_sizes
from jaxroll.engine.requests import Request
from jaxroll.errors import ConfigError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, Supports
from jaxroll.records import Version, VersionRun
from tests.harness import naive_engine

K, USUAL = 3, decoding.WORTH
SIZES = {"max_tokens": 48, "draft_tokens": K, "page_tokens": 8, "prefill_buckets": (16,)}
FEW_PAGES = SIZES | {"slots": 8, "max_tokens": 64, "cache_pages": 18}
compiled_drafts = jax.jit(decoding.drafts, static_argnums=2)


@pytest.fixture(scope="module", autouse=True)
def every_draft_is_verified() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "SHORTEST_RUN", 1)
        patch.setattr(decoding, "WORTH", 0.0)
        yield


def requests_of(count: int, seed: int = 0, **fixed) -> list[Request]:
    """Prompts over three tokens, so that drafts are frequent; every way of sampling; pairs share a prompt."""
    rng, made = np.random.default_rng(seed), list[Request]()
    for index in range(count):
        own = rng.integers(0, 3, rng.integers(2, 14)).astype(np.int32)
        prompt = made[-1].prompt if index % 2 else own
        wanted = {
            "max_tokens": int(rng.integers(1, 30)),
            "temperature": float(rng.choice([0.0, 0.3, 0.7, 1.0])),
            "top_k": int(rng.choice([0, 0, 5])),
            "top_p": float(rng.choice([1.0, 1.0, 0.8])),
            "stop_tokens": tuple(int(t) for t in rng.integers(0, 64, rng.integers(0, 3))),
        }
        params = SamplingParams(**(wanted | fixed))
        made.append(Request(index, prompt, GenerationKey(index // 2, index % 2), params))
    return made


def counted(bench) -> tuple[int, int]:
    stats = bench.engine.stats()
    return stats.tokens_drafted, stats.tokens_accepted


@pytest.mark.parametrize("temperature", [0.0, None], ids=["greedy", "mixed"])
@pytest.mark.parametrize("paged", ["dense", pytest.param("xla", marks=pytest.mark.soak)])
def test_tokens_and_log_probs_are_those_of_one_token_at_a_time(bench, assert_naive, paged, temperature):
    b = bench(paged_attention=paged, **SIZES)
    before, steps = counted(b), b.engine.stats().decode_steps
    requests = requests_of(32, **({} if temperature is None else {"temperature": temperature}))
    assert_naive(requests, b.run(requests))
    drafted, accepted = np.subtract(counted(b), before)
    assert 0 < accepted < drafted, "drafts must be kept and be rejected"
    tokens = sum(len(result.completion.tokens) for result in b.results.values())
    assert b.engine.stats().decode_steps - steps < tokens


def test_a_stop_token_within_an_accepted_draft_ends_the_answer(bench, monkeypatch):
    """The drafts are the answer itself, so that every one is accepted; each of its tokens stops a request."""
    prompt, greedy = np.array([1, 0, 1, 2, 2, 2, 0, 0, 2, 2, 2, 0], np.int32), SamplingParams(30, temperature=0.0)
    whole = Request(0, prompt, GenerationKey(0, 0), greedy)
    answer = bench(**SIZES).run([whole])[0].completion.tokens

    def oracle(text, positions, most):
        after = positions[:, None] + 1 - len(prompt) + jax.numpy.arange(most)[None]
        return jax.numpy.asarray(answer)[jax.numpy.clip(after, 0, 29)], positions >= 0

    monkeypatch.setattr(decoding, "drafts", oracle)
    b = bench(**SIZES, slots=1)  # of its own, so that it is compiled with these drafts
    firsts = [at for at in range(30) if answer[at] not in answer[:at]]
    for at in firsts:
        stops = msgspec.structs.replace(greedy, stop_tokens=(int(answer[at]),))
        b.run([dataclasses.replace(whole, id=1 + at, params=stops)])
        np.testing.assert_array_equal(b.results[1 + at].completion.tokens, answer[: at + 1])
    assert firsts[1:] and counted(b)[1] > 3


@pytest.mark.soak
@pytest.mark.parametrize("mesh", [MeshConfig(data=2, tensor=2)], ids=str)
def test_tokens_equal_the_naive_reference_on_a_mesh(bench, assert_naive, mesh):
    b, requests = bench(mesh, **SIZES), requests_of(16, seed=1)
    before = counted(b)
    assert_naive(requests, b.run(requests))
    assert np.subtract(counted(b), before).all()


@pytest.mark.soak
@pytest.mark.parametrize("weight_swap", ["reprefill", "keep_kv", "restart", "drain"])
def test_swaps_preemptions_and_aborts_leave_every_token_its_version(bench, assert_replayed, weight_swap):
    b = bench(weight_swap=weight_swap, **FEW_PAGES)
    before, requests = b.engine.stats(), requests_of(24, seed=2, max_tokens=36, stop_tokens=())
    pieces: dict[int, list[Completion]] = {request.id: [] for request in requests}
    b.add(*(dataclasses.replace(one, on_tokens=pieces[one.id].append) for one in requests))
    while b.engine.stats().preemptions < before.preemptions + 2:
        assert b.engine.step()
    b.engine.abort(requests[0].id, keep=True)
    b.swap(Version(0, 2), 1)
    b.finish()
    whole = [request for request in requests if b.results[request.id].completion.finish != "abort"]
    assert len(whole) >= len(requests) - 1
    assert b.engine.stats().tokens_accepted > before.tokens_accepted
    if weight_swap == "keep_kv":  # over pages of two programs of weights only the engine can go on
        assert any(len(b.results[request.id].completion.versions) > 1 for request in whole)
        for request in whole:
            assert sum(run.count for run in b.results[request.id].completion.versions) == 36
    else:
        assert_replayed(whole, b.results, reprefill=weight_swap == "reprefill")
    for id, parts in pieces.items():  # what was streamed is the beginning of the completion
        final, count = b.results[id].completion, sum(len(part.tokens) for part in parts)
        assert [token for part in parts for token in part.tokens] == final.tokens[:count].tolist()
        assert [value for part in parts for value in part.logprobs] == final.logprobs[:count].tolist()


def letters(ids: list[int]) -> str:
    return "".join("abc"[i % 3] for i in ids)


def rising(drawn: np.ndarray) -> np.ndarray:
    allowed = np.arange(64) > (drawn[-1] if len(drawn) else -1)
    return allowed if allowed.any() else np.ones(64, bool)


@pytest.mark.soak
def test_supports_penalties_masks_and_stop_strings_are_those_without_drafts(bench, spec, seed, model):
    able = {"support_tokens": 8, "penalties": True, "masks": True, "decode": letters}
    requests = [
        *requests_of(16, seed=3, max_tokens=30, temperature=0.5),
        *(dataclasses.replace(one, id=100 + one.id, allowed=rising) for one in requests_of(2, seed=4, max_tokens=8)),
    ]
    odd = {1: {"repetition_penalty": 1.3}, 2: {"stop_strings": ("abcab", "ccc")}}
    requests = [
        dataclasses.replace(one, params=msgspec.structs.replace(one.params, **odd.get(one.id % 4, {})))
        for one in requests
    ]
    plain = dict(bench(**(FEW_PAGES | able | {"draft_tokens": 0})).run(requests))
    b = bench(**(FEW_PAGES | able))
    before = counted(b)
    b.run([one for one in requests if one.allowed is None])  # a mask makes every dispatch one step
    drafted, accepted = np.subtract(counted(b), before)
    assert 0 < accepted < drafted
    b.run([one for one in requests if one.allowed is not None])
    ties = 0
    for request in requests:
        one, other = plain[request.id].completion, b.results[request.id].completion
        if one.tokens.tolist() != other.tokens.tolist():
            margins = naive_engine.trace(spec, model(), request, seed).margins
            ties += 1
            assert margins.min() < naive_engine.NEAR_TIE, request
            continue
        assert one.finish == other.finish
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4, rtol=0)
        ours, theirs = (Supports.decoded(c.support, c.tokens).rows(8) for c in (one, other))
        np.testing.assert_array_equal(np.sort(ours, axis=1), np.sort(theirs, axis=1))
    assert ties <= 1


@pytest.mark.soak
@pytest.mark.parametrize("draft", [None, 1], ids=["lookup", "model"])
@pytest.mark.parametrize("count", [100_000])
def test_the_distribution_is_the_targets(bench, spec, model, count, draft):
    """The first two tokens of a pass. The prompt is that of 256 whose first drafted token is likeliest to be right."""
    temperature, V, weights = 2.0, spec.vocab_size, model()
    probabilities = jax.jit(
        jax.vmap(lambda row: jax.nn.softmax(naive_engine.all_logits(spec, weights, row) / temperature))
    )
    periods = np.random.default_rng(0).integers(0, V, (256, 3))
    texts = np.tile(periods, (1, 3))[:, :8].astype(np.int32)  # a b c a b c a b: the draft is c a b
    text = texts[np.argmax(np.asarray(probabilities(texts))[np.arange(256), 7, periods[:, 2]])]
    rows = np.concatenate([np.tile(text, (V, 1)), np.arange(V, dtype=np.int32)[:, None]], axis=1)
    probability = np.asarray(probabilities(rows), np.float64)
    joint = probability[0, 7][:, None] * probability[:, 8]
    prompt, first = text[:7], int(text[7])
    given = Completion(np.array([first], np.int32), np.zeros(1, np.float32), (VersionRun(Version(0, 1), 1),), "")
    params = SamplingParams(3, temperature=temperature)
    drafting = {} if draft is None else {"spec": dataclasses.replace(spec, draft=spec), "draft": draft}
    b = bench(paged_attention="dense", **SIZES, **({"slots": 64} if count > 10_000 else {}), **drafting)
    before = counted(b)
    b.add(*(Request(i, prompt, GenerationKey(i, 0), params, before=given) for i in range(count)))
    b.finish(limit=count)
    drafted, accepted = np.subtract(counted(b), before)
    assert accepted > count * 0.05 and drafted - accepted > count * 0.05
    seen = np.zeros((V, V))
    np.add.at(seen, tuple(np.array([b.results[i].completion.tokens[1:] for i in range(count)]).T), 1)
    wanted, seen = joint.reshape(-1) * count, seen.reshape(-1)
    rare = wanted < 5
    wanted, seen = np.append(wanted[~rare], wanted[rare].sum()), np.append(seen[~rare], seen[rare].sum())
    statistic = float(np.sum((seen - wanted) ** 2 / wanted))
    p = float(jax.scipy.stats.chi2.sf(statistic, len(seen) - 1))
    print(f"{count} samples, {len(seen)} cells: chi-square {statistic:.1f}, p = {p:.3f}")
    assert p > 1e-3


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=24), beyond=st.lists(st.integers(0, 2), max_size=4))
def test_a_draft_continues_the_longest_latest_equal_run(text, beyond):
    row = np.zeros((1, 32), np.int32)
    row[0, : len(text) + len(beyond)] = [*text, *beyond]  # tokens after the last one have no effect
    tokens, found = compiled_drafts(row, np.array([len(text) - 1], np.int32), 5)
    best = (0, -1)
    for end in range(len(text) - 1):
        run = 0
        while run < min(decoding.LONGEST_RUN, end + 1) and text[end - run] == text[len(text) - 1 - run]:
            run += 1
        best = max(best, (run, end))
    assert bool(found[0]) == (best[0] >= decoding.SHORTEST_RUN)
    if best[0] >= decoding.SHORTEST_RUN:
        extended = list(text)
        for offset in range(5):
            extended.append(extended[best[1] + 1 + offset])
        assert tokens[0].tolist() == extended[len(text) :]


@pytest.mark.soak
def test_sequences_whose_drafts_fail_stop_drafting_and_those_whose_drafts_hold_begin(bench, monkeypatch):
    monkeypatch.setattr(decoding, "WORTH", USUAL)
    b = bench(**SIZES, slots=2)  # compiled with the usual bound
    before = counted(b)
    b.run(requests_of(8, seed=5, temperature=50.0, max_tokens=30, stop_tokens=(), top_k=0, top_p=1.0))
    assert counted(b) == before, "random tokens have no drafts worth a pass"
    looping = Request(900, np.array([7, 8, 9] * 4, np.int32), GenerationKey(0, 0), SamplingParams(36, temperature=0.0))
    steps = b.engine.stats().decode_steps
    tokens = b.run([looping])[900].completion.tokens
    assert len(set(tokens.tolist()[-8:])) < 8, "the text must repeat"
    assert counted(b)[1] > before[1] and b.engine.stats().decode_steps - steps < 30


def test_a_negative_number_of_drafted_tokens_is_refused():
    sizes = EngineConfig(4, 32, 2, (16,), 4, 0, draft_tokens=-1).sizes(1)
    with pytest.raises(ConfigError, match=r"sampler.draft_tokens = -1: at least 0 is needed"):
        check_sizes(sizes, "keep_kv")
