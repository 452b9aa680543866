"""The named schedules as data: what each fixes of `schedule`, for the same processes and the same loops.

    sync       α = 0: every token is trained by the version that sampled it; sampler and learner take turns
    one_step   α = 1: while the learner trains a batch, the next one is sampled, wholly by the newest published weights
    async      any α and any of the other keys; nothing is fixed

A key that a schedule fixes is left at its default, or set to that very value; another value is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from jaxroll.config.schema import ScheduleConfig
from jaxroll.errors import ConfigError

MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "sync": {"alpha": 0.0, "publish_every": 1, "window": "full", "order": "lease_order"},
    "one_step": {"alpha": 1.0, "publish_every": 1, "window": "full", "order": "lease_order", "flip": "drain"},
    "async": {},
})  # fmt: skip


def with_mode(schedule: ScheduleConfig, mode: str) -> ScheduleConfig:
    """`schedule` with what `mode` fixes; ConfigError for a key that says otherwise."""
    fixed = MODES[mode]
    defaults = {field.name: field.default for field in fields(ScheduleConfig)}
    for key, value in fixed.items():
        said = getattr(schedule, key)
        if said not in (value, defaults[key]):
            raise ConfigError(f"schedule.{key}", said, f"schedule.mode = {mode!r} fixes it at {value!r}",
                              f"Leave schedule.{key} out, or set schedule.mode to 'async'.")  # fmt: skip
    return replace(schedule, **fixed)
