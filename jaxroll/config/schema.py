"""Schema of the configuration: frozen dataclasses with the type, bounds, default and description of every key.

A config file defines `get_config()`, which starts from `defaults()` and changes some keys; `parse` turns the result
into a `Config`. The comment above a key describes it; docs/config_keys.md is generated from these comments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxroll.config.schema_system import (
    EvaluatorConfig,
    ItemIndex,
    MeshConfig,
    NonNegativeFloat,
    NonNegativeInt,
    PlacementConfig,
    PositiveFloat,
    PositiveInt,
    StoreConfig,
    SupervisorConfig,
    TransferConfig,
    UnitFloat,
    ValueRange,
)

MAX_SEED = 2**32 - 1  # JAX keys take 32 bits of a seed, so a larger one would equal that of another run


Advantage = Literal[
    "auto",
    "group_std",
    "group_mean",
    "leave_one_out",
    "batch_std",
    "group_mean_batch_std",
    "positive",
    "best",
    "best_worst",
    "segment_return",
    "gigpo",
    "gae",
]
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
WeightSwap = Literal["keep_kv", "reprefill", "restart", "drain", "trajectory"]
LORA_TARGETS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
MODEL_SIZES = (
    "nano", "tiny", "tiny_moe",
    "qwen3_0p6b", "qwen3_1p7b", "qwen3_4b", "qwen3_8b", "qwen3_14b", "qwen3_32b", "qwen3_30b_a3b",
    "qwen2p5_0p5b", "qwen2p5_1p5b", "qwen2p5_3b", "qwen2p5_7b", "qwen2p5_14b", "qwen2p5_32b", "qwen2p5_72b",
    "llama3p2_1b", "llama3p2_3b", "llama3p1_8b", "llama3p1_70b", "mistral_7b",
    "gemma3_270m", "gemma3_1b", "gemma3_4b", "gemma3_12b", "gemma3_27b",
)  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """Name and seed of the run."""

    # Name of the run; a new run folder is called NAME-DATE-TIME.
    name: str = "run"
    # Seed of the parameters, data order and sampling.
    seed: Annotated[int, ValueRange(least=0, most=MAX_SEED)] = 0
    # Where metrics go in addition to metrics.jsonl: tensorboard, wandb, mlflow, trackio (docs/metrics.md).
    trackers: list = field(default_factory=lambda: ["tensorboard"])
    # Names of the metrics in trackers: those of JaxRoll, or of another stack where it has one (docs/metrics.md).
    metric_names: Literal["jaxroll", "verl", "prime-rl", "nemo-rl"] = "jaxroll"
    # Run all roles in one process on a virtual clock: equal seeds give equal bits at any α (docs/simulation.md).
    deterministic: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and initial parameters of the model."""

    # Architecture of a model that is initialized from scratch (`jaxroll.models.families`).
    size: str = "tiny"
    # Hugging Face model folder to import. Empty: initialize a model of `size`.
    path: str = ""
    # Data type of activations. The learner keeps parameters in float32.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Balance a mixture of experts by a bias per expert, which only chooses (learner.router_bias_rate).
    router_bias: bool = False


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer of the model."""

    # `char`: one token per character of the task's alphabet. `hf`: read tokenizer.json from `path`.
    kind: Literal["char", "hf"] = "char"
    # Folder of tokenizer.json, for `hf`.
    path: str = ""
    # Variables of the chat template, for example enable_thinking=False.
    template_args: dict = field(default_factory=dict)


@dataclass(frozen=True)
class TaskConfig:
    """Dataset of prompts and environment that scores the answers."""

    # Kind of dataset.
    source: Literal["reasoning_gym", "jsonl", "parquet", "hf_dataset", "game"] = "reasoning_gym"
    # Name of the reasoning_gym task or of the game.
    name: str = "spell_backward"
    # Arguments of the task generator or of the environment.
    args: dict = field(default_factory=lambda: {"min_word_len": 3, "max_word_len": 10})
    # File of a jsonl or parquet dataset, or folder of a dataset that Hugging Face `datasets` saved to disk.
    path: str = ""
    # Column of the prompt. Empty: detect the layout (docs/prompts.md).
    prompt_column: str = ""
    # Column of the answer, as path a.b if nested. `none`: rows without answers. Empty: detect the layout.
    answer_column: str = ""
    # The final answer is the text after the last occurrence of this, for example "####". Empty: the whole answer.
    answer_after: str = ""
    # Wording of prompts: `compact` for small character-level models, `full` for language models.
    prompt_style: Literal["compact", "full"] = "compact"
    # Sources with shares: dicts of label, weight and other keys of this section (docs/prompts.md). Empty: one source.
    mixture: list = field(default_factory=list)
    # Prompts longer than max_prompt_tokens: drop them, or cut the last message on its left or right side.
    long_prompts: Literal["drop", "truncate_left", "truncate_right"] = "drop"
    # System message of every prompt; it replaces the system message of a row. Text, or file:PATH.
    system_prompt: str = ""
    # Messages before the question: {"role": …, "content": …} or pairs [question, answer]; or file:PATH (JSON).
    few_shot: list = field(default_factory=list)
    # JSON schemas of tools that the chat template shows; or file:PATH (JSON).
    tools: list = field(default_factory=list)
    # Environment: a built-in name or package.module:name.
    env: str = "single_turn"
    # Program of the environment `agent`: file:PATH:function, package.module:function, a URL, or a command.
    agent: str = ""
    # Seconds that this program may take for an episode.
    agent_limit_s: PositiveFloat = 600.0
    # Part of a completion that is scored: none (all of it), answer_tag, boxed, after_think, last_number, or a function,
    # as file:PATH:function or package.module:function (docs/rewards.md).
    extract: str = "none"
    # Reward: `auto` (1 if the scorer of the dataset gives 1, else 0), or a weighted sum, as in `math + 0.1*format`.
    reward: str = "auto"
    # Settings of the parts of `task.reward`, by part: {"length": {"max_tokens": 512}}.
    reward_args: dict = field(default_factory=dict)
    # Maximum tokens of the first prompt.
    max_prompt_tokens: PositiveInt = 16
    # Maximum tokens of a conversation of several turns. 0: one prompt and one answer.
    max_episode_tokens: NonNegativeInt = 0
    # Maximum answers of a conversation; one that does not end with the last of them has reward 0. 0: no such limit.
    max_turns: NonNegativeInt = 0
    # First item of the training range of a generated dataset.
    train_start: ItemIndex = 0
    # First item of the held-out range of a generated dataset.
    heldout_start: ItemIndex = 10_000_000
    # Number of held-out items.
    heldout_items: NonNegativeInt = 512


@dataclass(frozen=True)
class SftConfig:
    """Warm start: supervised fine-tuning on worked answers before RL."""

    # Optimizer steps. 0: no warm start. -1, as without the key: 300, or 0 with model.path.
    steps: NonNegativeInt = 300
    # Examples per step.
    batch: PositiveInt = 96
    # Peak learning rate.
    learning_rate: PositiveFloat = 3e-3
    # End the warm start early once this share of unseen answers is exact (teacher-forced, every five steps). 1: never.
    enough_exact: Annotated[float, ValueRange(above=0, most=1)] = 1.0
    # First item of the warm start's range of a generated dataset.
    start: ItemIndex = 20_000_000


@dataclass(frozen=True)
class ScheduleConfig:
    """Order and amount of work: staleness, batches, groups, weight swaps."""

    # Named schedule, which fixes some keys below: `sync` (α = 0), `one_step` and `interval` (α = 1),
    # `async_controller`, `async` (none).
    mode: Literal["sync", "one_step", "interval", "async_controller", "async"] = "async"
    # Maximum staleness α: no trained token is older than ⌈α⌉ versions.
    alpha: NonNegativeFloat = 1.0
    # Training steps (claims) of the run.
    steps: PositiveInt = 100
    # Groups per training step.
    groups_per_step: PositiveInt = 24
    # Members (rollouts of one prompt) per group.
    group_size: PositiveInt = 8
    # Maximum groups in the store: in flight, ready, or trained without a durable checkpoint. 0: no limit.
    buffer_groups: NonNegativeInt = 0
    # Groups in flight beyond the window that α allows; surplus groups expire.
    redundant_groups: NonNegativeInt = 0
    # Placement of a group's members on samplers: all on one, spread, or split only when a slot would be idle.
    group_placement: Literal["auto", "together", "spread"] = "auto"
    # Members leased beyond group_size. The first group_size to finish are kept, the others aborted.
    redundant_members: NonNegativeInt = 0
    # Steps between two published versions.
    publish_every: PositiveInt = 1
    # Groups in flight: `full`, all that α allows, or `adaptive`, the smallest window that keeps the learner busy.
    in_flight_window: Literal["adaptive", "full"] = "adaptive"
    # At the end of the data, train the remaining groups as a short batch, or drop them.
    last_batch: Literal["deliver", "drop"] = "deliver"
    # Order in which members are leased: that of their prompts, or the longest first (docs/scheduling.md).
    lease_first: Literal["oldest", "longest"] = "oldest"
    # Order in which ready groups are trained.
    order: Literal["lease_order", "ready_first", "freshest_first"] = "lease_order"
    # Groups with tokens older than ⌈α⌉: expire and sample the prompt again, or mask these tokens in the loss.
    on_stale: Literal["expire", "mask"] = "expire"
    # Filter of finished groups by their rewards: none, mean_band, pass_rate, min_std, or package.module:function.
    filter: str = "none"
    # Lower bound of the filtered statistic (exclusive).
    filter_low: float = 0.0
    # Upper bound of the filtered statistic (exclusive); min_std has none.
    filter_high: float = 1.0
    # Maximum groups rejected between two claims, as a multiple of the full in-flight window.
    filter_limit: PositiveInt = 10
    # At the filter limit, stop the run, or deliver groups unfiltered until the next claim.
    on_filter_limit: Literal["stop", "deliver"] = "stop"
    # Prompts by the mean reward of their question so far: all, between two bounds, or above a bound that falls.
    curriculum: Literal["none", "band", "easy_to_hard"] = "none"
    # Lower bound of the mean reward; the last bound of easy_to_hard.
    curriculum_low: float = 0.0
    # Upper bound of the mean reward; the first bound of easy_to_hard.
    curriculum_high: float = 1.0
    # Claims before a trained question may return. 0: none.
    curriculum_rest: NonNegativeInt = 0
    # Share of the other prompts that is sampled all the same.
    curriculum_explore: Annotated[float, ValueRange(above=0, most=1)] = 0.1
    # Effect of new weights on running requests (docs/engine.md).
    weight_swap: WeightSwap = "keep_kv"
    # Samplers that may swap weights at the same time. 0: all of them.
    rolling_updates: NonNegativeInt = 0
    # With one version per trajectory: seconds between two plans by which samplers that wait for new weights give their
    # last members to one another, so that the empty ones go on (docs/scheduling.md). 0: members stay where they are.
    repack_s: NonNegativeFloat = 0.0
    # Unfinished members of a late group: wait for them, or train the group without them.
    straggler: Literal["wait", "shrink"] = "shrink"
    # Seconds after which a group is late.
    straggler_deadline_s: PositiveFloat = 300.0

    @property
    def members_per_group(self) -> int:
        """Members of a new group, the redundant ones included."""
        return self.group_size + self.redundant_members


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling parameters of training. With truncation, the learner's log-probs are over the same tokens."""

    # Maximum tokens of an answer.
    max_tokens: PositiveInt = 12
    # Softmax temperature.
    temperature: float = 1.0
    # Number of most likely tokens to sample from. 0: all.
    top_k: NonNegativeInt = 0
    # Probability of the smallest set of most likely tokens to sample from. 1: all.
    top_p: Annotated[float, ValueRange(above=0, most=1)] = 1.0
    # Probability of a token, relative to the most likely one, below which it is not sampled. 0: all.
    min_p: UnitFloat = 0.0
    # Maximum tokens that truncated sampling keeps; their ids are stored with each sampled token.
    support_tokens: PositiveInt = 256


@dataclass(frozen=True)
class SamplerConfig:
    """Samplers: number, mesh, static shapes of the engine, environment executors."""

    # Number of samplers that the run starts with. 0: all of them join later (docs/machines.md).
    count: NonNegativeInt = 1
    # Least number of samplers when those that do not shorten a step leave (docs/placement.md). 0: all stay.
    least_count: NonNegativeInt = 0
    # Mesh of each sampler.
    mesh: MeshConfig = field(default_factory=MeshConfig)
    # Sequences decoded at the same time.
    slots: PositiveInt = 32
    # Prompts per prefill call.
    prefill_rows: PositiveInt = 8
    # Padded prompt lengths, increasing. One program is compiled per length.
    prefill_buckets: tuple[int, ...] = (16,)
    # Prompt tokens computed between two decode dispatches. 0: one prefill call.
    prefill_budget: NonNegativeInt = 0
    # Maximum tokens per slot and decode dispatch.
    decode_chunk: PositiveInt = 1
    # Decode dispatches on the devices at once. 2: the devices do not wait for the host (docs/engine.md).
    dispatches_in_flight: Annotated[int, ValueRange(least=1, most=2)] = 1
    # Tokens per slot and decode step that speculative decoding drafts and verifies at once (docs/engine.md). 0: none.
    draft_tokens: Annotated[int, ValueRange(least=0, most=16)] = 0
    # Folder of a smaller model with the same tokenizer, which drafts these tokens. Empty: prompt lookup drafts them.
    draft_model: str = ""
    # Compile one layer (of each kind) and run it in a loop: compile time does not grow with depth (docs/models.md).
    scan_layers: bool = False
    # Tokens per page of the KV cache. 0: 64, or less if the longest request needs less.
    page_tokens: NonNegativeInt = 0
    # Pages of the KV cache; sliding windows may have rings instead (docs/engine.md). 0: for the longest requests.
    cache_pages: NonNegativeInt = 0
    # Share of the device memory that JAX may use, for all of a sampler: the KV cache gets as many pages as fit
    # (docs/engine.md). GPU and TPU only; not together with `cache_pages`. 0: the cache does not depend on the memory.
    memory_fraction: UnitFloat = 0.0
    # Keys and values in the KV cache: "" as model.dtype; int8 or fp8 with a scale per token and head (docs/engine.md).
    kv_dtype: Literal["", "int8", "fp8"] = ""
    # Matrices of the layers in a sampler: "" as model.dtype; int8 or fp8 with a scale per output (docs/engine.md).
    weight_dtype: Literal["", "int8", "fp8"] = ""
    # Most tokens of an unfinished answer that a sampler loses if it ends (docs/machines.md): it sends them to the
    # store, half as many at a time, and another one continues after those. 0: no flushes, members start again.
    flush_tokens: NonNegativeInt = 0
    # Processes that score answers.
    scoring_workers: PositiveInt = 1
    # Seconds without answers after which these processes end; the next answer starts them again. 0: never.
    scoring_idle_s: NonNegativeFloat = 300.0
    # Attention kernel of prefill (docs/kernels.md).
    prefill_attention: Literal["auto", "xla", "splash", "triton", "cudnn"] = "auto"
    # Attention kernel of decoding over the paged KV cache (docs/kernels.md).
    paged_attention: Literal["auto", "xla", "dense", "pallas"] = "auto"
    # Maximum episodes that a sampler runs concurrently; raise it for slow environments. 0: slots + 4 groups.
    concurrent_episodes: NonNegativeInt = 0
    # Maximum threads for blocking environments.
    env_threads: PositiveInt = 1024
    # Maximum processes for environments that need a process each.
    env_processes: PositiveInt = 8
    # Port of 127.0.0.1 on which sampler N answers HTTP requests, plus N. 0: any free port. -1: none.
    http_port: Annotated[int, ValueRange(least=-1, most=65535)] = -1


@dataclass(frozen=True)
class LearnerConfig:
    """Learner: mesh, algorithm, optimizer, packing, checkpoints. "auto" and 0 may mean the algorithm's own value."""

    # Mesh of the learner.
    mesh: MeshConfig = field(default_factory=MeshConfig)
    # Algorithm: a name of docs/algorithms.md or package.module:name.
    algorithm: str = "grpo"
    # Advantage estimator.
    advantage: Advantage = "auto"
    # Aggregation of token losses.
    aggregation: Literal["auto", "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"] = "auto"
    # Correction for samples of older policies.
    correction: Literal["auto", "decoupled", "icepop", "tis", "none"] = "auto"
    # Upper bound of importance weights. 0: the algorithm's own.
    correction_cap: NonNegativeFloat = 0.0
    # Lower bound of importance weights, for icepop. 0: the algorithm's own.
    correction_floor: NonNegativeFloat = 0.0
    # Importance weights above the bound: truncate, or mask the token.
    correction_mode: Literal["truncate", "mask"] = "truncate"
    # Importance ratios of single tokens or of whole sequences.
    ratio_level: Literal["auto", "token", "sequence"] = "auto"
    # Lower clip range ε_l. 0: the algorithm's own.
    clip_low: NonNegativeFloat = 0.0
    # Upper clip range ε_h. 0: the algorithm's own.
    clip_high: NonNegativeFloat = 0.0
    # Bound of the loss of tokens with A < 0, as a multiple of |A| (3 is usual). 0: none.
    dual_clip: NonNegativeFloat = 0.0
    # Loss weight of answers with a positive advantage, for topr.
    positive_weight: NonNegativeFloat = 1.0
    # Loss weight of answers with a negative advantage, for topr.
    negative_weight: NonNegativeFloat = 1.0
    # Discount per turn of segment_return and gigpo.
    turn_discount: UnitFloat = 0.95
    # Weight of gigpo's step advantage relative to its episode advantage.
    step_weight: NonNegativeFloat = 1.0
    # β of dpo.
    dpo_beta: PositiveFloat = 0.1
    # Length penalty: the reward decreases by 1 over this many tokens before sampling.max_tokens. 0: none.
    overlong_tokens: NonNegativeInt = 0
    # Reference model: `init` keeps a frozen copy of the initial parameters.
    reference: Literal["none", "init"] = "none"
    # Keep the reference in host memory between uses.
    reference_offload: bool = False
    # Critic: `init` trains a copy of the initial model with a value head.
    critic: Literal["none", "init"] = "none"
    # Keep the critic and its optimizer state in host memory between uses.
    critic_offload: bool = False
    # Learning rate of the critic.
    critic_learning_rate: PositiveFloat = 1e-3
    # Clip range of values around those at the start of the claim. 0: no clip.
    value_clip: NonNegativeFloat = 0.2
    # Discount γ per token of gae.
    gae_discount: UnitFloat = 1.0
    # λ of gae.
    gae_lambda: UnitFloat = 0.95
    # Do not normalize the advantages of gae over the trained tokens of a claim.
    raw_advantages: bool = False
    # Coefficient of KL(policy ‖ reference).
    kl_coef: NonNegativeFloat = 0.0
    # Where the KL term is added.
    kl_in: Literal["loss", "reward"] = "loss"
    # KL estimator (Schulman 2020).
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    # Coefficient of the load-balancing loss of a mixture of experts (0.001 is usual in pretraining). 0: none.
    router_loss: NonNegativeFloat = 0.0
    # Step of model.router_bias: added to biases of experts with too few tokens, subtracted from those with too many.
    router_bias_rate: NonNegativeFloat = 0.001
    # Train on the experts that the sampler chose for each token (recorded with every sample), not on the learner's own.
    routing_replay: bool = False
    # Rank of LoRA adapters. 0: train all parameters.
    lora_rank: NonNegativeInt = 0
    # LoRA scale: adapters are multiplied by lora_alpha / lora_rank.
    lora_alpha: PositiveFloat = 16.0
    # Parameters of each layer that get adapters.
    lora_targets: tuple[str, ...] = LORA_TARGETS
    # Folder of PEFT adapters (adapter_config.json) that the run starts from. Empty: fresh ones.
    lora_path: str = ""
    # Weight sync: parameters with merged adapters, or the adapters alone.
    lora_publish: Literal["merged", "adapters"] = "merged"
    # Peak learning rate. -1, as without the key: this, or with model.path 1e-6 (adapters: 1e-5).
    learning_rate: PositiveFloat = 3e-4
    # Keep the moments of AdamW in host memory except in the update (docs/models.md).
    optimizer_offload: bool = False
    # Optimizer steps of linear warm-up.
    warmup_steps: NonNegativeInt = 5
    # Optimizer steps of the cosine decay to a tenth of the peak. 0: constant after warm-up.
    decay_steps: NonNegativeInt = 0
    # Weight decay of AdamW.
    weight_decay: NonNegativeFloat = 0.0
    # Gradient clipping by global norm.
    max_grad_norm: PositiveFloat = 1.0
    # Optimizer steps per claim.
    minibatches: PositiveInt = 1
    # Compute the gradients of groups as soon as they are finished, before their batch is complete (docs/scheduling.md).
    streaming: bool = False
    # Rows of a packed micro-batch.
    micro_batch_rows: PositiveInt = 8
    # Tokens of a packed row, excluding shared prompts.
    row_tokens: Annotated[int, ValueRange(least=2)] = 128
    # Tokens for prompts that are stored once per shared_prompt_rows rows. 0: each answer has its own prompt.
    shared_prompt_tokens: NonNegativeInt = 0
    # Rows of answers that share their prompts.
    shared_prompt_rows: PositiveInt = 1
    # Results that the backward pass computes again (docs/models.md). `auto`: as the model family defines.
    remat: Literal["auto", "none", "layer", "dots", "offload"] = "auto"
    # Compile one layer and loop over all: short compilation of deep models, for a copy of the weights in model.dtype.
    scan_layers: bool = False
    # Maximum MB of float32 logits per device; larger logits are computed in chunks.
    logits_mb: PositiveInt = 512
    # Attention kernel of packed rows (docs/kernels.md).
    attention: Literal["auto", "xla", "splash", "triton"] = "auto"
    # Steps between two checkpoints.
    checkpoint_every: PositiveInt = 20
    # Checkpoints that are kept.
    checkpoints_kept: PositiveInt = 3
    # Keep the best checkpoint by accuracy or sets.NAME.accuracy of evaluator.sets, too (docs/resuming.md). Empty: none.
    keep_best: str = ""
    # Control experiment: permute rewards inside each group, so that nothing can be learned.
    shuffle_rewards: bool = False


@dataclass(frozen=True)
class Config:
    """Complete configuration of a run. The `digest` of its canonical JSON identifies it between processes."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
