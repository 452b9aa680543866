"""Schema of meshes and of sections about processes and machines: evaluator, store, transfer, and others; bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

# --- Types of config values: numbers with the bounds that `parsing.check_bounds` enforces

MAX_ITEM = 10**15  # far above any number of items drawn, and exact as an index


@dataclass(frozen=True)
class ValueRange:
    """Allowed values of a number: `least` ≤ value ≤ `most` and value > `above`, where they are given."""

    least: float | None = None
    most: float | None = None
    above: float | None = None


NonNegativeInt = Annotated[int, ValueRange(least=0)]
PositiveInt = Annotated[int, ValueRange(least=1)]
ItemIndex = Annotated[int, ValueRange(least=0, most=MAX_ITEM)]
NonNegativeFloat = Annotated[float, ValueRange(least=0)]
PositiveFloat = Annotated[float, ValueRange(above=0)]
UnitFloat = Annotated[float, ValueRange(least=0, most=1)]
Seconds = Annotated[float, ValueRange(least=1)]


# --- Schema of the sections about processes and machines


@dataclass(frozen=True)
class MeshConfig:
    """Device mesh of a role. The product of the axes is the number of devices that the role uses."""

    # Devices along the data-parallel axis.
    data: PositiveInt = 1
    # Devices along the fully sharded data-parallel axis.
    fsdp: PositiveInt = 1
    # Devices along the tensor-parallel axis.
    tensor: PositiveInt = 1
    # Devices that divide the experts of each layer. For other parameters and for rows, part of the fsdp axis.
    expert: PositiveInt = 1
    # Devices that divide the tokens of each row, in the learner's mesh only. For parameters, part of the fsdp axis.
    sequence: PositiveInt = 1

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return self.shards * self.sequence * self.tensor

    @property
    def shards(self) -> int:
        """Number of parts into which the mesh divides the rows of a batch, or the slots of an engine."""
        return self.data * self.fsdp * self.expert


@dataclass(frozen=True)
class EvaluatorConfig:
    """Held-out evaluation of published versions."""

    # Steps between two evaluations. 0: no evaluator.
    every: NonNegativeInt = 20
    # Mesh of the evaluator.
    mesh: MeshConfig = field(default_factory=MeshConfig)
    # Sequences decoded at the same time.
    slots: PositiveInt = 64
    # Answers to each held-out item. With several, accuracy is the mean over them (docs/prompts.md).
    samples: PositiveInt = 1
    # Temperature of these answers. 0: greedy.
    temperature: NonNegativeFloat = 0.0
    # More held-out sets by name: dicts of items, samples and keys of a source (docs/prompts.md).
    sets: dict = field(default_factory=dict)


@dataclass(frozen=True)
class StoreConfig:
    """Store: leases, retries, retention, deadlines."""

    # Lease duration; an unrenewed lease goes to another sampler.
    lease_s: Seconds = 30.0
    # Deadline of a call to the store.
    rpc_deadline_s: Seconds = 10.0
    # Maximum MB of trajectories that no durable checkpoint covers; at the limit no new prompt is leased. -1, as in
    # defaults(): as many as can exist between two checkpoints, at least 512.
    retention_mb: PositiveInt = 512
    # MB of trained or expired trajectories kept for `inspect` and `export`; the oldest are dropped first.
    keep_trajectories_mb: NonNegativeInt = 128
    # MB of old log records kept for `replay` and `inspect`.
    history_mb: NonNegativeInt = 256
    # Seconds without progress after which a stall is reported.
    stall_s: PositiveFloat = 60.0
    # Seconds without progress after which the run ends.
    stall_abort_s: PositiveFloat = 600.0
    # Retries of a member after infrastructure failures.
    infra_retries: NonNegativeInt = 5
    # Retries of a member after failures of its data or environment.
    data_retries: NonNegativeInt = 2
    # Maximum groups that may fail between two claims, at least 4 full in-flight windows. 0: no limit.
    dead_limit: NonNegativeInt = 64
    # Times that an expired group's prompt is issued again.
    reissues: NonNegativeInt = 3
    # Maximum MB of one message.
    max_message_mb: PositiveInt = 64
    # With TLS, require client certificates from roles.
    mutual_tls: bool = False
    # A second store on another machine has a copy of the log and takes over if the first one is lost.
    standby: bool = False
    # Seconds of silence after which the standby takes over.
    takeover_s: PositiveFloat = 10.0


@dataclass(frozen=True)
class TransferConfig:
    """Weight sync from the learner to samplers and evaluator."""

    # Channel: shared memory, sockets, files below `path`, or device memory within a process. `auto`: device if
    # colocated; otherwise shm for readers on the learner's host, tcp for others.
    channel: Literal["auto", "shm", "tcp", "tensorstore", "device"] = "auto"
    # Folder or gs:// prefix, for tensorstore.
    path: str = ""
    # Data type in which parameters are sent.
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Connections of a receiver to each host of the learner (tcp, and auto between hosts). Each has a thread that reads
    # and checks its share of the arrays.
    connections: PositiveInt = 1
    # Deadline of one transfer of at most 6 GB; larger ones have longer, in proportion.
    deadline_s: Seconds = 60.0
    # Samplers that serve the weights they received to others (tcp only), so that the learner sends one copy or two.
    # `tree`: each to two. `none`: all fetch from the learner.
    relay: Literal["none", "tree"] = "none"


@dataclass(frozen=True)
class PlacementConfig:
    """Hardware of each role. The memory fractions apply when roles share GPUs."""

    # Accelerator. `auto`: TPU, GPU or CPU, the first that is found.
    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    # Processes that run the environments with samplers as inference servers. 0: samplers run them.
    actors: NonNegativeInt = 0
    # Pools of samplers by name: dicts of samplers (a part of sampler.count) and tags, the sources that they prefer
    # (docs/scheduling.md). Empty: all samplers take all prompts.
    pools: dict = field(default_factory=dict)
    # Hosts of the learner, one process each; learner.mesh spans all of them.
    learner_hosts: PositiveInt = 1
    # Hosts of each sampler, one process each; sampler.mesh spans all of them.
    sampler_hosts: PositiveInt = 1
    # Run learner, samplers and evaluator in one process on the same devices.
    colocated: bool = False
    # Samplers on the learner's devices, in its process: the last of sampler.count. They work for the first seconds of
    # each step, then their rollouts go on elsewhere (partial overlap, docs/scheduling.md).
    learner_samplers: NonNegativeInt = 0
    # CPU threads per role. 1 is as fast unless the other roles are idle meanwhile (α = 0).
    cpu_threads: PositiveInt = 1
    # Fraction of GPU memory of a sampler.
    sampler_memory_fraction: PositiveFloat = 0.30
    # Fraction of GPU memory of the learner.
    learner_memory_fraction: PositiveFloat = 0.40
    # Fraction of GPU memory of the evaluator.
    evaluator_memory_fraction: PositiveFloat = 0.10


@dataclass(frozen=True)
class SupervisorConfig:
    """Restart of failed roles, and shutdown."""

    # Restarts of a failing role before the run ends; a long time without failure resets the count.
    max_restarts: NonNegativeInt = 10
    # Delay before the first restart; it doubles with each further one.
    backoff_s: PositiveFloat = 0.5
    # Maximum delay before a restart.
    backoff_max_s: PositiveFloat = 10.0
    # Grace period of a role that is asked to stop.
    stop_s: PositiveFloat = 20.0
    # Maximum wait for the last evaluation after the last step.
    final_eval_s: PositiveFloat = 600.0
