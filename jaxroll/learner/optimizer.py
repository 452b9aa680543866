"""AdamW with clipping by global norm and a learning-rate schedule, by optax."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import optax

from jaxroll.config import LearnerConfig

BETA1, BETA2 = 0.9, 0.95  # the shorter second moment of language-model training: a run is a few hundred steps
DECAYED_TO = 0.1  # of the peak, at the end of a cosine decay


@dataclass(frozen=True)
class Optimizer:
    """`transform` turns gradients into updates; `schedule` maps the number of updates done to a learning rate."""

    transform: optax.GradientTransformation
    schedule: optax.Schedule


def learning_rate(peak: float, warmup_steps: int, decay_steps: int) -> optax.Schedule:
    """Linear warm-up that reaches `peak` at update `warmup_steps` (the first update is not lost on a rate of 0).

    Then constant when `decay_steps` is 0, else a cosine to DECAYED_TO · peak over that many updates.
    """
    warmup_steps = max(warmup_steps, 1)
    after = optax.cosine_decay_schedule(peak, decay_steps, DECAYED_TO) if decay_steps else optax.constant_schedule(peak)
    ramp = optax.linear_schedule(peak / warmup_steps, peak, warmup_steps - 1)
    return optax.join_schedules([ramp, after], [warmup_steps - 1])


def adamw(schedule: optax.Schedule, weight_decay: float, max_grad_norm: float) -> Optimizer:
    """Clip by global norm, then AdamW; only matrices decay (a norm's scale has nothing to shrink towards)."""
    return Optimizer(
        optax.chain(
            optax.clip_by_global_norm(max_grad_norm),
            optax.adamw(schedule, BETA1, BETA2, weight_decay=weight_decay, mask=_decays),
        ),
        schedule,
    )


def build(config: LearnerConfig) -> Optimizer:
    """The optimizer that the config describes; steps are optimizer steps (claims × substeps)."""
    schedule = learning_rate(config.learning_rate, config.warmup_steps, config.decay_steps)
    return adamw(schedule, config.weight_decay, config.max_grad_norm)


def of_critic(config: LearnerConfig) -> Optimizer:
    """The critic's: of its own rate, and clipped by the norm of its own gradient."""
    return build(replace(config, learning_rate=config.critic_learning_rate))


def _decays(params: dict[str, jax.Array]) -> dict[str, bool]:
    return {name: value.ndim > 1 for name, value in params.items()}
