"""The learner's end of a weight transfer: publishes parameters and returns the address for samplers."""

from __future__ import annotations

import os
import pathlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from jaxroll.config import TransferConfig
from jaxroll.records import Version, VersionRef
from jaxroll.rpc.tls import Material
from jaxroll.run_paths import RunPaths
from jaxroll.transfer import host_snapshot as snapshots
from jaxroll.transfer.channel_tcp import TcpSender
from jaxroll.transfer.channel_tensorstore import TensorstoreSender
from jaxroll.transfer.channels import Deadline, Sender
from jaxroll.transfer.host_snapshot import HostSnapshot, Params, PendingCopy

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Exposure:
    """The protection of weights that other machines can fetch: TLS, or plain text if the user consents."""

    tls: Material | None = None
    mutual_tls: bool = False
    insecure: bool = False


LOOPBACK_ONLY = Exposure()


def open_sender(
    config: TransferConfig,
    run_dir: str | os.PathLike[str],
    host: str,
    *,
    keep: int,
    token: str,
    max_connections: int,
    exposure: Exposure,
) -> Sender:
    """The sender of the channel that the config names. `tensorstore` without a path writes to RUN/transfer."""
    if config.channel == "tensorstore":
        path = config.path or RunPaths(pathlib.Path(run_dir)).transfer
        return TensorstoreSender(path, keep=keep, limit_s=config.deadline_s)
    return TcpSender(
        host,
        keep=keep,
        token=token,
        max_connections=max_connections,
        stall_s=config.deadline_s,
        tls=exposure.tls,
        mutual_tls=exposure.mutual_tls,
        insecure=exposure.insecure,
    )


class Publisher:
    """Publisher of versions through one channel.

    Threads: `start` dispatches the device copy on the calling (JAX) thread and returns; one worker thread waits for the
    bytes, computes their digests and offers them, in order. The tcp channel adds one listener thread. A caller of
    `publish` waits for the worker thread; the training step that follows `start` does not wait.
    """

    def __init__(
        self,
        config: TransferConfig,
        run_dir: str | os.PathLike[str],
        host: str = LOOPBACK,
        *,
        keep: int = 2,
        token: str = "",
        max_connections: int = 16,
        exposure: Exposure = LOOPBACK_ONLY,
    ) -> None:
        self._config = config
        self._sender = open_sender(
            config, run_dir, host, keep=keep, token=token, max_connections=max_connections, exposure=exposure
        )
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="transfer-publish")
        self._frozen: HostSnapshot | None = None

    def freeze(self, version: Version, params: Params) -> None:
        """Add `params`, which must not change any more, to every version that is started from now on.

        Blocks while they are copied and their digests computed, which happens only here. A receiver fetches them once.
        """
        self._frozen = snapshots.take(version, params, self._config.dtype)

    def start(self, version: Version, params: Params) -> Future[VersionRef]:
        """Start publishing `params`, which may be donated on return; pass the future to `finish`."""
        pending = snapshots.begin(params, self._config.dtype)
        return self._worker.submit(self._finish, version, pending)

    def finish(self, version: Version, started: Future[VersionRef]) -> VersionRef:
        """Wait until the parameters of `started` can be fetched and return their address; any thread may call this.

        Raises TransferError after `deadline_s`, which includes the device programs that are queued before the copy.
        """
        deadline = Deadline(self._config.deadline_s, f"publishing version {version}")
        try:
            return started.result(timeout=deadline.left_s())
        except TimeoutError as error:
            raise deadline.passed() from error

    def drop_older(self, version: Version) -> None:
        """Do nothing: the channel keeps the newest `keep` versions."""
        del version

    def publish(self, version: Version, params: Params) -> VersionRef:
        """Start and finish publishing `version`. Raises TransferError like `finish`."""
        return self.finish(version, self.start(version, params))

    def offer(self, taken: HostSnapshot) -> VersionRef:
        """Offer an existing host snapshot and return its address."""
        return VersionRef(taken.version, self._sender.name, self._sender.offer(taken), taken.manifest_digest)

    def close(self) -> None:
        """Finish publishing and end the threads. A second close does nothing."""
        self._worker.shutdown(wait=True)
        self._sender.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _finish(self, version: Version, pending: PendingCopy) -> VersionRef:
        taken = snapshots.finish(version, pending)
        return self.offer(taken if self._frozen is None else snapshots.joined(taken, self._frozen))
