"""The demo's task with learner and sampler on several hosts each: every host dies once, and the guarantees hold."""

import signal

import pytest

from tests.harness.train_process import Train, assert_sound, last_step

pytestmark = [pytest.mark.process, pytest.mark.soak]
STEPS = 80  # of the hundred of the demo


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("learners", "samplers"), [pytest.param(2, 2, id="two_and_two"), pytest.param(3, 2, id="three_and_two")]
)
def test_every_host_of_a_run_dies_once(learners, samplers, free_run_dir):
    """The run reaches its last step, and each death restarts one role as a whole."""
    mesh = ("--config.learner.mesh.fsdp=1", f"--config.learner.mesh.data={learners}") if learners == 3 else ()
    words = (f"--config.placement.learner_hosts={learners}", f"--config.placement.sampler_hosts={samplers}", *mesh,
             f"--config.schedule.steps={STEPS}", "--config.learner.micro_batch_rows=12",
             "--config.supervisor.backoff_s=0.1", "--config.store.lease_s=6", "--config.store.rpc_deadline_s=4",
             "--config.learner.checkpoint_every=5")  # fmt: skip
    with Train(free_run_dir, *words, config="demo") as train:
        train.until_step(3)
        deaths = 0
        for role, count in (("learner", learners), ("sampler", samplers)):
            for which in range(count):
                before = train.hosts(role)
                assert len(before) == count, train.logs()
                before[which].send_signal(signal.SIGKILL)
                deaths += 1
                killed_at = last_step(train.rows)
                train.until(lambda rows, at=killed_at: last_step(rows) > at + 1, f"two steps after death {deaths}")
                pids = {process.pid for process in train.hosts(role)}
                assert not pids & {process.pid for process in before}, "every process of the role is new"
        assert train.finish(600) == 0, train.logs()
        assert_sound(train, steps=STEPS, alpha=1)
        assert train.report()["restarts"] == deaths
        evaluated = [row["accuracy"] for row in train.rows if row["kind"] == "eval"]
        assert evaluated[-1] > evaluated[0] + 0.05, evaluated
