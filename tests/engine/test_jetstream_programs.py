"""The programs behind JetStream's verbs give the naive reference's tokens; google-jetstream is not needed for it."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine.requests import Request
from jaxroll.errors import ConfigError
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.serving.jetstream_proxy import NO_BOS, DecodeState, EngineSizes, SlotPrograms
from tests.harness import naive_engine

NEVER = 64  # no token of the nano model


class Slots:
    """The programs of four slots on a mesh, jitted as the adapter jits them."""

    def __init__(self, spec, params, mesh: MeshConfig, seed: int, eos_id: int = NEVER) -> None:
        serving = EngineSizes(slots=4, max_prefill=16, max_tokens=24, page_tokens=8, temperature=0.9, seed=seed)
        made = SlotPrograms(spec, sharding.Layout(sharding.build(mesh), sharding.SAMPLER), serving, eos_id)
        state = made.state_shardings()
        self.params = params
        self.prefill = jax.jit(made.prefill, out_shardings=made.prefix_shardings())
        self.insert = jax.jit(made.insert, out_shardings=state, donate_argnums=1)
        self.generate = jax.jit(made.generate, out_shardings=(state, None), donate_argnums=1)
        self.state: DecodeState = jax.jit(made.empty, out_shardings=state)()

    def put(self, slot: int, prompt: np.ndarray, key: GenerationKey, *, front: tuple[int, ...] = ()) -> None:
        padded = np.zeros(16, np.int32)
        padded[: len(front) + len(prompt)] = [*front, *prompt]
        identity = np.array([key.group, key.member, key.salt], np.int32)
        prefix = self.prefill(self.params, padded, np.int32(len(front) + len(prompt)), identity)
        self.state = self.insert(prefix, self.state, np.int32(slot))

    def steps(self, count: int) -> np.ndarray:
        """int32 [count, 4, 3]: token, whether it counts, how many."""
        rows = []
        for _ in range(count):
            self.state, packed = self.generate(self.params, self.state)
            rows.append(np.asarray(packed))
        return np.stack(rows)


@pytest.fixture
def expected(spec, model, seed):
    def make(prompt: np.ndarray, key: GenerationKey, count: int) -> naive_engine.Trace:
        return naive_engine.trace(spec, model(), Request(0, prompt, key, SamplingParams(count, 0.9)), seed)

    return make


def assert_equal(wanted: naive_engine.Trace, got: np.ndarray) -> None:
    differing = np.flatnonzero(wanted.tokens != got)
    assert not len(differing) or wanted.margins[differing[0]] < naive_engine.NEAR_TIE, (wanted, got)


@pytest.mark.soak
def test_slots_on_a_mesh_come_and_go_and_each_request_has_its_naive_tokens(spec, model, seed, expected) -> None:
    mesh = MeshConfig(data=2, tensor=2)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, spec.vocab_size, length).astype(np.int32) for length in (16, 5, 9, 2)]
    keys = [GenerationKey(4, member, 1) for member in range(4)]
    slots = Slots(spec, model(0, mesh), mesh, seed)
    slots.put(3, prompts[0], keys[0])
    first = slots.steps(3)
    slots.put(1, prompts[1], keys[1], front=(NO_BOS,))
    second = slots.steps(4)
    slots.put(3, prompts[3], keys[3])  # over a longer one
    slots.put(0, prompts[2], keys[2])
    third = slots.steps(6)

    seen = {0: [*first[:, 3], *second[:, 3]], 1: [*second[:, 1], *third[:, 1]], 2: third[:, 0], 3: third[:, 3]}
    for member, rows in seen.items():
        token, counts, number = np.array(rows).T
        assert counts.all()
        assert number.tolist() == list(range(1, len(rows) + 1))
        assert_equal(expected(prompts[member], keys[member], len(rows)), token)
    assert not first[:, [0, 1, 2], 1].any() and not third[:, 2, 1].any(), "an empty slot has no tokens"


@pytest.mark.soak
def test_a_slot_idles_after_the_end_of_sequence_and_when_it_is_full(spec, model, seed, expected) -> None:
    prompt, room = np.arange(16, dtype=np.int32), 8
    drawn = [expected(prompt, GenerationKey(0, member), room).tokens.tolist() for member in range(8)]
    eos = drawn[0][4]
    endless = next(member for member, tokens in enumerate(drawn) if eos not in tokens)
    slots = Slots(spec, model(), MeshConfig(), seed, eos_id=eos)
    slots.put(2, prompt, GenerationKey(0, 0))
    slots.put(0, prompt, GenerationKey(0, endless))
    rows = slots.steps(10)
    for slot, tokens, length in ((2, drawn[0], drawn[0].index(eos) + 1), (0, drawn[endless], room)):
        assert rows[:length, slot, 0].tolist() == tokens[:length]
        assert rows[:, slot, 1].tolist() == [1] * length + [0] * (10 - length)
    assert (np.asarray(slots.state.positions) == -1).all()


@pytest.mark.parametrize(("sizes", "key"), [((2, 24, 64), "max_prefill"), ((2, 32, 32), "max_tokens")])
def test_sizes_that_jetstream_cannot_use_are_refused(sizes, key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        partial(EngineSizes, *sizes)()
    assert refusal.value.key == key
