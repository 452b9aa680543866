"""Common parts of the benchmarks: alternating runs, ratios with an interval, the hardware, the JSON object at the end.

A result names its command, the hardware, the commit and the load.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
_RESAMPLES = 10_000


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks: --quick, --rounds, --runs-file, --resume."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="at most a minute, to show that it works")
    parser.add_argument("--rounds", type=int, default=0, help="alternating rounds; 0: the benchmark's default")
    parser.add_argument(
        "--runs-file", type=Path, help="file to which each run is appended (default: under .cache/benchmarks)"
    )
    parser.add_argument("--resume", action="store_true", help="continue with the runs of an interrupted call")
    return parser


def hardware() -> str:
    """Description of the machine without its name: processor, cores, memory, system, Python."""
    memory_gb = psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    python = f"Python {platform.python_version()}"
    return f"{_processor()}, {cores} cores, {memory_gb:.0f} GiB, {platform.system()} {platform.machine()}, {python}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def commit() -> str:
    """The measured commit, with a digest of uncommitted changes."""
    head, changes = _git("rev-parse", "--short", "HEAD"), _git("diff", "HEAD")
    if not head:
        return "no commit"
    return f"{head}+{hashlib.blake2b(changes.encode(), digest_size=3).hexdigest()}" if changes else head


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


class Runs:
    """The runs of one benchmark, each appended to a file when it ends, so that a long benchmark can be interrupted.

    With `resume`, runs in the file that belong to the same commit and `settings` are not made again.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], path: Path | None, resume: bool) -> None:
        self.path = path or ROOT / ".cache" / "benchmarks" / f"{name}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._same = {"benchmark": name, "commit": commit(), "settings": json.loads(json.dumps(settings))}
        self._known = self._read() if resume else {}

    def _read(self) -> dict[tuple[str, int], dict[str, Any]]:
        if not self.path.is_file():
            return {}
        rows = [json.loads(line) for line in self.path.read_text().splitlines() if line.endswith("}")]
        mine = [row for row in rows if all(row.get(key) == value for key, value in self._same.items())]
        return {(row["arm"], row["round"]): row["result"] for row in mine}

    def run(self, arm: str, number: int, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of `measure()`, or of the run that is already in the file."""
        if (arm, number) in self._known:
            say(f"{arm}, round {number}: taken from {self.path}")
            return self._known[arm, number]
        started = time.monotonic()
        result = measure()
        row = self._same | {"arm": arm, "round": number, "load": _load(), "result": result}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        short = {key: value for key, value in result.items() if isinstance(value, (int, float, str))}
        say(f"{arm}, round {number} ({time.monotonic() - started:.1f} s): {_plain(short)}")
        return result

    def alternate(self, arms: Mapping[str, Callable[[], dict[str, Any]]], rounds: int) -> dict[str, list[dict]]:
        """Run all arms in `rounds` rounds, in reversed order in every second round; return the results by arm."""
        results: dict[str, list[dict]] = {arm: [] for arm in arms}
        for number in range(rounds):
            order = list(arms)[:: 1 if number % 2 == 0 else -1]
            for arm in order:
                results[arm].append(self.run(arm, number, arms[arm]))
        return results


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Geometric mean of ours[i] / theirs[i], with a 95 % interval: paired bootstrap over the rounds."""
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f"{len(ours)} runs cannot be paired with {len(theirs)}")
    logs = np.log(np.asarray(ours, float) / np.asarray(theirs, float))
    picks = np.random.default_rng(seed).integers(0, len(logs), (_RESAMPLES, len(logs)))
    low, high = np.percentile(logs[picks].mean(axis=1), [2.5, 97.5])
    return {"value": float(np.exp(logs.mean())), "low": float(np.exp(low)), "high": float(np.exp(high))}


def percentile_ms(latencies_s: Sequence[float], percent: float) -> float:
    """The percentile of `latencies_s`, in milliseconds."""
    return float(np.percentile(np.asarray(latencies_s), percent)) * 1e3


def say(text: str) -> None:
    """Print progress on stderr: the last line of stdout is the result."""
    print(text, file=sys.stderr, flush=True)


def finish(result: Mapping[str, Any], *, command: str, started: float) -> None:
    """Print `result` with command, hardware, commit and load as one JSON object on the last line."""
    facts = {"command": command, "hardware": hardware(), "commit": commit(), "load_average": _load()}
    print(json.dumps(_plain({**result, **facts, "wall_s": time.monotonic() - started})), flush=True)


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def _plain(value: Any) -> Any:
    """`value` with floats rounded to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
