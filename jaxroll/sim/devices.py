"""Engine, trainer, publisher and environment of a simulated run: they take time by the cost models and compute nothing.

The engine batches continuously, as the real one: a free slot takes the next request, prefill and decoding alternate, a
dispatch has `sampler.decode_chunk` steps, requests join and leave between dispatches, and new weights take effect by
`schedule.weight_swap`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from jaxroll import records
from jaxroll.clock import unix_s
from jaxroll.config import Config
from jaxroll.config.derived import micro_batch_tokens, update_in_force_s
from jaxroll.engine.sequence import EngineStats
from jaxroll.envs import registry
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, StepResult
from jaxroll.records import Claim, ClaimedGroup, Finished, Message, Relay, Task, Version, VersionRef, VersionRun
from jaxroll.sim.costs import Cluster
from jaxroll.sim.network import Links
from jaxroll.sim.world import TOKENIZER

ENV = "jaxroll.sim.devices:simulated"
LOGPROB = -0.5
_LETTER = TOKENIZER.encode("b")[0]


def chance(what: str, config: Config, *identity: object) -> random.Random:
    """The random numbers of something in a run, which do not depend on time or order."""
    return random.Random(repr((what, config.run.seed, *identity)))


@functools.lru_cache(4096)
def _answer(length: int, ends: bool) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.full(length, _LETTER, np.int32)
    if ends:
        tokens[-1] = TOKENIZER.eos_id
    return tokens, np.full(length, LOGPROB, np.float32)


# --- Engine


@dataclass(eq=False)
class _Request:
    """A request: tokens of its prompt and its answer, and the versions of those that are sampled here.

    `begun` tokens were sampled elsewhere. The tokens after the first `sent` go to `on_tokens`, `piece` at a time.
    """

    prompt: int
    key: GenerationKey
    length: int
    done: asyncio.Future[None]
    begun: int = 0
    on_tokens: Callable[[Completion], None] | None = None
    piece: int = 1
    sent: int = 0
    start_s: float = 0.0
    sampled: int = 0
    versions: list[tuple[Version, int]] = field(default_factory=list)

    def add(self, version: Version, tokens: int) -> None:
        self.sampled += tokens
        if self.versions and self.versions[-1][0] == version:
            tokens += self.versions.pop()[1]
        self.versions.append((version, tokens))

    def left(self) -> int:
        """Tokens to its end, or to the end of a piece."""
        end = self.length - self.sampled
        return min(end, max(1, self.sent + self.piece - self.sampled)) if self.on_tokens is not None else end

    def pass_on(self, least: int) -> None:
        """Pass on the new tokens if there are `least`."""
        if self.on_tokens is None or self.sampled - self.sent < max(1, least):
            return
        tokens, logprobs = _answer(self.sampled - self.sent, ends=False)
        runs = records.versions_after(tuple(VersionRun(*run) for run in self.versions), self.sent - self.begun)
        self.sent = self.sampled
        self.on_tokens(Completion(tokens, logprobs, runs, ""))


class SimulatedEngine:
    """An engine with its thread, proxy and weight receiver. Its work runs in a task that `close` ends."""

    def __init__(self, cluster: Cluster, config: Config, role: str, links: Links | None = None) -> None:
        self._costs, self._workload = cluster.sampler_costs(int(role.rpartition("-")[2])), cluster.workload
        self._links, self._config, self._role = links or Links(cluster.transfer), config, role
        self._slots, self._chunk = config.sampler.slots, config.sampler.decode_chunk
        self.in_force_s, self.flush_wait_s = update_in_force_s(config), 0.0
        self.engine = self.spans = self.latencies = self
        self.version: Version | None = None
        self._next_version: Version | None = None
        self.paused: str | None = None
        self._waiting: deque[_Request] = deque()
        self._active: list[_Request] = []
        self._kept: dict[tuple[int, int], int] = {}  # tokens in the KV cache of members between two turns
        self._changed = asyncio.Event()
        self._counters = EngineStats()
        self._intervals: list[tuple[int, int, float, float, int]] = []
        self._spans: list[tuple[float, float, int]] = []
        self._step_s = 0.0  # of the last dispatch
        self._task = asyncio.ensure_future(self._work())

    async def close(self) -> None:
        """End the engine's task; an error of it is raised."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    # as a host, an engine and a receiver

    def call(self, job: Callable[[], Any]) -> Future[Any]:
        """Run `job` at once, as the JAX thread does between two steps."""
        done: Future[Any] = Future()
        done.set_result(job())
        return done

    def warmup(self, params: object) -> None:
        """Do nothing: there is nothing to compile."""

    def drop_waiting_swap(self) -> None:
        """Do nothing: the next swap replaces a version that waits."""

    def swap(self, version: Version, params: object) -> None:
        """Use `version` from the next dispatch on, or once all requests have ended (`drain`)."""
        self._next_version = version
        self._changed.set()

    def stats(self) -> EngineStats:
        """The counters."""
        return replace(self._counters, version=self.version, queue_depth=len(self._waiting), active=len(self._active))

    def take(self) -> list[tuple[float, float, int]]:
        """The busy intervals since the last call."""
        taken, self._spans = self._spans, []
        return taken

    def take_intervals(self) -> list[tuple[int, int, float, float, int]]:
        """(group, member, start, end, tokens) of the generations that ended since the last call."""
        taken, self._intervals = self._intervals, []
        return taken

    def percentiles(self) -> dict[str, float]:
        """The seconds of the last decode step."""
        return {"itl_p50_s": self._step_s} if self._step_s else {}

    async def fetch(self, ref: VersionRef, *relays: Relay) -> Any:
        """Take the time of a transfer from the relays, or else from the learner."""
        return await self._links.fetch(self._role, ref.version, [one.name for one in relays])

    def place(self, staged: object) -> dict[str, Any]:
        """No parameters."""
        return {}

    def generating(self) -> set[tuple[int, int]]:
        """See EngineProxy."""
        return {(one.key.group, one.key.member) for one in (*self._waiting, *self._active)}

    async def pause(self, mode: str) -> None:
        """Decode nothing until `resume`, from the next dispatch on; new weights take effect."""
        self.paused = mode
        self._changed.set()

    def resume(self) -> None:
        """Continue after `pause`."""
        self.paused = None
        self._changed.set()

    async def generate(
        self,
        prompt: np.ndarray,
        key: GenerationKey,
        params: SamplingParams,
        *,
        keep: bool = False,
        before: Completion | None = None,
        on_tokens: Callable[[Completion], None] | None = None,
        piece_tokens: int = 1,
        may_sample: object = None,  # the simulated store answers in time
    ) -> Completion:
        """An answer whose length is drawn for this member and turn; cancelling the call aborts it. It begins with the
        tokens `before`; `on_tokens` gets later ones, `piece_tokens` at a time."""
        alike, own = self._workload.answers_alike, chance("answer", self._config, key.group, key.member, len(prompt))
        shared = chance("answers", self._config, key.group).gauss(0.0, 1.0) if alike else 0.0
        score = math.sqrt(1 - alike) * own.gauss(0.0, 1.0) + math.sqrt(alike) * shared
        length = min(wanted := max(1, round(self._workload.answer_tokens.at(score))), params.max_tokens)
        done = asyncio.get_running_loop().create_future()
        begun = 0 if before is None else len(before.tokens)
        request = _Request(len(prompt), key, length, done, begun, on_tokens, piece_tokens, begun, sampled=begun)
        self._waiting.append(request)
        self._changed.set()
        try:
            await done
        except asyncio.CancelledError:
            self._leave(request)
            raise
        self._intervals.append((key.group, key.member, request.start_s, unix_s(), length - begun))
        if keep:
            self._kept[key.group, key.member] = len(prompt) + length
        tokens, logprobs = _answer(length, wanted <= params.max_tokens)
        runs = (*(() if before is None else before.versions), *(VersionRun(*run) for run in request.versions))
        return Completion(tokens, logprobs, runs, "stop" if wanted <= params.max_tokens else "length")

    async def flush(self) -> None:
        """Pass on all tokens of running requests, as of the last dispatch."""
        for request in self._active:
            request.pass_on(1)

    def _leave(self, request: _Request) -> None:
        for where in (self._waiting, self._active):
            if request in where:
                where.remove(request)
        done, tokens = self._counters, request.sampled - request.begun
        self._counters = replace(done, aborted=done.aborted + 1, tokens_aborted=done.tokens_aborted + tokens)
        self._changed.set()

    # the work

    async def _work(self) -> None:
        while True:
            began = unix_s()
            self._changed.clear()  # here, so that requests that arrive during a prefill join after one dispatch
            before_s = await self._swap_in()
            before_s += self._admit()
            if before_s:
                await asyncio.sleep(before_s)
            if self.paused or not self._active:
                if before_s:
                    self._note(began, 0)
                elif self.paused or not (self._waiting and self._may_admit()):
                    await self._changed.wait()
                continue
            await self._decode(began)

    async def _swap_in(self) -> float:
        """Take over new weights if the policy allows it now; the seconds of doing so."""
        policy = self._config.schedule.weight_swap
        if self._next_version is None or (policy in ("drain", "trajectory") and self._active):
            return 0.0
        first, self.version, self._next_version = self.version is None, self._next_version, None
        if first:
            return 0.0
        seconds, running = self._costs.swap_s, self._active
        counters = replace(self._counters, weight_swaps=self._counters.weight_swaps + 1)
        if policy == "restart" and running:
            counters = replace(counters, tokens_discarded=counters.tokens_discarded + sum(r.sampled for r in running))
            for request in running:
                request.sampled, request.versions = 0, []
        if policy in ("restart", "reprefill") and running:
            tokens = sum(request.prompt + request.sampled for request in running)
            counters = replace(counters, prefill_tokens=counters.prefill_tokens + tokens)
            seconds += self._costs.prefill_s(tokens, self._calls(len(running)))
        if policy != "keep_kv":
            self._kept.clear()
        self._counters = counters
        return seconds

    def _calls(self, rows: int) -> int:
        return math.ceil(rows / min(self._config.sampler.prefill_rows, self._slots))

    def _may_admit(self) -> bool:
        """True if requests may start: there are weights, and none wait for the running requests to end."""
        return self.version is not None and self._next_version is None and len(self._active) < self._slots

    def _admit(self) -> float:
        """Start waiting requests in free slots; the seconds of their prefill."""
        tokens = rows = 0
        now_s, prompts = unix_s(), set()
        while self._waiting and self._may_admit():
            request = self._waiting.popleft()
            request.start_s = now_s
            self._active.append(request)
            held = self._kept.pop((request.key.group, request.key.member), 0)
            if not held and not request.begun and request.key.group in prompts:
                continue  # members of a group share the prefill of their prompt
            prompts.add(request.key.group)
            tokens, rows = tokens + max(request.prompt + request.begun - held, 1), rows + 1
        if not rows:
            return 0.0
        calls = self._calls(rows)
        seconds, done = self._costs.prefill_s(tokens, calls), self._counters
        self._counters = replace(
            done,
            prefills=done.prefills + calls,
            prefill_rows=done.prefill_rows + rows,
            prefill_tokens=done.prefill_tokens + tokens,
            step_s=done.step_s + seconds,
        )
        return seconds

    async def _decode(self, began: float) -> None:
        """Dispatch until a request ends or something changes; changes take effect between two dispatches."""
        now_s = asyncio.get_running_loop().time
        running, version = list(self._active), self.version
        assert version is not None, "requests start once there are weights"
        most = min(request.left() for request in running)
        most = math.ceil(most / self._chunk) * self._chunk
        context = sum(request.prompt + request.sampled for request in running) + len(running) * most / 2
        step_s = self._costs.step_s(self._slots if self._costs.all_slots else len(running), context)
        self._step_s, start_s, steps, waited = step_s, now_s(), most, bool(self._waiting)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most * step_s):
                await self._changed.wait()
        if step_s:
            dispatches = math.ceil((now_s() - start_s) / (self._chunk * step_s) - 1e-9)
            steps = min(most, max(1, dispatches) * self._chunk)
        await asyncio.sleep(max(0.0, start_s + steps * step_s - now_s()))
        self._progress(running, version, steps, waited)
        self._note(began, sum(min(steps, request.length) for request in running))

    def _progress(self, running: list[_Request], version: Version, steps: int, waited: bool) -> None:
        """Add `steps` tokens to each request that still runs, and end those that are complete."""
        sampled = finished = 0
        for request in running:
            if request not in self._active or request.done.done():
                continue  # aborted meanwhile
            count = min(steps, request.length - request.sampled)
            request.add(version, count)
            sampled += count
            if request.sampled == request.length:
                finished += 1
                self._active.remove(request)
                request.done.set_result(None)
            else:
                request.pass_on(request.piece)
        done, total = self._counters, steps * self._slots
        self._counters = replace(
            done,
            tokens_decoded=done.tokens_decoded + sampled,
            decode_steps=done.decode_steps + steps,
            dispatches=done.dispatches + math.ceil(steps / self._chunk),
            finished=done.finished + finished,
            slot_steps_busy=done.slot_steps_busy + sampled,
            slot_steps_total=done.slot_steps_total + total,
            slot_steps_busy_while_waiting=done.slot_steps_busy_while_waiting + sampled * waited,
            slot_steps_total_while_waiting=done.slot_steps_total_while_waiting + total * waited,
            step_s=done.step_s + steps * self._step_s,
        )

    def _note(self, began: float, tokens: int) -> None:
        """Record a busy interval, joined with the one before if nothing lay between them."""
        now = unix_s()
        if self._spans and began - self._spans[-1][1] < 1e-6:
            first, _, before = self._spans.pop()
            began, tokens = first, before + tokens
        self._spans.append((began, now, tokens))


# --- Learner


class TrainedStep(NamedTuple):
    """A step: its groups, and the time of its start."""

    step: int
    groups: tuple[int, ...]
    at_s: float


def _finished(group: ClaimedGroup) -> list[Finished]:
    return [member.outcome for member in group.members if isinstance(member.outcome, Finished)]


@dataclass
class Streamed:
    """The groups of a claim so far and their tokens; micro-batches computed before it, and tokens that wait for one."""

    step: int = -1
    groups: set[int] = field(default_factory=set)
    tokens: int = 0
    waiting: int = 0
    batches: int = 0


class SimulatedTrainer:
    """A trainer whose steps take the time of their tokens; a row of metrics without losses."""

    lora = reference = state = spec = None
    sends_adapters, prepares_ahead = False, True
    warmup = release = set_params = abstract_state = staticmethod(lambda *_: None)
    base_digest, publishable_params = staticmethod(str), staticmethod(dict)

    def __init__(self, cluster: Cluster, config: Config) -> None:
        self._costs, self._config, self.trained = cluster.learner, config, list[TrainedStep]()
        self._size, self.streamed = micro_batch_tokens(config.learner), Streamed()
        device = SimpleNamespace(platform="cpu", device_kind="simulated")
        mesh = SimpleNamespace(size=1, shape={}, devices=np.array([device]))
        self.layout = SimpleNamespace(mesh=mesh)
        self.programs = SimpleNamespace(recipe=SimpleNamespace(attention="none"))

    def prepare(self, claim: Claim) -> Any:
        """The claim and the figures of its data."""
        done = [outcome for group in claim.groups for outcome in _finished(group)]
        ages = Counter[int]()
        for outcome in done:
            for run in outcome.versions:
                ages[claim.step - run.version.step] += run.count
        if not self.streamed.groups <= {group.group for group in claim.groups}:  # some were computed in vain
            self.streamed = Streamed()
        tokens, streamed, rewards = sum(ages.values()), self._added(claim), [outcome.reward for outcome in done]
        every = streamed.batches + (batches := math.ceil(streamed.waiting / self._size))
        row = {
            "samples": len(done), "tokens_trained": tokens, "tokens_computed": tokens, "micro_batches": every,
            "age_mean": sum(age * count for age, count in ages.items()) / max(tokens, 1),
            "age_max": max(ages, default=0), "age_hist": {str(age): ages[age] for age in sorted(ages)},
            "reward_mean": float(np.mean(rewards)) if rewards else 0.0, "masked_tokens": 0, "compiles": 0,
            "padding_waste": 1 - streamed.tokens / (every * self._size) if every else 0.0,
            "micro_batches_early": streamed.batches,
        }  # fmt: skip
        return SimpleNamespace(claim=claim, row=row, train_s=self._train_s(claim.step, batches))

    async def stream(self, part: Claim) -> None:
        """Take the time of the micro-batches that the groups of `part` fill, as `Trainer.stream` does."""
        streamed = self._added(part)
        batches, streamed.waiting = divmod(streamed.waiting, self._size)
        streamed.batches += batches
        await asyncio.sleep(self._train_s(part.step, batches) - self._train_s(part.step, 0))

    def _added(self, claim: Claim) -> Streamed:
        """All groups of its step so far, with those of `claim`. Groups whose rewards are equal are not computed."""
        if self.streamed.step != claim.step:
            self.streamed = Streamed(claim.step)
        for group in claim.groups:
            outcomes = _finished(group)
            if group.group not in self.streamed.groups and len({outcome.reward for outcome in outcomes}) > 1:
                tokens = sum(self._row_tokens(outcome) for outcome in outcomes)
                self.streamed.tokens += tokens
                self.streamed.waiting += tokens
            self.streamed.groups.add(group.group)
        return self.streamed

    def _train_s(self, step: int, batches: int) -> float:
        factor = self._costs.jitter.draw(chance("step", self._config, step))
        return factor * self._costs.train_s(batches * self._size, batches)

    def _row_tokens(self, outcome: Finished) -> int:
        """The tokens of a rollout in the learner's rows: without its prompt, if that is shared."""
        first = outcome.segments[0]
        shared = len(first.tokens) - 1 if self._config.learner.shared_prompt_tokens and not first.loss_mask.any() else 0
        return sum(len(segment.tokens) for segment in outcome.segments) - shared

    def dispatch_step(self, ready: Any) -> Any:
        """The step under way."""
        loop, claim = asyncio.get_running_loop(), ready.claim
        self.trained.append(TrainedStep(claim.step, tuple(group.group for group in claim.groups), loop.time()))
        end_s, self.streamed = loop.time() + ready.train_s, Streamed()
        return SimpleNamespace(is_done=lambda: loop.time() >= end_s, end_s=end_s, row=ready.row)

    async def await_step(self, running: Any) -> dict[str, Any]:
        """Wait for the end of the step; its row."""
        await asyncio.sleep(max(0.0, running.end_s - asyncio.get_running_loop().time()))
        return dict(running.row)


# --- Environment


@registry.register("simulated")
class Simulated:
    """A task of some turns; each step takes a while, and the last one gives the reward."""

    step_limit_s, max_turns = 86400.0, 2**31

    def __init__(self, pool: Any, config: object) -> None:
        self._pool = pool  # `SimulatedPool` of the role
        self._workload = self._pool.workload

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        """The question."""
        self._index, self._chance = task.index, self._pool.episode(task.index)
        self._left = max(1, round(self._workload.turns.draw(self._chance)))
        self._rewarded = self._workload.rewarded.draw(chance("rewarded", self._pool.config, task.index))
        return task.messages

    async def step(self, answer: str) -> StepResult:
        """The next question, or the end."""
        await asyncio.sleep(max(0.0, self._workload.env_s.draw(self._chance)))
        self._left -= 1
        if not self._left:
            return StepResult(done=True, reward=float(self._chance.random() < self._rewarded))
        length = max(1, round(self._workload.reply_tokens.draw(self._chance)))
        return StepResult(messages=(Message("user", "a" * length),), done=False)

    async def close(self) -> None:
        """Nothing to close."""
