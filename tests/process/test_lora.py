"""A run that trains adapters: interrupted, resumed and exported; its samplers use the merged parameters."""

import json
import os
import subprocess
import sys

import pytest

from jaxroll.errors import EXIT_INTERRUPTED
from jaxroll.learner import checkpoint_files
from jaxroll.models import folders
from tests.harness.train_process import LEARNING, ROOT, Train, assert_sound
from tests.harness.xla import ROLE_FLAGS

pytestmark = [pytest.mark.process, pytest.mark.soak]
STEPS = 8


@pytest.mark.timeout(600)
@pytest.mark.parametrize("publish", ["merged", "adapters"])
def test_a_run_of_adapters_resumes_and_is_exported(tmp_path, publish):
    words = (
        f"--config.learner.lora_publish={publish}",
        *LEARNING,
        f"--config.schedule.steps={STEPS}",
        "--config.learner.checkpoint_every=2",
        "--config.learner.lora_rank=4",
        "--config.learner.lora_alpha=8",
        "--config.learner.learning_rate=3e-3",
    )
    with Train(tmp_path / "run", *words) as first:
        first.until_step(3)
        first.interrupt()
        assert first.finish(120) == EXIT_INTERRUPTED, first.logs()
    with Train(tmp_path / "run", resume=True) as second:
        assert second.finish() == 0, second.logs()
        assert_sound(second, steps=STEPS, alpha=1)
        steps = [row for row in (*first.rows, *second.rows) if row["kind"] == "step"]
        assert any(row["grad_norm"] > 0 for row in steps), "nothing was learned"
        # The sampler's and the learner's log-probs agree: both use the same merged parameters.
        assert max(row["logprob_mismatch_max"] for row in steps if row["logprob_mismatch_tokens"]) < 1e-3
    lives = {}
    for row in (*first.rows, *second.rows):
        if row["kind"] == "span" and row["what"] == "fetch" and row["role"].startswith("sampler"):
            lives.setdefault(row["size_bytes"], []).append(row["version"])
    # After each start a sampler fetches all parameters once, and then the adapters alone.
    assert len(lives) == 1 if publish == "merged" else sorted(lives)[0] * 4 < sorted(lives)[1] and len(lives) == 2, (
        lives
    )
    if publish == "adapters":
        assert [len(lives[size]) for size in sorted(lives)][1] == 2 and lives[min(lives)]
    found = checkpoint_files.versions(tmp_path / "run" / "checkpoints")
    assert found[-1].step == STEPS
    newest = checkpoint_files.path_of(tmp_path / "run" / "checkpoints", found[-1])
    held = checkpoint_files.params(checkpoint_files.about(newest))
    assert held and all(name.endswith((".A", ".B")) for name in held)
    command = [sys.executable, "-m", "jaxroll", "weights", "export", str(tmp_path / "run"), str(tmp_path / "hf")]
    env = os.environ | {"XLA_FLAGS": ROLE_FLAGS}  # a fresh init has the same bits only from the same compilation
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "adapters merged" in done.stdout, done.stderr
    out = tmp_path / "hf"
    assert folders.weights_error(out, folders.described(out), folders.weight_tensors(out)) == ""
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float32"
