"""JaxRoll's model as an engine of JetStream (google-jetstream 0.2; extra `jetstream`, in a separate environment).

JetStream's orchestrator and gRPC server own the queue and the slots, and call prefill, insert and generate of this
engine. JetStream's interface has these gaps, which are filled here:

- It does not identify requests. The n-th prefill samples as group n, member 0, unless the caller of `prefill` passes a
  key.
- It puts the tokenizer's bos before every prompt of token ids. The tokenizer of this engine returns NO_BOS, which
  `prefill` removes, so that the prompt is exactly the ids that a client sends.
- It reports the tokens that `generate` returns, and none of a prefill. So a step returns the tokens sampled before it
  (the first one by the prefill) and samples the next ones.
- It does not tell the engine that a slot is free. A slot idles once its request has sampled the end of the sequence,
  or is full.

This module needs google-jetstream; `jaxroll.serving.jetstream_proxy` does not use it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from jetstream.core import orchestrator  # pyright: ignore[reportMissingImports]
from jetstream.engine import (  # pyright: ignore[reportMissingImports]
    engine_api,
    token_utils,
    tokenizer_api,
    tokenizer_pb2,
)

from jaxroll.algorithms import sampling
from jaxroll.errors import ConfigError
from jaxroll.models import cache as kv
from jaxroll.models import params as model_params
from jaxroll.models import transformer
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import Params
from jaxroll.protocols import GenerationKey, Tokenizer
from jaxroll.sharding.layout import Layout, Rules, replicated

# --- The programs of the JetStream engine: compute the prefix of a prompt, insert it into a slot, decode one step
#
# Pure functions over a decode state that is simpler than that of JaxRoll's engine: each slot has fixed, consecutive
# pages, and JetStream assigns slots. `JetStreamEngine` gives them JetStream's interface.

PROMPT_BUCKETS = tuple(2**power for power in range(4, 16))  # the lengths to which JetStream pads prompts
NO_BOS = -1  # placeholder for the first token that JetStream puts before every prompt
_IDLE = -1


@dataclass(frozen=True)
class Serving:
    """The sizes of the programs and the sampling parameters, which JetStream cannot set per request.

    A slot holds `max_tokens` positions, including the prompt; a prompt longer than `max_prefill` loses its beginning.
    """

    slots: int
    max_prefill: int
    max_tokens: int
    page_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_prefill not in PROMPT_BUCKETS:
            reason = "JetStream pads prompts to powers of two"
            raise ConfigError("max_prefill", self.max_prefill, reason, f"Use one of {PROMPT_BUCKETS}.")
        if self.max_tokens <= self.max_prefill:
            reason = f"no token fits behind a prompt of max_prefill = {self.max_prefill}"
            raise ConfigError("max_tokens", self.max_tokens, reason, "Raise it.")

    @property
    def table(self) -> int:
        """J: pages of a slot."""
        return -(-self.max_tokens // self.page_tokens)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefix:
    """A computed prompt: keys and values of each layer, the first sampled token, and (group, member, salt)."""

    keys: tuple[Float[Array, "1 T K H"], ...]
    values: tuple[Float[Array, "1 T K H"], ...]
    length: Int[Array, ""]
    token: Int[Array, ""]
    identity: Int[Array, " 3"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The state of S slots. A slot's last token is at `positions` (-1: idle) and is not in the cache yet."""

    cache: kv.KVCache
    tokens: Int[Array, " S"]
    positions: Int[Array, " S"]
    counts: Int[Array, " S"]  # new tokens reported so far
    identities: Int[Array, "S 3"]


@dataclass(frozen=True)
class SlotPrograms:
    """A model with slots on a mesh; a slot idles once its request has sampled `eos_id` or is full."""

    spec: ModelSpec
    layout: Layout
    serving: Serving
    eos_id: int

    @property
    def shards(self) -> int:
        """D: the number of groups of devices over which the slots are sharded."""
        return kv.shards_of(self.serving.slots, self.layout.mesh, self.layout.rules)

    def empty(self) -> DecodeState:
        """The decode state with all slots idle."""
        slots, spec, serving = self.serving.slots, self.spec, self.serving
        pages = slots // self.shards * serving.table
        shape = self.shards, spec.kv_heads, pages, serving.page_tokens, spec.head_dim
        pools = lambda: tuple(jnp.zeros(shape, spec.compute_dtype) for _ in range(spec.layers))  # noqa: E731
        zeros = jnp.zeros(slots, jnp.int32)
        cache = kv.constrained(kv.KVCache(pools(), pools()), self.layout)
        return DecodeState(cache, zeros, zeros + _IDLE, zeros, jnp.zeros((slots, 3), jnp.int32))

    def prefix_shardings(self) -> Prefix:
        """A Prefix of shardings: heads are sharded by the rules, all other axes are replicated."""
        whole, spec = replicated(self.layout.mesh), self.spec
        heads = self.layout.sharding((None, None, "kv_heads", None), (1, 1, spec.kv_heads, spec.head_dim))
        layers = (heads,) * spec.layers
        return Prefix(layers, layers, whole, whole, whole)  # pyright: ignore[reportArgumentType]

    def state_shardings(self) -> DecodeState:
        """A DecodeState of shardings: slots are sharded by the rules."""
        like, logical = jax.eval_shape(self.empty), (kv.LOGICAL, ("slots", None), ("slots",))
        by_rank = {len(axes): axes for axes in logical}
        return jax.tree.map(lambda leaf: self.layout.sharding(by_rank[len(leaf.shape)], leaf.shape), like)

    def prefill(
        self, params: Params, padded: Int[Array, " T"], length: Int[Array, ""], identity: Int[Array, " 3"]
    ) -> Prefix:
        """The prefix of a padded prompt, without the NO_BOS at its front, which `length` includes."""
        marked = padded[0] == NO_BOS
        tokens = jnp.maximum(jnp.where(marked, jnp.roll(padded, -1), padded), 0)
        length = jnp.minimum(length, padded.shape[0]) - marked  # JetStream passes the length before truncation
        logits, keys, values = transformer.prefill(self.spec, params, tokens[None], length[None], layout=self.layout)
        return Prefix(keys, values, length, self._sample(logits, identity[None], length[None])[0], identity)

    def insert(self, prefix: Prefix, state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
        """`state` with the prefix in `slot`, replacing its content."""
        own = self.serving.slots // self.shards
        fill = partial(
            kv.filled,
            shards=(slot // own)[None],
            tables=self._table(slot % own)[None],
            starts=jnp.zeros(1, jnp.int32),
            lengths=prefix.length[None],
        )
        pools, layers = (state.cache.keys, state.cache.values), (prefix.keys, prefix.values)
        keys, values = (
            tuple(fill(pool, new) for pool, new in zip(*pair, strict=True)) for pair in zip(pools, layers, strict=True)
        )
        return DecodeState(
            kv.constrained(kv.KVCache(keys, values), self.layout),
            state.tokens.at[slot].set(prefix.token),
            state.positions.at[slot].set(prefix.length),
            state.counts.at[slot].set(0),
            state.identities.at[slot].set(prefix.identity),
        )

    def generate(self, params: Params, state: DecodeState) -> tuple[DecodeState, Int[Array, "S 3"]]:
        """The state after one more token, and for each slot: the previous token, its validity, the number of tokens."""
        running = state.positions != _IDLE
        counts = state.counts + running
        ahead = state.positions + 1
        goes_on = running & (state.tokens != self.eos_id) & (ahead < self.serving.max_tokens)
        own = jnp.arange(self.serving.slots) % (self.serving.slots // self.shards)
        logits, cache = transformer.decode(
            self.spec,
            params,
            state.cache,
            state.tokens,
            jnp.where(goes_on, state.positions, _IDLE),
            self._table(own),
            layout=self.layout,
        )
        tokens = jnp.where(goes_on, self._sample(logits, state.identities, ahead), state.tokens)
        after = DecodeState(cache, tokens, jnp.where(goes_on, ahead, _IDLE), counts, state.identities)
        return after, jnp.stack([state.tokens, running.astype(jnp.int32), counts], axis=1)

    def _table(self, own: Int[Array, "*S"]) -> Int[Array, "*S J"]:
        """The pages of the slots with the indices `own` in their shard."""
        return own[..., None] * self.serving.table + jnp.arange(self.serving.table)

    def _sample(
        self, logits: Float[Array, "S V"], identities: Int[Array, "S 3"], positions: Int[Array, " S"]
    ) -> Int[Array, " S"]:
        """One token per row for `positions`, with the same random keys as JaxRoll's engine."""
        run, serving = jax.random.key(self.serving.seed), self.serving
        group, member, salt = identities.T
        keys = jax.vmap(sampling.token_key, (None, 0, 0, 0, 0))(run, group, member, salt, positions)
        every = lambda value, dtype: jnp.full(len(positions), value, dtype)  # noqa: E731
        temperature, top_p = every(serving.temperature, jnp.float32), every(serving.top_p, jnp.float32)
        return sampling.sample(logits, keys, temperature, every(serving.top_k, jnp.int32), top_p)[0]


# --- JaxRoll's model as an engine of JetStream (google-jetstream 0.2


class JetStreamEngine(engine_api.Engine):
    """One model on one mesh. It compiles and allocates nothing before the first call; `load_params` calls `weights`.

    One prefill and one insert are compiled for every length that JetStream pads to, and one generate. Each call donates
    the decode state.
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        rules: Rules,
        tokenizer: Tokenizer,
        weights: Callable[[], Params],
        serving: Serving,
    ) -> None:
        self._mesh, self._serving, self._tokenizer, self._weights = mesh, serving, tokenizer, weights
        self._params = model_params.shardings(spec, mesh, rules)
        self._programs = made = SlotPrograms(spec, Layout(mesh, rules), serving, tokenizer.eos_id)
        self._order = itertools.count()
        state = made.state_shardings()
        self._prefill = jax.jit(made.prefill, out_shardings=made.prefix_shardings())
        self._insert = jax.jit(made.insert, out_shardings=state, donate_argnums=1)
        self._generate = jax.jit(made.generate, out_shardings=(state, replicated(mesh)), donate_argnums=1)

    # --- JetStream's verbs

    def load_params(self) -> Params:
        """The weights with this engine's shardings."""
        return jax.device_put(self._weights(), self._params)

    def init_decode_state(self) -> DecodeState:
        """The decode state with all slots idle."""
        return jax.jit(self._programs.empty, out_shardings=self._programs.state_shardings())()

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
        key: GenerationKey | None = None,
    ) -> Prefix:
        """The prefix of a prompt; `key` (not part of JetStream's interface) identifies the request that samples."""
        if existing_prefix is not None:
            raise NotImplementedError("JaxRoll's JetStream engine computes whole prompts: pass no existing_prefix")
        key = key or GenerationKey(next(self._order), 0)
        identity = np.array([key.group, key.member, key.salt], np.int32)
        return self._prefill(params, jnp.asarray(padded_tokens, jnp.int32), np.int32(true_length), identity)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """`decode_state`, which is donated, with the prefix in `slot`."""
        return self._insert(prefix, decode_state, np.int32(slot))

    def generate(self, params: Params, decode_state: DecodeState) -> tuple[DecodeState, Any]:
        """The state after one step, and JetStream's ResultTokens: each slot's token, its validity, number of tokens."""
        state, packed = self._generate(params, decode_state)
        return state, engine_api.ResultTokens(packed, (0, 1), (1, 2), (2, 3), samples_per_slot=1)

    # --- properties that JetStream reads

    def get_prefix_destination_sharding(self) -> Prefix:
        """The shardings of a prefix, as a Prefix."""
        return self._programs.prefix_shardings()

    def get_tokenizer(self) -> Any:
        """Parameters without a file, because `build_tokenizer` returns the tokenizer."""
        return tokenizer_pb2.TokenizerParameters(path="jaxroll")

    def build_tokenizer(self, metadata: Any) -> JetStreamTokenizer:
        """JaxRoll's tokenizer with JetStream's interface."""
        return JetStreamTokenizer(self._tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        """The number of slots."""
        return self._serving.slots

    @property
    def samples_per_slot(self) -> int:
        """1, the only supported number."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The number of tokens of the longest prompt."""
        return self._serving.max_prefill

    @property
    def mesh(self) -> Mesh:
        """The mesh of the model."""
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        """None, because this engine uses no host CPUs."""
        return None


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """A tokenizer of JaxRoll with JetStream's interface. Text is encoded after the tokenizer's bos, if it has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[jax.Array | np.ndarray, int]:
        """The padded ids of `s`, and their number without padding."""
        opening = getattr(self._tokenizer, "bos_id", None) if kwargs.pop("is_bos", True) else None
        ids = [*([] if opening is None else [opening]), *self._tokenizer.encode(s)]
        return token_utils.pad_tokens(np.array(ids, np.int32), NO_BOS, self.pad_id, is_bos=False, **kwargs)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """The text of `token_ids`."""
        return self._tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        """The tokenizer's padding."""
        return self._tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        """The tokenizer's end of sequence."""
        return self._tokenizer.eos_id

    @property
    def bos_id(self) -> int:
        """NO_BOS, a marker that `JetStreamEngine.prefill` removes."""
        return NO_BOS

    @property
    def stop_tokens(self) -> set[int]:
        """The end of sequence; a sampled padding token does not end an answer."""
        return {self.eos_id}


def current_orchestrator() -> ModuleType:
    """The module `jetstream.core.orchestrator`, patched for current JAX. Call this before making a Driver."""
    # Version 0.2.2 frees prefixes by `jax.tree_map`, which JAX has removed; the exception would end the process.
    if not hasattr(jax, "tree_map"):
        orchestrator.delete_pytree = lambda tree: jax.tree.map(_deleted, tree)
    return orchestrator


def _deleted(leaf: Any) -> None:
    if isinstance(leaf, jax.Array):
        leaf.delete()
