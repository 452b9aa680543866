"""Who sits in which slot, on which pages, and what must be computed for it: the engine's schedule, a state machine.

Requests wait first come, first served, and nobody is passed over for being large. A seat takes a slot and pages; its
prompt is a prefix that all who begin so share, page for page, except the last partial page, of which everyone has a
copy to go on writing in. Prefixes are computed in chunks whose cut depends on the prompt alone, so the programs that
compute a request's tokens do not depend on who else is there.

With `reserve` a seat takes at once all the pages it may ever need. Without, it takes them as it grows; when none is
left the seat that came last gives its own away and waits, in front of everyone else, until it can go on.

Nothing here knows about arrays, devices or time. Every method is one event; what follows for the device is returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from jaxroll.engine.block_allocator import Pages
from jaxroll.engine.prefix_cache import TOKEN_BYTES, Prefix, Prefixes
from jaxroll.engine.sequence import Chunk, Limits, Row, Seat, Start, Victim, bucket_of, end_of


class Seating:
    """S slots in D shards of `pages` pages each. One thread owns it."""

    def __init__(self, slots: int, shards: int, pages: int, logit_rows: int, limits: Limits) -> None:
        self.limits, self.shards = limits, shards
        self.pages = tuple(Pages(pages) for _ in range(shards))
        self.seats: list[Seat | None] = [None] * slots
        self.prefixes = Prefixes(list(range(logit_rows - 1, -1, -1)))
        self.waiting: deque[Seat] = deque()
        self.held = False
        self.prefix_hits = 0
        self.changes = 0  # how often the tables of running seats have changed
        self._filling: deque[Prefix | Seat] = deque()
        self._orders = 0

    # ------------------------------------------------------------------------------------------------ questions

    @property
    def active(self) -> int:
        """Slots that are taken."""
        return len(self.seats) - self.seats.count(None)

    @property
    def running(self) -> list[Seat]:
        """Seats that decode."""
        return [seat for seat in self.seats if seat is not None and seat.running]

    @property
    def filling(self) -> bool:
        """Whether something is left to compute before those in slots can run."""
        return bool(self._filling)

    def shard_of(self, slot: int) -> int:
        """The shard in which a slot stands."""
        return slot // (len(self.seats) // self.shards)

    def refill_at(self) -> int | None:
        """How many slots must be free for admission to be worth its cost; None if none may start.

        All that wait, or `refill`: a prefill costs the same however full it is.
        """
        if not self.waiting or (self.held and not self.waiting[0].sampled):
            return None
        return min(self.limits.refill, len(self.waiting), len(self.seats))

    def until_idle(self) -> int | None:
        """How many slots must stand idle for a dispatch to end early; None if it need not.

        It ends when so many have ended that admission is worth its cost, and not for slots that stand idle already.
        """
        wanted = self.refill_at()
        if wanted is None:
            return None
        idle = len(self.seats) - len(self.running)
        return min(idle + max(1, wanted - self.seats.count(None)), len(self.seats))

    # --------------------------------------------------------------------------------------------------- events

    def arrive(self, seat: Seat) -> None:
        """`seat` waits, behind all others."""
        self._orders += 1
        seat.order = self._orders
        self.waiting.append(seat)

    def admit(self) -> list[Seat]:
        """Give free slots and pages to those who wait, in order; returns those that come back with swapped pages."""
        wanted, free = self.refill_at(), self.seats.count(None)
        if wanted is None or free < wanted:
            return []
        back: list[Seat] = []
        while self.waiting and not (self.held and not self.waiting[0].sampled):
            seat = self.waiting[0]
            if not any(self._placed(seat, slot) for slot in self._slots_for(seat)):
                break
            self.waiting.popleft()
            if seat.swapped:
                back.append(seat)
        return back

    def prefills(self, *, busy: bool) -> list[Chunk]:
        """What to compute now, oldest first: `limits.budget` tokens, or while nothing runs until somebody can start."""
        chunks: list[Chunk] = []
        spent = 0
        while self._filling:
            chunk = self._next_chunk()
            if chunk is None:
                break
            chunks.append(chunk)
            spent += self.limits.rows * chunk.bucket
            if spent + self.limits.rows * chunk.bucket > self.limits.budget and (busy or self._anyone_ready()):
                break
        return chunks

    def starting(self) -> list[Start]:
        """Those whose tokens are all in the cache: they run from now on."""
        ready = [seat for seat in self.seats if seat is not None and not seat.running and self._is_ready(seat)]
        started = []
        for seat in ready:
            row = None
            if seat.prefix is not None:
                row, seat.prefix.waiting = seat.prefix.row, seat.prefix.waiting - 1
            started.append(Start(seat, row, seat.copies))
            seat.running, seat.swapped, seat.prefix, seat.copies = True, False, None, ()
        self.changes += bool(ready)
        return started

    def grow(self, steps: int) -> list[Victim]:
        """Pages for `steps` more tokens of everyone; those that had to give theirs away for it."""
        victims: list[Victim] = []
        if self.limits.reserve:
            return victims
        for seat in sorted(self.running, key=lambda seat: seat.order):
            if seat.running:
                victims += self._grown(seat, steps)
        return victims

    def progressed(self, slot: int, sampled: int) -> None:
        """The request in `slot` has drawn `sampled` tokens so far."""
        seat = self._at(slot)
        seat.sampled, seat.computed = sampled, seat.prompt_tokens + sampled - 1

    def release(self, slot: int, kept: bytes | None = None) -> Seat:
        """The request in `slot` ended. Others may go on from `kept`, the tokens whose keys it leaves behind."""
        seat = self._at(slot)
        shard = self.shard_of(slot)
        if kept is not None and self._worth_keeping(kept):
            self._keep(shard, kept, seat.table)
        else:
            self.pages[shard].drop(seat.table)
        self._unseat(seat)
        return seat

    def abort(self, id: int) -> Seat | None:
        """Request `id` is not wanted any more, wherever it is; None for a stranger."""
        for seat in self.waiting:
            if seat.id == id:
                self.waiting.remove(seat)
                return seat
        for seat in self.seats:
            if seat is not None and seat.id == id:
                self._leave(seat)
                return seat
        return None

    def flip(self, *, running: bool, forget_tokens: bool) -> list[int]:
        """New weights: every prefix is forgotten, and who was being filled waits again, in front, in the old order.

        With `running` those who run do too, keeping what they have drawn unless `forget_tokens`. Returns the slots
        that running requests left.
        """
        left = [seat for seat in self.seats if seat is not None and (running or not seat.running)]
        slots = [seat.slot for seat in left if seat.running and seat.slot is not None]
        for seat in left:
            self._leave(seat)
        self._requeue(left)
        for seat in self.waiting if running else ():
            seat.swapped = False
            seat.sampled = 0 if forget_tokens else seat.sampled
        for prefix in self.prefixes.all():
            self._forget(prefix)
        self._filling.clear()
        return slots

    # ---------------------------------------------------------------------------------------------- placing a seat

    def _slots_for(self, seat: Seat) -> list[int]:
        """One free slot of each shard: first where the prompt is known, then where most pages are free."""
        found: dict[int, int] = {}
        for shard in range(self.shards):
            seats = self._seats_of(shard)
            if None in seats:
                found[shard] = shard * len(seats) + seats.index(None)
        worth = lambda shard: (self._known(shard, seat.prompt), self.pages[shard].free)  # noqa: E731
        return [found[shard] for shard in sorted(found, key=worth, reverse=True)]

    def _seats_of(self, shard: int) -> list[Seat | None]:
        size = len(self.seats) // self.shards
        return self.seats[shard * size : (shard + 1) * size]

    def _known(self, shard: int, prompt: bytes) -> int:
        if self.prefixes.find(shard, prompt) is not None:
            return len(prompt)
        base = self.prefixes.longest(shard, prompt, self._may_be_base) if self.shards > 1 else None
        return base.length if base is not None else 0

    def _placed(self, seat: Seat, slot: int) -> bool:
        """Whether `seat` got `slot` and its pages."""
        shard = self.shard_of(slot)
        if seat.swapped:
            need = self._pages_of(seat.most if self.limits.reserve else seat.cached + 1)
            if not self._room(shard, need, None):
                return False
            seat.table, seat.computed = self.pages[shard].take(need), seat.cached
        elif not self._with_prefix(seat, shard):
            return False
        seat.slot, self.seats[slot] = slot, seat
        return True

    def _with_prefix(self, seat: Seat, shard: int) -> bool:
        """Whether `seat` got pages, and a prefix for its prompt: a known one, one built on another, or a new one."""
        prefix = self.prefixes.find(shard, seat.prompt)
        if prefix is not None:
            self.prefix_hits += 1
            return self._seated(seat, shard, prefix, 0)
        base = self.prefixes.longest(shard, seat.prompt, self._may_be_base)
        return (base is not None and self._seated(seat, shard, base, 1)) or self._seated(seat, shard, None, 1)

    def _seated(self, seat: Seat, shard: int, known: Prefix | None, new: int) -> bool:
        """`_with_prefix` given what is `known`; `new` is 1 when a prefix must be begun on top of that."""
        U, whole = self.limits.page_tokens, seat.prompt_tokens // self.limits.page_tokens
        own = self._pages_of(seat.most if self.limits.reserve else seat.cached + 1) - whole
        shared = known.length // U if known is not None else 0
        if not self._room(shard, own + new * (self._pages_of(seat.prompt_tokens) - shared), known):
            return False
        if new and not self.prefixes.rows and not self._free_a_row(known):
            return False
        prefix = self._begun(seat.prompt, shard, known) if new or known is None else known
        self.prefixes.touch(prefix)
        seat.table = self.pages[shard].share(prefix.table[:whole]) + self.pages[shard].take(own)
        # Where the prompt ends within a page, everyone goes on writing in a copy of that page.
        seat.copies = ((prefix.table[whole], seat.table[whole]),) if seat.prompt_tokens % U else ()
        seat.prefix, seat.computed = prefix, seat.prompt_tokens
        prefix.waiting += 1
        if seat.cached > seat.computed:
            self._filling.append(seat)
        return True

    def _begun(self, prompt: bytes, shard: int, base: Prefix | None) -> Prefix:
        """A new prefix, to be computed from where `base` ends."""
        pages, U = self.pages[shard], self.limits.page_tokens
        shared = pages.share(base.table[: base.length // U]) if base else []
        table = shared + pages.take(self._pages_of(len(prompt) // TOKEN_BYTES) - len(shared))
        prefix = Prefix(prompt, shard, table, self.prefixes.rows.pop())
        if base is not None:
            prefix.computed = base.length
            prefix.copies = ((base.table[len(shared)], table[len(shared)]),) if base.length % U else ()
            self.prefixes.touch(base)
            self.prefix_hits += 1
        former = self.prefixes.add(prefix)
        if former is not None:
            pages.drop(former.table)
        self._filling.append(prefix)
        return prefix

    def _may_be_base(self, prefix: Prefix) -> bool:
        """A conversation's end may; a prompt may where a chunk ends, so that who comes later is computed alike."""
        return prefix.row is None or prefix.length % self.limits.chunk == 0

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_tokens)

    def _room(self, shard: int, need: int, keep: Prefix | None) -> bool:
        """Whether `need` pages can be taken and one is left for each of the others to grow; idle prefixes go for it."""
        seats = self._seats_of(shard)
        others = 0 if self.limits.reserve else len(seats) - seats.count(None)
        return self._freed(shard, need + others, keep)

    def _freed(self, shard: int, need: int, keep: Prefix | None = None) -> bool:
        """Whether `need` pages are free, now that as many idle prefixes as that takes (not `keep`) are forgotten."""
        pages = self.pages[shard]
        for prefix in self.prefixes.idle(shard) if pages.free < need else ():
            if prefix is not keep:
                self._forget(prefix)
            if pages.free >= need:
                break
        return pages.free >= need

    def _running_in(self, shard: int) -> list[Seat]:
        return [seat for seat in self.running if seat.slot is not None and self.shard_of(seat.slot) == shard]

    def _free_a_row(self, keep: Prefix | None) -> bool:
        for prefix in self.prefixes.idle():
            if prefix.row is not None and prefix is not keep:
                self._forget(prefix)
                return True
        return False

    # ------------------------------------------------------------------------------------------------- computing

    def _next_chunk(self) -> Chunk | None:
        """Up to `rows` rows of one program, beginning with the oldest that can go on."""
        chosen: tuple[bool, int] | None = None
        rows: list[Row] = []
        for owner in list(self._filling):
            row = self._next_row(owner)
            if row is None:
                continue
            program = isinstance(owner, Prefix) and row.start == 0, bucket_of(row.count, self.limits.buckets)
            chosen = chosen or program
            if program == chosen:
                rows.append(row)
                owner.computed += row.count
            if len(rows) == self.limits.rows:
                break
        self._filling = deque(owner for owner in self._filling if owner.computed < end_of(owner))
        return Chunk(*chosen, tuple(rows)) if chosen else None

    def _next_row(self, owner: Prefix | Seat) -> Row | None:
        """What comes next of `owner`; a seat's own tokens wait for its prefix."""
        if isinstance(owner, Seat) and (owner.prefix is None or not owner.prefix.ready):
            return None
        count = min(end_of(owner) - owner.computed, self.limits.chunk)
        return Row(owner, owner.computed, count) if count else None

    def _is_ready(self, seat: Seat) -> bool:
        return seat.swapped or (seat.prefix is not None and seat.prefix.ready and seat.computed >= seat.cached)

    def _anyone_ready(self) -> bool:
        return any(seat is not None and not seat.running and self._is_ready(seat) for seat in self.seats)

    # -------------------------------------------------------------------------------------------------- growing

    def _grown(self, seat: Seat, steps: int) -> list[Victim]:
        """Pages for `seat`, taken from idle prefixes or from those that came last; it may turn out to be the last."""
        victims: list[Victim] = []
        assert seat.slot is not None
        shard = self.shard_of(seat.slot)
        need = self._pages_of(min(seat.cached + steps, seat.most)) - len(seat.table)
        while need > 0 and not self._freed(shard, need):
            last = max(self._running_in(shard), key=_order)
            assert last.slot is not None
            victims.append(Victim(last, last.slot, shard, tuple(last.table)))
            self._leave(last)
            last.swapped = last.sampled > 0  # else it has begun just now: nothing is lost when it begins again
            self._requeue([last])
            if last is seat:
                return victims
        if need > 0:
            seat.table += self.pages[shard].take(need)
            self.changes += 1
        return victims

    # --------------------------------------------------------------------------------------------------- leaving

    def _leave(self, seat: Seat) -> None:
        """`seat` gives up slot and pages, whatever it was doing."""
        assert seat.slot is not None
        self.pages[self.shard_of(seat.slot)].drop(seat.table)
        self._unseat(seat)

    def _unseat(self, seat: Seat) -> None:
        assert seat.slot is not None
        self.seats[seat.slot] = None
        if seat in self._filling:
            self._filling.remove(seat)
        if seat.prefix is not None:
            seat.prefix.waiting -= 1
            if not seat.prefix.waiting and not seat.prefix.ready:
                self._forget(seat.prefix)
        seat.slot, seat.table, seat.prefix, seat.copies, seat.computed, seat.running = None, [], None, (), 0, False

    def _requeue(self, seats: Iterable[Seat]) -> None:
        """In front of those that wait for the first time, in the order in which they came."""
        back = sorted([*seats, *self.waiting], key=_order)
        self.waiting = deque(back)

    def _forget(self, prefix: Prefix) -> None:
        self.prefixes.forget(prefix)
        self.pages[prefix.shard].drop(prefix.table)
        prefix.table = []
        if prefix in self._filling:
            self._filling.remove(prefix)

    def _worth_keeping(self, tokens: bytes) -> bool:
        return len(tokens) // TOKEN_BYTES >= self.limits.page_tokens

    def _keep(self, shard: int, tokens: bytes, table: list[int]) -> None:
        """A conversation's end as a prefix without logits; pages beyond its tokens are free."""
        pages, length = self.pages[shard], len(tokens) // TOKEN_BYTES
        held = 0 if self.prefixes.find(shard, tokens) else self._pages_of(length)
        pages.drop(table[held:])
        if not held:
            return
        former = self.prefixes.add(Prefix(tokens, shard, table[:held], None, computed=length))
        if former is not None:
            pages.drop(former.table)

    def _at(self, slot: int) -> Seat:
        seat = self.seats[slot]
        if seat is None:
            raise LookupError(f"slot {slot} is empty")
        return seat


def _order(seat: Seat) -> int:
    return seat.order
