"""How far samplers would have to run ahead for the learner not to wait, held against how far α lets them.

A group for claim v + α may be leased when version v is out, P after the training of claim v began (the one before is
published meanwhile) and W later at a sampler that has fetched it; it then takes D until its last member is put. If a
step takes s (its training, and the least that ever lay between two), claim v + α begins α·s after claim v. So the
learner waits unless

    α·s ≥ P + W + D,

with D of the claim's slowest group. STORE.md, promise 7, has the case D ≤ s.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxroll.config.rules import GROUPS_AHEAD
from jaxroll.policy.limiter import TOLERATED
from jaxroll.report.figures.history import ClaimTimes, History

Row = dict[str, Any]
LEAST_CLAIMS = 4  # after those in which the pipeline fills; fewer say nothing


def alpha_wanted(rows: Sequence[Row], steps: Sequence[Row], history: History, config: Mapping[str, Any]) -> int | None:
    """The smallest α at which the learner would not wait, members taking as long as they do; None where α is no reason.

    It is none where the learner does not wait, where the window is narrower than α allows, where α is more already or
    0 (synchronous by choice), and where the samplers could not hold so many members.
    """
    alpha = config["schedule"]["alpha"]
    claims = [one for one in history.claim_times[2 * math.ceil(alpha + 1) :] if one.worked_s > 0]
    if not alpha or not steps or len(claims) < LEAST_CLAIMS or not _waits(claims) or not _window_full(rows):
        return None
    step_s = statistics.median(row["train_s"] for row in steps) + min(row["wait_s"] for row in steps)
    if step_s <= 0:  # the clock was set back
        return None
    made_s = statistics.median(one.made_s for one in claims)
    member_s = statistics.median(one.member_s for one in claims)
    published_s = statistics.median(row["publish_s"] for row in steps)
    wanted = math.ceil((published_s + weight_lag_s(rows, history) + made_s) / step_s)
    return wanted if wanted > alpha and _room(config, member_s / step_s) else None


def words(alpha: float, wanted: int | None) -> str:
    """The sentence of the report; '' when there is nothing to say."""
    return f"α = {alpha:g} is less than the {wanted} that the learner would need not to wait" if wanted else ""


def weight_lag_s(rows: Sequence[Row], history: History) -> float:
    """Median time from a version's publication until a sampler draws with it; 0 when none is known."""
    published = {version: t for t, version in history.published}
    flips = [row for row in rows if row.get("kind") == "span" and row["what"] == "flip" and row["role"] != "evaluator"]
    lags = [row["t1"] - published[row["version"]] for row in flips if row.get("version") in published]
    return max(0.0, statistics.median(lags)) if lags else 0.0


def _waits(claims: Sequence[ClaimTimes]) -> bool:
    """Whether the learner waited for more of its time than the window's control tolerates."""
    waited = sum(min(one.waited_s, one.worked_s) for one in claims)
    return waited > TOLERATED * (waited + sum(one.worked_s for one in claims))


def _window_full(rows: Sequence[Row]) -> bool:
    """Whether the window in force is all that α allows, at the end as far as it is known."""
    last = next((row for row in reversed(rows) if row.get("kind") == "store"), {})
    return last.get("window") is None or last["window"] >= last["window_full"]


def _room(config: Mapping[str, Any], steps: float) -> bool:
    """Whether the samplers hold what a learner that never waits takes in `steps` steps."""
    schedule, sampler = config["schedule"], config["sampler"]
    each = schedule["group_size"] + schedule.get("redundant_members", 0)
    held = sampler.get("count", 1) * (sampler.get("episodes") or sampler["slots"] + GROUPS_AHEAD * each)
    return steps * schedule["groups_per_step"] * each <= held
