"""A learner of two devices in its own process that publishes the requested steps until its stdin closes.

    python weight_publisher.py CHANNEL RUN_DIR KIND     KIND is small or big

The caller sets the environment (two forced devices).
Every line on stdin is a step to publish; the answer on stdout is the announcement as one line of hex.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxroll import wire
from jaxroll.config import TransferConfig
from jaxroll.records import Version
from jaxroll.transfer.ends import Publisher

SMALL = {"embed": (64, 32), "layers.00.q": (32, 4, 8), "scale": ()}
BIG = {"w": (4096, 4096)}  # 64 MiB


def values(kind: str, step: int) -> dict[str, np.ndarray]:
    """The float32 parameters that every process derives from the step."""
    rng = np.random.default_rng(step)
    shapes = BIG if kind == "big" else SMALL
    return {name: rng.random(size=shape, dtype=np.float32) for name, shape in shapes.items()}


def main() -> None:
    channel, run_dir, kind = sys.argv[1:]
    assert jax.device_count() == 2
    axes = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((1, 2, 1), ("data", "fsdp", "tensor"), axes)
    train = jax.jit(lambda params: jax.tree.map(lambda x: x * 0 - 1, params), donate_argnums=0)
    with Publisher(TransferConfig(channel=cast(Any, channel), deadline_s=30), run_dir) as publisher:
        for line in sys.stdin:
            step = int(line)
            params = {
                name: jax.device_put(
                    value, NamedSharding(mesh, PartitionSpec("fsdp") if value.ndim else PartitionSpec())
                )
                for name, value in values(kind, step).items()
            }
            coming = publisher.start(Version(0, step), params)
            jax.block_until_ready(train(params))  # the live parameters are donated while the snapshot is being sent
            print(wire.encode(coming.result(timeout=30)).hex(), flush=True)


if __name__ == "__main__":
    main()
