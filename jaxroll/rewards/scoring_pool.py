"""A pool of scoring processes with an asyncio interface; processes that hang or die are replaced.

Threads: one. Everything except `start()` runs on the thread of the event loop that first calls `score()`.
Queues: items wait in the pool until a worker has room; a worker holds a few, scores them in order and answers one by
one, so it works on its first unanswered item.
Waits: `score()` waits for its item; nothing waits for a worker that restarts.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
from collections import Counter, deque
from dataclasses import dataclass, field

from jaxroll import protocols
from jaxroll.errors import DataError, InfraError
from jaxroll.rewards.processes import Ready, Scored, ScoreItem, ScoringProcess, WorkerSettings, Working
from jaxroll.rewards.remote import RemoteParts
from jaxroll.rewards.sandbox import Restrictions
from jaxroll.rewards.scorers import MIN_ANSWER_CHARS, Graded

_LOG = logging.getLogger(__name__)
# Items per worker: enough to hide the latency of the pipe, few enough to limit a hang's effect. They are sent in whole
# batches, when there is room for one: a batch of one item costs as much, and its programs run one after another.
_MAX_IN_FLIGHT = 32
_BATCH = _MAX_IN_FLIGHT // 2
_STUCK_S = 0.05  # most scorers take microseconds
_START_LIMIT_S = 120.0  # for importing sympy on a loaded machine
_MAX_FAILED_STARTS = 3  # of a worker that ends before it is ready
# When the operating system refuses a process (no process, descriptor or memory left), the next attempt follows after a
# pause that doubles. After eight refusals (about half a minute), a pool without any worker gives up.
_PAUSE_FIRST_S, _PAUSE_MAX_S, _MAX_REFUSED_STARTS = 0.25, 15.0, 8
_MAX_ITEM_CHARS = 8 << 20
_ENDING_S = 0.2  # between a worker's last byte and its exit status; the event loop waits
_CLOSED = "it is closed"
_DEATHS_TO_BE_GUILTY = 2  # one retry, because a worker may die for another reason (OOM killer, kill -9)
# A worker is slow if each of its last items took more than `_STUCK_S` and `_SLOWER` times as long as those of another.
# It gets an item if that one could not answer sooner. After a rest of `_REST` such times it gets one as a trial: it may
# have recovered, and the delay of the trials is a twentieth of the time.
_RECENT, _SLOWER, _REST = 4, 2.0, 20.0
_DEATH_S = 1.0  # a worker that dies at once is no quick one


@dataclass(eq=False)
class _Job:
    item: ScoreItem
    future: asyncio.Future[Scored] | None
    deaths: int = 0

    def settle(self, result: Scored | Exception) -> None:
        """Deliver the result to the caller, unless it was cancelled."""
        if self.future is None or self.future.done():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


@dataclass(eq=False)
class _Worker:
    process: ScoringProcess
    ready: bool = False
    jobs: deque[_Job] = field(default_factory=deque)  # sent and unanswered, in order
    progress_s: float = 0.0  # loop time of the last reply, or of the first item sent to an idle worker
    begun_s: float = 0.0  # the same, without replies that say only that it works
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))  # seconds of its last items and deaths
    timer: asyncio.TimerHandle | None = None
    failed_starts: int = 0  # since the worker was ready
    refused_starts: int = 0  # by the operating system, since the last start that succeeded
    is_slow: bool = False  # when it last answered or died
    is_down: bool = False  # its process is gone, and `timer` starts the next one


def _room(worker: _Worker) -> int:
    """The number of items that may be sent to the worker now, a multiple of a batch."""
    return (_MAX_IN_FLIGHT - len(worker.jobs)) // _BATCH * _BATCH


class ScoringPool:
    """`workers` processes that score answers, each item within `time_limit_s`.

    A worker that hangs, dies or needs more than `memory_mb` of address space is replaced. Its current item raises
    DataError; its other items go to another worker. Before the first item, workers import `libraries` (if installed)
    and `modules`, which may register scorers, and load `functions` (`grading.load`). `programs` adds the scorer `code`,
    which runs answers in the sandbox. A failed start is repeated (`failed_starts` counts all of them). When no worker
    can be started, `gave_up` is set, `broken` holds the reason, and every score raises InfraError. After `idle_s`
    without work (0: never) all workers end; the next item starts them.
    """

    def __init__(
        self,
        workers: int,
        *,
        time_limit_s: float = 5.0,
        memory_mb: int = 1024,
        libraries: tuple[str, ...] = ("reasoning_gym",),
        modules: tuple[str, ...] = (),
        functions: tuple[str, ...] = (),
        max_answer_chars: int = MIN_ANSWER_CHARS,
        programs: bool = False,
        idle_s: float = 0.0,
    ) -> None:
        if workers < 1 or time_limit_s <= 0:
            raise ValueError(f"workers = {workers} and time_limit_s = {time_limit_s} must be above 0")
        self.time_limit_s = time_limit_s
        self.restarts = self.failed_starts = 0
        self.found_slow = 0  # times that a worker became slow, or ended often, in comparison with another
        self.rejected: Counter[str] = Counter()  # answers that a scorer's guard rejected, by reason
        self.failed: Counter[str] = Counter()  # items without a score, by cause
        self.remote: RemoteParts | None = None  # for parts of the reward that need the network
        self.gave_up = asyncio.Event()
        self.restrictions: Restrictions | None = None  # of the workers; None until the first has started
        self._count = workers
        self.sleeps = 0  # times that all workers ended because there was no work
        self._idle_s, self._worked_s, self._asleep = idle_s, 0.0, False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._settings = WorkerSettings(
            os.getpid(), time_limit_s, memory_mb << 20, libraries, modules, functions, max_answer_chars, programs
        )
        self._workers: list[_Worker] = []
        self._waiting: deque[_Job] = deque()
        self._ids = itertools.count()
        self._bound: asyncio.AbstractEventLoop | None = None
        self._dispatch_planned = False
        self._out_of_order = "it was not started"

    def start(self) -> None:
        """Start the processes without waiting for them. InfraError when the operating system refuses one.

        Call this before JAX or gRPC is loaded, on a long-lived thread: the kernel kills the workers when it ends.
        """
        if self._workers:
            return
        try:
            for _ in range(self._count):
                self._workers.append(_Worker(ScoringProcess(self._settings)))
        except OSError as error:
            self._give_up(f"a worker cannot be started: {error}")
            raise InfraError(f"the scoring pool does not work: {self.broken}") from error
        self._out_of_order = ""

    @property
    def broken(self) -> str:
        """The reason why the pool does not work; '' while it works."""
        return self._out_of_order

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return [worker.process.pid for worker in self._workers if not worker.is_down]

    @property
    def ready(self) -> int:
        """The number of workers that have reported to the event loop that they are ready."""
        return sum(worker.ready for worker in self._workers)

    async def score(self, env_args: str, answer: str) -> float:
        """The raw score of `answer`; 0, and counted in `rejected`, if the scorer's guard rejects it.

        Raises DataError when the item has no score (its scorer raised, hung, died), InfraError when the pool has ended.
        """
        return (await self._scored(env_args, answer, "")).score

    async def grade(self, env_args: str, completion: str, grading: str) -> Graded:
        """The answer in `completion` and the values of its reward parts; `grading` is JSON of `grading.Grading`.

        Raises as `score` does.
        """
        found = await self._scored(env_args, completion, grading)
        return Graded(found.answer, found.values, found.rejected)

    async def _scored(self, env_args: str, answer: str, grading: str) -> Scored:
        protocols.text(env_args, "the arguments of a score", _MAX_ITEM_CHARS)
        protocols.text(answer, "the answer to score", _MAX_ITEM_CHARS)
        loop = asyncio.get_running_loop()
        self._bind(loop)
        future: asyncio.Future[Scored] = loop.create_future()
        self._waiting.append(_Job(ScoreItem(next(self._ids), env_args, answer, grading), future))
        self._worked_s = loop.time()
        self._wake()
        self._plan_dispatch()
        return await future

    def close(self) -> None:
        """Kill the workers; pending scores raise InfraError. May be called twice."""
        if self.remote is not None:
            self.remote.close()
        if self._out_of_order != _CLOSED:
            self._end(_CLOSED)

    # --- the loop

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._bound is None:
            raise InfraError("the scoring pool serves no event loop yet")
        return self._bound

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._out_of_order:
            raise InfraError(f"the scoring pool does not work: {self._out_of_order}")
        if self._bound is loop:
            return
        if self._bound is not None and not self._bound.is_closed():
            raise InfraError("the scoring pool belongs to another event loop, which is still open")
        self._bound = loop
        self._dispatch_planned = self._asleep = False
        self._look_timer = None
        self._watch_idleness()
        for job in itertools.chain(self._waiting, *(worker.jobs for worker in self._workers)):
            job.future = None  # its event loop is closed
        for worker in self._workers:
            if worker.is_down:
                self._restart(worker)
            else:
                self._watch(worker)

    def _watch(self, worker: _Worker) -> None:
        self._loop.add_reader(worker.process.output_descriptor, self._on_replies, worker)
        worker.progress_s = self._loop.time()
        worker.timer = None
        self._arm(worker)

    def _plan_dispatch(self) -> None:
        # Once per iteration of the event loop, so that requests of the same iteration are sent together.
        if not self._dispatch_planned:
            self._dispatch_planned = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_planned = False
        shares = {worker: list[_Job]() for worker in self._workers if worker.ready and not self._is_stuck(worker)}
        usual_s = min((min(worker.took_s) for worker in shares if worker.took_s), default=0.0) or 1.0
        ends_s = lambda worker: self._answer_s(worker, len(shares[worker]), usual_s)  # noqa: E731
        while (job := self._next_job()) is not None:
            worker = min((one for one in shares if len(shares[one]) < _room(one)), key=ends_s, default=None)
            if worker is None or (self._is_slow(worker, usual_s) and ends_s(worker) > min(map(ends_s, shares))):
                self._waiting.appendleft(job)
                self._look_again(worker is not None)
                break
            shares[worker].append(job)
        for worker, share in shares.items():
            if share:
                self._send(worker, share)

    def _send(self, worker: _Worker, jobs: list[_Job]) -> None:
        if not worker.jobs:
            worker.progress_s = worker.begun_s = self._loop.time()
        worker.jobs.extend(jobs)
        sent = True
        for first in range(0, len(jobs), _BATCH):
            sent = worker.process.send(job.item for job in jobs[first : first + _BATCH])
        if not sent:
            self._loop.add_writer(worker.process.input_descriptor, self._on_room, worker)
        self._arm(worker)

    def _is_stuck(self, worker: _Worker) -> bool:
        """True while the worker works on a slow item: other workers are faster."""
        return bool(worker.jobs) and self._loop.time() - worker.progress_s > _STUCK_S

    def _is_slow(self, worker: _Worker, usual_s: float) -> bool:
        return min(worker.took_s, default=0.0) > max(_STUCK_S, _SLOWER * usual_s)

    def _answer_s(self, worker: _Worker, more: int, usual_s: float) -> tuple[float, int]:
        """Seconds until the worker would answer one more item after `more` new ones, and the number of its items."""
        count, item_s = len(worker.jobs) + more, usual_s
        if self._is_slow(worker, usual_s):
            own_s = min(worker.took_s)
            if count or self._loop.time() - worker.progress_s <= _REST * own_s:  # otherwise it gets one as a trial
                item_s = own_s
        return (count + 1) * item_s, count

    def _look_again(self, is_needed: bool) -> None:
        """Dispatch later if items wait for a worker that may be stuck, while a slower one has room."""
        if is_needed and self._look_timer is None:
            self._look_timer = self._loop.call_later(_STUCK_S, self._on_look_timer)

    def _on_look_timer(self) -> None:
        self._look_timer = None
        self._plan_dispatch()

    def _next_job(self) -> _Job | None:
        while self._waiting:
            job = self._waiting.popleft()
            if job.future is not None and not job.future.done():  # otherwise the caller was cancelled
                return job
        return None

    def _note_restrictions(self, restrictions: Restrictions) -> None:
        """Warn once if a capability of scorers is not restricted on this machine."""
        if self.restrictions is None and restrictions.missing:
            _LOG.warning("scoring workers: %s. See `jaxroll doctor`", restrictions)
        self.restrictions = restrictions

    def _on_room(self, worker: _Worker) -> None:
        worker.progress_s = self._loop.time()  # the worker reads; time in the pipe does not count for the item
        if worker.process.flush():
            self._loop.remove_writer(worker.process.input_descriptor)

    def _on_replies(self, worker: _Worker) -> None:
        replies, alive = worker.process.receive()
        if replies:
            worker.progress_s = self._worked_s = self._loop.time()
        self._note_durations(worker, sum(isinstance(reply, Scored) for reply in replies))
        for reply in replies:
            if isinstance(reply, Ready):
                worker.ready, worker.failed_starts = True, 0
                self._note_restrictions(reply.restrictions)
                self._disarm(worker)  # the timer was set to the longer limit of a start
            elif isinstance(reply, Working):
                continue
            elif worker.jobs and worker.jobs[0].item.id == reply.id:
                self.rejected.update(reply.rejected)
                self._settle(worker.jobs.popleft(), reply)
            else:
                alive = False  # a reply to another item: the worker is corrupted
        if not alive:
            self._replace(worker, hung=False)
        elif self._waiting:
            self._plan_dispatch()

    def _note_durations(self, worker: _Worker, answers: int) -> None:
        if answers:
            now_s = self._loop.time()
            worker.took_s.extend([(now_s - worker.begun_s) / answers] * min(answers, _RECENT))
            worker.begun_s = now_s
            self._note_slow(worker)

    def _note_slow(self, worker: _Worker) -> None:
        was_slow, quickest_s = worker.is_slow, min(min(one.took_s) for one in self._workers if one.took_s)
        worker.is_slow = self._is_slow(worker, quickest_s)
        self.found_slow += worker.is_slow and not was_slow

    # --- no workers while there is no work

    def _watch_idleness(self) -> None:
        self._worked_s, self._idle_timer = self._loop.time(), None
        if self._idle_s:
            self._idle_timer = self._loop.call_later(self._idle_s, self._on_idle_timer)

    def _on_idle_timer(self) -> None:
        left_s = self._worked_s + self._idle_s - self._loop.time()
        if self._waiting or any(worker.jobs or not worker.ready for worker in self._workers):
            left_s = self._idle_s
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._on_idle_timer)
            return
        self._idle_timer, self._asleep = None, True
        self.sleeps += 1
        for worker in self._workers:
            self._unwatch(worker)
            worker.process.kill()
            worker.process.last_words()
            worker.ready, worker.is_down = False, True

    def _wake(self) -> None:
        """Start the workers again if they were ended while there was no work; items wait until one is ready."""
        if not self._asleep:
            return
        self._asleep = False
        self._watch_idleness()
        for worker in list(self._workers):
            self._restart(worker)

    # --- deadlines and replacement

    def _arm(self, worker: _Worker) -> None:
        if worker.timer is None and (worker.jobs or not worker.ready):
            worker.timer = self._loop.call_at(self._deadline_s(worker), self._on_timer, worker)

    def _deadline_s(self, worker: _Worker) -> float:
        return worker.progress_s + (self.time_limit_s if worker.ready else _START_LIMIT_S)

    def _on_timer(self, worker: _Worker) -> None:
        worker.timer = None
        if self._loop.time() >= self._deadline_s(worker) and (worker.jobs or not worker.ready):
            # The event loop may have been busy meanwhile, so replies that have arrived count first.
            before = worker.process
            self._on_replies(worker)
            if worker.process is not before or worker not in self._workers:
                return
            if self._loop.time() >= self._deadline_s(worker) and (worker.jobs or not worker.ready):
                self._replace(worker, hung=True)
                return
        self._arm(worker)

    def _replace(self, worker: _Worker, *, hung: bool) -> None:
        """Kill the worker's process, fail or requeue its items, and start a new process."""
        self._unwatch(worker)
        status = worker.process.kill(grace_s=0.0 if hung else _ENDING_S)
        hung = hung or status == -signal.SIGXCPU
        ending = f"signal {-status}" if status < 0 else f"exit status {status}"
        last_words = worker.process.last_words()
        if worker.ready and worker.jobs:
            if not hung:  # otherwise it is the item's fault
                worker.took_s.append(max(_DEATH_S, self._loop.time() - worker.begun_s))
                self._note_slow(worker)
            self._blame(worker.jobs.popleft(), ending, hung)
            self._waiting.extendleft(reversed(worker.jobs))
            worker.jobs.clear()
        elif not worker.ready:
            worker.failed_starts, self.failed_starts = worker.failed_starts + 1, self.failed_starts + 1
            if worker.failed_starts >= _MAX_FAILED_STARTS:
                self._workers.remove(worker)
                if not self._workers:
                    why = "it took too long" if hung else ending
                    self._give_up(f"its workers do not start ({why}). {last_words}")
                return
        self.restarts += 1
        worker.ready, worker.is_down = False, True
        self._restart(worker)
        self._plan_dispatch()  # requeued items may go to another worker at once

    def _restart(self, worker: _Worker) -> None:
        """Start a process for a worker that has none; if the operating system refuses it, retry later."""
        worker.timer = None
        try:
            worker.process = ScoringProcess(self._settings)
        except OSError as error:
            worker.refused_starts, self.failed_starts = worker.refused_starts + 1, self.failed_starts + 1
            _LOG.warning("a scoring worker cannot be started: %s", error)
            if worker.refused_starts >= _MAX_REFUSED_STARTS and all(other.is_down for other in self._workers):
                self._give_up(f"its workers cannot be started: {error}")
                return
            pause_s = min(_PAUSE_FIRST_S * 2 ** min(worker.refused_starts - 1, 10), _PAUSE_MAX_S)
            worker.timer = self._loop.call_later(pause_s, self._restart, worker)
            return
        worker.refused_starts, worker.is_down = 0, False
        self._watch(worker)

    def _blame(self, job: _Job, ending: str, hung: bool) -> None:
        if hung:
            self.failed["timeout"] += 1
            job.settle(DataError(f"scoring took longer than {self.time_limit_s:g} s and was killed"))
            return
        job.deaths += 1
        if job.deaths < _DEATHS_TO_BE_GUILTY:
            self._waiting.appendleft(job)
        else:
            self.failed["died"] += 1
            job.settle(DataError(f"the scoring process died ({ending}) on this item, {job.deaths} times"))

    def _settle(self, job: _Job, reply: Scored) -> None:
        if reply.error:
            self.failed[reply.cause] += 1
            job.settle(DataError(f"scoring failed: {reply.error}"))
        else:
            job.settle(reply)

    def _unwatch(self, worker: _Worker) -> None:
        if self._bound is None or self._bound.is_closed():
            return
        if not worker.is_down:
            self._loop.remove_reader(worker.process.output_descriptor)
            self._loop.remove_writer(worker.process.input_descriptor)
        self._disarm(worker)

    def _disarm(self, worker: _Worker) -> None:
        if worker.timer is not None:
            worker.timer.cancel()
            worker.timer = None

    def _give_up(self, reason: str) -> None:
        """End the pool with `reason`; the role that uses it ends too (see `gave_up`)."""
        self._end(reason)
        self.gave_up.set()

    def _end(self, reason: str) -> None:
        self._out_of_order = reason
        for timer in (self._idle_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        jobs = [*self._waiting, *itertools.chain.from_iterable(worker.jobs for worker in self._workers)]
        self._waiting.clear()
        for worker in self._workers:
            self._unwatch(worker)
            if not worker.is_down:
                worker.process.kill()
                worker.process.last_words()
        self._workers = []
        if self._bound is not None and not self._bound.is_closed():
            for job in jobs:
                job.settle(InfraError(f"the scoring pool does not work: {reason}"))
