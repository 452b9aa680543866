"""The report's figures on small runs worked out by hand."""

import fcntl
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.report import activity, record, summary
from jaxroll.report.record import LogFacts, Run
from tests.harness.run_folder import REQUIRED

CONFIG = {"schedule": {"alpha": 1.0, "steps": 9}, "learner": {"mesh": {"fsdp": 2}}, "sampler": {"mesh": {"tensor": 2}}}

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def seconds_in(parts, second):
    return any(a <= second < b for a, b in parts)


@given(spans, spans)
def test_interval_sets_agree_with_counting_seconds(a, b):
    ua, ub = activity.union(a), activity.union(b)
    in_a, in_b = ({s for s in range(41) if seconds_in(parts, s)} for parts in (a, b))
    assert activity.length_s(ua) == len(in_a)
    assert activity.length_s(activity.intersection(ua, ub)) == len(in_a & in_b)
    assert activity.length_s(activity.difference(ua, ub)) == len(in_a - in_b)
    assert activity.union(activity.difference(ua, ub)) == activity.difference(ua, ub)


@given(spans, st.integers(0, 5))
def test_closing_gaps_keeps_all_time_and_leaves_only_longer_gaps(a, gap):
    parts = activity.union(a)
    closed = activity.closed(parts, gap)
    assert activity.difference(parts, closed) == []
    assert all(b[0] - a[1] > gap for a, b in pairwise(closed))


def step(step, t0, t1, ages=None, **more):
    return {
        "t": t1,
        "role": "learner",
        "kind": "step",
        "step": step,
        "lineage": 0,
        "t0": t0,
        "t1": t1,
        "samples": 4,
        "tokens_trained": 10,
        "wait_s": 1.0,
        "publish_s": 0.0,
        "age_hist": ages or {"0": 10},
        "reward_mean": 0.5,
        "padding_waste": 0.1,
        "logprob_mismatch_max": 1e-6,
        "logits_std": 2.0,
        "compiles": 0,
        **more,
    }


def decode(t0, t1, tokens=5, role="sampler-0"):
    return {"t": t1, "role": role, "kind": "span", "what": "decode", "t0": t0, "t1": t1, "tokens": tokens}


def members(*rows, role="sampler-0"):
    return {"t": 0.0, "role": role, "kind": "members", "rows": [list(row) for row in rows]}


def evaluation(step, correct):
    counted = [c for c in correct if c != "-"]
    accuracy = counted.count("1") / len(counted) if counted else None
    return {"t": 0.0, "kind": "eval", "step": step, "accuracy": accuracy, "n": len(counted), "correct": correct}


# --- overlap and time


def test_overlap_counts_only_useful_tokens_in_compute_time():
    rows = [
        step(1, 0.0, 4.0),
        step(2, 10.0, 14.0),
        decode(0.0, 3.0),
        decode(11.0, 20.0),
        members((0, 0, 0.0, 2.0, 3), (9, 0, 2.0, 3.0, 3), (1, 0, 12.0, 19.0, 3)),
    ]
    # group 0 covers 0..2 of the first step, group 9 was never acked, group 1 covers 12..14 of the second: 4 s of 8
    steps = summary.trained_steps(rows)
    assert summary.overlap(rows, steps, frozenset({0, 1})) == pytest.approx(0.5)
    assert summary.overlap(rows, steps, frozenset()) == 0.0
    lane = activity.sampler_lane(rows, "sampler-0", frozenset({0, 1}))
    assert lane.spans == {
        "decode": [(0.0, 2.0), (12.0, 19.0)],
        "decode_other": [(2.0, 3.0), (11.0, 12.0), (19.0, 20.0)],
    }


def test_a_sampler_is_not_credited_for_tokens_of_another():
    rows = [step(1, 0.0, 4.0), decode(0.0, 4.0, role="sampler-0"), members((0, 0, 0.0, 4.0, 3), role="sampler-1")]
    assert summary.overlap(rows, summary.trained_steps(rows), frozenset({0})) == 0.0


def test_no_overlap_when_generation_and_training_alternate():
    rows = [step(1, 0.0, 1.0), decode(1.0, 2.0), members((0, 0, 1.0, 2.0, 3)), step(2, 2.0, 3.0)]
    assert summary.overlap(rows, summary.trained_steps(rows), frozenset({0})) == 0.0


def test_rates_and_shares_of_the_training_window():
    # The window is 0..10: the first wait (before 0) is outside, the second takes 1 s of it.
    rows = [step(1, 0.0, 4.0), step(2, 7.0, 10.0), decode(-1.0, 3.0, 60), decode(5.0, 7.0, 40), decode(9.0, 12.0, 60)]
    figures = summary.progress(summary.trained_steps(rows), rows, -20.0)
    assert figures["rl_seconds"] == 10.0 and figures["seconds"] == 32.0
    assert figures["samples_per_s"] == pytest.approx(0.8) and figures["train_tokens_per_s"] == pytest.approx(2.0)
    assert figures["learner_wait_share"] == pytest.approx(0.1)
    steps = summary.trained_steps(rows)
    assert summary.busy_share(rows, steps) == pytest.approx((3 + 2 + 1) / 10)
    assert summary.decoded_per_s(rows, steps) == pytest.approx((40 + 60) / 10)  # only spans that began in the window


def test_the_time_between_a_stop_and_a_resume_counts_for_nothing():
    rows = [step(1, 0.0, 4.0), step(2, 5004.0, 5010.0, wait_s=0.0)]
    steps = summary.trained_steps(rows)
    assert summary.pauses(rows, steps) == [(4.0, 5010.0)]  # rows are written at t1
    rows.append({"t": 5001.0, "role": "store", "kind": "store"})
    assert summary.pauses(rows, steps) == [(4.0, 5001.0)]
    figures = summary.progress(steps, rows, -10.0)
    assert figures["seconds"] == pytest.approx(10 + 4 + 9) and figures["rl_seconds"] == pytest.approx(4 + 9)
    clock = activity.RunClock(-10.0, ((4.0, 5001.0),))
    assert [clock(t) for t in (0.0, 4.0, 100.0, 5001.0, 5010.0)] == pytest.approx([10, 14, 14, 14, 23])


def test_time_split_counts_every_second_once():
    lane = activity.Lane("learner", {"wait": [(0.0, 2.0)], "train": [(1.0, 5.0)], "publish": [(5.0, 6.0)]})
    assert activity.time_split(lane, (0.0, 10.0)) == {"wait": 2.0, "train": 3.0, "publish": 1.0, "rest": 4.0}
    assert activity.time_split(lane, (0.0, 10.0), pause_s=3.0)["rest"] == 1.0


# --- learner


def test_ages_are_weighted_by_tokens_and_replays_count_once():
    rows = [step(1, 0, 1, {"0": 6, "1": 4}), step(1, 2, 3, {"0": 5, "1": 5}), step(2, 4, 5, {"1": 10})]
    figures = summary.learning(summary.trained_steps(rows))
    assert figures["age_max"] == 1 and figures["age_mean"] == pytest.approx(15 / 20)


def test_mismatch_is_compared_with_the_tightest_bound_of_its_steps():
    rows = [
        step(1, 0, 1, logprob_mismatch_max=3e-5, logits_std=5.0),
        step(2, 1, 2, logprob_mismatch_max=2e-5, logits_std=0.5),
        step(3, 2, 3, logprob_mismatch_max=None, logits_std=0.0),
    ]
    assert summary.worst_mismatch(rows) == (3e-5, pytest.approx(1e-4))
    assert summary.worst_mismatch([]) == (None, None)


def test_groups_trained_twice_by_the_log_or_by_the_learner():
    steps = [step(1, 0, 1, groups=[1, 2]), step(2, 1, 2, groups=[2, 3, 3])]
    assert summary.trained_twice(steps, LogFacts(groups_trained_twice=0)) == 2
    assert summary.trained_twice(steps[:1], LogFacts(groups_trained_twice=5)) == 5
    assert summary.trained_twice([], LogFacts()) is None


# --- accuracy


def test_accuracy_gain_has_a_paired_interval():
    figures = summary.accuracy([evaluation(0, "0011" * 64), evaluation(9, "0111" * 64)])
    assert figures["accuracy_gain"] == pytest.approx(0.25) and figures["eval_steps"] == [0, 9]
    # 64 of 256 items become right, none becomes wrong: ± 1.96·√(0.25·0.75/256) = ± 0.053
    assert figures["accuracy_gain_low"] == pytest.approx(0.25 - 0.053, abs=0.006)
    assert figures["accuracy_gain_high"] == pytest.approx(0.25 + 0.053, abs=0.006)


@given(st.lists(st.sampled_from(["00", "01", "10", "11"]), min_size=20, max_size=80), st.integers(0, 5))
def test_the_interval_is_that_of_resampling_items(pairs, seed):
    import numpy as np

    before, after = "".join(p[0] for p in pairs), "".join(p[1] for p in pairs)
    difference = np.array([int(p[1]) - int(p[0]) for p in pairs])
    draws = np.random.default_rng(seed).integers(0, len(pairs), (4000, len(pairs)))
    expected = np.quantile(difference[draws].mean(axis=1), (0.025, 0.975))
    np.testing.assert_allclose(summary.paired_interval(before, after), expected, atol=2.01 / len(pairs))


@given(st.lists(st.tuples(*[st.text("01", min_size=3, max_size=3)] * 2), min_size=20, max_size=60), st.integers(0, 5))
def test_the_interval_of_several_answers_is_that_of_resampling_items(pairs, seed):
    import numpy as np

    before, after = "".join(p[0] for p in pairs), "".join(p[1] for p in pairs)
    difference = np.array([(p[1].count("1") - p[0].count("1")) / 3 for p in pairs])
    draws = np.random.default_rng(seed).integers(0, len(pairs), (4000, len(pairs)))
    expected = np.quantile(difference[draws].mean(axis=1), (0.025, 0.975))
    np.testing.assert_allclose(summary.paired_interval(before, after, samples=3), expected, atol=2.01 / len(pairs))
    assert summary.paired_interval("1-0---", "1111--", samples=2) == (0.0, 1.0), "items of 1 and 2 of their answers"
    one = ["".join(p[side][0] for p in pairs) for side in (0, 1)]
    alike = ["".join(3 * mark for mark in text) for text in one]
    assert summary.paired_interval(*alike, seed, samples=3) == summary.paired_interval(*one, seed), "no more items"


def test_items_without_an_answer_and_other_items_make_no_pairs():
    assert summary.paired_interval("0101", "0101") == (0.0, 0.0)
    assert summary.paired_interval("0-0", "1-1") == (1.0, 1.0)
    assert summary.paired_interval("--", "11") == (None, None)
    assert summary.paired_interval("01", "011") == (None, None)


def test_an_evaluation_without_items_has_no_accuracy():
    rows = [evaluation(0, "---"), evaluation(4, "010"), evaluation(4, "110")]
    assert [row["correct"] for row in summary.evaluations(rows)] == ["110"]


def test_wilson_interval_against_published_values():
    # Newcombe 1998, method 3: 81/263 gives 0.2553 to 0.3662, 0/20 gives 0 to 0.1611
    assert summary.wilson(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert summary.wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert summary.wilson(0.5, 0) == (0.0, 1.0)


# --- sampler


def test_occupancy_and_compiles_over_the_run():
    stats = [
        {"kind": "stats", "slot_steps_busy": 8, "slot_steps_total": 10, "compiles": 0},
        {"kind": "stats", "slot_steps_busy": 1, "slot_steps_total": 10, "compiles": 2},
        {"kind": "stats", "slot_steps_busy": 0, "slot_steps_total": 0, "compiles": 0},
    ]
    assert summary.occupancy(stats) == pytest.approx(9 / 20)
    assert summary.compiles([*stats, step(1, 0, 1)]) == 2
    assert summary.occupancy([]) is None and summary.compiles([]) is None


# --- the whole


def test_the_summary_of_an_empty_run_has_every_key_without_values(tmp_path):
    figures = summary.summary(Run(tmp_path, CONFIG))
    assert figures.keys() >= REQUIRED
    known = {key for key in REQUIRED if figures[key] not in (None, 0)}
    assert known == {"alpha", "learner_mesh", "sampler_mesh"}
    assert summary.state_of(Run(tmp_path, CONFIG)) == "stopped"


def test_a_run_is_live_while_rows_come_and_finished_with_its_last_step(tmp_path):
    rows = [step(8, 0.0, 100.0)]
    assert summary.state_of(Run(tmp_path, CONFIG, rows=rows), now_s=110.0) == "live"
    assert summary.state_of(Run(tmp_path, CONFIG, rows=rows), now_s=500.0) == "stopped"
    assert summary.state_of(Run(tmp_path, CONFIG, rows=[step(9, 0.0, 100.0)]), now_s=500.0) == "finished"


@pytest.mark.parametrize("lock", ["store.lock", ".lock"])
@pytest.mark.parametrize("now_s", [500.0, -5000.0])
def test_a_run_whose_lock_is_held_is_live_at_any_time(tmp_path, lock, now_s):
    rows = [step(8, 0.0, 100.0)]
    with (tmp_path / lock).open("w") as file:
        assert summary.state_of(Run(tmp_path, CONFIG, rows=rows), now_s=now_s) == "stopped"
        fcntl.flock(file, fcntl.LOCK_EX)
        assert summary.state_of(Run(tmp_path, CONFIG, rows=rows), now_s=now_s) == "live"
        assert summary.state_of(Run(tmp_path, CONFIG), now_s=now_s) == "live", "before its first row"


EVALUATED = {"evaluator": {"every": 3}}
GOOD = {
    "alpha": 1.0, "age_max": 1, "conservation_residual": 0, "groups_trained_twice": 0, "heldout_in_train": 0,
    "compiles_after_warmup": 0, "logprob_mismatch_max": 1e-5, "logprob_mismatch_limit": 1e-4, "overlap": 0.6,
    "slot_occupancy": 0.9, "padding_waste": 0.2, "wasted_tokens": 0.01, "steps": 9, "steps_wanted": 9,
    "eval_steps": [0, 9], "tokens_per_step": 9000.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("age_max", 2, "largest age"), ("conservation_residual", 1, "groups unaccounted for"),
        ("groups_trained_twice", 1, "groups trained twice"), ("heldout_in_train", 1, "held-out questions trained"),
        ("compiles_after_warmup", 1, "compiles after warm-up"), ("logprob_mismatch_max", 1e-4, "log-prob mismatch"),
        ("overlap", 0.4, "overlap"), ("slot_occupancy", 0.84, "slot occupancy"), ("padding_waste", 0.26, "padding"),
        ("wasted_tokens", 0.021, "wasted tokens"),
    ],
)  # fmt: skip
def test_each_invariant_can_fail_alone(key, value, name):
    assert all(check.holds for check in record.checks(GOOD, EVALUATED))
    assert [check.name for check in record.checks(GOOD | {key: value}, EVALUATED) if not check.holds] == [name]
    unknown = record.checks(GOOD | {key: None}, EVALUATED)
    assert [check.name for check in unknown if check.holds is None] == [name]


def test_colocated_roles_are_not_judged_by_overlap():
    together = EVALUATED | {"placement": {"colocated": True}}
    found = {check.name: check for check in record.checks(GOOD | {"overlap": 0.1}, together)}
    assert found["overlap"].holds is None and found["largest age"].holds


@pytest.mark.parametrize("steps", [[0, 8], [1, 9], [0, 0], None])
def test_a_finished_run_is_evaluated_at_its_first_and_last_weights(steps):
    broken = record.checks(GOOD | {"eval_steps": steps}, EVALUATED)
    assert [check.name for check in broken if check.holds is not True] == ["evaluated at"]
    assert [check.name for check in broken if check.holds is False] == ["evaluated at"]
    for config, figures in (({}, {}), ({"evaluator": {"every": 0}}, {}), (EVALUATED, {"steps": 8})):
        found = {check.name: check for check in record.checks(GOOD | {"eval_steps": steps} | figures, config)}
        assert found["evaluated at"].holds is None, "no evaluator, or the run is not over"


def test_padding_is_not_judged_in_steps_that_cannot_fill_their_rows():
    """A healthy run with four short answers per step has one micro-batch, which is mostly padding."""
    small = record.checks(GOOD | {"padding_waste": 0.6, "tokens_per_step": 200.0}, EVALUATED)
    assert {check.name: check.holds for check in small}["padding"] is None
    shards = EVALUATED | {"learner": {"row_tokens": 128, "mesh": {"data": 2, "fsdp": 4}}}
    assert {check.name: check.holds for check in record.checks(GOOD | {"padding_waste": 0.6}, shards)}[
        "padding"
    ] is None


def test_a_run_without_any_reward_ends_with_a_warning():
    seen = {"steps": 9, "reward_max": 0.0, "reward_min": 0.0, "answers_rejected": {"too long": 3}}
    (sentence,) = summary.warnings(seen)
    assert "mean reward 0" in sentence and "3 too long" in sentence
    assert summary.warnings(seen | {"reward_max": 0.5}) == []
    assert summary.warnings(seen | {"steps": 0}) == []
    (sentence,) = summary.warnings(seen | {"reward_max": 0.5, "collapsed_after": 7})
    assert "after step 7" in sentence and "learner.learning_rate" in sentence


@pytest.mark.parametrize(
    ("rewards", "step"),
    [
        ([0.5] * 18 + [0.0] * 12, 18),
        ([0.5] * 18 + [0.04, 0.0] * 6, 18),
        ([0.5] * 18 + [0.0] * 9, None),  # too early to say
        ([0.5] * 18 + [0.0] * 12 + [0.5], None),  # it came back
        ([0.5] * 18 + [0.06] * 12, None),
        ([0.0] * 30, None),
        ([-0.5] * 10 + [-1.0] * 20, None),
        ([0.5] * 15, None),
        ([], None),
    ],
)
def test_a_reward_that_falls_to_a_tenth_and_stays_there_has_collapsed(rewards: list[float], step: int | None) -> None:
    rows = [{"kind": "step", "step": number, "reward_mean": reward} for number, reward in enumerate(rewards, 1)]
    assert activity.collapsed_after(rows) == step


def test_rejected_answers_are_summed_over_samplers_and_their_restarts():
    rows = [
        {"kind": "stats", "role": role, "answers_rejected": counts}
        for role, counts in [
            ("sampler-0", {"too long": 2}),
            ("sampler-1", {"not ASCII": 1}),
            ("sampler-0", {"too long": 5}),
            ("sampler-0", {"too long": 1}),
            ("sampler-1", {"not ASCII": 1, "too long": 1}),
        ]
    ]
    assert summary.counts_by_reason(rows, "answers_rejected") == {"not ASCII": 1, "too long": 7}
    assert summary.counts_by_reason([], "answers_rejected") is None


def test_invariants_that_do_not_apply_are_not_judged():
    by_name = {check.name: check for check in record.checks(GOOD | {"alpha": 0.0, "age_max": 0, "overlap": 0.0}, {})}
    assert by_name["overlap"].holds is None  # synchronous by choice
    bf16 = record.checks(GOOD | {"logprob_mismatch_max": 0.1}, {"model": {"dtype": "bfloat16"}})
    assert {check.name: check.holds for check in bf16}["log-prob mismatch"] is None


def test_reward_and_length_by_source_are_over_all_samples():
    def step(number, **sources):
        found = {name: dict(zip(("samples", "reward", "tokens"), of, strict=True)) for name, of in sources.items()}
        return {"kind": "step", "step": number, "sources": found}

    steps = [step(0, a=(1, 1.0, 2.0)), step(1, a=(3, 0.0, 4.0), b=(2, 0.5, 6.0)), {"kind": "step", "step": 2}]
    assert activity.reward_by_source(steps) == {"a": [0.25, 0.25, 3.5], "b": [0.5, 0.5, 6.0]}
    assert activity.reward_by_source(steps, count=2) == {"a": [0.25, 0.0, 4.0], "b": [0.5, 0.5, 6.0]}
    assert activity.reward_by_source(steps[2:]) is None


def held(role, mib, started=0):
    """Rows of one process of `role`, with its memory in MiB."""
    return [
        {"kind": "stats", "role": role, "episodes": started + at, "resident_bytes": value << 20}
        for at, value in enumerate(mib)
    ]


@pytest.mark.parametrize(
    ("mib", "times"),
    [
        (range(1000, 2000), 2),
        ([1000] * 300 + [3000] * 700, 0),
        ([1000, 1000, 1000, 3000] * 250, 0),
        (range(1000, 1300), 0),
        ([*range(1000, 3000, 20), *[3000] * 900], 0),
        (range(1000, 3000, 10), 0),
    ],
    ids=["grows", "grows once", "peaks", "grows little", "grows at first", "is young"],
)
def test_memory_that_grows_as_long_as_a_process_lives_is_a_fault_of_its_environments(mib, times):
    found = summary.environment_faults(held("sampler-0", mib))
    assert list(found.values()) == ([times] if times else [])
    assert all(cause.startswith("sampler-0 holds more") for cause in found)


def test_the_memory_of_each_process_is_judged_alone():
    """Two processes grow by 480 MiB each after their first rows, between two that hold as much from the start."""
    full, grows = [1600] * 700, range(1000, 1600)
    rows = [*held("actor-1", full), *held("actor-1", grows), *held("actor-1", grows), *held("actor-1", full)]
    assert list(summary.environment_faults(rows).values()) == [2]
    assert summary.environment_faults([*held("actor-1", [1000] * 700), *held("actor-1", [3000] * 700)]) == {}
