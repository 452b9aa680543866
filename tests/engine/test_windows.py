"""Layers with a sliding window in the engine: memory for the window only, tokens and log-probs of whole rows."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import programs
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request, Result
from jaxroll.kernels.choice import PLAIN
from jaxroll.models import cache, families, params
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version
from tests.models.test_family_goldens import golden, logits_of, whole_rows

ONE = MeshConfig()
LONGEST = 96  # sixteen times the window
# Prompts in several chunks, and fewer pages than the requests need together.
SIZES: dict[str, Any] = {
    "slots": 6, "max_tokens": LONGEST, "prefill_rows": 2, "prefill_buckets": (8,), "decode_chunk": 4, "seed": 5,
    "page_tokens": 2, "cache_pages": 92, "paged_attention": "xla", "weight_swap": "reprefill",
}  # fmt: skip


@functools.cache
def weights(variant: str, which: int, mesh: MeshConfig = ONE) -> params.Params:
    """The golden parameters of a variant, and others of the next version."""
    spec, values, _ = golden(variant)
    where = params.shardings(spec, sharding.build(mesh), sharding.SAMPLER)
    return {name: jax.device_put(leaf * (1 - 0.1 * which), where[name]) for name, leaf in values.items()}


def conversations(count: int = 12) -> list[Request]:
    """Groups of three with a prompt in common, greedy or not, that end near the longest length; the cache is kept."""
    rng, made = np.random.default_rng(3), []
    prompts = [rng.integers(0, 72, 3 + 9 * group).astype(np.int32) for group in range(-(-count // 3))]
    for index in range(count):
        prompt = prompts[index // 3]
        wanted = SamplingParams(int(rng.integers(20, 80 - len(prompt))), temperature=float(index % 2))
        made.append(Request(index, prompt, GenerationKey(index // 3, index % 3), wanted, keep=True))
    return made


def played(variant: str, mesh: MeshConfig = ONE, **overrides: Any) -> tuple[Engine, list[Request], dict[int, Result]]:
    """Conversations of two turns, with preemptions and a weight swap in the first.

    Without a limit of pages there is no preemption; weights are swapped when the first answer has ended. With `draft`
    the model is its own draft model, at the first version.
    """
    spec, draft = golden(variant)[0], weights(variant, 0, mesh) if overrides.pop("draft", False) else None
    engine = Engine(
        replace(spec, draft=draft and spec),
        sharding.build(mesh),
        sharding.SAMPLER,
        EngineConfig(**(SIZES | overrides)),
        draft=draft,
    )
    results: dict[int, Result] = {}

    def add(requests: list[Request]) -> None:
        for one in requests:
            engine.add(one, functools.partial(results.__setitem__, one.id))

    engine.swap(Version(0, 1), weights(variant, 0, mesh))
    first = conversations()
    add(first)
    limited = engine._sizes.pages > 0
    while engine.stats().preemptions < 2 if limited else not results:
        assert engine.step(), "no preemption"
    engine.swap(Version(0, 2), weights(variant, 1, mesh))
    while engine.step():
        pass
    hits = engine.stats().prefix_hits
    second = []
    for id in reversed(results):  # that came to its end last
        text = np.concatenate([first[id].prompt, results[id].completion.tokens, [7, 8]]).astype(np.int32)
        second.append(Request(100 + id, text, GenerationKey(100 + id, 0), SamplingParams(10, temperature=0.0)))
    add(second)
    while engine.step():
        pass
    assert engine.stats().prefix_hits > hits, "no conversation was continued"
    return engine, first + second, results


def expected(variant: str, requests: list[Request], results: dict[int, Result]) -> list[np.ndarray]:
    """The log-probs of all tokens [T, V] of each request by whole rows, each with the weights of its version."""
    texts = np.zeros((len(requests), LONGEST), np.int32)
    for row, one in zip(texts, requests, strict=True):
        tokens = np.concatenate([one.prompt, results[one.id].completion.tokens])
        row[: len(tokens)] = tokens
    each = [jax.nn.log_softmax(logits_of(golden(variant)[0], weights(variant, n), *whole_rows(texts))) for n in (0, 1)]
    found = []
    for index, one in enumerate(requests):
        steps = [run.version.step - 1 for run in results[one.id].completion.versions for _ in range(run.count)]
        at = len(one.prompt) - 1 + np.arange(len(steps))
        found.append(np.stack([np.asarray(each[step][index, place]) for step, place in zip(steps, at, strict=True)]))
    return found


def assert_those_of_whole_rows(variant: str, requests: list[Request], results: dict[int, Result]) -> None:
    versions = set()
    for one, wanted in zip(requests, expected(variant, requests, results), strict=True):
        got = results[one.id].completion
        versions.update(run.version.step for run in got.versions)
        chosen = np.take_along_axis(wanted, got.tokens[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(got.logprobs, chosen, rtol=0, atol=3e-5)  # 1.3e-5 on an Intel Xeon
        if one.params.temperature == 0:
            assert (wanted.max(axis=1) - chosen < 1e-5).all(), "not the likeliest token"
    assert versions == {1, 2}


def in_rings(engine: Engine) -> list[bool]:
    """For each layer: its pool has as many pages as rings need."""
    sizes, pools = engine._sizes, engine._device._state.cache.keys
    counts = {sizes.shard_pages: False, sizes.rings * sizes.ring: True}
    return [counts[pool.shape[2]] for pool in pools]


def test_tokens_and_log_probs_are_those_of_whole_rows() -> None:
    """Shared prompts, chunks, preemptions, weights that change, and a second turn over the kept cache."""
    engine, requests, results = played("gemma3_text")
    assert in_rings(engine) == [True, False, True]
    assert_those_of_whole_rows("gemma3_text", requests, results)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("variant", "overrides"),
    [
        ("gemma3_text", {}),
        ("gemma3_text", {"scan_layers": True}),
        ("gemma3_text", {"draft_tokens": 2, "cache_pages": 112}),
        ("gemma3_text", {"draft_tokens": 2, "cache_pages": 112, "draft": True}),
        ("gemma3_text", {"mesh": MeshConfig(data=2), "cache_pages": 104}),
        ("gemma3_text", {"mesh": MeshConfig(data=2), "cache_pages": 104, "scan_layers": True}),
        ("qwen2_yarn_windows", {}),
        ("qwen2_yarn_windows", {"scan_layers": True, "draft_tokens": 2, "cache_pages": 112}),
        ("mistral", {"cache_pages": 0}),  # every layer has a window
        ("mistral", {"cache_pages": 0, "scan_layers": True}),
    ],
    ids=str,
)
def test_tokens_are_those_of_an_engine_without_rings(monkeypatch, variant: str, overrides: dict[str, Any]) -> None:
    engine, requests, results = played(variant, **overrides)
    assert engine._sizes.ring
    assert_those_of_whole_rows(variant, requests, results)
    monkeypatch.setattr(programs, "with_rings", lambda sizes, *_: sizes)
    other, _, wanted = played(variant, **overrides)
    assert not other._sizes.ring and all(pool.shape[2] % other._sizes.shard_pages == 0 for pool in pools_of(other))
    for one in requests:
        got, before = results[one.id].completion, wanted[one.id].completion
        np.testing.assert_array_equal(got.tokens, before.tokens)
        np.testing.assert_allclose(got.logprobs, before.logprobs, rtol=0, atol=1e-5)


def pools_of(engine: Engine) -> tuple[jax.Array, ...]:
    return engine._device._state.cache.keys


def abstract(spec: ModelSpec, config: EngineConfig, *, rings: bool = True) -> tuple[Any, int]:
    """The sizes of an engine, and the bytes of its keys and values."""
    sizes = config.sizes(1)
    sizes = programs.with_rings(sizes, spec, PLAIN) if rings else sizes
    state = programs.abstract_state(config.model(spec), sharding.build(ONE), sharding.SAMPLER, sizes)
    return sizes, sum(leaf.size * leaf.dtype.itemsize for leaf in (*state.cache.keys, *state.cache.values))


@pytest.mark.parametrize("scan", [False, True])
def test_gemma3_1b_needs_a_sixth_of_the_memory_at_32k(scan: bool) -> None:
    """22 of its 26 layers have a window of 512 tokens, for which a ring has 9 pages of 64."""
    spec = families.spec("gemma3_1b")
    config = EngineConfig(64, 32_768, 4, (1024,), 16, 0, scan_layers=scan)
    sizes, got = abstract(spec, config)
    page, pages = 2 * 64 * 256 * np.dtype(spec.compute_dtype).itemsize, 64 * 512 + 16
    assert (sizes.ring, sizes.rings, sizes.shard_pages) == (9, 64 + 16, pages)
    assert got == page * (4 * pages + 22 * 9 * 80)
    assert abstract(spec, config, rings=False)[1] == page * 26 * pages > 5.7 * got


def test_rings_are_used_only_if_they_need_fewer_pages() -> None:
    spec = replace(families.spec("nano"), windows=(0, 512))
    long, short = EngineConfig(8, 8192, 2, (64,), 4, 0), EngineConfig(8, 512, 2, (64,), 4, 0)
    assert abstract(spec, long)[0].window == 512 and abstract(spec, short)[0].window == 0
    few = replace(long, cache_pages=200)  # 24 rings of 9 pages need more
    assert abstract(spec, few)[0].window == 0 and abstract(spec, replace(few, cache_pages=220))[0].window == 512
    every = replace(spec, windows=(512, 512))  # no layer needs the pages, so they limit nothing
    assert abstract(every, replace(few, cache_pages=220))[0].pages == 0
    assert abstract(families.spec("nano"), long)[0].window == 0


def test_a_ring_is_written_by_the_last_tokens_of_a_chunk_only() -> None:
    """Fresh prompts by whole pages, later chunks by tokens; an earlier token never overwrites a later one."""
    ring, page = 2, 3
    tables = np.array([[4, 5, 4, 5, 4]])
    pool = np.zeros((1, 1, 6, page, 1), np.float32)
    new = np.arange(1, 15, dtype=np.float32).reshape(1, 14, 1, 1)
    zero, length = np.zeros(1, np.int32), np.array([14])
    begun = np.asarray(jax.jit(cache.begun, static_argnums=5)(pool, new, zero, tables, length, ring))
    assert begun[0, 0, 4].ravel()[:2].tolist() == [13, 14] and begun[0, 0, 5].ravel().tolist() == [10, 11, 12]
    filled = np.asarray(jax.jit(cache.filled, static_argnums=6)(pool, new, zero, tables, zero, length, ring))
    assert filled[0, 0, 4].ravel().tolist() == [13, 14, 9] and filled[0, 0, 5].ravel().tolist() == [10, 11, 12]
    assert not begun[0, 0, :4].any() and not filled[0, 0, :4].any()


def test_what_a_ring_has_no_place_for_is_not_written() -> None:
    """On a CPU the last of two writes to one place remains, so the values above would be right without this."""
    of = lambda used, places: np.flatnonzero(cache.lasting(8, jnp.array([used]), places)[0]).tolist()  # noqa: E731
    assert of(5, 3) == [2, 3, 4] and of(2, 3) == [0, 1] and of(0, 3) == [] and of(5, 0) == [0, 1, 2, 3, 4]
