"""`jaxroll plan`: refusals before a compilation, the keys that it names, and its memory against a live process."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxroll import config as configs
from jaxroll import sharding
from jaxroll.config import (
    Config,
    LearnerConfig,
    MeshConfig,
    PlacementConfig,
    SamplerConfig,
    SamplingConfig,
    ScheduleConfig,
)
from jaxroll.control import cli
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.errors import ConfigError
from jaxroll.models import families
from jaxroll.tools import aot, chips, hlo, plan
from tests.harness.programs import tpu_compiler

ROOT = Path(__file__).parents[2]
GB = 10**9
LIMITS = {"learner": 16.0 * GB, "sampler": 16.0 * GB}
HELD = {"parameters": 2 * GB, "optimizer": 4 * GB, "gradients": 2 * GB, "publication": GB}
CPU = chips.topology("cpu:1")
SERVED = {"parameters": 2 * GB, "arriving parameters": 2 * GB, "KV pool": 4 * GB, "slots": 0}


def planned(config: Config, learner: dict[str, int], sampler: dict[str, int]) -> list[plan.Change]:
    roles = [plan.PlannedRole(name, 1, "", {}, iter(())) for name in ("learner", "sampler")]
    memory = {"learner": {"temporaries": GB, "code": 0} | learner, "sampler": {"temporaries": GB, "code": 0} | sampler}
    return plan.changes(config, roles, memory, LIMITS)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("v5e:3x3", "v5e:8x8"),
        ("v9:2x2", "v6e:8x8"),
        ("gpu:8xB200", "gpu:8xH100"),
        ("gpu:0xH100", "gpu:8xH100"),
        ("v5p:8x8", "v5p:4x4x4"),
        ("", "v5e:8x8"),
    ],
)
def test_unknown_hardware_is_refused_with_what_is_known(name: str, known: str):
    with pytest.raises(ConfigError, match=known) as error:
        chips.topology(name)
    assert error.value.key == "--topology"


def test_too_few_chips_are_refused_before_a_compilation():
    config = Config(learner=LearnerConfig(mesh=MeshConfig(fsdp=64)), sampler=SamplerConfig(count=2))
    with pytest.raises(ConfigError, match=r"64 chips, needed are 67 \(learner 64, sampler-0 1,") as error:
        chips.described(config, chips.topology("v5e:8x8"))
    assert error.value.key == "learner.mesh"
    chips.described(config, chips.topology("v5e:8x16"))


def test_gpus_are_shared_as_in_a_run():
    config = Config(learner=LearnerConfig(mesh=MeshConfig(fsdp=8)), sampler=SamplerConfig(mesh=MeshConfig(tensor=4)))
    shared = dataclasses.replace(config, sampler=SamplerConfig(mesh=MeshConfig(tensor=8)))
    assert chips.described(config, chips.topology("gpu:8xH100")).placement.platform == "gpu"
    assert chips.limits(shared, chips.topology("gpu:8xH100"))["sampler"] == 0.3 * chips.CHIPS["H100"].usable_bytes
    with pytest.raises(ConfigError, match="4 GPUs here, 13 needed"):
        chips.described(config, chips.topology("gpu:4xH100"))


def test_a_missing_folder_is_replaced_by_the_size_that_the_config_names():
    config = Config(model=configs.ModelConfig(size="qwen3_8b", path="no/folder"))
    assert chips.described(config, chips.topology("v5e:2x2")).model.path == ""
    with pytest.raises(ConfigError, match=r"model\.size"):
        chips.described(Config(model=configs.ModelConfig(path="no/folder")), chips.topology("v5e:2x2"))


def test_heads_that_the_mesh_does_not_divide_are_refused(capsys: pytest.CaptureFixture[str]):
    code = cli.main(
        ["plan", f"--config={ROOT}/configs/rlvr_qwen3_8b.py", "--topology=v5e:8x8", "--config.sampler.mesh.tensor=24"]
    )
    assert code == 64 and "sampler.mesh.tensor = 24" in capsys.readouterr().err


def test_a_config_that_fits_needs_no_change():
    assert planned(Config(), HELD, SERVED) == []


@pytest.mark.parametrize(
    ("learner", "memory", "key", "remedy"),
    [
        (LearnerConfig(mesh=MeshConfig(fsdp=2)), {"optimizer": 20 * GB}, "learner.mesh.fsdp", "Set it to 8"),
        (LearnerConfig(), {"optimizer": 20 * GB}, "learner.mesh.fsdp", "or learner.optimizer_offload and"),
        (LearnerConfig(remat="none"), {"temporaries": 12 * GB}, "learner.remat", "'layer'"),
        (LearnerConfig(micro_batch_rows=8), {"temporaries": 12 * GB}, "learner.micro_batch_rows", "Set it to 4."),
        (LearnerConfig(micro_batch_rows=1), {"temporaries": 12 * GB}, "learner.logits_mb", "Set it to 128."),
        (LearnerConfig(micro_batch_rows=1, logits_mb=64), {"temporaries": 12 * GB}, "learner.mesh.sequence", "2"),
        (
            LearnerConfig(micro_batch_rows=1, logits_mb=64),
            {"temporaries": 12 * GB},
            "learner.mesh.sequence",
            "'offload'",
        ),
    ],
)
def test_a_learner_that_does_not_fit_names_its_key(
    learner: LearnerConfig, memory: dict[str, int], key: str, remedy: str
):
    (change,) = planned(Config(learner=learner), HELD | memory, SERVED)
    assert change.key == key and remedy in change.remedy


def test_samplers_on_the_chips_of_a_learner_that_fits_without_them_are_the_key():
    config = Config(placement=PlacementConfig(learner_samplers=1))
    (change,) = planned(config, HELD | {"samplers": 12 * GB}, SERVED)
    assert (change.key, change.value) == ("placement.learner_samplers", 1)


def test_moments_in_host_memory_take_nothing_of_a_chip():
    roles = [
        plan.learner(Config(learner=LearnerConfig(optimizer_offload=moved)), families.spec("nano"), CPU)
        for moved in (False, True)
    ]
    held, moved = (dict(role.resident) for role in roles)
    moments = 2 * held["parameters"]
    assert held.pop("optimizer") - moved.pop("optimizer") == moments
    assert held == moved and [role.host_bytes for role in roles] == [0, moments]


def test_host_memory_of_the_most_demanding_program_is_added_to_what_is_there_all_the_time():
    """Each role has its own sum; a program that does not fit a chip has no cost."""
    topology = chips.topology("v5e:2x2")
    roles = [plan.PlannedRole(name, 1, "", HELD | SERVED, iter(()), 5) for name in ("learner", "sampler")]
    least = chips.times(topology.chip, 0, 0, 0)
    rows = [
        plan.PlannedProgram(role, "", "", cost, 0, hlo.Statistics(), least, cached=False)
        for role, cost in (
            ("learner", aot.ProgramCost("accumulate", 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, host_temp_bytes=7)),
            ("learner", aot.ProgramCost("apply", 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, host_temp_bytes=2)),
            ("sampler", None),
        )
    ]
    found = plan.report(Config(), families.spec("nano"), topology, roles, rows)["roles"]
    assert {name: role["host_bytes"] for name, role in found.items()} == {"learner": 5 + 7, "sampler": 5}


@pytest.mark.parametrize(
    ("sampler", "memory", "key"),
    [
        (SamplerConfig(slots=64), {"KV pool": 20 * GB}, "sampler.cache_pages"),
        (SamplerConfig(slots=2), {"KV pool": 20 * GB, "parameters": 7 * GB}, "sampler.mesh.tensor"),
        (SamplerConfig(slots=64), {"temporaries": 13 * GB, "KV pool": GB}, "sampler.prefill_rows"),
        (SamplerConfig(slots=2), {"KV pool": 60 * GB}, "sampler.slots"),
    ],
)
def test_a_sampler_that_does_not_fit_names_its_key(sampler: SamplerConfig, memory: dict[str, int], key: str):
    config = Config(sampler=sampler, sampling=SamplingConfig(max_tokens=4096))
    (change,) = planned(config, HELD, SERVED | memory)
    assert change.key == key


def test_the_named_number_of_pages_fits():
    config = Config(sampler=SamplerConfig(slots=64))
    (change,) = planned(config, HELD, SERVED | {"KV pool": 20 * GB})
    fitting, now = (int(number) for number in re.findall(r"\d+", change.remedy))
    others = SERVED["parameters"] + SERVED["arriving parameters"] + GB
    assert 20 * GB * fitting / now + others <= LIMITS["sampler"] < 20 * GB * (1.1 * fitting) / now + others


def with_memory(monkeypatch: pytest.MonkeyPatch, usable_bytes: float) -> chips.Topology:
    """This machine, as if JAX reported a limit of its memory."""
    chip = dataclasses.replace(chips.CHIPS["cpu"], usable_bytes=usable_bytes)
    monkeypatch.setattr(chips, "CHIPS", dict(chips.CHIPS) | {"cpu": chip})
    return chips.topology("cpu:1")


@pytest.mark.parametrize(
    ("usable_bytes", "words"),
    [(float("inf"), "report no limit"), (1e6, r"0\.1 of 0\.001 GB are 0\.0001, .*Set it above 0\.\d+")],
)
def test_a_share_of_memory_is_refused_as_by_a_sampler(monkeypatch, tmp_path: Path, usable_bytes: float, words: str):
    config = Config(model=configs.ModelConfig(size="nano"), sampler=SamplerConfig(memory_fraction=0.1))
    topology = with_memory(monkeypatch, usable_bytes)
    monkeypatch.setattr(plan.aot, "finished", lambda *args: pytest.fail("compiled"))
    with pytest.raises(ConfigError, match=words) as caught:
        plan.main(config, topology, tmp_path, as_json=True)
    assert caught.value.key == "sampler.memory_fraction"


@pytest.mark.soak
def test_the_cache_is_planned_for_the_sampler_s_share_of_memory(monkeypatch, tmp_path: Path, capsys):
    """At 0.0006 or more all pages that the slots can need fit, and memory is left."""
    small = SamplerConfig(memory_fraction=0.0005, page_tokens=8, prefill_rows=1)
    config = Config(model=configs.ModelConfig(size="nano"), sampler=small)
    assert plan.main(config, with_memory(monkeypatch, 1e9), tmp_path, as_json=True) == 0
    role = json.loads(capsys.readouterr().out)["roles"]["sampler"]
    assert role["limit_bytes"] == 0.0005 * 1e9 and "KV cache of" in role["cache"]
    assert 0.97 * role["limit_bytes"] < role["needed_bytes"] <= role["limit_bytes"]
    monkeypatch.setattr(sharding, "memory_bytes", lambda _: 10**9)
    settings = EngineConfig.of(config, "sampler", weight_swap=config.schedule.weight_swap)
    engine = Engine(plan.aot.model(config), sharding.build(MeshConfig()), sharding.SAMPLER, settings)
    assert engine.memory == role["cache"]  # the same pages, parameters and temporaries


def test_the_roofline_is_the_largest_of_three():
    chip = chips.CHIPS["v5e"]
    least = chips.times(chip, chip.flops_s, 2 * chip.memory_bytes_s, 0.5 * chip.link_bytes_s)
    assert (least.compute_s, least.memory_s, least.network_s) == (1, 2, 0.5)
    assert (least.least_s, least.bound) == (2, "memory")


@pytest.mark.parametrize(
    ("name", "hosts"), [("v5p:2x2x1", 1), ("v5p:4x4x4", 16), ("v5p:4x8x8", 64), ("v5e:2x4", 1), ("v5e:8x8", 8)]
)
def test_slices_have_the_hosts_of_the_published_tables(name: str, hosts: int):
    topology = chips.topology(name)
    assert topology.chip.hosts(topology.count) == hosts


@pytest.mark.parametrize(
    ("learner", "sampler", "count", "transfer", "seconds"),
    [
        pytest.param(4, 4, 8, {}, 0.24 + 8 * 0.25, id="one host sends to all"),
        pytest.param(4, 4, 1, {}, 0.24 + 0.24 + 0.38, id="one reader"),
        pytest.param(4, 4, 1, {"connections": 2}, 0.24 + (0.24 + 0.38) / 2, id="two connections"),
        pytest.param(8, 4, 2, {}, 0.24 / 2 + (0.24 + 0.38) / 2, id="two hosts send"),
        pytest.param(8, 8, 2, {}, 0.24 / 2 + 2 * 0.25 / 2, id="each reads its part"),
        pytest.param(4, 4, 8, {"relay": "tree"}, 0.24 + 0.24 + 0.38, id="relays send on"),
        pytest.param(4, 8, 8, {"relay": "tree"}, 0.24 + 8 * 0.25, id="no relays of two hosts"),
    ],
)
def test_a_transfer_takes_as_long_as_its_busiest_host(learner, sampler, count, transfer, seconds):
    config = Config(
        learner=LearnerConfig(mesh=MeshConfig(fsdp=learner)),
        sampler=SamplerConfig(mesh=MeshConfig(tensor=sampler), count=count),
        transfer=configs.TransferConfig(channel="tcp", **transfer),
        evaluator=configs.EvaluatorConfig(every=0),
    )
    assert chips.transfer_s(config, chips.CHIPS["v5p"], GB) == pytest.approx(seconds)


def test_a_version_has_the_bytes_that_are_sent():
    """Adapters of rank 4 on q alone are A [width, 4] and B [4, heads, head_dim] in each layer."""
    spec = families.spec("nano")
    whole = Config(transfer=configs.TransferConfig(dtype="bfloat16"))
    assert aot.version_bytes(whole, spec) == 2 * families.parameter_count(spec)
    learner = LearnerConfig(lora_rank=4, lora_targets=("attn.q",), lora_publish="adapters")
    adapters = dataclasses.replace(whole, learner=learner)
    size = spec.width * 4 + 4 * spec.heads * spec.head_dim
    assert aot.version_bytes(adapters, spec) == 2 * spec.layers * size
    merged = dataclasses.replace(adapters, learner=dataclasses.replace(learner, lora_publish="merged"))
    assert aot.version_bytes(merged, spec) == aot.version_bytes(whole, spec)


def test_a_plan_for_this_machine_is_one_object_and_is_cached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    config = Config(model=configs.ModelConfig(size="nano"), schedule=ScheduleConfig(groups_per_step=2, group_size=4))
    first = run(config, tmp_path, capsys)
    assert {row["name"] for row in first["programs"]} >= {"accumulate", "apply", "publish", "insert", "decode"}
    assert not any(row["cached"] for row in first["programs"])
    assert all(row["flops"] for row in first["programs"] if row["name"].startswith(("acc", "pre", "ext", "dec")))
    assert first["roles"]["learner"]["memory"]["optimizer"] == 2 * first["roles"]["learner"]["memory"]["parameters"] + 8
    monkeypatch.setattr(plan.aot, "finished", lambda *args: pytest.fail("compiled again"))
    again = run(config, tmp_path, capsys)
    assert all(row["cached"] for row in again["programs"])
    assert again["speed"] == first["speed"] and again["fits"]


def test_a_refusal_of_the_compiler_names_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The page tables of many long sequences do not fit the scalar memory of a TPU's decoding kernel."""
    compiled = plan.aot.finished

    def refuses(name: str, lowered):
        if name == "decode":
            raise jax.errors.JaxRuntimeError("INTERNAL: scalar memory: 1081344 > 1048576")
        return compiled(name, lowered)

    monkeypatch.setattr(plan.aot, "finished", refuses)
    config = Config(model=configs.ModelConfig(size="nano"))
    assert plan.main(config, chips.topology("cpu:1"), tmp_path, as_json=False) == 64
    assert "sampler.page_tokens = 0: the compiler refuses sampler decode" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "Ran out of memory in memory space hbm. Used 19.59G of 15.75G hbm.",
        "Ran out of memory on HBM, the total memory required for HLO temporaries (19.59G) exceeds available (15.75G).",
    ],
    ids=["hbm", "temporaries"],
)
def test_a_program_that_is_too_large_for_the_compiler_is_not_refused_but_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """libtpu words it in two ways. A refusal would advise another kernel, and not a key of memory."""

    def refuses(name: str, lowered: object) -> None:
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}")

    monkeypatch.setattr(plan.aot, "finished", refuses)
    for cached in (False, True):
        found = plan.aot.compiled_once(plan.aot.Described("accumulate", "", None), text, "v5e:2x2", tmp_path)
        assert (found.needed_bytes, found.refusal, found.cached) == (int(19.59 * 2**30), "", cached)


def run(config: Config, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    assert plan.main(config, chips.topology("cpu:1"), folder, as_json=True) == 0
    out, progress = capsys.readouterr()
    assert "learner accumulate" in progress
    return json.loads(out)


@pytest.mark.process
def test_the_predicted_memory_is_that_of_a_live_learner_within_a_fifth(tmp_path: Path):
    script = ROOT / "tests" / "harness" / "programs" / "learner_memory.py"
    # Freed memory goes back at once, or the growth would hide in what the compiler left.
    quiet = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "PYTHONPATH": str(ROOT), "NPROC": "1"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | quiet | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert 0.8 <= found["predicted"] / found["measured"] <= 1.2, found


@pytest.mark.soak
@tpu_compiler.NEEDS_LIBTPU
def test_a_plan_for_tpus_names_the_key_and_its_remedy_fits(tmp_path: Path):
    """Qwen3-0.6B on v5e chips with a pool for 512 slots of 4,096 tokens: refused with the number of pages that fits."""
    words = [
        sys.executable,
        "-m",
        "jaxroll",
        "plan",
        "--config=configs/rlvr_qwen3_0p6b.py",
        "--topology=v5e:2x4",
        "--json",
        "--config.sampler.slots=1024",
        "--config.sampling.max_tokens=4096",
        "--config.learner.row_tokens=4352",
    ]
    env = os.environ | {"JAXROLL_CACHE": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 64 and not found["fits"]
    (change,) = found["change"]
    assert change["key"] == "sampler.cache_pages", change
    pages = change["remedy"].split()[3]
    done = subprocess.run(
        [*words, f"--config.sampler.cache_pages={pages}"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
