"""Ahead-of-time compilation: the cost of a jitted program on devices that this machine does not have.

`libtpu` compiles for a named TPU topology on a CPU machine. It reads its environment variables when it is loaded, so
compile in a child process started with `chips.tpu_environment()`. Nothing here uses a real device.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from jaxroll import disk, sharding
from jaxroll.config import Config, MeshConfig
from jaxroll.config.derived import cache_tokens, model_folder, page_size
from jaxroll.engine import device
from jaxroll.engine import programs as engine
from jaxroll.engine.engine import EngineConfig
from jaxroll.engine.requests import Sizes
from jaxroll.errors import ConfigError, InfraError, one_line
from jaxroll.kernels.choice import EngineChoices
from jaxroll.learner import lora, step, trainer
from jaxroll.models import cache, families, folders
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.sharding import LEARNER, SAMPLER, Layout
from jaxroll.transfer import manifest

Tree = Any  # a pytree


@dataclass(frozen=True)
class ProgramCost:
    """The compiler's cost analysis of one program. Bytes and flops are those of one device, for one call."""

    name: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # outputs stored in donated arguments
    temp_bytes: int
    code_bytes: int
    flops: float
    accessed_bytes: float
    compile_s: float
    host_temp_bytes: int = 0  # temporaries in the memory of the host

    @property
    def peak_bytes(self) -> int:
        """Device memory that the program needs: arguments, outputs not in donated arguments, temporaries, code."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


def topology_mesh(cfg: MeshConfig, topology: str, platform: str = "tpu") -> Mesh:
    """A mesh on the devices of a named topology, such as "v5e:2x2"; ConfigError for an unknown topology."""
    try:
        described = topologies.get_topology_desc(platform=platform, topology_name=topology)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            "topology",
            topology,
            f"cannot be described on {platform}: {error}",
            "Install libtpu; names are like v5e:2x2.",
        ) from error
    return sharding.build(cfg, described.devices)


def abstract(shapes: Tree, shardings: Tree) -> Tree:
    """`shapes` (a tree of objects with shape and dtype) as ShapeDtypeStructs with `shardings` (a tree, or one)."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, shapes)
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings)


def compiled(name: str, jitted: Any, *args: Tree, **kwargs: Tree) -> tuple[jax.stages.Compiled, ProgramCost]:
    """Compile `jitted` for abstract arguments, whose shardings name the devices; return the program and its cost."""
    return finished(name, jitted.lower(*args, **kwargs))


def finished(name: str, lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, ProgramCost]:
    """Compile `lowered` for the devices that its arguments name; return the program and its cost."""
    started = time.perf_counter()
    program = lowered.compile()
    return program, _cost(name, program, time.perf_counter() - started)


def _cost(name: str, program: jax.stages.Compiled, compile_s: float) -> ProgramCost:
    memory, counted = program.memory_analysis(), _counted(program.cost_analysis())
    if memory is None:
        raise InfraError(f"the compiler of {name} gives no memory analysis on this platform")
    return ProgramCost(
        name=name,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        flops=float(counted.get("flops", 0.0)),
        accessed_bytes=float(counted.get("bytes accessed", 0.0)),
        compile_s=compile_s,
        host_temp_bytes=memory.host_temp_size_in_bytes,
    )


def _counted(analysis: Mapping[str, float] | list[Mapping[str, float]] | None) -> Mapping[str, float]:
    """The cost table of one device; some backends return it in a list."""
    if isinstance(analysis, list):
        return analysis[0] if analysis else {}
    return analysis or {}


# --- the programs of the roles


def model(config: Config) -> ModelSpec:
    """The model of the config: of its folder if that is here, else of `model.size`."""
    if folder := model_folder(config):
        return folders.described(folder.expanduser(), config.model.dtype)
    return families.spec(config.model.size, compute_dtype=config.model.dtype)


@dataclass(frozen=True)
class Described:
    """One program before compilation. `attention` is the chosen implementation, empty for a program without one."""

    name: str
    attention: str
    lowered: jax.stages.Lowered


def learner_programs(
    config: Config, spec: ModelSpec, mesh: Mesh
) -> tuple[trainer.TrainingPrograms, Iterator[Described]]:
    """The programs of every optimizer step on `mesh`, and each of them, lowered when it is asked for."""
    recipe = step.Recipe.of(config, spec, Layout(mesh, LEARNER))
    programs, rows = trainer.TrainingPrograms(recipe), config.learner.micro_batch_rows

    def found() -> Iterator[Described]:
        yield Described("accumulate", str(recipe.attention), programs.lowered("accumulate", rows))
        if recipe.added:
            yield Described("logprobs", str(recipe.attention), programs.lowered("logprobs", rows))
        # Of layers in a loop, too: there several programs do the same work with smaller temporaries.
        yield Described("apply", "", programs.lowered("apply"))
        yield Described("publish", "", published(programs, config))

    return programs, found()


def held_by_learner(config: Config, programs: trainer.TrainingPrograms) -> dict[str, int]:
    """The bytes of one device that a learner holds all the time, by kind; host memory does not count."""
    learner, state = config.learner, programs.state
    found = {
        "parameters": sharding.device_bytes((state.params, programs.base)),
        "optimizer": sharding.device_bytes(state.opt_state),
        "gradients": sharding.device_bytes(programs.accumulator.grads),
    }
    own = programs.params if programs.recipe.lora is None else state.params
    if learner.reference != "none" and not learner.reference_offload:
        found["reference"] = sharding.device_bytes(own)
    if learner.critic != "none" and not learner.critic_offload:
        moments = 2 * sharding.device_bytes(state.params)  # `optimizer_offload` moves those of the policy alone
        found["critic"] = found["parameters"] + moments + found["gradients"]
    sent = state.params if _sent_adapters(config) else programs.params
    found["publication"] = sharding.device_bytes(sent) * _sent_bytes(config) // 4
    return found


def published(programs: trainer.TrainingPrograms, config: Config) -> jax.stages.Lowered:
    """The copy of the parameters, in the dtype of the transfer, that a version is sent from."""
    params = programs.state.params if _sent_adapters(config) else programs.params
    return manifest.cast_and_copy.lower(dict(params), config.transfer.dtype)


def version_bytes(config: Config, spec: ModelSpec) -> int:
    """The bytes that a sampler receives with every version: all parameters, or adapters alone."""
    if (adapters := _sent_adapters(config)) is None:
        return families.parameter_count(spec) * _sent_bytes(config)
    return sum(math.prod(leaf.shape) for leaf in lora.abstract(spec, adapters).values()) * _sent_bytes(config)


def _sent_adapters(config: Config) -> lora.Lora | None:
    """The adapters if samplers receive them alone; None if they receive all parameters."""
    return lora.Lora.of(config.learner) if config.learner.lora_publish == "adapters" else None


def _sent_bytes(config: Config) -> int:
    return 2 if config.transfer.dtype == "bfloat16" else 4


def engine_programs(
    config: Config, spec: ModelSpec, mesh: Mesh, *, largest_only: bool = False
) -> tuple[engine.EnginePrograms, Iterator[Described]]:
    """The same for a sampler: prefill by bucket (fresh and extending), insert, and a dispatch of decode steps.

    With `largest_only`, prefill has its largest bucket alone: smaller ones need less of everything.
    """
    settings = EngineConfig.of(config, "sampler")
    spec = settings.model(folders.with_draft(config.sampler, spec))
    sizes = settings.sizes(cache.shards_of(settings.slots, mesh, SAMPLER))
    engine.check_sizes(sizes, settings.weight_swap)
    sizes = replace(sizes, buckets=sizes.buckets[-1:]) if largest_only else sizes
    chosen, sizes = engine.kernels_and_sizes(spec, mesh, sizes, **settings.kernels)
    fused = {"prefill": str(chosen.prefill), "decode": str(chosen.paged)}

    def found() -> Iterator[Described]:
        for name, lowered in engine.lowered(spec, mesh, SAMPLER, sizes, chosen).items():
            yield Described(name, fused.get(name.split("_")[0], ""), lowered)

    return engine.build(spec, mesh, SAMPLER, sizes, chosen), found()


def sized_cache(
    config: Config, spec: ModelSpec, mesh: Mesh, limit_bytes: int, described: str, folder: Path
) -> tuple[Config, str]:
    """`config` with the pages that fit `sampler.memory_fraction` of `limit_bytes`, and a line about them.

    As a sampler chooses them at its start, from programs compiled for `described`, a topology, or read from `folder`.
    ConfigError if the model does not fit.
    """
    settings = EngineConfig.of(config, "sampler")
    spec = settings.model(folders.with_draft(config.sampler, spec))
    sizes = settings.sizes(cache.shards_of(settings.slots, mesh, SAMPLER))
    engine.check_sizes(sizes, settings.weight_swap)
    share = device.memory_share(spec, mesh, SAMPLER, limit_bytes, settings.memory_fraction)

    def run_bytes(sizes: Sizes, attention: EngineChoices) -> int:
        """See `device.run_bytes`; a program that is too large for the topology counts with all that it needs."""
        sizes, costs = replace(sizes, buckets=sizes.buckets[-1:]), []
        for name, lowered in engine.lowered(spec, mesh, SAMPLER, sizes, attention).items():
            result = compiled_once(Described(name, "", lowered), lowered.as_text(), described, folder)
            costs.append(result.cost or ProgramCost(name, 0, 0, 0, result.needed_bytes, 0, 0.0, 0.0, 0.0))
        most = max(cost.temp_bytes + cost.output_bytes - cost.alias_bytes for cost in costs)
        return most + sum(cost.code_bytes for cost in costs)

    sizes, share = device.sized(spec, mesh, SAMPLER, sizes, share, run_bytes, **settings.kernels)
    sampler = replace(config.sampler, cache_pages=sizes.pages * sizes.shards)
    return replace(config, sampler=sampler), device.described(sizes, share)


def served_params(spec: ModelSpec, programs: engine.EnginePrograms) -> dict[str, jax.ShapeDtypeStruct]:
    """The abstract parameters of a sampler, with their shardings."""
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=programs.params[name])
        for name, leaf in model_params.served(spec).items()
    }


def page_tokens(config: Config) -> int:
    """The tokens of a page of the KV cache."""
    return page_size(config.sampler.page_tokens, cache_tokens(config))


# --- compilation with a cache of results: a program that was compiled before is read from a file

# The compiler's refusal of a program that does not fit, and the memory that it would need.
_TOO_LARGE = re.compile(
    r"Ran out of memory (?:in memory space hbm.*?Used |on HBM, .*?HLO temporaries \()([\d.]+)([KMG]?)", re.DOTALL
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Result:
    """A compiled program: its cost and text. One that does not fit has neither, but the bytes that it would need.

    If the compiler refuses it for another reason, `refusal` is that.
    """

    cost: ProgramCost | None
    text: str
    needed_bytes: int
    cached: bool
    refusal: str = ""


def compiled_once(one: Described, text: str, topology: str, folder: Path) -> Result:
    """Compile `one`, whose lowered text is `text`, or read what an earlier call wrote to `folder`."""
    version = " ".join(f"{name} {_version(name)}" for name in ("jax", "jaxlib", "libtpu"))
    key = hashlib.sha256("\0".join((text, topology, version)).encode()).hexdigest()[:32]
    path = folder / f"{key}.json.gz"
    if path.exists():
        row = json.loads(gzip.decompress(path.read_bytes()))
        cost = row.pop("cost")
        return Result(cost and ProgramCost(**cost), **row, cached=True)
    try:
        program, cost = finished(one.name, one.lowered)
        result = Result(cost, program.as_text() or "", cost.peak_bytes, cached=False)
    except jax.errors.JaxRuntimeError as error:
        match = _TOO_LARGE.search(str(error))
        needed = int(float(match[1]) * _UNITS[match[2]]) if match else 0
        result = Result(None, "", needed, cached=False, refusal="" if match else one_line(str(error), 400))
    row = asdict(result)
    del row["cached"]
    folder.mkdir(parents=True, exist_ok=True)
    with disk.replaced(path) as draft:
        draft.write_bytes(gzip.compress(json.dumps(row).encode(), 3))
    return result


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
