"""An engine on several hosts: the others repeat what process 0 does, and the answers are those of one process."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxroll import sharding, wire
from jaxroll.config import MeshConfig
from jaxroll.engine import programs
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Result
from jaxroll.engine.work import FollowingDevice, LeadingDevice, Operation
from jaxroll.records import Version
from jaxroll.roles.build import following_device
from tests.engine import conftest
from tests.harness.processes import ran_together

_SCRIPT = Path(__file__).parents[1] / "harness/programs/engine_host.py"
ONE = MeshConfig()
# The sizes of `test_small_cache`, whose programs are used here as well.
SIZES = {"slots": 8, "max_tokens": 64, "page_tokens": 8, "prefill_rows": 2, "prefill_buckets": (8, 16),
         "decode_chunk": 4, "truncation": True, "cache_pages": 16}  # fmt: skip


@pytest.fixture
def config(seed: int, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setattr(programs, "build", lambda spec, mesh, _, *key: conftest.shared_programs(spec, mesh, *key))
    return EngineConfig(**SIZES, seed=seed)  # type: ignore[arg-type]


def test_a_follower_that_repeats_the_operations_has_the_state_of_process_0(spec, model, config, work):
    """Both are in this process. Requests lose their pages and get them back, and the weights change."""
    mesh, names = sharding.build(ONE), list[str]()
    follower: FollowingDevice = following_device(spec, mesh, sharding.SAMPLER, config)

    def send(operation: Operation) -> None:
        names.append(operation.what)
        follower.run(wire.decode(wire.encode(operation), Operation))

    make = functools.partial(LeadingDevice, send)
    engine, done = Engine(spec, mesh, sharding.SAMPLER, config, make_device=make), dict[int, Result]()
    requests = work(5, 24, max_tokens=40, stop_tokens=())
    for request in requests:
        engine.add(request, functools.partial(done.__setitem__, request.id))
    for version in (0, 1):
        follower.placed = model(version)
        engine.swap(Version(0, version + 1), model(version))
        for _ in range(12):
            engine.step()
    engine.abort(requests[-1].id, keep=False)
    while engine.step():
        pass
    assert sorted(done) == [request.id for request in requests[:-1]] and engine.stats().preemptions > 2
    assert {"prefill", "insert", "restore", "tables", "decode", "save", "load", "forget", "cancel"} <= {*names}
    assert names.count("hold") == engine.stats().weight_swaps == 2
    assert not follower._saved, "process 0 has all saved pages back, or needs them no more"
    mine, others = (jax.tree.leaves(device._state) for device in (engine._device, follower))
    for one, other in zip(mine, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.process
@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_processes_answer_as_one_does(tmp_path):
    found = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        ran_together(_SCRIPT, folder, processes, devices=2)
        found[processes] = {path.stem: dict(np.load(path)) for path in folder.glob("*.npz")}
    assert found[1].keys() == found[2].keys() == {"heads", "slots", "drafts"}
    for case, one in found[1].items():
        assert one.keys() == found[2][case].keys()
        for name, value in one.items():
            np.testing.assert_array_equal(value, found[2][case][name], f"{case}: {name}")
        assert len(one["versions 0"]) == 2, f"{case}: no swap in between"
    assert found[1]["heads"]["preemptions"] > 0 and found[1]["drafts"]["accepted"] > 0
