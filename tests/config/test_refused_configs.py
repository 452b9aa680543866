"""Invalid configs: each is refused before a device is used, with key, value and a remedy."""

from __future__ import annotations

import pytest

from jaxroll import config
from jaxroll.config.rules import Inventory, check_inventory
from jaxroll.errors import ConfigError

# overrides, the key in the error, the value as shown, words of the reason or remedy
BAD = [
    pytest.param(["learner.lr=1e-3"], "learner.lr", "1e-3", "learner.learning_rate", id="unknown key, initials"),
    pytest.param(["learner.learning_rat=1"], "learner.learning_rat", "1", "learner.learning_rate", id="unknown key"),
    pytest.param(["learner.alpha=1"], "learner.alpha", "1", "schedule.alpha", id="key of another section"),
    pytest.param(["batch=1"], "batch", "1", "sft.batch", id="key without its section"),
    pytest.param(["lerner.substeps=1"], "lerner", "1", "learner", id="unknown section"),
    pytest.param(["learner=1"], "learner", "1", "a section", id="a section set"),
    pytest.param(["model.size.x=1"], "model.size.x", "1", "model.size", id="a value with keys"),
    pytest.param(["schedule.alpha=much"], "schedule.alpha", "much", "a number", id="not a number"),
    pytest.param(["schedule.steps=1.5"], "schedule.steps", "1.5", "a whole number", id="not whole"),
    pytest.param(["learner.shuffle_rewards=maybe"], "learner.shuffle_rewards", "maybe", "true or false", id="no bool"),
    pytest.param(["task.args=5"], "task.args", "5", "dict", id="not a dict"),
    pytest.param(["schedule.alpha=inf"], "schedule.alpha", "inf", "finite", id="infinite"),
    pytest.param(["sampler.prefill_buckets=8,x"], "sampler.prefill_buckets", "x", "whole number", id="bad tuple"),
    pytest.param(["model.size=tinny"], "model.size", "tinny", "'tiny'", id="unknown model"),
    pytest.param(["task.source=reasoning-gym"], "task.source", "reasoning-gym", "reasoning_gym", id="unknown source"),
    pytest.param(["learner.algorithm=grop"], "learner.algorithm", "grop", "'grpo'", id="unknown algorithm"),
    pytest.param(["tokenizer.kind=hf"], "tokenizer.path", "", "tokenizer.json", id="hf without a path"),
    pytest.param(["task.source=jsonl"], "task.path", "", "task.path", id="jsonl without a file"),
    pytest.param(["task.source=game", "task.name="], "task.name", "", "game", id="no game named"),
    pytest.param(["task.max_episode_tokens=20"], "task.max_episode_tokens", "20", "28", id="no room for a turn"),
    pytest.param(["task.max_episode_tokens=200"], "learner.row_tokens", "128", "200", id="no room for an episode"),
    pytest.param(["sampler.concurrent_episodes=7"], "sampler.concurrent_episodes", "7", "8", id="no room for a group"),
    pytest.param(["run.name=a/b"], "run.name", "a/b", "letters", id="bad name"),
    pytest.param(["learner.correction=none"], "learner.correction", "none", "schedule.alpha", id="uncorrected"),
    pytest.param(["schedule.buffer_groups=47"], "schedule.buffer_groups", "47", "48", id="buffer too small"),
    pytest.param(
        ["schedule.buffer_groups=50", "schedule.redundant_groups=3"], "schedule.buffer_groups", "50", "51",
        id="buffer without redundancy",
    ),
    pytest.param(["schedule.publish_every=3"], "schedule.publish_every", "3", "deadlock", id="published too rarely"),
    pytest.param(["schedule.rolling_updates=1"], "schedule.rolling_updates", "1", "below sampler.count",
                 id="rolling updates of one sampler"),
    pytest.param(
        ["schedule.rolling_updates=1", "sampler.count=2", "schedule.alpha=1.5"], "schedule.rolling_updates", "1",
        "publish_every + 1 = 2", id="rolling updates without work",
    ),
    pytest.param(
        ["schedule.rolling_updates=1", "sampler.count=2", "schedule.alpha=2", "placement.actors=1"],
        "schedule.rolling_updates", "1",
        "placement.actors", id="rolling updates with actors",
    ),
    pytest.param(["schedule.rolling_updates=-1"], "schedule.rolling_updates", "-1", "at least 0",
                 id="negative rolling updates"),
    pytest.param(["schedule.group_size=1"], "schedule.group_size", "1", "2 or more", id="group of one"),
    pytest.param(["schedule.steps=0"], "schedule.steps", "0", "at least 1", id="no steps"),
    pytest.param(["schedule.alpha=-1"], "schedule.alpha", "-1.0", "at least 0", id="negative alpha"),
    pytest.param(["sampler.slots=-4"], "sampler.slots", "-4", "at least 1", id="negative count"),
    pytest.param(["learner.mesh.fsdp=0"], "learner.mesh.fsdp", "0", "at least 1", id="empty mesh"),
    pytest.param(["sampling.temperature=0"], "sampling.temperature", "0.0", "positive", id="greedy training"),
    pytest.param(["sampling.top_k=40"], "sampling.top_k", "40", "generate", id="top-k in training"),
    pytest.param(["sampling.top_p=0.9"], "sampling.top_p", "0.9", "generate", id="top-p in training"),
    pytest.param(["learner.mesh.fsdp=3"], "learner.micro_batch_rows", "8", "9", id="rows do not divide"),
    pytest.param(["sampler.mesh.data=3"], "sampler.slots", "32", "33", id="slots do not divide"),
    pytest.param(["evaluator.mesh.data=3"], "evaluator.slots", "64", "66", id="evaluator's slots do not divide"),
    pytest.param(["learner.row_tokens=20"], "learner.row_tokens", "20", "28", id="sequence budget"),
    pytest.param(["sampler.page_tokens=8", "sampler.cache_pages=4"], "sampler.cache_pages", "4", "or more", id="pages"),
    pytest.param(["sampler.prefill_buckets=32,16"], "sampler.prefill_buckets", "(32, 16)", "increasing", id="order"),
    pytest.param(["sampler.prefill_buckets=()"], "sampler.prefill_buckets", "()", "(16, 32)", id="no bucket"),
    pytest.param(["learner.learning_rate=0"], "learner.learning_rate", "0.0", "positive", id="no learning"),
    pytest.param(["learner.clip_low=1.0"], "learner.clip_low", "1.0", "below 1", id="clip to nothing"),
    pytest.param(["placement.learner_hosts=2"], "placement.learner_hosts", "2", "divisor", id="hosts do not divide"),
    pytest.param(["placement.colocated=True", "placement.learner_hosts=2", "learner.mesh.fsdp=2"],
                 "placement.learner_hosts", "2", "one process", id="hosts in one process"),
    pytest.param(["placement.colocated=True", "placement.actors=1"], "placement.actors", "1", "one process",
                 id="actors with one process"),
    pytest.param(["learner.minibatches=5"], "learner.minibatches", "5", "24", id="minibatches do not divide"),
    pytest.param(["learner.correction=tis", "learner.correction_mode=mask"], "learner.correction_mode", "mask",
                 "'decoupled'", id="mode without its correction"),
    pytest.param(["learner.algorithm=gspo", "learner.correction=tis"], "learner.correction", "tis", "'decoupled'",
                 id="the correction of another algorithm"),
    pytest.param(["learner.algorithm=cispo", "learner.correction=decoupled"], "learner.correction", "decoupled",
                 "'auto'", id="corrected twice"),
    pytest.param(["learner.algorithm=cispo", "learner.correction=none"], "learner.correction", "none", "'auto'",
                 id="a correction that cannot be switched off"),
    pytest.param(["learner.advantage=best_worst"], "learner.advantage", "best_worst", "'group_std'", id="pairs, grpo"),
    pytest.param(["learner.algorithm=dpo", "learner.reference=init", "learner.advantage=gigpo"], "learner.advantage",
                 "gigpo", "'best_worst'", id="dpo without pairs"),
    pytest.param(["learner.algorithm=dpo", "learner.reference=init", "learner.aggregation=token_mean"],
                 "learner.aggregation", "token_mean", "'seq_mean_token_mean'", id="dpo by tokens"),
    pytest.param(["learner.algorithm=dpo"], "learner.reference", "none", "'init'", id="dpo without a reference"),
    pytest.param(["learner.algorithm=dpo", "learner.reference=init", "learner.row_tokens=50"], "learner.row_tokens",
                 "50", "56", id="too short for a pair"),
    pytest.param(["learner.algorithm=dpo", "learner.reference=init", "learner.kl_coef=0.1"], "learner.kl_coef", "0.1",
                 "dpo_beta", id="dpo held twice"),
    pytest.param(["learner.algorithm=dpo", "learner.reference=init", "learner.row_tokens=56",
                  "learner.shared_prompt_tokens=20"], "learner.shared_prompt_tokens", "20", "Leave it out",
                  id="dpo with one prompt"),
    pytest.param(["learner.shared_prompt_rows=4"], "learner.shared_prompt_rows", "4", "learner.shared_prompt_tokens",
                 id="nothing shared"),
    pytest.param(["learner.shared_prompt_tokens=20", "learner.attention=triton"], "learner.attention", "triton",
                 "'xla'",
                 id="a kernel for shared prompts"),
    pytest.param(["learner.shared_prompt_tokens=20", "learner.shared_prompt_rows=3"], "learner.micro_batch_rows", "8",
                 "9",
                 id="rows that share, divided"),
    pytest.param(["learner.shared_prompt_tokens=20", "learner.row_tokens=12"], "learner.row_tokens", "12", "13",
                 id="no room for an answer"),
    pytest.param(["learner.shared_prompt_tokens=15", "learner.row_tokens=13", "task.max_episode_tokens=28"],
                 "learner.row_tokens", "13", "28", id="several turns in the row of one answer"),
    pytest.param(["learner.shared_prompt_tokens=14", "learner.row_tokens=13"], "learner.row_tokens", "13", "28",
                 id="no room for the longest prompt"),
    pytest.param(["learner.shared_prompt_tokens=5", "learner.row_tokens=20"], "learner.row_tokens", "20", "28",
                 id="no room for a prompt that is not shared"),
    pytest.param(["learner.ratio_level=sequence"], "learner.ratio_level", "sequence", "'token'",
                 id="sequences for the clip"),
    pytest.param(["learner.algorithm=gspo", "learner.ratio_level=token"], "learner.ratio_level", "token", "'sequence'",
                 id="tokens for gspo"),
    pytest.param(["learner.algorithm=topr", "learner.correction_mode=mask"], "learner.correction_mode", "mask",
                 "'truncate'", id="mode without its algorithm"),
    pytest.param(["learner.correction_cap=0.5"], "learner.correction_cap", "0.5", "1 or more", id="cap below 1"),
    pytest.param(["learner.algorithm=icepop", "learner.correction_floor=1.0"], "learner.correction_floor", "1.0",
                 "below 1", id="floor above fresh samples"),
    pytest.param(["learner.correction_floor=0.4"], "learner.correction_floor", "0.4", "icepop", id="floor unread"),
    pytest.param(["learner.dual_clip=0.9"], "learner.dual_clip", "0.9", "above 1", id="dual clip on policy"),
    pytest.param(["learner.algorithm=cispo", "learner.dual_clip=3"], "learner.dual_clip", "3.0", "no clip",
                 id="dual clip without a clip"),
    pytest.param(["learner.negative_weight=0.5"], "learner.negative_weight", "0.5", "topr", id="topr's weight"),
    pytest.param(["learner.algorithm=rloo", "learner.step_weight=0.5"], "learner.step_weight", "0.5", "gigpo",
                 id="step weight unread"),
    pytest.param(["learner.turn_discount=0.9"], "learner.turn_discount", "0.9", "segment_return", id="discount unread"),
    pytest.param(["learner.turn_discount=1.1"], "learner.turn_discount", "1.1", "at most 1", id="discount above 1"),
    pytest.param(["learner.dpo_beta=0.2"], "learner.dpo_beta", "0.2", "'dpo'", id="beta unread"),
    pytest.param(["learner.kl_coef=0.1"], "learner.reference", "none", "'init'", id="kl without a reference"),
    pytest.param(["learner.reference=init"], "learner.reference", "init", "nothing compares", id="reference unread"),
    pytest.param(["learner.reference_offload=true"], "learner.reference_offload", "True", "no reference",
                 id="nothing to offload"),
    pytest.param(["learner.algorithm=ppo"], "learner.critic", "none", "'init'", id="ppo without a critic"),
    pytest.param(["learner.advantage=gae"], "learner.critic", "none", "'init'", id="gae without a critic"),
    pytest.param(["learner.critic=init"], "learner.critic", "init", "'gae'", id="a critic without a reader"),
    pytest.param(["learner.algorithm=mine:best", "learner.critic=init"], "learner.critic", "init", "'gae'",
                 id="a critic that a custom algorithm does not use"),
    pytest.param(["learner.algorithm=ppo", "learner.critic=init", "learner.advantage=group_std"], "learner.advantage",
                 "group_std", "'gae'", id="ppo by groups"),
    pytest.param(["learner.critic_offload=true"], "learner.critic_offload", "True", "no critic",
                 id="no critic to offload"),
    pytest.param(["learner.gae_lambda=0.9"], "learner.gae_lambda", "0.9", "advantage 'gae'", id="lambda unread"),
    pytest.param(["learner.value_clip=0.1"], "learner.value_clip", "0.1", "advantage 'gae'", id="value clip unread"),
    pytest.param(["learner.gae_lambda=1.1"], "learner.gae_lambda", "1.1", "at most 1", id="lambda above 1"),
    pytest.param(["learner.critic_learning_rate=0"], "learner.critic_learning_rate", "0.0", "positive",
                 id="a critic without a learning rate"),
    pytest.param(["learner.reference=init", "learner.kl_coef=1", "learner.kl_estimator=k1"], "learner.kl_estimator",
                 "k1", "'k2'", id="k1 as a loss"),
    pytest.param(["learner.kl_estimator=k3"], "learner.kl_estimator", "k3", "kl_coef", id="an estimator without kl"),
    pytest.param(["learner.reference=init", "learner.kl_coef=1", "learner.kl_in=reward", "learner.kl_estimator=k2"],
                 "learner.kl_estimator", "k2", "'k1'", id="k2 as a reward"),
    pytest.param(["learner.reference=init", "learner.kl_coef=1", "learner.kl_in=reward", "learner.kl_estimator=k3"],
                 "learner.kl_estimator", "k3", "'k1'", id="k3 as a reward"),
    *(pytest.param([f"learner.{word}" for word in (*algorithm.split(), f"{key}={value}")], f"learner.{key}", value,
                   "nothing reads it", id=f"{key} with {algorithm}")
      for algorithm, unread in {
          "correction=tis": ("clip_low", "clip_high"),
          "algorithm=topr": ("clip_low", "clip_high", "correction_cap"),
          "algorithm=raft": ("clip_low", "clip_high", "correction_cap"),
          "algorithm=dpo reference=init": ("clip_low", "clip_high", "correction_cap"),
          "algorithm=cispo": ("correction_cap",),
          "algorithm=raft reference=init kl_coef=0.1 kl_in=reward": ("correction_cap",),
      }.items()
      for key, value in (("clip_low", "0.1"), ("clip_high", "0.15"), ("correction_cap", "1.3")) if key in unread),
    pytest.param(["learner.correction=none", "schedule.alpha=0", "learner.correction_cap=1.3"],
                 "learner.correction_cap", "1.3", "nothing reads it", id="a cap without a correction"),
    pytest.param(["learner.lora_alpha=3"], "learner.lora_alpha", "3.0", "lora_rank", id="alpha without adapters"),
    pytest.param(["learner.lora_targets=attn.q"], "learner.lora_targets", "('attn.q',)", "lora_rank",
                 id="targets without adapters"),
    pytest.param(["learner.lora_publish=adapters"], "learner.lora_publish", "adapters", "lora_rank",
                 id="no adapters to send"),
    pytest.param(["learner.lora_rank=4", "learner.lora_publish=adapters", "transfer.channel=tensorstore"],
                 "learner.lora_publish", "adapters", "transfer.channel=auto", id="adapters by files"),
    pytest.param(["transfer.channel=device"], "transfer.channel", "device", "placement.colocated",
                 id="device channel between processes"),
    pytest.param(["learner.kl_in=reward"], "learner.kl_in", "reward", "kl_coef", id="no kl anywhere"),
    pytest.param(["learner.overlong_tokens=12"], "learner.overlong_tokens", "12", "below 12", id="all too long"),
    pytest.param(["learner.advantage=gigpo", "learner.shuffle_rewards=true"], "learner.shuffle_rewards", "True",
                 "group_std", id="turns shuffled"),
    pytest.param(["learner.decay_steps=3"], "learner.decay_steps", "3", "above 5", id="decay before warm-up"),
    pytest.param(["task.heldout_start=100"], "task.heldout_start", "100", "train_start", id="held-out in training"),
    pytest.param(["sft.start=10000100"], "task.heldout_start", "10000000", "sft.start", id="held-out in warm start"),
    pytest.param(["sft.start=50"], "sft.start", "50", "train_start", id="warm start in training"),
    pytest.param(["task.heldout_items=0"], "task.heldout_items", "0", "evaluator.every", id="nothing held out"),
    pytest.param(["run.seed=4294967296"], "run.seed", "4294967296", "at most 4294967295", id="giant seed"),
    pytest.param(["run.seed=-1"], "run.seed", "-1", "at least 0", id="negative seed"),
    pytest.param(["task.train_start=9300000000000000000"], "task.train_start", "9300000000000000000", "at most",
                 id="beyond all items"),
    pytest.param(["task.path=x.jsonl"], "task.path", "x.jsonl", "task.source", id="a file for another source"),
    pytest.param(["tokenizer.path=x"], "tokenizer.path", "x", "tokenizer.kind", id="tokenizer path for another kind"),
    pytest.param(["transfer.path=x"], "transfer.path", "x", "transfer.channel", id="transfer path for another channel"),
    pytest.param(["sampling.max_tokens=600000", "learner.row_tokens=700000"], "sampling.max_tokens", "600000", "10 MB",
                 id="a member larger than the store takes"),
    pytest.param(["store.max_message_mb=1", "sampling.max_tokens=70000", "learner.row_tokens=80000"],
                 "store.max_message_mb", "1", "2 MB", id="a member larger than a message"),
    pytest.param(["store.lease_s=0.1"], "store.lease_s", "0.1", "at least 1", id="tiny lease"),
    pytest.param(["store.lease_s=8"], "store.lease_s", "8.0", "store.rpc_deadline_s", id="lease shorter than a call"),
    pytest.param(["store.stall_abort_s=70", "store.lease_s=90"], "store.stall_abort_s", "70.0", "store.lease_s",
                 id="abort before a lease ends"),
    pytest.param(["store.stall_abort_s=100"], "store.stall_abort_s", "100.0", "schedule.straggler_deadline_s",
                 id="abort before stragglers"),
    pytest.param(["store.rpc_deadline_s=0.01"], "store.rpc_deadline_s", "0.01", "at least 1", id="no time for a call"),
    pytest.param(["transfer.deadline_s=0.5"], "transfer.deadline_s", "0.5", "at least 1", id="no time for weights"),
    pytest.param(["store.stall_abort_s=5"], "store.stall_abort_s", "5.0", "Raise", id="abort before the stall"),
    pytest.param(["supervisor.backoff_max_s=0.1"], "supervisor.backoff_max_s", "0.1", "backoff_s", id="back-off"),
    pytest.param(
        ["placement.sampler_memory_fraction=1.5"], "placement.sampler_memory_fraction", "1.5", "below 1", id="fraction"
    ),
]  # fmt: skip

BAD_HERE = [
    pytest.param([], Inventory("tpu", chips=1), "placement.platform", "a chip holds one process", id="one chip"),
    pytest.param([], Inventory("tpu", chips=1), "placement.platform", "placement.colocated = True", id="what to do"),
    pytest.param(["placement.colocated=True", "learner.mesh.fsdp=4"], Inventory("tpu", chips=2),
                 "placement.platform", "4 needed (colocated 4)", id="two chips, a mesh of four"),
    pytest.param(["placement.colocated=True", "learner.mesh.data=3", "learner.micro_batch_rows=9"],
                 Inventory("tpu", chips=8), "learner.mesh", "1, 2, 4 or 8", id="no rectangle in one process"),
    pytest.param(["placement.colocated=True", "learner.mesh.fsdp=4"], Inventory("gpu", 2, 80_000),
                 "placement.platform", "4 needed (colocated 4)", id="two GPUs, a mesh of four"),
    pytest.param([], Inventory("tpu", chips=2), "placement.platform", "3 needed", id="two chips, three roles"),
    pytest.param(
        ["learner.mesh.data=3", "learner.micro_batch_rows=9"], Inventory("tpu", chips=8), "learner.mesh",
        "1, 2, 4 or 8",
        id="no rectangle",
    ),
    pytest.param(["placement.learner_hosts=2", "learner.mesh.fsdp=2"], Inventory("gpu", 2, 80_000),
                 "placement.learner_hosts", "they cannot share", id="hosts share a GPU"),
    pytest.param(["placement.learner_hosts=2", "learner.mesh.fsdp=2"], Inventory("tpu", chips=8),
                 "placement.learner_hosts", "launch/tpu_vm.sh", id="hosts share a TPU host"),
    pytest.param(["sampler.count=3"], Inventory("gpu", 1, 80_000), "placement.learner_memory_fraction", "1.40",
                 id="memory fractions of one GPU"),
    pytest.param([], Inventory("gpu", 1, 8_000), "placement.learner_memory_fraction", "3 contexts", id="small GPU"),
    pytest.param(["learner.mesh.fsdp=2"], Inventory("gpu", 1, 80_000), "placement.platform", "4 needed",
                 id="one GPU, a mesh of two"),
    pytest.param([], Inventory("gpu", 2, 80_000), "placement.platform", "2 GPUs here", id="two GPUs, three roles"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "value", "words"), BAD)
def test_bad_config_is_refused(overrides: list[str], key: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(config.override(config.defaults().to_dict(), overrides))
    error = caught.value
    assert error.key.partition("[")[0] == key
    assert str(error.value) == value
    assert words in str(error) and value.strip("()").removesuffix(",") in str(error)  # a tuple is shown as a list
    assert error.remedy.endswith((".", "?"))


@pytest.mark.parametrize(("overrides", "inventory", "key", "words"), BAD_HERE)
def test_config_that_does_not_fit_the_machine_is_refused(
    overrides: list[str], inventory: Inventory, key: str, words: str
) -> None:
    parsed = config.parse(config.override(config.defaults().to_dict(), overrides))
    with pytest.raises(ConfigError) as caught:
        check_inventory(parsed, inventory)
    assert caught.value.key == key and words in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize(
    "inventory",
    [Inventory("cpu"), Inventory("tpu", chips=4), Inventory("gpu", 1, 16_000), Inventory("gpu", 3, 16_000)],
    ids=str,
)
def test_the_defaults_fit(inventory: Inventory) -> None:
    assert check_inventory(config.Config(), inventory) is None


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule.alpha=0", "learner.correction=none"],
        ["learner.algorithm=cispo", "learner.correction_mode=mask", "learner.clip_low=1.0"],
        ["learner.algorithm=dpo", "learner.reference=init", "learner.row_tokens=56", "learner.dpo_beta=0.2"],
        ["learner.algorithm=reinforce_pp", "schedule.group_size=1"],
        ["learner.reference=init", "learner.kl_coef=0.01", "learner.kl_in=reward", "learner.kl_estimator=k1"],
        ["learner.reference=init", "learner.kl_coef=0.01", "learner.kl_estimator=k3"],
        ["learner.reference=init", "learner.kl_coef=0.01", "learner.kl_estimator=k2"],
        *(
            [f"learner.algorithm={name}", "learner.reference=init", "learner.kl_coef=0.1", "learner.correction_cap=1.3"]
            for name in ("topr", "cispo", "raft")
        ),
        ["learner.algorithm=cispo", "learner.clip_high=2.0"],
        ["learner.algorithm=gspo", "learner.clip_high=0.001", "learner.correction_cap=9.0"],
        ["learner.algorithm=mine:best", "learner.clip_low=0.1", "learner.correction_cap=9.0"],
        ["learner.lora_rank=4", "learner.lora_alpha=3.0", "learner.lora_targets=attn.q"],
        ["learner.lora_rank=4", "learner.lora_publish=adapters"],
        ["learner.algorithm=ppo", "learner.critic=init", "learner.value_clip=0", "schedule.group_size=1"],
        ["learner.algorithm=gspo", "learner.advantage=gae", "learner.critic=init", "learner.critic_offload=true"],
        ["learner.correction=tis", "learner.ratio_level=sequence"],
        ["learner.algorithm=mine:best", "learner.correction_floor=0.1", "learner.dpo_beta=3"],
        ["schedule.buffer_groups=48"],
        ["schedule.publish_every=2"],
        ["schedule.rolling_updates=2", "sampler.count=3", "schedule.alpha=2"],
        ["schedule.rolling_updates=1", "sampler.count=2", "schedule.alpha=3", "schedule.publish_every=2"],
        ["schedule.alpha=0.5", "schedule.buffer_groups=36"],
        ["learner.mesh.data=2", "learner.mesh.fsdp=4", "learner.mesh.tensor=3"],
        ["task.heldout_items=0", "evaluator.every=0"],
        ["learner.row_tokens=28"],
        ["learner.row_tokens=13", "learner.shared_prompt_tokens=15", "learner.shared_prompt_rows=4"],
        ["learner.row_tokens=28", "learner.shared_prompt_tokens=3", "task.max_episode_tokens=28"],
        ["sft.steps=0", "sft.start=5"],
        ["run.seed=4294967295"],
        ["store.lease_s=11"],
        ["store.stall_abort_s=61", "schedule.straggler=wait"],
        ["store.max_message_mb=2", "sampling.max_tokens=70000", "learner.row_tokens=80000"],
    ],
    ids=" ".join,
)
def test_configs_at_the_limits_are_accepted(overrides: list[str]) -> None:
    values = config.override(config.to_dict(config.Config()), overrides)
    assert config.to_dict(config.parse(values)) == values
