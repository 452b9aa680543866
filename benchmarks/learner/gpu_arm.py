"""Our learner's step of a large model on this machine's devices, as a share of their peak rate.

python -m benchmarks.learner.gpu_arm SIZE DTYPE ROWS TOKENS; the command N returns the seconds of each of N steps.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import numpy as np

from benchmarks.engine.work import answering
from benchmarks.learner.our_arm import claim
from benchmarks.learner.work import GROUP, LEARNING_RATE, MAX_NORM, Batch
from jaxroll import sharding
from jaxroll.config import Config, LearnerConfig, MeshConfig, ModelConfig, SamplingConfig, ScheduleConfig
from jaxroll.learner.trainer import Trainer
from jaxroll.models import families
from jaxroll.models.families import ModelSpec
from jaxroll.records import Claim

# The maker's figures for dense bfloat16 operations per second, by words in the device's name.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}


def peak(kind: str) -> float | None:
    """The peak rate of a device of this name; None for an unknown one."""
    return next((value for name, value in PEAKS.items() if name in kind), None)


def batch(rows: int, tokens: int, words: int) -> Batch:
    """Full rows of random tokens: one sixteenth prompt, the rest answer; rewards without ties."""
    rng, shown = np.random.default_rng(0), tokens // 16
    prompts = rng.integers(1, words, (rows // GROUP, shown), dtype=np.int32).repeat(GROUP, axis=0)
    answers = rng.integers(1, words, (rows, tokens - shown), dtype=np.int32)
    return Batch(prompts, answers, np.full(rows, tokens - shown, np.int32), rng.random(rows).astype(np.float32))


def flops(spec: ModelSpec, rows: int, tokens: int) -> float:
    """FLOPs of one step, forwards and backwards, without recomputation and without embedding lookups."""
    looked_up = 0 if spec.tied_embeddings else spec.vocab_size * spec.width
    share = spec.layers * spec.heads * spec.head_dim
    return 6 * rows * ((families.parameter_count(spec) - looked_up) * tokens + share * tokens**2)


def prepared(
    spec: ModelSpec, rows: int, tokens: int, *, micro_batch_rows: int, **options: Any
) -> tuple[Trainer, Claim]:
    """A warm trainer of `spec`, random, under the learner's `options`, and a claim of full rows."""
    mesh = MeshConfig(fsdp=jax.device_count())
    config = Config(
        model=ModelConfig(dtype=spec.compute_dtype),  # pyright: ignore[reportArgumentType]
        schedule=ScheduleConfig(alpha=0.0, groups_per_step=rows // GROUP, group_size=GROUP),
        sampling=SamplingConfig(max_tokens=tokens),
        learner=LearnerConfig(
            mesh=mesh,
            correction="none",
            row_tokens=tokens,
            micro_batch_rows=micro_batch_rows,
            learning_rate=LEARNING_RATE,
            warmup_steps=1,
            max_grad_norm=MAX_NORM,
            **options,
        ),
    )
    trainer = Trainer(config, spec, sharding.build(mesh), sharding.LEARNER, key=jax.random.key(0))
    trainer.warmup()
    return trainer, claim(batch(rows, tokens, spec.vocab_size))


def main() -> None:
    """Answer."""
    say = answering()
    size, dtype, rows, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    spec = families.spec(size, compute_dtype=dtype)
    trainer, work = prepared(spec, rows, tokens, micro_batch_rows=max(2, jax.device_count()))
    trainer.train(work)
    kind, done = jax.devices()[0].device_kind, flops(spec, rows, tokens)
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
        seconds, row = [], {}
        for _ in range(int(line)):
            started = time.perf_counter()
            row = trainer.train(work)
            seconds.append(time.perf_counter() - started)
        if row["compiles"]:
            raise RuntimeError(f"{row['compiles']} compilations after warm-up")
        rates = [done / one / jax.device_count() for one in seconds]
        say(
            {
                "seconds": seconds,
                "flops": done,
                "tokens": rows * tokens,
                "flops_per_s": rates,
                "mfu": [rate / promised for rate in rates] if promised else None,
                "loss": row["loss"],
            }
        )


if __name__ == "__main__":
    main()
