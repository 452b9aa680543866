"""Construction of the model, tokenizer, engine and weight sync of a role from its config."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxroll import sharding as layouts
from jaxroll import wire
from jaxroll.config import Config, MeshConfig, RoleArgs, WeightSwap
from jaxroll.config.derived import update_in_force_s
from jaxroll.data import sources
from jaxroll.engine.device import FollowingDevice, Operation
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.errors import JaxRollError
from jaxroll.learner import lora
from jaxroll.learner.lora import Lora
from jaxroll.learner.state import Params
from jaxroll.models import families, params
from jaxroll.models.families import ModelSpec
from jaxroll.protocols import Tokenizer, described
from jaxroll.records import Relay, VersionRef
from jaxroll.roles.weights import Arriving, Progress, WeightFollower
from jaxroll.rpc import tls as tls_files
from jaxroll.rpc.tls import Material
from jaxroll.serving.engine_thread import EngineHost
from jaxroll.sharding import Layout
from jaxroll.store.messages import RelayState
from jaxroll.text import tokenizers
from jaxroll.transfer.channel_device import HandedOver
from jaxroll.transfer.ends import NOTHING_HELD, FetchedParameters, Receiver, Staged
from jaxroll.transfer.manifest import keeps_float32
from jaxroll.transfer.relay import RelaySender

if TYPE_CHECKING:
    from jaxroll.learner.multihost import Follower
    from jaxroll.learner.trainer import Trainer

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
    progress: Progress,
    tls: Material | None = None,
    device_lock: AbstractContextManager[object] | None = None,
    listener: RelaySender | None = None,
) -> Inference:
    """An engine on this process's devices. It compiles with its first weights and dispatches under `device_lock`.

    `listener` (`relay_listener`) serves the received weights to others. ConfigError if the model does not fit the mesh.
    """
    text = tokenizer(config)
    spec = model_spec(config, text)
    families.check_mesh(spec, mesh_config, f"{role}.mesh")
    mesh = layouts.build(mesh_config)
    engine_config = EngineConfig.of(config, role, slots=slots, weight_swap=weight_swap)
    engine = Engine(spec, mesh, layouts.SAMPLER, engine_config, decode=text.decode, progress=progress)
    progress.devices(mesh, engine.attention.described())
    if engine.memory:
        progress(engine.memory)
    host = EngineHost(engine, device_lock)
    received = None if listener is None else listener.relay
    receiver = Receiver(config.transfer, token=token, tls=tls, relay=received)
    layout = layouts.Layout(mesh, layouts.SAMPLER)
    adapters = Lora.of(config.learner)
    if adapters is None or config.learner.lora_publish == "merged":
        arriving = FetchedParameters(receiver, params.shardings(spec, layout.mesh, layout.rules), params.served(spec))
    else:
        arriving = AdaptedParameters(receiver, spec, layout, adapters, config.transfer.dtype)
    # With rolling updates a sampler keeps its update slot until the weight swap.
    in_force_s = update_in_force_s(config) if role == "sampler" else 0.0
    relay = None
    if config.transfer.relay != "none":
        relay = RelayState("" if listener is None else listener.address, os.environ.get(SITE_VARIABLE, ""))
    return Inference(text, host, WeightFollower(host, arriving, progress, in_force_s, relay, listener))


# --- an engine on several hosts: no role uses it yet (docs/placement.md)
#
# Process 0 has the requests and the scheduler. It sends a command for each program that it runs, and the others run it
# too (`engine.device`). Every process fetches the parts of the weights for its own devices.


def run_commands(leader: Follower, device: FollowingDevice, arriving: Arriving) -> int:
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
    """The listener that serves this sampler's weights to others; None without relays and in other roles."""
    if args.config.transfer.relay == "none" or role != "sampler":
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
    """A trainer with freshly initialised parameters, built by `make` (None: `Trainer`).

    ConfigError if they do not fit the mesh.
    """
    from jaxroll.learner.trainer import Trainer  # samplers do not need it

    spec = model_spec(config, tokenizer(config))
    families.check_mesh(spec, config.learner.mesh, "learner.mesh")
    mesh, key = layouts.build(config.learner.mesh), params.key(config)
    return (make or Trainer)(config, spec, mesh, layouts.LEARNER, key=key)
