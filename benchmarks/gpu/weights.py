"""Weight transfer by every channel, within a process and between two, compared with a memory copy and a raw socket.

With the arguments `sender CHANNEL FOLDER quick|full` it is the other process: "raw" sends raw bytes, a number
publishes.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax
import numpy as np

from benchmarks.gpu.case import Case, device_facts, rates, run_case
from benchmarks.gpu.models import SIZES, spec_of, weights
from benchmarks.lib.report import ratio, spread
from jaxroll import sharding, wire
from jaxroll.config import MeshConfig, TransferConfig
from jaxroll.models import params
from jaxroll.models.families import ModelSpec
from jaxroll.records import Version, VersionRef
from jaxroll.transfer.channel_device import DevicePublisher
from jaxroll.transfer.ends import Publisher, Receiver

DTYPE = "bfloat16"
RAW_BYTES = {True: 8 << 20, False: 1 << 30}
DEADLINE_S = 60.0
WITHIN = "device"  # the channel that works within a process only


def channels() -> list[str]:
    """The channels that a config can name."""
    return [name for name in get_args(get_type_hints(TransferConfig)["channel"]) if name != "auto"]


def _target(spec: ModelSpec) -> tuple[dict[str, Any], dict[str, jax.ShapeDtypeStruct]]:
    where = params.shardings(spec, sharding.build(MeshConfig()), sharding.SAMPLER)
    return where, {name: jax.ShapeDtypeStruct(leaf.shape, DTYPE) for name, leaf in params.abstract(spec).items()}


def _fetched(spec: ModelSpec, published: VersionRef) -> tuple[dict[str, jax.Array], float, float]:
    """The parameters on the device; seconds until they are on the host, and from there to the device."""
    where, shapes = _target(spec)
    started = time.perf_counter()
    staged = Receiver(TransferConfig(deadline_s=DEADLINE_S)).fetch(published, where, shapes)
    there = time.perf_counter()
    placed = jax.block_until_ready(staged.place())
    return placed, there - started, time.perf_counter() - there


def differing(found: dict[str, jax.Array], source: dict[str, jax.Array]) -> list[str]:
    """Names of the parameters that differ from `source` in the transferred dtype."""
    if found.keys() != source.keys():
        return sorted(found.keys() ^ source.keys())
    return [name for name in found if not bool((found[name] == source[name].astype(DTYPE)).all())]


def _summary(size_bytes: int, rows: list[dict[str, float]], wrong: list[str]) -> dict[str, Any]:
    whole = [sum(row.values()) for row in rows]
    return {
        "bytes": size_bytes,
        "equal": not wrong,
        "differing": wrong[:5],
        "bytes_per_s": rates(size_bytes, whole),
        **{key: spread([row[key] for row in rows]) for key in rows[0]},
    }


def _memory_copy(size_bytes: int) -> dict[str, Any]:
    source, into, seconds = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8), []
    for _ in range(6):
        started = time.perf_counter()
        np.copyto(into, source)
        seconds.append(time.perf_counter() - started)
    return {"bytes_per_s": rates(size_bytes, seconds[1:])}


def _within(channel: str, spec: ModelSpec, source: dict[str, jax.Array], folder: Path, rounds: int) -> dict[str, Any]:
    """Publish and fetch in this process `rounds` times after a warm-up."""
    config = TransferConfig(channel=channel, dtype=DTYPE, deadline_s=DEADLINE_S)  # pyright: ignore[reportArgumentType]
    publisher = DevicePublisher(DTYPE) if channel == WITHIN else Publisher(config, folder / f"within-{channel}")
    rows, wrong, size_bytes = [], [], 0
    try:
        for step in range(rounds + 1):
            started = time.perf_counter()
            published = publisher.publish(Version(0, step), source)
            publish_s = time.perf_counter() - started
            found, fetch_s, place_s = _fetched(spec, published)
            rows.append({"publish_s": publish_s, "fetch_s": fetch_s, "place_s": place_s})
            size_bytes, wrong = sum(leaf.nbytes for leaf in found.values()), wrong or differing(found, source)
            del found
    finally:
        publisher.close()
    return _summary(size_bytes, rows[1:], wrong)


# --- between processes


class Sender:
    """The other process, which ends with the case's process group at the latest."""

    def __init__(self, channel: str, folder: Path, quick: bool) -> None:
        words = [
            sys.executable,
            "-m",
            "benchmarks.gpu.weights",
            "sender",
            channel,
            str(folder),
            "quick" if quick else "full",
        ]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.answer()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer; RuntimeError if it does not arrive in time."""
        try:
            line = self._lines.get(timeout=DEADLINE_S)
        except queue.Empty:
            line = ""
        if not line:
            raise RuntimeError(
                f"the sending process gave no answer within {DEADLINE_S:.0f} s (exit code {self._process.poll()})"
            )
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _raw_socket(sender: Sender, size_bytes: int) -> float:
    """Seconds to receive so many bytes over a loopback socket from the other process into memory already in use."""
    into = memoryview(bytearray(size_bytes))
    sender.tell("raw")
    with socket.create_connection(("127.0.0.1", sender.answer()["port"]), timeout=DEADLINE_S) as connection:
        connection.sendall(b"x")
        started, at = time.perf_counter(), 0
        while at < size_bytes:
            count = connection.recv_into(into[at:])
            if not count:
                raise RuntimeError("the sending process closed its socket")
            at += count
        return time.perf_counter() - started


def _between(channel: str, spec: ModelSpec, folder: Path, quick: bool, rounds: int) -> dict[str, Any]:
    """Fetch from another process, alternating with raw bytes over a socket; the version seeds the weights."""
    sender = Sender(channel, folder / f"between-{channel}", quick)
    rows, raw, wrong, size_bytes = [], [], [], 0
    try:
        for step in range(rounds + 1):
            measures: list[Callable[[], None]] = [
                lambda: raw.append(RAW_BYTES[quick] / _raw_socket(sender, RAW_BYTES[quick]))
            ]

            def fetch(step: int = step) -> None:
                nonlocal size_bytes, wrong
                sender.tell(str(step))
                answer = sender.answer()
                found, fetch_s, place_s = _fetched(spec, wire.decode(bytes.fromhex(answer["published"]), VersionRef))
                rows.append({"publish_s": answer["publish_s"], "fetch_s": fetch_s, "place_s": place_s})
                size_bytes = sum(leaf.nbytes for leaf in found.values())
                wrong = wrong or differing(found, weights(spec, "float32", seed=step))

            measures.append(fetch)
            for measure in measures[:: 1 if step % 2 == 0 else -1]:
                measure()
    finally:
        sender.close()
    found = _summary(size_bytes, rows[1:], wrong)
    fetched = [size_bytes / row["fetch_s"] for row in rows[1:]]
    return found | {"raw_socket_bytes_per_s": spread(raw[1:]), "fetch_of_raw_socket": ratio(fetched, raw[1:])}


def send(channel: str, folder: Path, quick: bool) -> None:
    """Answer commands on stdout, which from now on holds only answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    spec, block = spec_of(SIZES[0], quick), bytes(1 << 20)
    config = TransferConfig(channel=channel, dtype=DTYPE, deadline_s=DEADLINE_S)  # pyright: ignore[reportArgumentType]
    with Publisher(config, folder) as publisher:
        say(ready=True)
        for line in sys.stdin:
            if line.strip() == "raw":
                with socket.create_server(("127.0.0.1", 0)) as server:
                    say(port=server.getsockname()[1])
                    with server.accept()[0] as connection:
                        connection.recv(1)
                        for _ in range(RAW_BYTES[quick] // len(block)):
                            connection.sendall(block)
                continue
            source = jax.block_until_ready(weights(spec, "float32", seed=int(line)))
            started = time.perf_counter()
            published = publisher.publish(Version(0, int(line)), source)
            say(published=wire.encode(published).hex(), publish_s=time.perf_counter() - started)


def transfer(case: Case) -> None:
    """For every channel: equality bit for bit, then bytes per second of publishing, fetching and placing."""
    case.put(**device_facts(), dtype=DTYPE)
    spec, rounds = spec_of(SIZES[0], case.quick), 2 if case.quick else 4
    folder = Path(tempfile.mkdtemp(prefix="transfer-"))
    try:
        case.point("copy in memory", lambda: _memory_copy(RAW_BYTES[case.quick]))
        source = jax.block_until_ready(weights(spec, "float32"))
        for channel in channels():
            case.point(f"within a process: {channel}", lambda c=channel: _within(c, spec, source, folder, rounds))
        for channel in channels():
            if channel != WITHIN:
                case.point(
                    f"between processes: {channel}", lambda c=channel: _between(c, spec, folder, case.quick, rounds)
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1] == "sender":
        send(sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "quick")
    else:
        run_case({"transfer": transfer})
