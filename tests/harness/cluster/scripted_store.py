"""`jaxroll store` with prompts from a counter instead of a dataset, so that a restart costs no import of JAX.

Called as `python -m tests.harness.cluster.scripted_store ORDERS store --config=FILE --run=DIR …`. Everything but the
feeder (and the compaction of the log, if the orders change it) is the real role, started by the real command line.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from jaxroll.control import cli
from jaxroll.records import Message, Task
from jaxroll.roles import store as role
from jaxroll.store.log import commit_log, replay
from jaxroll.store.server import keeper, server


class StoreOrders(msgspec.Struct, frozen=True):
    """Orders of a store. `prompts` 0: no end; `questions` 0: no repetition; any other 0 keeps the store's default.

    After `compact_every` records a snapshot is written in the smallest parts, one per commit. `history_bytes` of old
    log records and `keep_bytes` of ended trajectories stay readable.
    """

    prompts: int = 0
    questions: int = 0
    compact_every: int = 0
    history_bytes: int = 0
    keep_bytes: int = 0


class CountingFeeder:
    """A feeder of prompts 0, 1, 2, …; the state after prompt i is the text i + 1."""

    limit = questions = 0

    def __init__(self, run_dir: Path) -> None:
        self._at = 0

    async def restore(self, state: bytes | None) -> None:
        """Continue after the prompt with this state."""
        self._at = int(state) if state else 0

    async def next(self, count: int) -> list[tuple[Task, bytes]]:
        """The next `count` prompts; fewer at the end."""
        first, self._at = self._at, self._at + count
        if self.limit:
            self._at = min(self._at, self.limit)
        return [(self._task(i), str(i + 1).encode()) for i in range(first, self._at)]

    async def close(self) -> None:
        """Nothing is held."""

    def _task(self, index: int) -> Task:
        number = index % self.questions if self.questions else index
        return Task(index, (Message("user", f"question {number}"),), "single_turn", "{}", index, f"{number:016x}")


def _log(run_dir: Path, *, Log: Callable[..., Any], budgets: dict[str, int], **given: Any) -> Any:
    return Log(run_dir, **(given | budgets))


def main() -> int:
    """Run the store; return its exit code."""
    orders = msgspec.json.decode(sys.argv[1], type=StoreOrders)
    CountingFeeder.limit, CountingFeeder.questions = orders.prompts, orders.questions
    role.FeederProcess = CountingFeeder
    if orders.compact_every:
        keeper.COMPACT_EVERY, commit_log.PARTS, replay.ENTRIES = orders.compact_every, 1, 2
    budgets = {"history_bytes": orders.history_bytes, "keep_bytes": orders.keep_bytes}
    server.Log = functools.partial(_log, Log=server.Log, budgets={key: size for key, size in budgets.items() if size})
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
