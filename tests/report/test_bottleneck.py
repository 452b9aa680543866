"""The bottleneck of a run: rows of runs whose limit is known, and five whole runs that are made to have one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxroll import config as configs
from jaxroll import metrics
from jaxroll.report import activity, inspect, page, record, summary
from tests.harness.run_folder import make_run

ROOT = Path(__file__).parents[2]
CONFIG = configs.to_dict(configs.Config())
SLOTS = CONFIG["sampler"]["slots"]
ALLOWED = SLOTS + 4 * CONFIG["schedule"]["group_size"]
STEPS = 20


def rows(
    *,
    wait: float,
    publish: float = 0.02,
    decode: float = 0.3,
    fetch: float = 0.05,
    queued: float = 0.0,
    active: float = 0.1,
    members: float = 0.3,
    unstored: float = 0.0,
    retained: float = 0.0,
) -> list[dict[str, Any]]:
    """Twenty steps of a second each; the shares are of the step, the decoded tokens, the slots and the limits."""
    found: list[dict[str, Any]] = []
    for n in range(STEPS):
        t0, t1 = n + wait, n + 1.0
        sampler = {"t": t1, "role": "sampler-0"}
        found += [
            {"t": t1, "role": "learner", "kind": "step", "step": n + 1, "t0": t0, "t1": t1, "train_s": 1 - wait,
             "wait_s": wait, "publish_s": publish, "age_hist": {}},
            {**sampler, "kind": "span", "what": "fetch", "t0": n, "t1": n + fetch},
            {**sampler, "kind": "span", "what": "decode", "t0": n + fetch, "t1": n + fetch + decode, "tokens": 1000},
            {**sampler, "kind": "stats", "slot_steps_busy": 1000 * queued, "slot_steps_total": 1000 * queued,
             "active": active * SLOTS, "members_in_flight": (members + unstored) * ALLOWED,
             "members_unstored": unstored * ALLOWED},
            {"t": t1, "role": "store", "kind": "store",
             "retained_bytes": retained * CONFIG["store"]["retention_mb"] * 2**20},
        ]  # fmt: skip
    return found


CASES = {
    "the learner computes all the time": (
        rows(wait=0.05, decode=0.9, queued=0.9), "learner", "learner.micro_batch_rows"),
    "slots are always full": (rows(wait=0.7, queued=0.8, decode=0.9, members=1.0), "sampler slots", "sampler.slots"),
    "weights travel slowly": (rows(wait=0.7, fetch=0.5, publish=0.2), "weight transfer", "schedule.publish_every"),
    "episodes wait for their environment": (
        rows(wait=0.7, members=0.95), "environments", "sampler.concurrent_episodes"),
    "the age bound": (rows(wait=0.7), "age bound", "schedule.alpha"),
    "few episodes run, many wait for the store": (rows(wait=0.7, unstored=0.9), "age bound", "schedule.alpha"),
    "engines that decode all the time": (
        rows(wait=0.7, decode=0.95, active=0.8, members=0.9), "sampler", "sampler.count"),
    "retention is full": (rows(wait=0.7, retained=1.0), "store", "store.retention_mb"),
}  # fmt: skip


@pytest.mark.parametrize(("found", "part", "key"), CASES.values(), ids=CASES)
def test_the_limit_of_a_run_is_named_with_the_key_that_relieves_it(
    found: list[dict[str, Any]], part: str, key: str
) -> None:
    limit = activity.bottleneck(found, CONFIG)
    assert limit is not None and (limit.part, limit.key) == (part, key), limit
    section, _, name = key.partition(".")
    assert name in CONFIG[section] and key in limit.text()
    assert activity.bottleneck([row for row in found if metrics.checked_row(row)], CONFIG) == limit, (
        "rows of the schema"
    )


def test_actors_hold_the_members_where_there_are_any() -> None:
    found = [row | {"members_in_flight": 0} if row["kind"] == "stats" else row for row in rows(wait=0.7)]
    actor = [
        {"t": row["t"], "role": "actor-0", "kind": "stats", "members_in_flight": ALLOWED}
        for row in found
        if row["kind"] == "stats"
    ]
    limit = activity.bottleneck([*found, *actor], CONFIG)
    assert limit is not None and limit.part == "environments"


def test_a_run_of_a_few_steps_has_no_bottleneck_yet() -> None:
    few = [row for row in rows(wait=0.7) if row["t"] < activity.LEAST_STEPS]
    assert activity.bottleneck(few, CONFIG) is None and activity.bottleneck([], CONFIG) is None


def test_only_the_latest_steps_count_for_a_live_run() -> None:
    later = [
        {**row, "t": row["t"] + STEPS, **{k: row[k] + STEPS for k in ("t0", "t1") if k in row}}
        for row in rows(wait=0.05)
    ]
    limit = activity.bottleneck(activity.latest([*rows(wait=0.7), *later], STEPS), CONFIG)
    assert limit is not None and limit.part == "learner"


def test_report_page_and_inspect_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record.load(make_run(tmp_path / "run", steps=20))
    figures, out = summary.summary(run), io.StringIO()
    limit = activity.Bottleneck(**figures["bottleneck"])
    page.show(run, figures, Console(file=out, width=200))
    assert limit.text() in out.getvalue()
    assert limit.reason in page.write_page(run, figures).read_text(encoding="utf-8")
    assert inspect.main(run.path, run.config, group=None, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["bottleneck"] == figures["bottleneck"]
    assert inspect.main(run.path, run.config, group=None, as_json=False) == 0
    assert limit.text() in capsys.readouterr().out


# Settings added to configs/smoke.py that make one part the limit of a run. A reward that differs among the members of a
# group gives the learner work: members without an advantage are not computed.
DENSE = "task.env=tests.harness.envs.dense_reward:dense_reward"
SLOW = "task.env=tests.harness.envs.slow_reward:slow_reward"
RUNS = {
    "learner": [DENSE, "learner.row_tokens=1024", "learner.micro_batch_rows=16", "sampler.slots=32"],
    "sampler slots": ["sampler.slots=1", "sampler.prefill_rows=1"],
    "environments": [SLOW, "sampler.slots=64", "sampler.concurrent_episodes=8"],
    "age bound": [SLOW, "sampler.slots=64", "sampler.concurrent_episodes=256"],
    "sampler": ["sampler.slots=256", "sampler.prefill_rows=16", "sampling.max_tokens=64", "task.max_prompt_tokens=16"],
}


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("part", RUNS)
def test_runs_made_to_have_a_bottleneck_name_it(part: str, tmp_path: Path) -> None:
    words = [f"--config.{text}" for text in ["schedule.steps=24", "sft.steps=0", "evaluator.every=0", *RUNS[part]]]
    argv = [sys.executable, "-m", "jaxroll", "train", str(tmp_path / "run"), f"--config={ROOT / 'configs/smoke.py'}"]
    done = subprocess.run(
        [*argv, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = summary.summary(record.load(tmp_path / "run"))["bottleneck"]
    assert found["part"] == part, found


def test_time_in_which_the_learner_streams_is_computing_and_no_wait() -> None:
    """A step of 60 s: 3 s after its claim, 30 s streamed in two parts, 27 s waited."""
    row = {"kind": "step", "t0": 157.0, "t1": 160.0, "wait_s": 27.0, "train_s": 33.0, "publish_s": 1.0}
    row["streamed"] = [[110.0, 130.0], [140.0, 150.0]]
    lane = activity.learner_lane([row])
    assert lane.spans["wait"] == [(100.0, 110.0), (130.0, 140.0), (150.0, 157.0)]
    assert lane.spans["train"] == activity.computing([row]) == [(110.0, 130.0), (140.0, 150.0), (157.0, 160.0)]
    assert activity.learner_lane([row | {"streamed": None}]).spans["wait"] == [(130.0, 157.0)]
