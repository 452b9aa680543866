"""Construction of the model, tokenizer, engine and weight transfer of a role from its config."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxroll import disk, lifeline, wire
from jaxroll import sharding as layouts
from jaxroll.config import Config, MeshConfig, RoleArgs, WeightSwap
from jaxroll.config.derived import cache_tokens, channel_of, update_in_force_s, update_slot_s
from jaxroll.data import sources
from jaxroll.engine.device import Device
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.programs import kernels_and_sizes
from jaxroll.engine.work import FollowingDevice, LeadingDevice, Operation
from jaxroll.errors import EXIT_INTERRUPTED, JaxRollError, TransferError, described
from jaxroll.learner import lora
from jaxroll.learner.lora import Lora
from jaxroll.learner.state import Params
from jaxroll.models import families, folders, params
from jaxroll.models.cache import shards_of
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Tokenizer
from jaxroll.records import Relay, Version, VersionRef
from jaxroll.roles.weights import RoleLog, WeightFetcher, WeightFollower, transfer_config, weights_token
from jaxroll.rpc import protocol
from jaxroll.rpc import tls as tls_files
from jaxroll.rpc.tls import Material
from jaxroll.serving.engine_thread import EngineHost, EngineProxy
from jaxroll.sharding import Layout, Rules
from jaxroll.store.messages import RelayState
from jaxroll.text import tokenizers
from jaxroll.transfer.channel_device import DevicePublisher, HandedOver
from jaxroll.transfer.ends import NOTHING_HELD, Exposure, FetchedParameters, Publisher, Receiver, Staged
from jaxroll.transfer.manifest import keeps_float32
from jaxroll.transfer.relay import RelaySender

if TYPE_CHECKING:
    from jaxroll.learner.multihost import Follower, Leader
    from jaxroll.learner.trainer import Trainer

ANSWER_POLL_S = 0.5
SITE_VARIABLE = "JAXROLL_SITE"  # name of the site of this process, within which copies of weights are cheap


def tokenizer(config: Config) -> Tokenizer:
    """The run's tokenizer."""
    return tokenizers.build(config.tokenizer, sources.alphabet(config.task))


def model_spec(config: Config, text: Tokenizer) -> families.ModelSpec:
    """The run's model."""
    return params.spec(config.model, text.vocab_size)


class AdaptedParameters:
    """Weight sync of LoRA adapters and their base; the base is fetched once and kept on the host.

    They are merged as the learner merges them (float32) and then rounded to `dtype`, that of published parameters, and
    to the engine's dtype: the engine gets the same parameters as with `lora_publish="merged"`.
    """

    def __init__(self, receiver: Receiver, spec: ModelSpec, layout: Layout, adapters: Lora, dtype: str) -> None:
        target, shapes = params.shardings(spec, layout.mesh, layout.rules), params.served(spec)
        self._receiver, self._base, self._held = receiver, params.abstract(spec), NOTHING_HELD
        self._target = target | lora.shardings(spec, layout, adapters)
        self._shapes = self._base | lora.abstract(spec, adapters)

        def merged(base: Params, trained: Params) -> Params:
            values = lora.merged(spec, layout, adapters, base, trained)
            rounded = {name: value if keeps_float32(name) else _rounded(value, dtype) for name, value in values.items()}
            return {name: value.astype(shapes[name].dtype) for name, value in rounded.items()}

        self._merged = jax.jit(merged, out_shardings=target)

    async def fetch(self, ref: VersionRef, *relays: Relay) -> Staged | HandedOver:
        """The adapters, with the base unless it is held already; see `FetchedParameters.fetch`."""
        staged = await asyncio.to_thread(self._receiver.fetch, ref, self._target, self._shapes, self._held, relays)
        self._held = staged.held(self._base)
        return staged

    def place(self, staged: Staged | HandedOver) -> Params:
        """The merged parameters on the mesh; call it on the JAX thread."""
        placed = staged.place()
        return self._merged({name: placed.pop(name) for name in self._base}, placed)


def _rounded(value: jax.Array, dtype: str) -> jax.Array:
    """float32 `value`, rounded to `dtype`. The compiler might remove a cast to `dtype` and back."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(value, info.nexp, info.nmant)


@dataclass(frozen=True)
class Inference:
    """An engine, its tokenizer, its thread and the task that brings new weights."""

    tokenizer: Tokenizer
    host: EngineHost
    follower: WeightFollower

    @property
    def engine(self) -> Engine:
        """The engine; step it on the JAX thread only."""
        return self.host.engine


def inference(
    config: Config,
    role: str,
    mesh_config: MeshConfig,
    *,
    slots: int,
    weight_swap: WeightSwap,
    token: str,
    progress: RoleLog,
    tls: Material | None = None,
    device_lock: AbstractContextManager[object] | None = None,
    first_device: int = 0,
    listener: RelaySender | None = None,
    leader: Leader | None = None,
) -> Inference:
    """An engine on this process's devices from `first_device` on. It compiles with its first weights and dispatches
    under `device_lock`.

    `listener` (`relay_listener`) serves the received weights to others. On several hosts process 0 has the `leader` of
    the others, which call `follow`. ConfigError if the model does not fit the mesh.
    """
    config, text = folders.with_transfer_deadline(config), tokenizer(config)
    spec, mesh = _model_and_mesh(config, text, role, mesh_config, first_device)
    engine_config = EngineConfig.of(config, role, slots=slots, weight_swap=weight_swap)
    make_device = Device if leader is None else partial(LeadingDevice, partial(_send_operation, leader))
    engine = Engine(
        spec,
        mesh,
        layouts.SAMPLER,
        engine_config,
        decode=text.decode,
        progress=progress,
        make_device=make_device,
        draft=params.draft_model(config, spec, mesh, layouts.SAMPLER),
    )
    progress.devices(mesh, engine.attention.described())
    if engine.memory:
        progress(engine.memory)
    host = EngineHost(engine, device_lock)
    received = None if listener is None else listener.relay
    receiver = Receiver(config.transfer, token=token, tls=tls, relay=received)
    arriving = _arriving(config, receiver, spec, mesh)
    if leader is not None:
        arriving = ParametersOfAllHosts(leader, arriving, update_slot_s(config))
    # With rolling updates a sampler keeps its update slot until the weight swap.
    in_force_s = update_in_force_s(config) if role == "sampler" else 0.0
    relay = None
    if config.transfer.relay != "none" and device_lock is None:  # those of the learner fetch from it
        relay = RelayState("" if listener is None else listener.address, os.environ.get(SITE_VARIABLE, ""))
    return Inference(text, host, WeightFollower(host, arriving, progress, in_force_s, relay, listener))


def _model_and_mesh(
    config: Config, text: Tokenizer, role: str, mesh: MeshConfig, first_device: int = 0
) -> tuple[ModelSpec, Mesh]:
    spec = folders.with_draft(config.sampler, model_spec(config, text))
    families.check_mesh(spec, mesh, f"{role}.mesh")
    return spec, layouts.build(mesh, jax.devices()[first_device:])


def _arriving(config: Config, receiver: Receiver, spec: ModelSpec, mesh: Mesh) -> WeightFetcher:
    layout, adapters = layouts.Layout(mesh, layouts.SAMPLER), Lora.of(config.learner)
    if adapters is None or config.learner.lora_publish == "merged":
        return FetchedParameters(receiver, params.shardings(spec, mesh, layout.rules), params.served(spec))
    return AdaptedParameters(receiver, spec, layout, adapters, config.transfer.dtype)


# --- a sampler on several hosts
#
# Process 0 has the requests, the scheduler and the connection to the store. It sends a command for each program that it
# runs, and the others run it too (`engine.work`). Every process fetches the parts of the weights for its own devices.


def _send_operation(leader: Leader, operation: Operation) -> None:
    from jaxroll.learner.multihost import Command

    leader.send(Command("run", body=wire.encode(operation)))


class ParametersOfAllHosts:
    """Weight sync of process 0: a version has arrived when every process has fetched its parts of it."""

    def __init__(self, leader: Leader, own: WeightFetcher, limit_s: float) -> None:
        self._leader, self._own, self._limit_s = leader, own, limit_s

    async def fetch(self, ref: VersionRef, *relays: Relay) -> Staged | HandedOver:
        """The parts of this process; TransferError if another process could not fetch its parts."""
        from jaxroll.learner.multihost import Command

        self._leader.send(Command("fetch", ref.version, body=wire.encode(ref)))
        # To the end, also if one fails: the next attempt must not take the answers of this one.
        both = asyncio.gather(self._own.fetch(ref, *relays), self._others(ref.version), return_exceptions=True)
        own, others = await both
        if isinstance(own, BaseException):
            raise own
        if isinstance(others, BaseException):
            raise others
        return own

    async def _others(self, version: Version) -> None:
        """Return when the other processes have their parts; TransferError if one fails, or after the limit."""
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + self._limit_s
        while True:
            try:  # briefly, because a thread that waits cannot be cancelled
                answers = await asyncio.to_thread(self._leader.parts, version, ANSWER_POLL_S, "fetch")
            except TransferError as error:
                if now_s() >= until_s:
                    raise TransferError(f"{error}, nor in {self._limit_s:g} s") from error
                continue
            if failures := [text for text, _ in answers if text]:
                raise TransferError("; ".join(failures))
            return

    def place(self, staged: Staged | HandedOver) -> Params:
        """The parameters on the mesh; call it on the JAX thread."""
        from jaxroll.learner.multihost import Command

        assert isinstance(staged, Staged), "a colocated run has one host"
        self._leader.send(Command("place", staged.version))
        return self._own.place(staged)


def lead(args: RoleArgs, run: Callable[..., None], leave: Callable[[], None], interrupted: threading.Event) -> int:
    """Join the other processes of this sampler and `run` as process 0; the exit code of all of them.

    An error in one process ends all, and a stop signal to one stops this one, which sets `interrupted`. If this is not
    process 0 (on a TPU slice JAX numbers the processes), `leave` is called, and the process follows.
    """
    from jaxroll.learner import multihost

    stop = partial(os.kill, os.getpid(), signal.SIGTERM)
    leader = multihost.join(args.hosts("sampler"), args.coordinator, stop)
    if isinstance(leader, multihost.Follower):
        leave()
        return follow(args, leader)
    assert leader is not None, "there are several processes"
    with leader:
        run(leader=leader)
        leader.end(code := EXIT_INTERRUPTED if interrupted.is_set() else 0)
        return code


def follow(args: RoleArgs, leader: Follower | None = None) -> int:
    """Run what process 0 of this sampler runs, until it ends; the exit code. Joins without a `leader`."""
    from jaxroll.learner import multihost

    stop = threading.Event()
    lifeline.on_stop(stop.set)
    joined = leader or multihost.join(args.hosts("sampler"), args.coordinator, stop.set)
    assert isinstance(joined, multihost.Follower), "process 0 leads"
    lifeline.on_stop(joined.ask_to_stop)
    if stop.is_set():  # before the other processes had joined
        joined.ask_to_stop()
    config = folders.with_transfer_deadline(args.config)
    with joined:
        spec, mesh = _model_and_mesh(config, tokenizer(config), "sampler", config.sampler.mesh)
        engine_config = EngineConfig.of(config, "sampler")
        draft = params.draft_model(config, spec, mesh, layouts.SAMPLER)
        device = following_device(spec, mesh, layouts.SAMPLER, engine_config, draft)
        receiver = Receiver(config.transfer, token=weights_token(args.run_dir), tls=tls_files.load(args.run_dir))
        return run_commands(joined, device, _arriving(config, receiver, spec, mesh))


def following_device(
    spec: ModelSpec, mesh: Mesh, rules: Rules, config: EngineConfig, draft: Params | None = None
) -> FollowingDevice:
    """The device of another process of an engine on several hosts, of which process 0 has the `Engine`."""
    sizes, spec = config.sizes(shards_of(config.slots, mesh, rules)), config.model(spec)
    attention, sizes = kernels_and_sizes(spec, mesh, sizes, **config.kernels)
    return FollowingDevice(spec, mesh, rules, sizes, seed=config.seed, attention=attention, draft=draft)


def run_commands(leader: Follower, device: FollowingDevice, arriving: WeightFetcher) -> int:
    """Run the commands of process 0 until it sends `end`; the exit code. Weights are fetched on a thread of their own.

    The parameters of a version are placed when process 0 places them, after all processes have fetched their parts.
    """
    fetched: Future[Staged | HandedOver] | None = None

    def fetch(ref: VersionRef, before: Future[Staged | HandedOver] | None) -> Staged | HandedOver:
        staged = before.result() if before is not None and before.exception() is None else None
        if staged is None or getattr(staged, "version", None) != ref.version:  # if not, another process failed
            try:
                staged = asyncio.run(arriving.fetch(ref))
            except JaxRollError as error:
                leader.serves(ref.version, f"{socket.gethostname()}: {described(error)}", b"")
                raise
        leader.serves(ref.version, "", b"")
        return staged

    with ThreadPoolExecutor(1, "fetch") as thread:
        for command in leader.commands():
            match command.what:
                case "run":
                    device.run(wire.decode(command.body, Operation))
                case "fetch":
                    fetched = thread.submit(fetch, wire.decode(command.body, VersionRef), fetched)
                case "place":
                    assert fetched is not None, "process 0 places what all have fetched"
                    device.placed, (staged, fetched) = None, (fetched.result(), None)
                    device.placed = arriving.place(staged)
                case "end":
                    return command.code
                case what:
                    raise ValueError(f"process 0 sent the unknown command {what!r}; all hosts need the same JaxRoll")
    raise AssertionError("the last command of process 0 is `end`")


def relay_listener(args: RoleArgs, role: str, token: str) -> RelaySender | None:
    """The listener that serves this sampler's weights to others; None without relays, in other roles, on several hosts.

    On several hosts each has parts of the weights only.
    """
    if args.config.transfer.relay == "none" or role != "sampler" or args.hosts("sampler").count > 1:
        return None
    store = args.config.store
    return RelaySender(
        args.config.transfer,
        args.host,
        token=token,
        tls=tls_files.load(args.run_dir),
        mutual_tls=store.mutual_tls,
        insecure=args.insecure,
    )


def trainer(config: Config, make: Callable[..., Trainer] | None = None) -> Trainer:
    """A trainer with freshly initialized parameters, built by `make` (None: `Trainer`).

    ConfigError if they do not fit the mesh.
    """
    from jaxroll.learner.trainer import Trainer  # samplers do not need it

    spec = model_spec(config, tokenizer(config))
    families.check_mesh(spec, config.learner.mesh, "learner.mesh")
    mesh, key = layouts.build(config.learner.mesh), params.key(config)
    return (make or Trainer)(config, spec, mesh, layouts.LEARNER, key=key)


def publisher(args: RoleArgs, **hosts: Any) -> Publisher | DevicePublisher:
    """The publisher of the config's channel: for samplers of other processes, or of this one (`device`)."""
    transfer = transfer_config(folders.with_transfer_deadline(args.config))
    if channel_of(args.config) == "device":
        return DevicePublisher(transfer.dtype)
    hosts |= {"exposure": Exposure(tls_files.load(args.run_dir), args.config.store.mutual_tls, args.insecure)}
    return Publisher(transfer, args.run_dir, args.host, token=weights_token(args.run_dir), **hosts)


# --- HTTP front end of a sampler's engine

LOOPBACK = "127.0.0.1"


async def serve_http(args: RoleArgs, slots: int, parts: Inference, proxy: EngineProxy, progress: RoleLog) -> None:
    """Answer HTTP requests with the engine of a sampler; address and token are in the run's folder."""
    from jaxroll.rpc import http
    from jaxroll.serving import http_server, weight_updates
    from jaxroll.serving.http_answers import Served
    from jaxroll.serving.http_requests import EngineLimits

    engine, port = parts.engine, args.config.sampler.http_port
    listening = http.listen(LOOPBACK, port + args.index if port else 0)
    token = http.token(protocol.load_secret(args.run_dir), args.paths.http_token)
    room = EngineLimits(cache_tokens(args.config), parts.tokenizer)
    served = Served(args.run_dir.name, proxy, room, lambda: engine.version, engine.stats,
                    engine.latencies.percentiles, slots=slots, swap=engine.weight_swap)  # fmt: skip
    address = http.address(LOOPBACK, listening)
    disk.replace_text(args.paths.http_address(f"sampler-{args.index}"), address + "\n")
    progress(f"serves HTTP on {address}")
    await http.serve(http_server.FrontEnd(served, token, weight_updates.routes(None)).app, listening)
