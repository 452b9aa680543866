"""The learner's and the engine's own programs, compiled for TPU chips that exist only by name.

    python tpu_programs.py TOPOLOGY     such as v5e:2x2

Whoever starts it sets its environment (`aot.tpu_environment`): libtpu reads it once, when it is loaded.
Every line on stdout is one program's cost as JSON. What the sizes here do not say is a config's default.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

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


@dataclasses.dataclass(frozen=True)
class Traced:
    """A program as `aot.compiled` takes it: the rooms lower theirs themselves, with arguments of their own."""

    lower: Callable[[], jax.stages.Lowered]


def learner_programs(topology: str) -> Iterator[tuple[str, Traced]]:
    """The two programs of every optimizer step, by name."""
    layout = Layout(aot.topology_mesh(LEARNER_MESH, topology), LEARNER)
    programs = step.Programs(trainer.recipe(CONFIG, SPEC, layout))
    for name, rows in (("accumulate", CONFIG.learner.micro_rows), ("apply", 0)):
        yield name, Traced(partial(programs.lowered, name, rows))


def engine_programs(topology: str) -> Iterator[tuple[str, Traced]]:
    """Prefill with insert, and a dispatch of decode steps, by name."""
    lowered = engine.lowered(SPEC, aot.topology_mesh(SAMPLER_MESH, topology), SAMPLER, SIZES)
    for name, program in lowered.items():
        yield name, Traced(lambda program=program: program)


def main(topology: str) -> None:
    """Compile everything, one line of JSON each."""
    for programs in (learner_programs, engine_programs):
        for name, traced in programs(topology):
            program, cost = aot.compiled(name, traced)
            text = program.as_text()
            counted = {"collectives": {kind: text.count(f" {kind}") for kind in COLLECTIVES}}
            print(json.dumps(dataclasses.asdict(cost) | {"peak_bytes": cost.peak_bytes} | counted), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
