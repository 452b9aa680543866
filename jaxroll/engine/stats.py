"""What an engine has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxroll.records import Version


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made, and its present state.

    A slot-step is one slot during one decode step; it is busy if the slot sampled a token that is kept. The
    `_while_waiting` counters cover only dispatches during which requests were waiting for a slot.
    """

    tokens_decoded: int = 0  # sampled tokens, the first ones (drawn by prefill) included
    decode_steps: int = 0
    dispatches: int = 0  # decode dispatches, of up to decode_chunk steps
    slot_steps_busy: int = 0
    slot_steps_total: int = 0
    slot_steps_busy_while_waiting: int = 0
    slot_steps_total_while_waiting: int = 0
    prefills: int = 0  # runs of a prefill program
    prefill_rows: int = 0  # distinct prompts computed
    prefill_rows_total: int = 0  # rows computed, padding rows included
    started: int = 0
    finished: int = 0
    aborted: int = 0
    flips: int = 0
    queue_depth: int = 0
    active: int = 0
    version: Version | None = None
    suspended: bool = False
    compiles: int = 0  # since warm-up; more than 0 is a defect

    @property
    def slot_occupancy(self) -> float | None:
        """Busy share of the slot-steps while work waited; None if it never did."""
        total = self.slot_steps_total_while_waiting
        return self.slot_steps_busy_while_waiting / total if total else None
