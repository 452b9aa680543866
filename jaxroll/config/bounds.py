"""What each number of a config may be by itself: tables of bounds, and their check."""

from __future__ import annotations

from typing import Any

from jaxroll.config.schema import Config
from jaxroll.errors import ConfigError

_AT_LEAST: tuple[tuple[str, float], ...] = (
    ("run.seed", 0),
    *((f"{role}.mesh.{axis}", 1) for role in ("sampler", "learner", "evaluator")
      for axis in ("data", "fsdp", "tensor")),
    ("task.max_prompt_tokens", 1), ("task.max_episode_tokens", 0), ("task.train_start", 0),
    ("task.heldout_start", 0), ("task.heldout_items", 0),
    ("sft.steps", 0), ("sft.batch", 1), ("sft.start", 0),
    ("schedule.alpha", 0), ("schedule.steps", 1), ("schedule.groups_per_step", 1), ("schedule.group_size", 1),
    ("schedule.buffer_groups", 0), ("schedule.redundant_groups", 0), ("schedule.redundant_members", 0),
    ("schedule.publish_every", 1), ("schedule.filter_limit", 1), ("schedule.rolling", 0),
    ("sampling.max_tokens", 1),
    ("sampler.count", 1), ("sampler.slots", 1), ("sampler.prefill_rows", 1), ("sampler.decode_chunk", 1),
    ("sampler.prefill_budget", 0), ("sampler.page_tokens", 0), ("sampler.cache_pages", 0),
    ("sampler.scoring_workers", 1), ("sampler.episodes", 0), ("sampler.env_threads", 1), ("sampler.env_processes", 1),
    ("learner.correction_cap", 0), ("learner.correction_floor", 0), ("learner.dual_clip", 0),
    ("learner.positive_weight", 0), ("learner.negative_weight", 0), ("learner.step_weight", 0),
    ("learner.clip_low", 0), ("learner.clip_high", 0), ("learner.discount", 0), ("learner.overlong_tokens", 0),
    ("learner.value_clip", 0), ("learner.gae_discount", 0), ("learner.gae_lambda", 0),
    ("learner.kl_coef", 0), ("learner.warmup_steps", 0), ("learner.decay_steps", 0),
    ("learner.weight_decay", 0), ("learner.substeps", 1), ("learner.micro_rows", 1), ("learner.row_tokens", 2),
    ("learner.prompt_tokens", 0), ("learner.prompt_rows", 1),
    ("learner.logits_mb", 1), ("learner.lora_rank", 0),
    ("learner.checkpoint_every", 1), ("learner.checkpoints_kept", 1),
    ("store.retention_mb", 1), ("store.keep_trajectories_mb", 0), ("store.history_mb", 0),
    ("store.infra_retries", 0), ("store.data_retries", 0), ("store.dead_limit", 0), ("store.reissues", 0),
    ("store.max_message_mb", 1), ("store.lease_s", 1), ("store.rpc_deadline_s", 1), ("transfer.deadline_s", 1),
    ("evaluator.every", 0), ("evaluator.slots", 1),
    ("placement.actors", 0), ("placement.learner_hosts", 1), ("placement.cpu_threads", 1),
    ("supervisor.max_restarts", 0),
)  # fmt: skip

_POSITIVE = (
    "sft.learning_rate", "schedule.straggler_deadline_s", "learner.dpo_beta", "learner.learning_rate",
    "learner.critic_learning_rate",
    "learner.lora_alpha", "learner.max_grad_norm", "store.stall_s", "store.stall_abort_s", "supervisor.backoff_s",
    "supervisor.backoff_max_s", "supervisor.stop_s", "supervisor.finish_s", "placement.sampler_memory_fraction",
    "placement.learner_memory_fraction", "placement.evaluator_memory_fraction",
)  # fmt: skip

MAX_SEED = 2**32 - 1  # JAX's keys take 32 bits of a seed: a larger one would be another run's
MAX_ITEM = 10**15  # far beyond what is ever drawn, and far below what an index can count

_AT_MOST: tuple[tuple[str, float], ...] = (
    ("run.seed", MAX_SEED), ("task.train_start", MAX_ITEM), ("task.heldout_start", MAX_ITEM), ("sft.start", MAX_ITEM),
    ("learner.discount", 1), ("learner.gae_discount", 1), ("learner.gae_lambda", 1),
)  # fmt: skip


def check_bounds(config: Config) -> None:
    """Raise ConfigError for the first number of `config` that is out of its bounds."""
    for key, least in _AT_LEAST:
        value = value_at(config, key)
        if value < least:
            raise ConfigError(key, value, f"must be at least {least}", f"Set {key} to {least} or more.")
    for key, most in _AT_MOST:
        value = value_at(config, key)
        if value > most:
            raise ConfigError(key, value, f"must be at most {most}", f"Set {key} between 0 and {most}.")
    for key in _POSITIVE:
        value = value_at(config, key)
        if value <= 0:
            raise ConfigError(key, value, "must be greater than 0", f"Set {key} to a positive number.")


def value_at(config: Config, key: str) -> Any:
    """The value under the dotted `key`."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value
