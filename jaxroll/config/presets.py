"""The named schedules as data: what each fixes of `schedule`, for the same processes and the same loops.

    sync       α = 0: every token is trained by the version that sampled it; sampler and learner take turns
    one_step   α = 1: while the learner trains a batch, the next one is sampled, wholly by the newest published weights
    async      any α and any of the other keys; nothing is fixed

A key that a schedule fixes is left at its default, or set to that very value; another value is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from jaxroll.config.schema import Config, LearnerConfig, ScheduleConfig, SftConfig
from jaxroll.errors import ConfigError

MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "sync": {"alpha": 0.0, "publish_every": 1, "in_flight_window": "full", "order": "lease_order"},
        "one_step": {
            "alpha": 1.0,
            "publish_every": 1,
            "in_flight_window": "full",
            "order": "lease_order",
            "weight_swap": "drain",
        },
        "async": {},
    }
)


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


# --- defaults that depend on the model

AUTO_STEPS, AUTO_RATE = -1, -1.0
# A warm start would overwrite an imported model, and the learning rate for a fresh model would destroy it. The rates of
# imported models are those of published GRPO runs: 1e-6 for all parameters, ten times as much for adapters.
_IMPORTED_RATE, _ADAPTER_RATE = 1e-6, 1e-5


def with_model(config: Config) -> Config:
    """Return `config` with `sft.steps` and `learner.learning_rate`, where they are automatic, chosen for its model."""
    fresh, sft, learner = not config.model.path, config.sft, config.learner
    if sft.steps == AUTO_STEPS:
        sft = replace(sft, steps=SftConfig().steps if fresh else 0)
    if learner.learning_rate == AUTO_RATE:
        imported = _ADAPTER_RATE if learner.lora_rank else _IMPORTED_RATE
        learner = replace(learner, learning_rate=LearnerConfig().learning_rate if fresh else imported)
    return replace(config, sft=sft, learner=learner)


# --- algorithm presets
#
# A key of `learner` that is left at "auto" (or at 0, where 0 says so) takes its value from the row; `settled` gives the
# config with all of them filled in. `jaxroll.algorithms` says what a loss computes; the config room loads without
# JAX.

ESTIMATORS = (
    "group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std", "positive", "best",
    "segment_return", "gigpo", "gae",
)  # fmt: skip
ACROSS_GROUPS = ("batch_std", "positive", "gae")  # estimators for which a group of one is as good as any
OF_TURNS = ("segment_return", "gigpo")  # estimators that tell the turns of an episode apart
CLIPPED = ("decoupled", "icepop", "tis", "none")
CAPS: Mapping[str, float] = MappingProxyType({"truncate": 2.0, "mask": 5.0, "icepop": 5.0})
ICEPOP_FLOOR = 0.5


@dataclass(frozen=True)
class Preset:
    """One preset. Where several values are allowed, "auto" means the first.

    `corrections` is empty where the loss weighs by π_θ/π_b itself, or needs no weight. `credited_only`: denominators
    count the members with an advantage and no others. `overlong`: answers near the limit cost.
    """

    loss: str
    advantages: tuple[str, ...] = ESTIMATORS
    aggregations: tuple[str, ...] = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length")
    clip_low: float = 0.2
    clip_high: float = 0.2
    corrections: tuple[str, ...] = CLIPPED
    levels: tuple[str, ...] = ("token",)
    needs_reference: bool = False
    credited_only: bool = False
    overlong: bool = False


def _first(best: str, words: tuple[str, ...]) -> tuple[str, ...]:
    return (best, *(word for word in words if word != best))


_ANY = Preset("").aggregations
_SEQUENCES = _first("seq_mean_token_mean", _ANY)

PRESETS: Mapping[str, Preset] = MappingProxyType({
    "grpo": Preset("clipped", clip_high=0.28),
    "dapo": Preset("clipped", clip_high=0.28, overlong=True),
    "dr_grpo": Preset("clipped", _first("group_mean", ESTIMATORS), _first("constant_length", _ANY)),
    "ppo": Preset("clipped", ("gae",)),
    "icepop": Preset("clipped", corrections=("icepop",), clip_high=0.28),
    "tis": Preset("clipped", corrections=("tis",), levels=("token", "sequence")),
    "reinforce_pp": Preset("clipped", _first("batch_std", ESTIMATORS)),
    "rloo": Preset("clipped", _first("leave_one_out", ESTIMATORS), _first("seq_mean_token_sum", _ANY)),
    "raft_pp": Preset("clipped", _first("positive", ESTIMATORS), credited_only=True),
    "gigpo": Preset("clipped", _first("gigpo", ESTIMATORS)),
    "gspo": Preset("gspo", aggregations=_SEQUENCES, clip_low=3e-4, clip_high=4e-4, corrections=("decoupled", "none"),
                   levels=("sequence",)),
    "cispo": Preset("cispo", clip_low=1.0, clip_high=3.0, corrections=()),
    "topr": Preset("topr", _first("group_mean", ESTIMATORS), _first("seq_mean_token_sum", _ANY), corrections=(),
                   levels=("sequence", "token")),
    "raft": Preset("likelihood", ("best", "positive"), corrections=(), credited_only=True),
    "dpo": Preset("preference", ("best_worst",), ("seq_mean_token_mean",), corrections=(), needs_reference=True,
                  credited_only=True),
})  # fmt: skip

CUSTOM = Preset("", clip_high=0.28, levels=("token", "sequence"))
"""The row of an algorithm of the user's own, `package.module:name`."""


def is_custom(name: str) -> bool:
    """True if `name` is a user's `package.module:name`."""
    return ":" in name


def preset(name: str) -> Preset:
    """The row of an algorithm; KeyError when there is none."""
    return CUSTOM if is_custom(name) else PRESETS[name]


def settled(learner: LearnerConfig) -> LearnerConfig:
    """`learner` with every value that was left to the algorithm."""
    row = preset(learner.algorithm)
    correction = _chosen(learner.correction, row.corrections)
    level = _chosen(learner.ratio_level, ("token", "sequence") if correction == "tis" else row.levels)
    values: dict[str, Any] = {
        "advantage": _chosen(learner.advantage, row.advantages),
        "aggregation": _chosen(learner.aggregation, row.aggregations),
        "correction": correction,
        "ratio_level": level,
        "clip_low": learner.clip_low or row.clip_low,
        "clip_high": learner.clip_high or row.clip_high,
        "correction_cap": learner.correction_cap or CAPS.get(correction, CAPS[learner.correction_mode]),
        "correction_floor": learner.correction_floor or ICEPOP_FLOOR,
        "kl_estimator": {"loss": "k2", "reward": "k1"}[learner.kl_in]
        if learner.kl_estimator == "auto"
        else learner.kl_estimator,
    }
    return replace(learner, **values)


def _chosen(value: str, allowed: tuple[str, ...]) -> str:
    return value if value != "auto" else allowed[0] if allowed else "none"
