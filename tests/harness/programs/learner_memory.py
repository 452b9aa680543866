"""Print as JSON the memory that `plan` predicts for a learner on one CPU device, and the growth of this process.

    python learner_memory.py FOLDER

Programs are compiled before the measurement, into FOLDER. Then the state is made and one step is taken; the growth is
the largest resident size meanwhile, less that before.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import jax
import numpy as np

from jaxroll.config import Config, LearnerConfig
from jaxroll.learner import state, step, trainer
from jaxroll.models import families, params
from jaxroll.sharding import LEARNER, Layout, build
from jaxroll.tools import chips, plan

CONFIG = Config(learner=LearnerConfig(micro_batch_rows=32, row_tokens=256))


def predicted(folder: Path) -> int:
    """The bytes that the learner holds and its largest program adds, but for a publication and the programs' code."""
    spec, topology = families.spec(CONFIG.model.size), chips.topology("cpu:1")
    role = plan.learner(CONFIG, spec, topology)
    memory = plan.memory_of(role, plan.compiled([role], CONFIG, topology, folder, lambda line: None))
    return sum(size for kind, size in memory.items() if kind not in ("publication", "code"))


def resident(peak: bool = False) -> int:
    """The resident bytes of this process: now, or the largest since `forget_peak`."""
    key = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def forget_peak() -> None:
    """Count the largest resident size from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def measured() -> int:
    """The growth of this process when the learner's state is made and trained for one step."""
    spec = families.spec(CONFIG.model.size)
    layout = Layout(build(CONFIG.learner.mesh), LEARNER)
    recipe = step.Recipe.of(CONFIG, spec, layout)
    programs, rows = trainer.TrainingPrograms(recipe), CONFIG.learner.micro_batch_rows
    programs.compile([rows])
    streams = {name: np.zeros((rows, recipe.row_tokens), dtype) for name, dtype in recipe.streams.items()}
    gc.collect()
    before = resident()
    forget_peak()
    zeros = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in params.abstract(spec).items()}
    made = state.fresh(state.placed(zeros, spec, layout), spec, layout, recipe.optimizer.transform)
    accumulator = programs.accumulate(made.params, programs.zeros(), programs.placed(streams))
    jax.block_until_ready(programs.apply(made, accumulator))
    return resident(peak=True) - before


if __name__ == "__main__":
    print(json.dumps({"predicted": predicted(Path(sys.argv[1])), "measured": measured()}))
