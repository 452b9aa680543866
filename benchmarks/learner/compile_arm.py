"""CPU seconds in which a learner starts and makes its first step, by program, without a compilation cache.

python -m benchmarks.learner.compile_arm LAYERS TRAINED

TRAINED is `all` (parameters), `adapters` or `critic` (all parameters and those of a critic).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from benchmarks.engine.work import answering
from benchmarks.learner.our_arm import claim
from benchmarks.learner.work import GROUP, Batch
from jaxroll import sharding
from jaxroll.config import Config, LearnerConfig, SamplingConfig, ScheduleConfig
from jaxroll.learner.trainer import Trainer
from jaxroll.models import families

OPTIONS = {"all": {}, "adapters": {"lora_rank": 4}, "critic": {"algorithm": "ppo", "critic": "init"}}


def main() -> None:
    """Say the seconds of every part, and how many programs were compiled."""
    say, layers = answering(), int(sys.argv[1])
    jax.config.update("jax_compilation_cache_dir", None)
    jax.jit(jax.numpy.negative)(np.zeros(3))  # the first compilation of a process starts threads
    spec = replace(families.spec("tiny"), layers=layers)
    config = Config(
        schedule=ScheduleConfig(alpha=0.0, groups_per_step=1, group_size=GROUP),
        sampling=SamplingConfig(max_tokens=16),
        learner=LearnerConfig(
            micro_batch_rows=1,
            row_tokens=32,
            weight_decay=0.01,
            scan_layers=True,
            remat="layer",
            **OPTIONS[sys.argv[2]],
        ),
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 64, (GROUP, 16)).astype(np.int32)
    batch = Batch(tokens, tokens, np.full(GROUP, 16, np.int32), np.arange(GROUP, dtype=np.float32))
    began, seconds, started = time.perf_counter(), {}, time.process_time()

    def measured(name: str, part: Callable[[], Any]) -> Any:
        start_s = time.process_time()
        result = jax.block_until_ready(part())
        seconds[name] = time.process_time() - start_s
        return result

    mesh = sharding.build(config.learner.mesh)
    trainer = measured("parameters", lambda: Trainer(config, spec, mesh, sharding.LEARNER, key=jax.random.key(0)))
    compiling: list[float] = []

    def progress(text: str) -> None:
        """Note the CPU time before and after each program."""
        compiling.append(time.process_time())
        if text.startswith("compiled"):
            name = text.removeprefix("compiled ").removeprefix("learner ").partition(":")[0]
            seconds[name.partition(" [")[0]] = compiling[-1] - compiling[-2]

    trainer.warmup(progress)
    row = measured("first step", lambda: trainer.train(claim(batch)))
    if row["compiles"]:
        raise RuntimeError(f"{row['compiles']} compilations after warm-up")
    cpu_s, wall_s = time.process_time() - started, time.perf_counter() - began
    say({"cpu_s": cpu_s, "wall_s": wall_s, "parts": seconds, "loss": row["loss"]})


if __name__ == "__main__":
    main()
