"""The engine's scheduler: assigns slots and pages to sequences and selects prompts to compute. A pure state machine.

Requests are served in order of arrival, regardless of their size. A sequence takes a slot and pages. Its prompt is a
prefix whose pages it shares with all sequences that start with it; only the last, partly filled page is copied for each
sequence, which continues to write in it. Prefixes are computed in chunks that depend only on the prompt, so the
programs that compute a request's tokens do not depend on other requests.

With `reserve` a sequence takes at once all the pages it can need. Otherwise it takes them as it grows; when no page is
free, the last sequence to arrive is preempted, and waits before all others until it can continue.

Nothing here depends on arrays, devices or time. Every method handles one event and returns the work for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jaxroll.engine.sequence import (
    TOKEN_BYTES,
    BlockAllocator,
    Limits,
    Preempted,
    PrefillChunk,
    PrefillSpan,
    Prefix,
    PrefixCache,
    Sequence,
    Start,
    bucket_of,
    end_of,
)


class Scheduler:
    """The scheduler of S slots in D shards of `pages` pages and `rings` rings each. Only one thread may use it."""

    def __init__(self, slots: int, shards: int, pages: int, logit_rows: int, limits: Limits, rings: int = 0) -> None:
        self.limits, self.shards = limits, shards
        self.pages = tuple(BlockAllocator(pages) for _ in range(shards))
        self.rings = tuple(BlockAllocator(rings) for _ in range(shards))
        self._ring = 1 if rings else 0  # of a sequence or prefix
        self.sequences: list[Sequence | None] = [None] * slots
        self.prefixes = PrefixCache(list(range(logit_rows - 1, -1, -1)))
        self.waiting: deque[Sequence] = deque()
        self.held = False
        self.prefix_hits = 0
        self.changes = 0  # number of changes of the tables of running sequences
        self._filling: deque[Prefix | Sequence] = deque()
        self._orders = 0

    # ------------------------------------------------------------------------------------------------ questions

    @property
    def active(self) -> int:
        """The number of slots in use."""
        return len(self.sequences) - self.sequences.count(None)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that decode."""
        return [sequence for sequence in self.sequences if sequence is not None and sequence.running]

    def shard_of(self, slot: int) -> int:
        """The shard of a slot."""
        return slot // (len(self.sequences) // self.shards)

    def refill_at(self) -> int | None:
        """The number of free slots at which requests are admitted; None if none may start.

        It is `refill`, or the number of waiting requests if that is smaller, because a prefill that is not full costs
        as much as a full one.
        """
        if not self.waiting or (self.held and not self.waiting[0].sampled):
            return None
        return min(self.limits.refill, len(self.waiting), len(self.sequences))

    def until_idle(self) -> int | None:
        """The number of idle slots at which a dispatch stops early; None if it does not.

        It stops when enough requests have ended to admit others; slots that are idle already do not count.
        """
        wanted = self.refill_at()
        if wanted is None:
            return None
        idle = len(self.sequences) - len(self.running)
        return min(idle + max(1, wanted - self.sequences.count(None)), len(self.sequences))

    # --------------------------------------------------------------------------------------------------- events

    def add(self, sequence: Sequence) -> None:
        """Add `sequence` at the end of the queue."""
        self._orders += 1
        sequence.arrival = self._orders
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Assign free slots and pages to waiting sequences in order; return those with saved pages to load."""
        wanted, free = self.refill_at(), self.sequences.count(None)
        if wanted is None or free < wanted:
            return []
        back: list[Sequence] = []
        while self.waiting and not (self.held and not self.waiting[0].sampled):
            sequence = self.waiting[0]
            if not any(self._place(sequence, slot) for slot in self._slots_for(sequence)):
                break
            self.waiting.popleft()
            if sequence.swapped:
                back.append(sequence)
        return back

    def prefill_chunks(self, *, busy: bool) -> list[PrefillChunk]:
        """The chunks to compute now, oldest first: `limits.budget` tokens, or until a sequence can start."""
        chunks: list[PrefillChunk] = []
        spent = 0
        while self._filling:
            chunk = self._next_chunk()
            if chunk is None:
                break
            chunks.append(chunk)
            spent += self.limits.rows * chunk.bucket
            if spent + self.limits.rows * chunk.bucket > self.limits.budget and (busy or self._is_any_ready()):
                break
        return chunks

    def start_rows(self) -> list[Start]:
        """Start the sequences whose tokens are all in the cache."""
        ready = [
            sequence
            for sequence in self.sequences
            if sequence is not None and not sequence.running and self._is_ready(sequence)
        ]
        started = []
        for sequence in ready:
            row = None
            if sequence.prefix is not None:
                row, sequence.prefix.waiting = sequence.prefix.row, sequence.prefix.waiting - 1
            started.append(Start(sequence, row, sequence.copies, sequence.ring_copies))
            sequence.running, sequence.swapped, sequence.prefix = True, False, None
            sequence.copies = sequence.ring_copies = ()
        self.changes += bool(ready)
        return started

    def grow(self, steps: int) -> list[Preempted]:
        """Allocate pages for `steps` more tokens of every running sequence; return the sequences preempted for it."""
        victims: list[Preempted] = []
        if self.limits.reserve:
            return victims
        for sequence in sorted(self.running, key=lambda sequence: sequence.arrival):
            if sequence.running:
                victims += self._grow_one(sequence, steps)
        return victims

    def has_room(self, steps: int) -> bool:
        """True if `grow(steps)` neither preempts a sequence nor evicts a prefix."""
        need = [0] * self.shards
        for sequence in () if self.limits.reserve else self.running:
            assert sequence.slot is not None
            need[self.shard_of(sequence.slot)] += max(self._pages_to_grow(sequence, steps), 0)
        return all(count <= pages.free for count, pages in zip(need, self.pages, strict=True))

    def note_sampled(self, slot: int, sampled: int) -> None:
        """Record that the request in `slot` has sampled `sampled` tokens so far."""
        sequence = self._sequence_at(slot)
        sequence.sampled, sequence.computed = sampled, sequence.prompt_tokens + sampled - 1

    def release(self, slot: int, kept: bytes | None = None) -> Sequence:
        """Remove the ended request from `slot`; keep the KV cache of the tokens `kept` for later requests."""
        sequence = self._sequence_at(slot)
        shard = self.shard_of(slot)
        if kept is not None and self._worth_keeping(kept):
            self._keep(shard, kept, sequence)
        else:
            self._free(shard, sequence)
        self._preempt(sequence)
        return sequence

    def abort(self, id: int) -> Sequence | None:
        """Remove request `id` from queue or slot; None for an unknown one."""
        for sequence in self.waiting:
            if sequence.id == id:
                self.waiting.remove(sequence)
                return sequence
        for sequence in self.sequences:
            if sequence is not None and sequence.id == id:
                self._free_slot(sequence)
                return sequence
        return None

    def swap_weights(self, *, running: bool, forget_tokens: bool) -> list[int]:
        """Drop all prefixes, and requeue sequences whose prompts are being computed, at the front in their old order.

        With `running`, running sequences are requeued too; they keep their sampled tokens unless `forget_tokens`.
        Returns the slots that running sequences left.
        """
        left = [sequence for sequence in self.sequences if sequence is not None and (running or not sequence.running)]
        slots = [sequence.slot for sequence in left if sequence.running and sequence.slot is not None]
        for sequence in left:
            self._free_slot(sequence)
        self._requeue(left)
        for sequence in self.waiting if running else ():
            sequence.swapped = False
            sequence.sampled = 0 if forget_tokens else sequence.sampled
        for prefix in self.prefixes.all():
            self._forget(prefix)
        self._filling.clear()
        return slots

    # ---------------------------------------------------------------------------------------------- placing a sequence

    def _slots_for(self, sequence: Sequence) -> list[int]:
        """One free slot of each shard, ordered by the cached tokens of the prompt, then by the number of free pages."""
        found: dict[int, int] = {}
        for shard in range(self.shards):
            sequences = self._sequences_of(shard)
            if None in sequences:
                found[shard] = shard * len(sequences) + sequences.index(None)
        worth = lambda shard: (self._cached_tokens(shard, sequence.prompt), self.pages[shard].free)  # noqa: E731
        return [found[shard] for shard in sorted(found, key=worth, reverse=True)]

    def _sequences_of(self, shard: int) -> list[Sequence | None]:
        size = len(self.sequences) // self.shards
        return self.sequences[shard * size : (shard + 1) * size]

    def _cached_tokens(self, shard: int, prompt: bytes) -> int:
        if self.prefixes.find(shard, prompt) is not None:
            return len(prompt)
        base = self.prefixes.longest(shard, prompt, self._may_be_base) if self.shards > 1 else None
        return base.length if base is not None else 0

    def _place(self, sequence: Sequence, slot: int) -> bool:
        """Give `sequence` the slot and pages; return False if there are not enough pages."""
        shard = self.shard_of(slot)
        if sequence.swapped:
            need = self._pages_of(sequence.max_positions if self.limits.reserve else sequence.positions_wanted + 1)
            if not self._has_room(shard, need, 1, None):
                return False
            sequence.table, sequence.computed = self.pages[shard].allocate(need), sequence.positions_wanted
            sequence.ring = self.rings[shard].allocate(self._ring)
        elif not self._place_on_prefix(sequence, shard):
            return False
        sequence.slot, self.sequences[slot] = slot, sequence
        return True

    def _place_on_prefix(self, sequence: Sequence, shard: int) -> bool:
        """Give `sequence` pages and a cached, extended or new prefix for its prompt; return False without room."""
        prefix = self.prefixes.find(shard, sequence.prompt)
        if prefix is not None:
            self.prefix_hits += 1
            return self._allocate(sequence, shard, prefix, 0)
        base = self.prefixes.longest(shard, sequence.prompt, self._may_be_base)
        return (base is not None and self._allocate(sequence, shard, base, 1)) or self._allocate(
            sequence, shard, None, 1
        )

    def _allocate(self, sequence: Sequence, shard: int, known: Prefix | None, new: int) -> bool:
        """`_place_on_prefix` with the cached prefix `known`; `new` is 1 if another prefix must be computed after it."""
        U, whole = self.limits.page_tokens, sequence.prompt_tokens // self.limits.page_tokens
        own = self._pages_of(sequence.max_positions if self.limits.reserve else sequence.positions_wanted + 1) - whole
        shared = known.length // U if known is not None else 0
        pages = own + new * (self._pages_of(sequence.prompt_tokens) - shared)
        if not self._has_room(shard, pages, 1 + new, known):
            return False
        if new and not self.prefixes.rows and not self._free_a_row(known):
            return False
        prefix = self._begin_prefix(sequence.prompt, shard, known) if new or known is None else known
        self.prefixes.touch(prefix)
        sequence.table = self.pages[shard].share(prefix.table[:whole]) + self.pages[shard].allocate(own)
        # If the prompt ends within a page, each sequence continues in its own copy of that page.
        sequence.copies = ((prefix.table[whole], sequence.table[whole]),) if sequence.prompt_tokens % U else ()
        sequence.ring = self.rings[shard].allocate(self._ring)
        sequence.ring_copies = tuple(zip(prefix.ring, sequence.ring, strict=True))
        sequence.prefix, sequence.computed = prefix, sequence.prompt_tokens
        prefix.waiting += 1
        if sequence.positions_wanted > sequence.computed:
            self._filling.append(sequence)
        return True

    def _begin_prefix(self, prompt: bytes, shard: int, base: Prefix | None) -> Prefix:
        """A new prefix, to be computed from the end of `base` on."""
        pages, U = self.pages[shard], self.limits.page_tokens
        shared = pages.share(base.table[: base.length // U]) if base else []
        table = shared + pages.allocate(self._pages_of(len(prompt) // TOKEN_BYTES) - len(shared))
        prefix = Prefix(prompt, shard, table, self.prefixes.rows.pop(), ring=self.rings[shard].allocate(self._ring))
        if base is not None:
            prefix.computed = base.length
            prefix.ring_copies = tuple(zip(base.ring, prefix.ring, strict=True))
            prefix.copies = ((base.table[len(shared)], table[len(shared)]),) if base.length % U else ()
            prefix.base, base.waiting = base, base.waiting + 1  # it may not be evicted before the copy
            self.prefixes.touch(base)
            self.prefix_hits += 1
        former = self.prefixes.add(prefix)
        if former is not None:
            self._free(shard, former)
        self._filling.append(prefix)
        return prefix

    def _may_be_base(self, prefix: Prefix) -> bool:
        """True if another prefix may continue `prefix`: a conversation's end, or a prompt that ends with a chunk."""
        # Only at the end of a chunk, so that the chunks of a prompt do not depend on what is cached.
        return prefix.row is None or prefix.length % self.limits.chunk == 0

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_tokens)

    def _has_room(self, shard: int, need: int, rings: int, keep: Prefix | None) -> bool:
        """Evict idle prefixes until `need` pages, plus one per other sequence, and `rings` rings are free.

        Returns False if there are fewer.
        """
        sequences = self._sequences_of(shard)
        others = 0 if self.limits.reserve else len(sequences) - sequences.count(None)
        return self._make_free(shard, need + others, rings * self._ring, keep)

    def _make_free(self, shard: int, pages: int, rings: int = 0, keep: Prefix | None = None) -> bool:
        """Evict idle prefixes (except `keep`) until so many are free; return False if there are fewer."""
        enough = lambda: self.pages[shard].free >= pages and self.rings[shard].free >= rings  # noqa: E731
        for prefix in () if enough() else self.prefixes.idle(shard):
            if prefix is not keep:
                self._forget(prefix)
            if enough():
                break
        return enough()

    def _running_in(self, shard: int) -> list[Sequence]:
        return [
            sequence for sequence in self.running if sequence.slot is not None and self.shard_of(sequence.slot) == shard
        ]

    def _free_a_row(self, keep: Prefix | None) -> bool:
        for prefix in self.prefixes.idle():
            if prefix.row is not None and prefix is not keep:
                self._forget(prefix)
                return True
        return False

    # ------------------------------------------------------------------------------------------------- computing

    def _next_chunk(self) -> PrefillChunk | None:
        """Up to `rows` rows for one program, from the oldest sequence or prefix that can be computed."""
        chosen: tuple[bool, int] | None = None
        rows: list[PrefillSpan] = []
        for owner in list(self._filling):
            row = self._next_row(owner)
            # Pages and rings are copied before the chunk is computed, so not together with the end of its prefix.
            if row is None or (isinstance(owner, Sequence) and any(one.owner is owner.prefix for one in rows)):
                continue
            program = isinstance(owner, Prefix) and row.start == 0, bucket_of(row.count, self.limits.buckets)
            chosen = chosen or program
            if program == chosen:
                rows.append(row)
                owner.computed += row.count
                self._unpin(owner)
            if len(rows) == self.limits.rows:
                break
        self._filling = deque(owner for owner in self._filling if owner.computed < end_of(owner))
        return PrefillChunk(*chosen, tuple(rows)) if chosen else None

    def _unpin(self, owner: Prefix | Sequence) -> None:
        """Let the prefix that `owner` continues be evicted."""
        if isinstance(owner, Prefix) and owner.base is not None:
            owner.base.waiting -= 1
            owner.base = None

    def _next_row(self, owner: Prefix | Sequence) -> PrefillSpan | None:
        """The next row of `owner`; None while a sequence waits for its prefix, or if nothing is left."""
        if isinstance(owner, Sequence) and (owner.prefix is None or not owner.prefix.ready):
            return None
        count = min(end_of(owner) - owner.computed, self.limits.chunk)
        return PrefillSpan(owner, owner.computed, count) if count else None

    def _is_ready(self, sequence: Sequence) -> bool:
        return sequence.swapped or (
            sequence.prefix is not None and sequence.prefix.ready and sequence.computed >= sequence.positions_wanted
        )

    def _is_any_ready(self) -> bool:
        return any(
            sequence is not None and not sequence.running and self._is_ready(sequence) for sequence in self.sequences
        )

    # -------------------------------------------------------------------------------------------------- growing

    def _pages_to_grow(self, sequence: Sequence, steps: int) -> int:
        return self._pages_of(min(sequence.positions_wanted + steps, sequence.max_positions)) - len(sequence.table)

    def _grow_one(self, sequence: Sequence, steps: int) -> list[Preempted]:
        """Allocate pages for `sequence`, evicting idle prefixes, then preempting the sequences that arrived last."""
        victims: list[Preempted] = []
        assert sequence.slot is not None
        shard = self.shard_of(sequence.slot)
        need = self._pages_to_grow(sequence, steps)
        while need > 0 and not self._make_free(shard, need):
            last = max(self._running_in(shard), key=_order)
            assert last.slot is not None
            victims.append(Preempted(last, last.slot, shard, tuple(last.table), tuple(last.ring)))
            self._free_slot(last)
            last.swapped = last.sampled > 0  # otherwise it has just started, and starts again without loss
            self._requeue([last])
            if last is sequence:
                return victims
        if need > 0:
            sequence.table += self.pages[shard].allocate(need)
            self.changes += 1
        return victims

    # --------------------------------------------------------------------------------------------------- leaving

    def _free_slot(self, sequence: Sequence) -> None:
        """Free the slot and the pages of `sequence`."""
        assert sequence.slot is not None
        self._free(self.shard_of(sequence.slot), sequence)
        self._preempt(sequence)

    def _free(self, shard: int, owner: Sequence | Prefix) -> None:
        """Free the pages and the ring of `owner`."""
        self.pages[shard].free_pages(owner.table)
        self.rings[shard].free_pages(owner.ring)

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.sequences[sequence.slot] = None
        if sequence in self._filling:
            self._filling.remove(sequence)
        if sequence.prefix is not None:
            sequence.prefix.waiting -= 1
            if not sequence.prefix.waiting and not sequence.prefix.ready:
                self._forget(sequence.prefix)
        sequence.slot, sequence.table, sequence.ring, sequence.prefix = None, [], [], None
        sequence.copies, sequence.ring_copies, sequence.computed, sequence.running = (), (), 0, False

    def _requeue(self, sequences: Iterable[Sequence]) -> None:
        """Put `sequences` back into the queue, which is ordered by arrival."""
        back = sorted([*sequences, *self.waiting], key=_order)
        self.waiting = deque(back)

    def _forget(self, prefix: Prefix) -> None:
        self.prefixes.forget(prefix)
        self._unpin(prefix)
        self._free(prefix.shard, prefix)
        prefix.table, prefix.ring = [], []
        if prefix in self._filling:
            self._filling.remove(prefix)

    def _worth_keeping(self, tokens: bytes) -> bool:
        return len(tokens) // TOKEN_BYTES >= self.limits.page_tokens

    def _keep(self, shard: int, tokens: bytes, sequence: Sequence) -> None:
        """Keep the end of a conversation as a prefix without logits; free the pages beyond its tokens."""
        if self.prefixes.find(shard, tokens):
            self._free(shard, sequence)
            return
        length, table = len(tokens) // TOKEN_BYTES, sequence.table
        held = self._pages_of(length)
        self.pages[shard].free_pages(table[held:])
        former = self.prefixes.add(Prefix(tokens, shard, table[:held], None, computed=length, ring=sequence.ring))
        if former is not None:
            self._free(shard, former)

    def _sequence_at(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        if sequence is None:
            raise LookupError(f"slot {slot} is empty")
        return sequence


def _order(sequence: Sequence) -> int:
    return sequence.arrival
