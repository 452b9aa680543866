"""Our engine with and without speculative decoding in one process, for benchmarks/engine.

    python -m benchmarks.engine.speculation FOLDER SCALE-AS-JSON

`TEXT ARM` on stdin: one run, answered with one JSON object. ARM is `on` or `off`. TEXT is `repeats` (greedy answers to
the ends of longer greedy answers, most of which have begun to repeat themselves), `fails` (answers at temperature 1 to
random prompts, in which drafts are wrong) or `mixed` (every second request of each), with prompt lookup; or, with a
draft model and answers at temperature 1 to random prompts, `near` (the draft model is the first of the model's three
layers, the others of which add little) or `far` (the draft model's weights are random).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.engine.our_arm import SPEC, engine
from benchmarks.engine.work import MODEL, answering
from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.engine.requests import Request, Result
from jaxroll.models import params
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Version

OF_MODELS = ("near", "far")
TEXTS = ("repeats", "fails", "mixed", *OF_MODELS)
DRAFT = replace(SPEC, layers=1)
LITTLE = 0.25  # of what the later layers add without `near`
ARMS = ("off", "on")


@dataclass(frozen=True)
class Speculation:
    """`requests` requests of `tokens` tokens each, in `slots` slots, with up to `draft_tokens` drafted tokens."""

    slots: int = 16
    requests: int = 16
    prompt: int = 64
    tokens: int = 256
    chunk: int = 8
    draft_tokens: int = 4

    def options(self, arm: str) -> dict[str, Any]:
        """The engine's options."""
        return {
            "slots": self.slots,
            "max_tokens": self.prompt + self.tokens,
            "prefill_rows": min(self.slots, 16),
            "prefill_buckets": [self.prompt],
            "decode_chunk": self.chunk,
            "page_tokens": 32,
            "draft_tokens": self.draft_tokens if arm == "on" else 0,
        }


class Bench:
    """Both engines."""

    def __init__(self, folder: Path, scale: Speculation) -> None:
        self._scale, self._versions = scale, 0
        self._engines = {arm: engine(folder, scale.options(arm)) for arm in ARMS}
        weights = self._engines["off"][1]
        later = tuple(f"layers.{layer:02d}." for layer in range(1, SPEC.layers))
        adding = [name for name in weights if name.startswith(later) and name.endswith(("attn.o", "mlp.down"))]
        near = weights | {name: weights[name] * LITTLE for name in adding}
        first = {name: value for name, value in weights.items() if not name.startswith(later)}
        other = params.init(DRAFT, jax.random.key(1), sharding.build(MeshConfig()), sharding.SAMPLER)
        # Embeddings as large as those of the model, otherwise every token repeats the previous one.
        other |= {"embed": other["embed"] * 12.0}
        for text, values, draft in (("near", near, first), ("far", weights, other)):
            self._engines[f"{text} off"] = self._engines["off"][0], values
            self._engines[f"{text} on"] = engine(folder, scale.options("on"), (DRAFT, draft))[0], values
        random = np.random.default_rng(0).integers(1, MODEL["vocab_size"], (scale.requests, scale.prompt))
        self._random = self._ends = list(random.astype(np.int32))
        for _ in range(3):  # each continues the answers of the one before
            answers = self.run("repeats", "off")["tokens"]
            self._ends = [np.array(answers[number][-scale.prompt :], np.int32) for number in range(scale.requests)]

    def run(self, text: str, arm: str) -> dict[str, Any]:
        """Seconds and tokens of one run, the steps, and the counters of speculative decoding."""
        scale, (made, weights) = self._scale, self._engines[f"{text} {arm}" if text in OF_MODELS else arm]
        self._versions += 1
        made.swap(Version(0, self._versions), weights)
        results: dict[int, Result] = {}
        for number in range(scale.requests):
            greedy = text == "repeats" or (text == "mixed" and number % 2 == 0)
            prompt = (self._ends if greedy else self._random)[number]
            wanted = SamplingParams(max_tokens=scale.tokens, temperature=0.0 if greedy else 1.0)
            made.add(
                Request(number, prompt, GenerationKey(number, 0), wanted),
                lambda result, number=number: results.update({number: result}),
            )
        before = made.stats()
        wall, cpu = time.perf_counter(), time.process_time()
        while made.step():
            pass
        seconds, cpu_s, after = time.perf_counter() - wall, time.process_time() - cpu, made.stats()
        if after.compiles:
            raise RuntimeError(f"{after.compiles} compilations after warm-up")
        drafted, accepted = after.tokens_drafted - before.tokens_drafted, after.tokens_accepted - before.tokens_accepted
        busy = after.slot_steps_busy - before.slot_steps_busy
        return {
            "seconds": seconds,
            "cpu_s": cpu_s,
            "steps": after.decode_steps - before.decode_steps,
            "drafted": drafted,
            "accepted": accepted,
            "tokens_per_pass": (busy + accepted) / busy,
            "tokens": {number: result.completion.tokens.tolist() for number, result in results.items()},
        }


def main() -> None:
    """Serve."""
    say = answering()
    bench = Bench(Path(sys.argv[1]), Speculation(**json.loads(sys.argv[2])))
    for text in ("mixed", *OF_MODELS):
        for arm in ARMS:
            bench.run(text, arm)
    say({"ready": True})
    for line in sys.stdin:
        say(bench.run(*line.split()))


if __name__ == "__main__":
    main()
