"""`jaxroll place`: its predictions by hand, its picks, configs that can run, and one-line errors for wrong files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.control import cli
from jaxroll.errors import ConfigError
from jaxroll.sim import place
from jaxroll.sim.costs import (
    DeviceType,
    Hardware,
    Law,
    LearnerCosts,
    ModelCosts,
    SamplerCosts,
    Space,
    TransferCosts,
    Workload,
)

SMOKE = "configs/smoke.py"
MODEL = ModelCosts(1e9, 1e4)
FAST = DeviceType("fast", 8, 8, 4e14, 1e12, 80e9, 1e10, price_per_hour=4.0)
WIDE = DeviceType("wide", 8, 8, 1e14, 4e12, 80e9, 1e10, price_per_hour=2.0)
CLUSTER = """
source = "made up"
[[devices]]
name = "cpu"
count = 4
flops = 1e12
bytes_per_s = 1e11
price_per_hour = 1.0
[model]
parameters = 1e6
[workload]
answer_tokens = { kind = "lognormal", mean = 6, deviation = 4, least = 1 }
"""


def config(**schedule: object) -> Config:
    return configs.parse({
        "schedule": {"steps": 20, "groups_per_step": 16, "group_size": 8, "in_flight_window": "full"} | schedule,
        "sampling": {"max_tokens": 4096}, "task": {"max_prompt_tokens": 256},
        "sampler": {"prefill_buckets": (256,), "decode_chunk": 8}, "store": {"retention_mb": 4096},
        "learner": {"row_tokens": 8192, "micro_batch_rows": 1},
    })  # fmt: skip


def hardware(*devices: DeviceType, **search: object) -> Hardware:
    work = Workload(Law(mean=128), Law("lognormal", 500, 400, 1))
    return Hardware("made up", workload=work, devices=devices, model=MODEL, search=Space(**search))  # type: ignore[arg-type]


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    measured = Hardware(
        sampler=SamplerCosts(step_overhead_s=0.1),
        learner=LearnerCosts(step_overhead_s=3.0),
        workload=Workload(answer_tokens=Law(mean=16)),
        devices=(DeviceType("any", 2),),
        search=Space(("sync", "bounded")),
    )
    planner = place.Planner(config(steps=10, groups_per_step=4, group_size=4), measured)
    rows = {one.schedule: found for one, found in place.ranked(planner, "throughput")}
    assert [rows["sync"].step_s, rows["sync"].low_s, rows["sync"].high_s] == pytest.approx([16 * 0.1 + 3.0] * 3)
    assert rows["bounded"].step_s == pytest.approx(3.0)
    one = next(one for one, _ in place.ranked(planner, "throughput") if one.schedule == "sync")
    assert place.simulated(planner, one)["step_s"] == pytest.approx(rows["sync"].step_s, rel=0.05)


def predicted(
    schedule: str, answer_tokens: int, train_s: float, env_s: float = 0.0, **transfer: float
) -> tuple[float, float]:
    """The predicted and the simulated seconds of a step of 16 answers at once, 0.1 s a token, on one sampler."""
    measured = Hardware(
        sampler=SamplerCosts(step_overhead_s=0.1),
        learner=LearnerCosts(step_overhead_s=train_s),
        transfer=TransferCosts(**transfer),
        workload=Workload(answer_tokens=Law(mean=answer_tokens), env_s=Law(mean=env_s)),
        devices=(DeviceType("any", 2),),
        search=Space((schedule,), (1.0,)),
    )
    planner = place.Planner(config(steps=16, groups_per_step=4, group_size=4), measured)
    one, found = place.ranked(planner, "throughput")[0]
    return found.step_s, place.simulated(planner, one)["step_s"]


@pytest.mark.parametrize(
    ("schedule", "step_s"), [("one_step", 5.0), ("bounded", 5.0), ("interval", 6.0), ("pure", 5.0)]
)
def test_the_prediction_of_equal_rollouts_is_that_of_the_simulation(schedule: str, step_s: float) -> None:
    """Weights take 3 s, so the age bound holds rollouts back for longer than the engine needs.

    With intervals the learner waits, too, until samplers have its weights.
    """
    found, simulated = predicted(schedule, 40, 3.0, publish_s=3.0)
    assert found == pytest.approx(step_s, rel=0.01) and simulated == pytest.approx(found, rel=0.05)


def test_with_intervals_samplers_fetch_between_two_batches() -> None:
    found, simulated = predicted("interval", 40, 0.1, latency_s=2.0)
    assert found == pytest.approx(6.0, rel=0.05) and simulated == pytest.approx(found, rel=0.05)


def test_new_weights_wait_for_running_answers_and_not_for_their_environments() -> None:
    """Answers of 1.6 s, then 6 s of the environment: steps are about (6 + 1.6 + 1.6) / 2 s long, and not 7.6."""
    found, simulated = predicted("one_step", 16, 0.1, env_s=6.0)
    assert 3.8 <= found <= 4.7 and simulated == pytest.approx(found, rel=0.15)


def test_nothing_that_exceeds_the_memory_is_chosen() -> None:
    small = replace(FAST, memory_bytes=4e9)
    planner = place.Planner(config(), hardware(small, replace(WIDE, memory_bytes=80e9)))
    for one, found in place.ranked(planner, "throughput"):
        device = planner.hardware.devices[one.learner_type]
        assert 18 * 1e9 / one.learner_devices <= 0.9 * device.memory_bytes and found.slots >= 1
        if one.samplers[0] and one.schedule != "shared":
            cache = found.slots * 1e4 * 128  # at least the prompts
            assert 4e9 + cache <= 0.9 * 4e9 * one.sampler_devices
    with pytest.raises(ConfigError, match="no placement fits into the memory"):
        place.ranked(place.Planner(config(), hardware(replace(FAST, memory_bytes=1e9))), "throughput")


def test_devices_with_bandwidth_generate_and_devices_with_compute_train() -> None:
    space = {"schedules": ("bounded",), "alphas": (2.0,), "sampler_devices": (1, 2)}
    planner = place.Planner(config(), hardware(replace(FAST, count=4), replace(WIDE, count=4), **space))
    one, _ = place.ranked(planner, "throughput")[0]
    assert planner.hardware.devices[one.learner_type].name == "fast"
    assert one.samplers[1] * one.sampler_devices == 4


def test_the_cheapest_placement_leaves_devices_out_that_gain_nothing() -> None:
    planner = place.Planner(config(), hardware(FAST))
    fast, cheap = (place.ranked(planner, objective)[0][1] for objective in ("throughput", "cost"))
    assert cheap.cost_per_million_tokens < fast.cost_per_million_tokens and cheap.price_per_hour < fast.price_per_hour
    assert fast.step_s < cheap.step_s


def test_the_time_of_a_run_counts_the_steps_that_age_adds() -> None:
    planner = place.Planner(config(), hardware(FAST, schedules=("sync", "bounded"), steps_per_age=5.0))
    assert place.ranked(planner, "throughput")[0][0].alpha > 0 == place.ranked(planner, "time")[0][0].alpha


def test_a_large_cluster_gets_a_placement_close_to_the_exhaustive_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for devices in ((replace(FAST, count=5), replace(WIDE, count=4)), (replace(WIDE, count=12),)):
        best = []
        for limit in (10**6, 0):
            monkeypatch.setattr(place, "EXHAUSTIVE", limit)
            planner = place.Planner(config(), hardware(*devices, schedules=("bounded",), alphas=(2.0,)))
            best.append(place.ranked(planner, "throughput")[0][1].step_s)
        assert best[1] <= 1.02 * best[0]


def test_a_learner_of_half_machines_balances_what_whole_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both searches find it; with powers of two and whole machines alone, the best of 16 devices is slower."""
    device, found = replace(FAST, count=16, bytes_per_s=4e12), []
    for given, limit in (((1, 2, 4, 8, 16), 10**6), ((), 10**6), ((), 0)):
        monkeypatch.setattr(place, "EXHAUSTIVE", limit)
        space = {"schedules": ("bounded",), "alphas": (2.0,), "sampler_devices": (1, 2), "learner_devices": given}
        planner = place.Planner(config(groups_per_step=32), hardware(device, **space))
        found.append(place.ranked(planner, "throughput")[0])
    (whole, slower), (half, faster), (searched, _) = found
    assert (whole.learner_devices, half.learner_devices) == (8, 12) and searched == half
    assert faster.step_s < 0.9 * slower.step_s


def test_equal_types_are_as_good_as_one() -> None:
    space = {"schedules": ("bounded",), "alphas": (2.0,), "sampler_devices": (1, 2), "learner_devices": (1, 2)}
    split = place.Planner(config(), hardware(replace(FAST, count=3), replace(FAST, name="same", count=3), **space))
    one = place.Planner(config(), hardware(replace(FAST, count=6), **space))
    found = [place.ranked(planner, "throughput")[0][1].step_s for planner in (split, one)]
    assert found[0] == found[1]
    apart = replace(split.hardware, devices=(FAST, replace(FAST, name="same")), search=Space(between_bytes_per_s=1e9))
    assert len(place.merged(apart).devices) == 2  # links between them are slower


# AReaL-Hex (arXiv 2511.00796), and an eighth of its three clusters of equal price.
H800 = DeviceType("H800", 3, 8, 756e12, 2e12, 80e9, 5e9, price_per_hour=5.28)
H20 = DeviceType("H20", 3, 8, 148e12, 4e12, 96e9, 5e9, price_per_hour=1.85)
EIGHTHS = {"both": (H800, H20), "H800": (replace(H800, count=4),), "H20": (replace(H20, count=11),)}


def eighth(*devices: DeviceType) -> place.Planner:
    """Answers of 1,500 tokens of a model of 7.6e9 parameters; dispatches are long, so that a simulation is short."""
    rules = config(steps=8, groups_per_step=4, group_size=16, group_placement="spread", straggler="wait")
    rules = replace(rules, sampler=replace(rules.sampler, decode_chunk=64))
    work = Workload(Law(mean=256), Law(mean=1500))
    space = Space(("bounded",), (2.0,), (1,), (), 1.0, between_bytes_per_s=1.5e9)
    return place.Planner(
        rules, Hardware("paper", workload=work, devices=devices, model=ModelCosts(7.6e9, 57344.0), search=space)
    )


def test_a_mixed_cluster_beats_clusters_of_one_type_at_equal_price() -> None:
    """The simulation judges the picks, and agrees with their predictions."""
    rates = {}
    for name, devices in EIGHTHS.items():
        planner = eighth(*devices)
        one, predicted = place.ranked(planner, "throughput")[0]
        rates[name] = place.simulated(planner, one)["tokens_per_s"]
        assert rates[name] == pytest.approx(predicted.tokens_per_s, rel=0.08), name
    assert rates["both"] > 1.05 * max(rates["H800"], rates["H20"])


def test_samplers_of_different_speed_have_equal_shares_while_all_have_free_slots() -> None:
    """The store deals by free slots; if memory leaves too few of them, the sampler that ends first gets the next."""
    one, members = place.PlacementPlan("bounded", 2.0, 0, 2, (1, 3), 1), []
    for memory in (math.inf, 3.6e10):
        planner = eighth(H800, replace(H20, memory_bytes=memory))
        slots = planner.slots(one)
        members.append([engine.members for engine in planner._engines(one, slots)])
        assert (slots * 4 >= 3 * planner.rollouts) == math.isinf(memory)
    assert members[0] == [16.0, 16.0] and members[1][1] > 1.5 * members[1][0], "little memory: H20 reads it faster"
    assert members[1][0] + 3 * members[1][1] == pytest.approx(64)


def test_short_simulations_rank_by_the_objective() -> None:
    measured = Hardware(
        sampler=SamplerCosts(step_overhead_s=0.1),
        learner=LearnerCosts(step_overhead_s=3.0),
        workload=Workload(answer_tokens=Law(mean=16)),
        devices=(DeviceType("any", 2),),
        search=Space(("sync", "bounded"), (1.0,), steps_per_age=5.0),
    )
    planner = place.Planner(config(steps=6, groups_per_step=2, group_size=2), measured)
    chosen = place.ranked(planner, "throughput")
    fastest: dict[place.Objective, str] = {"throughput": "bounded", "time": "sync"}
    for objective, best in fastest.items():
        found = place.simulated_best(planner, chosen, objective)
        assert found[0][0].schedule == best and len(found) == len(chosen)


@pytest.mark.soak
def test_the_pick_is_within_five_percent_of_the_simulated_best() -> None:
    work = Workload(Law(mean=128), Law("normal", 500, 20, 1))
    planner = place.Planner(config(), replace(hardware(replace(FAST, count=4), alphas=(2.0,)), workload=work))
    steps = [place.simulated(planner, one)["step_s"] for one, _ in place.ranked(planner, "throughput")]
    assert steps[0] <= 1.05 * min(steps)


# --- the command


def placed(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *words: str) -> tuple[int, str, str]:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    code = cli.main(["place", f"--cluster={file}", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("schedule", ["shared", "sync", "one_step", "interval", "bounded", "pure"])
def test_the_printed_overrides_are_a_config_that_can_run(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'{CLUSTER}[search]\nschedules = ["{schedule}"]\nsampler_devices = [1, 2]\n'
    code, out, _ = placed(tmp_path, capsys, text, f"--config={SMOKE}", "--config.evaluator.every=0", "--json")
    found = json.loads(out)
    assert code == 0 and found["schedule"] == schedule and found["low_s"] <= found["step_s"] <= found["high_s"]
    changes = [f"--config.{change}" for change in found["overrides"]]
    assert cli.main(["config", f"--config={SMOKE}", "--config.evaluator.every=0", *changes]) == 0
    chosen = json.loads(capsys.readouterr().out)
    assert chosen["learner"]["mesh"]["fsdp"] == found["learner"]["cpu"]
    assert chosen["schedule"]["alpha"] == found["alpha"] and chosen["placement"]["colocated"] is (schedule == "shared")
    assert all(change in found["launch"] for change in found["overrides"])


def test_the_pick_for_a_person_and_by_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"--config={SMOKE}", "--config.schedule.steps=12", "--simulate=2")
    code, out, _ = placed(tmp_path, capsys, CLUSTER, *words)
    compared = [line.split() for line in out.splitlines() if " s simulated, " in line]
    steps_s = [float(words[0]) for words in compared]
    assert code == 0 and "predicted, between" in out and len(compared) == 2 and steps_s == sorted(steps_s)
    assert f"simulated    {compared[0][0]} s a step" in out
    assert out.splitlines()[-1].startswith(f"jaxroll train --config={SMOKE} --config.schedule.mode=")


def test_a_table_of_roles_is_planned_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
[[devices]]
name = "gpu"
count = 4
[[roles]]
name = "rollout"
rates = { gpu = { 1 = 1.0, 2 = 3.0 } }
rollouts = 12
[[roles]]
name = "train"
after = ["rollout"]
seconds = { gpu = { 1 = 8.0, 2 = 4.0, 4 = 2.0 } }
spread = 0.1
[search]
alphas = [1]
"""
    code, out, _ = placed(tmp_path, capsys, text, "--json")
    found = json.loads(out)
    # Replicas of two devices: 12 rollouts take 4 s on one and 2 s on two; training takes 4 s on two.
    assert code == 0 and found["step_s"] == 4.0 and (found["low_s"], found["high_s"]) == pytest.approx((3.6, 4.4))
    assert placed(tmp_path, capsys, text)[0] == 0


def test_the_costs_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {
        "speed": {"decode_step_s": 0.5, "learner_s": 9.0, "micro_batches": 3, "transfer_s": 0.0},
        "roles": {"sampler": {"chips": 1}, "learner": {"chips": 2}},
        "programs": [{"name": "prefill_16", "least_s": 0.0}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    text = '[[devices]]\nname = "cpu"\ncount = 4\n[search]\nschedules = ["sync"]\n'
    code, out, _ = placed(tmp_path, capsys, f'plan = "plan.json"\n{text}', f"--config={SMOKE}", "--json")
    found = json.loads(out)
    assert code == 0 and found["learner"] == {"cpu": 2} and found["sampler_devices"] == 1
    assert math.isclose(found["step_s"] - found["training_s"], found["generation_s"]) and found["training_s"] % 3.0 == 0


DEVICE = '[[devices]]\nname = "cpu"\ncount = 4\n'
BAD = {
    "nothing": ("", "devices", "[[devices]]"),
    "no TOML": ("[[devices", "is no TOML", "docs/placement.md"),
    "no number": (f"{DEVICE}flops = 'many'", "devices", "docs/placement.md"),
    "no devices": (DEVICE.replace("4", "0"), "devices", "docs/placement.md"),
    "an unknown key": (f"{DEVICE}memory = 3", "memory", "docs/placement.md"),
    "two names": (DEVICE * 2, "devices.name", "rename"),
    "an unknown schedule": (f'{DEVICE}[search]\nschedules = ["fast"]', "search.schedules", "Known: bounded"),
    "failures": (f'failures = [{{ at_s = 1, role = "learner" }}]\n{DEVICE}', "failures", "lost_every_s"),
    "no costs": (DEVICE, "model", "Add [model]"),
    "no rates": (f"{DEVICE}[model]\nparameters = 1e6", "devices.flops", "Add flops and bytes_per_s"),
    "no plan": (f'plan = "none.json"\n{DEVICE}', "plan", "jaxroll plan --json"),
    "a role elsewhere": (
        f'{DEVICE}[[roles]]\nname = "a"\nseconds = {{ gpu = {{ 1 = 1 }} }}', "roles.seconds", "Known: cpu",
    ),
    "a role of nothing": (f'{DEVICE}[[roles]]\nname = "a"', "roles.seconds", "Give one of them"),
    "an unknown role": (
        f'{DEVICE}[[roles]]\nname = "a"\nafter = ["b"]\nseconds = {{ cpu = {{ 1 = 1 }} }}', "roles.after",
        "Add its table",
    ),
    "no numbers that fit": (
        f'{DEVICE}[[roles]]\nname = "a"\nseconds = {{ cpu = {{ 9 = 1 }} }}', "roles.seconds", "Add numbers of devices",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_cluster_is_refused_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, key, remedy = BAD[name]
    code, out, err = placed(tmp_path, capsys, text)
    assert code == 64 and not out and err.count("\n") == 1 and err.startswith("error: ")
    assert key in err and remedy in err


def test_a_missing_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["place"]) == 64 and "--cluster" in capsys.readouterr().err
    assert cli.main(["place", "--cluster=none.toml"]) == 64 and "none.toml" in capsys.readouterr().err
