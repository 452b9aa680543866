"""Chips and topologies that `jaxroll plan` knows, and the roofline: the least time of a program on a chip. No JAX.

Sources: for TPUs the pages v5e, v5p and v6e of docs.cloud.google.com/tpu/docs. A ring along one axis of a torus sends
over two of a chip's four ports (v5p: six), each with its share of the bandwidth in one direction. The network of a host
is that of a v5e; for the others no public figure was found, and the same is assumed. Hosts have the chips that these
pages name (v5p: its table of slices and machines); Google's VMs of v5e and v6e may have half of them. `usable_bytes` is
the limit that libtpu's compiler names when a program is too large ("of 15.75G hbm"). For GPUs, NVIDIA's data sheets of
H100 SXM, H200 SXM and A100 80 GB SXM: dense bfloat16, NVLink in one direction.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from jaxroll.config import Config, ModelConfig
from jaxroll.config.derived import COLOCATED, channel_of, device_processes, engines, memory_fractions, model_folder
from jaxroll.config.rules import Inventory, check_inventory
from jaxroll.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One accelerator: memory that programs can use, and rates per second. `host_bytes_s`: the network of a host with
    `host_chips` of them."""

    name: str
    usable_bytes: float
    memory_bytes_s: float
    flops_s: float  # dense bfloat16
    link_bytes_s: float  # that a ring of chips sends
    host_bytes_s: float
    host_chips: int = 8

    def hosts(self, chips: int) -> int:
        """The number of hosts of a slice."""
        return math.ceil(chips / self.host_chips)


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v5e": Chip("TPU v5e", 15.75 * GIB, 8.19e11, 1.97e14, 1e11, 2.5e10),
        "v5p": Chip("TPU v5p", 95.74 * GIB, 2.765e12, 4.59e14, 2e11, 2.5e10, 4),
        "v6e": Chip("TPU v6e", 31.25 * GIB, 1.638e12, 9.18e14, 2e11, 2.5e10),
        "H100": Chip("H100 SXM", 79.6 * GIB, 3.35e12, 9.89e14, 4.5e11, 5e10),
        "H200": Chip("H200 SXM", 140.4 * GIB, 4.8e12, 9.89e14, 4.5e11, 5e10),
        "A100": Chip("A100 SXM 80 GB", 79.3 * GIB, 2.039e12, 3.12e14, 3e11, 2.5e10),
        "cpu": Chip("CPU of this machine", math.inf, 2e10, 5e10, 1e10, 1.25e9),  # rates of one core, a rough guess
    }
)
_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_SHAPES = {
    "v5e": _FLAT,
    "v6e": _FLAT,
    "v5p": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"},
}
_GPU_STATISTICS = "v5p"  # the TPU whose programs are used for GPUs: it has the most memory


@dataclass(frozen=True)
class Topology:
    """Described hardware: `count` chips of `kind`, on `platform` tpu, gpu or cpu."""

    name: str
    platform: str
    kind: str
    count: int

    @property
    def chip(self) -> Chip:
        """The kind of chip that it has."""
        return CHIPS[self.kind]

    def of_role(self, devices: int) -> str:
        """The smallest topology that libtpu can describe with room for `devices` chips, as "v5e:2x4"."""
        kind = self.kind if self.platform == "tpu" else _GPU_STATISTICS
        return f"{kind}:{next(shape for chips, shape in _SHAPES[kind].items() if chips >= devices)}"


def topology(name: str) -> Topology:
    """The described hardware; ConfigError for a name that is not known."""
    kind, _, shape = name.partition(":")
    if kind in _SHAPES:
        counts = {known: chips for chips, known in _SHAPES[kind].items()}
        if shape in counts:
            return Topology(name, "tpu", kind, counts[shape])
        raise ConfigError(
            "--topology",
            name,
            f"no such slice of {kind}",
            f"Known: {', '.join(f'{kind}:{known}' for known in counts)}.",
        )
    gpus = [known for known in CHIPS if known[0] in "HA"]
    if (match := re.fullmatch(r"gpu:(\d+)x(\w+)", name)) and match[2] in gpus and 0 < int(match[1]) <= 256:
        return Topology(name, "gpu", match[2], int(match[1]))
    if (match := re.fullmatch(r"cpu:(\d+)", name)) and 0 < int(match[1]) <= 16:
        return Topology(name, "cpu", "cpu", int(match[1]))
    raise ConfigError(
        "--topology",
        name or None,
        "unknown hardware" if name else "no hardware named",
        f"Use a slice such as v5e:8x8, v5p:4x4x4 or v6e:8x8, gpu:8x{gpus[0]} (or {', '.join(gpus[1:])}), or cpu:2.",
    )


def described(config: Config, topology: Topology) -> Config:
    """`config` as it is planned for `topology`; ConfigError if that has too few chips.

    A folder of a model that is not on this machine is replaced by `model.size`.
    """
    config = replace(config, placement=replace(config.placement, platform=topology.platform))
    folder = model_folder(config)
    if folder and not folder.expanduser().is_dir():
        if config.model.size == ModelConfig().size:
            raise ConfigError(
                "model.path",
                str(folder),
                "no such folder here, and model.size names no other model",
                "Set model.size to the model's size, as qwen3_8b.",
            )
        config = replace(config, model=replace(config.model, path=""))
    wanted = device_processes(config)
    if topology.platform == "gpu" and topology.count <= 8:  # one machine
        check_inventory(config, Inventory("gpu", topology.count, int(topology.chip.usable_bytes / 2**20)))
    elif sum(wanted.values()) > topology.count:
        largest = max(wanted, key=lambda name: wanted[name]).partition("-")[0]
        needed = ", ".join(f"{name} {count}" for name, count in wanted.items())
        reason = f"{topology.name} has {topology.count} chips, needed are {sum(wanted.values())} ({needed})"
        raise ConfigError(
            f"{'learner' if largest == COLOCATED else largest}.mesh",
            max(wanted.values()),
            reason,
            "Use smaller meshes, fewer samplers, or a larger topology.",
        )
    return config


def usable_bytes(config: Config, topology: Topology) -> dict[str, float]:
    """The bytes of a chip that JAX may use in the process of a learner and of a sampler."""
    usable, wanted = topology.chip.usable_bytes, device_processes(config)
    shares = {"learner": 1.0, "sampler": 1.0}
    if topology.platform == "gpu" and COLOCATED not in wanted and sum(wanted.values()) > topology.count:
        shares = {name: memory_fractions(config)[f"{name}{'-0' * (name == 'sampler')}"] for name in shares}
    return {name: share * usable for name, share in shares.items()}


def limits(config: Config, topology: Topology) -> dict[str, float]:
    """The bytes of a chip that each role may use: for samplers, their share of `usable_bytes`."""
    usable = usable_bytes(config, topology)
    return usable | {"sampler": (config.sampler.memory_fraction or 1.0) * usable["sampler"]}


def tpu_environment() -> dict[str, str]:
    """This process's environment variables, changed so that a child compiles for TPU without searching for one."""
    # Programs compiled for a topology are written to the compilation cache but cannot be read back, so it is off.
    settings = {"JAX_ENABLE_COMPILATION_CACHE": "false", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    # libtpu locks the machine for the process that uses its chips; a compiler uses none.
    return os.environ | settings | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}


# --- roofline


@dataclass(frozen=True)
class Times:
    """The least seconds that a program needs for its arithmetic, its memory traffic and its collectives."""

    compute_s: float
    memory_s: float
    network_s: float

    @property
    def least_s(self) -> float:
        """The least time of all: that of the largest part, if the others overlap with it entirely."""
        return max(self.compute_s, self.memory_s, self.network_s)

    @property
    def bound(self) -> str:
        """The part that takes longest: compute, memory or network."""
        parts = {"compute": self.compute_s, "memory": self.memory_s, "network": self.network_s}
        return max(parts, key=lambda name: parts[name])


def times(chip: Chip, flops: float, memory_bytes: float, sent_bytes: float) -> Times:
    """The least times of a program on `chip`: the roofline of Williams et al., 2009, and a roof for the network."""
    return Times(flops / chip.flops_s, memory_bytes / chip.memory_bytes_s, sent_bytes / chip.link_bytes_s)


# Seconds per GB of the channel `tcp`, measured on two cores of an AMD EPYC (docs/results/transfer.md): the digest at
# either end, the thread of a learner's host that sends, and a reader.
_DIGEST_S_GB, _SENDER_S_GB, _READER_S_GB = 0.24, 0.25, 0.38


def transfer_s(config: Config, chip: Chip, size_bytes: float) -> float:
    """The seconds from a step's end until all samplers and the evaluator have its weights of `size_bytes`.

    Every host of a learner sends its share of each copy, every host of a sampler reads its own, with a thread for each
    connection. With relays the learner sends two copies; a relay reads over one connection, and sends two copies in
    less time than that takes. Samplers of several hosts are no relays.
    """
    learner, sampler, gb = config.learner.mesh.devices, config.sampler.mesh.devices, size_bytes / 1e9
    if channel_of(config) == "device":
        return size_bytes / learner / chip.link_bytes_s
    senders, readers, copies = chip.hosts(learner), chip.hosts(sampler), engines(config)
    relayed = config.transfer.relay == "tree" and readers == 1 and copies > 2
    copies, connections = (2, 1) if relayed else (copies, senders * config.transfer.connections)
    digest_s, sender_s = gb * _DIGEST_S_GB / senders, gb * _SENDER_S_GB * copies / senders
    reader_s = gb * (_DIGEST_S_GB + _READER_S_GB) / readers / connections
    wire_s = size_bytes / chip.host_bytes_s * max(copies / senders, (1 + relayed) / readers)
    return digest_s + max(sender_s, reader_s, wire_s)
