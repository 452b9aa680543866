"""A run whose sampler drafts with the model that the run starts from: it asks and answers as the run without drafts."""

import jax
import pytest

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.control.run_dir import load_config
from jaxroll.learner import weights
from jaxroll.models import params
from jaxroll.roles.build import model_spec, tokenizer
from tests.harness.train_process import LEARNING, Train, assert_sound, trained_questions

pytestmark = [pytest.mark.process, pytest.mark.soak]
STEPS = 3  # of the six steps of the run without drafts


@pytest.mark.timeout(600)
def test_a_draft_model_changes_no_answer_of_a_run(tmp_path, synchronous_run):
    """With alpha = 0 every answer depends on all previous steps. Two programs compute a token, so sums may differ."""
    config = load_config(synchronous_run.run_dir)
    spec = model_spec(config, tokenizer(config))
    fresh = params.init(spec, params.key(config), sharding.build(MeshConfig()), sharding.SAMPLER)
    weights.save(tmp_path / "start", jax.device_get(fresh), spec, {})
    drafts = ("--config.sampler.draft_tokens=3", f"--config.sampler.draft_model={tmp_path / 'start'}")
    words = (*LEARNING, "--config.schedule.alpha=0", f"--config.schedule.steps={STEPS}", *drafts)
    with Train(tmp_path / "drafts", *words) as train:
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=STEPS, alpha=0)
    assert trained_questions(train) == [asked for asked in trained_questions(synchronous_run) if asked[0] < STEPS]
    steps, others = ([row for row in run.rows if row["kind"] == "step"][:STEPS] for run in (train, synchronous_run))
    for mine, theirs in zip(steps, others, strict=True):
        for key in ("reward_mean", "loss", "grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), f"step {mine['step']}: {key}"
    stats = [row for row in train.rows if row["kind"] == "stats" and row["role"] == "sampler-0"][-1]
    assert stats["tokens_accepted"] > 0.5 * stats["tokens_drafted"] > 50 and stats["tokens_per_pass"] > 1.5, stats
