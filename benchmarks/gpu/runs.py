"""Whole runs on the card: `jaxroll train` with shared and with separate processes, and the demo."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import Case, run_case
from benchmarks.lib.report import ROOT

ON_CARD = {"cuda": "gpu", "cpu": "cpu"}
SEPARATE = (
    "placement.learner_memory_fraction=0.35",
    "placement.sampler_memory_fraction=0.25",
    "placement.evaluator_memory_fraction=0.15",
)
NOTHING = {"conservation_residual": 0, "groups_trained_twice": 0, "restarts": 0, "compiles_after_warmup": 0}
KEYS = (
    "steps",
    "steps_wanted",
    "seconds",
    "rl_seconds",
    "samples_per_s",
    "train_tokens_per_s",
    "tokens_per_s",
    "overlap",
    "sampler_busy_share",
    "slot_occupancy",
    "learner_wait_share",
    "logprob_mismatch_max",
    "age_mean",
    "age_max",
    "accuracy_start",
    "accuracy_end",
    "accuracy_gain",
    "accuracy_gain_low",
    "compiles_after_warmup",
    "conservation_residual",
    "groups_trained_twice",
    "restarts",
)


def _platform() -> str:
    return ON_CARD[os.environ["JAX_PLATFORMS"]]


def jaxroll(case: Case, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Seconds of a command; RuntimeError with the end of its output if it fails or takes too long."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    started, log = time.perf_counter(), folder / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxroll", *_options(words)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            code = process.wait(max(1.0, case.left_s() - 5))
        except subprocess.TimeoutExpired:
            process.terminate()  # the supervisor ends its roles
            try:
                process.wait(4)
            except subprocess.TimeoutExpired:
                process.kill()
            code = None
    if code != 0:
        raise RuntimeError(
            f"jaxroll {words[0]} {'took too long' if code is None else f'ended with {code}'}: {_tail(folder)}"
        )
    return {"seconds_in_all": time.perf_counter() - started}


def _options(words: Sequence[str]) -> list[str]:
    """`words` with each KEY=VALUE as an override of the config."""
    return [f"--config.{word}" if "=" in word and not word.startswith("-") else word for word in words]


def _tail(folder: Path) -> str:
    """The end of the command's output and of the roles' logs, one of which has the cause."""
    logs = sorted(folder.rglob("logs/*.log"), key=lambda path: path.stat().st_mtime)[-2:]
    return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-600:]}" for path in [folder / "output", *logs])


def report(run: Path) -> dict[str, Any]:
    """The run's summary."""
    words = [sys.executable, "-m", "jaxroll", "report", str(run), "--json"]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)


def broken(found: dict[str, Any]) -> list[str]:
    """The invariants that a run's summary breaks."""
    wrong = [f"{key} = {found.get(key)}" for key, wanted in NOTHING.items() if found.get(key) != wanted]
    if found.get("steps") != found["steps_wanted"]:
        wrong.append(f"{found.get('steps')} of {found['steps_wanted']} steps")
    if (found.get("age_max") or 0) > math.ceil(found["alpha"]):
        wrong.append(f"age {found['age_max']} with alpha {found['alpha']}")
    return wrong


def _facts(run: Path, seconds: dict[str, Any]) -> dict[str, Any]:
    found = report(run)
    wrong = broken(found)
    steps_per_s = found["steps"] / found["rl_seconds"] if found.get("rl_seconds") else None
    if wrong:
        raise RuntimeError(f"the run ended, but {'; '.join(wrong)}")
    return seconds | {key: found[key] for key in KEYS if key in found} | {"steps_per_s": steps_per_s}


def train(case: Case) -> None:
    """A small model, all roles in one process and each in its own; then Qwen3-0.6B's layers in one process."""
    case.put(platform=_platform())
    steps = 3 if case.quick else 20
    small = [
        "--config=" + str(ROOT / "configs" / "smoke.py"),
        f"placement.platform={_platform()}",
        f"schedule.steps={steps}",
        "transfer.deadline_s=200",
    ]
    if case.quick:
        small += ["sft.steps=0", "evaluator.every=0"]
    else:
        small += [
            "evaluator.every=10",
            "model.size=tiny",
            "schedule.groups_per_step=16",
            "schedule.group_size=8",
            "sampler.slots=64",
            "sampler.decode_chunk=8",
            "sft.steps=50",
            "sft.batch=64",
            "learner.row_tokens=256",
        ]
    together = ["placement.colocated=True"]
    case.point("in one process", lambda: _trained(case, [*small, *together]))
    if _platform() == "gpu":  # a CPU reports no limit of its memory
        by_memory = [*together, "sampler.memory_fraction=0.3"]
        case.point("in one process, KV cache by memory", lambda: _trained(case, [*small, *by_memory]))
    case.point("in processes of their own", lambda: _trained(case, [*small, *SEPARATE]))
    size = "nano" if case.quick else "qwen3_0p6b"
    large = [
        f"model.size={size}",
        "model.dtype=bfloat16",
        "transfer.dtype=bfloat16",
        "sft.steps=0",
        "schedule.steps=4",
        "evaluator.every=0",
        "learner.learning_rate=1e-6",
    ]
    case.point(
        "Qwen3-0.6B's layers in one process",
        lambda: _trained(case, [*small, *large, *together]),
        needs_s=5 if case.quick else 60,
    )


def _trained(case: Case, words: Sequence[str]) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="train-"))
    try:
        seconds = jaxroll(case, folder, ["train", words[0], f"--run={folder / 'run'}", *words[1:]])
        return _facts(folder / "run", seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def demo(case: Case) -> None:
    """`jaxroll demo` with one device per role: its time, and the gain in its report."""
    case.put(platform=_platform())
    words = ["demo", f"placement.platform={_platform()}", "learner.mesh.fsdp=1", "sampler.mesh.tensor=1", *SEPARATE]
    if case.quick:
        words += ["model.size=nano", "schedule.steps=2", "sft.steps=2", "task.heldout_items=16"]

    def measure() -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(prefix="demo-"))
        try:
            return _facts((folder / "runs" / "demo").resolve(), jaxroll(case, folder, words))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    case.point("demo", measure)


if __name__ == "__main__":
    run_case({"train": train, "demo": demo})
