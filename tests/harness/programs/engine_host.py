"""One process of an engine whose mesh spans several: process 0 answers requests, the others follow it.

python engine_host.py FOLDER INDEX PROCESSES COORDINATOR

Process 0 writes FOLDER/NAME.npz for each case: the tokens, log-probs and versions of every request.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxroll import lifeline, sharding, wire
from jaxroll.config import MeshConfig, RoleHosts
from jaxroll.engine.device import Device
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request, Result
from jaxroll.engine.work import LeadingDevice, Operation
from jaxroll.learner import multihost
from jaxroll.learner.multihost import Command
from jaxroll.models import families, params
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRef
from jaxroll.roles import build
from jaxroll.roles.build import following_device

SPEC = families.spec("nano")
SIZES: dict[str, Any] = {
    "slots": 4,
    "max_tokens": 64,
    "prefill_rows": 2,
    "prefill_buckets": (16,),
    "page_tokens": 8,
    "decode_chunk": 4,
    "seed": 11,
    "truncation": True,
}
# Heads on two processes, with requests that lose their pages; slots on two processes; new weights over a new cache.
# With drafts, the first weights are those of a draft model, too.
CASES: dict[str, tuple[MeshConfig, dict[str, Any]]] = {
    "heads": (MeshConfig(tensor=2), {"cache_pages": 10}),
    "slots": (MeshConfig(data=2), {"weight_swap": "reprefill", "scan_layers": True}),
    "drafts": (MeshConfig(tensor=2), {"cache_pages": 10, "draft_tokens": 2}),
}


def draft_model(config: EngineConfig, mesh: jax.sharding.Mesh) -> tuple[families.ModelSpec, params.Params | None]:
    """The model of a case, and the parameters of its draft model."""
    drafts = config.draft_tokens > 0
    return replace(SPEC, draft=SPEC if drafts else None), weights(mesh, Version(0, 1)) if drafts else None


def weights(mesh: jax.sharding.Mesh, version: Version) -> params.Params:
    """The parameters of a version, which every process makes for its own devices."""
    made = params.init(SPEC, jax.random.key(version.step), mesh, sharding.SAMPLER)
    return made | {"embed": made["embed"] * 12.0}


class Made:
    """Weights that are made in place of a transfer."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._mesh = mesh

    async def fetch(self, ref: VersionRef, *relays: object) -> Version:
        return ref.version

    def place(self, staged: Version) -> params.Params:
        return weights(self._mesh, staged)


def requests() -> list[Request]:
    """Two for each prompt, which end by length or by a stop token; one prompt is longer than a prefill's row."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, SPEC.vocab_size, length).astype(np.int32) for length in (12, 5, 24, 12, 3, 16)]
    limits = rng.choice([8, 30, 36], 12)
    return [
        Request(
            number,
            prompts[number // 2],
            GenerationKey(number, 0),
            SamplingParams(int(limits[number]), top_k=5 * (number % 3 == 0), stop_tokens=(number,)),
        )
        for number in range(12)
    ]


def answered(engine: Engine, place: Callable[[Version], params.Params]) -> dict[str, np.ndarray]:
    """The answers to all requests, with other weights after a few dispatches; one request is aborted."""
    done: dict[int, Result] = {}
    first = place(Version(0, 1))
    engine.warmup(first)
    engine.swap(Version(0, 1), first)
    seen: list[Completion] = []  # of a request that samples on after the new weights
    for request in requests():
        if request.id == 0:
            request = replace(request, params=SamplingParams(36, top_k=5), on_tokens=seen.append)
        engine.add(request, functools.partial(done.__setitem__, request.id))
    while not seen:
        engine.step()
    engine.swap(Version(0, 2), place(Version(0, 2)))
    engine.abort(11, keep=False)
    while engine.step():
        pass
    assert engine.stats().compiles == 0 and sorted(done) == list(range(11)), (engine.stats(), sorted(done))
    found: dict[str, np.ndarray] = {"preemptions": np.array(engine.stats().preemptions)}
    found["accepted"] = np.array(engine.stats().tokens_accepted)
    for number, result in done.items():
        one = result.completion
        found[f"tokens {number}"], found[f"logprobs {number}"] = one.tokens, one.logprobs
        found[f"versions {number}"] = np.array([(run.version.step, run.count) for run in one.versions])
    return found


def lead(send: Callable[[Command], None] | None, folder: Path) -> None:
    for name, (of_mesh, options) in CASES.items():
        mesh, config = sharding.build(of_mesh), EngineConfig(**SIZES | options)
        make: Callable[..., Device] = Device
        if send is not None:
            send(Command("case", text=name))
            make = functools.partial(LeadingDevice, functools.partial(_send, send))

        def place(version: Version, mesh: jax.sharding.Mesh = mesh) -> params.Params:
            if send is not None:
                ref = VersionRef(version, "tcp", "nowhere", "none")
                send(Command("fetch", version, body=wire.encode(ref)))
                send(Command("place", version))
            return weights(mesh, version)

        spec, draft = draft_model(config, mesh)
        engine = Engine(spec, mesh, sharding.SAMPLER, config, make_device=make, draft=draft)
        np.savez(folder / f"{name}.npz", **answered(engine, place))  # type: ignore[arg-type]
        if send is not None:
            send(Command("end of case"))


def _send(send: Callable[[Command], None], operation: Operation) -> None:
    send(Command("run", body=wire.encode(operation)))


class _UntilEndOfCase:
    """The commands of one case, as a follower's connection."""

    def __init__(self, commands: Any, serves: Callable[..., None]) -> None:
        self._commands, self.serves = commands, serves

    def commands(self) -> Any:
        for command in self._commands:
            if command.what == "end of case":
                yield Command("end")
                return
            yield command


def follow(leader: multihost.Follower) -> None:
    commands = leader.commands()
    for command in commands:
        if command.what == "end":
            return
        of_mesh, options = CASES[command.text]
        mesh, config = sharding.build(of_mesh), EngineConfig(**SIZES | options)
        spec, draft = draft_model(config, mesh)
        device = following_device(spec, mesh, sharding.SAMPLER, config, draft)
        build.run_commands(_UntilEndOfCase(commands, leader.serves), device, Made(mesh))  # type: ignore[arg-type]
        assert not device._saved, "process 0 needs no pages any more"


def main() -> None:
    folder, index, processes, coordinator = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    lifeline.bind_from_env()
    hosts = RoleHosts("sampler-0", "placement.sampler_hosts", processes, index, MeshConfig(data=2), folder / "meeting")
    joined = multihost.join(hosts, coordinator, lambda: os._exit(3))
    if isinstance(joined, multihost.Follower):
        with joined:
            return follow(joined)
    if joined is None:
        return lead(None, folder)
    with joined:
        lead(joined.send, folder)
        joined.end(0)


if __name__ == "__main__":
    main()
