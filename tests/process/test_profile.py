"""`jaxroll profile` on runs of real processes: learner and sampler apart, and in one process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxroll.errors import EXIT_FAILURE, EXIT_INTERRUPTED
from tests.harness.train_process import LEARNING, ROOT, Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(900)]
LIMIT_S = 300.0
LONG = 1000  # steps of a trace that does not end by itself


def command(train: Train, *words: str) -> subprocess.Popen[str]:
    """`jaxroll profile RUN --json` with these options, which has started."""
    line = [sys.executable, "-m", "jaxroll", "profile", str(train.run_dir), "--json", *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def ended(train: Train, process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code of the command, its output, and its messages."""
    try:
        output, messages = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"{process.args} did not end\n{process.communicate()[1]}\n{train.logs()}", pytrace=False)
    return process.returncode, output, messages


def states(rows: list[dict[str, Any]], steps: int | None = None) -> list[str]:
    """The states of all profiles, in order; with `steps` those of the orders of so many."""
    orders = {row["request"] for row in rows if row["kind"] == "profile" and row["steps"] == steps}
    found = [row for row in rows if row["kind"] == "profile"]
    return [row["state"] for row in found if steps is None or row["request"] in orders]


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_a_running_run_is_profiled_and_goes_on(tmp_path: Path, together: bool) -> None:
    """Traces of learner and sampler; then one whose command is interrupted, and one whose role is killed."""
    words = ("--config.schedule.steps=5000", "--config.supervisor.backoff_s=0.1", "--config.learner.checkpoint_every=3")
    with Train(tmp_path / "run", *LEARNING, *words, f"--config.placement.colocated={together}") as train:
        train.until_step(2)
        for role in ("learner", "sampler-0"):
            code, output, messages = ended(train, command(train, f"--role={role}", "--steps=3"))
            assert code == 0, messages + train.logs()
            found = json.loads(output)
            assert (found["role"], found["steps"]) == (role, 3)
            assert 0 < found["device_share"] <= 1 and found["operations"] and found["threads"]
            assert Path(found["folder"]).parent == train.run_dir / "profiles"
            assert list(Path(found["folder"]).rglob("*.xplane.pb"))

        interrupted = command(train, f"--steps={LONG}")
        train.until(lambda rows: states(rows, LONG) == ["started"], "a trace to interrupt")
        interrupted.send_signal(signal.SIGINT)
        code, _, messages = ended(train, interrupted)
        assert code == EXIT_INTERRUPTED and "the order is withdrawn" in messages, messages
        train.until(lambda rows: states(rows, LONG) == ["started", "ended"], "the end of the interrupted trace")

        killed = command(train, f"--steps={LONG}")
        train.until(lambda rows: states(rows, LONG) == ["started", "ended", "started"], "a trace to kill")
        train.role("colocated" if together else "learner").send_signal(signal.SIGKILL)
        code, _, messages = ended(train, killed)
        assert code == EXIT_FAILURE and "the role started again before the end of its trace" in messages, messages
        at = last_step(train.rows)
        train.until_step(at + 2)
        assert states(train.rows, LONG)[2:3] == ["started"] and "started" not in states(train.rows, LONG)[3:]

        train.interrupt()
        assert train.finish() == EXIT_INTERRUPTED, train.logs()
        assert_sound(train, steps=last_step(train.rows), alpha=1)
        assert train.report()["restarts"] == 1
