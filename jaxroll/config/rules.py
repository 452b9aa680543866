"""The combinations of settings that must not run, each with its reason and remedy.

`check` judges a config by itself; `check_inventory` judges it against the devices of one machine. Both raise the first
ConfigError they find. Rules come in groups of one topic, so that a new rule has an obvious place.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace

from jaxroll.config.derived import (
    COLOCATED,
    age_limiter,
    channel_of,
    check_cache,
    device_processes,
    episode_tokens,
    item_ranges,
    memory_fractions,
    roles_with_devices,
    sampler_members,
    support_tokens,
)
from jaxroll.config.parsing import FILES, check_bounds, nearest, task_parts
from jaxroll.config.rewards import check_rewards
from jaxroll.config.schema import LORA_TARGETS, MODEL_SIZES, TRACKERS, Config, SamplingConfig
from jaxroll.config.section_rules import check_algorithm, check_flushes, check_places, check_prompts, several_hosts
from jaxroll.errors import ConfigError
from jaxroll.protocols import Supports

GPU_CONTEXT_MB = 512
GPU_SHARE = 0.9  # of one GPU's memory; the rest is the display, fragments, and other processes

MAX_MEMBER_MB = 8  # that a store takes: parsing malformed data blocks all calls for 8 ms per MB
TOKEN_BYTES = 16  # of a member on the wire: id, mask, log-prob, and what msgpack adds
LARGEST_VOCABULARY = 2**18  # of the models that can be trained; a support takes more bytes in a larger one


@dataclass(frozen=True)
class Inventory:
    """The devices of one machine, as found without starting JAX. Memory is of the smallest GPU."""

    platform: str  # cpu | gpu | tpu
    gpus: int = 0
    gpu_memory_mb: int = 0
    chips: int = 0


def check(config: Config) -> None:
    """Raise ConfigError for the first rule that `config` breaks."""
    for rule in (
        check_bounds,
        _check_names,
        check_prompts,
        _check_schedule,
        _check_shapes,
        _check_learner,
        _check_quantised,
        check_algorithm,
        check_flushes,
        check_places,
        _check_ranges,
        check_rewards,
        _check_deadlines,
        _check_fractions,
    ):
        rule(config)


def check_inventory(config: Config, inventory: Inventory) -> None:
    """Raise ConfigError when the roles of `config` do not fit the devices of `inventory`."""
    if inventory.platform == "tpu":
        _check_chips(config, inventory.chips)
    elif inventory.platform == "gpu":
        _check_gpus(config, inventory)


def _check_names(config: Config) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", config.run.name):
        raise ConfigError("run.name", config.run.name, "not a name", "Use 1 to 64 letters, digits, '-' and '_'.")
    for place, tracker in enumerate(config.run.trackers):
        if tracker not in TRACKERS:
            raise ConfigError(f"run.trackers[{place}]", tracker, "no such tracker", nearest(str(tracker), TRACKERS))
        if tracker in config.run.trackers[:place]:
            raise ConfigError(f"run.trackers[{place}]", tracker, "it is there twice", "Leave one out.")
    if config.model.size not in MODEL_SIZES and not config.model.path:
        raise ConfigError(
            "model.size", config.model.size, "unknown model size", nearest(config.model.size, MODEL_SIZES)
        )
    if config.tokenizer.kind == "hf" and not config.tokenizer.path:
        raise ConfigError(
            "tokenizer.path",
            "",
            "tokenizer.kind is 'hf' but there is no folder to read",
            "Set tokenizer.path to a folder with tokenizer.json, or kind to 'char'.",
        )
    for part in task_parts(config.task):
        task = part.task
        if task.source in FILES and not task.path:
            reason = f"{part.key}.source is {task.source!r} but there is no file to read"
            raise ConfigError(f"{part.key}.path", "", reason, f"Set {part.key}.path to the file.")
        if task.source in ("reasoning_gym", "game") and not task.name:
            raise ConfigError(
                f"{part.key}.name", "", f"no task of {task.source} named", "Name one, as 'spell_backward'."
            )
    _check_unread(config)


def _check_unread(config: Config) -> None:
    """Refuse keys that the chosen kind does not read."""
    channel, connections, used = config.transfer.channel, config.transfer.connections, channel_of(config)
    drafts = config.sampler.draft_tokens
    for key, given, switch, value, reads in (
        ("task.path", config.task.path, "task.source", config.task.source, FILES),
        ("tokenizer.path", config.tokenizer.path, "tokenizer.kind", config.tokenizer.kind, ("hf",)),
        ("transfer.path", config.transfer.path, "transfer.channel", channel, ("tensorstore",)),
        ("transfer.connections", connections if connections > 1 else 0, "transfer.channel", used, ("tcp",)),
        ("sampler.draft_model", config.sampler.draft_model, "sampler.draft_tokens", drafts, (drafts or 4,)),
    ):
        if given and value not in reads:
            remedy = f"Set {switch} to {' or '.join(map(repr, reads))}, or leave {key} out."
            raise ConfigError(key, given, f"nothing reads it while {switch} is {value!r}", remedy)


def _check_schedule(config: Config) -> None:
    schedule = config.schedule
    age_limiter(config)
    if schedule.rolling_updates and 0 < config.sampler.count <= schedule.rolling_updates:
        raise ConfigError(
            "schedule.rolling_updates",
            schedule.rolling_updates,
            f"sampler.count is {config.sampler.count}: all samplers may swap weights at the same time",
            "Set it below sampler.count, or to 0.",
        )
    # The learner claims a step ahead: a sampler that is one publication behind has two steps less, none at alpha = 1.
    if schedule.rolling_updates and schedule.alpha < schedule.publish_every + 1:
        raise ConfigError(
            "schedule.rolling_updates",
            schedule.rolling_updates,
            f"with alpha = {schedule.alpha:g} samplers run out of work during rolling updates",
            f"Raise schedule.alpha to publish_every + 1 = {schedule.publish_every + 1}, or set rolling_updates to 0.",
        )
    if schedule.rolling_updates and config.placement.actors:
        raise ConfigError(
            "schedule.rolling_updates",
            schedule.rolling_updates,
            "actors lease for the newest version of any sampler: the others would get no work",
            "Set it to 0, or placement.actors to 0.",
        )
    sampling = config.sampling
    if sampling.temperature <= 0:
        raise ConfigError(
            "sampling.temperature",
            sampling.temperature,
            "training needs samples, not one greedy answer",
            "Set it to a positive number; `generate` has a temperature of its own.",
        )
    if sampling.top_k > sampling.support_tokens:
        raise ConfigError(
            "sampling.top_k",
            sampling.top_k,
            f"the ids of sampling.support_tokens = {sampling.support_tokens} tokens are stored at most",
            "Lower it, or raise sampling.support_tokens.",
        )
    if sampling.support_tokens != SamplingConfig().support_tokens and not support_tokens(sampling):
        raise ConfigError(
            "sampling.support_tokens",
            sampling.support_tokens,
            "nothing truncates the distribution",
            "Set sampling.top_k, top_p or min_p, or leave it out.",
        )


def _check_shapes(config: Config) -> None:
    task, sampler, learner = config.task, config.sampler, config.learner
    first, budget = task.max_prompt_tokens + config.sampling.max_tokens, episode_tokens(config)
    if budget < first:
        raise ConfigError(
            "task.max_episode_tokens",
            budget,
            f"the first turn alone may have task.max_prompt_tokens + sampling.max_tokens = {first}",
            f"Set it to {first} or more, or to 0 for one turn.",
        )
    if _shares_every_prompt(config):
        if budget - task.max_prompt_tokens >= learner.row_tokens:
            raise ConfigError(
                "learner.row_tokens",
                learner.row_tokens,
                f"an answer and the last token of its prompt may have {config.sampling.max_tokens + 1}",
                f"Set it to {config.sampling.max_tokens + 1} or more.",
            )
    elif budget > learner.row_tokens:
        what = "task.max_episode_tokens" if budget > first else "task.max_prompt_tokens + sampling.max_tokens"
        raise ConfigError(
            "learner.row_tokens",
            learner.row_tokens,
            f"a sequence may have {what} = {budget} tokens",
            f"Set it to {budget} or more.",
        )
    if learner.algorithm == "dpo" and 2 * budget > learner.row_tokens:
        raise ConfigError(
            "learner.row_tokens",
            learner.row_tokens,
            f"two answers to a question share a row, and may have {2 * budget} tokens",
            f"Set it to {2 * budget} or more.",
        )
    if 0 < sampler.concurrent_episodes < config.schedule.members_per_group:
        raise ConfigError(
            "sampler.concurrent_episodes",
            sampler.concurrent_episodes,
            "a group is leased whole, and schedule.group_size + "
            f"redundant_members = {config.schedule.members_per_group}",
            f"Set it to {config.schedule.members_per_group} or more, or to 0.",
        )
    _check_actors(config)
    _check_colocated(config)
    buckets = sampler.prefill_buckets
    if not buckets or any(a >= b for a, b in itertools.pairwise(buckets)) or buckets[0] < 1:
        raise ConfigError(
            "sampler.prefill_buckets",
            buckets,
            "bucket lengths must be positive and increasing",
            "Write for example [16, 32].",
        )
    check_cache(config, max(budget, buckets[-1]))
    token_bytes = TOKEN_BYTES + Supports.worst_bytes(support_tokens(config.sampling), LARGEST_VOCABULARY)
    member_mb = token_bytes * budget / 2**20
    if member_mb > MAX_MEMBER_MB:
        lower = " Or lower sampling.support_tokens or top_k." if token_bytes > TOKEN_BYTES else ""
        what = f"a member of {budget} tokens may have {math.ceil(member_mb)} MB, the store takes {MAX_MEMBER_MB}"
        most = MAX_MEMBER_MB * 2**20 // token_bytes
        raise ConfigError(
            "sampling.max_tokens",
            config.sampling.max_tokens,
            what,
            f"Let an episode have at most {most} tokens.{lower}",
        )
    if member_mb > config.store.max_message_mb:
        raise ConfigError(
            "store.max_message_mb",
            config.store.max_message_mb,
            f"a member of {budget} tokens needs messages of {math.ceil(member_mb)} MB",
            f"Set it to {math.ceil(member_mb)} or more.",
        )
    for key, mesh in (("sampler.mesh", config.sampler.mesh), ("evaluator.mesh", config.evaluator.mesh)):
        if mesh.sequence > 1:
            raise ConfigError(
                f"{key}.sequence",
                mesh.sequence,
                "an engine does not divide the tokens of a sequence",
                "Set it to 1; mesh.tensor divides the heads of its KV cache.",
            )
    for answers in (1, learner.shared_prompt_rows):  # of the warm start, and of RL
        row = learner.shared_prompt_tokens + learner.row_tokens * answers
        if row % learner.mesh.sequence:
            raise ConfigError(
                "learner.mesh.sequence",
                learner.mesh.sequence,
                f"does not divide the {row} tokens of a row",
                "Use a divisor, or change learner.row_tokens.",
            )
    for key, rows, mesh, of in (
        ("learner.micro_batch_rows", learner.micro_batch_rows, learner.mesh, learner.shared_prompt_rows),
        ("sampler.slots", sampler.slots, sampler.mesh, 1),
        ("evaluator.slots", config.evaluator.slots, config.evaluator.mesh, 1),
    ):
        shards = mesh.shards
        if rows % (shards * of):
            up, shared = (
                math.ceil(rows / (shards * of)) * shards * of,
                " * learner.shared_prompt_rows" if of > 1 else "",
            )
            raise ConfigError(
                key,
                rows,
                f"not divisible by the mesh's data * fsdp * expert{shared} = {shards * of}",
                f"Set it to {up}.",
            )


def _check_actors(config: Config) -> None:
    """True if there is work enough for so many actors: each must hold a whole group."""
    actors, group = config.placement.actors, config.schedule.members_per_group
    count, each = max(1, config.sampler.count), sampler_members(config)  # the first that joins, if all join later
    most = count * each // group
    if actors > most:
        raise ConfigError(
            "placement.actors",
            actors,
            f"the {count} * {each} members in flight are divided among them, and each leases whole groups of {group}",
            f"Set it to {most} or less, or raise sampler.concurrent_episodes.",
        )


def _check_colocated(config: Config) -> None:
    """Refuse options that need separate processes together with one process for all roles."""
    placement, count, mode = config.placement, config.sampler.count, config.schedule.mode
    flights = config.sampler.dispatches_in_flight
    for key, value, refused, allowed in (
        ("placement.learner_hosts", placement.learner_hosts, placement.learner_hosts > 1, "1"),
        ("placement.actors", placement.actors, placement.actors > 0, "0"),
        ("sampler.count", count, count < 1, "1 or more"),  # none can join
        ("schedule.mode", mode, mode == "async_controller", "async"),  # its learner waits for samplers elsewhere
        ("sampler.dispatches_in_flight", flights, flights > 1, "1"),  # roles take turns on the devices
    ):
        if placement.colocated and refused:
            reason = "placement.colocated has one process for all that use devices"
            raise ConfigError(key, value, reason, f"Set it to {allowed}, or placement.colocated to False.")
    if config.transfer.channel == "device" and not placement.colocated:
        raise ConfigError(
            "transfer.channel",
            "device",
            "learner and samplers are processes of their own",
            "Set it to auto, or placement.colocated to True.",
        )


def _shares_every_prompt(config: Config) -> bool:
    """True if a row holds answers only: an episode is one question and its answer, and there is room for its prompt.

    The last token of a prompt lies with each answer. Of several turns the first prompt may be short, and the rest long.
    """
    return (
        config.learner.shared_prompt_tokens >= config.task.max_prompt_tokens - 1 and not config.task.max_episode_tokens
    )


def _check_learner(config: Config) -> None:
    learner, groups = config.learner, config.schedule.groups_per_step
    if learner.mesh.devices % (hosts := config.placement.learner_hosts):
        raise ConfigError(
            "placement.learner_hosts",
            hosts,
            f"each host has as many devices as the others, and learner.mesh has {learner.mesh.devices}",
            "Set it to a divisor of that, or make the mesh larger.",
        )
    if groups % learner.minibatches:
        raise ConfigError(
            "learner.minibatches",
            learner.minibatches,
            f"does not divide schedule.groups_per_step = {groups}",
            "Set it to a divisor (1 is one optimizer step per claim).",
        )
    unknown = sorted(set(learner.lora_targets) - set(LORA_TARGETS))
    if unknown or not learner.lora_targets:
        raise ConfigError(
            "learner.lora_targets",
            learner.lora_targets,
            f"no parameter {unknown[0]!r} to adapt" if unknown else "nothing to adapt",
            f"Use some of {', '.join(LORA_TARGETS)}, and lora_rank = 0 for none.",
        )
    if learner.optimizer_offload and not learner.scan_layers:
        raise ConfigError(
            "learner.optimizer_offload",
            True,
            "without layers in a loop the update would take all moments to the devices at once",
            "Set learner.scan_layers to true, or this to false.",
        )
    if 0 < learner.decay_steps <= learner.warmup_steps:
        raise ConfigError(
            "learner.decay_steps",
            learner.decay_steps,
            f"ends before the warm-up of {learner.warmup_steps} steps",
            f"Set it above {learner.warmup_steps}, or to 0 for a constant rate.",
        )


def _check_quantised(config: Config) -> None:
    """A quantized sampler is another policy than the learner's, even for fresh samples."""
    for key, dtype in (("kv_dtype", config.sampler.kv_dtype), ("weight_dtype", config.sampler.weight_dtype)):
        if dtype and config.learner.correction == "none":
            reason = f"sampler.{key} is {dtype!r}, so samplers draw from another policy than the one that is trained"
            remedy = f"Leave it at 'auto', set it to 'decoupled' or 'tis', or sampler.{key} to ''."
            raise ConfigError("learner.correction", "none", reason, remedy)


def _check_ranges(config: Config) -> None:
    """Procedural items are numbered; train, warm start and held-out ranges must not touch (docs/design.md, 16)."""
    if config.evaluator.every and config.task.heldout_items == 0:
        raise ConfigError(
            "task.heldout_items",
            0,
            "the evaluator has nothing to evaluate on",
            "Set it to 512, or evaluator.every to 0.",
        )
    for part in task_parts(config.task):
        # A limited number of games is divided like the rows of a file.
        if part.task.source in ("reasoning_gym", "game") and "games" not in part.task.args:
            _check_item_ranges(replace(config, task=part.task))


def _check_item_ranges(config: Config) -> None:
    spans = item_ranges(config)
    for a, b in (
        ("task.heldout_start", "task.train_start"),
        ("task.heldout_start", "sft.start"),
        ("sft.start", "task.train_start"),
    ):
        (a0, a1), (b0, b1) = spans[a], spans[b]
        if max(a0, b0) < min(a1, b1):
            raise ConfigError(
                a,
                a0,
                f"its items {a0}..{a1 - 1} overlap those of {b} ({b0}..{b1 - 1})",
                "Move them apart, as in the defaults.",
            )


def _check_deadlines(config: Config) -> None:
    """Pairs of times of which the first must be the longer one, or the second never comes into its own."""
    store, supervisor = config.store, config.supervisor
    shrinks = config.schedule.straggler == "shrink"
    for key, longer, other, shorter, why in (
        ("store.lease_s", store.lease_s, "store.rpc_deadline_s", store.rpc_deadline_s,
         "a lease would end while the call that renews it is under way"),
        ("store.stall_abort_s", store.stall_abort_s, "store.stall_s", store.stall_s,
         "a stall is named before it ends a run"),
        ("store.stall_abort_s", store.stall_abort_s, "store.lease_s", store.lease_s,
         "the work of a dead sampler is given to another when its lease ends"),
        ("store.stall_abort_s", store.stall_abort_s, "schedule.straggler_deadline_s",
         config.schedule.straggler_deadline_s if shrinks else 0.0, "stragglers are given up before the run is"),
    ):  # fmt: skip
        if longer <= shorter:
            raise ConfigError(key, longer, f"not longer than {other} = {shorter:g}", f"Raise it: {why}.")
    if supervisor.backoff_max_s < supervisor.backoff_s:
        raise ConfigError(
            "supervisor.backoff_max_s",
            supervisor.backoff_max_s,
            f"less than supervisor.backoff_s = {supervisor.backoff_s:g}",
            "Raise it.",
        )


def _check_fractions(config: Config) -> None:
    for name, share in memory_fractions(config).items():
        if share >= 1:
            key = f"placement.{name.partition('-')[0]}_memory_fraction"
            raise ConfigError(key, share, "a fraction of one GPU's memory", "Set it below 1.")


def _check_chips(config: Config, chips: int) -> None:
    wanted = device_processes(config)
    for key, hosts in several_hosts(config):
        remedy = "Set it to 1 here; launch/tpu_vm.sh starts a learner on a slice of several."
        raise ConfigError(key, hosts, "one process has all TPU chips of a host", remedy)
    total = sum(wanted.values())
    if chips < total:
        spelled = ", ".join(f"{name} {count}" for name, count in wanted.items())
        reason = f"{chips} TPU chip{'s' * (chips != 1)} here, {total} needed ({spelled}), and a chip holds one process"
        together = "placement.colocated = True (all of them in one process, sharing the devices), "
        together = together if chips >= max(roles_with_devices(config).values()) and len(wanted) > 1 else ""
        raise ConfigError(
            "placement.platform",
            "tpu",
            reason,
            f"Use {together}smaller meshes, evaluator.every = 0, a larger slice, or one slice per role "
            "(launch/tpu_vm.sh); `--config.placement.platform=cpu` runs on the CPU.",
        )
    for name, count in wanted.items():
        if count not in (1, 2, 4, 8):
            key = "learner" if name == COLOCATED else name.partition("-")[0]
            raise ConfigError(
                f"{key}.mesh",
                count,
                "TPU chips of one host are split by rectangles",
                "Use 1, 2, 4 or 8 devices per role.",
            )


def _check_gpus(config: Config, inventory: Inventory) -> None:
    wanted = device_processes(config)
    if inventory.gpus >= sum(wanted.values()):
        return
    spelled = ", ".join(f"{name} {count}" for name, count in wanted.items())
    for key, hosts in several_hosts(config):
        reason = f"of {inventory.gpus} GPUs its processes need {sum(wanted.values())} with the others ({spelled})"
        raise ConfigError(key, hosts, reason, "Set it to 1: they cannot share a GPU.")
    if inventory.gpus != max(wanted.values()) or config.placement.colocated:
        raise ConfigError(
            "placement.platform",
            "gpu",
            f"{inventory.gpus} GPUs here, {sum(wanted.values())} needed ({spelled})",
            "Use smaller meshes, or evaluator.every = 0; or a largest mesh of as many devices as there "
            "are GPUs: then all roles share them.",
        )
    shares = memory_fractions(config)
    contexts = GPU_CONTEXT_MB * len(shares) / inventory.gpu_memory_mb if inventory.gpu_memory_mb else 0.0
    total, limit = sum(shares.values()), GPU_SHARE - contexts
    if total > limit + 1e-9:
        raise ConfigError(
            "placement.learner_memory_fraction",
            config.placement.learner_memory_fraction,
            f"the fractions of {', '.join(shares)} sum to {total:.2f}; a GPU of "
            f"{inventory.gpu_memory_mb} MB leaves {limit:.2f} after {len(shares)} contexts",
            "Lower placement.*_memory_fraction, sampler.count, or set evaluator.every = 0; or "
            "placement.colocated = True: one process has one context and no fractions.",
        )
