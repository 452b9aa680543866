"""Weights from one process to another: each channel next to a copy in memory, a raw socket and other libraries.

512 MiB of float32 parameters in 16 leaves, from 1 device to 1 and from 4 (split along the first axis) to 2 (along the
second). The arms run alternately. `moved_s` is the time of the bytes: from the sender's host memory to the receiver's,
manifest and plan included. The digests, which JaxRoll computes in addition, are measured in the same run and reported
apart, as are the copies between device and host. `whole_s` has everything, from arrays on the sender's devices to
arrays on the receiver's.

Baselines: `memcpy` (numpy, warm memory), `raw` (one plain socket, recv_into a warm buffer), Arrow Flight (do_get of 16
columns), orbax (save and restore in memory-backed files where there are any), jax.experimental.transfer (1 to 1 only:
it does not reshard). Processor seconds are those of the whole process, per GB.

`relay`: 2, 4 and 8 receivers of 16 MiB over tcp, from the learner alone and through a relay tree. Two cores carry all
processes, so the case runs also with links: each listener sends at most LINK_MB_S, an emulation by pauses. In
`throttled` one of four receivers reads at a tenth of that.

Aims: shm ≥ 60 % of memcpy; tcp ≥ 80 % of raw and faster than Flight and orbax; sender and receiver ≤ 1.3 times the
processor seconds of raw.

    python -m benchmarks.transfer [--quick] [--rounds=5] [--case=all|channels|relay]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.lib.child import Child
from benchmarks.lib.report import Runs, arguments, finish, ratio, say, spread

LEAVES, ROWS = 16, 4096  # float32 leaves of [ROWS, columns]
COLUMNS, QUICK_COLUMNS = 2048, 256  # 512 MiB, 64 MiB
PAIRS = {"1to1": (1, 1), "4to2": (4, 2)}
RECEIVERS = (0, 1, 2, 4)
RELAYED, RELAY_COLUMNS, LINK_MB_S = (2, 4, 8), 64, 20.0
WARM = 4  # unmeasured runs: three versions take their memory, then it is reused
DIGEST = "additive, mod 2^64, odd weights by splitmix64 (jaxroll/transfer/manifest.py)"
Row = dict[str, Any]


# --- The two ends, each a process that answers one JSON object per line


class DigestTimer:
    """Seconds and processor seconds in `manifests.of_box`, which computes every digest."""

    def __init__(self) -> None:
        from jaxroll.transfer import manifest as manifests

        self.wall_s = self.cpu_s = 0.0
        self._guard, real = threading.Lock(), manifests.of_box

        def timed(*args: Any) -> int:
            wall, cpu = time.perf_counter(), time.thread_time()
            found = real(*args)
            with self._guard:
                self.wall_s += time.perf_counter() - wall
                self.cpu_s += time.thread_time() - cpu
            return found

        manifests.of_box = timed


class End:
    """Common part of both ends: parameters' names and shapes, a mesh, and the processor time without digests."""

    def __init__(self, run_dir: str, columns: int, axis: str) -> None:
        import jax
        from jax.sharding import AxisType, NamedSharding, PartitionSpec

        devices = jax.devices()
        mesh = jax.make_mesh((len(devices),), (axis,), (AxisType.Auto,))
        spec = PartitionSpec(axis) if axis == "fsdp" else PartitionSpec(None, axis)
        self.run_dir, self.columns = Path(run_dir), columns
        self.names = [f"layers.{number:02d}.w" for number in range(LEAVES)]
        self.shapes = {name: jax.ShapeDtypeStruct((ROWS, columns), "float32") for name in self.names}
        self.sharding = NamedSharding(mesh, spec if len(devices) > 1 else PartitionSpec())
        self.digest = DigestTimer()

    def values(self) -> dict[str, Any]:
        import numpy as np

        return {
            name: np.random.default_rng(number).random((ROWS, self.columns), np.float32)
            for number, name in enumerate(self.names)
        }

    def cpu_s(self) -> float:
        """Processor seconds of this process without those of digests."""
        return time.process_time() - self.digest.cpu_s

    def material(self, channel: str) -> Any:
        from jaxroll.rpc import tls

        return tls.load(self.run_dir) if channel == "tls" else None

    def config(self, channel: str) -> Any:
        from jaxroll.config import TransferConfig

        return TransferConfig(channel="tcp" if channel == "tls" else channel, deadline_s=600.0)  # type: ignore[arg-type]

    def link(self, mb_s: float) -> Row:
        """Limit what the listener of this process sends, all readers together; 0: no limit."""
        from jaxroll.transfer import channel_tcp

        if not hasattr(self, "_written"):
            self._written = channel_tcp.Connection._written
        real, free_s = self._written, [0.0]

        def written(self: Any) -> int:
            time.sleep(max(0.0, free_s[0] - time.monotonic()))
            sent = real(self)
            free_s[0] = max(free_s[0], time.monotonic()) + sent / (mb_s * 1e6)
            return sent

        channel_tcp.Connection._written = written if mb_s else real
        return {}

    def answer(self) -> None:
        print(json.dumps({"ready": os.getpid()}), flush=True)
        for line in sys.stdin:
            words = json.loads(line)
            print(json.dumps(getattr(self, words.pop("do"))(**words)), flush=True)


class SenderEnd(End):
    """The learner's process."""

    def __init__(self, run_dir: str, columns: int) -> None:
        import jax

        super().__init__(run_dir, columns, "fsdp")
        self.host = self.values()
        self.params = {name: jax.device_put(value, self.sharding) for name, value in self.host.items()}
        self.publishers, self.step, self._hold_s, self._hold_cpu_s = {}, 0, 0.0, 0.0

    def _publisher(self, channel: str) -> Any:
        from jaxroll.transfer.ends import Exposure, Publisher

        if channel not in self.publishers:
            exposure = Exposure(tls=self.material(channel))
            made = Publisher(self.config(channel), self.run_dir, token="t" * 32, exposure=exposure)
            real = made._sender.hold

            def hold(pieces: Sequence[Any]) -> list[Any]:
                started, cpu = time.perf_counter(), time.thread_time()
                try:
                    return real(pieces)
                finally:
                    self._hold_s += time.perf_counter() - started
                    self._hold_cpu_s += time.thread_time() - cpu

            made._sender.hold = hold
            self.publishers[channel] = made
        return self.publishers[channel]

    def publish(self, channel: str) -> Row:
        """Publish the next version: seconds of each part, and the announcement."""
        from jaxroll import wire
        from jaxroll.records import Version

        publisher = self._publisher(channel)
        self.step, self._hold_s, self._hold_cpu_s, digest_s = self.step + 1, 0.0, 0.0, self.digest.wall_s
        started, cpu = time.perf_counter(), time.thread_time()
        coming = publisher.start(Version(0, self.step), self.params)
        blocked_s, blocked_cpu_s = time.perf_counter() - started, time.thread_time() - cpu
        ref = publisher.finish(Version(0, self.step), coming)
        return {
            "ref": wire.encode(ref).hex(),
            "blocked_s": blocked_s,
            "blocked_cpu_s": blocked_cpu_s,
            "publish_s": time.perf_counter() - started,
            "hold_s": self._hold_s,
            "hold_cpu_s": self._hold_cpu_s,
            "digest_s": self.digest.wall_s - digest_s,
        }

    def device_copy(self) -> Row:
        """Seconds of one copy of the parameters on the devices."""
        import jax

        from jaxroll.transfer import manifest

        started = time.perf_counter()
        jax.block_until_ready(manifest.copied(self.params, "float32"))
        return {"device_copy_s": time.perf_counter() - started}

    def cpu(self) -> Row:
        return {"cpu_s": self.cpu_s()}

    def sent(self, channel: str) -> Row:
        time.sleep(0.1)  # the listener counts after the reader has received
        return {"bytes": self._publisher(channel).sent_bytes}

    def raw(self) -> Row:
        """Serve all bytes once over a plain socket, from warm memory."""
        listening = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            sock, _ = listening.accept()
            with listening, sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for value in self.host.values():
                    sock.sendall(value.data.cast("B"))

        threading.Thread(target=serve, daemon=True).start()
        return {"port": listening.getsockname()[1]}

    def flight(self) -> Row:
        """The address of a Flight server that holds the leaves as columns."""
        import pyarrow as pa
        from pyarrow import flight

        table = pa.table({name: value.reshape(-1) for name, value in self.host.items()})

        class Server(flight.FlightServerBase):
            def do_get(self, context: Any, ticket: Any) -> Any:
                del context, ticket
                return flight.RecordBatchStream(table)

        if not hasattr(self, "_flight"):
            self._flight = Server("grpc://127.0.0.1:0")
        return {"port": self._flight.port}

    def orbax(self, folder: str) -> Row:
        import orbax.checkpoint as ocp

        started = time.perf_counter()
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, self.params)
        return {"save_s": time.perf_counter() - started}

    def jax(self) -> Row:
        """Offer the parameters to one pull of jax.experimental.transfer."""
        import jax
        from jax.experimental import transfer

        if not hasattr(self, "_server"):
            client = jax.devices()[0].client
            self._server = transfer.start_transfer_server(client, "127.0.0.1:0", ["127.0.0.1:0"])
        self.step += 1
        self._server.await_pull(self.step, [self.params[name] for name in self.names])
        return {"address": self._server.address(), "uuid": self.step}


class ReceiverEnd(End):
    """A sampler's process."""

    def __init__(self, run_dir: str, columns: int) -> None:
        import numpy as np

        super().__init__(run_dir, columns, "tensor")
        self.target = dict.fromkeys(self.names, self.sharding)
        self.source, self.warm = np.ones((LEAVES, ROWS, columns), np.float32), None

    def _measured(self, work: Callable[[], Any]) -> Row:
        cpu_s, digest_s, started = self.cpu_s(), self.digest.wall_s, time.perf_counter()
        work()
        wall_s, digest_s = time.perf_counter() - started, self.digest.wall_s - digest_s
        return {"moved_s": wall_s - digest_s, "digest_s": digest_s, "cpu_s": self.cpu_s() - cpu_s}

    def _buffer(self) -> Any:
        import numpy as np

        if self.warm is None:
            self.warm = np.zeros_like(self.source)
        return self.warm

    def fetch(self, channel: str, ref: str, check: bool = False, relays: Sequence[Row] = ()) -> Row:
        """Fetch and place the announced version, from the relays first."""
        import jax

        from jaxroll import wire
        from jaxroll.records import Relay, VersionRef
        from jaxroll.transfer.ends import Receiver

        if not hasattr(self, "receivers"):
            self.receivers = {}
        receiver = self.receivers.setdefault(
            channel, Receiver(self.config(channel), token="t" * 32, tls=self.material(channel))
        )
        staged: list[Any] = []
        announced = wire.decode(bytes.fromhex(ref), VersionRef)
        sources = [Relay(**one) for one in relays]
        row = self._measured(lambda: staged.append(receiver.fetch(announced, self.target, self.shapes, relays=sources)))
        row["sources"] = [list(one) for one in getattr(staged[0], "sources", ())]
        started = time.perf_counter()
        placed = staged.pop().place()
        jax.block_until_ready(placed)
        row["place_s"] = time.perf_counter() - started
        if check:
            import numpy as np

            wanted = self.values()
            row["exact"] = all(np.array_equal(np.asarray(placed[name]), wanted[name]) for name in self.names)
        return row

    def listen(self, name: str) -> Row:
        """Become a relay; its name and address."""
        from jaxroll.transfer.ends import Receiver
        from jaxroll.transfer.relay import RelaySender

        self.listener = RelaySender(self.config("tcp"), "127.0.0.1", token="t" * 32)
        self.receivers = {"tcp": Receiver(self.config("tcp"), token="t" * 32, relay=self.listener.relay)}
        return {"name": name, "address": self.listener.address}

    def throttle(self, mb_s: float) -> Row:
        """Read at most so fast; 0: no limit."""
        from jaxroll.transfer.channel_tcp import TcpReader

        if not hasattr(self, "_receive"):
            self._receive = TcpReader._receive
        real = self._receive

        def receive(self: Any, buffer: memoryview) -> None:
            real(self, buffer)
            time.sleep(len(buffer) / (mb_s * 1e6))

        TcpReader._receive = receive if mb_s else real
        return {}

    def memcpy(self) -> Row:
        import numpy as np

        buffer = self._buffer()
        return self._measured(lambda: np.copyto(buffer, self.source))

    def raw(self, port: int) -> Row:
        """Receive all bytes into warm memory."""

        def receive() -> None:
            view = memoryview(self._buffer()).cast("B")
            with socket.create_connection(("127.0.0.1", port)) as sock:
                while len(view):
                    count = sock.recv_into(view)
                    if not count:
                        raise ConnectionError("the sender ended")
                    view = view[count:]

        return self._measured(receive)

    def flight(self, port: int) -> Row:
        from pyarrow import flight

        def get() -> None:
            with flight.connect(f"grpc://127.0.0.1:{port}") as client:
                table = client.do_get(flight.Ticket(b"all")).read_all()
                assert table.nbytes == self.source.nbytes

        return self._measured(get)

    def orbax(self, folder: str) -> Row:
        import jax
        import orbax.checkpoint as ocp

        abstract = {n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.sharding) for n, s in self.shapes.items()}

        def restore() -> None:
            with ocp.StandardCheckpointer() as checkpointer:
                jax.block_until_ready(checkpointer.restore(folder, abstract))

        return self._measured(restore)

    def jax(self, address: str, uuid: int) -> Row:
        import jax
        from jax.experimental import transfer

        if not hasattr(self, "_server"):
            client = jax.devices()[0].client
            self._server = transfer.start_transfer_server(client, "127.0.0.1:0", ["127.0.0.1:0"])
            self._connection = self._server.connect(address)
        abstract = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.sharding) for s in self.shapes.values()]
        return self._measured(lambda: jax.block_until_ready(self._connection.pull(uuid, abstract)))


# --- The races


def ask(child: Child, do: str, **words: Any) -> Row:
    return child.ask(json.dumps({"do": do, **words}))


def channel_run(sender: Child, receiver: Child, channel: str, check: bool = False) -> Row:
    """One version over a channel of JaxRoll. `moved_s` is the copy into shared memory, if any, and the fetch."""
    before = ask(sender, "cpu")["cpu_s"]
    published = ask(sender, "publish", channel=channel)
    copied = ask(sender, "cpu")["cpu_s"]
    got = ask(receiver, "fetch", channel=channel, ref=published.pop("ref"), check=check)
    served = ask(sender, "cpu")["cpu_s"] - copied
    assert got.pop("exact", True), f"{channel}: wrong values"
    return {
        "moved_s": published["hold_s"] + got["moved_s"],
        "whole_s": published["publish_s"] + got["moved_s"] + got["digest_s"] + got["place_s"],
        "digest_sender_s": published["digest_s"],
        "digest_receiver_s": got["digest_s"],
        "place_s": got["place_s"],
        "blocked_s": published["blocked_s"],
        "sender_cpu_s": served + published["hold_cpu_s"],
        "receiver_cpu_s": got["cpu_s"],
        "publish_cpu_s": copied - before,
        "hold_s": published["hold_s"],
    }


def served_run(sender: Child, receiver: Child, what: str, **words: Any) -> Row:
    """One transfer by a baseline: the sender's answer are the receiver's arguments."""
    before = ask(sender, "cpu")["cpu_s"]
    got = ask(receiver, what, **ask(sender, what, **words))
    return {
        "moved_s": got["moved_s"],
        "receiver_cpu_s": got["cpu_s"],
        "sender_cpu_s": ask(sender, "cpu")["cpu_s"] - before,
    }


def orbax_run(sender: Child, receiver: Child, root: Path) -> Row:
    folder = root / f"orbax-{time.monotonic_ns()}"
    try:
        saved = ask(sender, "orbax", folder=str(folder))
        restored = ask(receiver, "orbax", folder=str(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    whole_s = saved["save_s"] + restored["moved_s"]
    return {"moved_s": whole_s, "whole_s": whole_s}


class Ends:
    """The child processes of the benchmark, started when first used."""

    def __init__(self, run_dir: Path, columns: int) -> None:
        self._run_dir, self._columns = run_dir, columns
        self._stack, self._started = contextlib.ExitStack(), {}

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, kind: str, devices: int, number: int = 0) -> Child:
        key = (kind, devices, number)
        if key not in self._started:
            words = (kind, str(self._run_dir), str(self._columns))
            self._started[key] = Child("benchmarks.transfer", "ours", 1, *words, devices=devices)
            self._stack.callback(self._started[key].close)
        return self._started[key]


def arms_of(ends: Ends, pair: str, files: Path) -> dict[str, Callable[[], Row]]:
    sender, receiver = (ends.get(kind, n) for kind, n in zip(("sender", "receiver"), PAIRS[pair], strict=True))
    arms: dict[str, Callable[[], Row]] = {
        "shm": lambda: channel_run(sender, receiver, "shm"),
        "tcp": lambda: channel_run(sender, receiver, "tcp"),
        "memcpy": lambda: ask(receiver, "memcpy"),
        "raw": lambda: served_run(sender, receiver, "raw"),
        "flight": lambda: served_run(sender, receiver, "flight"),
        "orbax": lambda: orbax_run(sender, receiver, files),
    }
    if pair == "1to1":
        arms["tls"] = lambda: channel_run(sender, receiver, "tls")
        own = [ends.get(kind, 1, 9) for kind in ("sender", "receiver")]  # its server may abort its process
        arms["jax"] = lambda: served_run(own[0], own[1], "jax")
    return arms


def usable(arms: Mapping[str, Callable[[], Row]], warm: int) -> tuple[dict[str, Callable[[], Row]], Row]:
    """The arms that run here, after their unmeasured runs, and why the others do not."""
    kept, failed = {}, {}
    for name, run in arms.items():
        try:
            for _ in range(warm if name == "shm" else 1):
                run()
            kept[name] = run
        except RuntimeError as error:
            failed[name] = str(error).strip().splitlines()[-1][:300]
            say(f"{name} does not run here: {failed[name]}")
    return kept, failed


def stall(ends: Ends, rounds: int) -> Row:
    """Seconds for which `start` blocks the learner's JAX thread while readers fetch the version before.

    On a busy machine the thread also waits for a core; `thread_cpu` does not contain that.
    """
    sender, rows = ends.get("sender", 1), {}
    for channel in ("shm", "tcp"):
        for count in RECEIVERS:
            readers = [ends.get("receiver", 1, number) for number in range(count)]
            blocked, busy = [], []
            for _ in range(rounds):
                ref = ask(sender, "publish", channel=channel)["ref"]
                with ThreadPoolExecutor(max(1, count)) as pool:
                    fetching = [pool.submit(ask, reader, "fetch", channel=channel, ref=ref) for reader in readers]
                    time.sleep(0.05)  # all of them are receiving
                    published = ask(sender, "publish", channel=channel)
                    blocked.append(published["blocked_s"])
                    busy.append(published["blocked_cpu_s"])
                    for one in fetching:
                        one.result()
            rows[f"{channel}_{count}"] = {"wall": spread(blocked), "thread_cpu": spread(busy)}
            say(f"blocked with {count} receivers over {channel}: {spread(blocked)}")
    copies = [ask(sender, "device_copy")["device_copy_s"] for _ in range(rounds)]
    return {**rows, "device_copy": spread(copies)}


def relay_run(sender: Child, readers: Sequence[Child], peers: Sequence[Row], tree: bool, check: bool = False) -> Row:
    """One version to all `readers`: seconds until each has it, and the bytes that the learner sent."""
    from jaxroll.policy.relay import Receiver, assign, sources

    receivers = [Receiver(peer["name"]) for peer in peers]
    assigned = assign(receivers, [one.name for one in receivers])
    address = {peer["name"]: peer for peer in peers}
    found = [sources(one.name, receivers, assigned)[:-1] if tree else () for one in receivers]
    ref, before = ask(sender, "publish", channel="tcp")["ref"], ask(sender, "sent", channel="tcp")["bytes"]
    started, done = time.perf_counter(), []

    def fetch(reader: Child, relays: Sequence[str]) -> Row:
        row = ask(reader, "fetch", channel="tcp", ref=ref, check=check, relays=[address[name] for name in relays])
        done.append(time.perf_counter() - started)
        return row | {"done_s": done[-1]}

    with ThreadPoolExecutor(len(readers)) as pool:
        rows = [one.result() for one in [pool.submit(fetch, *pair) for pair in zip(readers, found, strict=True)]]
    assert all(row.get("exact", True) for row in rows), "wrong values"
    failed = [error for row in rows for _, _, _, error in row["sources"] if error]
    assert not failed, failed
    return {
        "total_s": max(done),
        "first_s": min(done),
        "done_s": [row["done_s"] for row in rows],
        "sent_bytes": ask(sender, "sent", channel="tcp")["bytes"] - before,
    }


def relay_case(run_dir: Path, rounds: int, args: argparse.Namespace) -> Row:
    """The learner alone and a relay tree, alternating, without and with links of LINK_MB_S."""
    columns, result = RELAY_COLUMNS, {}
    size = LEAVES * ROWS * columns * 4
    with Ends(run_dir, columns) as ends:
        sender = ends.get("sender", 1)
        readers = [ends.get("receiver", 1, number) for number in range(max(RELAYED))]
        peers = [ask(reader, "listen", name=f"sampler-{number}") for number, reader in enumerate(readers)]
        for tree in (False, True):
            relay_run(sender, readers, peers, tree, check=True)
        for mb_s in (0.0, LINK_MB_S):
            for end in (sender, *readers):
                ask(end, "link", mb_s=mb_s)
            for count in RELAYED:
                some, near = readers[:count], peers[:count]
                arms = {
                    arm: functools.partial(relay_run, sender, some, near, arm == "tree") for arm in ("alone", "tree")
                }
                settings = {"bytes": size, "receivers": count, "link_mb_s": mb_s}
                rows = Runs("transfer-relay", settings, args.runs_file, args.resume).alternate(arms, rounds)
                result[f"{count}_receivers" + (f"_{mb_s:g}_mb_s" if mb_s else "")] = {
                    **{
                        f"{arm}_copies": spread([row["sent_bytes"] / size for row in found])
                        for arm, found in rows.items()
                    },
                    **{f"{arm}_s": spread([row["total_s"] for row in found]) for arm, found in rows.items()},
                    "tree_speed_over_alone": ratio(
                        [r["total_s"] for r in rows["alone"]], [r["total_s"] for r in rows["tree"]]
                    ),
                }
        result["throttled"] = throttled(sender, readers[:4], peers[:4], rounds)
    return {"bytes": size, "rounds": rounds, "link_mb_s": LINK_MB_S, **result}


def throttled(sender: Child, readers: Sequence[Child], peers: Sequence[Row], rounds: int) -> Row:
    """Seconds of the three other receivers while the last reads at a tenth of the links, and while it does not."""
    others: dict[str, list[float]] = {"full": [], "tenth": []}
    for number in range(rounds):
        for arm in list(others)[:: 1 if number % 2 == 0 else -1]:
            ask(readers[-1], "throttle", mb_s=LINK_MB_S / 10 if arm == "tenth" else 0.0)
            others[arm].append(max(relay_run(sender, readers, peers, True)["done_s"][:-1]))
    ask(readers[-1], "throttle", mb_s=0.0)
    return {
        **{arm: spread(found) for arm, found in others.items()},
        "tenth_over_full": ratio(others["tenth"], others["full"]),
    }


def summary(rows: Mapping[str, list[Row]], size: int) -> Row:
    """Medians of each arm, and its ratios to the baselines."""
    gb, table = size / 1e9, {}
    for name, found in rows.items():
        keys = [key for key in found[0] if all(key in row for row in found)]
        table[name] = {key: spread([row[key] for row in found]) for key in keys}
        table[name]["gb_s"] = spread([gb / row["moved_s"] for row in found])
        table[name] |= {
            f"{end}_cpu_s_per_gb": spread([row[f"{end}_cpu_s"] / gb for row in found])
            for end in ("sender", "receiver")
            if f"{end}_cpu_s" in found[0]
        }

    def times(a: str, b: str, key: str = "moved_s") -> Row:
        return ratio([row[key] for row in rows[a]], [row[key] for row in rows[b]])

    pairs = [("memcpy", "shm"), ("raw", "tcp"), ("flight", "tcp"), ("raw", "tls"), ("jax", "tcp"), ("flight", "shm")]
    ratios = {f"{b}_speed_over_{a}": times(a, b) for a, b in pairs if a in rows and b in rows}
    for name in ("shm", "tcp"):
        ratios[f"{name}_whole_speed_over_orbax"] = times("orbax", name, "whole_s")
        for end in ("sender", "receiver"):
            ratios[f"{name}_{end}_cpu_over_raw"] = times(name, "raw", f"{end}_cpu_s")
    return {"arms": table, "ratios": ratios}


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ("sender", "receiver"):
        kind = {"sender": SenderEnd, "receiver": ReceiverEnd}[sys.argv[1]]
        kind(sys.argv[2], int(sys.argv[3])).answer()
        return
    parser: argparse.ArgumentParser = arguments(__doc__ or "")
    parser.add_argument("--case", choices=("all", "channels", "relay"), default="all", help="what to measure")
    args = parser.parse_args()
    started, columns = time.monotonic(), QUICK_COLUMNS if args.quick else COLUMNS
    rounds, size = args.rounds or (2 if args.quick else 5), LEAVES * ROWS * columns * 4
    memory = Path("/dev/shm")
    result: Row = {"bytes": size, "rounds": rounds, "digest": DIGEST}
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as files:
        from jaxroll.rpc import tls

        tls.make_certificates(Path(files), [], 1)
        if args.case in ("all", "relay"):
            result["relay"] = relay_case(Path(files), rounds, args)
        for pair in PAIRS if args.case in ("all", "channels") else ():
            with Ends(Path(files), columns) as ends:
                runs = Runs("transfer", {"bytes": size, "pair": pair}, args.runs_file, args.resume)
                for channel in ("shm", "tcp"):
                    sender, receiver = ends.get("sender", PAIRS[pair][0]), ends.get("receiver", PAIRS[pair][1])
                    first = channel_run(sender, receiver, channel, check=True)
                    result[f"first_version_{channel}_{pair}"] = size / 1e9 / first["moved_s"]
                arms, failed = usable(arms_of(ends, pair, Path(files)), WARM)
                result[pair] = summary(runs.alternate(arms, rounds), size) | {"not_run": failed}
                if pair == "1to1":
                    result["jax_thread_blocked_s"] = stall(ends, rounds)
    finish(result, command=" ".join(["python -m benchmarks.transfer", *sys.argv[1:]]), started=started)


if __name__ == "__main__":
    main()
