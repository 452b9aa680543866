"""Runs that several tests of whole runs compare theirs with."""

from __future__ import annotations

import pytest

from tests.harness.train_process import SYNCHRONOUS, Train


@pytest.fixture(scope="session")
def synchronous_run(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """A finished synchronous run of six steps: sampler, learner and evaluator in processes of their own."""
    with Train(tmp_path_factory.mktemp("synchronous") / "run", *SYNCHRONOUS) as train:
        assert train.finish() == 0, train.logs()
    return train
