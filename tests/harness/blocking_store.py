"""StoreClient for ordinary threads: its calls run on a loop thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from pathlib import Path
from typing import Any

from jaxroll.errors import InfraError
from jaxroll.store.client import StoreClient


class BlockingStore:
    """Has every method and property of StoreClient; methods block. Options as for `StoreClient.connect`."""

    def __init__(self, address: str | Path, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store-client", daemon=True)
        self._thread.start()
        self._client: StoreClient | None = None
        with contextlib.ExitStack() as unless_connected:
            unless_connected.callback(self.close)
            self._client = self._run(StoreClient.connect(address, **options))
            unless_connected.pop_all()

    def __getattr__(self, name: str) -> Any:
        if self._client is None:
            raise InfraError("this client of the store is closed")
        found = getattr(self._client, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return lambda *args, **kwargs: self._run(found(*args, **kwargs))

    def close(self) -> None:
        """Close the connection and end the thread; a second call does nothing."""
        client, self._client = self._client, None
        if client is not None:
            self._run(client.aclose())
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, job: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result()
