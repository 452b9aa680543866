"""A nano model, engines over it, and random work for them. Engines compile once a session and are shared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import programs
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request, Result, Sizes
from jaxroll.kernels.choice import Choice, EngineChoices
from jaxroll.models import cache as kv
from jaxroll.models import families, params, transformer
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version
from tests.harness import naive_engine

SPEC = families.spec("nano")
SEED = 11
ONE = MeshConfig()
V1, V2 = Version(0, 1), Version(0, 2)


class Ticks:
    """A clock that moves by one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@functools.cache
def weights(mesh: MeshConfig = ONE, which: int = 0, spec: families.ModelSpec = SPEC) -> params.Params:
    """Parameters number `which` on a mesh. They are scaled up, so that the model has opinions."""
    made = params.init(spec, jax.random.key(which), sharding.build(mesh), sharding.SAMPLER)
    return made | {"embed": made["embed"] * 12.0}


build_programs = programs.build


@functools.cache
def shared_programs(spec: families.ModelSpec, mesh: jax.sharding.Mesh, sizes: Sizes, attention: EngineChoices):
    """The programs of every engine of these sizes: a weight swap, for example, changes none of them."""
    return build_programs(spec, mesh, sharding.SAMPLER, sizes, attention)


def programs_of(
    spec: families.ModelSpec, mesh: jax.sharding.Mesh, rules: sharding.Rules, sizes: Sizes, how: EngineChoices
):
    """Shared by implementation: whether it was configured or chosen changes no program."""
    return shared_programs(spec, mesh, sizes, EngineChoices(Choice(how.prefill.name), Choice(how.paged.name)))


@functools.cache
def shared_engine(
    mesh: MeshConfig = ONE,
    decode: Callable[[list[int]], str] | None = None,
    spec: families.ModelSpec = SPEC,
    draft: int | None = None,
    **overrides: Any,
) -> Engine:
    """With a draft model in `spec`, its parameters are number `draft`."""
    sizes = {
        "slots": 4,
        "max_tokens": 32,
        "prefill_rows": 2,
        "prefill_buckets": (8, 16),
        "decode_chunk": 4,
        "seed": SEED,
        "truncation": True,
    }
    config = EngineConfig(**(sizes | overrides))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "build", programs_of)
        of_draft = None if draft is None or spec.draft is None else weights(mesh, draft, spec.draft)
        engine = Engine(
            spec, sharding.build(mesh), sharding.SAMPLER, config, decode=decode, clock=Ticks(), draft=of_draft
        )
    engine.warmup(None)  # programs compiled for zeros serve every test's weights without another compilation
    return engine


@pytest.fixture(scope="session", autouse=True)
def engines_can_be_forgotten(program_holders: list[Callable[[], None]]) -> None:
    """See `programs_are_forgotten`."""
    program_holders.extend((shared_engine.cache_clear, shared_programs.cache_clear))


@dataclass
class Bench:
    """An idle engine at version 0.1 and what it has delivered to this test."""

    engine: Engine
    mesh: MeshConfig
    results: dict[int, Result] = field(default_factory=dict)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request, functools.partial(self._take, request.id))

    def _take(self, id: int, result: Result) -> None:
        assert id not in self.results, f"request {id} was delivered twice"
        self.results[id] = result

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def finish(self, limit: int = 2000) -> dict[int, Result]:
        for _ in range(limit):
            if not self.engine.step():
                return self.results
        raise AssertionError(f"still working after {limit} steps: {self.engine.stats()}")

    def run(self, requests: Iterable[Request]) -> dict[int, Result]:
        self.add(*requests)
        return self.finish()

    def swap(self, version: Version, which: int) -> None:
        self.engine.swap(version, weights(self.mesh, which))


@pytest.fixture
def bench() -> Iterable[Callable[..., Bench]]:
    """Make a `Bench`; engines must be left idle and unspoilt."""
    made: list[Bench] = []

    def make(mesh: MeshConfig = ONE, **overrides) -> Bench:
        engine = shared_engine(mesh, **overrides)
        engine.swap(V1, weights(mesh))
        engine.step()
        made.append(Bench(engine, mesh))
        return made[-1]

    yield make
    for each in made:
        each.engine.resume()
        each.finish()
        assert each.engine.stats().compiles == 0


def random_requests(seed: int, count: int, *, group_size: int = 4, **fixed) -> list[Request]:
    """Groups with a shared prompt, all kinds of lengths, temperatures and stop tokens; truncation in some."""
    rng = np.random.default_rng(seed)
    made: list[Request] = []
    for index in range(count):
        if index % group_size == 0:
            prompt = rng.integers(0, SPEC.vocab_size, rng.integers(1, 17)).astype(np.int32)
        wanted = {
            "max_tokens": int(rng.integers(1, 16)),
            "temperature": float(rng.choice([0.0, 0.7, 1.0, 1.0, 1.3])),
            "top_k": int(rng.choice([0, 0, 0, 5])),
            "top_p": float(rng.choice([1.0, 1.0, 1.0, 0.8])),
            "stop_tokens": tuple(int(t) for t in rng.integers(0, SPEC.vocab_size, rng.integers(0, 4))),
        }
        key = GenerationKey(index // group_size, index % group_size, int(rng.integers(0, 3)))
        made.append(Request(index, prompt, key, SamplingParams(**(wanted | fixed))))
    return made


@pytest.fixture
def work() -> Callable[..., list[Request]]:
    return random_requests


@pytest.fixture
def spec() -> families.ModelSpec:
    return SPEC


@pytest.fixture
def seed() -> int:
    return SEED


@pytest.fixture
def model() -> Callable[..., params.Params]:
    """Parameters by number, on one device or a mesh."""
    return lambda which=0, mesh=ONE: weights(mesh, which)


# --- the slow cached loop: one request alone, a page of its own, weights as they were for each token

_LONGEST = 96
_decode = jax.jit(transformer.decode, static_argnums=0)


def _cached(weights: params.Params, text: np.ndarray) -> tuple[np.ndarray, kv.KVCache]:
    """The logits after `text`, and its keys and values in a cache of one page."""
    padded = np.zeros((1, _LONGEST), np.int32)
    padded[0, : len(text)] = text
    empty = kv.empty(SPEC, 1, 1, _LONGEST, sharding.build(ONE), sharding.SAMPLER)
    return _prefilled(weights, empty, padded, np.array([len(text)], np.int32))


@jax.jit
def _prefilled(weights: params.Params, empty: kv.KVCache, padded: jax.Array, length: jax.Array):
    zero = jnp.zeros(1, jnp.int32)
    logits, keys, values = transformer.prefill(SPEC, weights, padded, length)
    fill = lambda pools, new: tuple(  # noqa: E731
        kv.filled(pool, one, zero, zero[:, None], zero, length) for pool, one in zip(pools, new, strict=True)
    )
    return logits, kv.KVCache(fill(empty.keys, keys), fill(empty.values, values))


def slow_replay(
    request: Request, params_of_token: list[params.Params], *, reprefill: bool = False
) -> tuple[list[int], list[float]]:
    """Tokens and margins of `request` alone; with `reprefill` the cache is computed again where the weights change."""
    prompt, tokens, margins = request.prompt, [], []
    logits, cache = _cached(params_of_token[0], prompt)
    offset = request.first_position - len(prompt)
    for index, weights in enumerate(params_of_token):
        position = len(prompt) + index
        if tokens:
            if reprefill and weights is not params_of_token[index - 1]:
                _, cache = _cached(weights, np.concatenate([prompt, tokens[:-1]]).astype(np.int32))
            last = np.array(tokens[-1:], np.int32), np.array([position - 1], np.int32)
            logits, cache = _decode(SPEC, weights, cache, *last, np.zeros((1, 1), np.int32))
        text = np.concatenate([prompt, tokens]).astype(np.int32)
        token, _, margin = naive_engine.draw(request, SEED, np.asarray(logits)[0], position + offset, text)
        tokens.append(token)
        margins.append(margin)
    return tokens, margins


@pytest.fixture
def replayed() -> Callable[..., tuple[list[int], list[float]]]:
    return slow_replay


@pytest.fixture
def assert_replayed(model) -> Callable[..., None]:
    """Results equal the slow loop with the versions they recorded, up to near-ties; version k has weights k − 1."""

    def check(requests: Iterable[Request], results: dict[int, Result], *, reprefill: bool = False) -> None:
        tokens = ties = 0
        for request in requests:
            got = results[request.id].completion
            each = [model(run.version.step - 1) for run in got.versions for _ in range(run.count)]
            assert len(each) == len(got.tokens) == len(got.logprobs)
            wanted, margins = slow_replay(request, each, reprefill=reprefill)
            tokens += len(wanted)
            differing = np.flatnonzero(np.array(wanted) != got.tokens)
            if len(differing):
                assert margins[differing[0]] < naive_engine.NEAR_TIE, (request, wanted, got)
                ties += 1
        assert ties <= 1, f"{ties} near-ties in {tokens} tokens"

    return check


@pytest.fixture
def assert_naive(spec, seed, model) -> Callable[..., None]:
    """Tokens, log-probs and ends equal the naive reference with parameters `which`, up to one near-tie."""

    def check(requests: Iterable[Request], results: dict[int, Result], which: int = 0) -> None:
        ties = 0
        for request in requests:
            wanted, got = naive_engine.trace(spec, model(which), request, seed), results[request.id].completion
            shared = min(len(wanted.tokens), len(got.tokens))
            differing = np.flatnonzero(wanted.tokens[:shared] != got.tokens[:shared])
            if len(differing):
                assert wanted.margins[differing[0]] < naive_engine.NEAR_TIE, (request, wanted, got)
                ties += 1
                continue
            assert len(wanted.tokens) == len(got.tokens), request
            np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=1e-4, rtol=0)
            assert got.finish == ("stop" if got.tokens[-1] in request.params.stop_tokens else "length")
        assert ties <= 1

    return check
