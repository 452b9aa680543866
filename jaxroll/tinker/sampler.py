"""Sampler process of a Tinker server: one engine, and the weights of many models that use it in turn.

Threads: the main thread runs JAX (`EngineHost`); the calls of the server are answered on the loop thread.

The engine computes with the weights of one model at a time. Requests for them are batched; when requests for other
weights wait, no more are admitted, and when the running ones have ended the engine takes the weights that were asked
for first (`Rotation`). So no request samples with two models' weights, and none waits for more than one round.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import NamedSharding

from jaxroll import disk, lifeline, wire
from jaxroll import sharding as layouts
from jaxroll.config import Config, RoleArgs
from jaxroll.config.derived import max_message_bytes
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.errors import DataError, JaxRollError
from jaxroll.learner import lora
from jaxroll.learner.lora import Lora
from jaxroll.loop_thread import LoopThread
from jaxroll.models import folders
from jaxroll.models import params as model_params
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRef
from jaxroll.rpc import protocol
from jaxroll.rpc.server import Caller, Method, RawServer
from jaxroll.serving.engine_thread import EngineHost, EngineProxy
from jaxroll.tinker import trainer
from jaxroll.transfer.ends import Receiver

SERVICE = "jaxroll.TinkerSampler"
RIGHTS = frozenset({"learner", "admin"})
BASE = ""  # the name of the base model's weights
KEPT = 32  # weights in memory; those used longest ago are dropped
SHORTEST = 64  # tokens of the shortest program for the log-probs of a prompt
NOTHING = np.zeros(0, np.float32)
Params = dict[str, jax.Array]


class LoadCall(msgspec.Struct, frozen=True):
    """Fetch the weights `ref` and keep them under `name`. `adapters` describe them; None: all parameters."""

    name: str
    ref: VersionRef
    adapters: tuple[int, float, tuple[str, ...]] | None


class SampleCall(msgspec.Struct, frozen=True):
    """Draw `count` completions of `prompt` with the weights `name`; also its log-probs if asked for."""

    name: str
    prompt: np.ndarray  # int32 [P]
    params: SamplingParams
    count: int
    prompt_logprobs: bool


class SampleReply(msgspec.Struct, frozen=True):
    """The completions; or the reason why there are none, in `error`. `missing`: the weights are not here (any more)."""

    completions: tuple[Completion, ...] = ()
    prompt_logprobs: np.ndarray = NOTHING  # float32 [P], with NaN for the first token; empty if not asked for
    error: str = ""
    missing: bool = False


class Rotation:
    """Gives the engine to the users of one name at a time, in the order in which the names were asked for.

    `switch` makes the engine compute with the weights of a name; no user runs meanwhile. Belongs to one event loop.
    """

    def __init__(self, switch: Callable[[str], Any], active: str) -> None:
        self._switch, self._active, self._users = switch, active, 0
        self._queue: deque[tuple[str, list[asyncio.Future[None]]]] = deque()  # names that wait, and their users
        self._switching = False

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        """Enter when the engine computes with `name`; it does so until the block ends."""
        if name == self._active and not self._queue and not self._switching:
            self._users += 1
        else:
            ready = asyncio.get_running_loop().create_future()
            waiting = next((users for queued, users in self._queue if queued == name), None)
            if waiting is None:
                self._queue.append((name, waiting := []))
            waiting.append(ready)
            self._advance()
            try:
                await ready
            except asyncio.CancelledError:
                if ready.done() and not ready.cancelled() and ready.exception() is None:
                    self._leave()  # it was admitted meanwhile
                raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._users -= 1
        self._advance()

    def _advance(self) -> None:
        if not self._users and not self._switching and self._queue:
            self._switching = True
            task = asyncio.ensure_future(self._next())
            task.add_done_callback(lambda _: None)

    async def _next(self) -> None:
        name, users = self._queue.popleft()
        error: BaseException | None = None
        try:
            if name != self._active:
                await self._switch(name)
                self._active = name
        except Exception as found:  # noqa: BLE001 - its users get the error
            error = found
        self._switching = False
        for ready in users:
            if ready.done():  # cancelled while it waited
                continue
            if error is None:
                self._users += 1
                ready.set_result(None)
            else:
                ready.set_exception(error)
        self._advance()


class Models:
    """The weights in this process, and the engine that computes with those of one of them."""

    def __init__(self, config: Config, args: RoleArgs, token: str) -> None:
        self.config = config
        text, self.spec = trainer.tokenizer(config)
        mesh = layouts.build(config.sampler.mesh)
        self.layout = layouts.Layout(mesh, layouts.SAMPLER)
        self._where = model_params.shardings(self.spec, mesh, layouts.SAMPLER)
        self._served = {name: leaf.dtype for name, leaf in model_params.served(self.spec).items()}
        self._base = trainer.initial(config, args.run_dir, self.layout)
        # Requests choose their own truncation.
        engine_config = replace(EngineConfig.of(config, "sampler", weight_swap="drain"), truncation=True)
        spec = folders.with_draft(config.sampler, self.spec)
        draft = model_params.draft_model(config, spec, mesh, layouts.SAMPLER)
        self.engine = Engine(spec, mesh, layouts.SAMPLER, engine_config, decode=text.decode, draft=draft)
        self.host = EngineHost(self.engine)
        self._receiver = Receiver(folders.with_transfer_deadline(config).transfer, token=token)
        self._held: OrderedDict[str, tuple[Lora | None, Params]] = OrderedDict()
        self._merges: dict[Lora | None, Callable[[Params, Params], Params]] = {}
        self._swaps = 0
        self.params = self._for_engine(None, self._base)
        self.engine.warmup(self.params, lambda text: print(f"tinker sampler: {text}", flush=True))
        self._use(self.params)
        self._prompt_logprobs = jax.jit(self._prompt_terms)

    # --- on the loop thread

    def holds(self, name: str) -> bool:
        """True if the weights `name` are here."""
        return name == BASE or name in self._held

    async def load(self, call: LoadCall) -> None:
        """Fetch weights and keep them. Raises TransferError."""
        adapters = None if call.adapters is None else Lora(*call.adapters)
        target: Mapping[str, NamedSharding] = self._where
        if adapters:
            target = lora.shardings(self.spec, self.layout, adapters)
        shapes = lora.abstract(self.spec, adapters) if adapters else model_params.abstract(self.spec)
        staged = await asyncio.to_thread(self._receiver.fetch, call.ref, target, shapes)
        placed = await asyncio.wrap_future(self.host.call(staged.place))
        self._held[call.name] = (adapters, placed)
        self._held.move_to_end(call.name)
        while len(self._held) > KEPT:
            self._held.popitem(last=False)

    def drop(self, name: str) -> None:
        """Forget the weights of `name`, and of all names that begin with `name/`."""
        for held in [one for one in self._held if one == name or one.startswith(f"{name}/")]:
            del self._held[held]

    async def switch(self, name: str) -> None:
        """Make the engine compute with the weights `name`; no request runs. DataError if they were dropped."""
        if not self.holds(name):
            raise DataError(f"the weights {name} are no longer here")
        if name != BASE:
            self._held.move_to_end(name)
        adapters, values = (None, self._base) if name == BASE else self._held[name]
        await asyncio.wrap_future(self.host.call(lambda: self._use(self._for_engine(adapters, values))))
        while self.engine.version != Version(0, self._swaps):
            await asyncio.sleep(0.002)

    async def prompt_logprobs(self, prompt: np.ndarray) -> np.ndarray:
        """float32 [P]: log π at temperature 1 of each token of the prompt given those before; NaN for the first."""
        return await asyncio.wrap_future(self.host.call(functools.partial(self._logprobs_of, prompt)))

    # --- on the JAX thread

    def _for_engine(self, adapters: Lora | None, values: Params) -> Params:
        if adapters not in self._merges:
            self._merges[adapters] = jax.jit(functools.partial(self._merged, adapters), out_shardings=dict(self._where))
        return self._merges[adapters](values if adapters else {}, self._base if adapters else values)

    def _merged(self, adapters: Lora | None, values: Params, base: Params) -> Params:
        found = lora.merged(self.spec, self.layout, adapters, base, values) if adapters else base
        return {name: value.astype(self._served[name]) for name, value in found.items()}

    def _use(self, params: Params) -> None:
        self._swaps += 1
        self.params = params
        self.engine.swap(Version(0, self._swaps), params)

    def _logprobs_of(self, prompt: np.ndarray) -> np.ndarray:
        length, tokens = len(prompt), SHORTEST
        while tokens < length:
            tokens *= 2
        streams = {name: np.zeros((1, tokens), np.int32) for name in trainer.INTS}
        streams["tokens"][0, :length], streams["positions"][0, :length] = prompt, np.arange(length)
        streams["segments"][0, :length], streams["targets"][0, : length - 1] = 1, prompt[1:]
        placed = layouts.placed(streams, layouts.replicated(self.layout.mesh))
        found = layouts.fetched(self._prompt_logprobs(self.params, placed))[0, :length]
        return np.concatenate([np.full(1, np.nan, np.float32), found[:-1]])

    def _prompt_terms(self, params: Params, streams: Params) -> jax.Array:
        return trainer.target_logprobs(self.config, self.spec, self.layout, params, streams)


class Service:
    """Answers the server's calls. Belongs to one event loop."""

    def __init__(self, models: Models, proxy: EngineProxy) -> None:
        self._models, self._proxy = models, proxy
        self._rotation, self._drawn = Rotation(models.switch, BASE), 0

    def methods(self) -> dict[str, Method]:
        """Every method with its allowed callers."""
        return {
            "Load": Method(self._load, RIGHTS),
            "Drop": Method(self._drop, RIGHTS),
            "Sample": Method(self._sample, RIGHTS),
        }

    async def _load(self, _: Caller, body: bytes) -> bytes:
        try:
            await self._models.load(wire.decode(body, LoadCall))
        except JaxRollError as error:
            return wire.encode(SampleReply(error=str(error)))
        return wire.encode(SampleReply())

    async def _drop(self, _: Caller, body: bytes) -> bytes:
        self._models.drop(wire.decode(body, str))
        return b""

    async def _sample(self, _: Caller, body: bytes) -> bytes:
        call = wire.decode(body, SampleCall)
        if not self._models.holds(call.name):
            return wire.encode(SampleReply(missing=True))
        self._drawn += 1
        try:
            async with self._rotation.use(call.name):
                return wire.encode(await self._drawn_by(call, self._drawn))
        except DataError as error:
            return wire.encode(SampleReply(error=str(error), missing=not self._models.holds(call.name)))

    async def _drawn_by(self, call: SampleCall, number: int) -> SampleReply:
        # The random keys depend on group and member; with a seed of the client's on nothing else.
        group = number if call.params.seed is None else 0
        running = [
            asyncio.ensure_future(self._proxy.generate(call.prompt, GenerationKey(group, member), call.params))
            for member in range(call.count)
        ]
        try:
            prompt = await self._models.prompt_logprobs(call.prompt) if call.prompt_logprobs else NOTHING
            return SampleReply(tuple(await asyncio.gather(*running)), prompt)
        finally:
            for task in running:
                task.cancel()


def main(args: RoleArgs) -> int:
    """Serve the Tinker server of `args.run_dir` until a stop signal; return 0."""
    secret = protocol.load_secret(args.run_dir)
    models = Models(args.config, args, protocol.bearer(secret, "sampler") if secret else "")
    loop = LoopThread("tinker-sampler")
    lifeline.on_stop(models.host.stop)

    async def serve() -> RawServer:
        service = Service(models, EngineProxy(models.host, asyncio.get_running_loop()))
        server = RawServer(SERVICE, service.methods(), secret=secret, max_message_bytes=max_message_bytes(args.config))
        port = server.bind("127.0.0.1", 0)
        await server.start()
        disk.replace_text(args.paths.tinker_sampler_address, f"127.0.0.1:{port}\n")
        return server

    server = loop.start(serve()).result()
    models.host.run()
    loop.start(server.stop(1.0)).result(timeout=5)
    loop.close()
    return 0
