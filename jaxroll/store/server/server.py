"""Store server: opens the log, serves calls, fills the prompt buffer and ticks, which ends expired leases.

One event loop decides; one thread commits. RUN/store.addr holds the address. A restarted store tries the port that it
had before, so that most callers reconnect without reading the file again.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxroll import disk, lifeline
from jaxroll.clock import Clock, MonotonicClock, unix_s
from jaxroll.config import Config, digest
from jaxroll.config.derived import (
    max_message_bytes,
    rollouts_at_once,
    rollouts_per_step,
    room_of_sampler,
    update_slot_s,
)
from jaxroll.errors import ConfigError, DataError
from jaxroll.metrics import JsonlTracker
from jaxroll.models.folders import with_transfer_deadline
from jaxroll.policy.routing import Room, UpdateSlots
from jaxroll.policy.step_times import Replanner, StepLoad
from jaxroll.rpc import protocol, tls
from jaxroll.rpc.server import RawServer
from jaxroll.run_paths import RunPaths
from jaxroll.store import messages as msg
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings, status
from jaxroll.store.core.state import FREE, LEASED, State, outstanding
from jaxroll.store.log.commit_log import Log
from jaxroll.store.log.schema import Audit
from jaxroll.store.server.keeper import CLAIM, LEASE, Keeper, Workers
from jaxroll.store.server.service import PAGE_BYTES, Feeder, PromptBuffer, StoreService
from jaxroll.store.server.standby import EpochOfPeer, Standby

ROW_EVERY_S = 2.0
LINGER_S = 30.0  # after the end of the run the store answers until there was no call for this time
_LOCALLY = {
    "0.0.0.0": "127.0.0.1",
    "::": "::1",
    "[::]": "::1",
}  # wildcard address → address for callers on this machine
_GRACE_S = 0.5
_SWITCH_S = 0.0005  # interpreter switch interval: the loop must not wait long for the thread that decodes large members
_TICK_S = 1.0
_PROMPTS_AHEAD = 256
PLAN = "plan"  # `what` of the event of a new plan
_CERTIFICATES_EVERY_S = 3600.0  # interval between checks for certificates that expire soon


async def serve(
    config: Config,
    run_dir: Path,
    feeder: Feeder,
    *,
    host: str,
    port: int,
    ready: Callable[[str], None],
    insecure: bool = False,
    clock: Clock | None = None,
    linger_s: float = LINGER_S,
    vocab_size: Callable[[], int] = lambda: 0,
    epoch_of_peer: EpochOfPeer | None = None,
) -> None:
    """Serve the run in `run_dir` until it is closed and calls have stopped for `linger_s`, or until cancelled.

    `vocab_size` returns the number of token ids of the model, 0 if unknown; it is called at every put. With
    `epoch_of_peer` the other store is the standby, and everything is acknowledged when it is on both disks.

    InfraError if the log or the feeder fails, or another store has the run open.
    """
    settings, before_s = Settings.of(config), sys.getswitchinterval()
    secret, certificates = protocol.load_secret(run_dir), tls.load(run_dir)
    kept = config.store
    log = Log(run_dir, history_bytes=kept.history_mb * 2**20, keep_bytes=kept.keep_trajectories_mb * 2**20)
    try:
        sys.setswitchinterval(_SWITCH_S)
        asyncio.get_running_loop().set_exception_handler(partial(_on_loop_error, log))
        keeper = Keeper(settings, log, clock or MonotonicClock())
        metrics = JsonlTracker(RunPaths(run_dir).metrics)
        try:
            standby = Standby(log, run_dir, keeper.now_s, epoch_of_peer) if epoch_of_peer is not None else None
            store = _Store(config, keeper, metrics, feeder, linger_s, certificates, vocab_size, standby)
            methods = store.service.methods()
            if standby is not None:
                methods = standby.guarded(methods)
            server = RawServer(
                msg.SERVICE,
                methods,
                secret=secret,
                max_message_bytes=max_message_bytes(config),
                position=lambda: keeper.state.position,
                tls=certificates,
                mutual_tls=config.store.mutual_tls,
                refused=store.audit.add_refusal,
            )
            taken = server.bind(host, port or _port_before(run_dir), insecure=insecure)
            if port and taken != port:
                raise ConfigError("--store", f"{host}:{port}", "another process has this port", "Choose another one.")
            await server.start()
            protocol.make_full_collections_rare()
            try:
                address = protocol.address(_LOCALLY.get(host, host), taken)
                _write_address(run_dir, address)
                ready(address)
                await store.run()
            finally:
                if standby is not None:
                    await standby.end()
                await server.stop(_GRACE_S)
                store.service.close()
        finally:
            metrics.close()
    finally:
        sys.setswitchinterval(before_s)
        await log.close()


def _on_loop_error(log: Log, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the store by its log if a callback had no memory, which would fail again and again; report all else."""
    if isinstance(error := context.get("exception"), MemoryError):
        log.fail(error)
    else:
        loop.default_exception_handler(context)


class _Store:
    """Background jobs of the server: ticks, prompts, metric rows, stall detection."""

    def __init__(
        self,
        config: Config,
        keeper: Keeper,
        metrics: JsonlTracker,
        feeder: Feeder,
        linger_s: float,
        certificates: tls.Material | None,
        vocab_size: Callable[[], int],
        standby: Standby | None = None,
    ) -> None:
        self._standby = standby
        self._certificates, self._certificates_at_s = certificates, -math.inf
        self._config, self._keeper, self._metrics, self._linger_s = config.store, keeper, metrics, linger_s
        keeper.decide(ev.Open())
        keeper.on_acked = self._on_acked
        keeper.on_closed = lambda reason: self.audit.by_itself("Close", reason)
        ahead = min(keeper.settings.limiter.window(0), _PROMPTS_AHEAD)
        self._prompts = PromptBuffer(
            feeder, ahead, lambda: keeper.wakeups.notify(LEASE), lambda: keeper.decide(ev.EndData())
        )
        page_bytes = min(PAGE_BYTES, max_message_bytes(config) // 4)
        self.audit = Audit(keeper.log.append, keeper.now_s)
        self._workers = Workers(config, keeper, metrics)
        self.fleet = Fleet(config, keeper, self._workers, metrics) if config.sampler.least_count else None
        self.service = StoreService(
            keeper,
            self._prompts,
            metrics,
            self.audit,
            config_digest=digest(config),
            page_bytes=page_bytes,
            turns=UpdateSlots(config.schedule.rolling_updates, update_slot_s(with_transfer_deadline(config))),
            workers=self._workers,
            vocab_size=vocab_size,
            keep_best=config.learner.keep_best,
            room=Room(*room_of_sampler(config)),
        )
        self._row_at_s = self._named_at_s = keeper.now_s()
        for row in lifeline.restarts("store"):
            metrics.log(row)
        self._paused_at_s = -math.inf

    async def run(self) -> None:
        """Run the jobs until the run is over; the first failure of a job ends all."""
        state = self._keeper.state
        filling = self._prompts.fill(state.cursor, ended=state.data_ended)
        watching = [] if self._standby is None else [self._standby.watch()]
        jobs = [asyncio.ensure_future(job) for job in (self._tick_until_over(), filling, *watching)]
        try:
            await self._until_over(jobs)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            self.audit.flush()
            self._write_row()

    async def _until_over(self, jobs: Sequence[asyncio.Future]) -> None:
        """Wait until the ticker (the first job) returns; the others do not return."""
        pending = set(jobs)
        while jobs[0] in pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()

    async def _tick_until_over(self) -> None:
        keeper, last_s = self._keeper, self._keeper.now_s()
        longest_s = min(_TICK_S, keeper.settings.lease_s / 4, max(0.05, keeper.settings.straggler_deadline_s / 4))
        while not self._is_over():
            now_s = keeper.now_s()
            due = (next_deadline_s(keeper.state, now_s), self._next_straggler_s(now_s))
            due_s = min((at_s for at_s in due if at_s is not None), default=math.inf)
            pause_s = min(longest_s, max(0.005, due_s - keeper.now_s()))
            keeper.tick_due_s = keeper.now_s() + pause_s
            await asyncio.sleep(pause_s)
            if keeper.log.failure is not None:
                raise keeper.log.failure
            keeper.decide(ev.Tick())
            now_s = keeper.now_s()
            self._wake_for_time(last_s, now_s)
            self._watch(now_s)
            self.audit.tick()
            self._workers.tick()
            if self.fleet is not None:
                self.fleet.tick()
            last_s = now_s

    def _wake_for_time(self, last_s: float, now_s: float) -> None:
        """Wake calls that wait for a point in time: the end of a rest of a member or holder, a straggler deadline."""
        state, settings = self._keeper.state, self._keeper.settings
        if any(last_s < s.rests_until_s <= now_s for g in state.index.with_free() for s in g.slots):
            self._keeper.wakeups.notify(LEASE)
        over = (h.rested_at_s + h.rest_s for h in state.holders.values() if h.rested_at_s is not None)
        if any(last_s < at_s <= now_s for at_s in over):
            self._keeper.wakeups.notify(LEASE)
        if straggler_due(state, settings.limiter.batch_groups, settings.straggler_deadline_s, now_s):
            self._keeper.wakeups.notify(CLAIM)

    def _next_straggler_s(self, now_s: float) -> float | None:
        settings = self._keeper.settings
        batch, deadline_s = settings.limiter.batch_groups, settings.straggler_deadline_s
        return next_straggler_s(self._keeper.state, batch, deadline_s, now_s)

    def _watch(self, now_s: float) -> None:
        """Write the store's metric row; report certificates that expire soon and a stalled run, or close the latter."""
        if now_s - self._row_at_s >= ROW_EVERY_S:
            self._row_at_s = now_s
            self._write_row()
        if self._certificates is not None and now_s - self._certificates_at_s >= _CERTIFICATES_EVERY_S:
            self._certificates_at_s = now_s
            for warning in self._certificates.warnings(time.time()):
                self._event(warning)
        if self.service.paused:
            self._paused_at_s = now_s
        report = self._report() if self._is_stalled(now_s) else None
        if report is None or report["closed"]:
            return
        still_s = now_s - self._moved_at_s
        waited_for = "; ".join(f"{who} {why}" for who, why in report["waits"].items()) or "no known role"
        if now_s - self._named_at_s >= self._config.stall_s:
            self._named_at_s = now_s
            self._event(f"no progress for {still_s:.0f} s; waiting for: {waited_for}", what="stall")
        if still_s >= self._config.stall_abort_s:
            why = f"stalled for {still_s:.0f} s; waited for: {waited_for}"
            self._keeper.decide(ev.Close(why))
            self.audit.by_itself("Close", why)

    def _is_stalled(self, now_s: float) -> bool:
        return now_s - self._moved_at_s >= min(self._config.stall_s, self._config.stall_abort_s)

    @property
    def _moved_at_s(self) -> float:
        """Time of the last progress, or of the end of a pause."""
        return max(self._keeper.state.moved_at_s, self._paused_at_s)

    def _is_over(self) -> bool:
        """True if the run is closed and calls have stopped.

        A learner that resumes a complete run compiles before its first call, for minutes if its model is large.
        """
        handshake = self.service.handshake
        limit_s = self._linger_s if "learner" in handshake.callers else self._config.stall_abort_s
        return bool(self._keeper.state.closed) and self._keeper.now_s() - handshake.last_call_s >= limit_s

    def _report(self) -> dict[str, Any]:
        return status(self._keeper.settings, self._keeper.state, bool(self._prompts.ready), self._keeper.now_s())

    def _on_acked(self) -> None:
        self._write_row()
        if self.fleet is not None:
            self.fleet.tick()

    def _write_row(self) -> None:
        report = self._report()
        report["prompts_skipped"] |= self._prompts.skipped
        if self._standby is not None and self._standby.is_missing:
            report |= {"waits": report["waits"] | {"standby": "is not connected, so that nothing is acknowledged"}}
        if self.service.paused:
            report |= {"paused": True, "waits": report["waits"] | {"user": "has paused the run"}}
        if self.fleet is not None:
            report["plan"] = self.fleet.facts()
        self._metrics.log({"t": unix_s(), "role": "store", "kind": "store", **report})

    def _event(self, text: str, **fields: str) -> None:
        self._metrics.log({"t": unix_s(), "role": "store", "kind": "event", "text": text, **fields})


# --- number of samplers (`sampler.least_count`)


class Fleet:
    """Plans how many samplers the run needs when its membership changes, and asks those that it does not need to leave.

    The plan is an event in the metrics, which a supervisor reads to start samplers that are missing. It is in memory; a
    restarted store finds the last one there.
    """

    def __init__(self, config: Config, keeper: Keeper, workers: Workers, metrics: JsonlTracker) -> None:
        self._keeper, self._workers, self._metrics = keeper, workers, metrics
        self._rollouts, self._room = rollouts_per_step(config), rollouts_at_once(config)
        plans = [row for row in metrics.written() if row.get("what") == PLAN and row.get("role") == "store"]
        known = {key: plans[-1][key] for key in ("needed", "most") if type(plans[-1].get(key)) is int} if plans else {}
        settling = keeper.settings.limiter.max_age + 1
        self._replanner = Replanner(config.sampler.least_count, settling, **known)

    @property
    def missing(self) -> int:
        """The number of samplers that are asked for."""
        return self._replanner.missing

    def facts(self) -> dict[str, int]:
        """The plan: samplers that are needed (0: not known yet), present, asked for, and asked to leave."""
        staying, present, plan = self._staying(), len(self._workers.sessions), self._replanner
        leaving = present - len(staying)
        return {"needed": plan.needed, "present": present, "missing": plan.missing, "leaving": leaving}

    def tick(self) -> None:
        """Plan again if that is due."""
        state, present, left = self._keeper.state, self._staying(), self._workers.surplus
        # The slowest sampler leaves first; of equal ones that with the highest number, which joined last.
        number = {name: int(digits) for name in present if (digits := name.rpartition("-")[2]).isdecimal()}
        victims = sorted(present, key=lambda name: (-state.member_s.get(name, 0.0), -number.get(name, 0)))
        plan = self._replanner.plan(self._keeper.now_s(), present, state.acked, self._load(), victims)
        if plan is None or state.closed:
            return
        self._workers.surplus = {name: left[name] for name in left if name not in present}
        self._workers.surplus |= {name: present[name] for name in plan.leave}
        text = [f"plan: {plan.reason}"]
        text += [f"{', '.join(plan.leave)} {'leaves' if len(plan.leave) == 1 else 'leave'}"] if plan.leave else []
        text += [f"{plan.more} more {'is' if plan.more == 1 else 'are'} asked for"] if plan.more else []
        row: dict[str, Any] = {"t": unix_s(), "role": "store", "kind": "event", "what": PLAN, "text": "; ".join(text)}
        numbers = {"needed": plan.needed, "most": self._replanner.most, "more": plan.more}
        self._metrics.log(row | numbers | {"leave": list(plan.leave)})
        self._keeper.wakeups.notify(LEASE)

    def _staying(self) -> dict[str, str]:
        """The sessions of the samplers that are not asked to leave, by name."""
        left = self._workers.surplus
        return {name: session for name, session in self._workers.sessions.items() if left.get(name) != session}

    def _load(self) -> StepLoad | None:
        """The measurements; None while one is not known yet."""
        state, settings = self._keeper.state, self._keeper.settings
        taken_s = [state.member_s[name] for name in self._staying() if state.member_s.get(name)]
        if not taken_s or not state.step_s or not state.next_claim:
            return None
        groups = (state.issued - outstanding(state)) / state.next_claim  # those that the filter rejects count too
        rollouts = max(self._rollouts, round(groups * settings.members_leased))
        return StepLoad(state.step_s, sum(taken_s) / len(taken_s), rollouts, self._room, settings.limiter.alpha)


def _port_before(run_dir: Path) -> int:
    """The port of this run's previous store process; 0 if there was none."""
    try:
        text = disk.read_text(RunPaths(run_dir).store_address)
    except (FileNotFoundError, DataError):  # the file is replaced
        return 0
    port = text.strip().rpartition(":")[2]
    return int(port) if port.isdecimal() and int(port) < 65536 else 0


def _write_address(run_dir: Path, address: str) -> None:
    """Replace the address file; readers see a whole address even after a crash of the machine."""
    disk.replace_text(RunPaths(run_dir).store_address, address + "\n", synced=True)


# --- times at which a tick or a claim is due


def next_deadline_s(state: State, now_s: float) -> float | None:
    """The time at which the next lease expires or the next resting member may be leased; None if there is none.

    A free member whose rest is over is not due any more; an expired lease stays due until the next tick.
    """
    lacking = state.index.lacking.values()
    due = [s.deadline_s for g in lacking for s in g.slots if s.status == LEASED]
    due += [s.rests_until_s for g in lacking for s in g.slots if s.status == FREE and s.rests_until_s > now_s]
    return min(due, default=None)


def straggler_due(state: State, batch: int, deadline_s: float, now_s: float) -> bool:
    """True if an unfinished group among the next `batch` has been leased for longer than `deadline_s`."""
    return any(at_s <= now_s for at_s in _stragglers_s(state, batch, deadline_s))


def next_straggler_s(state: State, batch: int, deadline_s: float, now_s: float) -> float | None:
    """The time at which the next unfinished group of the next `batch` reaches `deadline_s`; None if there is none."""
    return min((at_s for at_s in _stragglers_s(state, batch, deadline_s) if at_s > now_s), default=None)


def _stragglers_s(state: State, batch: int, deadline_s: float) -> Iterator[float]:
    for group in state.index.lacking.values():
        if state.index.place_of(group) >= batch:
            break
        if group.leased_at_s is not None:
            yield group.leased_at_s + deadline_s
