"""Whole runs on a virtual clock (`run.deterministic`): equal bits regardless of threads, delays and hash seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import bits
from tests.harness.train_process import SAME, Train, assert_sound

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(2400)]
STEPS = 8
WORDS = (
    "--config.sft.steps=0",
    "--config.placement.colocated=True",
    "--config.task.env=tests.harness.envs.random_delay:blocking_delay",
    f"--config.schedule.steps={STEPS}",
)
AHEAD = (  # few slots: generation is slower than training, so that weights change within answers
    "--config.schedule.alpha=2",
    "--config.sampler.count=2",
    "--config.sampler.slots=2",
    "--config.sampler.decode_chunk=2",
)
ON_A_CLOCK = "--config.run.deterministic=True"


def trained(folder: Path, alpha: int, *words: str) -> dict[str, Any]:
    """The bits of a finished run: trajectories, claims, parameters, and the losses of its steps."""
    with Train(folder, *WORDS, *words) as train:
        assert train.finish(900.0) == 0, train.logs()
        assert_sound(train, steps=STEPS, alpha=alpha)
    steps = [{key: row[key] for key in SAME} for row in train.rows if row["kind"] == "step"]
    accuracies = [(row["step"], row["correct"]) for row in train.rows if row["kind"] == "eval"]
    found = {"trajectories": bits.trajectories(folder), "claims": bits.claims(folder), "steps": steps}
    return found | {"parameters": bits.parameters(folder), "accuracies": accuracies}


def test_threads_delays_and_hash_seeds_change_no_bit_of_a_run_ahead(tmp_path, monkeypatch):
    """Tokens of one answer are of several versions, and an evaluator takes part."""
    found = []
    for threads in (1, 2, 4):
        monkeypatch.setenv("PYTHONHASHSEED", str(threads))
        words = (*AHEAD, ON_A_CLOCK, f"--config.sampler.env_threads={threads}")
        found.append(trained(tmp_path / str(threads), 2, *words))
    first = found[0]
    assert any(step["grad_norm"] for step in first["steps"]), "it learns something"
    assert any(len(versions) > 1 for _, _, versions in first["trajectories"].values()), "weights changed in an answer"
    assert first["accuracies"] and first["accuracies"][-1][0] == STEPS
    for other in found[1:]:
        for name, value in first.items():
            assert other[name] == value, name
    free = trained(tmp_path / "free", 2, *AHEAD)
    assert free["trajectories"] != first["trajectories"], "the control: without the virtual clock bits differ"


def test_a_synchronous_run_has_the_bits_of_one_without_a_virtual_clock(tmp_path):
    """At α = 0 the order of events changes nothing, so both must agree: the parts are those of every run."""
    synchronous = ("--config.schedule.alpha=0", "--config.evaluator.every=0")
    first, second = (trained(tmp_path / str(len(words)), 0, *synchronous, *words) for words in ((), (ON_A_CLOCK,)))
    assert first == second


DELAYED = "--config.task.env=tests.harness.envs.random_delay:random_delay"
"""Its delays are random on the virtual clock too, so that every run has another order of events."""


def test_with_intervals_the_number_of_samplers_and_random_delays_change_no_bit(tmp_path):
    """HTS-RL: a token of interval k is sampled with the weights of interval k − 1, and its randomness is the member's.

    The control has the same delays and an age bound of 1.
    """
    slow = ("--config.sampler.slots=2", "--config.sampler.decode_chunk=2")  # generation is slower than training
    words = (DELAYED, ON_A_CLOCK, "--config.evaluator.every=0", *slow)
    found = {}
    for samplers in (1, 2, 4):
        several = (f"--config.sampler.count={samplers}", "--config.schedule.mode=interval")
        found[samplers] = trained(tmp_path / str(samplers), 1, *words, *several)
    one = found[1]
    assert any(step["grad_norm"] for step in one["steps"]), "it learns something"
    for samplers, other in found.items():
        for name, value in one.items():
            assert other[name] == value, f"{name} of a run with {samplers} samplers"
    step_of = {group: step for step, group in one["claims"]}
    for (group, _), (_, _, versions) in one["trajectories"].items():
        assert [version for version, _ in versions] == [max(step_of[group] - 1, 0)], "one interval old"
    ahead = ("--config.sampler.count=2", "--config.schedule.alpha=1")
    first, second = (trained(tmp_path / f"control {n}", 1, *words, *ahead) for n in range(2))
    assert first["trajectories"] != second["trajectories"], "the control: delays change the version of a token"


def test_with_intervals_free_processes_have_the_bits_of_the_virtual_clock(tmp_path):
    """HTS-RL with 1, 2 and 4 samplers in processes of their own, whose environments take random real times."""
    slow = ("--config.sampler.slots=2", "--config.sampler.decode_chunk=2")
    words = (DELAYED, "--config.evaluator.every=0", "--config.schedule.mode=interval", *slow)
    apart = "--config.placement.colocated=False"
    found = {n: trained(tmp_path / str(n), 1, *words, apart, f"--config.sampler.count={n}") for n in (1, 2, 4)}
    found[0] = trained(tmp_path / "clock", 1, *words, ON_A_CLOCK)
    assert any(step["grad_norm"] for step in found[1]["steps"]), "it learns something"
    for samplers, other in found.items():
        for name, value in found[1].items():
            assert other[name] == value, f"{name} of a run with {samplers or 'a virtual clock'}"
    step_of = {group: step for step, group in found[1]["claims"]}
    for (group, _), (_, _, versions) in found[1]["trajectories"].items():
        assert [version for version, _ in versions] == [max(step_of[group] - 1, 0)], "one interval old"
    ahead = ("--config.sampler.count=2", "--config.schedule.alpha=1", "--config.schedule.mode=async")
    first, second = (trained(tmp_path / f"control {n}", 1, *words, apart, *ahead) for n in range(2))
    assert first["trajectories"] != second["trajectories"], "the control: delays change the version of a token"
