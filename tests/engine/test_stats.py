"""The engine's statistics: occupancy, counters, compiles, times; and its transfers between host and device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.engine import device, requests
from jaxroll.engine.requests import Request
from jaxroll.engine.sequence import Latencies
from jaxroll.protocols import GenerationKey, SamplingParams

MANY = {"slots": 16, "decode_chunk": 8, "prefill_buckets": (8,)}


def answers(count: int, seed: int = 0) -> list[Request]:
    """Groups of eight with answers of 4 to 11 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, 12, count)
    prompts = rng.integers(0, 64, (count, 8)).astype(np.int32)
    return [
        Request(i, prompts[i // 8], GenerationKey(i // 8, i % 8), SamplingParams(int(n))) for i, n in enumerate(lengths)
    ]


def test_slots_are_busy_while_work_waits_although_dispatches_are_long(bench):
    b = bench(**MANY)
    before = b.engine.stats()
    b.run(answers(300))
    after = b.engine.stats()
    busy = after.slot_steps_busy_while_waiting - before.slot_steps_busy_while_waiting
    total = after.slot_steps_total_while_waiting - before.slot_steps_total_while_waiting
    assert total > 1000 and busy / total >= 0.9
    assert after.slot_occupancy >= 0.9
    # At most 2 of 16 slots, the threshold of a refill, may be idle in the step before it.
    assert after.dispatches - before.dispatches < (after.decode_steps - before.decode_steps)


def test_counters_add_up(bench):
    b = bench()
    before = b.engine.stats()
    results = b.run(answers(20))
    b.engine.abort(0, keep=True)
    b.add(*(dataclasses.replace(request, id=100 + request.id) for request in answers(3, seed=1)))
    b.steps(1)
    b.engine.abort(102, keep=False)
    b.finish()
    after = b.engine.stats()
    change = {
        f.name: getattr(after, f.name) - getattr(before, f.name)
        for f in dataclasses.fields(after)
        if isinstance(getattr(after, f.name), int)
    }
    assert (change["started"], change["finished"], change["aborted"]) == (23, 22, 1)
    firsts = change["started"]
    assert change["tokens_decoded"] == change["slot_steps_busy"] + firsts
    assert change["slot_steps_total"] == 4 * change["decode_steps"]
    assert change["prefill_rows_total"] == 2 * change["prefills"]
    assert change["prefills"] <= change["prefill_rows"] <= change["prefill_rows_total"]
    assert (after.active, after.queue_depth) == (0, 0)
    assert len(results) == 22


def test_a_group_is_prefilled_once(bench):
    b = bench(**MANY)
    before = b.engine.stats()
    b.run(dataclasses.replace(request, prompt=np.arange(5, dtype=np.int32)) for request in answers(4))
    after = b.engine.stats()
    assert (after.prefills - before.prefills, after.prefill_rows - before.prefill_rows) == (1, 1)


def test_nothing_is_compiled_after_warm_up(bench, work):
    """Counted by JAX, over arrivals, buckets, aborts, weight swaps and suspensions."""
    b = bench()
    b.run(work(0, 4))
    compiled: list[str] = []
    listen = lambda event, *_, **__: compiled.append(event) if "compil" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        b.add(*(dataclasses.replace(request, id=100 + request.id) for request in work(1, 24)))
        b.steps(3)
        b.engine.abort(101, keep=True)
        b.engine.suspend()
        b.engine.resume()
        b.engine.swap(b.engine.version, b.engine._params)
        b.finish()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == [] and b.engine.stats().compiles == 0


def test_one_array_comes_back_per_dispatch_and_one_goes_out_per_prefill(bench, monkeypatch):
    b, fetched = bench(), []

    class CountingNumpy:
        def __getattr__(self, name):
            return getattr(np, name)

        def asarray(self, array):
            fetched.append(type(array))
            return np.asarray(array)

    monkeypatch.setattr(device, "np", CountingNumpy())
    before = b.engine.stats()
    b.run(answers(20))
    assert len(fetched) == b.engine.stats().dispatches - before.dispatches


def test_latencies_are_those_of_the_clock(bench, monkeypatch):
    """Every look at the clock takes a second here: a lone request's first token comes after a few of them."""
    b = bench()
    monkeypatch.setattr(b.engine, "latencies", Latencies())
    for request in answers(3):
        b.run([request])
    figures = b.engine.latencies.percentiles()
    assert 1 <= figures["ttft_p50_s"] <= figures["ttft_p99_s"]
    assert 1 <= figures["itl_p50_s"] <= figures["itl_p99_s"] <= 10
    assert 0 < b.engine.stats().host_share < 1


def test_results_tell_when_they_were_made(bench):
    b = bench()
    b.add(*answers(6))
    b.steps(1)
    results = b.finish()
    starts = [results[id].t_start_s for id in range(6)]
    assert all(result.t_start_s < result.t_end_s for result in results.values())
    assert starts[:4] == [starts[0]] * 4  # the first four found free slots together
    assert all(start > starts[0] for start in starts[4:])
    first_end = min(result.t_end_s for result in results.values())
    assert min(starts[4:]) > first_end


def test_warm_up_reports_its_programs(bench, model):
    lines: list[str] = []
    bench().engine.warmup(model(), lines.append)
    assert [line.split(",")[0] for line in lines if line.startswith("compiled")] == [
        "compiled prefill of 8 tokens",
        "compiled prefill of 16 tokens",
        "compiled extend of 8 tokens",
        "compiled extend of 16 tokens",
        "compiled decode of 4 slots",
        "compiled insert",
    ]


SIZES = requests.Sizes(
    slots=5, max_tokens=32, rows=2, inserts=3, buckets=(4,), chunk=2, max_stops=2, page_tokens=8, logit_rows=3
)
REQUEST = Request(
    9, np.array([7, 8, 9], np.int32), GenerationKey(3, 1, 2), SamplingParams(6, 0.5, 4, 0.9, (11,)), position=10
)


def test_a_prefill_is_packed_and_unpacked():
    rows = [requests.PrefillRow(np.array([7, 8, 9]), 16, 1, [5, 6, 2], 2)]
    packed = requests.pack_prefill(4, rows, SIZES)
    assert packed.shape == SIZES.prefill_shape(4) and packed.dtype == np.int32
    batch = requests.unpack_prefill(jnp.asarray(packed), 4)
    assert batch.tokens.tolist() == [[7, 8, 9, 0], [0, 0, 0, 0]] and batch.lengths.tolist() == [3, 0]
    assert (batch.starts[0], batch.shards[0]) == (16, 1)
    assert batch.tables.tolist() == [[5, 6, 2, 0], [0, 0, 0, 0]]
    assert batch.logit_rows.tolist() == [2, 3]  # row 3 of 3: dropped


def test_a_request_is_packed_with_where_it_starts():
    packed = requests.pack_inserts([(4, 2, (0, 6, 7), 3, REQUEST)], SIZES)
    assert packed.shape == SIZES.insert_shape and packed.dtype == np.int32
    assert packed[:, 0].tolist() == [4, 5, 5]  # slot 5 of 5: dropped
    assert packed[0, 1:6].tolist() == [2, 0, 6, 7, 3]
    assert packed[1:, 4].tolist() == [SIZES.shard_pages] * 2  # copies to no page
    row = packed[0, 6:]
    assert row[:6].tolist() == [3, 1, 2, 7, 6, 4] and row[requests.STOPS :].tolist() == [11, -1]
    assert row[6:8].view(np.float32).tolist() == [np.float32(0.5), np.float32(0.9)]


def test_a_restored_request_is_packed_with_its_sampled_tokens():
    packed = requests.pack_restores([(4, np.array([9, 9, 9, 9, 17]), -0.25, 12, REQUEST)], SIZES)
    assert packed[0, :2].tolist() == [4, 17] and packed[0, 3:5].tolist() == [12, 5]
    assert packed[0, 2:3].view(np.float32).tolist() == [-0.25] and packed[0, 6:9].tolist() == [3, 1, 2]
