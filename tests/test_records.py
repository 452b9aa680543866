"""Ages and identities, by hand."""

import numpy as np

from jaxroll.records import Version, VersionRun, ages, question_hash


def test_ages_follow_the_runs():
    runs = (VersionRun(Version(0, 3), 2), VersionRun(Version(0, 5), 1))
    assert ages(runs, 5).tolist() == [2, 2, 0]
    assert ages((), 5).shape == (0,) and ages((), 5).dtype == np.int32


def test_versions_order_by_lineage_then_step():
    assert Version(0, 9) < Version(1, 0) < Version(1, 1)


def test_a_question_hash_ignores_white_space():
    assert question_hash("a  b\n") == question_hash("a b") != question_hash("ab")
