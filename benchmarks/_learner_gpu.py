"""Our learner's step of a large model on the devices that are here: how much of what they promise does it use?

python _learner_gpu.py SIZE DTYPE ROWS TOKENS; asked for N it answers with the seconds of each of N steps.
"""

from __future__ import annotations

import sys
import time

import jax
import numpy as np
from _engine_work import answering
from _learner_ours import claim
from _learner_work import GROUP, LEARNING_RATE, MAX_NORM, Batch

from jaxroll.config import Config, LearnerConfig, MeshConfig, ModelConfig, SamplingConfig, ScheduleConfig
from jaxroll.learner.trainer import Trainer
from jaxroll.models import families
from jaxroll.sharding import meshes, rules

# Dense bfloat16 products a second as the maker gives them, by words in the device's name.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}


def peak(kind: str) -> float | None:
    """The promise of a device of this name; None for one that is not known."""
    return next((value for name, value in PEAKS.items() if name in kind), None)


def batch(rows: int, tokens: int, words: int) -> Batch:
    """Rows that are full: a prompt of a 16th and an answer, random; rewards without ties."""
    rng, shown = np.random.default_rng(0), tokens // 16
    prompts = rng.integers(1, words, (rows // GROUP, shown), dtype=np.int32).repeat(GROUP, axis=0)
    answers = rng.integers(1, words, (rows, tokens - shown), dtype=np.int32)
    return Batch(prompts, answers, np.full(rows, tokens - shown, np.int32), rng.random(rows).astype(np.float32))


def main() -> None:
    """Answer."""
    say = answering()
    size, dtype, rows, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    spec, mesh = families.spec(size, compute_dtype=dtype), MeshConfig(fsdp=jax.device_count())
    config = Config(
        model=ModelConfig(size=size, dtype=dtype),
        schedule=ScheduleConfig(alpha=0.0, groups_per_step=rows // GROUP, group_size=GROUP),
        sampling=SamplingConfig(max_tokens=tokens),
        learner=LearnerConfig(mesh=mesh, correction="none", row_tokens=tokens, micro_rows=max(2, jax.device_count()),
                              learning_rate=LEARNING_RATE, warmup_steps=1, max_grad_norm=MAX_NORM),
    )  # fmt: skip
    trainer = Trainer(config, spec, meshes.build(mesh), rules.LEARNER, key=jax.random.key(0))
    trainer.warmup()
    work = claim(batch(rows, tokens, spec.vocab_size))
    trainer.train(work)
    kind, share = jax.devices()[0].device_kind, spec.layers * spec.heads * spec.head_dim
    flops = 6 * rows * (families.parameter_count(spec) * tokens + share * tokens**2)
    promised = peak(kind)
    say(
        {
            "ready": True,
            "device": kind,
            "devices": jax.device_count(),
            "attention": str(trainer.programs.recipe.attention),
        }
    )
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            row = trainer.train(work)
            seconds.append(time.perf_counter() - started)
        if row["compiles"]:
            raise RuntimeError(f"{row['compiles']} compilations after warm-up")
        rates = [flops / one / jax.device_count() for one in seconds]
        say({"seconds": seconds, "flops": flops, "tokens": rows * tokens, "flops_per_s": rates,
             "mfu": [rate / promised for rate in rates] if promised else None, "loss": row["loss"]})  # fmt: skip


if __name__ == "__main__":
    main()
