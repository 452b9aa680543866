"""Durable puts per second, and the cost of the store's contract compared with a minimal server.

    python -m benchmarks.store [--quick] [--rounds=N] [--resume] [--folder=DIR] [--standby]

The processes and the disk are real: a store, four samplers. Rounds of the same puts alternate between the store, a
floor (bare grpc.aio before SQLite with synchronous=FULL, the same clients) and SQLite alone (same bytes, same puts per
commit). Then comes a whole loop with a learner that claims, publishes, acknowledges and trims, and then a store that is
killed during its puts; all acknowledged members must be in the file. The last line is one JSON object.

With `--standby` rounds alternate between the store alone and the store with a standby on the same machine and disk.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib.report import ROOT, Runs, arguments, finish, percentile_ms, ratio, say, spread
from benchmarks.store.client import outcome
from benchmarks.store.processes import Samplers, Scale, open_run, put_config, serving, version_ref
from jaxroll import wire
from jaxroll.errors import NotReady
from jaxroll.records import Member, Version
from jaxroll.store.client import StoreClient

SYNCHRONOUS = {0: "OFF", 1: "NORMAL", 2: "FULL", 3: "EXTRA"}
QUICK = Scale(puts=256, rounds=2, loop_steps=6, loop_groups=4, killed_puts=512, disk_s=0.2)


def put_round(kind: str, scale: Scale, folder: Path, **changes: Any) -> dict[str, Any]:
    """`puts` puts to a new server from all clients at once: rate, latencies, bytes written."""
    with serving(kind, folder, put_config(scale, scale.puts) | changes) as server:
        open_run(server)
        samplers = Samplers(server, "puts", scale, puts=scale.puts // scale.clients)
        facts, before = server.log_facts(), server.usage()
        samplers.go()
        results = samplers.results()
        after, facts_after = server.usage(), server.log_facts()
    puts = sum(len(result["acknowledged"]) for result in results)
    seconds = max(r["ended"] for r in results) - min(r["started"] for r in results)
    measured = {
        "puts_per_s": puts / seconds,
        "server_cpu_ms_per_put": (after["cpu_s"] - before["cpu_s"]) / puts * 1e3,
        "written_per_byte": (after["written"] - before["written"])
        / sum(r["payload_bytes"] * len(r["acknowledged"]) for r in results),
        "payload_bytes": results[0]["payload_bytes"],
        "put_s": [round(s, 6) for r in results for s in r["put_s"]],
    }
    if facts_after:
        commits = max(1, facts_after["commits"] - facts["commits"])
        measured |= {"puts_per_commit": puts / commits, "commits_per_s": commits / seconds}
        measured["synchronous"] = SYNCHRONOUS[facts_after["synchronous"]]
    return measured


def raw_round(scale: Scale, folder: Path, puts_per_commit: int) -> dict[str, Any]:
    """The same bytes directly into SQLite (WAL, synchronous=FULL), with as many per commit."""
    member = Member(0, 0, 1, outcome(scale.payload_bytes, Version(0, 0)))
    place = Path(tempfile.mkdtemp(prefix="raw-", dir=folder))
    connection = sqlite3.connect(place / "raw.db", isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE payloads (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        body, started = wire.encode(member), time.perf_counter()
        for first in range(0, scale.puts, puts_per_commit):
            rows = [(body,)] * min(puts_per_commit, scale.puts - first)
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO payloads (body) VALUES (?)", rows)
            connection.execute("COMMIT")
        return {"puts_per_s": scale.puts / (time.perf_counter() - started), "puts_per_commit": puts_per_commit}
    finally:
        connection.close()
        shutil.rmtree(place)


def disk_round(scale: Scale, folder: Path) -> dict[str, Any]:
    """fsyncs per second of an appended 4 KB page."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        count, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < scale.disk_s:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            count += 1
        return {"fsyncs_per_s": count / seconds}


def loop_round(scale: Scale, folder: Path) -> dict[str, Any]:
    """Samplers and a learner in a whole loop; leases and claims are timed if they succeed at once."""
    changes = {
        "steps": scale.loop_steps,
        "groups_per_step": scale.loop_groups,
        "group_size": scale.group_size,
        "alpha": 1.0,
        "lease_s": 600.0,
    }
    with serving("ours", folder, changes) as server:
        open_run(server)
        before = server.usage()
        samplers = Samplers(server, "loop", scale, lease_members=2 * scale.group_size)
        claim_s = server.ask(lambda learner: _learn(learner, scale.loop_steps))
        results = samplers.results()
        after = server.usage()
        status = server.ask(lambda client: client.status())
    seconds = max(r["ended"] for r in results) - min(r["started"] for r in results)
    trained = scale.loop_steps * scale.loop_groups * scale.group_size
    put_bytes = sum(len(r["acknowledged"]) * r["payload_bytes"] for r in results)
    return {
        "members_per_s": trained / seconds,
        "steps": len(claim_s),
        "claim_s": claim_s,
        "lease_s": [s for r in results for s in r["lease_s"]],
        "put_s": [s for r in results for s in r["put_s"]],
        "written_per_byte": (after["written"] - before["written"]) / put_bytes,
        "conservation_residual": status["conservation_residual"],
        "expired": status["expired"],
    }


async def _learn(learner: StoreClient, steps: int) -> list[float]:
    """Claim, publish, acknowledge, with a checkpoint every four steps; return the seconds of each ready claim."""
    seconds = []
    version = await learner.begin(None)
    for step in range(steps):
        seconds.append(await _claim(learner, version, step))
        await learner.publish(version_ref(Version(version.lineage, step + 1)))
        await learner.ack(Version(version.lineage, step))
        if step % 4 == 3:
            await learner.durable(Version(version.lineage, step + 1))
    await learner.durable(Version(version.lineage, steps))
    await learner.close_run("measured")
    return seconds


async def _claim(learner: StoreClient, version: Version, step: int) -> float:
    while True:
        started = time.perf_counter()
        try:
            await learner.claim(version.lineage, step)
            return time.perf_counter() - started
        except NotReady:
            await asyncio.sleep(0.002)


def kill_round(scale: Scale, folder: Path) -> dict[str, Any]:
    """Kill the store during puts: seconds until it answers again, and the number of acknowledged puts that it has."""
    with serving("ours", folder, put_config(scale, scale.killed_puts)) as server:
        empty_s = time.monotonic() - server.started
        open_run(server)
        share = scale.killed_puts // scale.clients
        samplers = Samplers(server, "puts", scale, puts=share, digests=True, may_die=True, patience_s=0.0)
        samplers.go()
        while _rows(server.folder) < scale.killed_puts - max(256, 0.1 * scale.killed_puts):
            time.sleep(0.01)
        server.kill()
        results = samplers.results()
        acknowledged = {(group, member): digest for r in results for group, member, digest in r["acknowledged"]}
        on_disk = sum(path.stat().st_size for path in server.folder.glob("store.db*"))
        server.start()
        server.ask(lambda client: client.status())
        seconds = time.monotonic() - server.started
        found, healthy = _found(server.folder, acknowledged)
    gigabytes = len(acknowledged) * results[0]["payload_bytes"] / 1e9
    return {
        "acknowledged": len(acknowledged),
        "found": found,
        "integrity": healthy,
        "put_before_kill_gb": gigabytes,
        "file_gb": on_disk / 1e9,
        "recovery_s": seconds,
        "empty_start_s": empty_s,
        "recovery_s_per_gb": seconds / gigabytes,
        "interrupted": sum(len(r["put_s"]) for r in results) < scale.killed_puts,
    }


def _rows(folder: Path) -> int:
    db = sqlite3.connect(f"{(folder / 'store.db').absolute().as_uri()}?mode=ro", uri=True)
    try:
        return db.execute("SELECT COUNT(*) FROM payloads").fetchone()[0]
    finally:
        db.close()


def _found(folder: Path, acknowledged: dict[tuple[int, int], str]) -> tuple[int, str]:
    """The number of acknowledged members that are in the file with their bytes, and SQLite's integrity check."""
    db = sqlite3.connect(f"{(folder / 'store.db').absolute().as_uri()}?mode=ro", uri=True)
    try:
        rows = db.execute("SELECT group_id, member, body FROM payloads")
        found = sum(acknowledged.get((group, member)) == wire.digest(body) for group, member, body in rows)
        return found, db.execute("PRAGMA quick_check").fetchone()[0]
    finally:
        db.close()


def summary(scale: Scale, results: dict[str, list[dict]], loop: dict, killed: dict, disk: dict) -> dict[str, Any]:
    """The printed object."""
    rates = {arm: [r["puts_per_s"] for r in runs] for arm, runs in results.items()}
    put_s = {arm: [s for r in results[arm] for s in r["put_s"]] for arm in ("ours", "floor")}
    ours = results["ours"]
    return {
        "puts_per_s": spread(rates["ours"])["median"],
        "put_p50_ms": percentile_ms(put_s["ours"], 50),
        "put_p99_ms": percentile_ms(put_s["ours"], 99),
        "lease_p99_ms": percentile_ms(loop["lease_s"], 99),
        "claim_p99_ms": percentile_ms(loop["claim_s"], 99),
        "recovery_s_per_gb": killed["recovery_s_per_gb"],
        "bytes_written_per_byte": spread([r["written_per_byte"] for r in ours])["median"],
        "fsyncs_per_s_of_the_disk": disk["fsyncs_per_s"],
        "sqlite_raw_puts_per_s": spread(rates["raw"])["median"],
        "synchronous": ours[-1]["synchronous"],
        "in_flight": scale.clients * scale.in_flight,
        "floor_puts_per_s": spread(rates["floor"])["median"],
        "of_floor": ratio(rates["ours"], rates["floor"]),
        "of_raw": ratio(rates["ours"], rates["raw"]),
        "acknowledged": killed["acknowledged"],
        "found": killed["found"],
        "floor_put_p50_ms": percentile_ms(put_s["floor"], 50),
        "floor_put_p99_ms": percentile_ms(put_s["floor"], 99),
        "puts_per_commit": spread([r["puts_per_commit"] for r in ours])["median"],
        "server_cpu_ms_per_put": spread([r["server_cpu_ms_per_put"] for r in ours])["median"],
        "floor_cpu_ms_per_put": spread([r["server_cpu_ms_per_put"] for r in results["floor"]])["median"],
        "member_bytes": ours[-1]["payload_bytes"],
        "spread": {arm: spread(values) for arm, values in rates.items()},
        "loop": {
            "members_per_s": loop["members_per_s"],
            "put_p99_ms": percentile_ms(loop["put_s"], 99),
            "lease_p50_ms": percentile_ms(loop["lease_s"], 50),
            "claim_p50_ms": percentile_ms(loop["claim_s"], 50),
            "claim_mb": scale.loop_groups * scale.group_size * ours[-1]["payload_bytes"] / 1e6,
            "bytes_written_per_byte": loop["written_per_byte"],
            "conservation_residual": loop["conservation_residual"],
        },
        "kill": killed,
        "scale": asdict(scale),
        "class": "R",
    }


def standby_summary(scale: Scale, results: dict[str, list[dict]]) -> dict[str, Any]:
    """The printed object of `--standby`."""
    rates = {arm: [r["puts_per_s"] for r in runs] for arm, runs in results.items()}
    commits = {arm: [r["commits_per_s"] for r in runs] for arm, runs in results.items()}
    put_s = {arm: [s for r in runs for s in r["put_s"]] for arm, runs in results.items()}
    return {
        "puts_with_standby": ratio(rates["standby"], rates["alone"]),
        "commits_with_standby": ratio(commits["standby"], commits["alone"]),
        "put_ms": {arm: {p: percentile_ms(s, p) for p in (50, 99)} for arm, s in put_s.items()},
        "puts_per_commit": {arm: spread([r["puts_per_commit"] for r in runs]) for arm, runs in results.items()},
        "spread": {arm: spread(values) for arm, values in rates.items()},
        "member_bytes": results["alone"][-1]["payload_bytes"],
        "scale": asdict(scale),
        "class": "R",
    }


def main() -> int:
    """Measure; return 1 if an acknowledged put is lost."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--folder", type=Path, help="folder for the servers, which determines the measured disk")
    parser.add_argument("--standby", action="store_true", help="the cost of a standby on the same machine")
    chosen, started = parser.parse_args(), time.monotonic()
    scale = QUICK if chosen.quick else Scale()
    name = "store_standby" if chosen.standby else "store"
    runs = Runs(name, asdict(scale), chosen.runs_file, chosen.resume)
    place = chosen.folder or ROOT / ".cache" / "benchmarks"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="store-", dir=place) as name:
        folder = Path(name)
        if chosen.standby:
            pair = {
                "alone": lambda: put_round("ours", scale, folder),
                "standby": lambda: put_round("ours", scale, folder, standby=True),
            }
            found = standby_summary(scale, runs.alternate(pair, chosen.rounds or scale.rounds))
            finish(found, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
            return 0
        disk = runs.run("disk", 0, lambda: disk_round(scale, folder))
        per_commit = [scale.clients * scale.in_flight]  # until the first round of ours gives the number

        def ours() -> dict[str, Any]:
            result = put_round("ours", scale, folder)
            per_commit[0] = max(1, round(result["puts_per_commit"]))
            return result

        arms = {
            "ours": ours,
            "floor": lambda: put_round("floor", scale, folder),
            "raw": lambda: raw_round(scale, folder, per_commit[0]),
        }
        results = runs.alternate(arms, chosen.rounds or scale.rounds)
        loop = runs.run("loop", 0, lambda: loop_round(scale, folder))
        killed = runs.run("kill", 0, lambda: kill_round(scale, folder))
    result = summary(scale, results, loop, killed, disk)
    finish(result, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
    lost = killed["acknowledged"] - killed["found"]
    if lost:
        say(f"{lost} acknowledged puts are not in the file")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
