"""Prefills that compute the rows in use, block by block, compared with prefills of all rows at once.

    python -m benchmarks.engine.prefill [--quick] [--case=NAME ...] [--rounds=N]

Both arms are engines of this process with the model of benchmarks/engine; `whole` has blocks of all rows. Tokens must
be equal. `long` and `short`: prompts of random lengths, answers that end one by one; `fine`: as `long`, with more
buckets. `turns`: each answer is continued by a second turn, behind cached pages. `full`: every prefill has all its
rows. The last line is one JSON object; of each case the time of `blocks` over that of `whole`, and the tokens that
prefills computed over those that were wanted.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from benchmarks.engine.our_arm import SPEC
from benchmarks.lib.report import Runs, arguments, finish, ratio, spread
from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine import requests
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request
from jaxroll.models import params
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version

ROUNDS, SLOTS, AIM = 7, 16, 1.25
ARMS = {"whole": 10**9, "blocks": requests.PREFILL_TOKENS}  # tokens of a block


@dataclass(frozen=True)
class Case:
    """`count` requests of `prompt` tokens and `answer` tokens (ranges), and the rows and buckets of a prefill."""

    buckets: tuple[int, ...]
    rows: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    count: int = 64
    turns: int = 1


CASES = {
    "long": Case((256, 512), 8, (128, 512), (8, 64)),
    "fine": Case((192, 256, 320, 384, 448, 512), 8, (128, 512), (8, 64)),
    "short": Case((32, 64), 16, (16, 64), (8, 64)),
    "turns": Case((64, 512), 8, (128, 400), (8, 64), turns=2),
    "full": Case((512,), 8, (512, 512), (16, 16)),
}


class Arm:
    """An engine, and the tokens that its prefills computed and those that were wanted."""

    def __init__(self, case: Case, block: int, weights: params.Params) -> None:
        self._case, self._weights, self._versions, self._block = case, weights, 0, block
        most = case.prompt[1] + case.turns * (case.answer[1] + 32)
        config = EngineConfig(SLOTS, most, case.rows, case.buckets, decode_chunk=8, seed=1)
        requests.PREFILL_TOKENS = block
        self._engine = Engine(SPEC, sharding.build(MeshConfig()), sharding.SAMPLER, config)
        self._engine.warmup(weights)
        self._computed = self._wanted = 0
        prefill = self._engine._device.prefill

        def counted(params: Any, fresh: bool, bucket: int, rows: Sequence[requests.PrefillRow]) -> None:
            some = min(case.rows, -(-self._block // bucket))
            self._computed += -(-len(rows) // some) * some * bucket
            self._wanted += sum(len(row.tokens) for row in rows)
            prefill(params, fresh, bucket, rows)

        self._engine._device.prefill = counted  # type: ignore[method-assign]

    def run(self) -> dict[str, Any]:
        """Seconds and tokens of all requests."""
        self._versions += 1
        self._engine.swap(Version(0, self._versions), self._weights)
        case, rng, results = self._case, np.random.default_rng(0), {}
        prompts = [
            rng.integers(1, SPEC.vocab_size, rng.integers(*case.prompt, endpoint=True)) for _ in range(case.count)
        ]
        answers = rng.integers(*case.answer, (case.turns, case.count), endpoint=True)
        self._computed = self._wanted = 0
        wall, cpu = time.perf_counter(), time.process_time()
        for turn in range(case.turns):
            for number, prompt in enumerate(prompts):
                wanted = SamplingParams(int(answers[turn, number]), temperature=1.0)
                key = GenerationKey(number, turn, self._versions)
                request = Request(number, prompt.astype(np.int32), key, wanted, keep=case.turns > 1)
                self._engine.add(request, partial(results.__setitem__, number))
            while self._engine.step():
                pass
            prompts = [
                np.concatenate([prompt, results[number].completion.tokens, rng.integers(1, SPEC.vocab_size, 32)])
                for number, prompt in enumerate(prompts)
            ]
        return {
            "seconds": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "computed": self._computed / self._wanted,
            "tokens": [prompt.tolist() for prompt in prompts],
        }


def case_of(name: str, rounds: int, runs: Runs) -> dict[str, Any]:
    """The ratios of both arms in one case."""
    weights = params.init(SPEC, jax.random.key(0), sharding.build(MeshConfig()), sharding.SAMPLER)
    arms = {arm: Arm(CASES[name], block, weights) for arm, block in ARMS.items()}
    for arm in arms.values():
        arm.run()
    found = runs.alternate({f"{name} {arm}": of.run for arm, of in arms.items()}, rounds)
    whole, blocks = (found[f"{name} {arm}"] for arm in ARMS)
    time_of = ratio([one["seconds"] for one in blocks], [one["seconds"] for one in whole])
    return {
        "ours": spread([one["seconds"] for one in blocks])["median"],
        "without": spread([one["seconds"] for one in whole])["median"],
        "ratio": time_of["value"],
        "low": time_of["low"],
        "high": time_of["high"],
        "runs": rounds,
        "computed": {"blocks": blocks[0]["computed"], "whole": whole[0]["computed"]},
        "met": blocks[0]["computed"] <= AIM,
        "equal": all(one["tokens"] == other["tokens"] for one, other in zip(blocks, whole, strict=True)),
    }


def main() -> int:
    """Measure; return 1 if tokens differ."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="this one; again for more (default: all)")
    chosen, started = parser.parse_args(), time.monotonic()
    rounds = 1 if chosen.quick else chosen.rounds or ROUNDS
    runs = Runs("prefill", {"slots": SLOTS}, chosen.runs_file, chosen.resume)
    result: dict[str, Any] = {name: case_of(name, rounds, runs) for name in chosen.case or CASES}
    failed = not all(of["equal"] for of in result.values())
    finish(result | {"class": "R"}, command=" ".join(["python", *sys.orig_argv[1:]]), started=started)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
