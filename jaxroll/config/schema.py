"""The whole configuration as frozen typed dataclasses, with every default.

A config file holds `get_config()`, which starts from `defaults()` (or from another file: `read`) and changes what the
experiment changes. `parse` turns it into a `Config` once; nothing below ever reads a ConfigDict.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Flip = Literal["keep_kv", "reprefill", "restart", "drain"]  # what new weights do to running requests
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
    """Which model: an entry of `jaxroll.models.families`, or a local Hugging Face folder."""

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
    """Where prompts come from and how answers are judged."""

    source: Literal["reasoning_gym", "jsonl", "parquet"] = "reasoning_gym"
    name: str = "spell_backward"
    args: dict = field(default_factory=lambda: {"min_word_len": 3, "max_word_len": 10})
    path: str = ""
    prompt: Literal["compact", "full"] = "compact"
    env: str = "single_turn"
    max_prompt_tokens: int = 16
    train_start: int = 0
    heldout_start: int = 10_000_000
    heldout_items: int = 512


@dataclass(frozen=True)
class SftConfig:
    """The warm start on worked answers; 0 steps starts from a random init (or from model.path)."""

    steps: int = 300
    batch: int = 96
    learning_rate: float = 3e-3
    start: int = 20_000_000  # first item of the warm start's own range


@dataclass(frozen=True)
class ScheduleConfig:
    """Who may run ahead of whom, and by how much (STORE.md, promises 7 and 8)."""

    alpha: float = 1.0
    steps: int = 100  # claims to train
    groups_per_step: int = 24
    group_size: int = 8
    buffer_groups: int = 0  # groups kept (in work, waiting, or trained without a checkpoint) at most; 0: no such limit
    redundant_groups: int = 0
    publish_every: int = 1
    window: Literal["adaptive", "full"] = "adaptive"  # adaptive: the smallest at which the learner does not wait
    last_batch: Literal["deliver", "drop"] = "deliver"  # what is left at the data's end, too little for a whole claim
    order: Literal["lease_order", "ready_first", "freshest_first"] = "lease_order"
    on_stale: Literal["expire", "mask"] = "expire"
    flip: Flip = "keep_kv"
    straggler: Literal["wait", "shrink"] = "shrink"
    straggler_deadline_s: float = 300.0


@dataclass(frozen=True)
class SamplingConfig:
    """How training answers are drawn. Truncation (top_k, top_p) is refused in training, allowed in `generate`."""

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


@dataclass(frozen=True)
class LearnerConfig:
    """The training role: mesh, algorithm, optimizer, packing, checkpoints."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    algorithm: Literal["grpo"] = "grpo"
    correction: Literal["decoupled", "tis", "none"] = "decoupled"
    correction_cap: float = 2.0
    correction_mode: Literal["truncate", "mask"] = "truncate"
    clip_low: float = 0.2
    clip_high: float = 0.28
    advantage: Literal["group_std", "group_mean"] = "group_std"
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    learning_rate: float = 3e-4
    warmup_steps: int = 5
    decay_steps: int = 0  # 0 keeps the learning rate constant after warm-up
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    substeps: int = 1  # optimizer steps per claim
    micro_rows: int = 8  # rows of one packed micro-batch
    row_tokens: int = 128  # tokens of one packed row
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
    """How parameters travel. `tcp` needs nothing; `tensorstore` writes to `path` (a folder or a gs:// prefix)."""

    channel: Literal["tcp", "tensorstore"] = "tcp"
    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    deadline_s: float = 60.0


@dataclass(frozen=True)
class PlacementConfig:
    """What hardware a role may take. Fractions apply when roles share one GPU."""

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    sampler_memory_fraction: float = 0.30
    learner_memory_fraction: float = 0.40
    evaluator_memory_fraction: float = 0.10


@dataclass(frozen=True)
class SupervisorConfig:
    """How often a dead role is started again, and how patiently it is stopped."""

    max_restarts: int = 10
    backoff_s: float = 0.5
    backoff_max_s: float = 10.0
    stop_s: float = 20.0
    finish_s: float = 600.0  # patience with the evaluator's last evaluation after the learner is done


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
