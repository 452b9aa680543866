"""A run that several tests of whole runs compare theirs with, and a wall clock that is off."""

from __future__ import annotations

import mmap
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.train_process import SYNCHRONOUS, Train

PROGRAMS = Path(__file__).parents[1] / "harness" / "programs"


@pytest.fixture(scope="session")
def synchronous_run(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """A finished synchronous run of six steps: sampler, learner and evaluator in processes of their own."""
    with Train(tmp_path_factory.mktemp("synchronous") / "run", *SYNCHRONOUS) as train:
        assert train.finish() == 0, train.logs()
    return train


@pytest.fixture
def wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mmap.mmap]:
    """Two integers: seconds by which the wall clock of each process is off, and the number of readings that were."""
    library, jump = tmp_path / "wall_clock.so", tmp_path / "jump"
    words = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(PROGRAMS / "wall_clock.c"), "-ldl", "-lpthread"]
    subprocess.run(words, check=True)  # without a compiler this fails
    jump.write_bytes(bytes(16))
    monkeypatch.setenv("JUMP_FILE", str(jump))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with jump.open("r+b") as file, mmap.mmap(file.fileno(), 16) as shared:
        yield shared
