"""Schedule presets: the keys that they set and refuse; resolving a resolved config changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxroll import config as configs
from jaxroll.config import ScheduleConfig
from jaxroll.config.derived import MODES, with_mode
from jaxroll.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "configs" / "smoke.py"


@pytest.mark.parametrize(
    ("mode", "alpha", "window", "weight_swap"),
    [
        ("sync", 0.0, "full", "keep_kv"),
        ("one_step", 1.0, "full", "drain"),
        ("interval", 1.0, "full", "drain"),
        ("async_controller", 1.0, "adaptive", "reprefill"),
        ("async", 1.0, "adaptive", "keep_kv"),
    ],
)
def test_a_mode_is_what_it_fixes(mode: str, alpha: float, window: str, weight_swap: str) -> None:
    schedule = configs.load(SMOKE, [f"schedule.mode={mode}"]).schedule
    assert (schedule.alpha, schedule.in_flight_window, schedule.weight_swap) == (alpha, window, weight_swap)


def test_a_resolved_config_resolves_to_itself() -> None:
    for mode in MODES:
        config = configs.load(SMOKE, [f"schedule.mode={mode}"])
        assert configs.parse(configs.to_dict(config)) == config


@pytest.mark.parametrize(
    ("mode", "override"),
    [("sync", "alpha=2"), ("sync", "order=ready_first"), ("one_step", "alpha=0.5"), ("one_step", "weight_swap=restart"),
     ("one_step", "publish_every=2"), ("interval", "alpha=2"), ("interval", "redundant_groups=1"),
     ("interval", "order=ready_first"), ("interval", "weight_swap=restart"), ("interval", "publish_every=2"),
     ("async_controller", "rolling_updates=1"), ("async_controller", "publish_every=2"),
     ("sync", "alpha=1"), ("one_step", "weight_swap=keep_kv"), ("one_step", "in_flight_window=adaptive")],
)  # fmt: skip
def test_another_value_for_what_a_mode_fixes_is_refused(mode: str, override: str) -> None:
    key = f"schedule.{override.partition('=')[0]}"
    with pytest.raises(ConfigError, match=f"{key}.*schedule.mode = '{mode}'"):
        configs.load(SMOKE, [f"schedule.mode={mode}", f"schedule.{override}"])


def test_the_controller_needs_tokens_of_an_older_version() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.alpha.*async_controller"):
        configs.load(SMOKE, ["schedule.mode=async_controller", "schedule.alpha=0.5"])
    assert configs.load(SMOKE, ["schedule.mode=async_controller", "schedule.alpha=2"]).schedule.alpha == 2


def test_an_override_may_name_the_value_that_a_mode_fixes() -> None:
    assert configs.load(SMOKE, ["schedule.alpha=0", "schedule.mode=sync"]).schedule.alpha == 0


def test_async_changes_no_key() -> None:
    schedule = ScheduleConfig(alpha=2.5, publish_every=3, order="freshest_first", weight_swap="restart")
    assert with_mode(schedule, "async") == schedule


def test_the_baseline_is_synchronous() -> None:
    assert configs.load(ROOT / "configs" / "rlvr_sync.py").schedule.alpha == 0.0
