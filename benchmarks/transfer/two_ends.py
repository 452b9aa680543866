"""The two ends of the transfer benchmark, each a process that answers one JSON object per line."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

LEAVES, COLUMNS = 16, 2048  # float32 leaves of [rows, COLUMNS]
ROW_BYTES = LEAVES * COLUMNS * 4  # of one row of every leaf
Row = dict[str, Any]
SO_MAX_PACING_RATE = 47  # of Linux: a socket's limit in bytes a second


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

    def __init__(self, run_dir: str, rows: int, axis: str) -> None:
        import jax
        from jax.sharding import AxisType, NamedSharding, PartitionSpec

        devices = jax.devices()
        mesh = jax.make_mesh((len(devices),), (axis,), (AxisType.Auto,))
        spec = PartitionSpec(axis) if axis == "fsdp" else PartitionSpec(None, axis)
        self.run_dir, self.rows = Path(run_dir), rows
        self.names = [f"layers.{number:02d}.w" for number in range(LEAVES)]
        self.shapes = {name: jax.ShapeDtypeStruct((rows, COLUMNS), "float32") for name in self.names}
        self.sharding = NamedSharding(mesh, spec if len(devices) > 1 else PartitionSpec())
        self.digest = DigestTimer()

    def values(self) -> dict[str, Any]:
        import numpy as np

        return {
            name: np.random.default_rng(number).random((self.rows, COLUMNS), np.float32)
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
        from jaxroll.transfer import channels

        if not hasattr(self, "_written"):
            self._written = channels.ReaderConnection._written
        real, free_s = self._written, [0.0]

        def written(self: Any) -> int:
            time.sleep(max(0.0, free_s[0] - time.monotonic()))
            sent = real(self)
            free_s[0] = max(free_s[0], time.monotonic()) + sent / (mb_s * 1e6)
            return sent

        channels.ReaderConnection._written = written if mb_s else real
        return {}

    def pace(self, mb_s: float) -> Row:
        """Let the kernel send at most so fast over each connection accepted from now on; 0: no limit."""
        from jaxroll.transfer import channels

        if not hasattr(self, "_wrapped"):
            self._wrapped = channels.ReaderConnection.__init__
        real = self._wrapped

        def paced(self: Any, sock: socket.socket, *args: Any, **named: Any) -> None:
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(mb_s * 1e6))
            real(self, sock, *args, **named)

        channels.ReaderConnection.__init__ = paced if mb_s else real
        return {}

    def answer(self) -> None:
        print(json.dumps({"ready": os.getpid()}), flush=True)
        for line in sys.stdin:
            words = json.loads(line)
            print(json.dumps(getattr(self, words.pop("do"))(**words)), flush=True)


class SenderEnd(End):
    """The learner's process."""

    def __init__(self, run_dir: str, rows: int) -> None:
        import jax

        super().__init__(run_dir, rows, "fsdp")
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

    def __init__(self, run_dir: str, rows: int) -> None:
        import numpy as np

        super().__init__(run_dir, rows, "tensor")
        self.target = dict.fromkeys(self.names, self.sharding)
        self.source, self.warm = np.ones((LEAVES, rows, COLUMNS), np.float32), None

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

    def fetch(
        self, channel: str, ref: str, check: bool = False, relays: Sequence[Row] = (), connections: int = 1
    ) -> Row:
        """Fetch and place the announced version, from the relays first."""
        import jax

        from jaxroll import wire
        from jaxroll.records import Relay, VersionRef
        from jaxroll.transfer.ends import Receiver

        if not hasattr(self, "receivers"):
            self.receivers = {}
        config = replace(self.config(channel), connections=connections)
        receiver = self.receivers.setdefault(
            (channel, connections), Receiver(config, token="t" * 32, tls=self.material(channel))
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
        self.receivers = {("tcp", 1): Receiver(self.config("tcp"), token="t" * 32, relay=self.listener.relay)}
        return {"name": name, "address": self.listener.address}

    def throttle(self, mb_s: float) -> Row:
        """Read at most so fast; 0: no limit."""
        from jaxroll.transfer.channel_tcp import TcpReader

        if not hasattr(self, "_receive"):
            self._receive = TcpReader._receive
        real = self._receive

        def receive(self: Any, buffer: Any) -> None:
            size = len(buffer)  # scattered memory has none left afterwards
            real(self, buffer)
            time.sleep(size / (mb_s * 1e6))

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


def main() -> None:
    kind = {"sender": SenderEnd, "receiver": ReceiverEnd}[sys.argv[1]]
    kind(sys.argv[2], int(sys.argv[3])).answer()


if __name__ == "__main__":
    main()
