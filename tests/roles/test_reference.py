"""A learner that goes on compares with what its run began with, not with the checkpoint that it restores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxroll import sharding
from jaxroll.config import Config, ModelConfig, RoleArgs
from jaxroll.learner import weights
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.trainer import Trainer
from jaxroll.models import families
from jaxroll.records import Version
from jaxroll.roles.learner import LearnerSession
from jaxroll.store.core.state import Lineage


@pytest.fixture
def config(warm: bool) -> Config:
    base = Config(model=ModelConfig(size="nano"))
    sft = base.sft if warm else replace(base.sft, steps=0)
    return replace(base, sft=sft, learner=replace(base.learner, reference="init", kl_coef=0.1))


def new_trainer(config: Config) -> Trainer:
    spec = families.spec("nano", vocab_size=24)
    return Trainer(config, spec, sharding.build(config.learner.mesh), sharding.LEARNER, key=jax.random.key(0))


def lent(trainer: Trainer) -> dict[str, np.ndarray]:
    assert trainer.reference is not None
    with trainer.reference.params() as params:
        return jax.device_get(dict(params))


@pytest.mark.parametrize("warm", [True, False], ids=["warm start", "fresh model"])
def test_the_reference_of_a_run_that_goes_on_is_its_start(tmp_path: Path, config: Config, warm: bool) -> None:
    trainer = new_trainer(config)
    begun = jax.device_get(trainer.state.params)
    if warm:
        begun = {name: value + 1 for name, value in begun.items()}
        weights.save(tmp_path / "warm", begun, trainer.spec, {})
    checkpoints = Checkpoints(tmp_path / "checkpoints", kept=2)
    learned = {name: value + 2 for name, value in begun.items()}
    trainer.set_params(learned)
    checkpoints.save(Version(0, 5), 5, trainer.state)
    checkpoints.finished(wait=True)
    again = LearnerSession.__new__(LearnerSession)  # what a session has before it opens a store
    again.args, again.config, again.checkpoints = RoleArgs(config, tmp_path), config, checkpoints
    again.store = SimpleNamespace(  # type: ignore[assignment]
        welcome=SimpleNamespace(lineages=(Lineage(),))
    )
    again.progress = lambda text: None  # type: ignore[assignment]
    trainer = new_trainer(config)
    assert again._restore(trainer, {"durable": 0, "claims": 5}) == Version(0, 5)
    state = jax.device_get(trainer.state.params)
    assert all(np.array_equal(state[name], learned[name]) for name in learned)
    assert all(np.array_equal(value, begun[name]) for name, value in lent(trainer).items())
    checkpoints.close()
