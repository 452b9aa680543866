"""Training-step metrics, grouped by token age: summed on the device and read on the host once per step.

R rows, T tokens of a row, A age buckets; the last bucket also holds all older tokens. Every statistic is a float32
array [A] over the trained tokens, so that micro-batches and minibatches are merged by plain addition (or maximum).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxroll.algorithms import losses
from jaxroll.algorithms.advantages import TokenLoss
from jaxroll.config.parsing import SOURCE_ITEMS
from jaxroll.errors import JaxRollError
from jaxroll.learner.minibatch import Sample
from jaxroll.records import Claim

SUMS = (
    "tokens",
    "loss",
    "bounded",
    "delta",
    "kl",
    "ratio",
    "ratio_squared",
    "entropy",
    "logits_variance",
    "fresh_tokens",
    "balance",
)
MAXIMA = ("ratio_max", "mismatch_max")
LOADS = "expert_loads"  # of a model with experts: how often each was chosen, float32 [L, E]

Statistics = dict[str, jax.Array]


def zeros(age_buckets: int, loads: tuple[int, int] | None = None) -> Statistics:
    """The statistics of no tokens; `loads` is the shape of LOADS, for a model with experts."""
    found = {name: jnp.zeros(age_buckets, jnp.float32) for name in (*SUMS, *MAXIMA)}
    return found | ({LOADS: jnp.zeros(loads, jnp.float32)} if loads else {})


def of_batch(
    streams: Mapping[str, Array],
    proximal: Float[Array, "R T"],
    token: TokenLoss,
    entropy: Float[Array, "R T"],
    logits_variance: Float[Array, "R T"],
    age_buckets: int,
) -> Statistics:
    """The statistics of one micro-batch.

    `proximal` is log π of the trainer at the start of the claim. Ratios, KL(b‖π) and mismatch compare it with the
    behavior log-probs, so they measure how far off-policy the data is.
    """
    behaviour, fresh = streams["behaviour"], streams["fresh"]
    rho = losses.ratio(proximal, behaviour)
    delta = jnp.abs(proximal - behaviour)
    summed = {
        "tokens": jnp.ones_like(proximal),
        "loss": streams["weight"] * token.loss,
        "bounded": token.bounded,
        "delta": delta,
        "kl": losses.k3(behaviour, proximal),
        "ratio": rho,
        "ratio_squared": jnp.square(rho),
        "entropy": entropy,
        "logits_variance": logits_variance,
        "fresh_tokens": fresh,
        "balance": jnp.zeros_like(proximal),
    }
    largest = {"ratio_max": rho, "mismatch_max": jnp.where(fresh, delta, 0.0)}
    age = jnp.clip(streams["ages"], 0, age_buckets - 1)
    of_age = (age[..., None] == jnp.arange(age_buckets)[None, None]) & streams["mask"][..., None]  # [R, T, A]
    by_age = {name: _spread(value, of_age).sum((0, 1)) for name, value in summed.items()}
    return by_age | {name: _spread(value, of_age).max((0, 1)) for name, value in largest.items()}


def with_experts(statistics: Statistics, balance: Float[Array, ""], loads: Float[Array, "L E"]) -> Statistics:
    """`statistics` of a micro-batch of a model with experts: `balance` is its part of the balance loss."""
    # It belongs to no token; the first bucket holds it.
    return statistics | {"balance": statistics["balance"].at[0].set(jax.lax.stop_gradient(balance)), LOADS: loads}


def merged(first: Statistics, second: Statistics) -> Statistics:
    """The statistics of both."""
    return {
        name: jnp.maximum(first[name], second[name]) if name in MAXIMA else first[name] + second[name] for name in first
    }


def totals(reports: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Several statistics merged as by `merged`, computed on the host."""
    stacked = {name: np.stack([report[name] for report in reports]) for name in reports[0]}
    return {name: value.max(0) if name in MAXIMA else value.sum(0) for name, value in stacked.items()}


def metrics(statistics: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The metrics row of a step, with the same metrics per age bucket in `by_age`.

    `expert_load_max` is the largest load of an expert as a multiple of its layer's mean.

    `ess` is (Σρ)²/(n·Σρ²), the effective sample size under the importance weights as a fraction of all tokens.
    `logprob_mismatch_max` is None if no member was sampled wholly by the version being trained; all metrics are None
    if no token was computed.
    """
    host = {name: np.asarray(statistics[name], np.float64) for name in (*SUMS, *MAXIMA)}
    loads = np.asarray(statistics.get(LOADS, 0.0), np.float64)
    total = {name: value.max() if name in MAXIMA else value.sum() for name, value in host.items()}
    tokens = max(total["tokens"], 1.0)
    return {
        "loss": float(total["loss"]),
        "clip_share": float(total["bounded"] / tokens) if total["tokens"] else None,
        "ess": _effective_share(total) if total["tokens"] else None,
        "kl_behaviour": float(total["kl"] / tokens) if total["tokens"] else None,
        "ratio_max": float(total["ratio_max"]) if total["tokens"] else None,
        "entropy": float(total["entropy"] / tokens) if total["tokens"] else None,
        "expert_balance": float(total["balance"]) if total["balance"] else None,
        "expert_load_max": float((loads.max(-1) / loads.mean(-1)).max()) if loads.any() else None,
        "logits_std": math.sqrt(total["logits_variance"] / tokens) if total["tokens"] else None,
        "logprob_delta": float(total["delta"] / tokens) if total["tokens"] else None,
        "logprob_mismatch_max": float(total["mismatch_max"]) if total["fresh_tokens"] else None,
        "logprob_mismatch_tokens": int(total["fresh_tokens"]),
        "by_age": {
            str(age): _of_age({name: value[age] for name, value in host.items()})
            for age in range(len(host["tokens"]))
            if host["tokens"][age]
        },
    }


def _spread(value: Array, of_age: Array) -> Array:
    return jnp.where(of_age, jax.lax.stop_gradient(value)[..., None].astype(jnp.float32), 0.0)


def _effective_share(of: Mapping[str, float]) -> float:
    return float(of["ratio"] ** 2 / (of["tokens"] * of["ratio_squared"])) if of["ratio_squared"] else 1.0


def _of_age(of: Mapping[str, float]) -> dict[str, float]:
    tokens = of["tokens"]
    return {
        "tokens": int(tokens),
        "logprob_delta": float(of["delta"] / tokens),
        "kl_behaviour": float(of["kl"] / tokens),
        "ratio_max": float(of["ratio_max"]),
        "clip_share": float(of["bounded"] / tokens),
        "ess": _effective_share(of),
    }


# --- on the host: metrics of a claim's data, and of all reports of a step


def of_data(groups: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """dict[str, Any] of a claim's data: unshaped rewards, and ages of the trained tokens."""
    samples = [sample for group in groups for sample in group]
    rewards = np.array([sample.reward for sample in samples], np.float64)
    ages = np.concatenate([np.zeros(0, np.int32), *(sample.ages[sample.mask] for sample in samples)])
    counts = np.unique(ages, return_counts=True)
    return {
        "reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "samples": len(samples),
        "tokens_trained": len(ages),
        "masked_tokens": sum(sample.sampled_tokens for sample in samples) - len(ages),
        "age_mean": float(ages.mean()) if len(ages) else 0.0,
        "age_max": int(ages.max()) if len(ages) else 0,
        "age_hist": {str(age): int(count) for age, count in zip(*counts, strict=True)},
        "groups_without_signal": sum(len({sample.reward for sample in group}) <= 1 for group in groups),
    }


def by_source(groups: Sequence[Sequence[Sample]], claim: Claim, labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The samples of each source of prompts, with the means of their unshaped rewards and of their sampled tokens.

    `groups` are those of `claim`, in order; `labels` are those of the sources, by number.
    """
    found: dict[str, list[Sample]] = {}
    for samples, group in zip(groups, claim.groups, strict=True):
        found.setdefault(labels[group.task.index // SOURCE_ITEMS], []).extend(samples)
    return {
        label: {
            "samples": len(samples),
            "reward": float(np.mean([sample.reward for sample in samples])),
            "tokens": float(np.mean([sample.sampled_tokens for sample in samples])),
        }
        for label, samples in sorted(found.items())
        if samples
    }


def rewards_by_age(groups: Sequence[Sequence[Sample]], age_buckets: int) -> dict[str, dict[str, Any]]:
    """The number of trained tokens of each age and the mean of their members' rewards.

    The last bucket also holds all older tokens.
    """
    samples = [sample for group in groups for sample in group if sample.mask.any()]
    if not samples:
        return {}
    ages = np.concatenate([np.clip(sample.ages[sample.mask], 0, age_buckets - 1) for sample in samples])
    rewards = np.repeat([sample.reward for sample in samples], [sample.trained_tokens for sample in samples])
    return {
        str(age): {"tokens_trained": int((ages == age).sum()), "reward": float(rewards[ages == age].mean())}
        for age in np.unique(ages)
    }


def of_reports(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The reports of all minibatches combined: statistics over all tokens, mean loss and mean gradient norm."""
    row = metrics(totals([report["statistics"] for report in reports]))
    return row | {
        "loss": row["loss"] / len(reports),
        "expert_balance": row["expert_balance"] and row["expert_balance"] / len(reports),
        "grad_norm": float(np.mean([report["grad_norm"] for report in reports])),
        "learning_rate": float(reports[-1]["learning_rate"]),
    }


def divided(report: Mapping[str, Any], counted: float, tokens: int) -> dict[str, Any]:
    """The report of a step whose weights lacked their denominator, which is `counted`; `tokens` were real ones."""
    of = dict(report["statistics"])
    of |= {"loss": of["loss"] / max(counted, 1.0), "balance": of["balance"] / max(tokens, 1)}
    return dict(report) | {"statistics": of}


def check_finite(reports: Sequence[Mapping[str, Any]], claim: Claim, rate: str) -> None:
    """Raise JaxRollError if a gradient norm is not finite; `rate` is the config key of the learning rate to lower."""
    for number, report in enumerate(reports):
        if not np.isfinite(report["grad_norm"]):
            raise JaxRollError(
                f"step {claim.step}, minibatch {number}: the gradient is not finite (norm {report['grad_norm']}); "
                f"resume from the last checkpoint with a lower {rate} or model.dtype = float32"
            )
