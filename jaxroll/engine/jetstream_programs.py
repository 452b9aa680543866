"""The programs of the JetStream engine: compute the prefix of a prompt, insert it into a slot, decode one step.

Pure functions over a decode state that is simpler than that of JaxRoll's engine: each slot has fixed, consecutive
pages, and JetStream assigns slots. `jaxroll.engine.jetstream` gives them JetStream's interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxroll.algorithms import sampling
from jaxroll.errors import ConfigError
from jaxroll.models import cache as kv
from jaxroll.models import transformer
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import Params
from jaxroll.sharding import Layout, replicated

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
