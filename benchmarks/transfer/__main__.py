"""Weights from one process to another: each channel next to a copy in memory, a raw socket and other libraries.

512 MiB of float32 parameters in 16 leaves, from 1 device to 1 and from 4 (split along the first axis) to 2 (along the
second). The arms run alternately. `moved_s` is the time of the bytes: from the sender's host memory to the receiver's,
manifest and plan included. The digests, which JaxRoll computes in addition, are measured in the same run and reported
apart, as are the copies between device and host. `whole_s` has everything, from arrays on the sender's devices to
arrays on the receiver's.

Baselines: `memcpy` (numpy, warm memory), `raw` (one plain socket, recv_into a warm buffer), Arrow Flight (do_get of 16
columns), orbax (save and restore in memory-backed files where there are any), jax.experimental.transfer (1 to 1 only:
it does not reshard). Processor seconds are those of the whole process, per GB.

`relay`: 2, 4 and 8 receivers of 16 MiB over tcp, from the learner alone and through a relay tree. Two cores carry all
processes, so the case runs also with links: each listener sends at most LINK_MB_S, an emulation by pauses. In
`throttled` one of four receivers reads at a tenth of that. `connections`: one receiver over 1, 2 and 4 connections,
also with a limit of the kernel for each.

Aims: shm ≥ 60 % of memcpy; tcp ≥ 80 % of raw and faster than Flight and orbax; sender and receiver ≤ 1.3 times the
processor seconds of raw.

    python -m benchmarks.transfer [--quick] [--rounds=5] [--case=all|channels|relay|connections] [--arms=tcp,raw]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.lib.report import Runs, arguments, finish, ratio, say, spread
from benchmarks.transfer.races import PAIRS, Ends, arms_of, ask, channel_run, usable
from benchmarks.transfer.relays import connections_case, relay_case
from benchmarks.transfer.two_ends import ROW_BYTES, Row

ALL_ROWS, QUICK_ROWS = 4096, 512  # of a leaf: 512 MiB, 64 MiB
RECEIVERS = (0, 1, 2, 4)
WARM = 4  # unmeasured runs: three versions take their memory, then it is reused
DIGEST = "additive, mod 2^64, odd weights by splitmix64 (jaxroll/transfer/manifest.py)"


def stall(ends: Ends, rounds: int) -> Row:
    """Seconds for which `start` blocks the learner's JAX thread while readers fetch the version before.

    On a busy machine the thread also waits for a core; `thread_cpu` does not contain that.
    """
    sender, rows = ends.get("sender", 1), {}
    for channel in ("shm", "tcp"):
        for count in RECEIVERS:
            readers = [ends.get("receiver", 1, number) for number in range(count)]
            blocked, busy = [], []
            for _ in range(rounds):
                ref = ask(sender, "publish", channel=channel)["ref"]
                with ThreadPoolExecutor(max(1, count)) as pool:
                    fetching = [pool.submit(ask, reader, "fetch", channel=channel, ref=ref) for reader in readers]
                    time.sleep(0.05)  # all of them are receiving
                    published = ask(sender, "publish", channel=channel)
                    blocked.append(published["blocked_s"])
                    busy.append(published["blocked_cpu_s"])
                    for one in fetching:
                        one.result()
            rows[f"{channel}_{count}"] = {"wall": spread(blocked), "thread_cpu": spread(busy)}
            say(f"blocked with {count} receivers over {channel}: {spread(blocked)}")
    copies = [ask(sender, "device_copy")["device_copy_s"] for _ in range(rounds)]
    return {**rows, "device_copy": spread(copies)}


def summary(rows: Mapping[str, list[Row]], size: int) -> Row:
    """Medians of each arm, and its ratios to the baselines."""
    gb, table = size / 1e9, {}
    for name, found in rows.items():
        keys = [key for key in found[0] if all(key in row for row in found)]
        table[name] = {key: spread([row[key] for row in found]) for key in keys}
        table[name]["gb_s"] = spread([gb / row["moved_s"] for row in found])
        table[name] |= {
            f"{end}_cpu_s_per_gb": spread([row[f"{end}_cpu_s"] / gb for row in found])
            for end in ("sender", "receiver")
            if f"{end}_cpu_s" in found[0]
        }

    def times(a: str, b: str, key: str = "moved_s") -> Row:
        return ratio([row[key] for row in rows[a]], [row[key] for row in rows[b]])

    pairs = [("memcpy", "shm"), ("raw", "tcp"), ("flight", "tcp"), ("raw", "tls"), ("jax", "tcp"), ("flight", "shm")]
    ratios = {f"{b}_speed_over_{a}": times(a, b) for a, b in pairs if a in rows and b in rows}
    for name in [name for name in ("shm", "tcp") if name in rows]:
        if "orbax" in rows:
            ratios[f"{name}_whole_speed_over_orbax"] = times("orbax", name, "whole_s")
        for end in ("sender", "receiver") if "raw" in rows else ():
            ratios[f"{name}_{end}_cpu_over_raw"] = times(name, "raw", f"{end}_cpu_s")
    return {"arms": table, "ratios": ratios}


def main() -> None:
    parser: argparse.ArgumentParser = arguments(__doc__ or "")
    parser.add_argument(
        "--case", choices=("all", "channels", "relay", "connections"), default="all", help="what to measure"
    )
    parser.add_argument("--arms", default="", help="only these channels and libraries: tcp,raw")
    args = parser.parse_args()
    started, rows = time.monotonic(), QUICK_ROWS if args.quick else ALL_ROWS
    rounds, size, only = args.rounds or (2 if args.quick else 5), rows * ROW_BYTES, set(args.arms.split(",")) - {""}
    memory = Path("/dev/shm")
    result: Row = {"bytes": size, "rounds": rounds, "digest": DIGEST}
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as files:
        from jaxroll.rpc import tls

        tls.make_certificates(Path(files), [], 1)
        if args.case in ("all", "relay"):
            result["relay"] = relay_case(Path(files), rounds, args)
        for pair in PAIRS if args.case in ("all", "connections") else ():
            result[f"connections_{pair}"] = connections_case(Path(files), rows, pair, rounds, args)
        for pair in PAIRS if args.case in ("all", "channels") else ():
            with Ends(Path(files), rows) as ends:
                runs = Runs("transfer", {"bytes": size, "pair": pair}, args.runs_file, args.resume)
                for channel in [name for name in ("shm", "tcp") if not only or name in only]:
                    sender, receiver = ends.get("sender", PAIRS[pair][0]), ends.get("receiver", PAIRS[pair][1])
                    first = channel_run(sender, receiver, channel, check=True)
                    result[f"first_version_{channel}_{pair}"] = size / 1e9 / first["moved_s"]
                wanted = {k: run for k, run in arms_of(ends, pair, Path(files)).items() if not only or k in only}
                arms, failed = usable(wanted, WARM)
                result[pair] = summary(runs.alternate(arms, rounds), size) | {"not_run": failed}
                if pair == "1to1" and not only:
                    result["jax_thread_blocked_s"] = stall(ends, rounds)
    finish(result, command=" ".join(["python -m benchmarks.transfer", *sys.argv[1:]]), started=started)


if __name__ == "__main__":
    main()
