"""For .venv-jetstream: JetStream's orchestrator and its gRPC server drive JaxRoll's model.

    python jetstream_serve.py FOLDER

FOLDER has weights.npz and work.json (eos, serving, prompts, max_tokens, seed); the server's socket is made there. A
`vocabulary` of work.json replaces that of the size nano.
The last line has for each prompt the tokens through the orchestrator (one engine for prefill and decoding), and the
tokens and text through the server (one engine for prefill, one for decoding); and the tokens of the sampling engine,
whose slots are filled in reverse order.
"""

import asyncio
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import grpc
import jax
import numpy as np
from jetstream.core import config_lib, server_lib
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
from jetstream.engine import engine_api

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.models import families
from jaxroll.protocols import GenerationKey
from jaxroll.serving import jetstream

DEADLINE_S = 120


class Words:
    """A tokenizer in which token 7 is the word n7."""

    vocab_size, pad_id = 64, 0

    def __init__(self, eos_id: int) -> None:
        self.eos_id = eos_id

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return "".join(f"n{i} " for i in ids)

    def render(self, messages, *, first: bool = True, tools=()) -> list[int]:
        raise NotImplementedError


class Work:
    """Prompts, weights and settings from FOLDER, and engines for them."""

    def __init__(self, folder: Path) -> None:
        self.given = json.loads((folder / "work.json").read_text())
        with np.load(folder / "weights.npz") as file:
            self.weights = dict(file)
        self.prompts = [np.array(prompt, np.int32) for prompt in self.given.get("prompts", ())]
        spec = families.spec("nano")
        self.spec = dataclasses.replace(spec, vocab_size=self.given.get("vocabulary", spec.vocab_size))

    def engine(self, **drawing) -> jetstream.JetStreamEngine:
        serving = jetstream.EngineSizes(**self.given["serving"], **drawing)
        words, mesh = Words(self.given["eos"]), sharding.build(MeshConfig())
        return jetstream.JetStreamEngine(self.spec, mesh, sharding.SAMPLER, words, lambda: self.weights, serving)

    def requests(self, as_text: bool) -> list[jetstream_pb2.DecodeRequest]:
        kinds = jetstream_pb2.DecodeRequest
        return [
            kinds(max_tokens=most, text_content=kinds.TextContent(text=" ".join(f"n{i}" for i in prompt)))
            if as_text
            else kinds(max_tokens=most, token_content=kinds.TokenContent(token_ids=prompt.tolist()))
            for prompt, most in zip(self.prompts, self.given["max_tokens"], strict=True)
        ]


async def streamed(stream) -> tuple[list[int], str]:
    """All tokens and the text of one streamed answer."""
    async with asyncio.timeout(DEADLINE_S):
        samples = [sample async for part in stream for sample in part.stream_content.samples]
    return [token for sample in samples for token in sample.token_ids], "".join(sample.text for sample in samples)


async def orchestrated(work: Work) -> list[list[int]]:
    """Tokens of all prompts at once through JetStream's orchestrator."""
    core = jetstream.current_orchestrator()
    engine = work.engine(temperature=0.0)
    assert isinstance(engine, engine_api.Engine)
    params = [engine.load_params()]
    driver = core.Driver([engine], [engine], params, params, interleaved_mode=True)
    try:
        service = core.LLMOrchestrator(driver)
        answers = await asyncio.gather(*(streamed(service.Decode(request)) for request in work.requests(False)))
    finally:
        driver.stop()
    return [tokens for tokens, _ in answers]


async def asked(work: Work, address: str) -> list[tuple[list[int], str]]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        health = await stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert health.is_live
        return await asyncio.gather(*(streamed(stub.Decode(request)) for request in work.requests(True)))


@contextmanager
def serving(work: Work, folder: Path) -> Iterator[str]:
    """The address of JetStream's gRPC server over `work`, on a Unix socket, not a TCP port."""
    jetstream.current_orchestrator()
    make = lambda devices: work.engine(temperature=0.0)  # noqa: E731
    config = config_lib.ServerConfig(("cpu=1",), ("cpu=1",), (), (make,), (make,))
    server_lib._HOST = "unix"
    server = server_lib.run(str(folder / "socket"), config, jax.devices()[:1] * 2)
    try:
        yield f"unix:{folder / 'socket'}"
    finally:
        server.stop()


def served(work: Work, folder: Path) -> list[tuple[list[int], str]]:
    """Tokens and texts of all prompts at once through JetStream's gRPC server."""
    with serving(work, folder) as address:
        return asyncio.run(asked(work, address))


def sampled(work: Work) -> list[list[int]]:
    """Tokens sampled at temperature 1 for the first prompts, one per slot, as members of group 7."""
    engine = work.engine(seed=work.given["seed"])
    params, state = engine.load_params(), engine.init_decode_state()
    slots = list(reversed(range(engine.max_concurrent_decodes)))
    for member, (slot, prompt) in enumerate(zip(slots, work.prompts, strict=False)):
        padded = np.pad(prompt, (0, engine.max_prefill_length - len(prompt)))
        prefix = engine.prefill(
            params=params, padded_tokens=padded, true_length=len(prompt), key=GenerationKey(7, member)
        )
        state = engine.insert(prefix, state, slot)
    rows = []
    for _ in range(work.given["steps"]):
        state, result = engine.generate(params, state)
        rows.append(result.convert_to_numpy())
    data = [[row.get_result_at_slot(slot) for row in rows] for slot in slots]
    return [[int(one.tokens[0, 0]) for one in each if one.valid[0, 0]] for each in data]


def main() -> None:
    """All three."""
    folder = Path(sys.argv[1])
    logging.getLogger().setLevel(logging.WARNING)  # JetStream puts DEBUG on stdout
    work = Work(folder)
    answers = served(work, folder)
    said = {
        "orchestrated": asyncio.run(orchestrated(work)),
        "served": [tokens for tokens, _ in answers],
        "texts": [text for _, text in answers],
        "sampled": sampled(work),
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
