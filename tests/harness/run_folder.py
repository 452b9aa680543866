"""A run folder for tests: rows in the roles' format, a log in the store's schema, generated from one seed."""

from __future__ import annotations

import asyncio
import json
import random
import tarfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from jaxroll import config as configs
from jaxroll import metrics
from jaxroll.records import Message, Task, Version, VersionRef, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.machine import apply
from jaxroll.store.core.state import State
from jaxroll.store.log import commit_log
from jaxroll.store.log.commit_log import Log

FORMAT_1 = Path(__file__).parents[1] / "golden" / "run_format_1.tar.xz"
STARTED = 1_790_000_000.0
WARM_S, COMPILE_S = 32.0, 16.0
GROUPS, MEMBERS, TOKENS = 4, 4, 9
WORDS = ("stream", "planet", "window", "copper", "little", "garden", "rocket", "silver")
START = Version(0, 0)


def task(index: int) -> Task:
    """A task whose question hash is `hINDEX`."""
    return Task(index, (Message("user", f"word {index}"),), "single_turn", "{}", 0, f"h{index}")


class LogMaker:
    """A collection of events with their SQL, as the store makes them."""

    def __init__(self) -> None:
        self.state, self.statements = State(), []

    def add(self, *events: ev.Event, t: float = STARTED) -> None:
        """Apply the events and keep their statements."""
        for event in events:
            apply(self.state, event, 0.0)
            self.statements += commit_log.statements(event, self.state, self.state.position, t)

    def issue(self, group: int, *, index: int | None = None, version: Version = START, tokens: int = TOKENS) -> None:
        """Add a group with all members leased and put."""
        self.add(ev.Issued(group, task(group if index is None else index), MEMBERS, cursor=b"c"))
        self.add(ev.Leased(group, tuple((m, 1) for m in range(MEMBERS)), "sampler-0", "s", "r", 30.0))
        for member in range(MEMBERS):
            self.add(ev.Put(group, member, 1, f"d{group}.{member}", 100, (VersionRun(version, tokens),)))

    def write(self, run_dir: Path) -> None:
        """RUN/store.db."""
        asyncio.run(self._write(run_dir))

    async def _write(self, run_dir: Path) -> None:
        log = Log(run_dir)
        log.append(self.statements)
        await log.close()


def encodable(text: str) -> str:
    """`text` without lone surrogates, which JSON lines may hold but wire messages may not."""
    return text.encode("utf-8", "replace").decode()


def write_rows(run_dir: Path, rows: Sequence[dict]) -> None:
    """Write RUN/metrics.jsonl in order of time."""
    tracker = metrics.JsonlTracker(run_dir / "metrics.jsonl")
    tracker.log_all(sorted(rows, key=lambda row: row["t"]))
    tracker.close()


def write_run_file(run_dir: Path, **changes: object) -> None:
    """Write RUN/run.json with the demo's meshes; `changes` are dotted config keys with __ for the dot."""
    values = configs.defaults().to_dict()
    values["store"]["retention_mb"] = configs.StoreConfig().retention_mb
    values["learner"]["mesh"]["fsdp"], values["sampler"]["mesh"]["tensor"] = 2, 2
    for key, value in changes.items():
        room, _, name = key.partition("__")
        values[room][name] = value
    run_dir.mkdir(parents=True, exist_ok=True)
    about = {
        "created": STARTED,
        "argv": ["train", "--config=configs/demo.py"],
        "commit": "0" * 40,
        "python": "3.11.7",
        "versions": {"jax": "0.10.2"},
        "system": "Linux",
        "cores": 2,
        "jaxroll": "0.1.0",
        "digest": "x",
        "devices": {"learner": {"platform": "cpu", "devices": 2}},
    }
    (run_dir / "run.json").write_text(json.dumps(about | {"config": values}))


def make_run(run_dir: Path, *, steps: int = 60, steps_wanted: int = 60, hostile: str = "") -> Path:
    """Make a whole run that learns; `hostile` is inserted wherever a model's or an environment's text can occur."""
    rng = random.Random(0)
    write_run_file(run_dir, schedule__steps=steps_wanted)
    log, rows = LogMaker(), _warm_rows(rng)
    t = STARTED + WARM_S + COMPILE_S
    log.add(ev.Began(Version(0, 0), "L"), ev.Published(VersionRef(Version(0, 0), "tcp", "h:1", "m")), t=t)
    rows += [_eval_row(rng, 0, t + 4.0, hostile)]
    busy_from = t
    for step in range(steps):
        group_ids = [step * GROUPS + i for i in range(GROUPS)]
        wait, train, publish = rng.uniform(0.05, 0.5), rng.uniform(0.62, 0.8), rng.uniform(0.03, 0.08)
        t0 = t + wait
        for group in group_ids:
            log.issue(group, version=Version(0, max(0, step - 1)))
        log.add(ev.Claimed(step, 0, tuple(group_ids), 7), t=t0)
        t1, t2 = t0 + train, t0 + train + publish
        log.add(ev.Published(VersionRef(Version(0, step + 1), "tcp", "h:1", "m")), ev.Acked(Version(0, step)), t=t2)
        if (step + 1) % 20 == 0:
            log.add(ev.MadeDurable(Version(0, step + 1)), t=t2)
        rows += _sampler_rows(rng, group_ids, busy_from, t1 - rng.uniform(0.0, 0.3), step)
        busy_from = t1 + 0.02
        rows.append(_step_row(rng, step + 1, t0, t1, t2, wait, publish, group_ids, steps_wanted))
        if (step + 1) % 20 == 0:
            rows.append(_eval_row(rng, step + 1, t2 + 3.0, hostile))
        t = t2
    failed = ev.MemberFailed(steps * GROUPS, 0, 1, "d", "DATA", f"scorer raised {encodable(hostile)}", 0.0)
    log.add(ev.Issued(steps * GROUPS, task(steps * GROUPS), MEMBERS, cursor=b"c"))
    log.add(ev.Leased(steps * GROUPS, ((0, 1),), "sampler-0", "s", "r", 30.0), failed, t=t)
    rows += [
        {"t": t - 20.0, "role": "supervisor", "kind": "restart", "process": "sampler-0", "pid": 4711, "code": -9},
        {"t": t, "role": "learner", "kind": "event", "text": f"waiting for the last evaluation {hostile}"},
    ]
    log.write(run_dir)
    write_rows(run_dir, rows)
    (run_dir / "heldout.json").write_text(json.dumps([f"held{i}" for i in range(512)]))
    return run_dir


def _warm_rows(rng: random.Random) -> list[dict]:
    rows: list[dict] = [
        {"t": STARTED + s, "role": "sft", "kind": "event", "text": f"warm start step {10 * s}"}
        for s in range(2, int(WARM_S), 5)
    ]
    for role, what, seconds in (("learner", "compiling the step", 9.3), ("sampler-0", "compiling the engine", 14.1)):
        t = STARTED + WARM_S + 1
        rows.append({"t": t, "role": role, "kind": "compile", "what": what, "state": "start"})
        rows.append(
            {"t": t + seconds, "role": role, "kind": "compile", "what": what, "state": "end", "seconds": seconds}
        )
    return rows


def _skill(step: int, steps: int) -> float:
    return 0.44 + 0.33 * (1 - 2.718 ** (-3.0 * step / steps))


def _step_row(rng, step, t0, t1, t2, wait_s, publish_s, group_ids, steps) -> dict:
    skill = _skill(step, steps)
    tokens = GROUPS * MEMBERS * TOKENS
    old = 0 if step == 1 else round(tokens * rng.uniform(0.5, 0.9))
    return {
        "t": t2,
        "role": "learner",
        "kind": "step",
        "step": step,
        "lineage": 0,
        "t0": t0,
        "t1": t1,
        "train_s": t1 - t0,
        "wait_s": wait_s,
        "publish_s": publish_s,
        "replayed": False,
        "groups": group_ids,
        "samples": GROUPS * MEMBERS,
        "tokens_trained": tokens,
        "masked_tokens": 0,
        "age_hist": {"0": tokens - old, "1": old},
        "age_mean": old / tokens,
        "age_max": int(old > 0),
        "reward_mean": min(1.0, max(0.0, rng.gauss(skill - 0.03, 0.045))),
        "reward_std": 0.49 - 0.1 * skill,
        "loss": rng.gauss(0.0, 0.02),
        "grad_norm": 0.3 + abs(rng.gauss(0, 0.08)),
        "entropy": 0.9 - 0.6 * skill + rng.gauss(0, 0.01),
        "kl_behaviour": abs(rng.gauss(2e-3, 4e-4)),
        "ess": 0.985,
        "clip_share": abs(rng.gauss(0.01, 0.004)),
        "logprob_mismatch_max": abs(rng.gauss(6e-6, 2e-6)),
        "logits_std": 2.7,
        "padding_waste": rng.uniform(0.06, 0.12),
        "compiles": 0,
        "learning_rate": 3e-4,
        "groups_without_signal": 1,
        "by_age": {
            str(age): {
                "tokens": count,
                "tokens_trained": count,
                "reward": skill,
                "logprob_delta": 0.02 * (age + 1),
                "kl_behaviour": 1e-3 * age,
                "ratio_max": 1.2 + age,
                "clip_share": 0.01 * age,
                "ess": 0.99 - 0.1 * age,
            }
            for age, count in ((0, tokens - old), (1, old))
            if count
        },
    }


def _sampler_rows(rng: random.Random, group_ids: Sequence[int], t0: float, t1: float, step: int) -> list[dict]:
    cut = [t0, *sorted(rng.uniform(t0, t1) for _ in range(2)), t1]
    tokens = GROUPS * MEMBERS * TOKENS
    rows: list[dict] = [
        {"t": t1, "role": "sampler-0", "kind": "span", "what": "decode", "t0": a, "t1": b - 0.01, "tokens": tokens // 3}
        for a, b in pairwise(cut)
        if b - a > 0.02
    ]
    members = [[g, m, rng.uniform(t0, (t0 + t1) / 2), t1, TOKENS] for g in group_ids for m in range(MEMBERS)]
    rows.append({"t": t1, "role": "sampler-0", "kind": "members", "rows": members})
    rows.append(
        {
            "t": t1,
            "role": "sampler-0",
            "kind": "stats",
            "tokens_per_s": rng.gauss(21_000, 1500),
            "version": f"0.{step}",
            "slot_steps_busy": 95,
            "slot_steps_total": 100,
            "slot_occupancy": 0.95,
            "queue_depth": 32,
            "compiles": 0,
        }
    )
    return rows


def _eval_row(rng: random.Random, step: int, t: float, hostile: str) -> dict:
    marks = ["1" if random.Random(f"item {i}").random() < _skill(step, 60) else "0" for i in range(512)]
    correct = "".join(marks)
    examples = []
    for i, word in enumerate(WORDS):
        ok = marks[i] == "1"
        text = (word[::-1] if ok else word[::-1][:-2] + word[0] * 2) + hostile
        examples.append({"prompt": f"{word}{hostile}", "answer": word[::-1], "text": text, "ok": ok})
    return {
        "t": t,
        "t0": t - 2.5,
        "t1": t,
        "role": "evaluator",
        "kind": "eval",
        "step": step,
        "lineage": 0,
        "accuracy": correct.count("1") / 512,
        "n": 512,
        "correct": correct,
        "examples": examples,
        "seconds": 2.5,
    }


REQUIRED = frozenset({
    "accuracy_start", "accuracy_end", "steps", "seconds", "samples_per_s", "train_tokens_per_s", "alpha", "age_max",
    "age_mean", "overlap", "logprob_mismatch_max", "conservation_residual", "restarts", "heldout_in_train",
    "learner_mesh", "sampler_mesh", "padding_waste", "slot_occupancy", "compiles_after_warmup", "groups_trained_twice",
    "wasted_tokens",
})  # fmt: skip


def run_of_format_1(path: Path) -> Path:
    """Unpack the run that commit 46eae24 recorded (tests/control/test_older_runs.py) as folder `path`."""
    with tarfile.open(FORMAT_1) as packed:
        packed.extractall(path.parent / f".{path.name}", filter="data")
    (path.parent / f".{path.name}" / "run").rename(path)
    (path.parent / f".{path.name}").rmdir()
    return path
