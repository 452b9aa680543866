"""An honest sampler during an attack: it puts and renews one after the other, and times these calls.

    python -m benchmarks.faults.good_client FOLDER ORDERS_JSON

Prints "ready" when it holds leases, then goes on until its standard input ends; the last line is one JSON object with
the seconds of every put and renew, when each put began (the machine's monotonic clock), and what was acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.store.client import outcome
from jaxroll import lifeline
from jaxroll.errors import NoCredit
from jaxroll.records import Member, Version
from jaxroll.store.client import StoreClient
from jaxroll.store.messages import Key


async def work(folder: Path, orders: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
    """Measure until `stop` is set; return the figures."""
    store = await StoreClient.connect(
        folder / "store.addr", role="sampler", name="good", config_digest=orders["config_digest"], patience_s=60.0
    )
    done = outcome(orders.get("payload_bytes", 65_536), Version(0, 0))
    leased: list[Key] = []
    put_at_s, put_s, renew_s, acknowledged = [], [], [], 0
    said = False
    while not stop.is_set():
        if not leased:
            leased = await _lease(store, 64)
        if not said:
            said = True
            print("ready", flush=True)
        key = leased.pop()
        put_at_s.append(time.monotonic())
        started = time.perf_counter()
        acknowledged += await store.put(Member(*key, done)) == "OK"
        put_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        lost = await store.renew(leased)
        renew_s.append(time.perf_counter() - started)
        assert lost == [], f"another client took {lost}"
    await store.release(leased)
    await store.aclose()
    return {"put_at_s": put_at_s, "put_s": put_s, "renew_s": renew_s, "acknowledged": acknowledged}


async def _lease(store: StoreClient, members: int) -> list[Key]:
    while True:
        try:
            grants = await store.lease(Version(0, 0), members, 5.0)
            return [(grant.group, member, attempt) for grant in grants for member, attempt in grant.members]
        except NoCredit:
            await asyncio.sleep(0.05)


def main() -> None:
    """Work until standard input ends."""
    folder, orders = Path(sys.argv[1]), json.loads(sys.argv[2])
    lifeline.bind(orders.get("parent", os.getppid()))
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    print(json.dumps(asyncio.run(work(folder, orders, stop))), flush=True)


if __name__ == "__main__":
    main()
