"""The learner's end: parameters of a version in, an address that samplers can fetch from out."""

from __future__ import annotations

import os
import pathlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from jaxroll.config import TransferConfig
from jaxroll.records import Version, VersionRef
from jaxroll.rpc.tls import Material
from jaxroll.transfer import host_snapshot as snapshots
from jaxroll.transfer.channel_tcp import TcpSender
from jaxroll.transfer.channel_tensorstore import TensorstoreSender
from jaxroll.transfer.channels import Deadline, Sender
from jaxroll.transfer.host_snapshot import HostSnapshot, Params, PendingCopy

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Exposure:
    """How weights may be offered to other machines: under TLS, or in plain text when the user consents."""

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
    """The sender that the config names. `tensorstore` without a path writes to RUN/transfer."""
    if config.channel == "tensorstore":
        path = config.path or pathlib.Path(run_dir) / "transfer"
        return TensorstoreSender(path, keep=keep, limit_s=config.deadline_s)
    return TcpSender(
        host, keep=keep, token=token, max_connections=max_connections, stall_s=config.deadline_s,
        tls=exposure.tls, mutual_tls=exposure.mutual_tls, insecure=exposure.insecure,
    )  # fmt: skip


class Publisher:
    """Publishes one version after another through one channel.

    Threads: `start` dispatches the device copy on the calling (JAX) thread and returns; one worker thread waits for the
    bytes, digests them and offers them, in order. The tcp channel adds one listener thread. Whoever calls `publish`
    waits for the worker; the training step that follows `start` waits for nobody.
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
        """Let `params`, which nothing changes any more, be part of every version that is started from now on.

        They are copied and summed up here and never again, and a receiver fetches them once. Blocks meanwhile.
        """
        self._frozen = snapshots.take(version, params, self._config.dtype)

    def start(self, version: Version, params: Params) -> Future[VersionRef]:
        """The snapshot to come. On return `params` may be donated."""
        pending = snapshots.begin(params, self._config.dtype)
        return self._worker.submit(self._finish, version, pending)

    def finish(self, version: Version, started: Future[VersionRef]) -> VersionRef:
        """Where the parameters that were `started` can be fetched from now on; any thread may wait for it.

        Raises TransferError after `deadline_s`, which counts the device's work that is queued before the copy.
        """
        deadline = Deadline(self._config.deadline_s, f"publishing version {version}")
        try:
            return started.result(timeout=deadline.left_s())
        except TimeoutError as error:
            raise deadline.passed() from error

    def drop_older(self, version: Version) -> None:
        """The store knows of `version`: nothing changes, since the `keep` newest stay, told of or not."""
        del version

    def publish(self, version: Version, params: Params) -> VersionRef:
        """Both halves, one after the other. Raises TransferError like `finish`."""
        return self.finish(version, self.start(version, params))

    def offer(self, taken: HostSnapshot) -> VersionRef:
        """Where a host snapshot that exists already can be fetched."""
        return VersionRef(taken.version, self._sender.name, self._sender.offer(taken), taken.manifest_digest)

    def close(self) -> None:
        """End the threads; what is being published is finished first. A second close does nothing."""
        self._worker.shutdown(wait=True)
        self._sender.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _finish(self, version: Version, pending: PendingCopy) -> VersionRef:
        taken = snapshots.finish(version, pending)
        return self.offer(taken if self._frozen is None else snapshots.joined(taken, self._frozen))
