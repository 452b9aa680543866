"""The process specs of a run, compared with golden files, and the devices of each process."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxroll.config import EvaluatorConfig, LearnerConfig, MeshConfig, PlacementConfig, RoleArgs
from jaxroll.config.rules import Inventory
from jaxroll.control import program, train
from jaxroll.errors import ConfigError
from tests.harness.process_specs import INVENTORIES, UNEQUAL, built

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", INVENTORIES)
def test_program_is_the_golden_one(name: str) -> None:
    """If this fails on an intended change, run with JAXROLL_UPDATE_GOLDEN=1 and commit the file."""
    text = json.dumps([_as_json(spec) for spec in built(name)], indent=1, sort_keys=True) + "\n"
    file = GOLDEN / f"program_{name}.json"
    if os.environ.get("JAXROLL_UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text(), test_program_is_the_golden_one.__doc__


def _as_json(spec: program.ProcessSpec) -> dict:
    return {
        "name": spec.name,
        "role": spec.role,
        "argv": spec.argv,
        "env": dict(spec.env),
        "after": spec.after,
        "ready_file": str(spec.ready_file) if spec.ready_file else None,
    }


def test_all_other_roles_wait_for_the_learner_to_fork() -> None:
    specs, forked = built("cpu"), program.forked(built("cpu"), Path("/r/run"), "--fork=4@abc")
    assert forked[0] == specs[0], "the store waits for no process"
    assert forked[1].argv == (*specs[1].argv, "--fork=4@abc")
    assert forked[1].ready_file == Path("/r/run/.forked")
    for before, after in zip(specs[2:], forked[2:], strict=True):
        assert after == replace(before, after=("store", "learner"))


def test_samplers_of_the_learner_have_no_process_of_their_own() -> None:
    shared = replace(UNEQUAL, sampler=replace(UNEQUAL.sampler, count=3), placement=PlacementConfig(learner_samplers=2))
    specs = program.build(shared, Path("/r/run"), INVENTORIES["cpu"], python="python", cache_dir=Path("/r/cache"))
    plain = program.build(UNEQUAL, Path("/r/run"), INVENTORIES["cpu"], python="python", cache_dir=Path("/r/cache"))
    names = [spec.name for spec in specs]
    assert "sampler-0" in names and not {"sampler-1", "sampler-2"} & set(names)
    assert specs[1] == plain[1], "the learner starts as without them"
    assert [program.module_of("learner", one) for one in (shared, UNEQUAL)] == ["colocated", "learner"]
    for index in (0, 1):
        options, args = argparse.Namespace(command="sampler", process=0), RoleArgs(shared, Path("/r/run"), index=index)
        with pytest.raises(ConfigError, match="in the learner's process") if index else contextlib.nullcontext():
            program.checked_host(args, options)


def test_a_learner_of_two_hosts_is_a_gang_that_divides_its_devices() -> None:
    config = replace(UNEQUAL, placement=PlacementConfig(learner_hosts=2))
    of_two = {"python": "python", "cache_dir": Path("/r/cache")}
    specs = program.build(config, Path("/r/run"), INVENTORIES["cpu"], **of_two)
    first, second = specs[1:3]
    assert [spec.name for spec in specs[:4]] == ["store", "learner", "learner-1", "sampler-0"]
    assert first.argv == ("python", "-m", "jaxroll", "learner", "--coordinator=127.0.0.1:0", "--run=/r/run")
    assert second.argv == (*first.argv[:4], "--index=1", *first.argv[4:])
    assert first.env == second.env and "device_count=1 " in first.env["XLA_FLAGS"]
    assert [spec.gang for spec in specs[:4]] == ["", "learner", "learner", ""]
    forked = program.forked(specs, Path("/r/run"), "--fork=4@abc")
    assert forked[2] == second, "only process 0 forks, and all processes of the learner start together"
    alone = program.offline_env(config, INVENTORIES["cpu"], Path("/r/cache"))
    assert "device_count=2 " in alone["XLA_FLAGS"], "outside of a run there is one process"
    gpus = program.build(config, Path("/r/run"), INVENTORIES["gpus"], **of_two)
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in gpus[1:4]] == ["0", "1", "2,3"]


def test_the_hosts_of_a_sampler_are_a_gang_that_divides_its_devices() -> None:
    config = replace(UNEQUAL, placement=PlacementConfig(sampler_hosts=2))
    config = replace(config, sampler=replace(config.sampler, count=2))
    of_it = {"python": "python", "cache_dir": Path("/r/cache")}
    specs = {spec.name: spec for spec in program.build(config, Path("/r/run"), INVENTORIES["cpu"], **of_it)}
    gangs = {name: spec.gang for name, spec in specs.items() if spec.role == "sampler"}
    assert gangs == {name: name[:9] for name in ("sampler-0", "sampler-0-1", "sampler-1", "sampler-1-1")}
    words = ("python", "-m", "jaxroll", "sampler", "--index=1")
    more = ("--coordinator=127.0.0.1:0", "--run=/r/run")
    assert specs["sampler-1"].argv == (*words, *more)
    assert specs["sampler-1-1"].argv == (*words, "--process=1", *more)
    assert "device_count=1 " in specs["sampler-0"].env["XLA_FLAGS"]
    compilers = program.compilers(config, Path("/r/run"), INVENTORIES["cpu"], names=("sampler-0",), **of_it)
    assert compilers == (), "its programs need all hosts"


def test_colocated_roles_are_one_process_with_the_devices_of_the_largest_mesh() -> None:
    config = replace(UNEQUAL, placement=PlacementConfig(colocated=True), learner=LearnerConfig(mesh=MeshConfig(fsdp=4)))
    of_it = {"python": "python", "cache_dir": Path("/r/cache")}
    specs = program.build(config, Path("/r/run"), INVENTORIES["cpu"], **of_it)
    assert [(spec.name, spec.role) for spec in specs] == [("store", "store"), ("colocated", "colocated")]
    together = specs[1]
    assert "device_count=4 " in together.env["XLA_FLAGS"] and together.env["JAXROLL_NICE"] == ""
    assert "GLIBC_TUNABLES" in together.env, "the process includes the learner"
    (store, forked) = program.forked(specs, Path("/r/run"), "--fork=4@abc")
    assert store == specs[0] and forked.argv == (*together.argv, "--fork=4@abc")
    assert forked.ready_file == Path("/r/run/.forked") and forked.after == ("store",)
    alone = program.offline_env(config, Inventory("tpu", chips=4), Path("/r/cache"))
    assert alone["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
    (_, gpu) = program.build(config, Path("/r/run"), Inventory("gpu", 8, 80_000), **of_it)
    assert (gpu.env["CUDA_VISIBLE_DEVICES"], gpu.env["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == ("0,1,2,3", "0.90")


def test_every_role_is_there_and_only_the_evaluator_can_be_left_out() -> None:
    names = ["store", "learner", "sampler-0", "sampler-1", "evaluator"]
    assert [spec.name for spec in built("cpu")] == names
    silent = replace(UNEQUAL, evaluator=EvaluatorConfig(every=0))
    specs = program.build(silent, Path("/r"), Inventory("cpu"), python="python", cache_dir=Path("/c"))
    assert [spec.name for spec in specs] == names[:-1]


def test_compilers_have_the_devices_of_their_roles_and_yield_on_a_cpu() -> None:
    of_run = {"python": "python", "cache_dir": Path("/r/cache")}
    names = ("sampler-0", "evaluator", "learner")
    specs = {spec.name: spec for spec in built("cpu")}
    found = program.compilers(UNEQUAL, Path("/r/run"), INVENTORIES["cpu"], names=names, **of_run)
    assert [spec.argv[3:] for spec in found] == [
        ("compile", "--run=/r/run", f"--role={program.role_of(name)}") for name in names
    ]
    for name, spec in zip(names, found, strict=True):
        assert spec.env == {**specs[name].env, "JAXROLL_NICE": "10"} and spec.after == ()
    colocated = replace(UNEQUAL, placement=PlacementConfig(colocated=True))
    assert program.compilers(colocated, Path("/r/run"), INVENTORIES["cpu"], names=names, **of_run) == ()
    two_hosts = replace(UNEQUAL, placement=PlacementConfig(learner_hosts=2))
    found = program.compilers(two_hosts, Path("/r/run"), INVENTORIES["cpu"], names=names, **of_run)
    assert [spec.name for spec in found] == ["compile-sampler", "compile-evaluator"]


def test_roles_compile_during_the_warm_start_where_a_core_or_a_device_is_idle() -> None:
    config = replace(UNEQUAL, learner=replace(UNEQUAL.learner, mesh=MeshConfig(fsdp=2)))
    assert train.compiled_meanwhile(config, Inventory("cpu"), 2) == ()
    assert train.compiled_meanwhile(config, Inventory("cpu"), 3) == ("sampler-0", "evaluator", "learner")
    assert train.compiled_meanwhile(config, Inventory("gpu", gpus=4), 2) == ("sampler-0", "evaluator")


def test_no_two_roles_see_the_same_chip_or_gpu_and_all_see_as_many_as_their_mesh_has() -> None:
    for name, variable in (("tpu", "TPU_VISIBLE_CHIPS"), ("gpus", "CUDA_VISIBLE_DEVICES")):
        seen = {spec.name: spec.env[variable].split(",") for spec in built(name) if spec.name != "store"}
        everything = [device for devices in seen.values() for device in devices]
        assert len(everything) == len(set(everything)) == 7
        assert {who: len(devices) for who, devices in seen.items()} == {
            "learner": 2,
            "sampler-0": 2,
            "sampler-1": 2,
            "evaluator": 1,
        }


def test_tpu_rectangles_are_aligned_and_ports_differ() -> None:
    envs = program.tpu_env({"learner": 1, "sampler-0": 4, "evaluator": 2})
    assert list(envs) == ["learner", "sampler-0", "evaluator"]
    chips = {name: [int(chip) for chip in env["TPU_VISIBLE_CHIPS"].split(",")] for name, env in envs.items()}
    for devices in chips.values():
        assert devices[0] % len(devices) == 0 and devices == list(range(devices[0], devices[0] + len(devices)))
    assert len({env["TPU_PROCESS_PORT"] for env in envs.values()}) == 3
    for env in envs.values():
        assert env["TPU_PROCESS_ADDRESSES"] == f"localhost:{env['TPU_PROCESS_PORT']}"
        bounds = [int(n) for n in env["TPU_CHIPS_PER_PROCESS_BOUNDS"].split(",")]
        assert bounds[0] * bounds[1] * bounds[2] == len(env["TPU_VISIBLE_CHIPS"].split(","))


def test_roles_on_one_gpu_share_its_memory_within_bounds() -> None:
    shares = [float(spec.env["XLA_PYTHON_CLIENT_MEM_FRACTION"]) for spec in built("one_gpu") if spec.name != "store"]
    assert len(shares) == 3 and sum(shares) <= 0.9
    assert {spec.env["CUDA_VISIBLE_DEVICES"] for spec in built("one_gpu")[1:]} == {"0"}


def test_roles_as_large_as_the_machine_take_turns_on_its_gpus() -> None:
    config = replace(UNEQUAL, sampler=replace(UNEQUAL.sampler, count=1))
    envs = program.device_env(config, Inventory("gpu", 2, 80_000), visible_gpus=["3", "5"])
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs.values()] == ["3,5", "3,5", "3"]
    assert [env["XLA_PYTHON_CLIENT_MEM_FRACTION"] for env in envs.values()] == ["0.40", "0.30", "0.10"]
    for gpus in (3, 4):
        with pytest.raises(ConfigError, match=f"{gpus} GPUs here, 5 needed"):
            program.device_env(config, Inventory("gpu", gpus, 80_000))
    with pytest.raises(ConfigError, match=r"sum to 1\.10"):
        program.device_env(UNEQUAL, Inventory("gpu", 2, 80_000))


def test_an_outer_choice_of_gpus_is_kept() -> None:
    envs = program.device_env(UNEQUAL, Inventory("gpu", 8, 80_000), visible_gpus=list("abcdefgh"))
    assert [env["CUDA_VISIBLE_DEVICES"] for env in envs.values()] == ["a,b", "c,d", "e,f", "g"]


def test_a_cpu_role_has_one_thread_and_its_mesh_of_devices() -> None:
    for spec in built("cpu"):
        wanted = {"learner": 2, "sampler": 2}.get(spec.role, 1)
        assert f"--xla_force_host_platform_device_count={wanted} " in spec.env["XLA_FLAGS"]
        assert spec.env["NPROC"] == spec.env["OMP_NUM_THREADS"] == "1"
        assert spec.env["JAX_PLATFORMS"] == "cpu"


def test_the_cache_is_next_to_the_runs_unless_it_is_named() -> None:
    assert program.default_cache_dir(Path("/w/runs/demo"), {}) == Path("/w/.cache/jax")
    assert program.default_cache_dir(Path("/w/x"), {}) == Path("/w/.cache/jax")
    assert program.default_cache_dir(Path("/w/runs/demo"), {"JAX_COMPILATION_CACHE_DIR": "/c"}) == Path("/c")
    both = {"JAX_COMPILATION_CACHE_DIR": "/c", "JAXROLL_CACHE": "/d"}
    assert program.default_cache_dir(Path("/w/runs/demo"), both) == Path("/d")


def test_a_program_that_does_not_fit_is_refused_before_it_exists() -> None:
    with pytest.raises(ConfigError, match="chip"):
        program.build(UNEQUAL, Path("/r"), Inventory("tpu", chips=4), python="python", cache_dir=Path("/c"))


def test_a_role_on_cpu_has_one_thread_or_as_many_as_it_is_given() -> None:
    config = replace(UNEQUAL, placement=PlacementConfig(cpu_threads=2))
    for given, count in ((UNEQUAL, "1"), (config, "2")):
        envs = program.device_env(given, Inventory("cpu"))
        assert {env["NPROC"] for env in envs.values()} == {env["OMP_NUM_THREADS"] for env in envs.values()} == {count}


def _grants_large_pages() -> bool:
    """True if malloc requests large pages here: glibc 2.35 or newer does if the kernel leaves it to programs."""
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    libc, version = platform.libc_ver()
    return (
        libc == "glibc"
        and tuple(map(int, version.split("."))) >= (2, 35)
        and (mode.exists() and "[madvise]" in mode.read_text() and Path("/proc/self/smaps").exists())
    )


@pytest.mark.skipif(not _grants_large_pages(), reason="malloc does not ask for large pages on this system")
def test_the_learner_allocates_large_pages_on_cpu() -> None:
    """Linux flags the memory regions for which large pages were requested with hg."""
    env = program.device_env(UNEQUAL, Inventory("cpu"))["learner"]
    code = """
import ctypes
from pathlib import Path
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
at = libc.malloc(64 * 2**20)
assert at
found = None
for line in Path("/proc/self/smaps").read_text().splitlines():
    first = line.split()[0]
    if "-" in first and not first.endswith(":"):
        low, high = (int(end, 16) for end in first.split("-"))
        here = low <= at < high
    elif here and first == "VmFlags:":
        found = "hg" in line.split()
print(found)
"""
    for given, expected in ((env, "True"), ({**env, "GLIBC_TUNABLES": ""}, "False")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == expected
    assert "GLIBC_TUNABLES" not in program.device_env(UNEQUAL, Inventory("cpu"))["sampler-0"]


def test_a_child_keeps_the_xla_flags_of_its_parent() -> None:
    """They were lost on a CPU, whose roles have flags of their own. Of a flag given twice, XLA takes the last one."""
    own = program.cpu_env(2)
    found = program.child_env({"XLA_FLAGS": "--xla_dump_to=/tmp/x", "NPROC": "8", "HOME": "/h"}, own)
    assert found == {**own, "HOME": "/h", "XLA_FLAGS": f"--xla_dump_to=/tmp/x {own['XLA_FLAGS']}"}
    assert program.child_env({"XLA_FLAGS": ""}, own) == own
    assert program.child_env({"XLA_FLAGS": "--a"}, {}) == {"XLA_FLAGS": "--a"}
    assert program.child_env({}, {"A": "1"}) == {"A": "1"}


def test_a_sampler_that_joins_a_run_without_samplers_gets_the_devices_of_its_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(UNEQUAL, sampler=replace(UNEQUAL.sampler, count=0))
    of_two = replace(config, placement=PlacementConfig(sampler_hosts=2))
    specs = program.build(config, tmp_path, Inventory("cpu"), python="python", cache_dir=tmp_path)
    assert [spec.name for spec in specs] == ["store", "learner", "evaluator"]
    environ = {"JAX_PLATFORMS": "cpu"}
    monkeypatch.setattr(program.os, "environ", environ)
    program.place_alone("sampler", RoleArgs(config, tmp_path, index=3))
    assert "--xla_force_host_platform_device_count=2" in environ["XLA_FLAGS"]
    environ.clear()
    environ["JAX_PLATFORMS"] = "cpu"
    program.place_alone("sampler", RoleArgs(of_two, tmp_path, index=3))
    assert "--xla_force_host_platform_device_count=1" in environ["XLA_FLAGS"]


@pytest.mark.process
def test_jaxlib_knows_the_xla_flags() -> None:
    """An unknown flag aborts the process, so the oldest and the newest supported jaxlib must know the flags."""
    code = "import jax; print(len(jax.devices()), jax.devices()[0].platform)"
    env = {**os.environ, **program.cpu_env(3)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["3", "cpu"], done.stderr
