"""A TCP proxy on the loopback that can partition two processes, delay their bytes, and cut a connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

_CHUNK_BYTES = 16 * 1024
_CONNECT_S = 2.0


class Proxy:
    """A context manager that forwards every connection to the host:port that `target` returns.

    During a partition connections stay open and new ones are accepted, but no byte passes until `heal`, as on a network
    that drops packets; `held` counts what had to wait. Threads: one accepts; two per connection copy bytes.
    """

    def __init__(self, target: Callable[[], str]) -> None:
        self._target = target
        self._up, self._down, self._over = threading.Event(), threading.Event(), threading.Event()
        self.heal()
        self._delay_s = 0.0
        self._cut_after: int | None = None
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self.forwarded_bytes, self.cuts, self.held = 0, 0, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []  # one per connection
        self._accepting = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._accepting.start()

    def address_file(self, folder: Path, token_of: Path) -> Path:
        """An address file with this proxy as the store, and the run's token next to it."""
        folder.mkdir(parents=True, exist_ok=True)
        if (token := token_of / "token").exists():
            (folder / "token").touch(mode=0o600)
            (folder / "token").write_text(token.read_text())
        (folder / "store.addr").write_text(self.address + "\n")
        return folder / "store.addr"

    def partition(self, direction: str = "both") -> None:
        """Hold back all bytes `up` to the target, `down` from it, or `both`, and make no new connection."""
        if direction in ("both", "up"):
            self._up.clear()
        if direction in ("both", "down"):
            self._down.clear()

    def heal(self) -> None:
        """End the partition: pass the bytes that were held back, and all later ones."""
        self._up.set()
        self._down.set()

    def delay(self, seconds: float) -> None:
        """Delay every chunk in both directions."""
        self._delay_s = seconds

    def cut_after(self, size_bytes: int) -> None:
        """Cut the first connection that sends this many more bytes to the target, in the middle of a message."""
        with self._lock:
            self._cut_after = size_bytes

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and end all threads."""
        self._over.set()
        self.heal()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(10)  # it adds no thread after this
        with self._lock:
            for one in self._sockets:
                _shut(one)
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), name="proxy", daemon=True)
            self._threads = [*(one for one in self._threads if one.is_alive()), thread]
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        """Serve one connection until it ends."""
        self._pass(self._up)
        self._pass(self._down)
        with client, contextlib.ExitStack() as stack:
            try:
                host, _, port = self._target().rpartition(":")
                server = stack.enter_context(socket.create_connection((host, int(port)), _CONNECT_S))
            except (OSError, ValueError):
                return
            server.settimeout(None)
            with self._lock:
                self._sockets |= {client, server}
                if self._over.is_set():
                    return
            back = threading.Thread(target=self._pump, args=(server, client, False), name="proxy", daemon=True)
            back.start()
            self._pump(client, server, True)
            back.join(10)
            with self._lock:
                self._sockets -= {client, server}

    def _pump(self, source: socket.socket, sink: socket.socket, to_target: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                if self._delay_s:
                    self._over.wait(self._delay_s)
                self._pass(self._up if to_target else self._down)
                passing = self._share(len(data)) if to_target else len(data)
                sink.sendall(data[:passing])
                if passing < len(data):
                    break
        for one in (source, sink):
            _shut(one)

    def _pass(self, direction: threading.Event) -> None:
        """Wait for the end of a partition of this direction."""
        if not direction.is_set():
            self.held += 1
            direction.wait()

    def _share(self, size_bytes: int) -> int:
        """The number of `size_bytes` that may pass before the cut."""
        with self._lock:
            self.forwarded_bytes += size_bytes
            if self._cut_after is None:
                return size_bytes
            left = self._cut_after
            self._cut_after = None if left < size_bytes else left - size_bytes
            self.cuts += left < size_bytes
            return min(left, size_bytes)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
