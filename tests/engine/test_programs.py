"""The programs by themselves: they can be lowered without a device's memory, and they keep their shardings."""

from __future__ import annotations

import dataclasses
import re

import jax
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import device, programs, requests
from jaxroll.models import families
from jaxroll.tools import hlo

SIZES = requests.Sizes(
    slots=16, max_tokens=4096, rows=2, inserts=4, buckets=(512, 2048), chunk=8, max_stops=4, shards=2
)


def test_programs_of_a_large_model_are_lowered_without_allocating():
    mesh, before = sharding.build(MeshConfig(data=2, tensor=4)), {id(array) for array in jax.live_arrays()}
    spec = dataclasses.replace(families.spec("qwen3_0p6b", compute_dtype="bfloat16"), layers=2)
    lowered = programs.lowered(spec, mesh, sharding.SAMPLER, SIZES)
    assert sum(array.nbytes for array in jax.live_arrays() if id(array) not in before) < 10**6
    assert sorted(lowered) == ["decode", "extend_2048", "extend_512", "insert", "prefill_2048", "prefill_512"]
    text = lowered["decode"].as_text()
    assert "stablehlo.while" in text and "sdy.mesh" in text


@pytest.mark.parametrize(
    ("truncation", "support"),
    [pytest.param(True, 0, marks=pytest.mark.soak), (False, 0), pytest.param(True, 8, marks=pytest.mark.soak)],
)
def test_only_engines_whose_requests_may_truncate_without_supports_sort_the_vocabulary(truncation, support):
    sizes = requests.Sizes(4, 32, 2, 2, (8,), 4, 4, truncation=truncation, support=support)
    spec = families.spec("nano", vocab_size=96)
    lowered = programs.lowered(spec, sharding.build(MeshConfig()), sharding.SAMPLER, sizes)
    sorting = {
        name
        for name, program in lowered.items()
        for operations in hlo.parsed(program.compile().as_text() or "")[0].values()
        for one in operations.values()
        if one.kind == "sort" and re.search(r"\b96\b", one.shape)
    }
    assert sorting == ({"decode", "insert"} if truncation and not support else set())
    assert {"decode", "insert"} <= lowered.keys()


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(), MeshConfig(data=2, tensor=2), pytest.param(MeshConfig(tensor=2), marks=pytest.mark.soak)],
    ids=str,
)
def test_state_keeps_its_shardings_through_every_program(bench, work, mesh):
    b = bench(mesh)
    b.run(work(0, 8))
    state = b.engine._device._state
    wanted = b.engine._device._programs.state
    agree = jax.tree.map(
        lambda a, w: a.sharding.is_equivalent_to(w.sharding, a.ndim) and a.dtype == w.dtype and a.shape == w.shape,
        state,
        wanted,
    )
    assert all(jax.tree.leaves(agree))
    keys = state.cache.keys[0]  # over slots and heads
    shards, heads, *page = keys.shape
    assert shards == mesh.data
    assert keys.addressable_shards[0].data.shape == (1, heads // mesh.tensor, *page)


def test_a_preempted_requests_pages_stay_divided_over_the_devices():
    """Neither program gathers them, and `save` returns to each device its own heads only.

    tests/tools/test_tpu_kernels.py states how much memory a TPU needs for it.
    """
    mesh = MeshConfig(data=2, tensor=4)
    spec = dataclasses.replace(families.spec("qwen3_0p6b", compute_dtype="bfloat16"), layers=2)
    sizes = dataclasses.replace(SIZES, shards=mesh.data, pages=64)
    built = programs.build(spec, sharding.build(mesh), sharding.SAMPLER, sizes)
    table = 2 * 2 * sizes.table * spec.kv_heads * sizes.page_tokens * spec.head_dim * 2  # K and V of two layers
    for name, lowered in programs.lowered_moves(built).items():
        compiled = lowered.compile()
        assert "all-gather" not in compiled.as_text(), name
        memory = compiled.memory_analysis()
        taken = memory.output_size_in_bytes - memory.alias_size_in_bytes
        if name == "save":
            assert 1.0 <= taken * mesh.tensor / table < 1.01


def test_engines_of_one_machine_compile_no_program_at_the_same_time(tmp_path):
    names = ["prefill", "extend", "decode"]
    first, second = (device.one_at_a_time(names, "tensor=2", str(tmp_path)) for _ in range(2))
    assert [next(first), next(second), next(first)] == ["prefill", "extend", "decode"]
    assert next(second) == "prefill"  # whose program is in the cache by now
    assert list(first) == ["extend"]
    assert list(second) == ["decode"]


def test_no_engine_waits_for_programs_that_are_compiled_or_differ(tmp_path):
    assert list(device.one_at_a_time(["decode"], "tensor=1", str(tmp_path))) == ["decode"]
    readers = [device.one_at_a_time(["decode"], "tensor=1", str(tmp_path)) for _ in range(3)]
    assert [next(reader) for reader in readers] == ["decode"] * 3
    assert next(device.one_at_a_time(["decode"], "tensor=2", str(tmp_path))) == "decode"


def test_an_engine_does_not_wait_for_ever_for_another(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "LOCK_LIMIT_S", 0.3)
    stopped = device.one_at_a_time(["decode"], "", str(tmp_path))
    assert next(stopped) == "decode"
    assert list(device.one_at_a_time(["decode", "insert"], "", str(tmp_path))) == ["insert", "decode"]


def test_an_engine_that_ends_leaves_its_program_to_the_others(tmp_path):
    ended = device.one_at_a_time(["decode", "insert"], "", str(tmp_path))
    assert next(ended) == "decode"
    ended.close()
    first, second = (device.one_at_a_time(["decode", "insert"], "", str(tmp_path)) for _ in range(2))
    assert [next(first), next(second)] == ["decode", "insert"]


def test_a_cache_that_cannot_be_written_is_no_reason_to_wait(tmp_path):
    (tmp_path / "file").touch()
    for folder in (None, str(tmp_path / "file")):
        first, second = (device.one_at_a_time(["decode", "insert"], "", folder) for _ in range(2))
        assert next(first) == "decode"
        assert list(second) == ["decode", "insert"]
