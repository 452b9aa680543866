"""`jaxroll plan`: whether a config fits described hardware, and how fast it can be at best. Nothing runs on a device.

The programs of the learner and of a sampler are compiled ahead of time, each on a slice of its own with as many chips
as its mesh. Their text gives the FLOPs, memory traffic and collectives of one chip (`tools.hlo`), the chip's rates the
least times (`tools.chips`). Assumed: every answer has its full length; a decoding slot holds on average the prompt and
half an answer; members of a group share their prompt; rows are packed without gaps.

For GPUs the statistics are those of the programs of a TPU with as much memory, read with the GPU's rates.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxroll import sharding
from jaxroll.config import Config, MeshConfig
from jaxroll.config.derived import (
    answer_tokens,
    device_processes,
    engines,
    episode_tokens,
    micro_batch_tokens,
    own_samplers,
    roles_with_devices,
    rollouts_per_step,
)
from jaxroll.errors import EXIT_CONFIG, ConfigError, no_memory_limit
from jaxroll.models import families, folders
from jaxroll.models.families import ModelSpec
from jaxroll.tools import aot, chips, hlo
from jaxroll.tools.chips import Chip, Times, Topology

GB = 1e9
_AT_ONCE = 2  # programs compiled at the same time
_HEARTBEAT_S = 8.0


@dataclass(frozen=True)
class PlannedRole:
    """A role before compilation: what its chips hold all the time, in bytes of one chip by kind, and its programs.

    `host_bytes` are those that each chip keeps in the memory of its host.
    """

    name: str
    chips: int
    slice: str
    resident: Mapping[str, int]
    programs: Iterator[aot.Described]
    host_bytes: int = 0


@dataclass(frozen=True)
class PlannedProgram:
    """A compiled program with its work on one chip, and the least times. `cost` is None if it does not fit."""

    role: str
    name: str
    attention: str
    cost: aot.ProgramCost | None
    needed_bytes: int
    work: hlo.Statistics
    times: Times
    cached: bool
    refusal: str = ""  # of the compiler, if that is not for the chip's main memory


@dataclass(frozen=True)
class Change:
    """A key of the config to change, the reason, and the remedy."""

    key: str
    value: object
    reason: str
    remedy: str


def main(config: Config, topology: Topology, folder: Path, *, as_json: bool) -> int:
    """Print the plan; the exit code is that of a refused config if it does not fit. `folder` caches programs."""
    began = time.monotonic()
    spec, chosen = aot.model(config), ""
    if config.sampler.memory_fraction:
        config, chosen = sized_cache(config, spec, topology, folder)
    roles = [learner(config, spec, topology), sampler(config, spec, topology)]
    rows = compiled(roles, config, topology, folder, _on_stderr)
    found = report(config, spec, topology, roles, rows)
    if chosen:
        found["roles"]["sampler"]["cache"] = chosen
    found["plan_s"] = round(time.monotonic() - began, 1)
    print(json.dumps(found) if as_json else "\n".join(lines(found)), flush=True)
    for change in found["change"]:
        error = ConfigError(change["key"], change["value"], change["reason"], change["remedy"])
        print(f"does not fit: {error}", file=sys.stderr)
    return EXIT_CONFIG if found["change"] else 0


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- roles


def _mesh(mesh: MeshConfig, topology: Topology) -> tuple[Mesh, str]:
    """The mesh of a role on a slice of its own, and the slice's name."""
    if topology.platform == "cpu":
        return sharding.build(mesh), topology.name
    name = topology.of_role(mesh.devices)
    return aot.topology_mesh(mesh, name), name


def learner(config: Config, spec: ModelSpec, topology: Topology) -> PlannedRole:
    """The learner on its slice."""
    mesh, name = _mesh(config.learner.mesh, topology)
    programs, described = aot.learner_programs(config, spec, mesh)
    moved = sharding.device_bytes(programs.state.opt_state, sharding.HOST_MEMORY)
    return PlannedRole("learner", mesh.size, name, aot.held_by_learner(config, programs), described, moved)


def sampler(config: Config, spec: ModelSpec, topology: Topology) -> PlannedRole:
    """One sampler on its slice. While a new version arrives, it holds two."""
    mesh, name = _mesh(config.sampler.mesh, topology)
    programs, described = aot.engine_programs(config, spec, mesh, largest_only=True)
    state, params = programs.state, aot.served_params(spec, programs)
    rings = sharding.device_bytes(state.cache.pools_of_rings())
    resident = {
        "parameters": sharding.device_bytes(programs.held),
        "arriving parameters": sharding.device_bytes(params),
        "KV pool": sharding.device_bytes((state.cache, state.side)) - rings,
    } | ({"KV rings": rings} if rings else {})
    resident["slots"] = sharding.device_bytes(state) - resident["KV pool"] - rings
    return PlannedRole("sampler", mesh.size, name, resident, described)


def sized_cache(config: Config, spec: ModelSpec, topology: Topology, folder: Path) -> tuple[Config, str]:
    """`config` with the pages that fit `sampler.memory_fraction` of a chip, and a line about them; see `aot`."""
    mesh, name = _mesh(config.sampler.mesh, topology)
    limit = chips.usable_bytes(config, topology)["sampler"]
    if not math.isfinite(limit):
        raise no_memory_limit(config.sampler.memory_fraction, topology.platform)
    line = "plan: compiling the programs of the sampler, for the size of its KV cache"
    with _repeated(lambda: _on_stderr(line), _HEARTBEAT_S):
        return aot.sized_cache(config, spec, mesh, int(limit), name, folder)


# --- compilation


def compiled(
    roles: Sequence[PlannedRole], config: Config, topology: Topology, folder: Path, progress: Callable[[str], None]
) -> list[PlannedProgram]:
    """Every program of `roles`, compiled two at a time or read from `folder`, in order."""
    pending: dict[Future[aot.Result], tuple[PlannedRole, aot.Described]] = {}
    rows: dict[tuple[str, str], PlannedProgram] = {}
    began, lowering = time.monotonic(), ""

    def report_line(line: str) -> None:
        progress(f"plan: {time.monotonic() - began:.0f} s: {line}")

    def report_pending() -> None:
        names = [f"compiling {role.name} {one.name}" for role, one in list(pending.values())]
        report_line(", ".join([f"lowering the programs of the {lowering}"] * bool(lowering) + names))

    def collect(most: int) -> None:
        while len(pending) > most:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                role, one = pending.pop(future)
                result = future.result()
                rows[role.name, one.name] = _row(role, one, result, config, topology.chip)
                report_line(f"{role.name} {one.name} {'read from the cache' if result.cached else 'compiled'}")

    order = []
    with _repeated(report_pending, _HEARTBEAT_S), ThreadPoolExecutor(_AT_ONCE) as pool:
        for role in roles:
            lowering = role.name
            for one in role.programs:
                order.append((role.name, one.name))
                pending[pool.submit(aot.compiled_once, one, one.lowered.as_text(), role.slice, folder)] = role, one
                collect(_AT_ONCE)
        lowering = ""
        collect(0)
    return [rows[name] for name in order]


@contextlib.contextmanager
def _repeated(call: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `call` from a thread of its own, again and again, while the block runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            call()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _row(role: PlannedRole, one: aot.Described, result: aot.Result, config: Config, chip: Chip) -> PlannedProgram:
    pages = math.ceil(episode_tokens(config) / aot.page_tokens(config))
    unknown = pages / 2 if one.name.startswith("extend") else 1.0  # its loops are over the pages before the chunk
    work = hlo.statistics(result.text, unknown_trips=unknown, context_tokens=context_tokens(config))
    least = chips.times(chip, work.flops, work.memory_bytes, work.sent_bytes)
    return PlannedProgram(
        role.name, one.name, one.attention, result.cost, result.needed_bytes, work, least, result.cached, result.refusal
    )


def context_tokens(config: Config) -> float:
    """The tokens that a decoding slot holds on average: the prompt and half an answer."""
    return episode_tokens(config) - answer_tokens(config) / 2


# --- the report


def report(
    config: Config, spec: ModelSpec, topology: Topology, roles: Sequence[PlannedRole], rows: Sequence[PlannedProgram]
) -> dict[str, Any]:
    """The plan as one JSON object."""
    own = {role.name: [row for row in rows if row.role == role.name] for role in roles}
    memory = {role.name: memory_of(role, own[role.name]) for role in roles}
    if config.placement.learner_samplers:
        memory["learner"]["samplers"] = sum(memory["sampler"].values())
    host = {name: max((row.cost.host_temp_bytes for row in rows if row.cost), default=0) for name, rows in own.items()}
    limits = chips.limits(config, topology)
    wanted = roles_with_devices(config)
    change = [refused(config, row) for row in rows if row.refusal] or changes(config, roles, memory, limits)
    speed = _speed(config, spec, topology, rows)
    if speed and speed["transfer_s"] > (limit_s := folders.with_transfer_deadline(config).transfer.deadline_s):
        change.append(
            Change(
                "transfer.deadline_s",
                config.transfer.deadline_s,
                f"a transfer takes at least {speed['transfer_s']:.0f} s",
                f"Set it to {math.ceil(2 * speed['transfer_s'] / limit_s * config.transfer.deadline_s)} or more.",
            )
        )
    return {
        "config": config.run.name,
        "topology": topology.name,
        "chip": topology.chip.name,
        "model": spec.name,
        "parameters": families.parameter_count(spec),
        "chips": topology.count,
        "chips_used": sum(device_processes(config).values()),
        "roles": {
            role.name: {
                "count": sum(name.partition("-")[0] == role.name for name in wanted) if role.name != "learner" else 1,
                "chips": role.chips,
                "slice": role.slice,
                "limit_bytes": limits[role.name] if math.isfinite(limits[role.name]) else None,
                "needed_bytes": sum(memory[role.name].values()),
                "memory": memory[role.name],
                "host_bytes": role.host_bytes + host[role.name],
            }
            for role in roles
        },
        "programs": [_program(row) for row in rows],
        "speed": speed,
        "fits": not change,
        "change": [asdict(one) for one in change],
    }


def memory_of(role: PlannedRole, rows: Sequence[PlannedProgram]) -> dict[str, int]:
    """The bytes of one chip by kind: what is held all the time, and what the most demanding program adds."""
    held, added, code = dict(role.resident), 0, 0
    for row in rows:
        if row.cost is None:  # the compiler names the sum of arguments, results, temporaries and code
            added = max(added, row.needed_bytes - sum(held.values()))
        else:
            new = 0 if row.name == "publish" else row.cost.output_bytes - row.cost.alias_bytes
            added = max(added, row.cost.temp_bytes + new)
            code += row.cost.code_bytes
    return held | {"temporaries": max(0, added), "code": code}


def _program(row: PlannedProgram) -> dict[str, Any]:
    cost, work = row.cost, row.work
    return {
        "role": row.role,
        "name": row.name,
        "attention": row.attention,
        "argument_bytes": cost.argument_bytes if cost else None,
        "output_bytes": cost.output_bytes - cost.alias_bytes if cost else None,
        "temporary_bytes": cost.temp_bytes if cost else None,
        "needed_bytes": row.needed_bytes,
        "flops": work.flops,
        "memory_bytes": work.memory_bytes,
        "sent_bytes": work.sent_bytes,
        "sent_by_kind": work.by_kind(),
        "largest_transfers": [asdict(one) for one in work.transfers[:5]],
        "kernels": work.kernels,
        "compute_s": row.times.compute_s,
        "memory_s": row.times.memory_s,
        "network_s": row.times.network_s,
        "least_s": row.times.least_s,
        "bound": row.times.bound,
        "compile_s": round(cost.compile_s, 1) if cost else None,
        "cached": row.cached,
    }


def _speed(config: Config, spec: ModelSpec, topology: Topology, rows: Sequence[PlannedProgram]) -> dict[str, Any]:
    """The least seconds of one training step by role, and the bottleneck; empty if a program does not fit."""
    if any(row.cost is None for row in rows):
        return {}
    by_name = {f"{row.role} {row.name.partition('_')[0]}": row for row in rows}
    least = {name: row.times.least_s for name, row in by_name.items()}
    schedule, learner, engine = config.schedule, config.learner, config.sampler
    requests, episode = rollouts_per_step(config), episode_tokens(config)
    answer = answer_tokens(config)
    micro = math.ceil(requests * episode / micro_batch_tokens(learner))
    learner_s = micro * (least["learner accumulate"] + least.get("learner logprobs", 0.0))
    learner_s += learner.minibatches * least["learner apply"] + least["learner publish"] / schedule.publish_every
    bucket, prompt = engine.prefill_buckets[-1], max(1, episode - answer)
    chunks = math.ceil(prompt / bucket)
    prefill_s = least["sampler prefill"] + (chunks - 1) * least["sampler extend"]
    decode_s = least["sampler decode"]
    sampler_s = requests * answer * decode_s / engine.slots + schedule.groups_per_step * prefill_s / engine.prefill_rows
    sampler_s /= len(own_samplers(config))  # those of the learner work for a part of the time only
    size = aot.version_bytes(config, spec)
    transfer_s = chips.transfer_s(config, topology.chip, size)
    parts = {"learner": learner_s, "sampler": sampler_s, "transfer": transfer_s / schedule.publish_every}
    alone = schedule.alpha == 0 or config.placement.colocated  # the roles wait for each other
    step_s = sum(parts.values()) if alone else max(parts.values())
    slowest = max(parts, key=lambda name: parts[name])
    decisive = {"learner": "learner accumulate", "sampler": "sampler decode"}.get(slowest)
    return {
        "micro_batches": micro,
        "decode_step_s": decode_s,
        "learner_s": learner_s,
        "sampler_s": sampler_s,
        "transfer_bytes": size,
        "transfer_hosts": topology.chip.hosts(learner.mesh.devices),
        "transfer_receivers": engines(config),
        "transfer_s": transfer_s,
        "step_s": step_s,
        "sampled_tokens_s": requests * answer / sampler_s,
        "trained_tokens_s": requests * episode / learner_s,
        "tokens_s": requests * episode / step_s,
        "bottleneck": f"{decisive}: {by_name[decisive].times.bound}" if decisive else slowest,
    }


# --- keys to change


def changes(
    config: Config, roles: Sequence[PlannedRole], memory: Mapping[str, Mapping[str, int]], limits: Mapping[str, float]
) -> list[Change]:
    """For every role that needs more memory than its chips have, the key that helps most."""
    found = []
    if config.placement.colocated:
        needed, limit = sum(sum(memory[role.name].values()) for role in roles), limits["learner"]
        if needed > limit >= max(sum(memory[role.name].values()) for role in roles):
            reason = f"the roles together need {needed / GB:.1f} GB of a chip, which has {limit / GB:.1f}"
            return [Change("placement.colocated", True, reason, "Set it to False, with chips for each role.")]
    for role in roles:
        needed, limit = sum(memory[role.name].values()), limits[role.name]
        if needed > limit:
            choose = _learner_change if role.name == "learner" else _sampler_change
            found.append(choose(config, memory[role.name], limit, needed))
    return found


def refused(config: Config, row: PlannedProgram) -> Change:
    """The key to change for a program that the compiler refuses."""
    reason = f"the compiler refuses {row.role} {row.name}: {row.refusal}"
    if row.name == "decode":  # page tables in scalar memory
        size = aot.page_tokens(config)
        remedy = f"Set it to {2 * size} (now {size}), or use fewer sampler.slots."
        return Change("sampler.page_tokens", config.sampler.page_tokens, reason, remedy)
    key, value = ("learner.attention", config.learner.attention)
    if row.role == "sampler":
        key, value = "sampler.prefill_attention", config.sampler.prefill_attention
    return Change(key, value, reason, "Set it to 'xla'.")


def _why(role: str, kind: str, used: float, needed: float, limit: float) -> str:
    return f"the {role} needs {needed / GB:.1f} GB of a chip, which has {limit / GB:.1f}; {kind} take {used / GB:.1f}"


def _learner_change(config: Config, memory: Mapping[str, int], limit: float, needed: float) -> Change:
    learner, mesh = config.learner, config.learner.mesh
    if (samplers := memory.get("samplers", 0)) and needed - samplers <= limit:
        why = _why("learner", "samplers on its chips", samplers, needed, limit)
        return Change("placement.learner_samplers", config.placement.learner_samplers, why, "Set it to 0.")
    held = needed - memory["temporaries"] - memory["code"]
    if held > 0.8 * limit:
        size = 2 ** math.ceil(math.log2(mesh.fsdp * held / (0.7 * limit)))
        rows = learner.micro_batch_rows
        more = math.lcm(rows, size * mesh.data * mesh.expert)
        also = f", and learner.micro_batch_rows to {more}" if more != rows else ""
        moved = not learner.optimizer_offload and needed - memory["optimizer"] < 0.95 * limit
        also += ", or learner.optimizer_offload and learner.scan_layers to true" if moved else ""
        return Change(
            "learner.mesh.fsdp",
            mesh.fsdp,
            _why("learner", "parameters, optimizer, gradients and copies of them", held, needed, limit),
            f"Set it to {size}{also}, or train adapters (learner.lora_rank).",
        )
    why = _why("learner", "temporaries", memory["temporaries"], needed, limit)
    if learner.remat == "none":
        return Change("learner.remat", "none", why, "Set it to 'layer': layers are computed again, not stored.")
    if learner.micro_batch_rows > mesh.shards:
        half = max(mesh.shards, learner.micro_batch_rows // 2 // mesh.shards * mesh.shards)
        return Change("learner.micro_batch_rows", learner.micro_batch_rows, why, f"Set it to {half}.")
    if learner.logits_mb > 128:
        return Change("learner.logits_mb", learner.logits_mb, why, f"Set it to {learner.logits_mb // 4}.")
    also = "" if learner.remat == "offload" else ", or learner.remat to 'offload': inputs of layers are in host memory"
    remedy = f"Set it to {2 * mesh.sequence}: rows are divided{also}."
    return Change("learner.mesh.sequence", mesh.sequence, why, remedy)


def _sampler_change(config: Config, memory: Mapping[str, int], limit: float, needed: float) -> Change:
    engine = config.sampler
    weights, pool = memory["parameters"] + memory["arriving parameters"], memory["KV pool"]
    free = 0.98 * limit - (needed - pool)
    longest = math.ceil(episode_tokens(config) / aot.page_tokens(config))
    pages = engine.cache_pages or (engine.slots * longest + engine.mesh.shards * max(2 * engine.prefill_rows, 16))
    fitting = int(pages * free / pool) // engine.mesh.shards * engine.mesh.shards if pool else 0
    if fitting >= engine.mesh.shards * (longest + 1):
        return Change(
            "sampler.cache_pages",
            engine.cache_pages,
            _why("sampler", "KV pages", pool, needed, limit),
            f"Set it to {fitting} (now {pages}); requests that find no page wait.",
        )
    if weights > 0.5 * limit:
        size = 2 ** math.ceil(math.log2(engine.mesh.tensor * weights / (0.5 * limit)))
        reason = _why("sampler", "its parameters and those of the next version", weights, needed, limit)
        return Change(
            "sampler.mesh.tensor", engine.mesh.tensor, reason, f"Set it to {max(size, 2 * engine.mesh.tensor)}."
        )
    if memory["temporaries"] > pool:
        reason = _why("sampler", "temporaries", memory["temporaries"], needed, limit)
        return Change(
            "sampler.prefill_rows", engine.prefill_rows, reason, f"Set it to {max(1, engine.prefill_rows // 2)}."
        )
    reason = _why("sampler", "KV pages", pool, needed, limit)
    return Change("sampler.slots", engine.slots, reason, f"Set it to {max(1, engine.slots // 2)}.")


# --- text


def lines(found: Mapping[str, Any]) -> list[str]:
    """The plan as lines of text."""
    used = (
        f"{found['chips_used']} of {found['chips']} chips" if found["chips_used"] <= found["chips"] else "shared chips"
    )
    out = [f"{found['model']} ({found['parameters'] / GB:.2f} billion parameters) on {found['topology']}, {used}", ""]
    for name, role in found["roles"].items():
        limit = f" of {role['limit_bytes'] / GB:.2f}" if role["limit_bytes"] else ""
        out.append(
            f"{name}: {role['count']} × {role['chips']} chips; {role['needed_bytes'] / GB:.2f}{limit} GB of each"
        )
        out += [f"  {kind:<20}{size / GB:8.2f} GB" for kind, size in role["memory"].items() if size]
        out += [f"  {'in host memory':<20}{role['host_bytes'] / GB:8.2f} GB"] if role["host_bytes"] else []
        out += [f"  {role['cache']}"] if "cache" in role else []
    out += ["", f"{'program':<22}{'TFLOP':>9}{'GB read/written':>17}{'GB sent':>9}{'least ms':>10}  bound", ""]
    for row in found["programs"]:
        name = f"{row['role']} {row['name']}"
        out.append(
            f"{name:<22}{row['flops'] / 1e12:9.2f}{row['memory_bytes'] / GB:17.2f}{row['sent_bytes'] / GB:9.2f}"
            f"{1e3 * row['least_s']:10.2f}  {row['bound']}"
        )
    if speed := found["speed"]:
        hosts, to = speed["transfer_hosts"], speed["transfer_receivers"]
        sent = f"{speed['transfer_bytes'] / GB:.1f} GB from {hosts} host{'s' * (hosts > 1)} to {to}"
        out += [
            "",
            f"step: at least {speed['step_s']:.1f} s, {speed['tokens_s']:,.0f} tokens/s",
            f"  slowest: {speed['bottleneck']}",
            f"  learner {speed['learner_s']:.1f} s ({speed['micro_batches']} micro-batches)",
            f"  samplers {speed['sampler_s']:.1f} s, {speed['sampled_tokens_s']:,.0f} tokens/s",
            f"  transfer {speed['transfer_s']:.1f} s ({sent})",
        ]
    out += ["", "It fits." if found["fits"] else "It does not fit."]
    return out
