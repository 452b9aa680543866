"""The benchmark programs: each prints its options, the store's runs a small version, the common parts are right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = re.findall(r"^BENCH \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
DEADLINE_S = 280


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_make_bench_runs_every_program() -> None:
    """Modules that read arguments; others are parts of these or started by them. `figures` only draws."""
    takes = {path for path in (ROOT / "benchmarks").rglob("*.py") if "parse_args(" in path.read_text()}
    takes = {path for path in takes if path.parent.name != "figures"}
    modules = {".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts) for path in takes}
    assert {module.removesuffix(".__main__") for module in modules} == set(PROGRAMS)


@pytest.mark.parametrize(("bench", "module"), [("engine", "cases"), ("learner", "__main__"), ("grpo", "__main__")])
def test_every_arm_of_a_race_is_a_module(bench: str, module: str) -> None:
    """The long test that races with the peers is the only other one that starts them."""
    text = (ROOT / "benchmarks" / bench / f"{module}.py").read_text()
    started = re.findall(r"Child\(\s*f?\"([\w.{}]+)\"", text)
    names = {name.replace("{arm}", arm) for name in started for arm in ("torch", "tunix")}
    assert names and all(name.startswith("benchmarks.") for name in names), started
    for name in names:
        assert (ROOT / f"{name.replace('.', '/')}.py").exists(), name


def test_a_package_of_the_same_name_does_not_hide_ours(tmp_path: Path) -> None:
    """A peer's wheel has one; a folder without `__init__.py` would lose against it wherever it is on the path."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    code = "import benchmarks.lib.report"
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


HELP = """
import contextlib, io, json, runpy, sys
found = {}
for name in sys.argv[1:]:
    sys.argv, text = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        runpy.run_module("benchmarks." + name, run_name="__main__", alter_sys=True)
    found[name] = text.getvalue()
print(json.dumps(found))
"""


def test_programs_say_what_they_take() -> None:
    """All in one process, which imports JAX once."""
    command = [sys.executable, "-c", HELP, *PROGRAMS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {name for name, text in found.items() if "--quick" in text} == set(PROGRAMS)


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(300)
def test_the_store_is_measured_and_loses_nothing(tmp_path: Path) -> None:
    runs, quick = tmp_path / "runs.jsonl", ["--quick", "--runs-file", str(tmp_path / "runs.jsonl")]
    done = run("store", *quick, "--folder", str(tmp_path / "disk"))
    result = json.loads(done.stdout.splitlines()[-1])
    rates = ["puts_per_s", "floor_puts_per_s", "sqlite_raw_puts_per_s", "fsyncs_per_s_of_the_disk"]
    times = ["put_p50_ms", "put_p99_ms", "lease_p99_ms", "claim_p99_ms", "recovery_s_per_gb"]
    assert all(result[key] > 0 for key in [*rates, *times])
    assert result["put_p50_ms"] <= result["put_p99_ms"]
    assert (result["synchronous"], result["in_flight"]) == ("FULL", 32)
    assert result["member_bytes"] >= 64_000
    assert result["bytes_written_per_byte"] > 1, "what is durable was written at least once"
    assert result["of_floor"]["low"] <= result["of_floor"]["value"] <= result["of_floor"]["high"]
    assert result["kill"]["interrupted"], "the kill came too late to interrupt anything"
    assert result["found"] == result["acknowledged"] > 0
    assert result["loop"]["conservation_residual"] == 0
    assert not list((tmp_path / "disk").iterdir()), "its files stay behind"
    arms = [(row["arm"], row["round"]) for row in map(json.loads, runs.read_text().splitlines())]
    puts = [("ours", 0), ("floor", 0), ("raw", 0), ("raw", 1), ("floor", 1), ("ours", 1)]
    assert arms == [("disk", 0), *puts, ("loop", 0), ("kill", 0)]


@pytest.mark.process
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_large_step_is_measured_without_a_peer_where_a_gpu_would_be(tmp_path: Path) -> None:
    """A small version on the CPU, whose peak rate is unknown, gives the figures that do not depend on it."""
    done = run("learner", "--quick", "--case=gpu_0p6b", "--runs-file", str(tmp_path / "runs.jsonl"))
    result = json.loads(done.stdout.splitlines()[-1])
    found = result["large_quick"]
    assert found["ours"] > 0 and found["flops_per_s"]["min"] > 0 and found["runs"] == 2
    assert (found["device"], found["mfu"], found["met"]) == ("cpu", None, None)
    assert found["attention"].startswith("xla") and np.isfinite(found["loss"])


@pytest.mark.process
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_engine_is_raced_and_watched(tmp_path: Path) -> None:
    """Peers that are not installed are left out with a message."""
    path, races = tmp_path / "runs.jsonl", {"tunix_lognormal": "tunix", "transformers_equal": "torch"}
    cases = [f"--case={name}" for name in [*races, "storm", "swap"]]
    done = run("engine", "--quick", "--rounds=2", "--runs-file", str(path), *cases)
    result = json.loads(done.stdout.splitlines()[-1])
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    for name, peer in races.items():
        if not (ROOT / f".venv-{peer}").exists():
            assert result[name] == {"skipped": f"no .venv-{peer}"}
            continue
        assert result[name]["greedy_equal"] == 1.0
        assert result[name]["low"] <= result[name]["ratio"] <= result[name]["high"]
        order = [(row["arm"], row["round"]) for row in runs if row["arm"] in (f"{name} ours", f"{name} {peer}")]
        arms = f"{name} ours", f"{name} {peer}"
        assert order == [(arms[0], 0), (arms[1], 0), (arms[1], 1), (arms[0], 1)]
    storm, swap = result["storm"], result["swap"]
    assert storm["adds"] > storm["aborts"] > 0 and storm["prefill_tokens"] > 0
    assert all(value > 0 for value in storm["p99_ms"]["storm"].values()) and storm["first_token_ms"]["99"] > 0
    assert swap["pause_chunks"]["runs"] > 0
