"""Weights over tcp: to several receivers, with and without a relay tree, and to one over several connections."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.lib.child import Child
from benchmarks.lib.report import Runs, ratio, spread
from benchmarks.transfer.races import PAIRS, Ends, ask, channel_run
from benchmarks.transfer.two_ends import ROW_BYTES, Row

RELAYED, RELAY_ROWS, LINK_MB_S = (2, 4, 8), 128, 20.0
CONNECTIONS, PACES_MB_S = (1, 2, 4), (0.0, 50.0)


def relay_run(sender: Child, readers: Sequence[Child], peers: Sequence[Row], tree: bool, check: bool = False) -> Row:
    """One version to all `readers`: seconds until each has it, and the bytes that the learner sent."""
    from jaxroll.policy.routing import Receiver, assign, sources

    receivers = [Receiver(peer["name"]) for peer in peers]
    assigned = assign(receivers, [one.name for one in receivers])
    address = {peer["name"]: peer for peer in peers}
    found = [sources(one.name, receivers, assigned)[:-1] if tree else () for one in receivers]
    ref, before = ask(sender, "publish", channel="tcp")["ref"], ask(sender, "sent", channel="tcp")["bytes"]
    started, done = time.perf_counter(), []

    def fetch(reader: Child, relays: Sequence[str]) -> Row:
        row = ask(reader, "fetch", channel="tcp", ref=ref, check=check, relays=[address[name] for name in relays])
        done.append(time.perf_counter() - started)
        return row | {"done_s": done[-1]}

    with ThreadPoolExecutor(len(readers)) as pool:
        rows = [one.result() for one in [pool.submit(fetch, *pair) for pair in zip(readers, found, strict=True)]]
    assert all(row.get("exact", True) for row in rows), "wrong values"
    failed = [error for row in rows for _, _, _, error in row["sources"] if error]
    assert not failed, failed
    return {
        "total_s": max(done),
        "first_s": min(done),
        "done_s": [row["done_s"] for row in rows],
        "sent_bytes": ask(sender, "sent", channel="tcp")["bytes"] - before,
    }


def relay_case(run_dir: Path, rounds: int, args: argparse.Namespace) -> Row:
    """The learner alone and a relay tree, alternating, without and with links of LINK_MB_S."""
    size, result = RELAY_ROWS * ROW_BYTES, {}
    with Ends(run_dir, RELAY_ROWS) as ends:
        sender = ends.get("sender", 1)
        readers = [ends.get("receiver", 1, number) for number in range(max(RELAYED))]
        peers = [ask(reader, "listen", name=f"sampler-{number}") for number, reader in enumerate(readers)]
        for tree in (False, True):
            relay_run(sender, readers, peers, tree, check=True)
        for mb_s in (0.0, LINK_MB_S):
            for end in (sender, *readers):
                ask(end, "link", mb_s=mb_s)
            for count in RELAYED:
                some, near = readers[:count], peers[:count]
                arms = {
                    arm: functools.partial(relay_run, sender, some, near, arm == "tree") for arm in ("alone", "tree")
                }
                settings = {"bytes": size, "receivers": count, "link_mb_s": mb_s}
                rows = Runs("transfer-relay", settings, args.runs_file, args.resume).alternate(arms, rounds)
                result[f"{count}_receivers" + (f"_{mb_s:g}_mb_s" if mb_s else "")] = {
                    **{
                        f"{arm}_copies": spread([row["sent_bytes"] / size for row in found])
                        for arm, found in rows.items()
                    },
                    **{f"{arm}_s": spread([row["total_s"] for row in found]) for arm, found in rows.items()},
                    "tree_speed_over_alone": ratio(
                        [r["total_s"] for r in rows["alone"]], [r["total_s"] for r in rows["tree"]]
                    ),
                }
        result["throttled"] = throttled(sender, readers[:4], peers[:4], rounds)
    return {"bytes": size, "rounds": rounds, "link_mb_s": LINK_MB_S, **result}


def throttled(sender: Child, readers: Sequence[Child], peers: Sequence[Row], rounds: int) -> Row:
    """Seconds of the three other receivers while the last reads at a tenth of the links, and while it does not."""
    others: dict[str, list[float]] = {"full": [], "tenth": []}
    for number in range(rounds):
        for arm in list(others)[:: 1 if number % 2 == 0 else -1]:
            ask(readers[-1], "throttle", mb_s=LINK_MB_S / 10 if arm == "tenth" else 0.0)
            others[arm].append(max(relay_run(sender, readers, peers, True)["done_s"][:-1]))
    ask(readers[-1], "throttle", mb_s=0.0)
    return {
        **{arm: spread(found) for arm, found in others.items()},
        "tenth_over_full": ratio(others["tenth"], others["full"]),
    }


def connections_case(run_dir: Path, rows: int, pair: str, rounds: int, args: argparse.Namespace) -> Row:
    """One receiver over 1, 2 and 4 connections, alternating, without and with a limit for each connection."""
    found = {}
    with Ends(run_dir, rows) as ends:
        sender, receiver = (ends.get(kind, n) for kind, n in zip(("sender", "receiver"), PAIRS[pair], strict=True))
        for mb_s in PACES_MB_S:
            ask(sender, "pace", mb_s=mb_s)
            arms = {
                f"{count}": functools.partial(channel_run, sender, receiver, "tcp", connections=count)
                for count in CONNECTIONS
            }
            for count in CONNECTIONS:  # a receiver's memory is new in its first version
                channel_run(sender, receiver, "tcp", check=True, connections=count)
            settings = {"bytes": rows * ROW_BYTES, "pair": pair, "pace_mb_s": mb_s}
            timed = Runs("transfer-connections", settings, args.runs_file, args.resume).alternate(arms, rounds)
            fetched = {arm: [row["moved_s"] + row["digest_receiver_s"] for row in some] for arm, some in timed.items()}
            cpu = {arm: [row["receiver_cpu_s"] for row in some] for arm, some in timed.items()}
            found[f"{mb_s:g}_mb_s" if mb_s else "no_limit"] = {
                **{f"{arm}_s": spread(some) for arm, some in fetched.items()},
                **{f"{arm}_speed_over_1": ratio(fetched["1"], some) for arm, some in fetched.items() if arm != "1"},
                **{f"{arm}_receiver_cpu_over_1": ratio(some, cpu["1"]) for arm, some in cpu.items() if arm != "1"},
            }
    return found
