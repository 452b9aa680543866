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
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jetstream.core import orchestrator  # pyright: ignore[reportMissingImports]
from jetstream.engine import (  # pyright: ignore[reportMissingImports]
    engine_api,
    token_utils,
    tokenizer_api,
    tokenizer_pb2,
)

from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import Params
from jaxroll.protocols import GenerationKey, Tokenizer
from jaxroll.serving.jetstream_proxy import NO_BOS, DecodeState, EngineSizes, Prefix, SlotPrograms
from jaxroll.sharding import Layout, Rules, replicated


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
        serving: EngineSizes,
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
