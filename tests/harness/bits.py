"""Trajectories and parameters of a finished run, to be compared bit by bit with those of another run."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from jaxroll import wire
from jaxroll.learner import checkpoint_files, weights
from jaxroll.records import Failed, Member
from jaxroll.run_paths import RunPaths


def trajectories(run_dir: Path) -> dict[tuple[int, int], Any]:
    """By group and member: tokens, masks and log-probs as bytes, the reward, and the version of each sampled token."""
    found: dict[tuple[int, int], Any] = {}
    with contextlib.closing(sqlite3.connect(f"file:{RunPaths(run_dir).database}?mode=ro", uri=True)) as db:
        for group, member, body in db.execute("SELECT group_id, member, body FROM payloads"):
            outcome = wire.decode(body, Member).outcome
            assert not isinstance(outcome, Failed), (group, member, outcome.error)
            segments = [(s.tokens.tobytes(), s.loss_mask.tobytes(), s.logprobs.tobytes()) for s in outcome.segments]
            versions = [(run.version.step, run.count) for run in outcome.versions]
            found[group, member] = (segments, np.float64(outcome.reward).tobytes(), versions)
    return found


def claims(run_dir: Path) -> list[tuple[int, int]]:
    """Step and group of every claim, in the order of training."""
    with contextlib.closing(sqlite3.connect(f"file:{RunPaths(run_dir).database}?mode=ro", uri=True)) as db:
        return db.execute("SELECT step, group_id FROM claim_groups ORDER BY step, place").fetchall()


def parameters(run_dir: Path) -> dict[str, str]:
    """The digest of each parameter of the newest checkpoint."""
    folder = RunPaths(run_dir).checkpoints
    newest = checkpoint_files.path_of(folder, checkpoint_files.versions(folder)[-1])
    with weights.params(newest) as held:
        return {name: hashlib.blake2b(np.ascontiguousarray(held[name]).tobytes()).hexdigest() for name in held}
