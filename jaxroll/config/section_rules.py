"""Prompts and algorithm as the config describes them, and the rules on both. The first broken one is a ConfigError."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from jaxroll.config import derived
from jaxroll.config.derived import ACROSS_GROUPS, OF_TURNS, PRESETS, Preset, episode_tokens, is_custom, preset, settled
from jaxroll.config.parsing import (
    FILES,
    HELDOUT,
    SOURCE_ITEMS,
    about,
    evaluation_set,
    every_part,
    nearest,
    opening_messages,
    samples_of,
    task_parts,
)
from jaxroll.config.rewards import check_no_remote, check_shaping
from jaxroll.config.schema import Config, LearnerConfig
from jaxroll.errors import ConfigError
from jaxroll.policy import selection
from jaxroll.policy.routing import Pools

_KL_REASONS = {
    ("loss", "k1"): "its gradient is zero in expectation, so it would only add noise",
    ("reward", "k2"): "as a reward it has not the gradient of the divergence",
    ("reward", "k3"): "as a reward it has not the gradient of the divergence",
}


def _check_agent(config: Config) -> None:
    """Refuse an agent without its program, a program without its environment, and learners of one conversation."""
    task, learner = config.task, settled(config.learner)
    if (task.env == "agent") != bool(task.agent):
        remedy = "Set task.env to 'agent' and task.agent to its program, or neither."
        raise ConfigError("task.agent", task.agent, f"task.env is {task.env!r}", remedy)
    for part in every_part(config):
        own = sorted(part.given & {"env", "extract", "reward", "reward_args"})
        if own and "agent" in (task.env, part.task.env):
            reason = "an agent plays all sources of a run, by one program and for one reward"
            value, remedy = getattr(part.task, own[0]), "Leave it out, or use another environment."
            raise ConfigError(f"{part.key}.{own[0]}", value, reason, remedy)
        if task.agent and part.task.max_turns:
            reason, remedy = "the program of an agent decides how often it calls the model", "Leave it out."
            key = part.key if "max_turns" in part.given else "task"
            raise ConfigError(f"{key}.max_turns", part.task.max_turns, reason, remedy)
    if not task.agent:
        if task.agent_limit_s != type(task)().agent_limit_s:
            raise ConfigError("task.agent_limit_s", task.agent_limit_s, "there is no task.agent", "Leave it out.")
        return
    why = "the environment agent has members of several conversations"
    _refuse("learner.advantage", learner.advantage, ((learner.advantage == "gae", why, "Use one without a critic."),))
    _refuse("learner.algorithm", learner.algorithm, ((learner.algorithm == "dpo", why, "Use one without pairs."),))
    _refuse("learner.routing_replay", True, ((learner.routing_replay, why, "Set it to False."),))


def check_places(config: Config) -> None:
    """Check the virtual clock, hosts of a sampler, samplers of the learner, relays, least number, and pools."""
    _check_clock(config)
    _check_sampler_hosts(config)
    _check_learner_samplers(config)
    _check_relay(config)
    _check_least_count(config)
    _check_pools(config)


def _check_clock(config: Config) -> None:
    """With a virtual clock, refuse settings that need another process."""
    agent, port, run = config.task.agent, config.sampler.http_port, "run.deterministic"
    reason = f"with {run} all roles are one process, whose clock waits for no other"
    for key, value, none, refused in (
        ("placement.colocated", config.placement.colocated, True, not config.placement.colocated),
        ("transfer.channel", config.transfer.channel, "auto", config.transfer.channel not in ("auto", "device")),
        ("task.agent", agent, "''", bool(agent)),
        ("sampler.http_port", port, -1, port >= 0),
    ):
        if config.run.deterministic and refused:
            raise ConfigError(key, value, reason, f"Set it to {none}, or {run} to False.")
    if config.run.deterministic:
        check_no_remote(config, reason, f"{run} to False")


def _refuse(key: str, value: object, cases: Iterable[tuple[bool, str, str]]) -> None:
    """Raise ConfigError for the first case that is true: (refused, reason, remedy)."""
    for refused, reason, remedy in cases:
        if refused:
            raise ConfigError(key, value, reason, remedy)


def several_hosts(config: Config) -> list[tuple[str, int]]:
    """The keys of the roles that have several hosts, with their number."""
    counts = {"learner": config.placement.learner_hosts, "sampler": config.placement.sampler_hosts}
    return [(f"placement.{role}_hosts", count) for role, count in counts.items() if count > 1]


def _check_sampler_hosts(config: Config) -> None:
    """Refuse hosts of a sampler that do not share its devices, or would not agree on the size of its cache."""
    hosts, devices, sampler = config.placement.sampler_hosts, config.sampler.mesh.devices, config.sampler
    if hosts > 1:
        uneven = f"each host has as many devices as the others, and sampler.mesh has {devices}"
        one = "placement.colocated has one process for all that use devices"
        memory = "the hosts would not find the same number of pages with sampler.memory_fraction"
        _refuse("placement.sampler_hosts", hosts, (
            (devices % hosts > 0, uneven, "Set it to a divisor of that, or make the mesh larger."),
            (config.placement.colocated, one, "Set it to 1, or placement.colocated to False."),
            (sampler.memory_fraction > 0, memory, "Set it to 1, or sampler.cache_pages in place of the fraction."),
        ))  # fmt: skip


def _check_learner_samplers(config: Config) -> None:
    """Refuse samplers on the learner's devices where no others are, or where they would not fit or not leave."""
    placement, sampler, schedule = config.placement, config.sampler, config.schedule
    if not (count := placement.learner_samplers):
        return
    devices, room, few = count * sampler.mesh.devices, config.learner.mesh.devices, config.sampling.max_tokens // 2
    for refused, reason, remedy in (
        (placement.colocated, "all samplers are on them already", "placement.colocated to False"),
        (schedule.alpha > 0, "they sample for synchronous steps", "schedule.mode to sync"),
        (schedule.mode == "async_controller", "its learner waits for suspended samplers", "schedule.mode to sync"),
        (sampler.count <= count, "sampler.count includes these, and another one", f"sampler.count to {count + 1}"),
        (not derived.flush_tokens(config), "rollouts go on from flushed tokens", f"sampler.flush_tokens to {few}"),
        (devices > room, f"they need {devices} devices, and learner.mesh has {room}", "make sampler.mesh smaller"),
        (sampler.dispatches_in_flight > 1, "they take turns with the learner", "sampler.dispatches_in_flight to 1"),
        (placement.actors > 0, "members of actors are not continued elsewhere", "placement.actors to 0"),
        (sampler.least_count > 0, "the run does not plan with them", "sampler.least_count to 0"),
        (sampler.http_port >= 0, "clients need samplers that stay", "sampler.http_port to -1"),
        (sampler.memory_fraction > 0, "the learner has a part of the memory", "sampler.memory_fraction to 0"),
        (bool(placement.pools), "a pool might lose its samplers", "placement.pools to {}"),
        *((True, "they are in one process", f"{key} to 1") for key, _ in several_hosts(config)),
    ):
        if refused:
            raise ConfigError("placement.learner_samplers", count, reason, f"Set it to 0, or {remedy}.")


def _check_relay(config: Config) -> None:
    """Refuse relays where no sampler receives over the `tcp` channel."""
    transfer = config.transfer
    if transfer.relay != "none":
        no_tcp = f"relays serve over the tcp channel, and transfer.channel is {transfer.channel!r}"
        one = "placement.colocated has one process, which sends nothing"
        _refuse("transfer.relay", transfer.relay, (
            (transfer.channel != "tcp", no_tcp, "Set transfer.channel to tcp, or transfer.relay to none."),
            (config.placement.colocated, one, "Set it to none, or placement.colocated to False."),
        ))  # fmt: skip


def _check_least_count(config: Config) -> None:
    """Refuse to plan the number of samplers where one cannot leave alone, or others depend on it."""
    sampler, placement, remedy = config.sampler, config.placement, "Set it to 0, or"
    if least := sampler.least_count:
        more = f"the run starts with sampler.count = {sampler.count}"
        _refuse("sampler.least_count", least, (
            (0 < sampler.count < least, more, f"Set it to {sampler.count} or less, or to 0."),
            (placement.colocated, "no sampler can leave one process", f"{remedy} placement.colocated to False."),
            (placement.actors > 0, "actors lease the work of all samplers", f"{remedy} placement.actors to 0."),
            (bool(placement.pools), "a pool might lose its samplers", f"{remedy} leave placement.pools out."),
            (sampler.http_port >= 0, "clients need samplers that stay", f"{remedy} sampler.http_port to -1."),
        ))  # fmt: skip


def _check_pools(config: Config) -> None:
    """Refuse malformed pools, and pools and leases that need another order of claims or several samplers."""
    order, first, remedy = config.schedule.order, config.schedule.lease_first, "Set schedule.order to lease_order."
    why = f"with schedule.order = {order!r} claims do not take groups in the order of their prompts"
    _refuse("schedule.lease_first", first, ((first != "oldest" and order != "lease_order", why, remedy),))
    if pools(config):
        one = (config.placement.colocated, "placement.colocated has one sampler", "Leave it out.")
        _refuse("placement.pools", config.placement.pools, ((order != "lease_order", why, remedy), one))


def check_flushes(config: Config) -> None:
    """Refuse flushes where unfinished answers cannot move to another sampler."""
    actors, swap, remedy = config.placement.actors, config.schedule.weight_swap, "Set sampler.flush_tokens to 0, or"
    of_actors = (swap == "trajectory" and actors > 0, "samplers do not know the members of actors", "Set it to drain.")
    _refuse("schedule.weight_swap", swap, (of_actors,))
    if tokens := config.sampler.flush_tokens:
        experts, lost = "the experts chosen for flushed tokens are not kept", "weight swaps discard unfinished answers"
        _refuse("sampler.flush_tokens", tokens, (
            (config.learner.routing_replay, experts, f"{remedy} learner.routing_replay to False."),
            (actors > 0, "members that actors play are not continued elsewhere", f"{remedy} placement.actors to 0."),
            (swap == "restart", lost, f"{remedy} schedule.weight_swap to another policy."),
        ))  # fmt: skip
    if period_s := config.schedule.repack_s:
        where = "members move only where new weights wait for them and their tokens are with the store"
        both = "Set schedule.weight_swap to trajectory and sampler.flush_tokens to 64, or schedule.repack_s to 0."
        one = "placement.colocated has one sampler, and no other can join"
        alone = config.placement.colocated and config.sampler.count == 1
        _refuse("schedule.repack_s", period_s, (
            (swap != "trajectory" or not config.sampler.flush_tokens, where, both),
            (alone, one, "Set it to 0, or sampler.count to 2 or more."),
        ))  # fmt: skip


def check_algorithm(config: Config) -> None:
    """Check the algorithm against its settings."""
    name = config.learner.algorithm
    if not is_custom(name) and name not in PRESETS:
        remedy = f"{nearest(name, tuple(PRESETS))} Your own is named package.module:name."
        raise ConfigError("learner.algorithm", name, "there is no such algorithm", remedy)
    row, learner = preset(name), settled(config.learner)
    _check_choices(config, row)
    _check_clips(learner)
    _check_unread(config.learner, learner)
    _check_adapters(config, learner)
    _check_shared_prompts(learner, row)
    _check_correction(learner)
    _check_reference(learner, row)
    _check_critic(learner)
    _check_streaming(config, learner, row)
    check_shaping(config)
    _check_best(config)
    _check_agent(config)
    least = 1 if learner.advantage in ACROSS_GROUPS else 2
    if config.schedule.group_size < least and not is_custom(name):
        reason = f"advantage {learner.advantage!r} compares the members of a group"
        raise ConfigError("schedule.group_size", config.schedule.group_size, reason, "Set it to 2 or more.")


def _check_choices(config: Config, row: Preset) -> None:
    """Every key that chooses among words must choose one that this algorithm has."""
    learner = config.learner
    name = learner.algorithm
    levels = ("token", "sequence") if settled(learner).correction == "tis" else row.levels
    for key, value, allowed in (
        ("advantage", learner.advantage, row.advantages),
        ("aggregation", learner.aggregation, row.aggregations),
        ("correction", learner.correction, row.corrections),
        ("ratio_level", learner.ratio_level, levels),
    ):
        if value != "auto" and value not in allowed:
            words = " or ".join(map(repr, allowed)) or "'auto'"
            raise ConfigError(f"learner.{key}", value, f"algorithm {name!r} does not go with it", f"Set it to {words}.")
    if config.schedule.alpha > 0 and learner.correction == "none":
        reason = f"alpha = {config.schedule.alpha:g} would train on stale samples"
        remedy = "Leave it at 'auto', set it to 'decoupled' or 'tis', or schedule.alpha to 0."
        raise ConfigError("learner.correction", "none", reason, remedy)


def _check_clips(learner: LearnerConfig) -> None:
    name = learner.algorithm
    if learner.clip_low > 1 or (learner.clip_low == 1 and name != "cispo" and not is_custom(name)):
        reason = "a ratio cannot fall below 0"
        raise ConfigError("learner.clip_low", learner.clip_low, reason, "Set it below 1 (0.2 is usual).")
    if 0 < learner.dual_clip <= 1:
        reason = "would bound the loss of samples that are on policy"
        raise ConfigError("learner.dual_clip", learner.dual_clip, reason, "Set it above 1 (3 is usual), or to 0.")
    if learner.dual_clip and not (is_custom(name) or _clips_gains(learner)):
        reason = "this loss has no clip that could be doubled"
        raise ConfigError("learner.dual_clip", learner.dual_clip, reason, "Set it to 0.")


def _check_unread(given: LearnerConfig, learner: LearnerConfig) -> None:
    """Refuse numbers that the chosen algorithm does not read; `given` is the section as it was written."""
    usual, name = LearnerConfig(), learner.algorithm
    for key, reads, by in (
        ("positive_weight", name == "topr", "algorithm 'topr'"),
        ("negative_weight", name == "topr", "algorithm 'topr'"),
        ("dpo_beta", name == "dpo", "algorithm 'dpo'"),
        ("turn_discount", learner.advantage in OF_TURNS, "advantage 'gigpo' or 'segment_return'"),
        ("step_weight", learner.advantage == "gigpo", "advantage 'gigpo'"),
        ("correction_floor", learner.correction == "icepop", "correction 'icepop'"),
        ("kl_in", learner.kl_coef > 0, "learner.kl_coef above 0"),
        ("kl_estimator", learner.kl_coef > 0, "learner.kl_coef above 0"),
        ("clip_low", _clips(learner), "a loss with a clip"),
        ("clip_high", _clips(learner), "a loss with a clip"),
        ("correction_cap", _caps(learner), "a correction, or a KL in the loss"),
        *(
            (key, learner.advantage == "gae", "advantage 'gae'")
            for key in ("critic_learning_rate", "value_clip", "gae_discount", "gae_lambda", "raw_advantages")
        ),
    ):
        if (value := getattr(given, key)) != getattr(usual, key) and not (reads or is_custom(name)):
            raise ConfigError(f"learner.{key}", value, f"nothing reads it; it needs {by}", "Leave it out.")


def _check_adapters(config: Config, learner: LearnerConfig) -> None:
    """The same for what adapters have, which are no part of the algorithm."""
    usual = LearnerConfig()
    for key in ("lora_alpha", "lora_targets", "lora_path", "lora_publish"):
        if (value := getattr(learner, key)) != getattr(usual, key) and not learner.lora_rank:
            remedy = "Set learner.lora_rank above 0 (8 is usual), or leave it out."
            raise ConfigError(f"learner.{key}", value, "nothing is adapted while learner.lora_rank is 0", remedy)
    if learner.lora_publish == "adapters" and config.transfer.channel == "tensorstore":
        reason = "by files everything would be written with every version"
        remedy = "Use transfer.channel=auto, or learner.lora_publish=merged."
        raise ConfigError("learner.lora_publish", "adapters", reason, remedy)


def _check_shared_prompts(learner: LearnerConfig, row: Preset) -> None:
    if learner.shared_prompt_rows != 1 and not learner.shared_prompt_tokens:
        reason = "nothing is shared, learner.shared_prompt_tokens is 0"
        remedy = "Leave it out, or set learner.shared_prompt_tokens to task.max_prompt_tokens."
        raise ConfigError("learner.shared_prompt_rows", learner.shared_prompt_rows, reason, remedy)
    if learner.shared_prompt_tokens and row.loss == "preference":
        reason = "dpo compares answers that lie side by side in a row, each with its prompt"
        raise ConfigError("learner.shared_prompt_tokens", learner.shared_prompt_tokens, reason, "Leave it out.")
    if learner.shared_prompt_tokens and learner.attention not in ("auto", "xla"):
        reason = "no fused kernel knows prompts that answers share"
        remedy = "Set it to 'xla', or leave learner.shared_prompt_tokens out."
        raise ConfigError("learner.attention", learner.attention, reason, remedy)


def _clips(learner: LearnerConfig) -> bool:
    """True if the (settled) learner's loss reads ε_l and ε_h: the clip of PPO, that of GSPO, or the bounds of CISPO."""
    return _clips_gains(learner) or preset(learner.algorithm).loss == "cispo"


def _clips_gains(learner: LearnerConfig) -> bool:
    """True if it bounds ratio times advantage, as PPO's and GSPO's do; `tis` puts another loss in their place."""
    return preset(learner.algorithm).loss in ("clipped", "gspo") and learner.correction != "tis"


def _caps(learner: LearnerConfig) -> bool:
    """True if the (settled) learner's loss reads c: to bound w or ρ, or the weight of a KL in the loss."""
    return learner.correction != "none" or (learner.kl_coef > 0 and learner.kl_in == "loss")


def _check_correction(learner: LearnerConfig) -> None:
    masks = learner.correction == "decoupled" or learner.algorithm == "cispo"
    if learner.correction_mode == "mask" and not masks and not is_custom(learner.algorithm):
        reason = f"correction {learner.correction!r} has no such mode"
        remedy = "Set it to 'truncate', or learner.correction to 'decoupled'."
        raise ConfigError("learner.correction_mode", "mask", reason, remedy)
    if learner.correction_cap < 1:
        remedy = "Set it to 1 or more, or to 0 for the usual value."
        raise ConfigError("learner.correction_cap", learner.correction_cap, "would weigh fresh samples down", remedy)
    if learner.correction == "icepop" and learner.correction_floor >= 1:
        remedy = "Set it below 1 (0.5 is usual)."
        raise ConfigError("learner.correction_floor", learner.correction_floor, "would drop fresh samples", remedy)


def _check_reference(learner: LearnerConfig, row: Preset) -> None:
    wants = row.needs_reference or learner.kl_coef > 0
    if wants and learner.reference == "none":
        why = "learner.kl_coef" if learner.kl_coef > 0 else f"algorithm {learner.algorithm!r}"
        raise ConfigError("learner.reference", "none", f"{why} compares with a reference model", "Set it to 'init'.")
    if learner.reference != "none" and not wants and not is_custom(learner.algorithm):
        remedy = "Set it to 'none', or learner.kl_coef above 0."
        raise ConfigError("learner.reference", learner.reference, "nothing compares with it", remedy)
    if learner.reference_offload and learner.reference == "none":
        reason = "there is no reference to offload"
        raise ConfigError("learner.reference_offload", True, reason, "Set it to false, or learner.reference to 'init'.")
    if learner.kl_coef > 0 and row.loss == "preference":
        reason = "dpo holds the policy near the reference by dpo_beta"
        raise ConfigError("learner.kl_coef", learner.kl_coef, reason, "Set it to 0.")
    if reason := _KL_REASONS.get((learner.kl_in, learner.kl_estimator)):
        right = "'k2' or 'k3'" if learner.kl_in == "loss" else "'k1'"
        reason = f"in the {learner.kl_in} {reason}"
        raise ConfigError("learner.kl_estimator", learner.kl_estimator, reason, f"Set it to {right}.")


def _check_streaming(config: Config, learner: LearnerConfig, row: Preset) -> None:
    """Refuse to stream where a gradient needs the whole batch, or no devices would be idle."""
    if not learner.streaming:
        return
    penalty = learner.kl_coef > 0 and learner.kl_in == "loss"
    of_batch = learner.advantage in ("batch_std", "group_mean_batch_std")
    remedy = "Set it to false."
    _refuse("learner.streaming", True, (
        (is_custom(learner.algorithm), "an algorithm of your own may compare the groups of a batch", remedy),
        (of_batch, f"advantage {learner.advantage!r} compares the groups of a batch", remedy),
        (learner.critic != "none", "a critic's advantages are standardized over the batch", remedy),
        (learner.kl_coef > 0 and not penalty, "a KL in the reward is computed for the whole batch", remedy),
        (penalty and row.credited_only, "the weight of the KL in the loss depends on the whole batch", remedy),
        (learner.router_loss > 0, "the loss of the routers is weighted by the tokens of the batch", remedy),
        (learner.minibatches > 1, "the batch decides which groups a minibatch has", "Set learner.minibatches to 1."),
        (config.schedule.order == "freshest_first", "a group may still be left out of the batch",
         "Use another schedule.order, or set it to false."),
        (config.schedule.mode == "interval", "sums in order of arrival differ in their last bits", remedy),
        (config.schedule.mode == "async_controller", "the batch comes before the weights are published", remedy),
        (config.placement.colocated, "samplers use the learner's devices, so none are idle", remedy),
    ))  # fmt: skip


def _check_critic(learner: LearnerConfig) -> None:
    if learner.advantage == "gae" and learner.critic == "none":
        raise ConfigError("learner.critic", "none", "advantage 'gae' needs the values of a critic", "Set it to 'init'.")
    if learner.critic != "none" and learner.advantage != "gae":
        reason = f"advantage {learner.advantage!r} asks for no values"
        remedy = "Set it to 'none', or learner.advantage to 'gae' (algorithm 'ppo' has it)."
        raise ConfigError("learner.critic", learner.critic, reason, remedy)
    if learner.critic_offload and learner.critic == "none":
        reason = "there is no critic to offload"
        raise ConfigError("learner.critic_offload", True, reason, "Set it to false, or learner.critic to 'init'.")


def _check_best(config: Config) -> None:
    """The metric of `keep_best` must exist, and every version that is measured must have a checkpoint."""
    learner, evaluator = config.learner, config.evaluator
    if not (metric := learner.keep_best):
        return
    known = selection.metrics_of(evaluator.sets)
    if metric not in known:
        raise ConfigError("learner.keep_best", metric, "no evaluation measures it", nearest(metric, known))
    if not evaluator.every:
        remedy = "Set it to a multiple of learner.checkpoint_every, or leave keep_best out."
        raise ConfigError("learner.keep_best", metric, "evaluator.every is 0: nothing is evaluated", remedy)
    if metric == selection.ACCURACY and not config.task.heldout_items and not config.task.mixture:
        reason = "task.heldout_items is 0"
        raise ConfigError("learner.keep_best", metric, reason, "Hold questions out, or name a set: sets.NAME.accuracy.")
    if evaluator.every % learner.checkpoint_every:
        one = f"there is one every {learner.checkpoint_every} steps"
        reason = f"with learner.keep_best an evaluated version needs a checkpoint, and {one}"
        remedy = "Set it to a multiple of learner.checkpoint_every."
        raise ConfigError("evaluator.every", evaluator.every, reason, remedy)
    if learner.checkpoint_every % config.schedule.publish_every:
        one = f"there is one every {config.schedule.publish_every} steps"
        reason = f"with learner.keep_best a checkpoint needs a published version, and {one}"
        remedy = "Set it to a multiple of schedule.publish_every."
        raise ConfigError("learner.checkpoint_every", learner.checkpoint_every, reason, remedy)
    if learner.checkpoints_kept < 2:
        reason = "the evaluator may still fetch the version before the newest (learner.keep_best)"
        raise ConfigError("learner.checkpoints_kept", learner.checkpoints_kept, reason, "Set it to 2 or more.")


# --- Prompts as the config describes them: tools, pools; their checks

# Variables of a chat template that JaxRoll sets itself.
RESERVED = ("messages", "tools", "add_generation_prompt")


def pools(config: Config) -> Pools:
    """The pools of samplers; falsy if there are none. ConfigError for malformed ones."""
    tags = [part.tag for part in task_parts(config.task)] if config.task.mixture else []
    return Pools.of(config.placement.pools, tags, config.sampler.count)


def check_prompts(config: Config) -> None:
    """Raise ConfigError for malformed messages and tools, and for settings that the tokenizer cannot show."""
    samples_of(config, HELDOUT)
    for name in config.evaluator.sets:
        if name == HELDOUT or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            remedy = f"Use letters, digits and '_.-', and another name than {HELDOUT}."
            raise ConfigError(f"evaluator.sets.{name}", name, "not a name for a set", remedy)
        evaluation_set(config, name)
        samples_of(config, name)
    if config.task.mixture and config.task.path:
        raise ConfigError("task.path", config.task.path, "task.mixture has the paths of its sources", "Leave it out.")
    for part in task_parts(config.task):
        last = max(part.task.train_start, part.task.heldout_start, config.sft.start)
        if config.task.mixture and last > SOURCE_ITEMS // 2:
            reason, remedy = "too large for a source of a mixture", f"Use starts of at most {SOURCE_ITEMS // 2}."
            raise ConfigError(f"{part.key}.train_start", part.task.train_start, reason, remedy)
    _check_sources(config)
    if config.task.source not in FILES and not config.task.mixture:
        for name in ("prompt_column", "answer_column", "answer_after"):
            if value := getattr(config.task, name):
                reason = f"task.source = {config.task.source!r} has no rows with columns"
                remedy = f"Set task.source to one of {', '.join(FILES)}, or leave it out."
                raise ConfigError(f"task.{name}", value, reason, remedy)
    if config.tokenizer.kind != "hf":
        _refuse_without_template("tokenizer.template_args", config.tokenizer.template_args)
        for part in every_part(config):
            with about(part):
                _refuse_without_template("task.tools", part.task.tools)
    for name in (name for name in RESERVED if name in config.tokenizer.template_args):
        remedy = "Use task.tools for tools." if name == "tools" else "Leave it out."
        key, value = f"tokenizer.template_args.{name}", config.tokenizer.template_args[name]
        raise ConfigError(key, value, "JaxRoll sets this variable itself", remedy)


def _refuse_without_template(key: str, value: object) -> None:
    if value:
        reason = "only chat templates read it, and tokenizer.kind is 'char'"
        raise ConfigError(key, value, reason, f"Set tokenizer.kind to 'hf', or leave {key} out.")


def _check_sources(config: Config) -> None:
    """Refuse malformed messages and tools of a source, limits above those of the run, and a name of two sources."""
    prompt_tokens, tokens = config.task.max_prompt_tokens, episode_tokens(config)
    opening_messages(config.task)
    envs: set[str] = set()
    for part in every_part(config):
        task = part.task
        first = task.max_prompt_tokens + config.sampling.max_tokens
        with about(part):
            opening_messages(task)
            for number, tool in enumerate(task.tools):
                remedy = "Write an object, as for OpenAI's API."
                _refuse(f"task.tools[{number}]", tool, ((not isinstance(tool, Mapping), "not a JSON schema", remedy),))
            if not part.given:
                continue
            larger, raised = "the engine has room for task.{} = {}", "Raise that key, or lower this one."
            _refuse("task.max_prompt_tokens", task.max_prompt_tokens, (
                (task.max_prompt_tokens > prompt_tokens, larger.format("max_prompt_tokens", prompt_tokens), raised),
            ))  # fmt: skip
            _refuse("task.max_episode_tokens", task.max_episode_tokens, (
                (task.max_episode_tokens > tokens, larger.format("max_episode_tokens", tokens), raised),
                (0 < task.max_episode_tokens < first, f"the first turn alone may have {first}", "Raise it, or set 0."),
            ))  # fmt: skip
        if "@" in part.env and part.env in envs:
            reason = "a source of task.mixture and a held-out set have this name"
            raise ConfigError(part.key, part.env.partition("@")[2], reason, "Give the source another label.")
        envs.add(part.env)
