"""Any engine with JetStream's verbs as an `LLMProxy`: for held-out evaluation, and for training where that is safe.

Only the interface is used, so google-jetstream itself is not imported here. Its ResultTokens carry no log-probs: those
of the completions are placeholder zeros, so `check_training` refuses algorithms that need log-probs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxroll.config import Config
from jaxroll.engine.jetstream_programs import PROMPT_BUCKETS
from jaxroll.errors import ConfigError, DataError, InfraError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRun


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
