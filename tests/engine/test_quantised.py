"""Engines with quantized pages and weights: the policy of the rule, fewer bytes, the same tokens when pages move."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import device, programs
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request, Result
from jaxroll.errors import ConfigError
from jaxroll.models import families, params, transformer
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version
from tests.models.test_family_goldens import golden

ONE, LONGEST = MeshConfig(), 64
# Prompts in several chunks, and fewer pages than the requests need together.
SIZES: dict[str, Any] = {
    "slots": 4, "max_tokens": LONGEST, "prefill_rows": 2, "prefill_buckets": (8,), "decode_chunk": 4, "seed": 5,
    "page_tokens": 4, "cache_pages": 40,
}  # fmt: skip
NUMBERS = {"int8": (127.0, jnp.int8), "fp8": (448.0, jnp.float8_e4m3fn)}
MOST = {"int8": 0.1, "fp8": 0.4}  # difference of a log-prob from that of the model itself, at most


# --- the rule, written again; and whole rows of a model that follows it


def rounded(x: Any, dtype: str, axes: tuple[int, ...]) -> jax.Array:
    """`x` after it was stored with a scale for all numbers along `axes`."""
    if not dtype:
        return x
    most, kind = NUMBERS[dtype]
    scale = jnp.max(jnp.abs(x), axes, keepdims=True) / most
    stored = x / scale
    return (jnp.rint(stored) if dtype == "int8" else stored).astype(kind).astype(jnp.float32) * scale


def rounded_weights(values: params.Params, dtype: str) -> params.Params:
    matrices = {"q": (0,), "k": (0,), "v": (0,), "o": (0, 1), "gate": (0,), "up": (0,), "down": (0,)}
    axes = lambda name: matrices.get(name.split(".")[-1], ())  # noqa: E731
    return {name: rounded(leaf, dtype, axes(name)) if axes(name) else leaf for name, leaf in values.items()}


@functools.cache
def model(variant: str = "nano") -> tuple[ModelSpec, params.Params]:
    """A model whose weights are so large that it has opinions."""
    if variant != "nano":
        return golden(variant)[:2]
    spec = families.spec("nano")
    made = params.init(spec, jax.random.key(0), sharding.build(ONE), sharding.SAMPLER)
    return spec, made | {"embed": made["embed"] * 12.0}


@functools.cache
def whole_log_probs(variant: str, kv_dtype: str) -> Any:
    """The log-probs of whole rows as a function of weights and tokens; every query sees rounded keys and values."""
    spec, original = model(variant)[0], transformer.placed.rows

    def rows(*args: Any) -> Any:
        attend = original(*args)
        return lambda q, k, v: attend(q, rounded(k, kv_dtype, (3,)), rounded(v, kv_dtype, (3,)))

    @jax.jit
    def found(values: params.Params, texts: jax.Array) -> jax.Array:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformer.placed, "rows", rows)
            at, one_segment = jnp.arange(LONGEST, dtype=jnp.int32), jnp.ones(texts.shape, jnp.int32)
            hidden = transformer.forward(spec, values, texts, jnp.broadcast_to(at, texts.shape), one_segment)
        return jax.nn.log_softmax(transformer.logits(spec, values, hidden))

    return found


def log_probs(
    variant: str, requests: list[Request], results: dict[int, Result], kv_dtype: str, weight_dtype: str
) -> np.ndarray:
    """The log-probs of all sampled tokens, by whole rows."""
    texts = np.zeros((len(requests), LONGEST), np.int32)
    for row, one in zip(texts, requests, strict=True):
        tokens = np.concatenate([one.prompt, results[one.id].completion.tokens])
        row[: len(tokens)] = tokens
    every = np.asarray(whole_log_probs(variant, kv_dtype)(rounded_weights(model(variant)[1], weight_dtype), texts))
    each = []
    for row, one in zip(every, requests, strict=True):
        drawn = results[one.id].completion.tokens
        each.append(row[len(one.prompt) - 1 + np.arange(len(drawn)), drawn])
    return np.concatenate(each)


# --- engines


@functools.cache
def engine_of(variant: str = "nano", mesh: MeshConfig = ONE, **overrides: Any) -> Engine:
    spec, values = model(variant)
    engine = Engine(spec, sharding.build(mesh), sharding.SAMPLER, EngineConfig(**(SIZES | overrides)))
    where = params.shardings(spec, sharding.build(mesh), sharding.SAMPLER)
    engine.swap(Version(0, 1), {name: jax.device_put(leaf, where[name]) for name, leaf in values.items()})
    return engine


@pytest.fixture(scope="session", autouse=True)
def engines_can_be_forgotten(program_holders: list[Any]) -> None:
    program_holders.extend((engine_of.cache_clear, whole_log_probs.cache_clear))


def work(first_id: int = 0) -> list[Request]:
    """Groups of three with a prompt in common, sampled or greedy, whose conversations go on for a second turn."""
    rng, made = np.random.default_rng(3), []
    prompts = [rng.integers(0, 30, 5 + 6 * group).astype(np.int32) for group in range(3)]
    for index in range(9):
        wanted = SamplingParams(int(rng.integers(38, 62 - len(prompts[-1]))), temperature=float(index % 3 > 0))
        made.append(Request(first_id + index, prompts[index // 3], GenerationKey(index // 3, index % 3), wanted))
    return made


def played(engine: Engine, requests: Iterable[Request]) -> dict[int, Result]:
    results: dict[int, Result] = {}
    for one in requests:
        engine.add(one, functools.partial(results.__setitem__, one.id))
    while engine.step():
        pass
    return results


def sampled(results: dict[int, Result], requests: list[Request]) -> np.ndarray:
    return np.concatenate([results[one.id].completion.logprobs for one in requests])


MODES = [("int8", "fp8"), pytest.param("fp8", "int8", marks=pytest.mark.soak)]


@pytest.mark.parametrize(("kv_dtype", "weight_dtype"), MODES)
def test_stored_log_probs_are_those_of_the_quantised_policy(kv_dtype: str, weight_dtype: str) -> None:
    """With shared prompts, prompts in chunks, and preemption; the model itself has others, by little."""
    engine, requests = engine_of(kv_dtype=kv_dtype, weight_dtype=weight_dtype), work()
    before = engine.stats().preemptions
    results = played(engine, requests)
    assert engine.stats().preemptions > before and engine.stats().prefix_hits > 0
    got, apart = sampled(results, requests), functools.partial(log_probs, "nano", requests, results)
    off = np.abs(got - apart(kv_dtype, weight_dtype))
    # The last bit of a product decides how a number on a boundary is rounded, so a few tokens see other pages.
    assert np.mean(off < 2e-5) > 0.9 and off.max() < 0.02
    for wrong in (("", weight_dtype), (kv_dtype, "")):
        assert np.median(np.abs(got - apart(*wrong))) > 1e-4
    plain = np.abs(got - apart("", ""))
    assert 1e-3 < plain.mean() < 0.05 and plain.max() < MOST["fp8"]


@pytest.mark.parametrize(("kv_dtype", "weight_dtype"), MODES)
def test_tokens_do_not_depend_on_preemption_and_shared_prompts(kv_dtype: str, weight_dtype: str) -> None:
    """Bit for bit: one request at a time in an engine that forgets its prompts, and all at once."""
    engine, many = engine_of(kv_dtype=kv_dtype, weight_dtype=weight_dtype), work()
    together = played(engine, many)
    alone: dict[int, Result] = {}
    for one in many:
        engine.swap(Version(0, 2 + one.id), model()[1])  # a prefix of an earlier version is not used
        alone |= played(engine, [one])
    for one in many:
        got, wanted = together[one.id].completion, alone[one.id].completion
        assert np.array_equal(got.tokens, wanted.tokens) and np.array_equal(got.logprobs, wanted.logprobs)


# --- memory, and refusals


def state_of(**overrides: Any) -> tuple[Any, Any]:
    """The abstract cache of an engine, and its programs."""
    config = EngineConfig(**(SIZES | {"paged_attention": "xla"} | overrides))
    spec, mesh = config.model(families.spec("tiny", compute_dtype="bfloat16")), sharding.build(ONE)
    chosen, sizes = programs.kernels_and_sizes(spec, mesh, config.sizes(1), paged="xla")
    return spec, programs.build(spec, mesh, sharding.SAMPLER, sizes, chosen)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_pages_and_weights_take_a_byte_a_number_and_a_scale(dtype: str, scan_layers: bool) -> None:
    spec, plain = state_of(scan_layers=scan_layers)
    _, small = state_of(scan_layers=scan_layers, kv_dtype=dtype, weight_dtype=dtype)
    bytes_of, H = sharding.device_bytes, spec.head_dim
    assert bytes_of(small.state.cache) * 2 * H == bytes_of(plain.state.cache) * (H + 4)
    matrices = spec.layers * (2 * spec.width * (spec.heads + spec.kv_heads) * H + 3 * spec.width * spec.hidden)
    outputs = spec.layers * ((spec.heads + 2 * spec.kv_heads) * H + 2 * spec.width + 2 * spec.hidden)
    assert bytes_of(plain.held) - bytes_of(small.held) == matrices - 4 * outputs
    share = device.memory_share(spec, sharding.build(ONE), sharding.SAMPLER, 10**9, 0.9)
    assert share.parameters == 2 * bytes_of(plain.held), "the versions of an engine without quantized weights"
    share = device.memory_share(replace(spec, weight_dtype=dtype), *(sharding.build(ONE), sharding.SAMPLER, 10**9, 0.9))
    assert share.parameters == bytes_of(plain.held) + bytes_of(small.held)


def test_a_decode_step_of_layers_in_a_loop_has_one_wide_layer_at_most() -> None:
    """Without the loop over layers, the CPU's compiler keeps all wide weights during a dispatch."""
    base = replace(families.spec("nano"), layers=8, width=64, hidden=512)
    config = EngineConfig(**(SIZES | {"paged_attention": "xla", "weight_dtype": "int8", "scan_layers": True}))
    spec, mesh = config.model(base), sharding.build(ONE)
    chosen, sizes = programs.kernels_and_sizes(spec, mesh, config.sizes(1), paged="xla")
    compiled = programs.lowered(spec, mesh, sharding.SAMPLER, sizes, chosen)["decode"].compile()
    layer = 4 * (3 * spec.width * spec.hidden + 2 * spec.width * (spec.heads + spec.kv_heads) * spec.head_dim)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * layer


def test_what_cannot_be_quantised_is_refused() -> None:
    mixture, mesh = golden("qwen3_moe")[0], sharding.build(ONE)
    with pytest.raises(ConfigError, match="has experts") as caught:
        Engine(mixture, mesh, sharding.SAMPLER, EngineConfig(**SIZES, weight_dtype="int8"))
    assert (caught.value.key, caught.value.value) == ("sampler.weight_dtype", "int8")
    with pytest.raises(ConfigError, match="does not read quantized pages") as caught:
        Engine(model()[0], mesh, sharding.SAMPLER, EngineConfig(**SIZES, kv_dtype="fp8", paged_attention="dense"))
    assert (caught.value.key, caught.value.value) == ("sampler.paged_attention", "dense")
    chosen = engine_of(kv_dtype="int8", weight_dtype="fp8").attention.paged
    assert str(chosen) == "xla (no dense: it does not read quantized pages, and sampler.kv_dtype is int8)"


# --- the other forms of an engine


@pytest.mark.soak
@pytest.mark.parametrize(
    ("variant", "overrides"),
    [
        ("nano", {"scan_layers": True}),
        ("nano", {"draft_tokens": 2}),
        ("nano", {"mesh": MeshConfig(data=2), "cache_pages": 80}),
        ("nano", {"mesh": MeshConfig(tensor=2)}),
        ("gemma3_text", {"cache_pages": 60, "page_tokens": 2}),
        ("gemma3_text", {"cache_pages": 120, "page_tokens": 2, "scan_layers": True, "mesh": MeshConfig(data=2)}),
        ("qwen3_moe", {"weight_dtype": ""}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_every_form_of_an_engine_has_the_quantised_policy(variant: str, overrides: dict[str, Any], dtype: str) -> None:
    how = {"kv_dtype": dtype, "weight_dtype": dtype} | overrides
    engine, requests = engine_of(variant, **how), work()
    results = played(engine, requests)
    got = sampled(results, requests)
    off = np.abs(got - log_probs(variant, requests, results, dtype, how["weight_dtype"]))
    plain = np.abs(got - log_probs(variant, requests, results, "", ""))
    assert np.median(off) < 1e-5 and off.mean() < 0.05 * plain.mean() and plain.mean() > 1e-3, (off.mean(), off.max())
