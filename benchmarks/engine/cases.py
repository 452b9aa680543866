"""The cases of benchmarks/engine: their work, the folder that every arm reads, and the arms as child processes."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from benchmarks.engine.latency import Scale
from benchmarks.engine.our_arm import SPEC
from benchmarks.engine.speculation import ARMS, TEXTS, Speculation
from benchmarks.engine.work import MODEL, Work
from benchmarks.lib.child import Child
from benchmarks.lib.report import Runs, percentile_ms, ratio, spread
from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.models import hf_config, params

_SCALE = {"embed": 12.0, "attn.o": 6.0, "mlp.down": 12.0}  # otherwise every token repeats the previous one


@dataclass(frozen=True)
class Case:
    """The work of a race, the peer, the target ratio, and our engine's options."""

    name: str
    peer: str
    aim: float
    groups: int  # groups of requests with the same prompt
    group_size: int
    prompt_tokens: int
    median: int  # tokens per request
    sigma: float = 0.0  # standard deviation of their logarithm; 0: all equal
    most: int = 0
    batch: int = 64
    repeats: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """The largest number of tokens of a request."""
        return self.most or self.median

    def work(self) -> Work:
        """Random prompts without token 0, and lengths: log-normal, cut at `most`."""
        rng = np.random.default_rng(1)
        prompts = rng.integers(1, MODEL["vocab_size"], (self.groups, self.prompt_tokens)).astype(np.int32)
        count = self.groups * self.group_size
        lengths = np.rint(self.median * np.exp(self.sigma * rng.standard_normal(count)))
        lengths = np.clip(lengths, 1, self.longest).astype(np.int32)
        return Work(prompts.repeat(self.group_size, axis=0), lengths, self.batch, self.repeats)

    def engine_options(self) -> dict[str, Any]:
        """Our engine's options, with a slot for every request of a batch."""
        most = self.prompt_tokens + self.longest
        return {"slots": self.batch, "max_tokens": most, "prefill_buckets": [self.prompt_tokens], **self.options}

    def settings(self) -> dict[str, Any]:
        """The settings that identify a run."""
        return {**asdict(self), "options": self.engine_options()}


def prepare(folder: Path, cases: list[Case]) -> None:
    """Write random weights for every arm, scaled so that tokens vary, and each case's work."""
    made = params.init(SPEC, jax.random.key(0), sharding.build(MeshConfig()), sharding.SAMPLER)
    weights = {name: np.asarray(leaf) * _SCALE.get(name.split(".", 2)[-1], 1.0) for name, leaf in made.items()}
    np.savez(folder / "weights.npz", allow_pickle=False, **weights)
    save_file(params.exported(SPEC, weights), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config.to_huggingface(SPEC, "float32")))
    for case in cases:
        case.work().save(folder / f"{case.name}.npz")


def racer(arm: str, threads: int, folder: Path, case: Case) -> Child:
    """The process of an arm, which answers `greedy` and `run`. Ours has a mesh of `threads` one-thread devices."""
    if arm == "ours":
        words = str(folder), case.name, json.dumps(case.engine_options())
        return Child("benchmarks.engine.our_arm", arm, 1, *words, devices=threads)
    return Child(f"benchmarks.engine.{arm}_arm", arm, threads, str(folder), case.name)


def measured_alone(runs: Runs, scale: Scale, folder: Path, rounds: int, wanted: list[str]) -> dict[str, Any]:
    """`storm` and `swap` of our engine alone on one thread: all runs in the same process, one after the other."""
    with ExitStack() as stack:
        started: list[Child] = []

        def ask(what: str) -> dict[str, Any]:
            if not started:
                started.append(Child("benchmarks.engine.latency", "ours", 1, str(folder), json.dumps(asdict(scale))))
                stack.callback(started[0].close)
            return started[0].ask(what)

        arms = {"storm": ["quiet", "storm", "first"], "swap": ["swap"]}
        named = {what: lambda what=what: ask(what) for case in arms if case in wanted for what in arms[case]}
        results = runs.alternate(named, rounds)
    found = {"storm": _storm(results)} if "storm" in wanted else {}
    return found | ({"swap": _swap(results["swap"])} if "swap" in wanted else {})


def speculation(runs: Runs, scale: Speculation, folder: Path, rounds: int) -> dict[str, Any]:
    """Tokens per pass of the model with speculative decoding, and its time over that without, by kind of text."""
    child = Child("benchmarks.engine.speculation", "ours", 1, str(folder), json.dumps(asdict(scale)))
    with ExitStack() as stack:
        stack.callback(child.close)
        named = {
            f"{text} {arm}": lambda text=text, arm=arm: child.ask(f"{text} {arm}") for text in TEXTS for arm in ARMS
        }
        found = runs.alternate(named, rounds)
    result: dict[str, Any] = {
        "aim": {"repeats tokens_per_pass": 1.5, "fails time": 1.05, "far time": 1.05},
        "scale": asdict(scale),
    }
    for text in TEXTS:
        off, on = (found[f"{text} {arm}"] for arm in ARMS)
        same = [ours == theirs for one, two in zip(on, off, strict=True) for ours, theirs in _pairs(one, two)]
        result[text] = {
            "tokens_per_pass": spread([one["tokens_per_pass"] for one in on]),
            "time": ratio([one["seconds"] for one in on], [one["seconds"] for one in off]),
            "cpu_time": ratio([one["cpu_s"] for one in on], [one["cpu_s"] for one in off]),
            "seconds": {arm: spread([one["seconds"] for one in of]) for arm, of in zip(ARMS, (off, on), strict=True)},
            "steps": {"off": off[-1]["steps"], "on": on[-1]["steps"]},
            "drafted": on[-1]["drafted"],
            "accepted": on[-1]["accepted"],
            "equal": sum(same) / len(same),
        }
    repeats = result["repeats"]["tokens_per_pass"]["min"]
    return result | {"met": repeats >= 1.5 and all(result[text]["time"]["value"] <= 1.05 for text in ("fails", "far"))}


def _pairs(one: dict, other: dict) -> list[tuple[list[int], list[int]]]:
    """The answers of two runs to each request."""
    return [(one["tokens"][number], other["tokens"][number]) for number in one["tokens"]]


def _storm(results: dict[str, list[dict]]) -> dict[str, Any]:
    quiet, storm = results["quiet"], results["storm"]
    p99 = {what: [percentile_ms(run["token_s"], 99) for run in results[what]] for what in ("quiet", "storm")}
    between = {what: [percentile_ms(run["report_s"], 99) for run in results[what]] for what in ("quiet", "storm")}
    found, waits = ratio(p99["storm"], p99["quiet"]), [s for run in results["first"] for s in run["first_token_s"]]
    return {
        "aim": 2.0,
        "p99_ratio": found,
        "met": found["value"] <= 2.0,
        "p99_ms": {k: spread(v) for k, v in p99.items()},
        "p50_ms": {what: percentile_ms([s for r in results[what] for s in r["token_s"]], 50) for what in p99},
        "between_reports_p99_ratio": ratio(between["storm"], between["quiet"]),
        "first_token_ms": {str(percent): percentile_ms(waits, percent) for percent in (50, 99)},
        "host_share": spread([run["host_share"] for run in quiet]),
        **{key: sum(run[key] for run in storm) for key in ("adds", "aborts", "extra_finished", "prefill_tokens")},
    }


def _swap(runs: list[dict]) -> dict[str, Any]:
    pauses = [pause / run["chunk_s"] for run in runs for pause in run["pause_s"]]
    return {
        "aim": 1.0,
        "pause_chunks": spread(pauses),
        "met": max(pauses) < 1.0,
        "chunk_ms": spread([1e3 * run["chunk_s"] for run in runs]),
        "pause_ms": spread([1e3 * pause for run in runs for pause in run["pause_s"]]),
    }
