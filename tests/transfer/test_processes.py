"""Transfers between real processes: exact on unequal meshes, and a publisher that is killed in the middle."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import msgspec
import numpy as np
import psutil
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxroll import wire
from jaxroll.errors import TransferError
from jaxroll.records import Version, VersionRef
from jaxroll.transfer.channel_device import take

pytestmark = pytest.mark.process
_SCRIPT = Path(__file__).parents[1] / "harness/programs/weight_publisher.py"
_START_S = 60.0


class Learner:
    """The child process, spoken to by lines."""

    def __init__(self, channel: str, folder: Path, kind: str) -> None:
        self._log = (folder / "learner.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), channel, str(folder), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(_SCRIPT.parents[2]),
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            },
        )

    def publish(self, step: int) -> VersionRef:
        self._process.stdin.write(f"{step}\n")
        self._process.stdin.flush()
        watchdog = threading.Timer(_START_S, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line:
            self._log.seek(0)
            pytest.fail(f"the learner process died or was silent for {_START_S} s:\n{self._log.read()[-3000:]}")
        return wire.decode(bytes.fromhex(line), VersionRef)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def close(self) -> int:
        self._process.stdin.close()
        try:
            code = self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._process.stdout.close()
            self._log.close()
        return code


@pytest.fixture
def script() -> ModuleType:
    """The child's script as a module here, for the values it publishes."""
    spec = importlib.util.spec_from_file_location("learner_process", _SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    learners: list[Learner] = []

    def one(channel: str, kind: str) -> Learner:
        learners.append(Learner(channel, tmp_path, kind))
        return learners[-1]

    yield one
    for learner in learners:
        learner.close()


TARGETS = [
    ((1, 1, 2), (None, "tensor")),
    ((1, 1, 8), (None, "tensor")),
    ((2, 2, 2), ("fsdp", "tensor")),
    ((1, 1, 1), ()),
]


def _target(kit, dims: tuple, spec: tuple, values: dict[str, np.ndarray]) -> dict[str, NamedSharding]:
    mesh = kit.mesh(*dims)
    return {name: NamedSharding(mesh, PartitionSpec(*spec[: value.ndim])) for name, value in values.items()}


def _shapes(values: dict[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in values.items()}


@pytest.mark.parametrize("channel", ["tcp", "shm", pytest.param("tensorstore", marks=pytest.mark.soak)])
def test_a_learner_of_fsdp_2_feeds_samplers_of_any_mesh(kit, script, start, channel: str) -> None:
    learner = start(channel, "small")
    for step in range(2):
        announced, values = learner.publish(step), script.values("small", step)
        assert announced.version == Version(0, step)
        for dims, spec in TARGETS:
            target = _target(kit, dims, spec, values)
            if dims == (1, 1, 8):  # q is [32, 4, 8]: its second axis does not divide by 8
                target["layers.00.q"] = NamedSharding(kit.mesh(*dims), PartitionSpec(None, None, "tensor"))
            got = kit.receiver().fetch(announced, target, _shapes(values)).place()
            for name, value in values.items():
                assert got[name].sharding == target[name]
                assert np.asarray(got[name]).tobytes() == value.tobytes()
    assert learner.close() == 0


def test_the_manifest_does_not_depend_on_the_process(kit, script, start) -> None:
    """The same parameters on the same mesh have the same digest from any publisher."""
    announced, values = start("tcp", "small").publish(7), script.values("small", 7)
    ours = _target(kit, (1, 2, 1), ("fsdp",), values)
    taken = take(Version(0, 7), {name: jax.device_put(value, ours[name]) for name, value in values.items()}, "float32")
    assert taken.manifest_digest == announced.manifest_digest


def test_a_learner_killed_in_the_middle_is_an_error_within_the_deadline(kit, script, start) -> None:
    learner = start("tcp", "big")
    announced, values = learner.publish(1), script.values("big", 1)
    middle = kit.middle(announced.address, stall_at=20 << 20)
    target = _target(kit, (1, 1, 2), (None, "tensor"), values)
    failed: list[BaseException] = []

    def fetch() -> None:
        through = msgspec.structs.replace(announced, address=middle.address)
        try:
            kit.receiver(deadline_s=3600).fetch(through, target, _shapes(values))
        except TransferError as error:
            failed.append(error)

    fetching = threading.Thread(target=fetch)
    fetching.start()
    give_up_s = time.monotonic() + 20
    while middle.passed_bytes < 19 << 20 and time.monotonic() < give_up_s:
        fetching.join(0.01)
    assert 19 << 20 <= middle.passed_bytes <= 20 << 20  # of 64 MiB
    assert fetching.is_alive()
    learner.kill()
    middle.go_on.set()  # the rest of what the dead learner's socket held, then its end
    fetching.join(60)
    assert not fetching.is_alive(), "it waited for its own deadline"
    (error,) = failed
    assert "broke off" in str(error)
    assert not _connections_to(middle.address)
    with pytest.raises(TransferError, match="no parameters from"):
        kit.receiver(deadline_s=5).fetch(announced, target, _shapes(values))


def _connections_to(address: str) -> list:
    port = int(address.rpartition(":")[2])
    return [c for c in psutil.Process().net_connections(kind="tcp") if c.raddr and c.raddr.port == port]


def test_a_publisher_killed_while_writing_files_leaves_the_version_before(kit, script, start, tmp_path: Path) -> None:
    learner = start("tensorstore", "big")
    first, values = learner.publish(1), script.values("big", 1)
    learner._process.stdin.write("2\n")
    learner._process.stdin.flush()
    chunk = tmp_path / "transfer" / "0.2" / "w"
    give_up_s = time.monotonic() + 30
    while not chunk.exists() and time.monotonic() < give_up_s:
        time.sleep(0.001)  # a poll for the child's files, with a deadline
    assert chunk.exists()
    learner.kill()
    assert not (tmp_path / "transfer" / "0.2" / "manifest.msgpack").exists()

    target = _target(kit, (1, 1, 2), (None, "tensor"), values)
    got = kit.receiver().fetch(first, target, _shapes(values)).place()
    assert np.asarray(got["w"]).tobytes() == values["w"].tobytes()

    again = start("tensorstore", "big")
    second = again.publish(2)
    got = kit.receiver().fetch(second, target, _shapes(values)).place()
    assert np.asarray(got["w"]).tobytes() == script.values("big", 2)["w"].tobytes()
    assert sorted(path.name for path in (tmp_path / "transfer").iterdir()) == ["0.1", "0.2"]


@pytest.mark.soak
def test_shared_memory_outlives_a_killed_learner_until_its_successor_publishes(kit, script, start) -> None:
    learner = start("shm", "big")
    first, values = learner.publish(1), script.values("big", 1)
    target = _target(kit, (1, 2, 1), ("fsdp",), values)  # the learner's mesh, so the arrays are the shared memory
    used = kit.receiver().fetch(first, target, _shapes(values)).place()
    assert len(_shared_segments()) == 1
    learner.kill()
    assert np.asarray(used["w"]).tobytes() == values["w"].tobytes()
    with pytest.raises(TransferError, match="no parameters from"):
        kit.receiver(deadline_s=5).fetch(first, target, _shapes(values))
    second = start("shm", "big").publish(2)
    got = kit.receiver().fetch(second, target, _shapes(values)).place()
    assert np.asarray(got["w"]).tobytes() == script.values("big", 2)["w"].tobytes()
    assert len(_shared_segments()) == 2, "the arrays of the first version still use theirs"
    del used
    gc.collect()
    assert len(_shared_segments()) == 1


def _shared_segments() -> set[str]:
    """The inodes of the segments that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:jaxroll-weights" in line}
