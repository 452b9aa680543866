"""The programs that JetStream's verbs run: a prompt's prefix, a prefix in a slot, one step of all slots.

Pure functions over a decode state smaller than the engine's own: each slot has pages of its own, one after another,
and JetStream says when one is taken. `jaxroll.engine.jetstream` gives them JetStream's interface.
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
from jaxroll.sharding.layout import Layout, replicated

PROMPT_BUCKETS = tuple(2**power for power in range(4, 16))  # the lengths to which JetStream pads prompts
NO_BOS = -1  # put before a prompt where JetStream insists on a first token and there is none
_IDLE = -1


@dataclass(frozen=True)
class Serving:
    """The sizes of the programs and how they draw: JetStream cannot ask for either request by request.

    A slot holds `max_tokens` positions, prompt included; a prompt longer than `max_prefill` loses its beginning.
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
    """A computed prompt: keys and values of each layer, its first token, and who draws (group, member, salt)."""

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
    """A model in slots on a mesh; a slot whose request drew `eos_id`, or that is full, idles from then on."""

    spec: ModelSpec
    layout: Layout
    serving: Serving
    eos_id: int

    @property
    def shards(self) -> int:
        """D: over how many groups of devices the slots are spread."""
        return kv.shards_of(self.serving.slots, self.layout.mesh, self.layout.rules)

    def empty(self) -> DecodeState:
        """All slots idle."""
        slots, spec, serving = self.serving.slots, self.spec, self.serving
        pages = slots // self.shards * serving.table
        shape = self.shards, spec.kv_heads, pages, serving.page_tokens, spec.head_dim
        pools = lambda: tuple(jnp.zeros(shape, spec.compute_dtype) for _ in range(spec.layers))  # noqa: E731
        zeros = jnp.zeros(slots, jnp.int32)
        cache = kv.constrained(kv.KVCache(pools(), pools()), self.layout)
        return DecodeState(cache, zeros, zeros + _IDLE, zeros, jnp.zeros((slots, 3), jnp.int32))

    def prefix_shardings(self) -> Prefix:
        """A prefix of shardings: heads as the rules split them, the rest whole."""
        whole, spec = replicated(self.layout.mesh), self.spec
        heads = self.layout.sharding((None, None, "kv_heads", None), (1, 1, spec.kv_heads, spec.head_dim))
        layers = (heads,) * spec.layers
        return Prefix(layers, layers, whole, whole, whole)  # pyright: ignore[reportArgumentType]

    def state_shardings(self) -> DecodeState:
        """A decode state of shardings: slots as the rules spread them."""
        like, logical = jax.eval_shape(self.empty), (kv.LOGICAL, ("slots", None), ("slots",))
        by_rank = {len(axes): axes for axes in logical}
        return jax.tree.map(lambda leaf: self.layout.sharding(by_rank[len(leaf.shape)], leaf.shape), like)

    def prefill(
        self, params: Params, padded: Int[Array, " T"], length: Int[Array, ""], identity: Int[Array, " 3"]
    ) -> Prefix:
        """The prefix of a padded prompt, without the NO_BOS at its front; `length` counts that too."""
        marked = padded[0] == NO_BOS
        tokens = jnp.maximum(jnp.where(marked, jnp.roll(padded, -1), padded), 0)
        length = jnp.minimum(length, padded.shape[0]) - marked  # of a prompt cut off, JetStream tells the whole length
        logits, keys, values = transformer.prefill(self.spec, params, tokens[None], length[None], layout=self.layout)
        return Prefix(keys, values, length, self._sample(logits, identity[None], length[None])[0], identity)

    def insert(self, prefix: Prefix, state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
        """`state` with the prefix in `slot`, which replaces its content."""
        own = self.serving.slots // self.shards
        fill = partial(
            kv.filled, shards=(slot // own)[None], tables=self._table(slot % own)[None],
            starts=jnp.zeros(1, jnp.int32), lengths=prefix.length[None],
        )  # fmt: skip
        pools, layers = (state.cache.keys, state.cache.values), (prefix.keys, prefix.values)
        keys, values = (
            tuple(fill(pool, new) for pool, new in zip(*pair, strict=True))
            for pair in zip(pools, layers, strict=True)
        )  # fmt: skip
        return DecodeState(
            kv.constrained(kv.KVCache(keys, values), self.layout),
            state.tokens.at[slot].set(prefix.token),
            state.positions.at[slot].set(prefix.length),
            state.counts.at[slot].set(0),
            state.identities.at[slot].set(prefix.identity),
        )

    def generate(self, params: Params, state: DecodeState) -> tuple[DecodeState, Int[Array, "S 3"]]:
        """The state one token on, and of each slot the token before, whether it counts, and how many it makes."""
        running = state.positions != _IDLE
        counts = state.counts + running
        ahead = state.positions + 1
        goes_on = running & (state.tokens != self.eos_id) & (ahead < self.serving.max_tokens)
        own = jnp.arange(self.serving.slots) % (self.serving.slots // self.shards)
        logits, cache = transformer.decode(
            self.spec, params, state.cache, state.tokens, jnp.where(goes_on, state.positions, _IDLE),
            self._table(own), layout=self.layout,
        )  # fmt: skip
        tokens = jnp.where(goes_on, self._sample(logits, state.identities, ahead), state.tokens)
        after = DecodeState(cache, tokens, jnp.where(goes_on, ahead, _IDLE), counts, state.identities)
        return after, jnp.stack([state.tokens, running.astype(jnp.int32), counts], axis=1)

    def _table(self, own: Int[Array, "*S"]) -> Int[Array, "*S J"]:
        """The pages of slots at `own` in their shard."""
        return own[..., None] * self.serving.table + jnp.arange(self.serving.table)

    def _sample(
        self, logits: Float[Array, "S V"], identities: Int[Array, "S 3"], positions: Int[Array, " S"]
    ) -> Int[Array, " S"]:
        """One token a row for `positions`, keyed as the engine keys it."""
        run, serving = jax.random.key(self.serving.seed), self.serving
        group, member, salt = identities.T
        keys = jax.vmap(sampling.token_key, (None, 0, 0, 0, 0))(run, group, member, salt, positions)
        every = lambda value, dtype: jnp.full(len(positions), value, dtype)  # noqa: E731
        temperature, top_p = every(serving.temperature, jnp.float32), every(serving.top_p, jnp.float32)
        return sampling.sample(logits, keys, temperature, every(serving.top_k, jnp.int32), top_p)[0]
