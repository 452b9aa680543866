"""Batches and protocol of the arms of benchmarks/learner, with numpy alone, for every arm's environment.

A folder holds the weights as in benchmarks/engine, and one BATCH.npz per case. An arm writes the gradients of its first
step to a file, and then makes optimizer steps on the same batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.engine.work import answering

LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.01, 1.0
BETAS = (0.9, 0.95)
GROUP = 8


@dataclass(frozen=True)
class Batch:
    """N answered prompts, one optimizer step: GRPO's first, whose loss is −mean over sequences of mean of A·log π."""

    prompts: np.ndarray  # int32 [N, P]
    answers: np.ndarray  # int32 [N, longest], 0 after the end
    lengths: np.ndarray  # int32 [N], of the answers
    rewards: np.ndarray  # float32 [N], in groups of GROUP

    def save(self, path: Path) -> None:
        """Write it."""
        np.savez(path, **vars(self))

    @staticmethod
    def load(path: Path) -> Batch:
        """Read it."""
        with np.load(path) as file:
            return Batch(**{name: file[name] for name in ("prompts", "answers", "lengths", "rewards")})

    @property
    def mask(self) -> np.ndarray:
        """bool [N, longest]: True where an answer has a token."""
        return np.arange(self.answers.shape[1]) < self.lengths[:, None]

    @property
    def advantages(self) -> np.ndarray:
        """float32 [N]: rewards minus their group's mean, over its standard deviation (divisor n − 1)."""
        groups = self.rewards.astype(np.float64).reshape(-1, GROUP)
        centred = groups - groups.mean(1, keepdims=True)
        return (centred / groups.std(1, ddof=1, keepdims=True)).astype(np.float32).ravel()

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.prompts.size + self.lengths.sum())


@dataclass(frozen=True)
class Arm:
    """An arm: `gradients` returns them by the arm's names; `step` makes one optimizer step and waits for its end."""

    gradients: Callable[[], dict[str, np.ndarray]]
    step: Callable[[], float]  # the loss


def serve(made: Callable[[Path, Batch], Arm]) -> None:
    """Answer `gradients` (writes FOLDER/CASE.ARM.npz) and `run N` (seconds of one of N steps)."""
    say = answering()
    folder, case, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    arm = made(folder, Batch.load(folder / f"{case}.npz"))
    np.savez(folder / f"{case}.{name}.npz", allow_pickle=False, **arm.gradients())
    first = arm.step()  # compiles
    arm.step()
    say({"ready": True})
    for line in sys.stdin:
        steps, loss = int(line), first
        started, busy = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = arm.step()
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - busy
        say({"seconds": seconds / steps, "cpu_s": cpu_s / steps, "first_loss": first, "loss": loss})
