"""`sampler.memory_fraction`: the pages of the KV cache from the memory of a device, which the tests set."""

from __future__ import annotations

import asyncio
import re
import weakref
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll import sharding
from jaxroll.config import Config, MeshConfig, ModelConfig
from jaxroll.engine import device
from jaxroll.engine.engine import Engine
from jaxroll.engine.requests import Request
from jaxroll.engine.sequence import MemoryShare, fitting_pages
from jaxroll.errors import ConfigError, TransferError
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRef
from jaxroll.roles import build
from jaxroll.roles.weights import RoleLog, WeightFollower

# --- the rule


@given(
    limit=st.integers(1, 10**5),
    fraction=st.floats(0.01, 1),
    arriving=st.integers(0, 10**4),
    in_use=st.integers(0, 10**4),
    temporaries=st.integers(0, 10**4),
    fixed=st.integers(0, 10**4),
    page=st.integers(0, 500),
    least=st.integers(1, 20),
    more=st.integers(0, 300),
)
def test_as_many_pages_as_fit_and_not_one_more(
    limit, fraction, arriving, in_use, temporaries, fixed, page, least, more
):
    share = MemoryShare(limit, fraction, arriving, in_use, temporaries)
    used = lambda pages: arriving + in_use + temporaries + fixed + pages * page  # noqa: E731
    state, most, budget = (lambda pages: fixed + pages * page), least + more, int(fraction * limit)
    if used(least) > budget:
        with pytest.raises(ConfigError) as caught:
            fitting_pages(share, state, least, most)
        assert caught.value.key == "sampler.memory_fraction"
        if found := re.match(r"Set it \w+ ([\d.]+)[ :]", caught.value.remedy):  # and then it fits
            assert fitting_pages(replace(share, fraction=float(found[1])), state, least, most) >= least
        else:
            assert used(least) > 0.99 * limit - 1
        return
    pages = fitting_pages(share, state, least, most)
    assert least <= pages <= most and used(pages) <= budget
    assert pages == most or used(pages + 1) > budget


def test_a_cache_whose_memory_grows_in_steps_is_filled_to_the_last_step() -> None:
    assert fitting_pages(MemoryShare(100, 1.0, 10, 10), lambda pages: 20 * (pages // 7), 1, 50) == 34


# --- an engine

LIMIT, SLOTS, TOKENS = 1_000_000, 16, 8


def engine_of(monkeypatch: pytest.MonkeyPatch, fraction: float, limit: int | None = LIMIT) -> Engine:
    """The engine of a sampler whose devices have `limit` bytes."""
    monkeypatch.setattr(sharding, "memory_bytes", lambda _: limit)
    sampler = replace(Config().sampler, slots=SLOTS, page_tokens=TOKENS, prefill_buckets=(8,), prefill_rows=1)
    sampler = replace(sampler, decode_chunk=2, memory_fraction=fraction)
    config = replace(Config(), model=ModelConfig(size="nano"), sampler=sampler)
    progress = RoleLog("sampler-0", lambda row: None)
    made = build.inference(
        config, "sampler", MeshConfig(), slots=SLOTS, weight_swap="keep_kv", token="", progress=progress
    )
    return made.engine


def zeros(engine: Engine) -> dict[str, jax.Array]:
    return {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in engine._device.served.items()}


@pytest.mark.parametrize("programs", ["of one size", "that grow", pytest.param("compiled", marks=pytest.mark.soak)])
def test_a_sampler_fills_its_share_of_the_memory_and_says_so(monkeypatch, capsys, programs: str) -> None:
    measured: list[int] = []

    def run_bytes(*args: Any, **how: Any) -> int:
        grown = 500 * args[3].pages if programs == "that grow" else 0  # temporaries grow with the cache
        measured.append(compiled(*args, **how) if programs == "compiled" else 60_000 + grown)
        return measured[-1]

    compiled = device.run_bytes
    monkeypatch.setattr(device, "run_bytes", run_bytes)
    engine = engine_of(monkeypatch, fraction=0.36)
    pages, state = engine._sizes.pages, engine._device._state
    assert f"sampler-0: KV cache of {pages} pages of 8 tokens: 0.36 of 0.001 GB are 0.00036" in capsys.readouterr().out
    held = 2 * sum(leaf.nbytes for leaf in zeros(engine).values()) + measured[-1]
    held += sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    page = sum(pool.nbytes for pool in state.cache.keys + state.cache.values) // pages
    assert engine._sizes.table < pages < SLOTS * engine._sizes.table and engine._sizes.shard_pages == pages
    assert held <= 0.36 * LIMIT and (programs == "that grow" or held + page > 0.36 * LIMIT)


@pytest.mark.parametrize(
    ("fraction", "limit", "words"),
    [
        (
            0.2,
            LIMIT,
            r"0\.2 of 0\.001 GB are 0\.0002, of them 0\.0002\d+ GB for two versions of the para.*above 0\.22:",
        ),
        (1.0, 10_000, "Use a larger sampler.mesh.tensor"),
        (0.5, None, "cpu report no limit of their memory. Set it to 0, and sampler.cache_pages"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_anything_is_compiled(monkeypatch, fraction, limit, words) -> None:
    monkeypatch.setattr(device, "run_bytes", lambda *args, **how: pytest.fail("compiled"))
    with pytest.raises(ConfigError, match=words) as caught:
        engine_of(monkeypatch, fraction, limit)
    assert caught.value.key == "sampler.memory_fraction" and caught.value.value == fraction


@pytest.mark.soak
def test_an_engine_without_a_limit_is_used_where_it_fits_and_few_pages_preempt(monkeypatch, capsys) -> None:
    whole = engine_of(monkeypatch, 0.9, 10 * LIMIT)
    assert not whole._sizes.pages and whole.attention.paged.name == "dense"
    assert "(all that its slots can need)" in capsys.readouterr().out
    engine = engine_of(monkeypatch, 0.35)
    engine.swap(Version(0, 1), zeros(engine))
    done = []
    for index in range(SLOTS):
        sampling = SamplingParams(max_tokens=engine._sizes.max_tokens - 3, ignore_eos=True)  # as long as possible
        engine.add(Request(index, np.array([1, 2, 3], np.int32), GenerationKey(index, 0), sampling), done.append)
    for _ in range(2000):
        if not engine.step():
            break
    assert len(done) == SLOTS and engine.stats().preemptions


# --- versions of the parameters on the device


class Arrivals:
    """Parameters that arrive in an engine between two steps, and the most versions of them that were alive at once."""

    def __init__(self, params: dict[str, jax.Array]) -> None:
        self._params, self._placed = params, list[weakref.ref[jax.Array]]()
        self.most, self.error = 0, None

    async def fetch(self, ref: VersionRef) -> Any:
        return SimpleNamespace(fetched_bytes=0)

    def place(self, staged: Any) -> dict[str, jax.Array]:
        if self.error is not None:
            raise self.error
        placed = {name: jnp.copy(leaf) for name, leaf in self._params.items()}
        self._placed.append(weakref.ref(placed["embed"]))
        self.most = max(self.most, sum(one() is not None for one in self._placed))
        return placed


def following(engine: Engine, params: dict[str, jax.Array]) -> tuple[WeightFollower, Arrivals]:
    """A follower of `engine`, which has weights already, and what it places."""

    def call(job: Any) -> Future:
        done: Future = Future()
        try:
            done.set_result(job())
        except TransferError as error:
            done.set_exception(error)
        return done

    arrivals, progress = Arrivals(params), SimpleNamespace(span=lambda *_, **__: None)
    follower = WeightFollower(SimpleNamespace(call=call, engine=engine), arrivals, progress)  # type: ignore[arg-type]
    follower.version = engine.version
    return follower, arrivals


def arrive(follower: WeightFollower, step: int) -> None:
    asyncio.run(follower.load(VersionRef(Version(0, step), "device", "", "")))


LONG = Request(0, np.arange(3, dtype=np.int32), GenerationKey(0, 0), SamplingParams(15, ignore_eos=True))


@pytest.mark.parametrize("weight_swap", ["drain", "keep_kv"])
def test_two_versions_of_the_parameters_are_on_the_device_however_many_arrive(bench, model, weight_swap) -> None:
    b = bench(weight_swap=weight_swap)
    follower, arrivals = following(b.engine, model())
    arrive(follower, 2)
    b.add(LONG)
    b.steps(1)
    for step in (3, 4, 5, 6):
        arrive(follower, step)
        if step > 3:  # two arrive between the first two steps
            b.steps(1)
            assert b.engine.version == Version(0, 2 if weight_swap == "drain" else step)
    b.finish()
    assert arrivals.most == 2 and b.engine.version == Version(0, 6)


def test_requests_go_on_at_the_old_version_if_the_one_that_waited_is_dropped_and_no_other_comes(bench, model) -> None:
    b = bench(weight_swap="drain")
    follower, arrivals = following(b.engine, model())
    arrive(follower, 2)
    b.add(LONG)
    b.steps(1)
    arrive(follower, 3)
    b.add(replace(LONG, id=1))
    b.steps(1)
    arrivals.error = TransferError("not these")
    with pytest.raises(TransferError):
        arrive(follower, 4)
    b.finish()
    assert sorted(b.results) == [0, 1] and follower.version == b.engine.version == Version(0, 2)
    arrivals.error = None
    arrive(follower, 4)
    b.steps(1)
    assert b.engine.version == Version(0, 4)
