"""What a finished step is to the others, said behind the learner's back: the weights, the acknowledgement, the row.

The next step is computed meanwhile. Each step is said in the order of the contract, and none before the one before it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxroll.clock import unix_s
from jaxroll.records import Snapshot, Version
from jaxroll.store.client import BlockingStore
from jaxroll.transfer.channel_device import DevicePublisher
from jaxroll.transfer.publish import Publisher

Row = dict[str, Any]


class Teller:
    """Publishes, acknowledges and reports one step at a time, on a thread of its own."""

    def __init__(self, store: BlockingStore, publisher: Publisher | DevicePublisher) -> None:
        self._store, self._publisher = store, publisher
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="teller")
        self._last: Future[None] | None = None

    def tell(self, trained: Version, row: Row, weights: Future[Snapshot] | None) -> None:
        """Say that the claim of `trained` was trained, which made `weights` (None: none are published).

        Returns when the step before has been said, and raises what went wrong with that one.
        """
        self.settle()
        self._last = self._worker.submit(self._tell, trained, row, weights)

    def check(self) -> None:
        """Raise what went wrong, if something did by now; without waiting."""
        if self._last is not None and self._last.done():
            self.settle()

    def settle(self) -> None:
        """Wait until everything is said. Raises what went wrong: JaxRollError of the store's or the transfer's."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """End the thread, after what it is at."""
        self._worker.shutdown(wait=True)

    def _tell(self, trained: Version, row: Row, weights: Future[Snapshot] | None) -> None:
        if weights is not None:
            made = Version(trained.lineage, trained.step + 1)
            self._store.publish(self._publisher.finish(made, weights))
            self._publisher.told(made)
        self._store.ack(trained)
        said = unix_s()
        self._store.report([row | {"t": said, "publish_s": said - row["t1"]}])
