"""benchmarks/gpu without a GPU: a failing case affects no other, errors are found, small versions run."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
NEWS = 'import json, os, subprocess, sys, time\nwrite = lambda **of: open(sys.argv[2], "w").write(json.dumps(of))\n'


# Points of each case in a rehearsal; a point that is no longer measured is missed here.
REHEARSED = {
    "limits": 7, "attention": 9, "decode": 3, "learner": 7, "train": 3, "transfer": 8, "prefill": 3, "engine": 2,
    "demo": 1, "learner_whole": 1,
}  # fmt: skip


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the folder as its scripts do."""
    return importlib.import_module


def bench(
    gpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    seconds: float = 300.0,
    **programs: tuple[str, float],
) -> dict[str, Any]:
    """The result in the file after a call with these programs (text, longest time) as cases."""
    cases = {}
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name, (text, most_s) in programs.items():
        (folder / f"case_{name}.py").write_text(NEWS + text)
        cases[name] = gpu.Entry(f"case_{name}", most_s)
    monkeypatch.setattr(gpu, "CASES", cases)
    with gpu.Bench(folder / "out.json", "cpu", False, seconds) as made:
        for number, name in enumerate(cases, 1):
            made.run(name, list(cases)[number:])
        assert json.loads(made.line())["failed"] == made.result["failed"]
    return json.loads((folder / "out.json").read_text())


def lives(pid: int) -> bool:
    """True if a process runs; one that ended and is not reaped yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.process
def test_a_case_that_hangs_or_dies_costs_itself_alone(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sleeper = 'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])\n'
    hang = sleeper + 'write(points={"one": {"a": 1}}, child=child.pid)\ntime.sleep(600)\n'
    result = bench(
        load("benchmarks.gpu.__main__"),
        monkeypatch,
        tmp_path,
        hangs=(hang, 4.0),
        dies=('write(points={"one": {"a": 2}})\nprint("why", file=sys.stderr)\nos._exit(3)\n', 60.0),
        raised=('write(points={"one": {"error": "ValueError"}, "two": {"a": 4}})\n', 60.0),
        unequal=('write(points={"one": {"equal": False}})\n', 60.0),
        skips=('write(points={"one": {"skipped": "no torch"}, "two": {"a": 5}})\n', 60.0),
        works=('write(points={"one": {"a": 3}})\n', 60.0),
    )
    assert result["failed"] == ["hangs", "dies", "raised", "unequal"] and result["out_of_time"] == ["hangs"]
    assert result["skipped"] == ["skips: one: no torch"], "it is no failure, but a rehearsal must not have it"
    assert [result[name]["points"]["one"].get("a") for name in ("hangs", "dies", "works")] == [1, 2, 3]
    assert "killed after 4 s" in result["hangs"]["error"] and "ended with 3" in result["dies"]["error"]
    assert "why" in result["dies"]["log"]
    assert not lives(result["hangs"]["child"]), "what a case started outlives it"
    assert result["raised"]["points"]["two"] == {"a": 4}


def test_one_call_of_ten_minutes_reaches_every_case(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If every case takes all its time, each still has its share; the first cases are the most valuable."""
    gpu, now = load("benchmarks.gpu.__main__"), SimpleNamespace(s=0.0)
    minutes = gpu.arguments(["--quick", "--platform=cpu"]).minutes
    names = list(gpu.CASES)
    assert minutes == 10 and names[:4] == ["limits", "attention", "decode", "learner"]
    assert sum(entry.share_s for entry in gpu.CASES.values()) + gpu.END_S <= 60 * minutes
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now.s)
    limits = {}
    with gpu.Bench(tmp_path / "out.json", "cpu", True, 60 * minutes) as made:
        for number, name in enumerate(names, 1):
            limits[name] = made.limit_s(name, names[number:])
            now.s += limits[name]
            assert limits[name] >= gpu.CASES[name].share_s and made.left_s() >= gpu.END_S - 1e-6
        assert sum(limits.values()) <= 60 * minutes
        now.s = 60.0
        assert made.limit_s("demo", ["torch"]) == pytest.approx((540 - gpu.END_S) * 0.6), "unused time goes on"


@pytest.mark.process
@pytest.mark.soak
def test_cases_that_hang_leave_the_others_their_time(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = load("benchmarks.gpu.__main__")
    monkeypatch.setattr(gpu, "END_S", 0.5)
    monkeypatch.setattr(gpu, "START_S", 0.5)
    hang = ("time.sleep(600)\n", 1.0)
    late = ('write(points={"one": {"skipped": "3 s left of this case, 5 needed"}})\n', 10.0)
    result = bench(gpu, monkeypatch, tmp_path, seconds=14.0, one=hang, two=hang, three=hang, last=late)
    assert result["failed"] == ["one", "two", "three"] and result["last"]["points"]
    assert result["out_of_time"] == ["one", "two", "three", "last: one"] and not result["skipped"]
    assert sum(result[name]["limit_s"] for name in ("one", "two", "three")) <= 14.0


def test_a_share_above_its_limit_is_suspect(load: Any) -> None:
    share = lambda value, **more: {"points": {"one": {"16": {"of_limit": value, **more}, "of_matmul": {"median": 0.9}}}}  # noqa: E731
    suspect = load("benchmarks.gpu.__main__").suspect
    assert suspect(share(1.05)) == [] and suspect(share(3.0, reliable=False)) == []
    assert suspect(share(1.2, reliable=True), "decode: ") == ["decode: points: one: 16: of_limit = 1.2"]
    assert suspect({"points": {"one": {"of_bandwidth": {"median": 2.0}, "mfu": None}}}) == [
        "points: one: of_bandwidth = 2"
    ]


def test_without_time_no_case_starts(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = load("benchmarks.gpu.__main__")
    with gpu.Bench(tmp_path / "out.json", "cpu", True, 1.0) as made:
        made.run("limits")
    result = json.loads((tmp_path / "out.json").read_text())
    assert "skipped" in result["limits"] and result["failed"] == []


def test_the_command_line_knows_its_cases(load: Any) -> None:
    gpu = load("benchmarks.gpu.__main__")
    assert gpu.arguments(["--quick", "--platform=cpu", "--only=limits,torch"]).only == ["limits", "torch"]
    assert gpu.arguments(["--quick", "--platform=cpu"]).only == list(gpu.CASES)
    with pytest.raises(SystemExit):
        gpu.arguments(["--quick", "--only=limit"])


def test_without_a_gpu_nothing_is_measured(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = load("benchmarks.gpu.__main__")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--platform=cpu", f"--out={tmp_path / 'out.json'}"])
    assert gpu.main() == 0 and json.loads(capsys.readouterr().out) == {"skipped": "no GPU"}
    assert not list(tmp_path.iterdir())


def test_a_point_that_raises_is_recorded_and_the_next_is_measured(load: Any, tmp_path: Path) -> None:
    case = load("benchmarks.gpu.case").Case("case", tmp_path / "case.json", 60.0, True)
    kept = lambda: json.loads((tmp_path / "case.json").read_text())["points"]  # noqa: E731

    def full() -> dict[str, Any]:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 8 GiB")

    assert case.point("large", full) is None
    assert kept()["large"]["out_of_memory"] and "8 GiB" in kept()["large"]["error"]
    assert case.point("small", lambda: {"rate": np.float32(2.0), "none": float("nan")})["rate"] == 2.0
    assert (kept()["small"]["rate"], kept()["small"]["none"]) == (2.0, None)
    assert case.point("late", lambda: {"rate": 1.0}, needs_s=600) is None and "skipped" in kept()["late"]


def test_an_implementation_that_is_wrong_is_not_equal(load: Any) -> None:
    card = load("benchmarks.gpu.card")
    assert card.errors(card._xla, True, 16)["equal"]
    scaled = card.errors(lambda *of: card._xla(*of) * jnp.bfloat16(1.1), True, 16)
    assert not scaled["equal"] and scaled["forward_error"] > 0.05
    blind = card.errors(lambda q, k, v, _: card._xla(q, k, v, None), True, 16)  # sees across segments
    assert not blind["equal"]
    assert not card.errors(lambda *of: card._xla(*of) * jnp.nan, False, 16)["equal"]


def test_two_depths_are_continued_to_all_layers(load: Any) -> None:
    models = load("benchmarks.gpu.models")
    found = models.continued({6: [7.0, 7.2, 7.1], 2: [3.0, 3.1, 3.2]}, 28)
    assert found["seconds"]["median"] == pytest.approx(29.1) and found["of_layer_s"] == pytest.approx(1.0)
    assert found["reliable"] and found["seconds"]["min"] < 29.1 < found["seconds"]["max"]
    assert not models.continued({2: [3.0, 3.1, 9.0], 6: [7.0, 7.1, 7.2]}, 28)["reliable"]


def test_bytes_and_operations_are_those_of_the_published_shapes(load: Any) -> None:
    """Qwen3-0.6B has 0.596 billion parameters and reads 112 KiB per token of context; 8B looks up 1.24 of 16.4 GB."""
    models, learner = load("benchmarks.gpu.models"), load("benchmarks.learner.gpu_arm")
    small, large = (models.spec_of(name, False) for name in ("qwen3_0p6b", "qwen3_8b"))
    assert models.bytes_of_step(small, 1, 0) == pytest.approx(2 * 0.596e9, rel=1e-3)
    assert models.bytes_of_step(small, 3, 7) - models.bytes_of_step(small, 1, 0) == 3 * 7 * 28 * 2 * 8 * 128 * 2
    assert models.bytes_of_step(large, 1, 0) == pytest.approx(16.38e9 - 1.245e9, rel=1e-3)
    assert learner.flops(small, 1, 1) == pytest.approx(6 * 0.596e9, rel=1e-3)
    assert models.memory(large)["state_gib"] == pytest.approx(16 * 8.19 / 1.0737, rel=1e-2)


def test_a_weight_that_differs_by_one_bit_is_named(load: Any) -> None:
    transfer = load("benchmarks.gpu.weights")
    source = {"a": jnp.ones((4, 4)), "b": jnp.full(3, 0.1)}
    found = {name: leaf.astype("bfloat16") for name, leaf in source.items()}
    assert transfer.differing(found, source) == []
    bits = np.asarray(found["a"]).view(np.uint16).copy()
    bits[2, 3] ^= 1
    assert transfer.differing(found | {"a": jnp.asarray(bits.view(found["a"].dtype))}, source) == ["a"]
    assert transfer.differing({"a": found["a"]}, source) == ["b"]
    assert "device" in transfer.channels() and "tcp" in transfer.channels() and "auto" not in transfer.channels()


def test_a_run_that_breaks_a_promise_has_failed(load: Any) -> None:
    runs = load("benchmarks.gpu.runs")
    sound = {
        "conservation_residual": 0,
        "groups_trained_twice": 0,
        "restarts": 0,
        "compiles_after_warmup": 0,
        "steps": 3,
        "steps_wanted": 3,
        "age_max": 1,
        "alpha": 1.0,
    }
    assert runs.broken(sound) == []
    wrong = [
        {"steps": 2},
        {"age_max": 2},
        {"restarts": 1},
        {"conservation_residual": -1},
        {"groups_trained_twice": None},
    ]
    assert all(len(runs.broken(sound | one)) == 1 for one in wrong)


def test_arms_that_differ_are_not_equal(load: Any) -> None:
    beside = load("benchmarks.gpu.torch_case")

    def arm(tokens: list[list[int]], norm: float) -> SimpleNamespace:
        return SimpleNamespace(ask=lambda what: {"tokens": tokens} if what == "greedy" else {"grad_norm": norm})

    ours = arm([[1, 2], [3, 4]], 1.0)
    assert beside.compared(ours, arm([[1, 2], [3, 4]], 1.0005))["equal"]
    assert not beside.compared(ours, arm([[1, 2], [3, 5]], 1.0))["equal"]
    assert not beside.compared(ours, arm([[1, 2], [3, 4]], 1.01))["equal"]


@pytest.mark.process
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_call_that_is_killed_keeps_what_it_measured_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--quick",
        "--platform=cpu",
        "--only=attention",
        f"--out={out}",
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT)
    try:
        end = time.monotonic() + 200
        while not (out.exists() and json.loads(out.read_text()).get("attention", {}).get("points")):
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    for child in alive:
        child.kill()
    assert children and not alive, "the case outlives the call"
    assert json.loads(out.read_text())["attention"]["unfinished"]


@pytest.mark.process
@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_all_of_it_runs_in_small(load: Any, tmp_path: Path) -> None:
    """All points of all cases are measured; only torch may be missing.

    The shares of limits mean nothing here: a busy CPU's limits sway, and the small models stay in its caches.
    """
    gpu, torch_case = load("benchmarks.gpu.__main__"), load("benchmarks.gpu.torch_case")
    words = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--platform=cpu", "--minutes=38"]
    # One device, as on the machine of a user: the flags of the tests make eight of the processor.
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [*words, f"--out={tmp_path / 'out.json'}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=2350,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] == [] and json.loads((tmp_path / "out.json").read_text())["failed"] == []
    assert result["jax"] and result["hardware"] and result["commit"]
    without_torch = torch_case.interpreter() is None
    assert result["out_of_time"] == [] and len(result["skipped"]) == without_torch, result["skipped"]
    counts = {name: len(result[name]["points"]) for name in gpu.CASES}
    assert counts == REHEARSED | {"torch": 1 if without_torch else 2}
    for name in ("decode", "prefill", "learner"):
        for point in result[name]["points"].values():
            parts = [point, *(part for part in point.values() if isinstance(part, dict))]
            lines = [part for part in parts if part.get("reliable")]
            shares = [part.get("of_limit", part.get("of_matmul")) for part in lines]
            assert all(0 < share < math.inf for share in shares), f"{name}: {shares} of a limit"
    assert result["attention"]["equal"]
    transfers = [
        point for name, point in result["transfer"]["points"].items() if "channel" not in name and "equal" in point
    ]
    assert len(transfers) >= 5 and all(point["equal"] for point in transfers)
    assert all(point["tokens_per_s"]["median"] > 0 for point in result["engine"]["points"].values())
    assert all(point["tokens_per_s"] > 0 for point in result["learner_whole"]["points"].values())
    runs = [*result["train"]["points"].values(), *result["demo"]["points"].values()]
    assert all(point["steps"] == point["steps_wanted"] and point["groups_trained_twice"] == 0 for point in runs)
    if not without_torch:
        assert result["torch"]["points"]["equality in float32"]["equal"]
