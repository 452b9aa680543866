"""Single runs of the transfer benchmark, by channels of JaxRoll and by other libraries, between child processes."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.child import Child
from benchmarks.lib.report import say
from benchmarks.transfer.two_ends import Row

PAIRS = {"1to1": (1, 1), "4to2": (4, 2)}


def ask(child: Child, do: str, **words: Any) -> Row:
    return child.ask(json.dumps({"do": do, **words}))


def channel_run(sender: Child, receiver: Child, channel: str, check: bool = False, connections: int = 1) -> Row:
    """One version over a channel of JaxRoll. `moved_s` is the copy into shared memory, if any, and the fetch."""
    before = ask(sender, "cpu")["cpu_s"]
    published = ask(sender, "publish", channel=channel)
    copied = ask(sender, "cpu")["cpu_s"]
    words = {"channel": channel, "ref": published.pop("ref"), "check": check, "connections": connections}
    got = ask(receiver, "fetch", **words)
    served = ask(sender, "cpu")["cpu_s"] - copied
    assert got.pop("exact", True), f"{channel}: wrong values"
    return {
        "moved_s": published["hold_s"] + got["moved_s"],
        "whole_s": published["publish_s"] + got["moved_s"] + got["digest_s"] + got["place_s"],
        "digest_sender_s": published["digest_s"],
        "digest_receiver_s": got["digest_s"],
        "place_s": got["place_s"],
        "blocked_s": published["blocked_s"],
        "sender_cpu_s": served + published["hold_cpu_s"],
        "receiver_cpu_s": got["cpu_s"],
        "publish_cpu_s": copied - before,
        "hold_s": published["hold_s"],
    }


def served_run(sender: Child, receiver: Child, what: str, **words: Any) -> Row:
    """One transfer by a baseline: the sender's answer are the receiver's arguments."""
    before = ask(sender, "cpu")["cpu_s"]
    got = ask(receiver, what, **ask(sender, what, **words))
    return {
        "moved_s": got["moved_s"],
        "receiver_cpu_s": got["cpu_s"],
        "sender_cpu_s": ask(sender, "cpu")["cpu_s"] - before,
    }


def orbax_run(sender: Child, receiver: Child, root: Path) -> Row:
    folder = root / f"orbax-{time.monotonic_ns()}"
    try:
        saved = ask(sender, "orbax", folder=str(folder))
        restored = ask(receiver, "orbax", folder=str(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    whole_s = saved["save_s"] + restored["moved_s"]
    return {"moved_s": whole_s, "whole_s": whole_s}


class Ends:
    """The child processes of the benchmark, started when first used."""

    def __init__(self, run_dir: Path, rows: int) -> None:
        self._run_dir, self._rows = run_dir, rows
        self._stack, self._started = contextlib.ExitStack(), {}

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, kind: str, devices: int, number: int = 0) -> Child:
        key = (kind, devices, number)
        if key not in self._started:
            words = (kind, str(self._run_dir), str(self._rows))
            self._started[key] = Child("benchmarks.transfer.two_ends", "ours", 1, *words, devices=devices)
            self._stack.callback(self._started[key].close)
        return self._started[key]


def arms_of(ends: Ends, pair: str, files: Path) -> dict[str, Callable[[], Row]]:
    sender, receiver = (ends.get(kind, n) for kind, n in zip(("sender", "receiver"), PAIRS[pair], strict=True))
    arms: dict[str, Callable[[], Row]] = {
        "shm": lambda: channel_run(sender, receiver, "shm"),
        "tcp": lambda: channel_run(sender, receiver, "tcp"),
        "memcpy": lambda: ask(receiver, "memcpy"),
        "raw": lambda: served_run(sender, receiver, "raw"),
        "flight": lambda: served_run(sender, receiver, "flight"),
        "orbax": lambda: orbax_run(sender, receiver, files),
    }
    if pair == "1to1":
        arms["tls"] = lambda: channel_run(sender, receiver, "tls")
        own = lambda kind: ends.get(kind, 1, 9)  # noqa: E731 - its server may abort its process
        arms["jax"] = lambda: served_run(own("sender"), own("receiver"), "jax")
    return arms


def usable(arms: Mapping[str, Callable[[], Row]], warm: int) -> tuple[dict[str, Callable[[], Row]], Row]:
    """The arms that run here, after their unmeasured runs, and why the others do not."""
    kept, failed = {}, {}
    for name, run in arms.items():
        try:
            for _ in range(warm if name == "shm" else 1):
                run()
            kept[name] = run
        except RuntimeError as error:
            failed[name] = str(error).strip().splitlines()[-1][:300]
            say(f"{name} does not run here: {failed[name]}")
    return kept, failed
