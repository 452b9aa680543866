"""A sampler's process without an engine: it follows the weights of a store, and serves them to others as a relay.

    python weight_relay.py RUN_DIR NAME [DIES_AT]

The caller sets the environment. Lines on stdout: step and digest of each version, and the metric rows as JSON. With
DIES_AT the first process that has sent half of the large array of that step to others kills itself (SIGKILL).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jaxroll.config import TransferConfig
from jaxroll.roles.weights import RoleLog, WeightFollower
from jaxroll.store.messages import RelayState
from jaxroll.transfer.ends import FetchedParameters, Receiver
from jaxroll.transfer.relay import RelaySender
from tests.harness.store.builders import configured, connected

TRANSFER = TransferConfig(channel="tcp", deadline_s=60.0, relay="tree")
TOKEN = "sampler." + "0" * 64
SHAPES = {"a": (64, 64), "large": (1024, 4096), "z": (64, 64)}  # 16 MiB
LARGE_BYTES = 4 * 1024 * 4096


def config() -> Any:
    return configured(steps=20, alpha=8.0)


def values(step: int) -> dict[str, np.ndarray]:
    """The float32 parameters of `step`."""
    rng = np.random.default_rng(step)
    return {name: rng.random(shape, np.float32) for name, shape in SHAPES.items()}


def digest(params: Any) -> str:
    """The digest of all values, bit by bit."""
    found = hashlib.sha256()
    for name in sorted(SHAPES):
        found.update(np.asarray(params[name]).tobytes())
    return found.hexdigest()


class Engine:
    """An engine that prints the weights that it gets."""

    def __init__(self) -> None:
        self.version = None

    def call(self, job: Any) -> Future:
        done: Future = Future()
        done.set_result(job())
        return done

    def warmup(self, params: Any) -> None:
        """Compile nothing."""

    def drop_waiting_swap(self) -> None:
        """No swap waits."""

    def swap(self, version: Any, params: Any) -> None:
        self.version = version
        print(version.step, digest(params), flush=True)

    def stats(self) -> Any:
        return SimpleNamespace(version=self.version)


def die_in_the_middle(run_dir: Path, listener: RelaySender, step: int) -> None:
    """Kill this process when half of the large array of `step` is on its way to others, unless another one has died."""
    while not (held := listener.relay.versions()) or held[0].step < step:
        time.sleep(1e-4)
    before = listener.sent_bytes
    while listener.sent_bytes - before < LARGE_BYTES // 2:
        time.sleep(1e-4)
    with contextlib.suppress(FileExistsError), (run_dir / "died").open("x"):
        os.kill(os.getpid(), signal.SIGKILL)


async def run(run_dir: Path, name: str, dies_at: int | None) -> None:
    listener = RelaySender(TRANSFER, "127.0.0.1", token=TOKEN)
    receiver = Receiver(TRANSFER, token=TOKEN, relay=listener.relay)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = {key: jax.ShapeDtypeStruct(shape, "float32") for key, shape in SHAPES.items()}
    arriving = FetchedParameters(receiver, dict.fromkeys(SHAPES, here), shapes)
    engine = Engine()
    host: Any = SimpleNamespace(call=engine.call, engine=engine)
    follower = WeightFollower(
        host,
        arriving,
        RoleLog(name, lambda row: print(json.dumps(row), flush=True)),
        relay=RelayState(listener.address),
        listener=listener,
    )
    if dies_at is not None:
        threading.Thread(target=die_in_the_middle, args=(run_dir, listener, dies_at), daemon=True).start()
    async with connected(run_dir, config(), "sampler", name) as client:
        await follower.follow(client)


def end_with_parent() -> None:
    """End this process when its stdin is closed."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None))
