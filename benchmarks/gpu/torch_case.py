"""Transformers compared with our arm on the same card: equality in float32 first, then both rates.

With the arguments `ours FOLDER SHAPE-AS-JSON` this program is our arm: it makes random weights, writes them as a
Hugging Face folder with the work of both arms, and answers `greedy`, `run` and `step`. The peer's arm is
benchmarks/gpu/torch_arm.py. The case itself uses no device.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import Case, run_case
from benchmarks.lib.report import ROOT, ratio, spread

EQUAL_TOKENS, EQUAL_NORMS = 0.96, 1e-3
ROUNDS = 3
ANSWER_S = 140.0
SCALE = {"embed": 12.0, "attn.o": 6.0, "mlp.down": 12.0}  # otherwise every token repeats the previous one


@dataclass(frozen=True)
class Shape:
    """The work of both arms: `layers` of the model, a batch to generate, and rows of one optimizer step."""

    quick: bool
    dtype: str
    layers: int
    batch: int
    prompt: int
    new: int
    row_tokens: int


def shapes(quick: bool) -> tuple[Shape, Shape]:
    """(shape for the comparison, shape for timing)."""
    if quick:
        return Shape(quick, "float32", 2, 8, 16, 8, 32), Shape(quick, "float32", 2, 8, 16, 16, 64)
    return Shape(quick, "float32", 2, 32, 64, 16, 128), Shape(quick, "bfloat16", 8, 64, 128, 128, 2048)


def interpreter() -> str | None:
    """A Python that has torch and transformers: this one, or that of `make venv-torch`."""
    if all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return sys.executable
    other = ROOT / ".venv-torch" / "bin" / "python"
    return str(other) if other.exists() else None


class Arm:
    """A process that answers a line with a JSON object; silence is an error."""

    def __init__(self, *words: str) -> None:
        environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"}
        self._process = subprocess.Popen(
            list(words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.facts = self._answer()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=ANSWER_S)
        except queue.Empty:
            line = ""
        if not line:
            raise RuntimeError(f"an arm gave no answer within {ANSWER_S:.0f} s (exit code {self._process.poll()})")
        return json.loads(line)

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process, which frees its memory on the card."""
        self._process.kill()
        self._process.communicate()


def compared(ours: Arm, theirs: Arm) -> dict[str, Any]:
    """The share of prompts with the same greedy tokens, and the norms of the first step's gradients."""
    rows = [arm.ask("greedy")["tokens"] for arm in (ours, theirs)]
    same = sum(a == b for a, b in zip(*rows, strict=True)) / len(rows[0])
    norms = [arm.ask("step")["grad_norm"] for arm in (ours, theirs)]
    apart = abs(norms[0] - norms[1]) / norms[1]
    return {
        "greedy_equal": same,
        "grad_norms": norms,
        "grad_norms_apart": apart,
        "equal": bool(same >= EQUAL_TOKENS and apart <= EQUAL_NORMS),
    }


def raced(ours: Arm, theirs: Arm, command: str, tokens: int) -> dict[str, Any]:
    """Tokens per second of both arms in alternating rounds after a warm-up round, and the ratio."""
    rate: dict[str, list[float]] = {"ours": [], "theirs": []}
    arms = {"ours": ours, "theirs": theirs}
    for number in range(ROUNDS + 1):
        for name in list(arms)[:: 1 if number % 2 == 0 else -1]:
            rate[name].append(tokens / arms[name].ask(command)["seconds"])
    timed = {name: values[1:] for name, values in rate.items()}
    return {
        "tokens_per_s": {name: spread(values) for name, values in timed.items()},
        "ratio": ratio(timed["ours"], timed["theirs"]),
    }


def compare_with_transformers(case: Case) -> None:
    """Compare results, then rates; without equality there is no race."""
    python = interpreter()
    if python is None:
        case.skip("transformers", "torch and transformers are not importable here, and there is no .venv-torch")
        return
    equal, large = shapes(case.quick)

    def with_arms(shape: Shape, measure: Callable[[Arm, Arm], dict[str, Any]]) -> dict[str, Any]:
        folder, arms = Path(tempfile.mkdtemp(prefix="torch-")), []
        try:
            arms.append(
                Arm(sys.executable, "-m", "benchmarks.gpu.torch_case", "ours", str(folder), json.dumps(asdict(shape)))
            )
            arms.append(Arm(python, "-m", "benchmarks.gpu.torch_arm", str(folder), json.dumps(asdict(shape))))
            case.put(ours=arms[0].facts, theirs=arms[1].facts)
            return measure(*arms)
        finally:
            for arm in arms:
                arm.close()
            shutil.rmtree(folder, ignore_errors=True)

    found = case.point("equality in float32", lambda: with_arms(equal, compared))
    if found is None or not found["equal"]:
        case.skip("rates", "the arms are not equal: no race")
        return

    def rates(ours: Arm, theirs: Arm) -> dict[str, Any]:
        generated = raced(ours, theirs, "run", large.batch * large.new)
        case.put(generation=generated | {"shape": asdict(large)})
        return {
            "generation": generated,
            "step": raced(ours, theirs, "step", 8 * large.row_tokens),
            "shape": asdict(large),
        }

    case.point(f"rates in {large.dtype}, {large.layers} layers", lambda: with_arms(large, rates), needs_s=20)


# --- our arm


def answer_as_ours(folder: Path, shape: Shape) -> None:
    """Make the weights and the work, then answer commands."""
    from benchmarks.engine.work import answering

    say = answering()
    import numpy as np
    from safetensors.numpy import save_file

    from benchmarks.gpu.case import device_facts
    from benchmarks.gpu.models import SIZES, spec_of, weights
    from benchmarks.learner.gpu_arm import GROUP, batch, prepared
    from benchmarks.learner.work import WEIGHT_DECAY
    from jaxroll import sharding
    from jaxroll.config import MeshConfig
    from jaxroll.engine.engine import Engine, EngineConfig
    from jaxroll.engine.requests import Request
    from jaxroll.models import hf_config, params
    from jaxroll.protocols import GenerationKey, SamplingParams
    from jaxroll.records import Version

    spec = dataclasses.replace(
        spec_of(SIZES[0], shape.quick), layers=shape.layers, compute_dtype=shape.dtype, remat="none"
    )
    made = weights(spec, "float32")
    held = {name: leaf * SCALE.get(name.split(".", 2)[-1], 1.0) for name, leaf in made.items()}
    host = {name: np.asarray(leaf) for name, leaf in held.items()}
    save_file(params.exported(spec, host), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config.to_huggingface(spec, "float32")))
    work = batch(GROUP, shape.row_tokens, spec.vocab_size)
    work.save(folder / "batch.npz")
    prompts = np.random.default_rng(5).integers(1, spec.vocab_size, (shape.batch, shape.prompt)).astype(np.int32)
    np.save(folder / "prompts.npy", prompts)

    served = {name: leaf.astype(shape.dtype) for name, leaf in held.items()}
    engine_config = EngineConfig(
        slots=shape.batch,
        max_tokens=shape.prompt + shape.new,
        prefill_rows=min(shape.batch, 32),
        prefill_buckets=(shape.prompt,),
        decode_chunk=min(16, shape.new),
        seed=0,
    )
    engine = Engine(spec, sharding.build(MeshConfig()), sharding.SAMPLER, engine_config)
    engine.warmup(served)
    trainers: list[Any] = []
    runs = iter(range(1_000_000))

    def generate(greedy: bool) -> list[list[int]]:
        run, rows = next(runs), {}
        engine.swap(Version(0, run), served)
        for number, prompt in enumerate(prompts):
            wanted = SamplingParams(max_tokens=shape.new, temperature=0.0 if greedy else 1.0)
            request = Request(number, prompt, GenerationKey(number, 0, run), wanted)
            engine.add(request, lambda result, number=number: rows.update({number: result.completion.tokens.tolist()}))
        while engine.step():
            pass
        return [rows[number] for number in range(len(prompts))]

    def step() -> dict[str, Any]:
        if not trainers:
            trainer, claim = prepared(
                spec,
                GROUP,
                shape.row_tokens,
                micro_batch_rows=2,
                algorithm="grpo",
                advantage="group_std",
                aggregation="seq_mean_token_mean",
                weight_decay=WEIGHT_DECAY,
                remat="none",
            )
            trainer.set_params(host)
            trainers.extend((trainer, claim))
        started = time.perf_counter()
        row = trainers[0].train(trainers[1])
        return {"seconds": time.perf_counter() - started, "grad_norm": row["grad_norm"]}

    say({**device_facts(), "attention": engine.attention.described()})
    for line in sys.stdin:
        command = line.strip()
        if command == "greedy":
            say({"tokens": generate(True)})
        elif command == "run":
            started = time.perf_counter()
            generate(False)
            say({"seconds": time.perf_counter() - started})
        else:
            say(step())


if __name__ == "__main__":
    if sys.argv[1] == "ours":
        answer_as_ours(Path(sys.argv[2]), Shape(**json.loads(sys.argv[3])))
    else:
        run_case({"torch": compare_with_transformers})
