"""Device side of an engine: its state and the operations on it.

Every call dispatches one program and returns at once, except `save`, which waits for the pages of a preempted request.
`Dispatch.report` waits for a decode and its report, which is one array per dispatch. The only other transfer to the
host is that of recorded experts.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxroll import disk
from jaxroll import sharding as layout
from jaxroll.engine import programs, requests
from jaxroll.engine.requests import Sizes
from jaxroll.engine.sequence import MemoryShare, fitting_pages
from jaxroll.errors import ConfigError, no_memory_limit
from jaxroll.kernels.choice import PLAIN, EngineChoices
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import Held, Params
from jaxroll.protocols import Progress
from jaxroll.sharding import Rules

_NEVER = np.iinfo(np.int32).max
Taken = tuple[Sequence[int], Sequence[int]]  # the pages of a request, and its ring (empty in an engine without rings)


@dataclass(frozen=True, eq=False)
class SavedPages:
    """The cache content of one request, as arrays of the host, of which `tokens` tokens are valid."""

    pages: programs.Pages
    tokens: int


@dataclass(frozen=True, eq=False)
class Dispatch:
    """A dispatched decode."""

    array: jax.Array
    sizes: Sizes

    def report(self) -> requests.Report:
        """Wait for the decode and return its report."""
        return requests.read_report(np.asarray(self.array), self.sizes)


class Device:
    """Slots, a cache and compiled programs on one mesh. Construction allocates, `warmup` compiles."""

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        rules: Rules,
        sizes: Sizes,
        *,
        seed: int,
        attention: EngineChoices = PLAIN,
        draft: Params | None = None,
    ) -> None:
        self._sizes, self.served = sizes, model_params.served(spec)
        self._draft: Held = {}
        if spec.draft is not None:
            assert draft is not None, "a draft model needs its parameters"
            self._draft[model_params.DRAFT] = programs.held(spec.draft, draft, mesh, rules)
        self._programs = programs.build(spec, mesh, rules, sizes, attention)
        self.shardings = self._programs.params
        self._state = self._programs.empty()
        self._seed = self._placed_key(seed)
        of = self._programs  # the programs that change the state and take arrays of the host
        self._updates: dict[str, Callable[..., programs.DecodeState]] = {
            "insert": partial(of.insert, self._seed),
            "restore": of.restore,
            "copy": of.copy,
            "copy_rings": of.copy_rings,
            "cancel": of.cancel,
            "allow": of.allow,
        }
        # Kept on the device by value, because new arrays would need a host-to-device copy in every dispatch.
        self._limits: dict[tuple[int, int], jax.Array] = {}
        self.set_tables([((), ())] * sizes.slots)
        self.dtypes: dict[str, np.dtype] | None = None  # of the parameters that the programs are compiled for
        self._warm = 0

    # --- prompts and requests

    def prefill(self, params: Held, fresh: bool, bucket: int, rows: Sequence[requests.PrefillRow]) -> None:
        """Compute prompt tokens into pages. `fresh` rows begin at position 0 and have no earlier tokens."""
        self._prefill(params, fresh, bucket, requests.pack_prefill(bucket, rows, self._sizes))

    def insert(self, entries: Sequence[tuple]) -> None:
        """Start requests whose prompts are in the cache; for `entries` see `requests.pack_inserts`."""
        for some in _batches(entries, self._sizes.inserts):
            self._update("insert", requests.pack_inserts(some, self._sizes))

    def restore(self, entries: Sequence[tuple]) -> None:
        """Continue requests whose prompts and tokens are in the cache; for `entries` see `requests.pack_restores`."""
        for some in _batches(entries, self._sizes.inserts):
            self._update("restore", requests.pack_restores(some, self._sizes))

    def copy(self, copies: Sequence[Sequence[int]]) -> None:
        """Copy pages; each entry of `copies` is (shard, from, to)."""
        for some in _batches(copies, self._sizes.inserts):
            self._update("copy", requests.pack_copies(some, self._sizes))

    def copy_rings(self, copies: Sequence[Sequence[int]]) -> None:
        """Copy rings; each entry of `copies` is (shard, from, to)."""
        for some in _batches(copies, self._sizes.inserts):
            self._update("copy_rings", requests.pack_copies(some, self._sizes))

    def cancel(self, slots: Sequence[int]) -> None:
        """Make `slots` idle."""
        mask = np.zeros(self._sizes.slots, bool)
        mask[list(slots)] = True
        self._update("cancel", mask)

    def _prefill(self, params: Held, fresh: bool, bucket: int, packed: np.ndarray) -> None:
        self._state = self._programs.prefill[fresh, bucket](params, self._state, packed)

    def _update(self, what: str, *inputs: np.ndarray) -> None:
        self._state = self._updates[what](self._state, *inputs)

    # --- pages

    def set_tables(self, tables: Sequence[Taken]) -> None:
        """Set the pages and the ring of every slot, in order."""
        packed = np.zeros((self._sizes.slots, self._sizes.table_columns), np.int32)
        for into, (table, ring) in zip(packed, tables, strict=True):
            into[: len(table)] = table
            into[len(into) - len(ring) :] = ring
        self._put_tables(packed)

    def _put_tables(self, packed: np.ndarray) -> None:
        self._tables = self._placed(packed, self._programs.tables)

    def save(self, shard: int, held: Taken, tokens: int) -> SavedPages:
        """Copy the pages and the ring of a preempted request to the host, and wait for the copy."""
        # Arrays of the device would keep its memory until `load`, while `run_bytes` counts one request, and only until
        # the next program.
        return SavedPages(self._read_pages(self._place(shard, *held, fill=0)), tokens)

    def load(self, shard: int, held: Taken, saved: SavedPages) -> None:
        """Copy what was saved back into these pages and this ring."""
        (table, ring), used = held, -(-saved.tokens // self._sizes.page_tokens)
        self._write_pages(self._place(shard, table[:used], ring, fill=self._sizes.shard_pages), saved.pages)

    def _read_pages(self, place: np.ndarray) -> Any:
        return layout.own_shards(self._programs.save(self._state, place))

    def _write_pages(self, place: np.ndarray, pages: Any) -> None:
        self._state = self._programs.load(self._state, place, layout.of_own_shards(pages))

    def experts(self, shard: int, table: Sequence[int]) -> jax.Array | None:
        """The recorded choices in the pages of a request, [J·U, X]; None without a record.

        The copy to the host has begun; the pages may be reused at once.
        """
        if self._programs.experts is None:
            return None
        return self._read_experts(self._place(shard, table, (), fill=0))

    def _read_experts(self, place: np.ndarray) -> jax.Array:
        assert self._programs.experts is not None
        found = self._programs.experts(self._state, place)
        found.copy_to_host_async()
        return found

    def _place(self, shard: int, table: Sequence[int], ring: Sequence[int], *, fill: int) -> np.ndarray:
        place = np.full(1 + self._sizes.table_columns, fill, np.int32)
        place[0], place[1 : 1 + len(table)], place[len(place) - len(ring) :] = shard, table, ring
        return place

    # --- tokens

    def decode(self, params: Held, steps: int, until_idle: int | None) -> Dispatch:
        """Dispatch up to `steps` ≤ `Sizes.chunk` steps; they stop early once `until_idle` (1 … S) slots are idle."""
        wanted = steps, _NEVER if until_idle is None else until_idle
        if wanted not in self._limits:
            self._limits[wanted] = self._placed(np.array(wanted, np.int32), self._programs.replicated)
        limits = self._limits[wanted]
        with jax.transfer_guard("disallow"):  # an array on the host would be copied in every dispatch
            self._state, report = self._programs.decode(params, self._seed, self._state, self._tables, limits)
        if report.is_fully_addressable:
            report.copy_to_host_async()  # before what is dispatched after it
        return Dispatch(report, self._sizes)

    @property
    def mask_tokens(self) -> int:
        """V0: tokens of a token mask; 0 in an engine without masks."""
        return self._state.allowed.shape[1]

    def set_token_masks(self, masks: Mapping[int, np.ndarray]) -> None:
        """Set the token masks of the requests in some slots: slot to bool [V]."""
        sizes = self._sizes
        slots = np.full(sizes.slots, sizes.slots, np.int32)
        rows = np.ones((sizes.slots, self.mask_tokens), bool)
        for index, (slot, mask) in enumerate(masks.items()):
            slots[index], rows[index] = slot, mask
        self._update("allow", slots, rows)

    # --- weights

    def held(self, params: Params) -> Held:
        """`params` for the programs: stacked or quantized as configured, with those of the draft model."""
        own = dict(params) if self._programs.hold is None else self._programs.hold(params)
        return own | self._draft

    def warmup(self, params: Params | None, progress: Progress | None) -> None:
        """Compile every program for parameters like `params` (None: zeros), and run each once without effect."""
        if params is None:
            where = self.shardings
            params = {name: jnp.zeros(leaf.shape, leaf.dtype, device=where[name]) for name, leaf in self.served.items()}
        self.dtypes = {name: leaf.dtype for name, leaf in params.items()}
        held = self.held(params)
        work: dict[str, Callable[[], object]] = {
            f"{'prefill' if fresh else 'extend'} of {bucket} tokens": partial(self.prefill, held, fresh, bucket, [])
            for fresh, bucket in self._programs.prefill
        }
        work[f"decode of {self._sizes.slots} slots"] = lambda: self.decode(held, 1, 1).report()
        work["insert, restore and copy"] = self._run_empty_moves
        where, cache = self._programs.replicated, jax.config.values["jax_compilation_cache_dir"]
        key = f"{dict(where.mesh.shape)} {self._sizes} {self.dtypes} {self.served}"
        for what in one_at_a_time(work, key, cache if where.is_fully_addressable else None):
            _timed(progress, what, work[what])
        self._warm = self._compiled()

    def _run_empty_moves(self) -> None:
        sizes = self._sizes
        self._update("insert", requests.pack_inserts([], sizes))
        self._update("restore", requests.pack_restores([], sizes))
        self._update("copy", requests.pack_copies([], sizes))
        self.cancel([])
        self.set_token_masks({})
        self._update("copy_rings", requests.pack_copies([], sizes))
        self.load(0, ((), ()), self.save(0, ((), ()), 0))
        self.experts(0, [])

    def compiles(self) -> int:
        """Programs compiled since warm-up; 0 without a warm-up."""
        return self._compiled() - self._warm if self._warm else 0

    def _compiled(self) -> int:
        """The number of programs compiled so far."""
        of = self._programs
        moves = (of.insert, of.restore, of.copy, of.copy_rings, of.cancel, of.allow, of.save, of.load)
        every = (*of.prefill.values(), of.decode, *moves, *(program for program in (of.experts, of.hold) if program))
        return sum(program._cache_size() for program in every)  # type: ignore[attr-defined]

    def _placed(self, value: np.ndarray, where: NamedSharding) -> jax.Array:
        return jax.device_put(value, where) if where.is_fully_addressable else layout.placed_once(value, where)

    def _placed_key(self, seed: int) -> jax.Array:
        where = self._programs.replicated
        if where.is_fully_addressable:
            return jax.device_put(jax.random.key(seed), where)
        return jax.jit(lambda: jax.random.key(seed), out_shardings=where)()


def _batches(entries: Sequence, size: int) -> list[Sequence]:
    return [entries[at : at + size] for at in range(0, len(entries), size)]


def _timed(progress: Progress | None, what: str, work: Callable[[], object]) -> None:
    start_s = time.monotonic()
    if progress is not None:
        progress(f"compiling {what}")
    work()
    if progress is not None:
        progress(f"compiled {what}, {time.monotonic() - start_s:.1f} s")


# --- the engines of one machine compile each program once

LOCK_LIMIT_S, LOCK_PAUSE_S = 300.0, 0.1


def one_at_a_time(names: Iterable[str], key: str, folder: str | None) -> Iterator[str]:
    """`names` of programs, in an order in which processes of this machine compile none of them at the same time.

    Samplers and evaluator of a machine often have equal programs, and start together. Each name has a file in `folder`,
    the compilation cache. The process that is the first to lock it compiles, and marks the file when it asks for the
    next name; until then that name comes later for others, but not more than LOCK_LIMIT_S later. No process waits for a
    marked one. `key` tells programs of one name apart; programs that it confuses are compiled by each process.
    """
    pending, limit_s = list(names), time.monotonic() + LOCK_LIMIT_S
    while pending and folder and time.monotonic() < limit_s:
        for name in pending:
            with contextlib.ExitStack() as held:
                if (mark_compiled := _compile_lock(held, Path(folder), f"{jax.__version__} {key} {name}")) is not None:
                    yield name
                    pending.remove(name)
                    limit_s = time.monotonic() + LOCK_LIMIT_S
                    mark_compiled()
                    break
        else:
            time.sleep(LOCK_PAUSE_S)
    yield from pending


def _compile_lock(held: contextlib.ExitStack, folder: Path, label: str) -> Callable[[], object] | None:
    """None if another process compiles `label`; otherwise the callback to run after its compilation."""
    locks = folder / "locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        file: IO[bytes] = held.enter_context((locks / hashlib.sha256(label.encode()).hexdigest()).open("ab", 0))
        if file.tell():
            return lambda: None
        disk.lock(file)
    except BlockingIOError:
        return None
    except (OSError, ConfigError):  # a full or read-only cache, or one without locks: the process compiles by itself
        return lambda: None

    def mark() -> None:
        with contextlib.suppress(OSError):
            file.write(b"compiled")

    return mark


# --- the number of pages, from the memory of a device


def sized(
    spec: ModelSpec,
    mesh: Mesh,
    rules: Rules,
    sizes: Sizes,
    share: MemoryShare,
    temporaries: Callable[[Sizes, EngineChoices], int],
    **kernels: str,
) -> tuple[Sizes, MemoryShare]:
    """`sizes` with as many pages as fit `share`, and this with the temporaries of the programs.

    Without a limit on pages if an engine without one fits. `temporaries` gives the bytes that the programs for some
    sizes need while they run (`run_bytes`); `kernels` are the names for `choose_kernels`. ConfigError if not even the
    longest request alone fits.
    """

    def state_bytes(pages: int) -> int:
        attention, found = programs.kernels_and_sizes(spec, mesh, replace(sizes, pages=pages), **kernels)
        return layout.device_bytes(programs.abstract_state(spec, mesh, rules, found, attention))

    def run_bytes_of(pages: int) -> int:
        attention, found = programs.kernels_and_sizes(spec, mesh, replace(sizes, pages=pages), **kernels)
        return temporaries(found, attention)

    sizes = replace(sizes, pages=0)
    if state_bytes(0) <= share.state_bytes:
        whole = replace(share, temporaries=run_bytes_of(0))
        if state_bytes(0) <= whole.state_bytes:
            return sizes, whole
    least, most = sizes.table + 1, sizes.shard_pages
    fitting_pages(share, state_bytes, least, most)  # before anything is compiled
    share = replace(share, temporaries=run_bytes_of(least))
    while True:  # temporaries may grow with the cache, so that fewer pages are left for it
        pages = fitting_pages(share, state_bytes, least, most)
        needed = run_bytes_of(pages)
        if needed <= share.temporaries:
            return replace(sizes, pages=pages), share
        share = replace(share, temporaries=needed)


def run_bytes(
    spec: ModelSpec, mesh: Mesh, rules: Rules, sizes: Sizes, attention: EngineChoices, progress: Progress | None = None
) -> int:
    """The bytes of a device that an engine's programs need beyond parameters and state: of the most demanding one,
    temporaries and results, and the code of all. Compiles them, of prefills the largest.
    """
    most, code = 0, 0
    sizes = replace(sizes, buckets=sizes.buckets[-1:])
    for name, lowered in programs.lowered(spec, mesh, rules, sizes, attention).items():
        compiled: list[jax.stages.Compiled] = []
        _timed(progress, f"{name} to measure its memory", lambda: compiled.append(lowered.compile()))  # noqa: B023
        found = compiled[0].memory_analysis()
        if found is not None:
            most = max(most, found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes)
            code += found.generated_code_size_in_bytes
    return most + code


def memory_share(spec: ModelSpec, mesh: Mesh, rules: Rules, limit_bytes: int, fraction: float) -> MemoryShare:
    """The share of a device's memory for an engine, with the bytes of two versions of the parameters."""
    where = model_params.shardings(spec, mesh, rules)
    arriving = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where[name])
        for name, leaf in model_params.served(spec).items()
    }
    in_use = layout.device_bytes(model_params.abstract_held(spec, mesh, rules))
    return MemoryShare(limit_bytes, fraction, layout.device_bytes(arriving), in_use)


def sized_by_memory(
    spec: ModelSpec,
    mesh: Mesh,
    rules: Rules,
    sizes: Sizes,
    fraction: float,
    kernels: dict[str, str],
    progress: Progress | None,
) -> tuple[Sizes, str]:
    """`sizes` with the pages that fit `fraction` of the memory of the mesh's devices, and a line about them."""
    limit = layout.memory_limit(mesh)
    if limit is None:
        raise no_memory_limit(fraction, layout.platform(mesh))
    share = memory_share(spec, mesh, rules, limit, fraction)
    measured = partial(run_bytes, spec, mesh, rules, progress=progress)
    found, share = sized(spec, mesh, rules, sizes, share, measured, **kernels)
    return found, described(found, share)


def described(sizes: Sizes, share: MemoryShare) -> str:
    """A line about the pages and the share of memory that decided their number."""
    every = "" if sizes.pages else " (all that its slots can need)"
    pages = f"{sizes.shards * sizes.shard_pages:,} pages of {sizes.page_tokens} tokens{every}"
    return f"KV cache of {pages}: {share.described()}"
