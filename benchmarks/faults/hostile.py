"""The cost of a hostile client for an honest one.

One store process (a run with a token, on the loopback), one honest sampler that puts 64 KB members and renews its
leases one after the other, and one kind of attack at a time from other processes (see benchmarks/faults/attacks.py).
For each attack: p50, p99 and maximum of the honest client's puts and renewals, their numbers, and the store's largest
memory. The first line is without an attack. All processes share the machine's cores, so the cost includes the
attacker's own work.

    python -m benchmarks.faults.hostile [--seconds=8] [--only=KIND,KIND]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib.report import ROOT, commit, hardware
from benchmarks.store.server import config
from jaxroll.config import digest
from jaxroll.records import VersionRef
from jaxroll.rpc import protocol
from jaxroll.store.client import StoreClient

CHANGES = {"steps": 1, "groups_per_step": 16_384, "group_size": 4, "alpha": 0.0, "lease_s": 60.0, "retention_mb": 8192}
# kind → (processes, orders)
ATTACKS: dict[str, tuple[int, dict[str, Any]]] = {
    "silent": (1, {"connections": 10_000}),
    "loris": (1, {"connections": 4_000}),
    "garbage": (1, {"connections": 500}),
    "no_token": (2, {"connections": 8, "in_flight": 32}),
    "wrong_token": (2, {"connections": 8, "in_flight": 32}),
    "wrong_role": (2, {"connections": 8, "in_flight": 32}),
    "two_gb": (1, {"connections": 32}),
    "liars": (2, {"connections": 4, "in_flight": 8}),
    "malformed": (2, {"connections": 2, "in_flight": 8}),
    "paths": (2, {"connections": 2, "in_flight": 8}),
    "polls": (2, {"connections": 16, "in_flight": 64}),
    "crowd": (1, {"connections": 2, "in_flight": 8}),
    "heavy": (1, {"connections": 2, "in_flight": 1, "timeout_s": 60.0}),
}


@contextlib.contextmanager
def process(module: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A running module of `benchmarks`, killed at the end if it still runs."""
    command = [sys.executable, "-m", module, *words]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def ready(started: subprocess.Popen[str]) -> None:
    """Wait until the process prints "ready"."""
    assert started.stdout is not None
    if started.stdout.readline().strip() != "ready":
        raise SystemExit("a process did not start; its error is above")


def ended(started: subprocess.Popen[str]) -> dict[str, Any]:
    """Stop the process by closing its standard input; return its counts."""
    out, _ = started.communicate("", timeout=60)
    return json.loads(out.splitlines()[-1])


async def _open_run(folder: Path) -> dict[str, str]:
    """Publish weights; return the facts that callers need."""
    learner = await StoreClient.connect(
        folder / "store.addr", role="learner", name="learner", config_digest=digest(config(CHANGES)), patience_s=30.0
    )
    await learner.publish(VersionRef(await learner.begin(None), "tcp", "nowhere", "none"))
    run_id = learner.welcome.run_id
    await learner.aclose()
    return {"run_id": run_id, "config_digest": digest(config(CHANGES))}


def measured(kind: str, seconds: float) -> dict[str, Any]:
    """The figures of one line of the table."""
    count, orders = ATTACKS.get(kind, (0, {}))
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        secret = protocol.create(folder)
        server = stack.enter_context(
            process("benchmarks.store.server", "ours", scratch, str(os.getpid()), json.dumps(CHANGES))
        )
        known = asyncio.run(_open_run(folder)) | {"parent": os.getpid()}
        address = (folder / "store.addr").read_text().strip()
        good = stack.enter_context(process("benchmarks.faults.good_client", scratch, json.dumps(known)))
        ready(good)
        token = protocol.bearer(secret, "sampler")
        knows = json.dumps(known | orders | {"address": address, "token": token})
        attackers = [stack.enter_context(process("benchmarks.faults.attacks", kind, knows)) for _ in range(count)]
        for attacker in attackers:
            ready(attacker)
        peak = _watch(psutil.Process(server.pid), seconds)
        did = ended(good)
        results = [ended(attacker) for attacker in attackers]
        if any(result["missed"] or result["strange"] for result in results):
            raise SystemExit(f"{kind} did not exercise its attack: {results}")
        counts = [result["counted"] for result in results]
        asyncio.run(_still_works(folder, str(known["config_digest"])))
    return {
        "attack": kind,
        **_times("put", did["put_s"]),
        **_times("renew", did["renew_s"]),
        "acknowledged": did["acknowledged"],
        "store_rss_mb": peak,
        "attackers_counted": counts,
    }


async def _still_works(folder: Path, config_digest: str) -> None:
    store = await StoreClient.connect(
        folder / "store.addr", role="sampler", name="late", config_digest=config_digest, patience_s=30.0
    )
    assert (await store.status())["conservation_residual"] == 0
    await store.aclose()


def _watch(server: psutil.Process, seconds: float) -> int:
    """The largest resident memory (MB) in the next `seconds`."""
    largest, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        largest = max(largest, server.memory_info().rss)
        time.sleep(0.1)
    return largest >> 20


def _times(name: str, seconds: list[float]) -> dict[str, float]:
    cut = statistics.quantiles(seconds, n=100, method="inclusive")
    figures = {"p50": cut[49], "p99": cut[98], "max": max(seconds)}
    return {f"{name}_{key}_ms": round(1e3 * value, 2) for key, value in figures.items()} | {f"{name}s": len(seconds)}


def main() -> None:
    """Print the table, then one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", default=",".join(("none", *ATTACKS)))
    parser.add_argument("--quick", action="store_true", help="one second of each, to show that it works")
    options = parser.parse_args()
    options.seconds = 1.0 if options.quick else options.seconds
    rows = []
    print("attack        puts  put p50/p99/max ms         renew p50/p99/max ms       store MB", flush=True)
    for kind in options.only.split(","):
        row = measured(kind, options.seconds)
        rows.append(row)
        print(
            f"{kind:12} {row['puts']:5}  {row['put_p50_ms']:7.2f} {row['put_p99_ms']:8.2f} {row['put_max_ms']:8.2f}"
            f"  {row['renew_p50_ms']:7.2f} {row['renew_p99_ms']:8.2f} {row['renew_max_ms']:8.2f}"
            f"  {row['store_rss_mb']:6}  {row['attackers_counted']}",
            flush=True,
        )
    worst = max(max(row["put_p99_ms"], row["renew_p99_ms"]) for row in rows)
    print(
        json.dumps(
            {
                "benchmark": "hostile",
                "worst_p99_ms": worst,
                "rows": rows,
                "hardware": hardware(),
                "commit": commit(),
                "seconds": options.seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
