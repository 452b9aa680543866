"""Work and protocol of the arms of benchmarks/engine, with numpy alone, for every arm's environment.

A folder holds weights.npz (our names), model.safetensors and config.json (Hugging Face's), and one WORK.npz per case.
An arm reads one command per line from stdin, answers with one JSON object per line, and ends when stdin ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# google-tunix's qwen3 always rotates with θ = 10⁶ and ignores its config; so do all arms.
MODEL = {
    "vocab_size": 256,
    "layers": 3,
    "width": 128,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "hidden": 384,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
}


@dataclass(frozen=True)
class Work:
    """N requests: prompts int32 [N, P] of one length, and the numbers of tokens to generate, int32 [N]."""

    prompts: np.ndarray
    lengths: np.ndarray
    batch: int  # concurrent requests of an arm
    repeats: int = 1  # per run, so that a run is long enough to be timed

    def save(self, path: Path) -> None:
        """Write it."""
        np.savez(path, prompts=self.prompts, lengths=self.lengths, batch=self.batch, repeats=self.repeats)

    @staticmethod
    def load(path: Path) -> Work:
        """Read it."""
        with np.load(path) as file:
            return Work(file["prompts"], file["lengths"], int(file["batch"]), int(file["repeats"]))

    @property
    def useful(self) -> int:
        """The number of tokens that count, which are those within each request's own length."""
        return int(self.lengths.sum())

    def batches(self) -> list[Work]:
        """The work in batches, in the order of arrival."""
        cuts = range(0, len(self.prompts), self.batch)
        return [Work(self.prompts[i : i + self.batch], self.lengths[i : i + self.batch], self.batch) for i in cuts]

    def cut(self, rows: list[list[int]]) -> list[list[int]]:
        """Each request's tokens up to its own length."""
        return [row[:length] for row, length in zip(rows, self.lengths.tolist(), strict=True)]


Generate = Callable[[bool], list[list[int]]]  # True for greedy → the tokens of every request, in order


def answering() -> Callable[[dict[str, Any]], None]:
    """A function that writes an answer to stdout; from now on other prints, as of libraries, go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    return say


def serve(made: Callable[[Path, str], Generate], facts: Callable[[], dict[str, Any]] = dict) -> None:
    """Answer `greedy` (the tokens) and `run` (seconds and processor seconds of one run that samples).

    `made` gets the folder and the case's name, which are in argv.
    """
    say = answering()
    folder, case = Path(sys.argv[1]), sys.argv[2]
    work, generate = Work.load(folder / f"{case}.npz"), made(folder, case)

    greedy = work.cut(generate(True))  # compiles
    generate(False)
    say({"ready": True})
    for line in sys.stdin:
        if line.strip() == "greedy":
            say({"tokens": greedy})
            continue
        started, busy = time.perf_counter(), time.process_time()
        made_rows = [work.cut(generate(False)) for _ in range(work.repeats)]
        seconds = (time.perf_counter() - started) / work.repeats
        cpu_s = (time.process_time() - busy) / work.repeats
        if any([len(row) for row in rows] != work.lengths.tolist() for rows in made_rows):
            raise RuntimeError("an arm generated fewer tokens than a request wanted")
        say({"seconds": seconds, "cpu_s": cpu_s, **facts()})
