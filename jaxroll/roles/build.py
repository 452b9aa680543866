"""Construction of the model, tokenizer and engine of a role from its config."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from jaxroll.config import Config, MeshConfig, WeightSwap
from jaxroll.config.derived import cache_tokens, support_tokens
from jaxroll.data import sources
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.learner.lora import Lora
from jaxroll.models import families, pretrained
from jaxroll.protocols import Tokenizer
from jaxroll.roles.weights import AdaptedParameters, FullParameters, Progress, WeightFollower
from jaxroll.rpc.tls import Material
from jaxroll.serving.engine_thread import EngineHost
from jaxroll.sharding import layout as meshes
from jaxroll.sharding import layout as rules
from jaxroll.text import tokenizers
from jaxroll.transfer.receive import Receiver


def tokenizer(config: Config) -> Tokenizer:
    """The run's tokenizer."""
    return tokenizers.build(config.tokenizer, sources.alphabet(config.task))


def model_spec(config: Config, text: Tokenizer) -> families.ModelSpec:
    """The run's model."""
    return pretrained.spec(config.model, text.vocab_size)


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
) -> Inference:
    """An engine on this process's devices. It compiles with its first weights and dispatches under `device_lock`.

    ConfigError if the model does not fit the mesh.
    """
    text = tokenizer(config)
    spec = model_spec(config, text)
    families.check_mesh(spec, mesh_config, f"{role}.mesh")
    mesh = meshes.build(mesh_config)
    engine_config = EngineConfig(
        slots=slots,
        max_tokens=cache_tokens(config),
        weight_swap=weight_swap,
        seed=config.run.seed,
        prefill_rows=min(config.sampler.prefill_rows, slots),
        prefill_buckets=config.sampler.prefill_buckets,
        decode_chunk=config.sampler.decode_chunk,
        experts=role == "sampler" and config.learner.routing_replay,
        prefill_budget=config.sampler.prefill_budget,
        page_tokens=config.sampler.page_tokens,
        cache_pages=config.sampler.cache_pages if role == "sampler" else 0,
        support_tokens=support_tokens(config.sampling) if role == "sampler" else 0,  # evaluations are greedy
        prefill_attention=config.sampler.prefill_attention,
        paged_attention=config.sampler.paged_attention,
    )
    engine = Engine(spec, mesh, rules.SAMPLER, engine_config, decode=text.decode)
    progress.devices(mesh, engine.attention.described())
    host = EngineHost(engine, device_lock)
    receiver, layout = Receiver(config.transfer, token=token, tls=tls), rules.Layout(mesh, rules.SAMPLER)
    adapters = Lora.of(config.learner)
    if adapters is None or config.learner.lora_publish == "merged":
        arriving = FullParameters(receiver, spec, layout)
    else:
        arriving = AdaptedParameters(receiver, spec, layout, adapters, config.transfer.dtype)
    # With rolling updates a sampler keeps its update slot until the weight swap.
    rolling = role == "sampler" and config.schedule.rolling_updates
    in_force_s = config.transfer.deadline_s if rolling else 0.0
    return Inference(text, host, WeightFollower(host, arriving, progress, in_force_s))
