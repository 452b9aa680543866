"""Profiles of a role: the trace of the steps that are asked for, and the table that is read from it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from msgspec.structs import replace

from jaxroll import metrics
from jaxroll.errors import InfraError
from jaxroll.roles import weights
from jaxroll.roles.weights import Profiler
from jaxroll.run_paths import RunPaths
from jaxroll.sim import network
from jaxroll.store.messages import ProfileOrder
from jaxroll.tools import profile
from tests.harness.store.builders import configured
from tests.harness.virtual_run import VirtualRun


class Rows(list):
    """The rows of a profiler; `ended` is set by the last one of a profile."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def __call__(self, row: dict[str, Any]) -> None:
        assert metrics.checked_row(row) is not None
        self.append(row)
        if row["state"] != "started":
            self.ended.set()

    @property
    def states(self) -> list[tuple[str, int]]:
        return [(row["state"], row["steps"]) for row in self]


def test_the_steps_that_are_asked_for_are_in_the_trace_and_no_others(tmp_path: Path) -> None:
    rows = Rows()
    profiler = Profiler("learner", tmp_path / "profiles", rows)
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    value = step(jnp.ones((64, 64)))

    def steps(count: int) -> None:
        for _ in range(count):
            profiler.step()
            step(value).block_until_ready()

    steps(2)
    assert rows == [] and profiler.order is None
    order = ProfileOrder("learner", "a" * 32, 4, 600.0)
    profiler.ask(order)
    steps(2)
    profiler.ask(order)  # again, as the store repeats it
    steps(3)
    profiler.ask(order)
    steps(2)
    assert rows.states == [("started", 4), ("ended", 4)] and profiler.order is None
    (folder,) = (tmp_path / "profiles").iterdir()
    assert rows[-1]["folder"] == str(folder) and folder.name.startswith("learner-")
    found = profile.shares(folder, rows[-1]["seconds"], rows[-1]["steps"])
    (calls,) = {one.calls for one in found.calls if one.name.startswith("PjitFunction(<lambda>)")}
    assert calls in (4, 8), "JAX records a call once or twice"
    assert found.device_share is not None and 0 < found.device_share < 1
    assert list(found.devices) == ["cpu:0"] and all(one.seconds <= found.seconds for one in found.operations)
    text = "\n".join(profile.lines("learner", found))
    assert text.startswith("learner: 4 steps in ") and "idle: it waits for the host" in text


def test_a_role_goes_on_when_it_cannot_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    profiler = Profiler("sampler-0", tmp_path / "profiles", rows)
    jax.profiler.start_trace(tmp_path / "other")  # as another role of a colocated run does
    try:
        profiler.ask(ProfileOrder("sampler-0", "first", 4, 600.0))
        profiler.step()
    finally:
        jax.profiler.stop_trace()
    assert rows.states == [("failed", 0)] and "one profile" in rows[-1]["reason"].lower()
    full = SimpleNamespace(free=weights.FREE_MB * 2**20 - 1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: full)
        profiler.ask(ProfileOrder("sampler-0", "second", 4, 600.0))
        profiler.step()
    assert rows.states == [("failed", 0)] * 2 and "1023 MB are free" in rows[-1]["reason"]
    assert profiler.order is None and list((tmp_path / "profiles").iterdir()) == []


def test_a_trace_ends_with_its_time_or_its_role_though_steps_are_missing(tmp_path: Path) -> None:
    rows = Rows()
    profiler = Profiler("evaluator", tmp_path, rows)
    profiler.ask(ProfileOrder("evaluator", "first", 1000, 0.2))
    profiler.step()
    profiler.step()
    assert rows.ended.wait(60.0)
    assert rows.states == [("started", 1000), ("ended", 1)]
    profiler.ask(ProfileOrder("evaluator", "second", 1000, 600.0))
    profiler.step()
    profiler.close()
    assert rows.states[2:] == [("started", 1000), ("ended", 0)]


def test_a_withdrawn_order_ends_its_trace_or_is_forgotten(tmp_path: Path) -> None:
    rows = Rows()
    profiler = Profiler("learner", tmp_path, rows)
    waits, runs = (ProfileOrder("learner", name, 1000, 600.0) for name in ("first", "second"))
    profiler.ask(waits)
    profiler.ask(replace(runs, withdrawn=True))  # of another command
    assert profiler.order is not None
    profiler.ask(replace(waits, withdrawn=True))
    assert profiler.order is None
    profiler.ask(runs)
    profiler.step()
    profiler.ask(replace(runs, withdrawn=True))
    assert rows.ended.wait(60.0)
    profiler.ask(replace(runs, withdrawn=True))  # again, as the store repeats it
    assert rows.states == [("started", 1000), ("ended", 0)] and profiler.order is None


@pytest.mark.parametrize("ended_by", ["withdrawal", "time"])
def test_what_ends_a_trace_late_ends_no_later_one(
    ended_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[threading.Thread] = []

    def begins_late(thread: threading.Thread) -> None:
        late.append(thread)

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    rows = Rows()
    profiler = Profiler("learner", tmp_path, rows)
    first, second = ProfileOrder("learner", "first", 1, 600.0), ProfileOrder("learner", "second", 1000, 600.0)
    with monkeypatch.context() as patched:  # the thread that ends the trace runs after the second one has begun
        kind = "Thread" if ended_by == "withdrawal" else "Timer"
        patched.setattr(getattr(weights.threading, kind), "start", begins_late)
        profiler.ask(first)
        profiler.step()
        if ended_by == "withdrawal":
            profiler.ask(replace(first, withdrawn=True))
        profiler.step()
        profiler.ask(second)
    profiler.step()
    assert rows.states == [("started", 1), ("ended", 1), ("started", 1000)]
    late_one = late[-1]
    if isinstance(late_one, threading.Timer):
        late_one.function(*late_one.args, **late_one.kwargs)
    else:
        late_one.run()
    assert rows.states[3:] == [] and profiler.order == second
    profiler.close()
    assert rows.states[3:] == [("ended", 0)]


def test_an_order_that_comes_while_a_trace_is_written_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler's loop gets it with every reply of the store; if it waited for the JAX thread, leases would end."""
    rows, begun, written = Rows(), threading.Event(), threading.Event()

    def write() -> None:
        begun.set()
        assert written.wait(60.0)

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", write)
    profiler, order = Profiler("sampler-0", tmp_path, rows), ProfileOrder("sampler-0", "first", 1, 600.0)
    profiler.ask(order)
    profiler.step()
    writes, asks = (threading.Thread(target=job) for job in (profiler.step, lambda: profiler.ask(order)))
    writes.start()
    assert begun.wait(60.0)
    asks.start()
    asks.join(5.0)
    waits = asks.is_alive()
    written.set()
    writes.join()
    asks.join()
    assert not waits and rows.states == [("started", 1), ("ended", 1)] and profiler.order is None


def test_a_trace_ends_when_a_person_ends_the_run(tmp_path: Path) -> None:
    async def acts() -> None:
        async with VirtualRun(configured(steps=1000), tmp_path) as at:
            at.sampler()
            learner, person = at.learner(), await at.client("supervisor", "profile")
            states = lambda: [row["state"] for row in at.store.metrics.written() if row["kind"] == "profile"]  # noqa: E731
            while at.store.keeper.state.published is None or at.store.keeper.state.published.version.step < 3:
                await asyncio.sleep(0.5)
            await person.profile(ProfileOrder("learner", "first", 1000, 300.0))
            while not states():
                await asyncio.sleep(0.5)
            await person.close_run("a person ended it")
            await asyncio.gather(learner, return_exceptions=True)
            assert states() == ["started", "ended"]

    network.run(acts(), 1000.0)


def test_the_learner_of_a_run_records_steps_for_the_command(tmp_path: Path) -> None:
    """In virtual time: a trace is cut off by the end of the run, and a sampler without steps is not awaited."""

    async def acts() -> None:
        async with VirtualRun(configured(steps=20), tmp_path) as at:
            at.sampler()
            learner, person = at.learner(), await at.client("supervisor", "profile")
            while at.store.keeper.state.published is None or at.store.keeper.state.published.version.step < 3:
                await asyncio.sleep(0.5)
            seen = 0

            def read() -> list[metrics.Row]:
                nonlocal seen
                written = list(at.store.metrics.written())
                before, seen = seen, len(written)
                return written[before:]

            row = await profile.recorded(person, read, ProfileOrder("learner", "first", 4, 300.0))
            assert row["steps"] == 4 and list(Path(row["folder"]).rglob("*.trace.json.gz"))
            assert Path(row["folder"]).parent == RunPaths(tmp_path).profiles
            with pytest.raises(InfraError, match=r"sampler-0 began no step within 2 s"):
                await profile.recorded(person, read, ProfileOrder("sampler-0", "second", 4, 2.0))
            row = await profile.recorded(person, read, ProfileOrder("learner", "third", 1000, 300.0))
            assert 0 < row["steps"] < 20 and await learner == 0

    network.run(acts(), 1000.0)
