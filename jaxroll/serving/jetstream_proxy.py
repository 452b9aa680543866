"""JetStream without google-jetstream: an engine with its verbs as an `LLMProxy`, and the programs of JaxRoll's model.

The proxy is for held-out evaluation, and for training where that is safe. Only the interface is used, so
google-jetstream itself is not imported here. Its ResultTokens carry no log-probs: those of the completions are
placeholder zeros, so `check_training` refuses algorithms that need log-probs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxroll.algorithms import sampling
from jaxroll.config import Config
from jaxroll.errors import ConfigError, DataError, InfraError
from jaxroll.models import cache as kv
from jaxroll.models import transformer
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import Params
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRun
from jaxroll.sharding import Layout, replicated


class Sampling(NamedTuple):
    """Sampling parameters of an engine; the default is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = Sampling()


def check_training(config: Config) -> None:
    """Raise ConfigError if training by `config` needs log-probs, which a JetStream engine does not return."""
    if config.schedule.alpha > 0:
        raise ConfigError(
            "schedule.alpha",
            config.schedule.alpha,
            "a JetStream engine gives no log-probs, and without them samples of older weights cannot be corrected",
            "Set schedule.alpha to 0 and learner.correction to 'none', or sample with JaxRoll's own engine.",
        )
    if config.learner.correction != "none":
        raise ConfigError(
            "learner.correction",
            config.learner.correction,
            "it weighs tokens by the log-probs of their sampler, and a JetStream engine gives none",
            "Set it to 'none': the learner then recomputes the log-probs of what it trains on.",
        )


@dataclass(eq=False)
class _Call:
    prompt: np.ndarray
    params: SamplingParams
    answer: asyncio.Future[tuple[list[int], str]]
    tokens: list[int] = field(default_factory=list)

    def take(self, token: int, valid: bool) -> None:
        """One more token; it may be the last."""
        if not valid:  # the engine has no room for more
            self.answer.set_result((self.tokens, "length"))
            return
        self.tokens.append(token)
        if token in self.params.stop_tokens:
            self.answer.set_result((self.tokens, "stop"))
        elif len(self.tokens) >= self.params.max_tokens:
            self.answer.set_result((self.tokens, "length"))


class JetStreamProxy:
    """Completions of `engine` with `params`, which are `version`, as many at a time as it has slots.

    `trained_by` is the config of the run that trains on the completions, None without one; ConfigError if it needs
    log-probs. `draws` are the sampling parameters that the engine was built with, which its interface does not reveal:
    other requests are refused. The engine uses its own random keys. A single thread calls the engine while requests are
    under way; everything else runs on the event loop. If the engine raises, requests under way fail with InfraError.
    """

    def __init__(
        self, engine: Any, params: Any, version: Version, *, trained_by: Config | None, draws: Sampling = GREEDY
    ) -> None:
        if trained_by is not None:
            check_training(trained_by)
        if engine.samples_per_slot != 1:
            raise ConfigError("samples_per_slot", engine.samples_per_slot, "a request has one completion", "Use 1.")
        self._engine, self._params, self._version, self._draws = engine, params, version, draws
        self._state: Any = None
        self._waiting: deque[_Call] = deque()
        self._active: dict[int, _Call] = {}
        self._work: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jetstream")

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        """The completion of `prompt` (int32 [P]), the stop token included; cancelling the call frees its slot.

        JetStream's engines have no prefix cache: the next turn is computed again in spite of `keep`.
        """
        self._check(prompt, params)
        call = _Call(np.asarray(prompt, np.int32), params, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._run())
        tokens, finish = await call.answer
        runs = (VersionRun(self._version, len(tokens)),) if tokens else ()
        return Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), runs, finish)

    def close(self) -> None:
        """End the thread after its current step."""
        self._thread.shutdown()

    def _check(self, prompt: np.ndarray, params: SamplingParams) -> None:
        longest = self._engine.max_prefill_length
        if not 0 < len(prompt) <= longest:
            raise DataError(f"a prompt of {len(prompt)} tokens: this JetStream engine takes 1 to {longest}")
        wanted = Sampling(params.temperature, params.top_k, params.top_p)
        if wanted != self._draws:
            raise DataError(f"this JetStream engine samples with {self._draws}, the request asks for {wanted}")

    async def _run(self) -> None:
        """Step until no request waits."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                arrivals = self._arrivals()
                if not self._active:
                    return
                self._deliver(await loop.run_in_executor(self._thread, self._stepped, arrivals))
        except Exception as error:  # noqa: BLE001 - after any error of the engine its requests must not wait forever
            self._fail(f"the JetStream engine failed: {type(error).__name__}: {error}")

    def _arrivals(self) -> list[tuple[int, np.ndarray]]:
        """Fill free slots with the prompts that waited longest; answered and cancelled ones are dropped first."""
        self._active = {slot: call for slot, call in self._active.items() if not call.answer.done()}
        waiting = deque(call for call in self._waiting if not call.answer.done())
        free = [slot for slot in range(self._engine.max_concurrent_decodes) if slot not in self._active]
        arrived = [(slot, waiting.popleft()) for slot in free[: len(waiting)]]
        self._waiting = waiting
        self._active.update(arrived)
        return [(slot, call.prompt) for slot, call in arrived]

    def _stepped(self, arrivals: list[tuple[int, np.ndarray]]) -> Any:
        """ResultTokens, on the host, of one step after `arrivals` were inserted. Runs on the thread."""
        state = self._engine.init_decode_state() if self._state is None else self._state
        for slot, prompt in arrivals:
            padded = jnp.asarray(np.pad(prompt, (0, self._bucket(len(prompt)) - len(prompt))))
            prefix = self._engine.prefill(params=self._params, padded_tokens=padded, true_length=len(prompt))
            state = self._engine.insert(prefix, state, slot=slot)
        self._state, result = self._engine.generate(self._params, state)
        return result.convert_to_numpy()

    def _bucket(self, length: int) -> int:
        longest = self._engine.max_prefill_length
        return min((bucket for bucket in PROMPT_BUCKETS if length <= bucket < longest), default=longest)

    def _deliver(self, result: Any) -> None:
        for slot, call in self._active.items():
            data = result.get_result_at_slot(slot)
            for token, valid in zip(data.tokens[0].tolist(), data.valid[0].tolist(), strict=True):
                if not call.answer.done():
                    call.take(token, bool(valid))

    def _fail(self, why: str) -> None:
        """Fail all requests; the next one begins with a fresh state, because the old one may be half used."""
        for call in (*self._active.values(), *self._waiting):
            if not call.answer.done():
                call.answer.set_exception(InfraError(why))
        self._state, self._active, self._waiting = None, {}, deque()


# --- The programs of the JetStream engine: compute the prefix of a prompt, insert it into a slot, decode one step
#
# Pure functions over a decode state that is simpler than that of JaxRoll's engine: each slot has fixed, consecutive
# pages, and JetStream assigns slots. `jaxroll.serving.jetstream` gives them JetStream's interface.

PROMPT_BUCKETS = tuple(2**power for power in range(4, 16))  # the lengths to which JetStream pads prompts
NO_BOS = -1  # placeholder for the first token that JetStream puts before every prompt
_IDLE = -1


@dataclass(frozen=True)
class EngineSizes:
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
    serving: EngineSizes
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
        pages = jnp.broadcast_to(jnp.arange(self.serving.table), (*own.shape, self.serving.table))
        return own[..., None] * self.serving.table + pages

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
