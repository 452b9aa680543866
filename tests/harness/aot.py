"""Ahead-of-time compilation: the cost of a jitted program on devices that this machine does not have.

`libtpu` compiles for a named TPU topology on a CPU machine. It reads its environment variables when it is loaded, so
compile in a child process started with `tpu_environment()`. Nothing here uses a real device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from jaxroll.config import MeshConfig
from jaxroll.errors import ConfigError, InfraError
from jaxroll.sharding import layout

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

    @property
    def peak_bytes(self) -> int:
        """Device memory that the program needs: arguments, outputs not in donated arguments, temporaries, code."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


def tpu_environment() -> dict[str, str]:
    """This process's environment variables, changed so that a child compiles for TPU without searching for one."""
    # Programs compiled for a topology are written to the compilation cache but cannot be read back, so it is off.
    settings = {"JAX_ENABLE_COMPILATION_CACHE": "false", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    # libtpu locks the machine for the process that uses its chips; a compiler uses none.
    return os.environ | settings | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}


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
    return layout.build(cfg, described.devices)


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
    )


def _counted(analysis: Mapping[str, float] | list[Mapping[str, float]] | None) -> Mapping[str, float]:
    """The cost table of one device; some backends return it in a list."""
    if isinstance(analysis, list):
        return analysis[0] if analysis else {}
    return analysis or {}
