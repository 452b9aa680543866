"""The engine's schedule over random histories, against a device whose memory is a list of tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jaxroll.engine.requests import Sizes
from jaxroll.engine.scheduler import Scheduler
from jaxroll.engine.sequence import BlockAllocator, Limits, PrefillChunk, PrefillSpan, Prefix, Sequence, bucket_of

U = 4  # tokens a page
LIMITS = {"rows": 2, "inserts": 4, "refill": 1, "buckets": (4, 8), "page_tokens": U, "budget": 16}


def text(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def words(tokens: bytes) -> list[int]:
    return [int.from_bytes(tokens[i : i + 4], "little") for i in range(0, len(tokens), 4)]


class Rings:
    """A model of the rings of one shard: tokens by ring and position, each in place of one that is R·U before it."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.cells = sizes, [[(-1, -1)] * (sizes.ring * U) for _ in range(sizes.rings)]

    def write(self, ring: list[int], position: int, token: int) -> None:
        for one in ring:
            self.cells[one][position % len(self.cells[one])] = position, token

    def begin(self, ring: list[int], tokens: list[int]) -> None:
        """As the program for fresh prompts: by whole pages, with anything behind the last token."""
        for position in range(-(-len(tokens) // U) * U):
            self.write(ring, position, tokens[position] if position < len(tokens) else -1)

    def check(self, ring: list[int], tokens: list[int]) -> None:
        """The next token sees its whole window before itself."""
        for one in ring:
            for position in range(max(len(tokens) - self.sizes.window + 1, 0), len(tokens)):
                assert self.cells[one][position % len(self.cells[one])] == (position, tokens[position])


class Memory:
    """A model of the device: cells hold (weights, token); a decode writes the last token and samples the next."""

    def __init__(self, scheduler: Scheduler, pages: int, rng: random.Random, sizes: Sizes | None = None) -> None:
        self.scheduler, self.rng, self.weights = scheduler, rng, 0
        self.sizes = sizes or Sizes(4, 28, 2, 4, (4, 8), 1, 0, U)
        self.rings = [Rings(self.sizes) for _ in range(scheduler.shards)]
        self.saved_rings: dict[int, list] = {}
        self.cells = [[[None] * U for _ in range(pages)] for _ in range(scheduler.shards)]
        self.drawn: dict[int, list[int]] = {}
        self.limits: dict[int, int] = {}
        self.saved: dict[int, list] = {}
        self.logits: dict[int, tuple[int, bytes]] = {}
        self.started: list[int] = []
        self.done: dict[int, list[int]] = {}

    def cell(self, shard: int, table, position: int):
        return self.cells[shard][table[position // U]], position % U

    def copy(self, shard: int, copies, ring_copies) -> None:
        for source, target in copies:
            self.cells[shard][target] = list(self.cells[shard][source])
        for source, target in ring_copies:
            self.rings[shard].cells[target] = list(self.rings[shard].cells[source])

    def copy_before(self, chunk: PrefillChunk) -> None:
        for owner in (row.owner for row in chunk.rows):
            shard = owner.shard if isinstance(owner, Prefix) else self.scheduler.shard_of(owner.slot)
            self.copy(shard, owner.copies, owner.ring_copies)
            owner.copies = owner.ring_copies = ()

    def compute(self, row: PrefillSpan, fresh: bool) -> None:
        owner = row.owner
        shard = owner.shard if isinstance(owner, Prefix) else self.scheduler.shard_of(owner.slot)
        tokens = words(owner.tokens) if isinstance(owner, Prefix) else words(owner.prompt) + self.drawn[owner.id]
        assert fresh == (isinstance(owner, Prefix) and row.start == 0)
        for position in range(row.start):
            page, at = self.cell(shard, owner.table, position)
            assert page[at] == (self.weights, tokens[position]), "a chunk reads what is not there"
        end = row.start + row.count
        self.rings[shard].check(owner.ring, tokens[: row.start])
        if fresh:
            self.rings[shard].begin(owner.ring, tokens[:end])
        for position in range(row.start, end):
            page, at = self.cell(shard, owner.table, position)
            page[at] = (self.weights, tokens[position])
            self.rings[shard].write(owner.ring, position, tokens[position])
        if isinstance(owner, Prefix):
            self.logits[owner.row] = (self.weights, owner.tokens[: 4 * (row.start + row.count)])

    def fill(self) -> None:
        scheduler = self.scheduler
        for sequence in scheduler.admit():
            shard = scheduler.shard_of(sequence.slot)
            for page, cells in zip(sequence.table, self.saved.pop(sequence.id), strict=False):
                self.cells[shard][page] = list(cells)
            for ring, cells in zip(sequence.ring, self.saved_rings.pop(sequence.id), strict=True):
                self.rings[shard].cells[ring] = cells
        for chunk in scheduler.prefill_chunks(busy=bool(scheduler.running)):
            assert 1 <= len(chunk.rows) <= LIMITS["rows"]
            self.copy_before(chunk)
            for row in chunk.rows:
                assert bucket_of(row.count, LIMITS["buckets"]) == chunk.bucket
                self.compute(row, chunk.fresh)
        for start in scheduler.start_rows():
            sequence = start.sequence
            self.copy(scheduler.shard_of(sequence.slot), start.copies, start.ring_copies)
            if not sequence.sampled:
                assert self.logits[start.logit_row] == (self.weights, sequence.prompt)
                self.started.append(sequence.id)
                self.drawn[sequence.id] = [self.rng.randrange(1000)]

    def decode(self, steps: int) -> None:
        scheduler = self.scheduler
        for victim in scheduler.grow(steps):
            held = -(-victim.sequence.positions_wanted // U)
            self.saved[victim.sequence.id] = [list(self.cells[victim.shard][page]) for page in victim.table[:held]]
            rings = self.rings[victim.shard].cells
            self.saved_rings[victim.sequence.id] = [list(rings[ring]) for ring in victim.ring]
        written = []
        for sequence in scheduler.running:
            drawn, shard = self.drawn[sequence.id], scheduler.shard_of(sequence.slot)
            for _ in range(steps):
                if len(drawn) >= self.limits[sequence.id]:
                    break
                position = sequence.prompt_tokens + len(drawn) - 1
                page, at = self.cell(shard, sequence.table, position)
                page[at] = (self.weights, drawn[-1])
                self.rings[shard].write(sequence.ring, position, drawn[-1])
                for ahead in range(self.rng.randrange(self.sizes.draft + 1)):  # drafted tokens that are rejected
                    self.rings[shard].write(sequence.ring, position + 1 + ahead, -1)
                written.append((shard, sequence.table[position // U], at, sequence.id))
                drawn.append(self.rng.randrange(1000))
            self.whole(sequence, shard)
            scheduler.note_sampled(sequence.slot, len(drawn))
        owners: dict[tuple, int] = {}
        for shard, page, at, id in written:
            assert owners.setdefault((shard, page, at), id) == id, "two requests write in one place"

    def whole(self, sequence: Sequence, shard: int) -> None:
        """Every token that a sequence has computed is at the position given by its table."""
        tokens = words(sequence.prompt) + self.drawn[sequence.id]
        for position in range(len(tokens) - 1):
            page, at = self.cell(shard, sequence.table, position)
            assert page[at] is not None and page[at][1] == tokens[position]
        self.rings[shard].check(sequence.ring, tokens[:-1])

    def release(self, keep: bool) -> None:
        for sequence in self.scheduler.running:
            if len(self.drawn[sequence.id]) >= self.limits[sequence.id]:
                drawn = self.drawn.pop(sequence.id)
                self.done[sequence.id] = drawn
                later = self.rng.randrange(len(drawn))  # tokens behind the end of a stop string
                whole = self.sizes.keeps_window(later)
                kept = sequence.prompt + text(*drawn[: len(drawn) - later - 1])
                # Only tokens under one version may be kept; here all of a page's cells tell.
                cells = [
                    self.cell(self.scheduler.shard_of(sequence.slot), sequence.table, p)
                    for p in range(sequence.positions_wanted)
                ]
                pure = all(page[at][0] == self.weights for page, at in cells)
                self.scheduler.release(sequence.slot, kept if keep and pure and whole else None)


def check_pages(scheduler: Scheduler) -> None:
    """Every page has exactly the references that tables make, and no two sequences write to one page."""
    for shard, pages in enumerate(scheduler.pages):
        holders = [0] * pages.count
        for sequence in scheduler.sequences:
            if sequence is not None and scheduler.shard_of(sequence.slot) == shard:
                for page in sequence.table:
                    holders[page] += 1
                for page in sequence.table[sequence.prompt_tokens // U :]:
                    assert pages.reference_count(page) == 1
        for prefix in scheduler.prefixes.all():
            if prefix.shard == shard:
                for page in prefix.table:
                    holders[page] += 1
        assert holders == [pages.reference_count(page) for page in range(pages.count)]
        assert pages.free == holders.count(0)
    for shard, rings in enumerate(scheduler.rings if scheduler.rings[0].count else ()):
        sequences = [one for one in scheduler.sequences if one and scheduler.shard_of(one.slot) == shard]
        prefixes = [one for one in scheduler.prefixes.all() if one.shard == shard]
        used = [ring for one in (*sequences, *prefixes) for ring in one.ring]
        assert len(used) == len(sequences) + len(prefixes) == len(set(used)) == rings.count - rings.free
    rows = [prefix.row for prefix in scheduler.prefixes.all() if prefix.row is not None]
    assert sorted(rows + scheduler.prefixes.rows) == list(range(6))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(12, 40))])
def test_every_token_is_where_its_table_says_in_any_history(seed: int, reserve: bool, shards: int) -> None:
    """Its last window is in its ring, too, if the engine has rings."""
    rng = random.Random(f"{seed} {reserve} {shards}")
    slots = 4
    most = 28  # tokens of the longest request: seven pages
    pages = slots // shards * 7 + 6 if reserve else 8 + rng.randrange(4)
    sizes = Sizes(slots, most, 2, 4, (4, 8), 1, 0, U, logit_rows=rng.randrange(1, 7), shards=shards)
    sizes = replace(sizes, window=rng.randrange(12) if seed % 4 else 0, draft=rng.randrange(3))
    scheduler = Scheduler(slots, shards, pages, 6, Limits(**LIMITS, reserve=reserve), sizes.rings)
    memory = Memory(scheduler, pages, rng, sizes)
    prompts = [text(*(rng.randrange(50) for _ in range(rng.randrange(1, 20)))) for _ in range(6)]
    added = aborted = 0
    gone: set[int] = set()
    for _ in range(120):
        for _ in range(rng.randrange(3) if added < 40 else 0):
            prompt = rng.choice(prompts + [sequence.prompt + text(1, 2) for sequence in scheduler.running])[: 4 * 20]
            memory.limits[added] = rng.randrange(1, most - len(prompt) // 4 + 1)
            scheduler.add(Sequence(added, prompt, len(prompt) // 4 + memory.limits[added]))
            added += 1
        if rng.random() < 0.1 and added:
            id = rng.randrange(added)
            running = {sequence.id for sequence in scheduler.running}
            if scheduler.abort(id) is not None:
                gone.add(id)
                aborted += id in running
                memory.drawn.pop(id, None)
                memory.saved.pop(id, None)
                memory.saved_rings.pop(id, None)
        if rng.random() < 0.08:
            policy = rng.choice(["keep_kv", "reprefill", "restart"])
            scheduler.swap_weights(running=policy != "keep_kv", forget_tokens=policy == "restart")
            memory.weights += 1
            if policy != "keep_kv":
                memory.saved.clear()
                memory.saved_rings.clear()
            if policy == "restart":
                memory.drawn.clear()
        memory.fill()
        check_pages(scheduler)
        memory.decode(rng.randrange(1, 4))
        memory.release(keep=rng.random() < 0.5)
        check_pages(scheduler)
    for _ in range(400):
        if not scheduler.active and not scheduler.waiting:
            break
        memory.fill()
        memory.decode(3)
        memory.release(keep=False)
    assert not scheduler.waiting and not scheduler.active, "a sequence waits forever"
    assert sorted([*memory.done, *gone]) == list(range(added))


def started_order(scheduler: Scheduler, memory: Memory) -> list[int]:
    while scheduler.active or scheduler.waiting:
        memory.fill()
        memory.decode(2)
        memory.release(keep=False)
    return memory.started


def test_first_come_first_served_although_a_smaller_one_would_fit() -> None:
    scheduler = Scheduler(4, 1, 8, 6, Limits(**LIMITS, reserve=False))
    memory = Memory(scheduler, 8, random.Random(0))
    for id, tokens in enumerate((16, 14, 1, 1)):
        memory.limits[id] = 4
        scheduler.add(Sequence(id, text(*range(100 * id, 100 * id + tokens)), tokens + 4))
    memory.fill()
    assert [sequence.id for sequence in scheduler.running] == [0]  # 1 does not fit next to 0, and 2 may not overtake it
    assert started_order(scheduler, memory) == [0, 1, 2, 3]


def test_the_one_that_came_last_gives_its_pages_away_and_comes_back_first() -> None:
    scheduler = Scheduler(3, 1, 9, 6, Limits(**LIMITS, reserve=False))
    memory = Memory(scheduler, 9, random.Random(0))
    for id in range(3):
        memory.limits[id] = 16
        scheduler.add(Sequence(id, text(id), 17))
    memory.fill()
    memory.limits[3] = 1
    scheduler.add(Sequence(3, text(3), 2))
    victims: list[int] = []
    grow = scheduler.grow
    scheduler.grow = lambda steps: [victims.append(v.sequence.id) or v for v in grow(steps)]  # type: ignore[method-assign]
    while not victims:
        memory.decode(2)
        memory.fill()
    assert victims == [2] and [sequence.id for sequence in scheduler.waiting] == [2, 3]
    assert started_order(scheduler, memory) == [0, 1, 2, 3]


def test_no_new_request_starts_while_held_but_started_ones_continue() -> None:
    scheduler = Scheduler(2, 1, 20, 6, Limits(**LIMITS))
    fresh, begun = Sequence(0, text(1), 4), Sequence(1, text(2), 4, sampled=1, swapped=True)
    scheduler.held = True
    scheduler.add(begun)
    scheduler.add(fresh)
    assert scheduler.refill_at() == 1
    assert scheduler.admit() == [begun] and [sequence.id for sequence in scheduler.waiting] == [0]
    assert scheduler.refill_at() is None


def test_the_prefill_budget_limits_prompts_computed_between_dispatches() -> None:
    scheduler = Scheduler(4, 1, 60, 6, Limits(**(LIMITS | {"budget": 8, "rows": 1})))
    memory = Memory(scheduler, 60, random.Random(0))
    memory.limits = {0: 40, 1: 4}
    scheduler.add(Sequence(0, text(7), 41))
    memory.fill()
    scheduler.add(Sequence(1, text(*range(30)), 34))
    seen = []
    for _ in range(4):
        scheduler.admit()
        chunks = scheduler.prefill_chunks(busy=bool(scheduler.running))
        seen.append([(row.start, row.count) for chunk in chunks for row in chunk.rows])
        for chunk in chunks:
            for row in chunk.rows:
                memory.compute(row, chunk.fresh)
    assert seen == [[(0, 8)], [(8, 8)], [(16, 8)], [(24, 6)]]


def test_a_page_is_not_evicted_before_it_is_copied() -> None:
    """A prompt continues a conversation and waits behind another prompt, while a running sequence needs pages."""
    limits = LIMITS | {"budget": 8, "rows": 1}
    scheduler = Scheduler(3, 1, 40, 6, Limits(**limits, reserve=False))
    memory = Memory(scheduler, 40, random.Random(0))
    memory.limits = {0: 3, 1: 20, 2: 3, 3: 3}

    def add(id: int, prompt: bytes) -> None:
        scheduler.add(Sequence(id, prompt, len(prompt) // 4 + memory.limits[id]))

    add(0, text(*range(6)))
    memory.fill()
    memory.decode(3)
    memory.done[0] = memory.drawn.pop(0)
    scheduler.release(0, text(*range(6), memory.done[0][0]))
    (kept,) = (prefix for prefix in scheduler.prefixes.all() if prefix.row is None)
    assert kept.length % U, "no page would be copied"
    add(1, text(50))
    memory.fill()
    for prefix in scheduler.prefixes.all():
        if prefix is not kept:
            scheduler._forget(prefix)
    add(2, text(*range(100, 124)))
    add(3, kept.tokens + text(1, 2))
    assert not scheduler.admit()
    others = scheduler.pages[0].allocate(scheduler.pages[0].free)
    memory.fill()
    for _ in range(4):
        memory.decode(1)
    scheduler.pages[0].free_pages(others)
    assert sorted(started_order(scheduler, memory)) == [0, 1, 2, 3]


def test_pages_are_free_when_the_last_holder_drops_them() -> None:
    pages = BlockAllocator(3)
    taken = pages.allocate(2)
    pages.share(taken[:1])
    pages.free_pages(taken)
    assert (pages.free, pages.reference_count(taken[0])) == (2, 1)
    for wrong in (lambda: pages.free_pages([taken[1]]), lambda: pages.share([taken[1]]), lambda: pages.allocate(3)):
        with pytest.raises(ValueError):
            wrong()
    pages.free_pages(taken[:1])
    assert pages.free == 3
