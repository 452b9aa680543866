"""One of two processes of a learner, which publish the parameters of a mesh over both; process 0 fetches them.

python weight_hosts.py FOLDER INDEX COORDINATOR
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxroll import disk, lifeline
from jaxroll.config import TransferConfig
from jaxroll.records import Version
from jaxroll.transfer.channels import Deadline
from jaxroll.transfer.ends import Publisher, Receiver, Staged

SHAPES = {"bias": (8,), "embed": (24, 16), "layers.00.q": (16, 4, 8), "odd": (3, 5), "scale": (), "none": (0, 4)}
SPECS = {  # of a mesh of 2 x 2 devices, the first axis over the processes
    "rows": {"embed": ("host", None), "layers.00.q": ("host", "device"), "bias": ("host",)},
    "columns": {"embed": (None, ("host", "device")), "layers.00.q": (None, None, "host"), "bias": ("device",)},
    "replicas": {"embed": ("device", None), "layers.00.q": (None, "device")},
}


class OtherHost:
    """Process 1 of two, as process 0 sees it; a file has its part of a version."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def publish(self, version: Version, *, frozen: bool) -> None:
        """Do nothing: process 1 runs the same program."""

    def parts(self, version: Version, limit_s: float) -> list[tuple[str, bytes]]:
        deadline = Deadline(limit_s, f"waiting for the part of {version}")
        while not self._file.exists():
            time.sleep(min(0.01, deadline.left_s()))
        address, _, encoded = self._file.read_text().partition(" ")
        return [(address, bytes.fromhex(encoded))]

    def announce(self, version: Version, address: str, encoded: bytes) -> None:
        """Write the part of process 1."""
        disk.replace_text(self._file, f"{address} {encoded.hex()}")


def published(held: Mapping[str, jax.Array], channel: str, folder: Path) -> dict[str, np.ndarray]:
    """The arrays that a receiver in process 0 gets of those that all processes publish; empty on the others."""
    config, first, found = TransferConfig(channel=channel), jax.process_index() == 0, {}  # type: ignore[arg-type]
    folder.mkdir(exist_ok=True)
    other = OtherHost(folder / channel)
    ends: dict[str, Any] = (
        {"announce": other.announce} if not first else {"others": other} if jax.process_count() > 1 else {}
    )
    with Publisher(config, folder, **ends) as publisher:
        ref = publisher.publish(Version(0, 1), held)
        if first:
            one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in held.items()}
            staged = Receiver(config).fetch(ref, dict.fromkeys(held, one), shapes)
            assert isinstance(staged, Staged)
            if ends and channel == "tcp":
                own = publisher._sender._shelf.get(ref.version).size_bytes  # type: ignore[attr-defined]
                assert 0.2 < own / staged.size_bytes < 0.8, f"process 0 serves {own} of {staged.size_bytes} bytes"
            found = {name: np.asarray(array) for name, array in staged.place().items()}
        multihost_utils.sync_global_devices(f"received over {channel}")
    return found


def main() -> None:
    folder, index, coordinator = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    lifeline.bind_from_env()
    jax.distributed.initialize(coordinator, 2, index, initialization_timeout=60)
    mesh = jax.make_mesh((2, 2), ("host", "device"), (jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(3)
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    for case, specs in SPECS.items():
        shardings = {name: NamedSharding(mesh, PartitionSpec(*specs.get(name, ()))) for name in SHAPES}
        held = {
            name: jax.make_array_from_callback(value.shape, shardings[name], value.__getitem__)
            for name, value in values.items()
        }
        for channel in ("tcp", "shm", "auto", "tensorstore"):
            got = published(held, channel, folder / case)
            assert index or got.keys() == values.keys()
            for name, value in got.items():
                assert value.tobytes() == values[name].tobytes(), (case, channel, name)


if __name__ == "__main__":
    main()
