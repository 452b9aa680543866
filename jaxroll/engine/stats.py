"""Counters of an engine, and latencies of its requests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from jaxroll.records import Version

if TYPE_CHECKING:  # these load JAX; a simulation has counters without an engine
    from jaxroll.engine.ledger import Progress
    from jaxroll.engine.work import Filled


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was created, and its current state.

    A slot-step is one slot during one decode step; it is busy if the slot sampled tokens that are kept (several only
    with speculative decoding). The
    `_while_waiting` counters cover only dispatches during which requests were waiting for a slot.
    """

    tokens_decoded: int = 0  # sampled tokens, including first tokens (sampled by inserts)
    decode_steps: int = 0
    dispatches: int = 0  # decode dispatches, of up to decode_chunk steps
    slot_steps_busy: int = 0
    slot_steps_total: int = 0
    slot_steps_busy_while_waiting: int = 0
    slot_steps_total_while_waiting: int = 0
    prefills: int = 0  # runs of a prefill program
    prefill_rows: int = 0  # distinct prompts computed
    prefill_rows_total: int = 0  # rows computed, including padding rows
    started: int = 0
    finished: int = 0
    aborted: int = 0
    tokens_aborted: int = 0  # sampled by requests that were aborted before their end
    weight_swaps: int = 0
    queue_depth: int = 0
    active: int = 0
    version: Version | None = None
    suspended: bool = False
    compiles: int = 0  # since warm-up; more than 0 is a defect
    prefill_tokens: int = 0  # prompt tokens computed, including those of requests that restart or resume
    prefix_hits: int = 0  # requests whose prompt, or the beginning of it, was in the cache
    preemptions: int = 0  # requests that lost their pages to others
    tokens_discarded: int = 0  # sampled tokens that a weight swap discarded (`restart`)
    tokens_drafted: int = 0  # drafted tokens that a decode step verified
    tokens_accepted: int = 0  # decoded tokens beyond one per busy slot-step, which were drafted
    step_s: float = 0.0  # time in steps that decoded
    device_s: float = 0.0  # part of `step_s` spent waiting for the device

    @property
    def slot_occupancy(self) -> float | None:
        """The busy share of the slot-steps while requests waited; None if none ever waited."""
        total = self.slot_steps_total_while_waiting
        return self.slot_steps_busy_while_waiting / total if total else None

    def speculation(self) -> dict[str, float | None]:
        """The counters of drafted tokens, and `tokens_per_pass`: the mean number of tokens of a busy slot-step.

        `tokens_per_pass` is 1 without speculative decoding, and None before the first step.
        """
        busy, accepted = self.slot_steps_busy, self.tokens_accepted
        per_pass = (busy + accepted) / busy if busy else None
        return {"tokens_drafted": self.tokens_drafted, "tokens_accepted": accepted, "tokens_per_pass": per_pass}

    @property
    def host_share(self) -> float | None:
        """The share of `step_s` in which the host did not wait for the device; None before the first step."""
        return 1 - self.device_s / self.step_s if self.step_s else None

    def after_dispatch(
        self,
        steps: int,
        slots: int,
        progressed: Progress,
        filled: Filled,
        preempted: int,
        *,
        waits: bool,
        prefill_rows: int,
        prefix_hits: int,
        step_s: float,
        device_s: float,
    ) -> EngineStats:
        """These counters after one more dispatch of `steps` decode steps."""
        busy, total = progressed.decoded - progressed.extra, steps * slots
        return replace(
            self,
            tokens_decoded=self.tokens_decoded + progressed.decoded + progressed.firsts,
            tokens_drafted=self.tokens_drafted + progressed.drafted,
            tokens_accepted=self.tokens_accepted + progressed.extra,
            decode_steps=self.decode_steps + steps,
            dispatches=self.dispatches + 1,
            finished=self.finished + len(progressed.ended),
            slot_steps_busy=self.slot_steps_busy + busy,
            slot_steps_total=self.slot_steps_total + total,
            slot_steps_busy_while_waiting=self.slot_steps_busy_while_waiting + busy * waits,
            slot_steps_total_while_waiting=self.slot_steps_total_while_waiting + total * waits,
            prefills=self.prefills + filled.prefills,
            prefill_rows=self.prefill_rows + filled.rows,
            prefill_rows_total=self.prefill_rows_total + filled.prefills * prefill_rows,
            prefill_tokens=self.prefill_tokens + filled.tokens,
            started=self.started + filled.started,
            preemptions=self.preemptions + preempted,
            prefix_hits=prefix_hits,
            step_s=self.step_s + step_s,
            device_s=self.device_s + device_s,
        )


# --- latencies: time to the first token, and between tokens

_KEPT = 2048


class Latencies:
    """Latencies of the last `_KEPT` requests and dispatches. Written by the stepping thread, read by any thread."""

    def __init__(self) -> None:
        self._firsts: deque[float] = deque(maxlen=_KEPT)
        self._gaps: deque[float] = deque(maxlen=_KEPT)
        self._last_s: float | None = None

    def first(self, waited_s: float) -> None:
        """Record that a request got its first token `waited_s` seconds after it was added."""
        self._firsts.append(waited_s)

    def dispatch(self, done_s: float, tokens: float, others: bool) -> None:
        """Record the end of a dispatch of `tokens` per slot; `others`: requests already ran in the previous one."""
        if others and tokens and self._last_s is not None:
            self._gaps.append((done_s - self._last_s) / tokens)
        self._last_s = done_s

    def idle(self) -> None:
        """Note that no request waits for a token now."""
        self._last_s = None

    def percentiles(self) -> dict[str, float | None]:
        """`ttft_p50_s`, `ttft_p99_s` (from `add` to the first token on the host), `itl_p50_s`, `itl_p99_s`.

        The inter-token latency is the mean time per token of a dispatch, including the time since the previous dispatch
        (prefills of other requests, a weight swap). None before the first value.
        """
        found: dict[str, float | None] = {}
        for name, values in (("ttft", tuple(self._firsts)), ("itl", tuple(self._gaps))):
            for percent in (50, 99):
                found[f"{name}_p{percent}_s"] = float(np.percentile(values, percent)) if values else None
        return found
