"""google-jetstream's own server over a stub engine, for benchmarks/serving.py: tokens per second of 64 streams.

    .venv-jetstream/bin/python -m benchmarks.engine.jetstream_arm

Answers each line SECONDS with a JSON object. The server and its clients are processes of their own, which talk gRPC
over a Unix socket. The stub gives every slot a token after each step of 10 ms; prefill and insertion cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import grpc
import jax
import numpy as np
from jetstream.core import config_lib, server_lib
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
from jetstream.engine import engine_api, tokenizer_pb2

from benchmarks.serving import BATCH, BODY, STEP_S, TEXT, lengths_of, rate
from jaxroll.serving.jetstream import JetStreamTokenizer, current_orchestrator


class Stub(engine_api.Engine):
    """`BATCH` slots; the decode state is the number of tokens in each."""

    max_concurrent_decodes, samples_per_slot, max_prefill_length = BATCH, 1, 512
    mesh = colocated_cpus = None

    def load_params(self, *args: Any, **kwargs: Any) -> None:
        """No weights."""

    def get_prefix_destination_sharding(self) -> None:
        """No sharding."""

    def get_tokenizer(self) -> Any:
        return tokenizer_pb2.TokenizerParameters(path="stub")

    def build_tokenizer(self, metadata: Any) -> JetStreamTokenizer:
        return JetStreamTokenizer(TEXT)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.zeros(BATCH, np.int32)

    def prefill(self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int) -> np.ndarray:
        return np.zeros(1, np.int32)

    def insert(self, prefix: Any, decode_state: np.ndarray, slot: int) -> np.ndarray:
        decode_state[slot] = 0
        return decode_state

    def generate(self, params: Any, decode_state: np.ndarray) -> tuple[np.ndarray, engine_api.ResultTokens]:
        time.sleep(STEP_S)
        decode_state += 1
        data = np.stack([np.full_like(decode_state, 4), np.ones_like(decode_state), decode_state], axis=1)
        return decode_state, engine_api.ResultTokens(data, (0, 1), (1, 2), (2, 3), samples_per_slot=1)


def serve(path: str, ready: Connection) -> None:
    """Serve the stub on the socket `path` until the process at the other end of `ready` has ended."""
    logging.getLogger().setLevel(logging.WARNING)  # JetStream puts DEBUG on stdout
    current_orchestrator()
    config = config_lib.ServerConfig((), (), ("cpu=1",), (), (), (lambda devices: Stub(),))
    server_lib._HOST = "unix"
    running = server_lib.run(path, config, jax.devices()[:1])
    ready.send(True)
    with contextlib.suppress(EOFError):
        ready.recv()
    del running  # until here: a server that is collected stops
    os._exit(0)  # its threads wait for requests


async def _stream(client: int, address: str, until_s: float) -> list[float]:
    """The times of the tokens of one client, on a connection of its own, which asks again after each answer."""
    lengths, times = lengths_of(client), list[float]()
    request = jetstream_pb2.DecodeRequest
    async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        while time.monotonic() < until_s:
            wanted, before = next(lengths), len(times)
            text = request.TextContent(text=BODY["prompt"])
            async for part in stub.Decode(request(max_tokens=wanted, text_content=text), timeout=60):
                new = sum(len(sample.token_ids) for sample in part.stream_content.samples)
                times += [time.monotonic()] * new
            assert len(times) - before == wanted, f"{len(times) - before} of {wanted} tokens arrived"
    return times


async def _streams(address: str, seconds: float) -> dict[str, float]:
    began = time.monotonic()
    times = await asyncio.gather(*(_stream(each, address, began + seconds) for each in range(BATCH)))
    return {"tokens_per_s": rate(times, began, seconds)}


def main() -> None:
    """Answer the lines of stdin."""
    logging.getLogger().setLevel(logging.WARNING)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        here, there = spawn.Pipe()
        path = str(Path(folder) / "socket")
        server = spawn.Process(target=serve, args=(path, there), daemon=True)
        server.start()
        assert here.poll(240), "the server does not start"
        print(json.dumps({"ready": here.recv()}), flush=True)
        for line in sys.stdin:
            print(json.dumps(asyncio.run(_streams(f"unix:{path}", float(line)))), flush=True)
        here.close()
        server.join(10)


if __name__ == "__main__":
    main()
