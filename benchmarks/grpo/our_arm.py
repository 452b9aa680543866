"""Our arm of benchmarks/grpo: `jaxroll train` as a user starts it; and, as a program, the loss of one batch.

python -m benchmarks.grpo.our_arm FOLDER WORK-AS-JSON OPTIONS-AS-JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.grpo.work import GROUP, GROUPS, LEARNING_RATE, MAX_NORM, Work
from benchmarks.lib.report import ROOT
from benchmarks.schedules.runs import SETTLING, measured

DEADLINE_S = 300.0
CONFIG = ROOT / "configs" / "rlvr_tiny.py"


def overrides(work: Work, folder: Path, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Overrides of configs/rlvr_tiny.py for a run; `options` are the settings on trial, by key."""
    longest, members = work.prompt_tokens + work.conversation_tokens, GROUPS * GROUP
    several = {"task.max_episode_tokens": longest} if work.turns > 1 else {}
    # A row of one turn holds an answer and the last token of its prompt; the group shares the rest of the prompt.
    shared = (
        {
            "learner.shared_prompt_tokens": work.prompt_tokens - 1,
            "learner.shared_prompt_rows": GROUP,
            "learner.row_tokens": work.answer_tokens + 1,
        }
        if work.turns == 1
        else {}
    )
    buckets = [work.prompt_tokens] + [longest] * (work.turns > 1)
    return {
        "placement.platform": "cpu",
        "supervisor.max_restarts": 0,
        "evaluator.every": 0,
        "model.path": str(folder),
        "sft.steps": 0,
        "task.source": "jsonl",
        "task.path": str(folder / "questions.jsonl"),
        "task.env": "benchmarks.grpo.envs:links",
        "task.max_prompt_tokens": work.prompt_tokens,
        "task.heldout_items": 0,
        **several,
        "schedule.steps": steps,
        "schedule.groups_per_step": GROUPS,
        "schedule.group_size": GROUP,
        "schedule.alpha": 1.0,
        "sampling.max_tokens": work.answer_tokens,
        "sampler.slots": members,
        "sampler.prefill_rows": GROUPS,
        "sampler.prefill_buckets": tuple(buckets),
        "sampler.decode_chunk": work.answer_tokens,
        "sampler.page_tokens": 8,
        "learner.row_tokens": longest,
        "learner.micro_batch_rows": members,
        "learner.remat": "none",
        "learner.learning_rate": LEARNING_RATE,
        "learner.warmup_steps": 1,
        "learner.max_grad_norm": MAX_NORM,
        "learner.checkpoint_every": steps,
        **shared,
        **options,
    }


def trained(work: Work, folder: Path, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """One run: samples per second after the first steps, and its time by activity."""
    words = [f"--config.{key}={value}" for key, value in overrides(work, folder, steps, options).items()]
    with tempfile.TemporaryDirectory(prefix="race-", dir=folder) as name:
        run_dir = Path(name) / "run"
        environment = os.environ | {
            "JAXROLL_GRPO_WORK": json.dumps(asdict(work)),
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "benchmarks" / "jax-race"),
            "JAX_PLATFORMS": "cpu",
        }
        environment.pop("NPROC", None)
        command = [sys.executable, "-m", "jaxroll", "train", f"--config={CONFIG}", f"--run={run_dir}", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"ours ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return figures(rows)


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run from its rows, without the first steps."""
    steps = sorted((row for row in rows if row["kind"] == "step"), key=lambda row: row["step"])[SETTLING:]
    samples, tokens = sum(row["samples"] for row in steps), sum(row["tokens_trained"] for row in steps)
    found = measured(rows)
    keys = ("samples_per_s", "wait_s", "train_s", "decode_s", "age_mean", "age_max", "steps", "seconds")
    return {key: found[key] for key in keys} | {
        "tokens_a_sample": tokens / samples,
        "computed_share": sum(row["tokens_computed"] for row in steps) / tokens,
        "reward_first": steps[0]["reward_mean"],
        "reward_last": steps[-1]["reward_mean"],
        "publish_s": sum(row["publish_s"] for row in steps) / len(steps),
    }
