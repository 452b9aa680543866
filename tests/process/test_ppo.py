"""A run with a critic in host memory: interrupted, resumed, listed, used to generate, exported."""

import json
import subprocess
import sys

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.learner import checkpoint_files
from tests.harness.train_process import LEARNING, ROOT, Train, assert_sound

pytestmark = [pytest.mark.process, pytest.mark.soak]
STEPS = 8
CRITIC = ("value_loss", "critic_grad_norm", "returns_mean")


def command(*words: str) -> str:
    words = (sys.executable, "-m", "jaxroll", *words)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(900)
def test_a_run_of_ppo_resumes_with_its_critic_and_is_exported(tmp_path):
    words = (
        *LEARNING,
        f"--config.schedule.steps={STEPS}",
        "--config.learner.checkpoint_every=2",
        "--config.learner.algorithm=ppo",
        "--config.learner.critic=init",
        "--config.learner.critic_offload=true",
    )
    run = tmp_path / "run"
    with Train(run, *words) as first:
        first.until_step(3)
        first.interrupt()
        assert first.finish(120) == EXIT_INTERRUPTED, first.logs()
    with Train(run, resume=True) as second:
        assert second.finish() == 0, second.logs()
        assert_sound(second, steps=STEPS, alpha=1)
        steps = [row for row in (*first.rows, *second.rows) if row["kind"] == "step"]
    assert all(row[key] is not None for row in steps for key in CRITIC)
    assert all(row["critic_grad_norm"] > 0 for row in steps), "the critic did not learn at every step"
    listed = json.loads(command("checkpoints", str(run), "--verify", "--json"))
    assert listed["checkpoints"][-1]["step"] == STEPS and not any(row["problem"] for row in listed["checkpoints"])
    newest = checkpoint_files.path_of(run / "checkpoints", checkpoint_files.versions(run / "checkpoints")[-1])
    arrays = checkpoint_files.about(newest)["arrays"]
    policy = {name for name in arrays if name.startswith("params[")}
    assert {f"critic.{name}" for name in policy} | {"critic.params['value']"} <= arrays.keys()
    assert command("generate", str(run), "word").strip()
    command("weights", "export", str(run), str(tmp_path / "hf"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_hidden_layers"] == 2
