"""The learner's and the engine's own programs, compiled for TPU chips that exist only by name.

    python tpu_programs.py TOPOLOGY     such as v5e:2x2

Whoever starts it sets its environment (`aot.tpu_environment`): libtpu reads it once, when it is loaded.
Every line on stdout is one program's cost as JSON. What the sizes here do not say is a config's default.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator

import jax

from jaxroll.config import Config, MeshConfig
from jaxroll.engine import programs as engine
from jaxroll.engine.packets import Sizes
from jaxroll.learner import step, trainer
from jaxroll.models import families
from jaxroll.offline import aot
from jaxroll.sharding.rules import LEARNER, SAMPLER, Layout

CONFIG = Config()
SPEC = families.spec(CONFIG.model.size, compute_dtype=CONFIG.model.dtype)
LEARNER_MESH, SAMPLER_MESH = MeshConfig(fsdp=2, tensor=2), MeshConfig(data=2, tensor=2)
SIZES = Sizes(
    slots=32, max_tokens=32, rows=8, inserts=16, buckets=(16,), chunk=8, max_stops=4, page_tokens=32, shards=2
)
COLLECTIVES = ("all-reduce", "all-gather")  # as the compiler writes them: " all-gather(", " all-gather-start("


def learner_programs(topology: str) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """The two programs of every optimizer step, by name."""
    layout = Layout(aot.topology_mesh(LEARNER_MESH, topology), LEARNER)
    programs = step.Programs(trainer.recipe(CONFIG, SPEC, layout))
    for name, rows in (("accumulate", CONFIG.learner.micro_rows), ("apply", 0)):
        yield name, programs.lowered(name, rows)


def engine_programs(topology: str) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """Prefill with insert, and a dispatch of decode steps, by name."""
    yield from engine.lowered(SPEC, aot.topology_mesh(SAMPLER_MESH, topology), SAMPLER, SIZES).items()


def main(topology: str) -> None:
    """Compile everything, one line of JSON each."""
    for programs in (learner_programs, engine_programs):
        for name, lowered in programs(topology):
            program, cost = aot.finished(name, lowered)
            text = program.as_text()
            counted = {"collectives": {kind: text.count(f" {kind}") for kind in COLLECTIVES}}
            print(json.dumps(dataclasses.asdict(cost) | {"peak_bytes": cost.peak_bytes} | counted), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
