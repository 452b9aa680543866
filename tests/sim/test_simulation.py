"""Simulations of whole runs: their step times where they can be calculated by hand, their folders, and bad input."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll.config import Config
from jaxroll.control import cli, run_dir
from jaxroll.errors import ConfigError
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version
from jaxroll.sim import costs, network, simulate
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, RoleFailure, SamplerCosts, TransferCosts, Workload
from jaxroll.sim.devices import SimulatedEngine

TOKENS = 10
# Every answer has 10 tokens of 0.01 s each; prompts, weights and the network take no time.
CLUSTER = Cluster(
    source="made up",
    sampler=SamplerCosts(step_overhead_s=0.1, price_per_hour=36.0),
    learner=LearnerCosts(step_overhead_s=3.0, price_per_hour=36.0),
    workload=Workload(answer_tokens=Law(mean=TOKENS)),
    rpc_s=0.0,
)
ANSWER_S = TOKENS * 0.1


def config(**schedule: object) -> Config:
    """A run of four groups of two members a step, whose sampler has a slot for each member of a step."""
    base = configs.parse(
        {
            "run": {"seed": 3},
            "schedule": {"steps": 30, "groups_per_step": 4, "group_size": 2} | schedule,
            "sampler": {"slots": 8, "decode_chunk": 1, "prefill_rows": 8},
            "sampling": {"max_tokens": 16},
            "task": {"max_prompt_tokens": 32},
        }
    )
    return costs.checked(base)


def test_a_run_whose_samplers_join_cannot_be_simulated() -> None:
    none = configs.parse(configs.override(configs.to_dict(config()), ["sampler.count=0"]))
    with pytest.raises(ConfigError, match="no sampler joins a simulated run"):
        simulate.simulated_rows(none, CLUSTER, Path(), keep=False)


def figures(config: Config, cluster: Cluster = CLUSTER) -> simulate.Figures:
    return simulate.simulate(config, cluster, Path(), keep=False)


def test_a_synchronous_step_takes_the_generation_and_the_training() -> None:
    found = figures(config(alpha=0.0))
    assert found["step_s"] == pytest.approx(ANSWER_S + 3.0, rel=0.03)
    assert found["age_max"] == 0 and found["samples_per_s"] == pytest.approx(8 / found["step_s"])
    assert found["tokens_per_s"] == pytest.approx(8 * TOKENS / found["step_s"])


@pytest.mark.parametrize(("train_s", "step_s"), [(3.0, 3.0), (0.25, ANSWER_S)], ids=["learner", "sampler"])
def test_an_asynchronous_step_takes_the_longer_of_the_two(train_s: float, step_s: float) -> None:
    cluster = replace(CLUSTER, learner=LearnerCosts(step_overhead_s=train_s))
    found = figures(config(alpha=2.0), cluster)
    assert found["step_s"] == pytest.approx(step_s, rel=0.05) and found["age_max"] <= 2


def test_a_published_version_is_used_after_its_transfer() -> None:
    transfer = TransferCosts(publish_s=0.5, latency_s=0.25, size_bytes=1e9, bytes_per_s=1e9)
    found = figures(config(alpha=0.0), replace(CLUSTER, transfer=transfer))
    assert found["step_s"] == pytest.approx(ANSWER_S + 3.0 + 0.5 + 0.25 + 1.0, rel=0.03)


def test_two_samplers_halve_the_generation_where_the_slots_are_scarce() -> None:
    one = configs.parse(configs.override(configs.to_dict(config(alpha=2.0)), ["sampler.slots=4"]))
    two = configs.parse(configs.override(configs.to_dict(one), ["sampler.count=2"]))
    cluster = replace(CLUSTER, learner=LearnerCosts(step_overhead_s=0.01))
    assert figures(one, cluster)["step_s"] / figures(two, cluster)["step_s"] == pytest.approx(2.0, rel=0.05)


def test_equal_simulations_with_failures_give_equal_figures() -> None:
    laws = Workload(answer_tokens=Law("lognormal", mean=8, deviation=6, least=1), env_s=Law("exponential", mean=0.2))
    cluster = replace(
        CLUSTER, workload=laws, failures=(RoleFailure(20.0, "sampler-0", 5.0), RoleFailure(50.0, "learner", 2.0))
    )
    found = figures(config(alpha=1.0), cluster)
    assert found == figures(config(alpha=1.0), cluster) and found["age_max"] <= 1


def rows(config: Config, cluster: Cluster) -> list[str]:
    return [json.dumps(row) for row in simulate.simulated_rows(config, cluster, Path(), keep=False)]


def test_the_rows_of_equal_simulations_are_equal_however_slow_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    laws = Workload(answer_tokens=Law("normal", mean=10, deviation=5, least=1, most=16))
    cluster = replace(CLUSTER, workload=laws, failures=(RoleFailure(5.0, "sampler-0", 2.0),))
    run = configs.parse(configs.override(configs.to_dict(config(alpha=2.0, steps=10)), ["sampler.count=4"]))
    before = rows(run, cluster)
    monkeypatch.setattr(time, "monotonic", itertools.count().__next__)  # each look at the machine's clock is 1 s later
    assert rows(run, cluster) == before


@pytest.mark.parametrize(
    "train_s", [pytest.param(0.3, id="sampler"), pytest.param(3.0, id="learner", marks=pytest.mark.soak)]
)
def test_equal_samplers_with_room_share_the_work_of_a_synchronous_step(train_s: float) -> None:
    """A decode step takes longer with more sequences, so a sampler that gets all of them delays the step.

    The sampler that is ready first has the whole first step, is slow there, and is tried again some claims later; the
    second half of the run counts.
    """
    costs_ = SamplerCosts(step_overhead_s=0.1, kv_bytes_per_token=0.0005, bytes_per_s=1.0)
    laws = Workload(answer_tokens=Law("normal", mean=10, deviation=5, least=1, most=16))
    cluster = replace(CLUSTER, sampler=costs_, workload=laws, learner=LearnerCosts(step_overhead_s=train_s))
    one = config(alpha=0.0, steps=32, groups_per_step=8, group_size=4)
    run = configs.parse(configs.override(configs.to_dict(one), ["sampler.count=4", "sampler.slots=16"]))
    totals: dict[str, list[int]] = {}
    for row in simulate.simulated_rows(run, cluster, Path(), keep=False):
        if row["kind"] == "stats" and str(row["role"]).startswith("sampler"):
            totals.setdefault(str(row["role"]), []).append(row["episodes"])
    finished = Counter({name: count[-1] - count[len(count) // 2] for name, count in totals.items()})
    assert len(finished) == 4
    assert min(finished.values()) > 0.8 * sum(finished.values()) / 4, finished


def test_samplers_that_share_groups_fill_their_slots_at_once() -> None:
    """The members of a step fit the slots exactly: a sampler that gets its share in two turns delays the step."""
    laws = Workload(answer_tokens=Law(mean=16))
    cluster = replace(CLUSTER, sampler=SamplerCosts(step_overhead_s=0.1), workload=laws, learner=LearnerCosts())
    one = config(alpha=0.0, steps=8, groups_per_step=16, group_size=8, group_placement="spread")
    sizes = ["sampler.count=4", "sampler.slots=32", "sampler.concurrent_episodes=32"]
    found = figures(configs.parse(configs.override(configs.to_dict(one), sizes)), cluster)
    assert found["step_s"] < 1.2 * 16 * 0.1


def test_a_failure_costs_time() -> None:
    failing = replace(CLUSTER, failures=(RoleFailure(40.0, "sampler-0", 30.0),))
    without, with_it = figures(config(alpha=0.0)), figures(config(alpha=0.0), failing)
    assert with_it["seconds"] - without["seconds"] >= 30.0


def test_a_failure_of_a_role_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="sampler-1"):
        figures(config(), replace(CLUSTER, failures=(RoleFailure(1.0, "sampler-1", 1.0),)))


def test_progress_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "REPORT_EVERY_S", 0.0)
    lines: list[str] = []
    simulate.simulate(config(alpha=0.0), CLUSTER, Path(), keep=False, report=lines.append)
    assert any("of 30" in line for line in lines)


def swept(*sweeps: str, cluster: Cluster = CLUSTER) -> list[tuple[dict[str, str], Config, Cluster]]:
    return list(simulate.swept(config(alpha=1.0), cluster, sweeps))


def test_names_of_schedules_and_sweeps() -> None:
    found = swept("schedule=sync,pure", "sampler.slots=4,8")
    assert [values for values, *_ in found] == [
        {"schedule": name, "sampler.slots": slots} for name in ("sync", "pure") for slots in ("4", "8")
    ]
    assert [one.schedule.alpha for _, one, _ in found] == [0.0, 0.0, 1.0, 1.0]
    assert [one.sampler.slots for _, one, _ in found] == [4, 8, 4, 8]
    assert found[2][1].schedule.weight_swap == "trajectory"
    for sweep in ("schedule=fast", "alpha", "sampler.slots="):
        with pytest.raises(ConfigError, match="--sweep"):
            swept(sweep)


def test_a_sweep_over_schedules_changes_the_cluster_where_a_schedule_is_one_of_the_learner() -> None:
    learner = replace(CLUSTER.learner, samplers=1)
    found = swept("schedule=sync,stream,partial_overlap", "sampler.count=3", cluster=replace(CLUSTER, learner=learner))
    assert [one.schedule.alpha for _, one, _ in found] == [0.0, 0.0, 0.0]
    assert [one.learner.streaming for _, one, _ in found] == [False, True, True]
    assert [(one.sampler.count, one.placement.learner_samplers) for _, one, _ in found] == [(2, 0), (2, 0), (3, 1)]
    assert [one.sampler.flush_tokens > 0 for _, one, _ in found] == [False, False, True]
    with pytest.raises(ConfigError, match="no sampler fits on the learner's devices"):
        swept("schedule=partial_overlap")
    with pytest.raises(ConfigError, match="schedule=stream fixes it"):
        swept("schedule=stream", "schedule.alpha=1")


def test_a_sweep_over_a_key_that_the_mode_of_the_config_fixes_changes_it() -> None:
    synchronous = configs.parse(configs.override(configs.to_dict(config()), ["schedule.mode=sync"]))
    found = simulate.swept(synchronous, CLUSTER, ["schedule=bounded", "schedule.alpha=1,2"])
    assert [one.schedule.alpha for _, one, _ in found] == [1.0, 2.0]
    for sweep in ("schedule.alpha=0,1", "schedule=bounded,"):
        with pytest.raises(ConfigError):
            list(simulate.swept(synchronous, CLUSTER, [sweep]))
    with pytest.raises(ConfigError, match="schedule=sync fixes it"):
        next(simulate.swept(synchronous, CLUSTER, ["schedule=bounded,sync", "schedule.alpha=1"]))


def test_a_cluster_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    cluster = replace(CLUSTER, failures=(RoleFailure(1.0, "learner", 2.0),), rpc_bytes_per_s=1e8)
    (file := tmp_path / "c.toml").write_text(costs.text(cluster))
    assert costs.load(file) == cluster


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[sampler]\nstep_s = 1", "sampler.step_s"),
        ("[sampler]\nflops = 0", "flops"),
        ("rpc_s = 'a'", "rpc_s"),
        ("[sampler", "TOML"),
        ("[workload]\nenv_s = { kind = 'even' }", "even"),
        ("[[failures]]\nrole = 'a'", "at_s"),
    ],
)
def test_a_bad_cluster_is_refused_by_its_key(tmp_path: Path, text: str, named: str) -> None:
    (file := tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        costs.load(file)
    assert named in str(refused.value) and "\n" not in str(refused.value).strip()


def test_a_simulated_run_is_reported_and_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(costs.text(CLUSTER))
    (tmp_path / "c.py").write_text(
        "from jaxroll.config import defaults\ndef get_config():\n    config = defaults()\n"
        "    config.schedule.steps = 12\n    config.sft.steps = 0\n    return config\n"
    )
    run = tmp_path / "run"
    argv = ["sim", str(run), f"--config={tmp_path / 'c.py'}", f"--cluster={tmp_path / 'c.toml'}"]
    assert cli.main(argv) == 0
    assert "step time" in capsys.readouterr().out
    assert cli.main(["report", str(run)]) == 0
    assert "simulated (S)" in capsys.readouterr().out and "simulated (S)" in (run / "report.html").read_text()
    assert cli.main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == "S"
    assert cli.main(["replay", str(run)]) == 0
    assert cli.main(["export", str(run), f"--perfetto={tmp_path / 'timeline.json'}"]) == 0
    slices = [
        event for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if event["ph"] == "X"
    ]
    trained = [event for event in slices if event["name"] == "train"]
    assert len(trained) == 12 and all(event["dur"] == pytest.approx(3e6, rel=0.01) for event in trained)
    assert len(slices) >= 12 + 12 * 24 * 8, "a slice of each member, too"


def test_the_figures_of_a_calibrated_cluster_are_those_of_the_run(tmp_path: Path) -> None:
    """Calibrated on a simulated run, whose costs are known: the null case of a prediction."""
    one = config(alpha=1.0)
    run_dir.create(tmp_path / "run", one, [])
    found = simulate.simulate(one, CLUSTER, tmp_path / "run")
    again = figures(one, costs.calibrated(tmp_path / "run"))
    assert again["step_s"] / found["step_s"] == pytest.approx(1.0, abs=0.02)


def test_a_simulation_does_not_load_jax() -> None:
    code = "import sys; import jaxroll.sim.simulate, jaxroll.sim.costs; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_wait_of_less_than_the_clock_can_show_ends() -> None:
    """asyncio calls timers up to 1e-9 s early; a loop that waits for the rest of a period must see that it is over."""

    async def job() -> int:
        loop, turns = asyncio.get_running_loop(), 0
        await asyncio.sleep(44.6)
        until = loop.time() + 1e-12
        while loop.time() < until and turns < 100:
            turns += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), until - loop.time())
        return turns

    assert network.run(job()) == 1


@pytest.mark.parametrize("slots", [3, 16], ids=["for part of a batch", "for two batches"])
@pytest.mark.parametrize("train_s", [0.2, 3.0], ids=["sampler", "learner"])
def test_with_intervals_every_token_but_the_first_batchs_is_one_version_old(train_s: float, slots: int) -> None:
    """Episodes of several turns whose environments take random times: no member begins early."""
    turns = Workload(answer_tokens=Law(mean=2), env_s=Law("exponential", mean=0.5), turns=Law(mean=4))
    cluster = replace(CLUSTER, learner=LearnerCosts(step_overhead_s=train_s), workload=turns)
    base = config()
    base = replace(base, sampler=replace(base.sampler, slots=slots, concurrent_episodes=slots))
    rows = simulate.simulated_rows(simulate.scheduled(base, "interval"), cluster, Path(), keep=False)
    steps = [row for row in rows if row.get("kind") == "step"]
    ages = [tuple(row["age_hist"]) for row in steps]
    assert ages[0] == ("0",) and set(ages[1:]) == {("1",)}
    spans: dict[int, tuple[float, float]] = {}  # of the generations of each group
    for group, _, t0, t1, _ in (each for row in rows if row.get("kind") == "members" for each in row["rows"]):
        first, last = spans.get(group, (t0, t1))
        spans[group] = min(first, t0), max(last, t1)
    for before, after in itertools.pairwise(steps):
        ended_s = max(spans[group][1] for group in before["groups"])
        assert min(spans[group][0] for group in after["groups"]) >= ended_s


@pytest.mark.parametrize(("swap", "apart"), [("trajectory", {0}), ("drain", {0, 1})])
def test_with_pure_a_conversation_has_one_version_in_all_its_turns(tmp_path: Path, swap: str, apart: set[int]) -> None:
    """`drain` ends answers only: it is the control."""
    assert simulate.SCHEDULES["pure"] == {"weight_swap": "trajectory"}
    turns = Workload(answer_tokens=Law(mean=4), env_s=Law("exponential", mean=0.5), turns=Law(mean=4))
    cluster = replace(CLUSTER, learner=LearnerCosts(step_overhead_s=0.5), workload=turns)
    one = config(alpha=1.0, steps=12, weight_swap=swap)
    run_dir.create(tmp_path / "run", one, [])
    simulate.simulate(one, cluster, tmp_path / "run")
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "store.db")) as db:
        found = db.execute("SELECT newest_step - oldest_step FROM members WHERE digest != ''").fetchall()
    assert len(found) >= 12 * 8 and {steps for (steps,) in found} == apart


@pytest.mark.parametrize("role", ["learner", "sampler-0"])
def test_with_intervals_a_run_goes_on_after_a_restart(role: str) -> None:
    """A sampler whose weights are too old for what is left of an interval gets new ones within it."""
    turns = Workload(answer_tokens=Law(mean=2), env_s=Law("exponential", mean=0.5), turns=Law(mean=4))
    cluster = replace(CLUSTER, learner=LearnerCosts(step_overhead_s=0.2), workload=turns)
    for at_s in (9.3, 14.7, 20.0):
        failing = replace(cluster, failures=(RoleFailure(at_s, role, 1.0),))
        rows = simulate.simulated_rows(simulate.scheduled(config(), "interval"), failing, Path(), keep=False)
        steps = [row for row in rows if row.get("kind") == "step"]
        assert max(row["age_max"] for row in steps) == 1
        # Claims that are trained again do not wait for samplers, which may be unable to get those versions.
        assert max(row["wait_s"] for row in steps) < 30.0


def test_the_time_of_each_step_is_multiplied_by_the_jitter() -> None:
    learner = LearnerCosts(step_overhead_s=3.0)
    slower = replace(learner, jitter=Law(mean=2.0))
    plain, twice = (figures(config(alpha=0.0), replace(CLUSTER, learner=one))["step_s"] for one in (learner, slower))
    assert twice - plain == pytest.approx(3.0, rel=0.05)


def test_groups_of_equal_rewards_cost_the_learner_nothing() -> None:
    trains = LearnerCosts(step_overhead_s=1.0, micro_batch_overhead_s=4.0)
    for chance, train_s in ((1.0, 1.0), (0.5, 5.0)):
        work = Workload(answer_tokens=Law(mean=TOKENS), rewarded=Law(mean=chance))
        found = figures(config(alpha=0.0), replace(CLUSTER, learner=trains, workload=work))
        assert found["step_s"] == pytest.approx(ANSWER_S + train_s, rel=0.05)


def test_a_shared_prompt_is_not_in_the_rows_of_the_learner() -> None:
    """Prompts of 24 tokens and answers of 10; the learner takes 10 ms a token of its rows."""
    trains = LearnerCosts(step_overhead_s=0.0, flops_per_token=1.0, flops=100.0)
    work, rows = (
        Workload(prompt_tokens=Law(mean=24), answer_tokens=Law(mean=TOKENS)),
        {"row_tokens": 48, "micro_batch_rows": 1},
    )
    alone, shared = (
        figures(
            replace(base := config(alpha=0.0), learner=replace(base.learner, shared_prompt_tokens=tokens, **rows)),
            replace(CLUSTER, learner=trains, workload=work),
        )["step_s"]
        for tokens in (0, 32)
    )
    assert alone > 1.5 * shared


def test_the_rewards_of_a_group_have_the_chance_that_is_drawn_for_its_prompt() -> None:
    """A chance of 0 or 1, drawn for each prompt: no group has both rewards."""
    sure = Workload(answer_tokens=Law(mean=2), rewarded=Law("recorded", values=(0.0, 1.0)))
    rows = simulate.simulated_rows(config(), replace(CLUSTER, workload=sure), Path(), keep=False)
    means = [row["reward_mean"] for row in rows if row.get("kind") == "step"]
    assert {round(4 * mean, 6) for mean in means} <= {0.0, 1.0, 2.0, 3.0, 4.0}
    assert 0.3 < sum(means) / len(means) < 0.7


def test_the_environments_of_a_groups_members_take_independent_times() -> None:
    """A step of four groups of two waits for the longest of eight exponential times of 1 s, not of four."""
    work = Workload(answer_tokens=Law(mean=1), env_s=Law("exponential", mean=1.0))
    instant = Cluster(sampler=SamplerCosts(step_overhead_s=1e-9), workload=work, rpc_s=0.0)
    found = figures(config(alpha=0.0, steps=150), instant)
    assert found["step_s"] == pytest.approx(sum(1 / n for n in range(1, 9)), rel=0.1)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_lengths_of_a_groups_answers_are_as_alike_as_the_cluster_says(share: float) -> None:
    lengths = Workload(answer_tokens=Law("lognormal", mean=60, deviation=30, least=1), answers_alike=share)
    base = config(alpha=0.0, steps=50)
    long = replace(base, sampling=replace(base.sampling, max_tokens=1000))
    rows = simulate.simulated_rows(long, replace(CLUSTER, workload=lengths), Path(), keep=False)
    found = [each for row in rows if row.get("kind") == "members" for each in row["rows"]]
    measured = costs.alike([row[0] for row in found], [row[4] for row in found])
    assert measured == pytest.approx(share, abs=0.1)


def test_a_request_that_arrives_during_a_prefill_joins_after_one_dispatch() -> None:
    """Prefills of 1 s, two answers of 1 s, and the second request half a second after the first."""
    cluster = replace(CLUSTER, sampler=SamplerCosts(step_overhead_s=0.1, prefill_overhead_s=1.0))

    async def job() -> list[float]:
        engine, now_s = SimulatedEngine(cluster, config(), "sampler-0"), asyncio.get_running_loop().time
        engine.swap(Version(0, 0), None)

        async def ended_s(group: int, begins_s: float) -> float:
            await asyncio.sleep(begins_s)
            await engine.generate(np.zeros(4, np.int32), GenerationKey(group, 0), SamplingParams(max_tokens=16))
            return now_s() - start_s

        start_s = now_s()
        found = await asyncio.gather(ended_s(0, 0.0), ended_s(1, 0.5))
        await engine.close()
        return found

    # Prefill, a step, prefill, nine steps together, a step.
    assert network.run(job(), 100.0) == pytest.approx([3.0, 3.1], abs=1e-6)


def test_a_decode_step_and_a_prefill_are_told_apart_by_their_counts() -> None:
    counts = [(10, 1), (40, 1), (80, 5), (120, 5)]
    rows = [
        {
            "kind": "stats",
            "role": "sampler-0",
            "decode_steps": steps,
            "prefills": calls,
            "step_s": 0.01 * steps + 0.2 * calls,
        }
        for steps, calls in counts
    ]
    found = costs.engine_costs(rows)
    assert found is not None
    assert (found.step_overhead_s, found.prefill_overhead_s) == (pytest.approx(0.01), pytest.approx(0.2))
    assert costs.engine_costs(rows[:1]) is None


def test_rollouts_that_the_store_decodes_on_its_thread_are_simulated() -> None:
    base = config(alpha=0.0, steps=2)
    long = replace(
        base, task=replace(base.task, max_episode_tokens=4096), learner=replace(base.learner, row_tokens=4096)
    )
    cluster = replace(CLUSTER, workload=Workload(answer_tokens=Law(mean=TOKENS), turns=Law(mean=60)))
    assert figures(long, cluster)["step_s"] == pytest.approx(60 * ANSWER_S + 3.0, rel=0.02)


def test_a_streaming_learner_has_only_the_rest_of_a_step_left_when_the_claim_is_complete() -> None:
    """One slot: groups end every two seconds, and fill a micro-batch of a second unless their rewards are equal."""
    base, prompt = config(alpha=0.0), 16
    one = replace(base, sampler=replace(base.sampler, slots=1))
    cluster = replace(CLUSTER, learner=LearnerCosts(step_overhead_s=0.5, micro_batch_overhead_s=1.0))
    cluster = replace(cluster, workload=replace(CLUSTER.workload, prompt_tokens=Law(mean=prompt)))
    row_tokens, found = 2 * (TOKENS + prompt + 2), []  # the template adds two
    for streams in (False, True):
        learner = replace(base.learner, row_tokens=row_tokens, micro_batch_rows=1, streaming=streams)
        rows = simulate.simulated_rows(replace(one, learner=learner), cluster, Path(), keep=False)
        found.append([row for row in rows if row.get("kind") == "step"])
    for batch, stream in zip(*found, strict=True):
        assert batch["groups"] == stream["groups"] and batch["micro_batches"] == stream["micro_batches"]
        assert batch["train_s"] == pytest.approx(0.5 + batch["micro_batches"], abs=0.05)
        assert stream["train_s"] == pytest.approx(batch["train_s"], abs=0.05), "the same work"
        left_s = stream["t1"] - stream["t0"]
        assert left_s in (pytest.approx(0.5, abs=0.05), pytest.approx(1.5, abs=0.05)), "of the last group"
        assert stream["age_max"] == 0
    assert (
        sum(row["micro_batches"] for row in found[0]) > 30 and max(row["micro_batches_early"] for row in found[1]) > 2
    )
