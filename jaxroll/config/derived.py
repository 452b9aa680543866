"""Values derived from the config: named schedules, defaults of a model or algorithm, processes, devices, sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxroll.config.schema import Config, LearnerConfig, SamplingConfig, ScheduleConfig, TaskConfig
from jaxroll.errors import ConfigError
from jaxroll.policy.limiter import AgeLimiter
from jaxroll.policy.selection import is_kept
from jaxroll.run_paths import COLOCATED

# --- named schedules: the values of `schedule` that each fixes, for the same processes and loops
#     sync       α = 0: sampler and learner alternate; every token is trained by the version that sampled it
#     one_step   α = 1: while the learner trains a batch, the next one is sampled with the newest published weights only
#     interval   α = 1: a batch starts when the one before is finished, with weights of one version before (HTS-RL)
#     async_controller  any α from 1 on: batch, suspend the samplers, update them, resume them, train (ROLL Flash)
#     async      any α and any values of the other keys
#
# A key that a schedule fixes must have its default or that value; an override that names it, that value.

MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "sync": {"alpha": 0.0, "publish_every": 1, "in_flight_window": "full", "order": "lease_order"},
    "one_step": {
        "alpha": 1.0, "publish_every": 1, "in_flight_window": "full", "order": "lease_order", "weight_swap": "drain",
    },
    "interval": {
        "alpha": 1.0, "publish_every": 1, "in_flight_window": "full", "order": "lease_order", "weight_swap": "drain",
        "redundant_groups": 0,
    },
    "async_controller": {"publish_every": 1, "rolling_updates": 0, "weight_swap": "reprefill"},
    "async": {},
})  # fmt: skip


def with_mode(schedule: ScheduleConfig, mode: str, named: Collection[str] = ()) -> ScheduleConfig:
    """`schedule` with the values that `mode` fixes; ConfigError for a key with another value.

    A key that still has its default was probably not set, unless it is one of `named`.
    """
    fixed = MODES[mode]
    defaults = {field.name: field.default for field in fields(ScheduleConfig)}
    for key, value in fixed.items():
        given = getattr(schedule, key)
        if given != value and (given != defaults[key] or key in named):
            remedy = f"Leave schedule.{key} out, or set schedule.mode to 'async'."
            raise ConfigError(f"schedule.{key}", given, f"schedule.mode = {mode!r} fixes it at {value!r}", remedy)
    if mode == "async_controller" and schedule.alpha < 1:
        reason = f"mode {mode!r} publishes weights when the next batch is there, which therefore has older tokens"
        raise ConfigError("schedule.alpha", schedule.alpha, reason, "Set it to 1 or more, or schedule.mode to 'sync'.")
    return replace(schedule, **fixed)


# --- models and their folders


def model_folder(config: Config) -> Path | None:
    """Folder of the imported model; None for a model that `model.size` names."""
    return Path(config.model.path) if config.model.path else None


def tokenizer_folder(config: Config) -> Path | None:
    """Folder of the Hugging Face tokenizer; None for a tokenizer of characters."""
    return Path(config.tokenizer.path) if config.tokenizer.kind == "hf" else None


def has_warm_start(config: Config) -> bool:
    """True if the run begins with supervised training on worked answers."""
    return config.sft.steps > 0


# --- algorithm presets
#
# A key of `learner` that is "auto" (or 0, where the schema says so) takes its value from the algorithm's row; `settled`
# returns the config with all of them set. The losses are in `jaxroll.algorithms`; this package loads without JAX.

ESTIMATORS = (
    "group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std", "positive", "best",
    "segment_return", "gigpo", "gae",
)  # fmt: skip
ACROSS_GROUPS = ("batch_std", "positive", "gae")  # estimators that accept groups of one
OF_TURNS = ("segment_return", "gigpo")  # estimators with one advantage per turn
CLIPPED = ("decoupled", "icepop", "tis", "none")
CAPS: Mapping[str, float] = MappingProxyType({"truncate": 2.0, "mask": 5.0, "icepop": 5.0})
ICEPOP_FLOOR = 0.5


@dataclass(frozen=True)
class Preset:
    """Allowed values of an algorithm; "auto" means the first.

    `corrections` is empty for a loss that contains π_θ/π_b or needs no importance weight. `credited_only`: denominators
    count only members with an advantage. `overlong`: the length penalty is on by default.
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


def _first(best: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return (best, *(name for name in names if name != best))


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
"""Row of a user-defined algorithm, `package.module:name`."""


def is_custom(name: str) -> bool:
    """True if `name` is a user-defined algorithm, `package.module:name`."""
    return ":" in name


def preset(name: str) -> Preset:
    """Row of an algorithm; KeyError if there is none."""
    return CUSTOM if is_custom(name) else PRESETS[name]


def settled(learner: LearnerConfig) -> LearnerConfig:
    """`learner` with the algorithm's values in place of "auto" and 0."""
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


def overlong_tokens(config: Config) -> int:
    """Tokens below `sampling.max_tokens` at which the penalty of long answers begins; 0: no penalty."""
    last = config.learner.overlong_tokens
    if not last and preset(config.learner.algorithm).overlong:
        return max(config.sampling.max_tokens // 5, 1)
    return last


def reward_shuffle_seed(config: Config) -> int | None:
    """Seed of the exchange of rewards between members (`learner.shuffle_rewards`); None without it."""
    return config.run.seed if config.learner.shuffle_rewards else None


# --- truncated sampling


def support_tokens(sampling: SamplingConfig) -> int:
    """K: the number of ids that a support has at most; 0 if training does not truncate."""
    if sampling.top_k:
        return sampling.top_k
    return sampling.support_tokens if sampling.top_p < 1 or sampling.min_p > 0 else 0


# --- processes, devices, sizes

CHECKPOINT_WANTED_AT = 0.8  # fraction of what the store may retain; from there on the learner checkpoints at every step
GROUPS_AHEAD = 4  # leased beyond the slots, so that no slot is idle during the round trip and commit of a lease
LEADERS = ("learner", COLOCATED)  # a run has one of these processes and ends with it


def roles_with_devices(config: Config) -> dict[str, int]:
    """Number of devices by role, and by host of a role on several, in this order: learner, samplers, evaluator."""
    wanted = dict.fromkeys(learner_names(config), config.learner.mesh.devices // config.placement.learner_hosts)
    wanted |= dict.fromkeys(sampler_processes(config), config.sampler.mesh.devices // config.placement.sampler_hosts)
    if config.evaluator.every:
        wanted["evaluator"] = config.evaluator.mesh.devices
    return wanted


def device_processes(config: Config) -> dict[str, int]:
    """Number of devices by process: one process per role, or `COLOCATED` for all roles."""
    wanted = roles_with_devices(config)
    return {COLOCATED: max(wanted.values())} if config.placement.colocated else wanted


def leader(config: Config) -> str:
    """Name of the process that trains, or leads the learner's processes."""
    return COLOCATED if config.placement.colocated else "learner"


def channel_of(config: Config) -> str:
    """Channel of the weight transfer: `transfer.channel`, or for "auto" the fastest one available."""
    if config.transfer.channel != "auto":
        return config.transfer.channel
    return "device" if config.placement.colocated else "tcp"


def learner_names(config: Config) -> tuple[str, ...]:
    """Names of the learner's processes, one per host; the first is the leader."""
    return ("learner", *(f"learner-{index}" for index in range(1, config.placement.learner_hosts)))


def sampler_names(config: Config) -> tuple[str, ...]:
    """Names of the samplers that the run starts with."""
    return tuple(f"sampler-{index}" for index in range(config.sampler.count))


def learner_samplers(config: Config) -> tuple[str, ...]:
    """Names of those of them that are on the learner's devices (`placement.learner_samplers`)."""
    return sampler_names(config)[max(0, config.sampler.count - config.placement.learner_samplers) :]


def own_samplers(config: Config) -> tuple[str, ...]:
    """Names of the others, which have devices of their own unless the run is colocated."""
    return sampler_names(config)[: max(0, config.sampler.count - config.placement.learner_samplers)]


def sampler_processes(config: Config) -> tuple[str, ...]:
    """Names of the processes of those samplers, one per host; the first of each has the sampler's name and leads."""
    hosts = config.placement.sampler_hosts
    return tuple(f"{name}-{host}" if host else name for name in own_samplers(config) for host in range(hosts))


def with_a_sampler(config: Config) -> Config:
    """`config` with one sampler at least: the first that joins, if the run starts with none."""
    return replace(config, sampler=replace(config.sampler, count=max(1, config.sampler.count)))


def engines(config: Config) -> int:
    """Number of engines that receive the learner's weights: those of samplers and evaluator."""
    return len(sampler_names(config)) + has_evaluator(config)


def has_evaluator(config: Config) -> bool:
    """True if a role scores published versions."""
    return "evaluator" in roles_with_devices(config)


def is_evaluated(config: Config, step: int, due: int) -> bool:
    """True if the evaluator scores a version of `step` when the next evaluation is due at step `due`.

    With `learner.keep_best` it scores only versions of which the learner writes a checkpoint.
    """
    learner, last = config.learner, config.schedule.steps
    return step >= min(due, last) and (not learner.keep_best or is_kept(step, learner.checkpoint_every, last))


def next_evaluation(config: Config, step: int) -> int | None:
    """Step at which an evaluation is due after that of `step`: a multiple of `evaluator.every`, or the last step.

    None after the last step.
    """
    every, last = config.evaluator.every, config.schedule.steps
    return min(step - step % every + every, last) if step < last else None


def actor_names(config: Config) -> tuple[str, ...]:
    """Names of the actor processes."""
    return tuple(f"actor-{index}" for index in range(config.placement.actors))


def rollouts_per_step(config: Config) -> int:
    """Number of rollouts that one step trains."""
    return config.schedule.groups_per_step * config.schedule.group_size


def lease_holders(config: Config) -> int:
    """Number of processes that lease members at the start: actors, or samplers in a run without actors."""
    return len(actor_names(config) or sampler_names(config))


def renewal_s(config: Config) -> float:
    """Seconds between two renewals of a lease: two of them may be lost before it ends."""
    return config.store.lease_s / 3


def update_in_force_s(config: Config) -> float:
    """Longest time that a sampler keeps its update slot after a fetch, until the weight swap; 0 without slots."""
    return config.transfer.deadline_s if config.schedule.rolling_updates else 0.0


def update_slot_s(config: Config) -> float:
    """Longest time of an update slot: the fetch and the swap."""
    return 2 * config.transfer.deadline_s


def sampler_members(config: Config) -> int:
    """Maximum episodes that a sampler runs concurrently. A member whose environment is busy holds no slot."""
    sampler = config.sampler
    return most_episodes(sampler.slots, sampler.concurrent_episodes, config.schedule.members_per_group)


def most_episodes(slots: int, wanted: int, members_per_group: int) -> int:
    """`sampler_members` by its numbers: `wanted` episodes, or for 0 the slots and the groups that are leased ahead."""
    return wanted or slots + GROUPS_AHEAD * members_per_group


def rollouts_at_once(config: Config) -> int:
    """Rollouts that a sampler generates at the same time."""
    return config.sampler.concurrent_episodes or config.sampler.slots


def one_version(config: Config) -> bool:
    """True if an answer has tokens of one version only (with `trajectory` all answers of a conversation together)."""
    return config.schedule.weight_swap in ("drain", "trajectory")


def flush_tokens(config: Config) -> int:
    """The most tokens of an unfinished answer that are not with the store; 0 if no answer has more.

    Turns of conversations (`task.max_episode_tokens`) are flushed at their end, however short they are.
    """
    tokens = config.sampler.flush_tokens
    return tokens if tokens < config.sampling.max_tokens or config.task.max_episode_tokens else 0


def actor_members(config: Config, samplers: int) -> int:
    """Maximum episodes that an actor runs concurrently: an equal share of those of all samplers, rounded up.

    It is at least a group, also where few samplers are left: an actor leases whole groups. 0 without samplers.
    """
    share = math.ceil(samplers * sampler_members(config) / config.placement.actors)
    return max(share, config.schedule.members_per_group) if samplers else 0


def slots_of_actor(config: Config) -> int:
    """An actor's share of the slots of a sampler, rounded up."""
    return math.ceil(config.sampler.slots / config.placement.actors)


def memory_fractions(config: Config) -> dict[str, float]:
    """Fraction of a GPU's memory by role, for roles that share GPUs."""
    shares = {
        "learner": config.placement.learner_memory_fraction,
        "evaluator": config.placement.evaluator_memory_fraction,
    }
    others = config.placement.sampler_memory_fraction
    return {name: shares.get(name.partition("-")[0], others) for name in roles_with_devices(config)}


def limits_cache(config: Config) -> bool:
    """True if a sampler's KV cache may have fewer pages than all its slots can need."""
    return bool(config.sampler.cache_pages or config.sampler.memory_fraction)


def room_of_sampler(config: Config) -> tuple[int, float]:
    """Slots of a sampler, and tokens in all its pages; infinite if `sampler.cache_pages` does not limit them."""
    sampler, pages = config.sampler, config.sampler.cache_pages
    return sampler.slots, pages * page_size(sampler.page_tokens, cache_tokens(config)) if pages else math.inf


def check_cache(config: Config, longest: int) -> None:
    """Raise ConfigError if the keys of the KV cache contradict one another, or a request of `longest` tokens does not
    fit the pages of one shard of slots with a copy of its prompt's last page.
    """
    sampler, fraction = config.sampler, config.sampler.memory_fraction
    if fraction and sampler.cache_pages:
        reason = f"sampler.cache_pages = {sampler.cache_pages} sets the size of the KV cache, too"
        raise ConfigError("sampler.memory_fraction", fraction, reason, "Set one of them to 0.")
    if config.placement.colocated and sampler.count * fraction >= 1:
        reason = f"{sampler.count} samplers share the devices with the learner (placement.colocated)"
        raise ConfigError("sampler.memory_fraction", fraction, reason, f"Set it below {1 / sampler.count:.2g}.")
    if not sampler.cache_pages:
        return
    page_tokens = page_size(sampler.page_tokens, longest)
    shards = sampler.mesh.shards
    needed = shards * (math.ceil(longest / page_tokens) + 1)
    if sampler.cache_pages < needed:
        raise ConfigError(
            "sampler.cache_pages",
            sampler.cache_pages,
            f"a request of {longest} tokens alone needs {needed} pages of {page_tokens} tokens",
            f"Set it to {needed} or more, or to 0.",
        )


def age_limiter(config: Config) -> AgeLimiter:
    """Limiter that the store uses; ConfigError for a schedule that deadlocks."""
    s = config.schedule
    return AgeLimiter(
        s.alpha, s.groups_per_step, s.redundant_groups, s.publish_every, s.buffer_groups, s.mode == "interval"
    )


def episode_tokens(config: Config) -> int:
    """Maximum tokens of an episode: of the conversation, or of one prompt and its answer."""
    return config.task.max_episode_tokens or config.task.max_prompt_tokens + config.sampling.max_tokens


def answer_tokens(config: Config) -> int:
    """Maximum tokens of one answer within an episode."""
    return min(config.sampling.max_tokens, episode_tokens(config))


def request_tokens(config: Config) -> int:
    """Maximum tokens of a single request: the longest prompt and its answer."""
    return longest_prompt(config) + config.sampling.max_tokens


def longest_prompt(config: Config) -> int:
    """Tokens of the longest prompt that an engine for single requests has room for."""
    return max(config.task.max_prompt_tokens, *config.sampler.prefill_buckets)


def cache_tokens(config: Config) -> int:
    """KV cache length of a request, in tokens: that of the longest episode."""
    return max(episode_tokens(config), config.sampler.prefill_buckets[-1])


def sample_tokens(learner: LearnerConfig) -> int:
    """Maximum tokens of a training sample: a row and the shared prompt before it."""
    return learner.shared_prompt_tokens + learner.row_tokens


def micro_batch_tokens(learner: LearnerConfig) -> int:
    """Tokens of a full micro-batch, padding included."""
    return learner.micro_batch_rows * learner.row_tokens


def room_of_member(learner: LearnerConfig) -> tuple[int, int]:
    """Tokens of the row into which a member must fit, and of a first prompt that is kept apart from it."""
    return learner.row_tokens, learner.shared_prompt_tokens


def max_message_bytes(config: Config) -> int:
    """Maximum size of an RPC message between processes of the run."""
    return config.store.max_message_mb * 2**20


def is_compact(task: TaskConfig) -> bool:
    """True if prompts leave out the rules and instructions of the task."""
    return task.prompt_style == "compact"


def page_size(page_tokens: int, longest: int) -> int:
    """Tokens per page of the KV cache: `page_tokens`, or for 0 a default for requests of up to `longest` tokens."""
    return page_tokens or min(64, math.ceil(longest / 8) * 8)


def item_ranges(config: Config) -> dict[str, tuple[int, int]]:
    """Ranges [first, end) of the items of a generated dataset, by the key of their start.

    Training and held-out ranges are four times as large as needed, because repeated questions are skipped.
    """
    train = 4 * (config.schedule.steps + 2) * (config.schedule.groups_per_step + config.schedule.redundant_groups)
    sizes = {
        "task.train_start": train,
        "task.heldout_start": 4 * config.task.heldout_items,
        "sft.start": config.sft.steps * config.sft.batch,
    }
    starts = {
        "task.train_start": config.task.train_start,
        "task.heldout_start": config.task.heldout_start,
        "sft.start": config.sft.start,
    }
    return {key: (start, start + sizes[key]) for key, start in starts.items()}
