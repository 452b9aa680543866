"""The invariants of a run, compared with its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxroll.policy.limiter import max_age
from jaxroll.report.formats import UNKNOWN, known, number, percent


@dataclass(frozen=True)
class Check:
    """One invariant: `holds` is None if the run cannot tell, or if the invariant does not apply to it."""

    name: str
    found: str
    bound: str
    holds: bool | None
    meaning: str


def checks(figures: Mapping[str, Any], config: Mapping[str, Any]) -> list[Check]:
    """All invariants, the most important first."""
    alpha = max_age(figures["alpha"])
    shared = bool((config.get("placement") or {}).get("colocated"))  # devices that compute one thing at a time
    return [
        _most(figures, "age_max", "largest age", alpha, f"α = {figures['alpha']:g}: no older token is trained"),
        _most(figures, "conservation_residual", "groups unaccounted for", 0, "every issued group has a state"),
        _most(figures, "groups_trained_twice", "groups trained twice", 0, "no group is in two durable steps"),
        _most(figures, "heldout_in_train", "held-out questions trained", 0, "no held-out question is trained on"),
        _most(figures, "compiles_after_warmup", "compiles after warm-up", 0, "all shapes are static"),
        _evaluated(figures, config),
        _mismatch(figures, config),
        _least(
            figures,
            "overlap",
            "overlap",
            0.5,
            "learner compute with useful decoding at the same time",
            alpha >= 1 and not shared,
        ),
        _least(figures, "slot_occupancy", "slot occupancy", 0.85, "busy slots while requests wait"),
        _padding(figures, config),
        _waste(figures, config),
    ]


_ROWS_TO_FILL = 16  # packed rows of a step; with fewer, the last row alone can be a tenth of them


def _padding(figures: Mapping[str, Any], config: Mapping[str, Any]) -> Check:
    """An invariant of steps with many packed rows on every shard; a small step cannot fill even one micro-batch."""
    learner = config.get("learner") or {}
    mesh = learner.get("mesh") or {}
    shards = mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("expert", 1)
    rows = (figures["tokens_per_step"] or 0) / learner.get("row_tokens", 128) / shards
    check = _most(figures, "padding_waste", "padding", 0.25, "share of packed tokens that are padding", percent)
    return check if rows >= _ROWS_TO_FILL else replace(check, holds=None)


def _waste(figures: Mapping[str, Any], config: Mapping[str, Any]) -> Check:
    """An invariant of runs without filters and redundant groups, which waste samples on purpose."""
    schedule = config.get("schedule") or {}
    chosen = schedule.get("filter", "none") != "none" or schedule.get("redundant_groups", 0) > 0
    check = _most(figures, "wasted_tokens", "wasted tokens", 0.02, "sampled, then expired or masked", percent)
    return replace(check, holds=None) if chosen else check


def _most(figures: Mapping[str, Any], key: str, name: str, bound: float, meaning: str, written=number) -> Check:
    value = figures[key]
    short = percent(bound, 0) if written is percent else number(bound)
    return Check(
        name, written(value), f"≤ {short}" if bound else "0", value <= bound if known(value) else None, meaning
    )


def _least(figures: Mapping[str, Any], key: str, name: str, bound: float, meaning: str, asked: bool = True) -> Check:
    value = figures[key]
    holds = value >= bound if known(value) and asked else None
    return Check(name, percent(value), f"≥ {percent(bound, 0)}" if asked else UNKNOWN, holds, meaning)


def _evaluated(figures: Mapping[str, Any], config: Mapping[str, Any]) -> Check:
    """An invariant of finished runs with an evaluator: it evaluated before the first step and after the last."""
    steps, wanted = figures["eval_steps"] or [], figures["steps_wanted"]
    asked = bool((config.get("evaluator") or {}).get("every")) and figures["steps"] == wanted
    found = ", ".join(number(step) for step in steps) or UNKNOWN
    meaning = "the gain is measured from the warm start to the last weights"
    return Check("evaluated at", found, f"0, {number(wanted)}", list(steps) == [0, wanted] if asked else None, meaning)


def _mismatch(figures: Mapping[str, Any], config: Mapping[str, Any]) -> Check:
    """An invariant of runs that compute in float32 on both sides."""
    value, limit = figures["logprob_mismatch_max"], figures["logprob_mismatch_limit"]
    dtypes = {(config.get(room) or {}).get("dtype", "float32") for room in ("model", "transfer")}
    asked = dtypes == {"float32"} and known(value) and known(limit)
    bound = f"< {number(limit, 2)}" if asked else UNKNOWN
    meaning = "log-probs of sampler and learner on equal weights"
    return Check("log-prob mismatch", number(value, 2), bound, value < limit if asked else None, meaning)
