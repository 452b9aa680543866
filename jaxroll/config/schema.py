"""The whole configuration as frozen typed dataclasses, with every default.

A config file holds `get_config()`, which starts from `defaults()` (or from another file: `read`) and changes what the
experiment changes. `parse` turns it into a `Config` once; nothing below ever reads a ConfigDict.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

WeightSwap = Literal["keep_kv", "reprefill", "restart", "drain"]  # what new weights do to running requests
LORA_TARGETS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
MODEL_SIZES = ("nano", "tiny", "qwen3_0p6b", "qwen3_1p7b", "qwen3_8b")


@dataclass(frozen=True)
class RunConfig:
    """Name and seed of the run."""

    name: str = "run"
    seed: int = 0


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each logical axis; their product is the number of devices a role uses."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return self.data * self.fsdp * self.tensor


@dataclass(frozen=True)
class ModelConfig:
    """The model: an entry of `jaxroll.models.families`, or a local Hugging Face folder."""

    size: str = "tiny"
    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the computation; parameters of the learner are float32


@dataclass(frozen=True)
class TokenizerConfig:
    """`char` builds a tokenizer from the task's alphabet; `hf` reads tokenizer.json from `path`."""

    kind: Literal["char", "hf"] = "char"
    path: str = ""


@dataclass(frozen=True)
class TaskConfig:
    """The source of prompts and the judge of answers."""

    source: Literal["reasoning_gym", "jsonl", "parquet", "game"] = "reasoning_gym"
    name: str = "spell_backward"
    args: dict = field(default_factory=lambda: {"min_word_len": 3, "max_word_len": 10})
    path: str = ""
    prompt_style: Literal["compact", "full"] = "compact"
    env: str = "single_turn"
    max_prompt_tokens: int = 16
    max_episode_tokens: int = 0  # of a whole conversation of several turns; 0: of one question and one answer
    train_start: int = 0
    heldout_start: int = 10_000_000
    heldout_items: int = 512


@dataclass(frozen=True)
class SftConfig:
    """The warm start on worked answers; 0 steps starts from a random init (or from model.path)."""

    steps: int = 300  # -1, what a config file starts with: 300, or 0 with model.path
    batch: int = 96
    learning_rate: float = 3e-3
    start: int = 20_000_000  # first item of the warm start's own range


@dataclass(frozen=True)
class ScheduleConfig:
    """The bounds on how far samplers run ahead of the learner (docs/store_contract.md, promises 7 and 8)."""

    mode: Literal["sync", "one_step", "async"] = "async"  # a name for some of the values below (config/schedules.py)
    alpha: float = 1.0
    steps: int = 100  # claims to train
    groups_per_step: int = 24
    group_size: int = 8
    buffer_groups: int = 0  # most groups kept (in progress, waiting, or trained without a checkpoint); 0: no limit
    redundant_groups: int = 0
    group_placement: Literal["auto", "together", "spread"] = "auto"  # whether a group's members are split over samplers
    redundant_members: int = 0  # leased beyond group_size; the first group_size to finish make the group
    publish_every: int = 1
    in_flight_window: Literal["adaptive", "full"] = (
        "adaptive"  # adaptive: the smallest at which the learner does not wait
    )
    last_batch: Literal["deliver", "drop"] = "deliver"  # what is left at the data's end, too little for a whole claim
    order: Literal["lease_order", "ready_first", "freshest_first"] = "lease_order"
    on_stale: Literal["expire", "mask"] = "expire"
    filter: str = "none"  # mean_band, pass_rate, min_std, or module:function of the rewards: groups it rejects expire
    filter_low: float = 0.0
    filter_high: float = 1.0  # what is judged must lie strictly between the two; min_std has no upper bound
    filter_limit: int = 10  # groups rejected between two claims at most, in windows: (alpha + 1) * groups_per_step
    on_filter_limit: Literal["stop", "deliver"] = "stop"
    weight_swap: WeightSwap = "keep_kv"
    rolling_updates: int = 0  # of several samplers, how many change their weights at a time; 0: all of them
    straggler: Literal["wait", "shrink"] = "shrink"
    straggler_deadline_s: float = 300.0

    @property
    def members_per_group(self) -> int:
        """Members of a new group: those that count, and the redundant ones."""
        return self.group_size + self.redundant_members


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling of training answers. Truncation (top_k, top_p) is refused in training, allowed in `generate`."""

    max_tokens: int = 12
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class SamplerConfig:
    """The inference role: its count, mesh and static shapes."""

    count: int = 1
    mesh: MeshConfig = field(default_factory=MeshConfig)
    slots: int = 32
    prefill_rows: int = 8
    prefill_buckets: tuple[int, ...] = (16,)
    prefill_budget: int = 0  # prompt tokens computed between two decode dispatches; 0 means one prefill
    decode_chunk: int = 1
    page_tokens: int = 0  # of one page of the cache; 0 means 64, or what the longest request needs if that is less
    cache_pages: int = 0  # 0 gives every slot room for the longest request; fewer pages make requests wait for them
    scoring_workers: int = 1
    prefill_attention: Literal["auto", "xla", "splash", "triton", "cudnn"] = "auto"  # of fresh prompts: docs/kernels.md
    paged_attention: Literal["auto", "xla", "dense", "pallas"] = "auto"  # of one more token over the cache
    concurrent_episodes: int = (
        0  # played at once, at most; 0: the slots and four groups. More, where environments take their time
    )
    env_threads: int = 1024  # for environments that block, at most; they are started as they are wanted
    env_processes: int = 8  # for environments that ask for one each, at most


@dataclass(frozen=True)
class LearnerConfig:
    """The training role: mesh, algorithm, optimizer, packing, checkpoints."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    algorithm: str = "grpo"  # a name of docs/algorithms.md, or package.module:name; "auto" and 0 below mean its own
    advantage: Literal[
        "auto", "group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std", "positive", "best",
        "best_worst", "segment_return", "gigpo", "gae",
    ] = "auto"  # fmt: skip
    aggregation: Literal["auto", "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant_length"] = "auto"
    correction: Literal["auto", "decoupled", "icepop", "tis", "none"] = "auto"
    correction_cap: float = 0.0
    correction_floor: float = 0.0  # of icepop
    correction_mode: Literal["truncate", "mask"] = "truncate"
    ratio_level: Literal["auto", "token", "sequence"] = "auto"  # of the ratios
    clip_low: float = 0.0
    clip_high: float = 0.0
    dual_clip: float = 0.0  # bounds the loss of A < 0 at this many |A| (3 is usual); 0: no bound
    positive_weight: float = 1.0  # of topr
    negative_weight: float = 1.0
    turn_discount: float = 0.95  # of later turns; read by segment_return and gigpo
    step_weight: float = 1.0  # of gigpo's step term next to its episode term
    dpo_beta: float = 0.1
    overlong_tokens: int = 0  # the last tokens before sampling.max_tokens, over which the reward sinks by 1
    reference: Literal["none", "init"] = "none"  # init: the parameters of the start, frozen
    reference_offload: bool = False  # keep the reference in the host's memory between its uses
    critic: Literal["none", "init"] = "none"  # init: a model of its own with a value head, begun as the parameters are
    critic_offload: bool = False  # keep the critic and its moments in the host's memory between its uses
    critic_learning_rate: float = 1e-3
    value_clip: float = 0.2  # how far a value may go from that of the claim's start; 0: as far as it likes
    gae_discount: float = 1.0  # of later tokens
    gae_lambda: float = 0.95  # of what later values say
    raw_advantages: bool = False  # of gae; else they are standardised over all trained tokens of a claim
    kl_coef: float = 0.0  # of KL(policy, reference)
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    lora_rank: int = 0  # of adapters that are trained in place of the parameters, which stay as they are; 0: none
    lora_alpha: float = 16.0  # the adapters' product counts lora_alpha / lora_rank times
    lora_targets: tuple[str, ...] = LORA_TARGETS  # the parameters of each layer that are adapted
    lora_publish: Literal["merged", "adapters"] = "merged"  # what samplers are sent: all parameters, or what changed
    learning_rate: float = 3e-4  # -1, what a config file starts with: this, or with model.path 1e-6 (adapters 1e-5)
    warmup_steps: int = 5
    decay_steps: int = 0  # 0 keeps the learning rate constant after warm-up
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    minibatches: int = 1  # optimizer steps per claim
    micro_batch_rows: int = 8  # rows of one packed micro-batch; of answers, where they share prompts
    row_tokens: int = 128  # tokens of one packed row; without its prompts, where they are shared
    shared_prompt_tokens: int = (
        0  # before prompt_rows rows, for prompts that are stored once; 0: one before every answer
    )
    shared_prompt_rows: int = 1  # rows of answers that share their prompts
    remat: Literal["auto", "none", "layer", "dots"] = "auto"  # made again in the backward pass; auto: as the model says
    logits_mb: int = 512  # of float32 logits on a device at once; a large vocabulary is worked through in parts
    attention: Literal["auto", "xla", "splash", "triton"] = "auto"  # of packed rows; see docs/kernels.md
    checkpoint_every: int = 20
    checkpoints_kept: int = 3
    shuffle_rewards: bool = False  # a control: rewards permuted inside each group, so nothing can be learned


@dataclass(frozen=True)
class StoreConfig:
    """The trajectory server: leases, retention, deadlines.

    `retention_mb` bounds trajectories that no durable checkpoint covers yet; `keep_trajectories_mb` those that are done
    with and stay for `jaxroll inspect` and `export`, oldest dropped first; `history_mb` the old records of the log.
    """

    lease_s: float = 30.0
    rpc_deadline_s: float = 10.0
    retention_mb: int = 512
    keep_trajectories_mb: int = 128
    history_mb: int = 256
    stall_s: float = 60.0
    stall_abort_s: float = 600.0
    infra_retries: int = 5
    data_retries: int = 2
    dead_limit: int = 64  # groups that may die between two claims, four full windows at least; 0: no limit
    reissues: int = 3
    max_message_mb: int = 64
    mutual_tls: bool = False  # with certificates: callers of the store and readers of weights must show one too


@dataclass(frozen=True)
class EvaluatorConfig:
    """Held-out evaluation on pinned versions; `every` 0 switches it off."""

    every: int = 20
    mesh: MeshConfig = field(default_factory=MeshConfig)
    slots: int = 64


@dataclass(frozen=True)
class TransferConfig:
    """Weight transfer. `tcp` needs nothing; `tensorstore` writes to `path` (a folder or a gs:// prefix); `device`
    hands them over within a process (`placement.colocated`). `auto`: `device` there, else `tcp`."""

    channel: Literal["auto", "tcp", "tensorstore", "device"] = "auto"
    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    deadline_s: float = 60.0


@dataclass(frozen=True)
class PlacementConfig:
    """The hardware that a role may take. Fractions apply when roles share GPUs."""

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    actors: int = 0  # processes that play the episodes and ask the samplers' engines; 0: the samplers play them
    learner_hosts: int = 1  # processes of the learner, one on each of its hosts; learner.mesh is over all of them
    colocated: bool = False  # learner, samplers and evaluator in one process, taking turns on the same devices
    cpu_threads: int = 1  # of each role on CPU: one is as fast, unless the others are idle meanwhile (alpha = 0)
    sampler_memory_fraction: float = 0.30
    learner_memory_fraction: float = 0.40
    evaluator_memory_fraction: float = 0.10


@dataclass(frozen=True)
class SupervisorConfig:
    """Restarts of dead roles, and the time that a role gets to stop."""

    max_restarts: int = 10
    backoff_s: float = 0.5
    backoff_max_s: float = 10.0
    stop_s: float = 20.0
    final_eval_s: float = 600.0  # patience with the evaluator's last evaluation after the learner is done


@dataclass(frozen=True)
class Config:
    """Everything a run needs to know. `digest` of its canonical JSON identifies it between processes."""

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
