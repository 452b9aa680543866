"""The filter against exact arithmetic and hand-worked groups, hooks that misbehave, and its refusals."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxroll.errors import ConfigError
from jaxroll.policy.selection import Filter

REWARDS = st.lists(st.integers(-8, 16).map(lambda eighths: eighths / 8), min_size=1, max_size=9)
BOUNDS = st.integers(-8, 16).map(lambda eighths: eighths / 8)


@pytest.mark.parametrize(
    ("rule", "rewards", "reason"),
    [
        (Filter(), (0.0, 0.0), ""),
        (Filter("mean_band"), (0.0, 0.0, 0.0), "mean reward too low"),
        (Filter("mean_band"), (1.0, 1.0), "mean reward too high"),
        (Filter("mean_band"), (1.0, 0.0), ""),
        (Filter("mean_band", 0.25, 0.75), (1.0, 0.0, 0.0, 0.0), "mean reward too low"),  # on the bound is not between
        (Filter("pass_rate"), (0.9, 0.99), "pass rate too low"),
        (Filter("pass_rate"), (0.9, 1.0), ""),
        (Filter("pass_rate"), (1.0, 1.5), "pass rate too high"),
        (Filter("min_std"), (0.1, 0.1, 0.1), "rewards too alike"),  # whose mean is rounded
        (Filter("min_std"), (0.1, 0.1, 0.2), ""),
        (Filter("min_std", 0.5), (0.0, 1.0), "rewards too alike"),
        (Filter("min_std", 0.49), (0.0, 1.0), ""),
        (Filter("min_std"), (0.7,), "rewards too alike"),  # one member has nothing to be compared with
    ],
)
def test_groups_by_hand(rule: Filter, rewards: tuple[float, ...], reason: str) -> None:
    assert rule.verdict(rewards).reason == reason
    assert not rule.verdict(rewards).broken


@given(REWARDS, BOUNDS, BOUNDS)
def test_what_is_kept_is_what_exact_arithmetic_keeps(rewards: list[float], low: float, high: float) -> None:
    exact = [Fraction(r) for r in rewards]
    mean = sum(exact) / len(exact)
    passed = Fraction(sum(r >= 1 for r in exact), len(exact))
    variance = sum((r - mean) ** 2 for r in exact) / len(exact)
    if low < high:
        assert (Filter("mean_band", low, high).verdict(rewards).reason == "") == (low < mean < high)
        assert (Filter("pass_rate", low, high).verdict(rewards).reason == "") == (low < passed < high)
    if low >= 0 and variance != Fraction(low) ** 2:  # on the bound a root may be rounded
        assert (Filter("min_std", low).verdict(rewards).reason == "") == (variance > Fraction(low) ** 2)


HOOKS = """
def spread(rewards):
    return "" if rewards[0] != rewards[-1] else "first and last alike"
def nothing(rewards): return None
def raises(rewards): return rewards[7]
def number(rewards): return len(rewards)
text = "x"
"""


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_filters.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_filters", raising=False)


@pytest.mark.usefixtures("hooks")
def test_a_hook_judges_and_one_that_fails_says_how() -> None:
    assert Filter("my_filters:spread").verdict([1.0, 0.0, 1.0]).reason == "first and last alike"
    assert Filter("my_filters:spread").verdict([1.0, 0.0]).reason == ""
    assert Filter("my_filters:nothing").verdict([1.0]).reason == ""
    raised = Filter("my_filters:raises").verdict([1.0, 0.0])
    assert raised.broken and "IndexError" in raised.reason and "my_filters:raises" in raised.reason
    number = Filter("my_filters:number").verdict([1.0, 0.0])
    assert number.broken and "returned 2" in number.reason


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("name", ["raises", "number", "text", "absent"])
def test_a_hook_that_cannot_judge_is_refused_before_the_run(name: str) -> None:
    Filter("my_filters:spread").check()
    with pytest.raises(ConfigError, match=r"schedule\.filter"):
        Filter(f"my_filters:{name}").check()
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        Filter("no_such_module_here:f").check()


@pytest.mark.parametrize(("kind", "low", "high"), [("std", 0, 1), ("a b:c", 0, 1), ("mean_band", 1, 1), (":f", 0, 1)])
def test_what_cannot_be_meant_is_refused(kind: str, low: float, high: float) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.filter"):
        Filter(kind, low, high)
