"""The learner's and the engine's programs with fused attention kernels, compiled for TPU topologies without chips.

    python tpu_kernels.py TOPOLOGY SIZE

SIZE is `lean`, a model of one layer whose heads fill a TPU's lanes, on meshes of 4 chips, and the programs of
preemption, or `qwen3_0p6b` on 16.
The caller sets the environment (`aot.tpu_environment`). Every line on stdout is one program as JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax

from jaxroll.config import Config, LearnerConfig, MeshConfig
from jaxroll.engine import programs as engine
from jaxroll.engine import requests
from jaxroll.learner import step, trainer
from jaxroll.models import families
from jaxroll.models.families import ModelSpec
from jaxroll.sharding import LEARNER, SAMPLER, Layout
from jaxroll.tools import aot

LEAN = ModelSpec("lean", 256, 1, 256, 4, 2, 128, 320, compute_dtype="bfloat16", remat="layer")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the settings of its programs."""

    spec: ModelSpec
    learner_mesh: MeshConfig
    sampler_mesh: MeshConfig
    row_tokens: int
    micro_batch_rows: int
    sizes: requests.Sizes


CASES = {
    "lean": Case(
        LEAN,
        MeshConfig(fsdp=2, tensor=2),
        MeshConfig(data=2, tensor=2),
        384,
        4,
        requests.Sizes(
            slots=8, max_tokens=256, rows=4, inserts=4, buckets=(192,), chunk=4, max_stops=4, page_tokens=32, shards=2
        ),
    ),
    "qwen3_0p6b": Case(
        families.spec("qwen3_0p6b", compute_dtype="bfloat16"),
        MeshConfig(fsdp=8, tensor=2),
        MeshConfig(data=4, tensor=4),
        4096,
        16,
        requests.Sizes(
            slots=256,
            max_tokens=4096,
            rows=16,
            inserts=16,
            buckets=(1024,),
            chunk=16,
            max_stops=4,
            page_tokens=64,
            shards=4,
            pages=64 * 32,
        ),
    ),
}


def programs(case: Case, topology: str) -> Iterator[tuple[str, str, jax.stages.Lowered]]:
    """(name, implementation of attention, lowered program) of each program."""
    for wanted in ("auto", "xla"):
        config = Config(learner=LearnerConfig(row_tokens=case.row_tokens, attention=wanted))
        layout = Layout(aot.topology_mesh(case.learner_mesh, topology), LEARNER)
        recipe = step.Recipe.of(config, case.spec, layout)
        yield (
            "accumulate",
            str(recipe.attention),
            trainer.TrainingPrograms(recipe).lowered("accumulate", case.micro_batch_rows),
        )
        mesh = aot.topology_mesh(case.sampler_mesh, topology)
        serving = engine.choose_kernels(case.spec, mesh, case.sizes, prefill=wanted, paged=wanted)
        lowered = engine.lowered(case.spec, mesh, SAMPLER, case.sizes, serving)
        for name, chosen in ((f"prefill_{case.sizes.buckets[0]}", serving.prefill), ("decode", serving.paged)):
            yield name, str(chosen), lowered[name]


def continued(topology: str) -> Iterator[tuple[str, str, jax.stages.Lowered]]:
    """As `programs`: more tokens behind cached ones, with all pages in one shard of four devices."""
    spec, mesh = dataclasses.replace(LEAN, kv_heads=4), aot.topology_mesh(MeshConfig(tensor=4), topology)
    sizes = requests.Sizes(8, 4096, 4, 4, (512,), 4, 4)
    for wanted in ("auto", "xla"):
        serving = engine.choose_kernels(spec, mesh, sizes, prefill=wanted, paged=wanted)
        yield "extend", str(serving.prefill), engine.lowered(spec, mesh, SAMPLER, sizes, serving)["extend_512"]


def moves() -> Iterator[dict[str, Any]]:
    """Programs that move the pages of a preempted request, and their memory in shares of a device's part of the table.

    Two layers with the heads of Qwen3-0.6B, on 4 chips and with two groups of 4.
    """
    spec = dataclasses.replace(families.spec("qwen3_0p6b", compute_dtype="bfloat16"), layers=2)
    for data, topology in ((1, "v5e:2x2"), (2, "v5e:2x4")):
        mesh = MeshConfig(data=data, tensor=4)
        sizes = requests.Sizes(16, 4096, 2, 4, (512,), 8, 4, shards=data, pages=64)
        built = engine.build(spec, aot.topology_mesh(mesh, topology), SAMPLER, sizes)
        share = 2 * 2 * sizes.table * spec.kv_heads * sizes.page_tokens * spec.head_dim * 2 / mesh.tensor
        for name, lowered in engine.lowered_moves(built).items():
            memory = lowered.compile().memory_analysis()
            assert memory is not None
            made = memory.output_size_in_bytes - memory.alias_size_in_bytes
            yield {"name": f"{name}, data {data}", "made": made / share, "temporary": memory.temp_size_in_bytes / share}


def main(topology: str, size: str) -> None:
    """Print one line of JSON per program. The XLA forms are only lowered, for comparison."""
    if size == "lean":
        for row in moves():
            print(json.dumps(row | {"attention": ""}), flush=True)
    case = CASES[size]
    for name, chosen, lowered in itertools.chain(
        programs(case, topology), continued(topology) if size == "lean" else ()
    ):
        row: dict[str, Any] = {"name": name, "attention": chosen}
        text = lowered.as_text()
        if not chosen.startswith("xla"):
            program, cost = aot.finished(name, lowered)
            row |= dataclasses.asdict(cost) | {"peak_bytes": cost.peak_bytes}
            row["custom_calls"] = (program.as_text() or "").count("tpu_custom_call")
        row.setdefault("custom_calls", text.count("@tpu_custom_call"))
        squares = text.count(f"x{case.row_tokens}x{case.row_tokens}x")
        print(json.dumps(row | {"squares": squares}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
