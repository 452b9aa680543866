"""The engine: continuous batching of requests over a fixed number of slots and a paged KV cache.

One thread calls `step`, which applies queued commands, computes prompts, starts requests in free slots, runs one decode
dispatch and delivers finished requests. Any thread may send commands (`add`, `abort`, `suspend`, `resume`, `swap`);
they go through a queue, take effect between two dispatches and never block. `on_done` is called by the stepping
thread, outside any lock, while the next dispatch runs; it must neither block nor raise.

With two dispatches in flight a step sends the next one before it reads the report of the one before, so the device does
not wait for the host. A freed slot is filled one dispatch later; what depends on tokens waits for all reports.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

from jaxroll.clock import unix_s
from jaxroll.config import Config, WeightSwap
from jaxroll.config.derived import cache_tokens, page_size, support_tokens
from jaxroll.engine import device, programs, requests
from jaxroll.engine.device import Device
from jaxroll.engine.ledger import Unfinished
from jaxroll.engine.requests import OnDone, Request, Result, Sizes
from jaxroll.engine.scheduler import Scheduler
from jaxroll.engine.sequence import EngineStats, Latencies, Limits, Sequence
from jaxroll.engine.work import EngineWork, InFlight
from jaxroll.errors import DataError, TransferError
from jaxroll.kernels.choice import AUTO, check_quantised
from jaxroll.models import cache as kv
from jaxroll.models.families import ModelSpec
from jaxroll.models.params import Held, Params
from jaxroll.protocols import Completion, Progress
from jaxroll.records import Version
from jaxroll.sharding import Rules


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and policies of an engine.

    `slots` requests run at once, each with up to `max_tokens` positions in the cache. A prefill computes `prefill_rows`
    prompts, or chunks of longer ones, of up to the largest of `prefill_buckets` tokens; `prefill_budget` tokens (0: one
    prefill) are computed between two dispatches. A dispatch decodes up to `decode_chunk` tokens per slot. While
    requests wait, new ones start only when `refill` slots are free, and a dispatch stops early once that many are, so
    that a large `decode_chunk` does not leave slots idle.

    The cache has `cache_pages` pages of `page_tokens` tokens; 0 reserves the pages of the longest request for every
    slot. With fewer pages, requests take them as they grow. When none is free, the last request to arrive is preempted:
    its pages are copied to the host, and it continues later with the same tokens. With a `memory_fraction` above 0 the
    cache has as many pages as fit that share of a device's memory (`device.sized`).

    `weight_swap` decides what happens to running requests when weights change. `keep_kv`: they continue with the new
    weights over the old KV cache. `reprefill`: they continue after their KV cache is recomputed with the new weights.
    `restart`: they start over. `drain`: the swap waits until they have finished, and no other request starts meanwhile.

    With `experts`, completions hold the experts chosen for their tokens (`Completion.experts`). With `draft_tokens`, a
    step drafts up to that many tokens per slot, and verifies them in one pass if that is worth it (`decoding`).

    Requests may have a repetition penalty only with `penalties`, and a token mask only with `masks`; both need device
    memory. With `support_tokens`, truncated sampling keeps at most that many tokens, and completions contain their ids
    (`Completion.support`). Otherwise requests may truncate only with `truncation`: the programs that sample then can
    sort the vocabulary, which needs memory, and do so while a request truncates. `prefill_attention` and
    `paged_attention` name implementations (`kernels.choice`). With `scan_layers`, every program has one layer (of each
    kind), which it runs in a loop. With `kv_dtype` or `weight_dtype`, "int8" or "fp8", the cache or the matrices of the
    layers are quantized (`kernels.quantised`).

    `in_flight` dispatches, one or two, may be on the device at once. The tokens of a request do not depend on it.
    """

    slots: int
    max_tokens: int
    prefill_rows: int
    prefill_buckets: tuple[int, ...]
    decode_chunk: int
    seed: int
    weight_swap: WeightSwap = "keep_kv"
    refill: int | None = None  # default: a sixth of the slots
    insert_rows: int | None = None  # requests per insert program
    max_stops: int = 4  # stop tokens per request
    page_tokens: int = 0
    cache_pages: int = 0
    memory_fraction: float = 0.0
    prefill_budget: int = 0
    penalties: bool = False
    masks: bool = False
    support_tokens: int = 0
    experts: bool = False
    draft_tokens: int = 0
    truncation: bool = False
    scan_layers: bool = False
    prefill_attention: str = AUTO
    paged_attention: str = AUTO
    kv_dtype: str = ""
    weight_dtype: str = ""
    in_flight: int = 1

    @classmethod
    def of(cls, config: Config, role: str, *, weight_swap: WeightSwap | None = None, slots: int = 0) -> EngineConfig:
        """The engine of a sampler or of the evaluator (`role`) under `config`; without `slots`, a sampler's number."""
        sampler, samples = config.sampler, role == "sampler"
        slots, weight_swap = slots or sampler.slots, weight_swap or config.schedule.weight_swap
        return cls(
            slots=slots,
            max_tokens=cache_tokens(config),
            weight_swap="drain" if weight_swap == "trajectory" else weight_swap,  # the role waits for the members
            seed=config.run.seed,
            prefill_rows=min(sampler.prefill_rows, slots),
            prefill_buckets=sampler.prefill_buckets,
            decode_chunk=sampler.decode_chunk,
            draft_tokens=sampler.draft_tokens,
            scan_layers=sampler.scan_layers,
            experts=samples and config.learner.routing_replay,
            prefill_budget=sampler.prefill_budget,
            page_tokens=sampler.page_tokens,
            cache_pages=sampler.cache_pages if samples else 0,
            memory_fraction=sampler.memory_fraction if samples else 0.0,
            support_tokens=support_tokens(config.sampling) if samples else 0,  # evaluations are not truncated
            truncation=role == "requests" or (samples and sampler.http_port >= 0),  # clients choose their own
            prefill_attention=sampler.prefill_attention,
            paged_attention=sampler.paged_attention,
            kv_dtype=sampler.kv_dtype if samples else "",
            weight_dtype=sampler.weight_dtype if samples else "",
            in_flight=sampler.dispatches_in_flight if samples else 1,
        )

    @classmethod
    def of_requests(cls, config: Config, slots: int, max_tokens: int, *, penalties: bool) -> EngineConfig:
        """The engine of single requests of up to `max_tokens`, outside a run, with `config`'s programs."""
        engine = cls.of(config, "requests", slots=slots)
        return replace(engine, max_tokens=max_tokens, penalties=penalties, page_tokens=0, prefill_budget=0)

    def model(self, spec: ModelSpec) -> ModelSpec:
        """`spec` for the programs of this engine. ConfigError for a model whose weights cannot be quantized."""
        check_quantised(self.weight_dtype, spec.experts)
        scan, draft = self.scan_layers, spec.draft and replace(spec.draft, scan=self.scan_layers)
        return replace(spec, scan=scan, kv_dtype=self.kv_dtype, weight_dtype=self.weight_dtype, draft=draft)

    @property
    def kernels(self) -> dict[str, str]:
        """The configured implementations of attention, for `programs.kernels_and_sizes`."""
        return {"prefill": self.prefill_attention, "paged": self.paged_attention}

    def sizes(self, shards: int) -> Sizes:
        """The static sizes of the programs, with slots in `shards` shards."""
        return Sizes(
            self.slots,
            self.max_tokens,
            self.prefill_rows,
            self.insert_rows or max(self.prefill_rows, min(self.slots // 2, 16)),
            tuple(sorted(set(self.prefill_buckets))),
            self.decode_chunk,
            self.max_stops,
            page_size(self.page_tokens, self.max_tokens),
            -(-self.cache_pages // shards),
            max(2 * self.prefill_rows, 16),
            shards,
            self.penalties,
            self.masks,
            self.support_tokens,
            self.experts,
            self.draft_tokens,
            truncation=self.truncation,
        )

    def limits(self, sizes: Sizes) -> Limits:
        """The limits of the scheduler for these sizes."""
        return Limits(
            sizes.rows,
            sizes.inserts,
            self.refill
            or max(1, sizes.slots // 6),  # while requests wait, at least 5 of 6 slots are busy in every step
            sizes.buckets,
            sizes.page_tokens,
            self.prefill_budget or sizes.rows * sizes.buckets[-1],
            reserve=not sizes.pages,
        )


class Engine:
    """Slots, a KV cache and a queue on one mesh. Construction allocates; `warmup` compiles; `swap` sets the weights.

    Stop strings need `decode`, the tokenizer's function, and a `spec` with a draft model needs `draft`, its parameters.
    `attention` holds the chosen attention implementations, and `memory` how the cache was sized, empty without a
    `memory_fraction`. Then construction compiles, too, and reports to `progress`. Of an engine on several hosts,
    process 0 has a `LeadingDevice`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        rules: Rules,
        config: EngineConfig,
        *,
        decode: Callable[[list[int]], str] | None = None,
        clock: Callable[[], float] = unix_s,
        progress: Progress | None = None,
        make_device: Callable[..., Device] = Device,
        draft: Params | None = None,
    ) -> None:
        shards = kv.shards_of(config.slots, mesh, rules) if config.slots > 0 else 1
        sizes = config.sizes(shards)
        programs.check_sizes(sizes, config.weight_swap)
        self.weight_swap, self._clock = config.weight_swap, clock
        self._name, self._vocab_size, spec = spec.name, spec.vocab_size, config.model(spec)
        self.memory, share = "", config.memory_fraction
        if share:
            sizes, self.memory = device.sized_by_memory(spec, mesh, rules, sizes, share, config.kernels, progress)
        self.attention, self._sizes = programs.kernels_and_sizes(spec, mesh, sizes, **config.kernels)
        sizes = self._sizes
        self._device = make_device(spec, mesh, rules, sizes, seed=config.seed, attention=self.attention, draft=draft)
        self._scheduler = Scheduler(
            sizes.slots, shards, sizes.shard_pages, sizes.logit_rows, config.limits(sizes), sizes.rings
        )
        self._work = EngineWork(self._device, self._scheduler, sizes, clock, decode)
        self._decodes = decode is not None
        self._params: Held | None = None
        self._next: requests.Swap | None = None  # a swap that waits for running requests to end
        self._stats = EngineStats()
        self._commands: queue.SimpleQueue[requests.Command] = queue.SimpleQueue()
        self._ids: set[int] = set()  # of the requests in the engine
        self._ids_lock = threading.Lock()
        self._in_flight = deque[InFlight]()
        self._most_in_flight = 1 if sizes.experts else config.in_flight  # experts are read after all that was sent
        self._ended: list[tuple[requests.Add, Result]] = []  # not delivered yet
        self._pieces: list[tuple[requests.OnTokens, Completion]] = []  # not delivered yet
        self._accounted_s = float("-inf")
        self.latencies = Latencies()

    # ------------------------------------------------------------------------------------------- from any thread

    @property
    def version(self) -> Version | None:
        """The version of the weights in use; None before the first swap took effect."""
        return self._stats.version

    def stats(self) -> EngineStats:
        """A consistent snapshot, as of the last step."""
        return self._stats

    def add(self, request: Request, on_done: OnDone) -> None:
        """Queue `request`; `on_done` gets its `Result`. Raises DataError at once if it can never be served."""
        requests.check(request, self._sizes, vocab_size=self._vocab_size, decodes=self._decodes)
        with self._ids_lock:
            if request.id in self._ids:
                raise DataError(f"request {request.id} is in the engine already: an id is unique while it is in use")
            self._ids.add(request.id)
        self._commands.put(requests.Add(request, on_done, self._clock()))

    def abort(self, id: int, keep: bool) -> None:
        """End request `id`: with `keep` deliver its tokens so far (finish "abort"), otherwise deliver nothing.

        This has no effect on a request that has ended meanwhile.
        """
        self._commands.put(requests.Abort(id, keep))

    def suspend(self) -> None:
        """Stop before the next dispatch; running requests stay in their slots."""
        self._commands.put(requests.Suspend())

    def resume(self) -> None:
        """Continue after `suspend`."""
        self._commands.put(requests.Resume())

    def swap(self, version: Version, params: Params) -> None:
        """Use `params`, which are `version`, from the next dispatch on (with `drain`: when no request runs).

        TransferError if `params` do not match the engine. If two swaps wait for draining, the later one is used.
        """
        self._check(params)
        self._commands.put(requests.Swap(version, params))

    def drop_waiting_swap(self) -> None:
        """Drop a swap that waits for running requests, which frees its parameters. Call this on the stepping thread.

        Call it before other parameters are placed: then at most two versions are on the device.
        """
        self._apply_commands()
        self._next, self._scheduler.held = None, False

    def _check(self, params: Params) -> None:
        """Raise TransferError, with the parameter and the reason, if `params` do not fit the compiled programs."""
        wanted, served, known = self._device.shardings, self._device.served, self._device.dtypes
        if params.keys() != wanted.keys():
            differing = sorted(params.keys() ^ wanted.keys())
            raise TransferError(f"these are not the parameters of {self._name}: missing or unknown {differing[:4]}")
        for name, sharding in wanted.items():
            leaf = params[name]
            if leaf.shape != served[name].shape:
                raise TransferError(f"parameter {name} has shape {leaf.shape}, the model has {served[name].shape}")
            if not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                raise TransferError(f"parameter {name} has {leaf.sharding}, this engine needs {sharding}")
            if known is not None and leaf.dtype != known[name]:
                raise TransferError(f"parameter {name} is {leaf.dtype}, this engine is compiled for {known[name]}")

    # -------------------------------------------------------------------------------------- by the stepping thread

    def warmup(self, params: Params | None, progress: Progress | None = None) -> None:
        """Compile every program for parameters like `params`; `progress` gets the program and its seconds.

        Without `params` zeros take their place: the programs are the same, and end up in the compilation cache.
        """
        if params is not None:
            self._check(params)
        self._device.warmup(params, progress)

    def step(self) -> bool:
        """Apply commands and run up to one decode dispatch; return False if there was nothing to decode."""
        self._apply_commands()
        self._swap_if_due()
        working = self._params is not None and not self._stats.suspended and self._generate(self._params)
        if not working:
            self._deliver()
            if self._stats.suspended or not self._scheduler.running:
                self.latencies.idle()
        self._stats = replace(
            self._stats,
            queue_depth=len(self._scheduler.waiting),
            active=self._scheduler.active,
            compiles=self._device.compiles(),
        )
        return working

    def stream(self) -> None:
        """Pass all tokens of the running requests to their `on_tokens`, however few they are."""
        self._settle()
        self._deliver()
        if self.weight_swap != "restart":
            self._pieces = self._work.pieces((), at_least=1)
        self._deliver()

    # -------------------------------------------------------------------------------------------------- commands

    def _apply_commands(self) -> None:
        while not self._commands.empty():
            command = self._commands.get()
            if not isinstance(command, requests.Add):
                self._settle()
            match command:
                case requests.Add() as add:
                    if self.weight_swap == "drain" and not self._is_at_one_version(add.request):
                        self._leave([add.request.id])
                        self._deliver_partly(add, None)
                        continue
                    prompt = np.asarray(add.request.prompt, np.int32)
                    most = len(prompt) + add.request.params.max_tokens
                    self._scheduler.add(self._work.enter(add, Sequence(add.request.id, prompt.tobytes(), most)))
                case requests.Abort() as abort:
                    self._abort(abort)
                case requests.Swap() as swap:
                    self._next = swap
                    self._swap_if_due()
                case (requests.Suspend() | requests.Resume()) as command:
                    self._stats = replace(self._stats, suspended=isinstance(command, requests.Suspend))

    def _is_at_one_version(self, request: Request) -> bool:
        return request.before is None or all(run.version == self.version for run in request.before.versions)

    def _swap_if_due(self) -> None:
        swap = self._next
        if swap is None:
            return
        self._settle()
        scheduler, stats = self._scheduler, self._stats
        if self.weight_swap == "drain" and (
            scheduler.active or any(sequence.sampled for sequence in scheduler.waiting)
        ):
            scheduler.held = True
            return
        scheduler.held = False
        discarded = self._work.swap_weights(
            swap.version,
            running=self.weight_swap in ("restart", "reprefill"),
            forget_tokens=self.weight_swap == "restart",
        )
        self._params = None  # with layers in a loop, the new parameters exist twice for a moment
        self._params, self._next = self._device.held(swap.params), None
        self._stats = replace(
            stats,
            version=swap.version,
            weight_swaps=stats.weight_swaps + 1,
            tokens_discarded=stats.tokens_discarded + discarded,
        )

    def _abort(self, command: requests.Abort) -> None:
        found = self._work.abort(command.id)
        if found is None:
            return
        add, drawn = found
        self._is_aborted(add, drawn)
        if command.keep:
            self._deliver_partly(add, drawn)

    def _refuse(self) -> bool:
        """End requests whose `allowed` failed, with the error; return True if there were any."""
        refused = self._work.refused()
        for add, drawn, error in refused:
            self._is_aborted(add, drawn)
            self._deliver_partly(add, drawn, error)
        return bool(refused)

    def _is_aborted(self, add: requests.Add, drawn: Unfinished | None) -> None:
        tokens = len(drawn.tokens) if drawn else 0
        self._stats = replace(
            self._stats, aborted=self._stats.aborted + 1, tokens_aborted=self._stats.tokens_aborted + tokens
        )
        self._leave([add.request.id])

    def _deliver_partly(self, add: requests.Add, drawn: Unfinished | None, error: DataError | None = None) -> None:
        now_s = self._clock()
        nothing = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), "abort")
        start_s = drawn.start_s if drawn else now_s
        add.on_done(Result(drawn.completion("abort") if drawn else nothing, start_s, now_s, error))

    # -------------------------------------------------------------------------------------------------- one step

    def _generate(self, params: Held) -> bool:
        """Compute prompts, start requests, decode, deliver; return False if no slot holds a request, or one waits."""
        version = self._stats.version
        assert version is not None
        begun_s = self._clock()
        settled = self._work.needs_report(len(self._in_flight)) and self._settle()
        if self.latencies.note_wait(self._work.waits(), begun_s):
            return settled
        filled = self._work.fill(params, version)
        refused = self._refuse()
        if not self._scheduler.running:
            return self._settle() or self._scheduler.active > 0 or refused
        if self._in_flight and self._work.needs_report(len(self._in_flight)):  # requests have started
            self._settle()
        preempted = self._work.make_room(self._sizes.dispatch_tokens * (1 + len(self._in_flight)))
        if not self._scheduler.running:
            self._stats = replace(self._stats, preemptions=self._stats.preemptions + preempted)
            return True
        steps = self._work.steps()
        if self._refuse() and not self._scheduler.running:
            return True
        until_idle = None if self._in_flight else self._scheduler.until_idle()
        dispatch = self._work.dispatch(params, steps, until_idle)
        self._in_flight.append(InFlight(dispatch, version, filled, preempted, begun_s))
        self._deliver()  # requests that ended in the previous dispatch, while this one runs
        if len(self._in_flight) >= self._most_in_flight:
            self._settle_one()
        return True

    def _settle(self) -> bool:
        """Wait for all dispatches in flight, and account for them; return True if there were any."""
        settled = bool(self._in_flight)
        while self._in_flight:
            self._settle_one()
        return settled

    def _settle_one(self) -> None:
        """Wait for the oldest dispatch in flight, account for it, and remove the requests that it has ended."""
        sent, asked_s = self._in_flight.popleft(), self._clock()
        report = sent.dispatch.report()
        done_s = self._clock()
        progressed = self._work.account(report)
        for add in progressed.begun:
            self.latencies.first(done_s - add.added_s)
        tokens = report.steps * (1 + progressed.extra / max(progressed.decoded - progressed.extra, 1))  # of a slot
        self.latencies.dispatch(done_s, tokens, self._scheduler.active > progressed.firsts)
        if self.weight_swap != "restart":  # which may discard tokens
            self._pieces += self._work.pieces(progressed.ended)
        ended = [self._work.take(slot, end, done_s, sent.version) for slot, end in progressed.ended.items()]
        self._ended += ended
        self._leave([add.request.id for add, _ in ended])
        self._stats = self._stats.after_dispatch(
            report.steps,
            self._sizes.slots,
            progressed,
            sent.filled,
            sent.preempted,
            waits=bool(self._scheduler.waiting),
            prefill_rows=self._sizes.rows,
            prefix_hits=self._scheduler.prefix_hits,
            step_s=done_s - max(sent.begun_s, self._accounted_s),
            device_s=done_s - asked_s,
        )
        self._accounted_s = done_s

    def _deliver(self) -> None:
        pieces, self._pieces = self._pieces, []
        for on_tokens, piece in pieces:
            on_tokens(piece)
        ended, self._ended = self._ended, []
        for add, result in ended:
            add.on_done(result)

    def _leave(self, ids: list[int]) -> None:
        with self._ids_lock:
            self._ids.difference_update(ids)
