"""Our engine, an arm of benchmarks/engine.

python -m benchmarks.engine.our_arm FOLDER CASE ENGINE-OPTIONS-AS-JSON
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.engine.work import MODEL, Generate, Work, serve
from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request, Result
from jaxroll.models import params
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version

SPEC = ModelSpec("tiny", **MODEL)


def engine(
    folder: Path, options: dict[str, Any], draft: tuple[ModelSpec, dict[str, jax.Array]] | None = None
) -> tuple[Engine, dict[str, jax.Array]]:
    """A warm engine without weights whose slots are spread over all devices, and the folder's weights."""
    mesh = sharding.build(MeshConfig(data=jax.device_count()))
    small, values = draft or (None, None)
    made = Engine(replace(SPEC, draft=small), mesh, sharding.SAMPLER, EngineConfig(seed=0, **options), draft=values)
    where = params.shardings(SPEC, mesh, sharding.SAMPLER)
    weights = {name: jax.device_put(leaf, where[name]) for name, leaf in np.load(folder / "weights.npz").items()}
    made.warmup(weights)
    return made, weights


class Arm:
    """One engine, used for every run."""

    def __init__(self, folder: Path, case: str) -> None:
        self._engine, self._weights = engine(folder, json.loads(sys.argv[3]))
        self._work, self._runs, self._before = Work.load(folder / f"{case}.npz"), 0, self._engine.stats()

    def generate(self, greedy: bool) -> list[list[int]]:
        """Run all requests to their ends, at a new version, so that no run finds another's prompts in the cache."""
        self._runs += 1
        self._engine.swap(Version(0, self._runs), self._weights)
        self._before = self._engine.stats()
        results: dict[int, Result] = {}
        for number, (prompt, length) in enumerate(zip(self._work.prompts, self._work.lengths.tolist(), strict=True)):
            wanted = SamplingParams(max_tokens=length, temperature=0.0 if greedy else 1.0)
            request = Request(number, prompt, GenerationKey(number, 0, self._runs), wanted)
            self._engine.add(request, lambda result, number=number: results.update({number: result}))
        while self._engine.step():
            pass
        return [results[number].completion.tokens.tolist() for number in range(len(results))]

    def facts(self) -> dict[str, Any]:
        """Facts of the last run: steps, dispatches, prefills, and the host's share of the time."""
        now, before = self._engine.stats(), self._before
        if now.compiles:
            raise RuntimeError(f"{now.compiles} compilations after warm-up")
        steps, seconds = now.decode_steps - before.decode_steps, now.step_s - before.step_s
        return {
            "steps": steps,
            "dispatches": now.dispatches - before.dispatches,
            "prefills": now.prefills - before.prefills,
            "host_share": 1 - (now.device_s - before.device_s) / seconds,
        }


def main() -> None:
    """Serve."""
    arms: list[Arm] = []

    def made(folder: Path, case: str) -> Generate:
        arms.append(Arm(folder, case))
        return arms[0].generate

    serve(made, lambda: arms[0].facts())  # noqa: PLW0108 - there is none yet


if __name__ == "__main__":
    main()
