"""The learner's and the engine's programs, compiled for TPU topologies without chips.

    python tpu_programs.py TOPOLOGY SIZE

SIZE is `tiny`, on meshes of 4 chips, `qwen3_0p6b`, by its config file on 16, `rows_of_32k` or `inputs_on_host`, the
learner of that file on 8, or `rings`, an engine with six layers of Gemma 3 1B on 4. The caller sets the environment
(`aot.tpu_environment`), which libtpu reads once, when it is loaded.
No parameter is created. Every line on stdout is one program's cost as JSON, with facts about its text.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxroll.config import Config, LearnerConfig, MeshConfig, SamplerConfig, load
from jaxroll.models import families
from jaxroll.models.families import ModelSpec
from jaxroll.tools import aot

CONFIGS = Path(__file__).parents[3] / "configs"
COLLECTIVES = ("all-reduce", "all-gather")  # as the compiler writes them: " all-gather(", " all-gather-start("
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]+)\]")


def tiny() -> Config:
    """The default model on 4 chips."""
    return Config(
        learner=LearnerConfig(mesh=MeshConfig(fsdp=2, tensor=2)),
        sampler=SamplerConfig(mesh=MeshConfig(data=2, tensor=2), decode_chunk=8),
    )


def qwen3() -> Config:
    """The config file, which gives four chips to each role, on sixteen: four times the rows and slots."""
    more = (
        "learner.mesh.tensor=4",
        "learner.micro_batch_rows=32",
        "sampler.mesh.data=4",
        "sampler.slots=256",
        "sampler.prefill_rows=32",
    )
    return load(CONFIGS / "rlvr_qwen3_0p6b.py", more)


def rows_of_32k() -> Config:
    """The config file with packed rows of 32,768 tokens, each divided over two devices."""
    more = (
        "learner.mesh.fsdp=2",
        "learner.mesh.tensor=2",
        "learner.mesh.sequence=2",
        "learner.row_tokens=32768",
        "learner.micro_batch_rows=2",
        "learner.scan_layers=True",
    )
    return load(CONFIGS / "rlvr_qwen3_0p6b.py", more)


def inputs_on_host() -> Config:
    """`rows_of_32k`, with the inputs of the layers in host memory until the backward pass."""
    config = rows_of_32k()
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, remat="offload"))


def rings() -> Config:
    """The config file with requests of 8,704 tokens."""
    more = ("sampling.max_tokens=8192", "learner.row_tokens=8704", "sampler.prefill_buckets=512")
    return load(CONFIGS / "gsm8k_gemma3_1b.py", more)


CONFIG: dict[str, Callable[[], Config]] = {
    "tiny": tiny, "qwen3_0p6b": qwen3, "rows_of_32k": rows_of_32k, "inputs_on_host": inputs_on_host, "rings": rings
}  # fmt: skip
UPDATES = ("update of a layer", "update of a layer, moments in host memory")
ROLES = {"rows_of_32k": ("learner",), "inputs_on_host": ("learner",), "rings": ("sampler",)}
LAYERS = {"rings": 6}  # the first ones


def programs_of(config: Config, spec: ModelSpec, topology: str, roles: tuple[str, ...]) -> Iterator[aot.Described]:
    """The learner's programs and the engine's, each on its mesh in `topology`."""
    if "learner" in roles:
        mesh = aot.topology_mesh(config.learner.mesh, topology)
        yield from aot.learner_programs(config, spec, mesh)[1]
        for offload, name in enumerate(UPDATES):
            learner = dataclasses.replace(config.learner, scan_layers=True, optimizer_offload=bool(offload))
            programs, _ = aot.learner_programs(dataclasses.replace(config, learner=learner), spec, mesh)
            yield aot.Described(name, "", programs.lowered("layer"))
    if "sampler" in roles:
        yield from aot.engine_programs(config, spec, aot.topology_mesh(config.sampler.mesh, topology))[1]


def described(text: str) -> dict[str, Any]:
    """Facts about a compiled program: its collectives, its kernels, the numbers of copies by size (a MiB or more), the
    number of copies back from vector memory, and the bytes per chip of its largest array and largest gathered array.
    """
    return {
        "collectives": {kind: text.count(f" {kind}") for kind in COLLECTIVES},
        "custom_calls": text.count("tpu_custom_call"),
        "copies": Counter(size for size in copied(text) if size >= 2**20),
        "written_back": Counter(size for size in written_back(text) if size >= 2**20),
        "largest_bytes": size_bytes(text),
        "gathered_bytes": max(map(size_bytes, results("all-gather", text)), default=0),
    }


def copied(text: str) -> list[int]:
    """The bytes of each copy within the chip's main memory; S(1) is its vector memory."""
    return [size_bytes(made) for made in results("copy", text) if "S(1)" not in made]


def written_back(text: str) -> list[int]:
    """The bytes of each copy from vector memory to the chip's main memory, which is named first.

    The array was made in vector memory, or fetched there whole, changed and written back.
    """
    made = (result.partition("}") for result in results("copy", text))
    return [size_bytes(target) for target, _, source in made if "S(1)" in source and "S(1)" not in target]


def results(kind: str, text: str) -> list[str]:
    """The result of each operation of this kind in the compiler's notation: an array, or a tuple of several.

    The result of a `-start` operation also names its operands.
    """
    made = re.compile(rf" = (.*?) {kind}(?:-start)?\(")
    found = (made.search(line) for line in text.splitlines())
    return [match[1] for match in found if match]


def size_bytes(text: str) -> int:
    """The bytes of the largest array whose shape occurs in `text`; 0 if there is none."""
    found = set(ARRAY.findall(text))
    return max((BYTES[dtype] * math.prod(map(int, shape.split(","))) for dtype, shape in found), default=0)


def main(topology: str, size: str) -> None:
    """Compile all programs and print one line of JSON per program."""
    config = CONFIG[size]()
    spec = families.spec(config.model.size, compute_dtype=config.model.dtype)
    layers = LAYERS.get(size, spec.layers)
    spec = dataclasses.replace(spec, layers=layers, windows=spec.windows[:layers])
    for one in programs_of(config, spec, topology, ROLES.get(size, ("learner", "sampler"))):
        program, cost = aot.finished(one.name, one.lowered)
        row = dataclasses.asdict(cost) | {"peak_bytes": cost.peak_bytes, "attention": one.attention}
        memory = program.memory_analysis()
        assert memory is not None, f"{topology} reports no memory"
        row["host_argument_bytes"] = memory.host_argument_size_in_bytes
        row["host_alias_bytes"] = memory.host_alias_size_in_bytes
        row["highest_bytes"] = memory.peak_memory_in_bytes  # of a chip, at any time of the call
        print(json.dumps(row | described(program.as_text() or "")), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
