"""`--resume --fork=STEP`: a finished run forks once at a step without trajectories, also if the learner dies."""

import contextlib
import shutil
import signal

import pytest

from jaxroll.control import cli
from jaxroll.errors import EXIT_CONFIG
from jaxroll.policy import selection
from jaxroll.records import Version
from jaxroll.report import archive
from tests.harness.train_process import SYNCHRONOUS, Train, trained_questions

pytestmark = pytest.mark.process
FIRST, STEPS, FORK = 6, 12, 4  # steps of the finished run and of the forked one

LINE = "SELECT step FROM claims JOIN line ON line.lineage = durable_lineage AND step < upto ORDER BY step"
QUESTIONS = (
    "SELECT c.step, g.question_hash FROM claim_groups c JOIN groups g ON g.id = c.group_id WHERE c.lineage {} 0"
    f" AND c.step BETWEEN {FORK} AND {FIRST - 1} ORDER BY c.step, g.question_hash"
)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_finished_run_forks_once_and_trains_the_same_questions_again(tmp_path, synchronous_run):
    shutil.copytree(synchronous_run.run_dir, tmp_path / "run")
    words = (f"--fork={FORK}", f"--config.schedule.steps={STEPS}", "--config.supervisor.backoff_s=0.1")
    with Train(tmp_path / "run", *words, resume=True) as forked:
        forked.until(lambda rows: any(row.get("lineage") == 1 and row.get("step", 0) > FORK for row in rows), "a step")
        forked.role("learner").send_signal(signal.SIGKILL)
        assert forked.finish() == 0, forked.logs()
        steps = [row["step"] for row in forked.rows if row["kind"] == "step"]
        assert (min(steps), max(steps)) == (FORK + 1, STEPS)
        claimed = dict(forked.query("SELECT step, COUNT(*) FROM claims GROUP BY step"))
        assert claimed == {step: 1 + (FORK <= step < FIRST) for step in range(STEPS)}, (
            "the restarted learner forked again"
        )
        assert [step for (step,) in forked.query(LINE)] == list(range(STEPS))
        before, after = (forked.query(QUESTIONS.format(sign)) for sign in ("=", ">"))
        assert before == after, "the new lineage does not train on the questions of the old one"
        report = forked.report()
        assert (report["conservation_residual"], report["groups_trained_twice"]) == (0, 0)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_best_checkpoint_of_all_lineages_is_kept_over_a_resume_and_a_fork(tmp_path):
    """Two checkpoints are kept, so the best one stays only because it is the best, unless it is one of them."""
    run, rows = tmp_path / "run", []
    graded = (*SYNCHRONOUS, "--config.task.env=tests.harness.envs.dense_reward:graded_reward")
    longer, fork = ("--config.schedule.steps=12",), ("--fork=10", "--config.schedule.steps=16")
    for words, resume in ((graded, False), (longer, True), (fork, True)):
        with Train(run, *words, resume=resume) as train:
            assert train.finish() == 0, train.logs()
            rows += train.rows
        values = selection.measured(rows, "accuracy")
        found = archive.checkpoint_facts(run, verify=True, keep_best="accuracy")
        left = [Version(row["lineage"], row["step"]) for row in found["checkpoints"]]
        assert not any(row["problem"] for row in found["checkpoints"])
        first = min(version for version in values if values[version] == max(values.values()))
        assert found["best"] == {"version": str(first), "metric": "accuracy", "value": values[first]}, values
        assert first in left and len(left) <= 4, (left, values)  # a late evaluator may have held one more
    assert max(left) == Version(1, 16) == max(values), "the fork's last version was not measured"
    assert len(set(values.values())) > 1, "equal values choose the first version of all"


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_of_simultaneous_resumes_and_forks_one_trains_what_it_would_alone(tmp_path, synchronous_run):
    """The losers change nothing: neither a question of the winner, nor a file that it would have alone."""
    steps = [f"--config.schedule.steps={FIRST + 2 + number}" for number in range(4)]
    asked = [(words,) if number < 2 else (words, f"--fork={FORK}") for number, words in enumerate(steps)]
    runs = [tmp_path / name / "run" for name in ("together", "alone")]
    for run in runs:
        shutil.copytree(synchronous_run.run_dir, run)
    with contextlib.ExitStack() as stack:
        together = [stack.enter_context(Train(runs[0], *words, resume=True)) for words in asked]
        codes = [train.finish() for train in together]
    assert sorted(codes) == [0, *[EXIT_CONFIG] * 3], together[0].logs()
    winner = codes.index(0)
    with Train(runs[1], *asked[winner], resume=True) as alone:
        assert alone.finish() == 0, alone.logs()
    questions, files = [], []
    for run, train in zip(runs, (together[winner], alone), strict=True):
        assert [step for (step,) in train.query(LINE)] == list(range(FIRST + 2 + winner))
        report = train.report()
        assert (report["conservation_residual"], report["groups_trained_twice"]) == (0, 0)
        assert cli.main(["replay", str(run)]) == 0
        questions.append(sorted(trained_questions(train)))
        files.append(sorted(str(path.relative_to(run)) for path in run.iterdir()))
    assert questions[0] == questions[1] and files[0] == files[1]
