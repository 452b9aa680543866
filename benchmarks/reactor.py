"""Reactors compared with processes and Ray: rounds of a hub and its workers, and a Q-learner that must be the same.

    python -m benchmarks.reactor [--quick] [--only=PART ...] [--arms=reactor,processes,ray] [--rounds=3]

A round: the hub sends a message to every worker, each answers, and the hub takes all answers. Hub and workers are the
same objects in each arm: reactors on threads of one process (`jaxroll.sim.reactor`), processes with a pipe each, or
actors of Ray, which get the message from its object store. The parts are the benchmarks 1, 2, 3 and 5 of J. Kwok,
M. Lohstroh and E. A. Lee (arXiv 2312.04704), who compare Lingua Franca with Ray:

- `actors`: 2, 4, 8 and 16 workers sleep 0.5 s and send the message back, an array of 10 MB. `overhead_ms`: the median
  time of a round without the sleep.
- `sizes`: the same for 16 workers and arrays of 1 KB to 500 MB; a size that does not fit into memory is left out.
  `growth`: the overhead at the largest size over that at the smallest.
- `gym`: 15 environments of a kind take random actions, with a barrier a step, for 10,000 steps.
- `q_learning`: 16 workers play 100 steps of Blackjack each with the hub's Q-network, which then makes one step of Adam
  on the first rows of its replay. `equal`: all arms and runs end with the same network, bit for bit. `reward`: its mean
  reward; `random_reward` is that of random actions.

`over_reactor` is the time of a round over that of reactors in the same alternation. Python has one lock for all
threads, so workers that compute in Python do not run at the same time in reactors; processes and Ray copy the messages
instead. The last line is one JSON object; an arm whose package is not installed is left out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import psutil

from benchmarks.lib.report import Runs, arguments, finish, ratio, say, spread
from jaxroll.sim import reactor
from jaxroll.sim.reactor import Moment, Program, Reactor, connect

ARMS = ("reactor", "processes", "ray")
PARTS = ("actors", "sizes", "gym", "q_learning")
DEADLINE_S = 120.0  # of a round
SLEEP_S = 0.5
ARRAY = 1_310_720  # float64: 10 MB
SIZES_KB = (1, 100, 10_240, 102_400, 512_000)
COPIES = 3  # of the array for each worker: sent, received, and one on its way
ENVS = ("CartPole-v1", "Pendulum-v1", "Blackjack-v1")


class Worker(Protocol):
    """A worker: one answer for each message."""

    def answer(self, message: Any) -> Any: ...


class Hub(Protocol):
    """The center of a round."""

    def message(self) -> Any: ...

    def take(self, answers: Sequence[Any]) -> None: ...


@dataclass(frozen=True)
class Case:
    """One measured setting. `threads`: of the reactors; a sleeping worker needs one, as it needs a process."""

    name: str
    workers: int
    rounds: int
    worker: partial[Any]  # of an index → Worker
    hub: Callable[[], Hub]
    threads: int
    sleep_s: float = 0.0


# --- Parts


class Echo:
    """Sleeps, and sends the message back."""

    def __init__(self, sleep_s: float, index: int) -> None:
        self._sleep_s = sleep_s

    def answer(self, message: Any) -> Any:
        time.sleep(self._sleep_s)
        return message


class Same:
    """Sends the same array in every round."""

    def __init__(self, count: int) -> None:
        self._array = np.zeros(count)

    def message(self) -> Any:
        return self._array

    def take(self, answers: Sequence[Any]) -> None:
        assert all(answer.nbytes == self._array.nbytes for answer in answers)


class RandomSteps:
    """An environment that takes one random action for each message."""

    def __init__(self, name: str, index: int) -> None:
        import gymnasium

        self._env = gymnasium.make(name)
        self._env.action_space.seed(index)
        self._env.reset(seed=index)

    def answer(self, message: Any) -> Any:
        seen, reward, ended, cut, _ = self._env.step(self._env.action_space.sample())
        if ended or cut:
            self._env.reset()
        return seen, float(reward), ended or cut


class Barrier:
    """Sends nothing, and waits for all."""

    def message(self) -> Any:
        return 0

    def take(self, answers: Sequence[Any]) -> None:
        self.last = answers


Weights = tuple[np.ndarray, ...]  # [3, 32], [32], [32, 2], [2]
ROW = 9  # observation, action, reward, whether it is the last, next observation
HIDDEN, EPSILON, GAMMA, RATE, REPLAY, TARGET_EVERY = 32, 0.1, 0.99, 0.01, 20_000, 10
SCALE = np.array([1 / 32, 1 / 11, 1.0], np.float32)  # of the player's sum, the dealer's card, a usable ace


def hidden(weights: Weights, seen: np.ndarray) -> np.ndarray:
    """The hidden layer [N, 32] for observations [N, 3]."""
    return np.maximum((seen * SCALE) @ weights[0] + weights[1], 0)


def values(weights: Weights, seen: np.ndarray) -> np.ndarray:
    """The Q-values [N, 2] of observations [N, 3]."""
    return hidden(weights, seen) @ weights[2] + weights[3]


class Blackjack:
    """Plays `steps` of Blackjack-v1 for each message: a Q-network, or None for random actions."""

    def __init__(self, steps: int, index: int) -> None:
        import gymnasium

        self._steps, self._env, self._chance = steps, gymnasium.make("Blackjack-v1"), np.random.default_rng(index)
        self._seen = self._env.reset(seed=index)[0]

    def answer(self, message: Weights | None, epsilon: float = EPSILON) -> np.ndarray:
        """Rows [steps, ROW]."""
        rows = np.empty((self._steps, ROW), np.float32)
        for row in rows:
            before = np.array(self._seen, np.float32)
            if message is None or self._chance.random() < epsilon:
                action = int(self._chance.integers(2))
            else:
                action = int(values(message, before).argmax())
            self._seen, reward, ended, *_ = self._env.step(action)
            row[:] = (*before, action, reward, ended, *self._seen)
            if ended:
                self._seen = self._env.reset()[0]
        return rows

    def reward(self, message: Weights | None) -> float:
        """The mean reward of an episode."""
        rows = self.answer(message, epsilon=0.0)
        return float(rows[:, 4].sum() / max(rows[:, 5].sum(), 1))


class Learner:
    """The Q-network, its replay and Adam (β₁ 0.9, β₂ 0.999, ε 1e-8)."""

    def __init__(self, batch: int, replay: int = REPLAY) -> None:
        chance = np.random.default_rng(0)
        first = chance.normal(0, 1 / np.sqrt(3), (3, HIDDEN)), np.zeros(HIDDEN)
        second = chance.normal(0, 1 / np.sqrt(HIDDEN), (HIDDEN, 2)), np.zeros(2)
        self.weights: Weights = tuple(array.astype(np.float32) for array in (*first, *second))
        self._target, self._batch, self._replay, self._step = self.weights, batch, replay, 0
        self._rows = np.empty((0, ROW), np.float32)
        self._mean = self._square = tuple(np.zeros_like(array) for array in self.weights)

    def message(self) -> Weights:
        return self.weights

    def take(self, answers: Sequence[np.ndarray]) -> None:
        """Add the rows, and make one step on the first rows of the replay."""
        self._rows = np.concatenate([self._rows, *answers])[-self._replay :]
        self._step += 1
        gradients = self._gradients(self._rows[: self._batch])
        pairs = list(zip(self._mean, self._square, gradients, strict=True))
        self._mean = tuple(0.9 * mean + 0.1 * g for mean, _, g in pairs)
        self._square = tuple(0.999 * square + 0.001 * g * g for _, square, g in pairs)
        rate = RATE * np.sqrt(1 - 0.999**self._step) / (1 - 0.9**self._step)
        moved = zip(self.weights, self._mean, self._square, strict=True)
        self.weights = tuple((w - rate * m / (np.sqrt(s) + 1e-8)).astype(np.float32) for w, m, s in moved)
        if self._step % TARGET_EVERY == 0:
            self._target = self.weights

    def _gradients(self, rows: np.ndarray) -> Weights:
        """The gradients of the mean square of Q(s, a) − (r + γ·max Q'(s', ·))."""
        seen, action, reward, ended, after = rows[:, :3], rows[:, 3].astype(int), rows[:, 4], rows[:, 5], rows[:, 6:]
        wanted = reward + GAMMA * (1 - ended) * values(self._target, after).max(axis=1)
        layer, each = hidden(self.weights, seen), np.arange(len(rows))
        found = layer @ self.weights[2] + self.weights[3]
        outer = np.zeros_like(found)
        outer[each, action] = 2 * (found[each, action] - wanted) / len(rows)
        inner = (outer @ self.weights[2].T) * (layer > 0)
        return (seen * SCALE).T @ inner, inner.sum(axis=0), layer.T @ outer, outer.sum(axis=0)

    def digest(self) -> str:
        """A digest of all bits of the network."""
        return hashlib.blake2b(b"".join(array.tobytes() for array in self.weights), digest_size=8).hexdigest()


def cases(part: str, quick: bool) -> Iterator[Case]:
    """The measured settings of a part."""
    cores, sleep_s = len(os.sched_getaffinity(0)), 0.01 if quick else SLEEP_S
    echo, rounds = partial(Echo, sleep_s), 4 if quick else 20
    if part == "actors":
        for workers in (2, 4) if quick else (2, 4, 8, 16):
            hub = partial(Same, 1000 if quick else ARRAY)
            yield Case(f"{workers} workers", workers, rounds, echo, hub, workers, sleep_s)
    elif part == "sizes":
        workers = 2 if quick else 16
        for size_kb in (1, 1000) if quick else SIZES_KB:
            if COPIES * workers * size_kb * 1024 > psutil.virtual_memory().available:
                say(f"sizes: {workers} workers with arrays of {size_kb} KB do not fit into memory, left out")
                continue
            yield Case(f"{size_kb} KB", workers, rounds, echo, partial(Same, size_kb * 128), workers, sleep_s)
    elif part == "gym":
        for name in ENVS[:1] if quick else ENVS:
            yield Case(name, 2 if quick else 15, 50 if quick else 10_000, partial(RandomSteps, name), Barrier, cores)
    else:
        workers, steps, turns = (2, 20, 10) if quick else (16, 100, 1000)
        for batch in (16,) if quick else (250, 500, 1000, 2000):
            hub = partial(Learner, batch, 80 if quick else REPLAY)  # as soon as it is full, its first rows change
            yield Case(f"batch {batch}", workers, turns, partial(Blackjack, steps), hub, cores)


# --- Arms: the hub after all rounds, and the time at the end of each


class _Timed:
    """A hub that notes when each round ends."""

    def __init__(self, hub: Hub) -> None:
        self.hub, self.ends_s, self.message = hub, [], hub.message

    def take(self, answers: Sequence[Any]) -> None:
        self.hub.take(answers)
        self.ends_s.append(time.perf_counter())


class _HubReactor(Reactor):
    def __init__(self, hub: Hub, workers: int, rounds: int) -> None:
        super().__init__("hub")
        self._hub, self._left, self.message = hub, rounds, self.output("message", object)
        self.answers = [self.input(f"answer{index}", object) for index in range(workers)]
        self.reaction(self.begin, on=[self.start], sets=[self.message])
        self.reaction(self.next, on=self.answers, sets=[self.message])

    def begin(self, now: Moment) -> None:
        now.set(self.message, self._hub.message())

    def next(self, now: Moment) -> None:
        self._hub.take([now[port] for port in self.answers])
        self._left -= 1
        if self._left:
            now.set(self.message, self._hub.message())
        else:
            now.stop()


class _WorkerReactor(Reactor):
    def __init__(self, index: int, worker: Worker) -> None:
        super().__init__(f"worker{index}")
        self._worker, self.message, self.out = worker, self.input("message", object), self.output("answer", object)
        self.reaction(self.work, on=[self.message], sets=[self.out])

    def work(self, now: Moment) -> None:
        now.set(self.out, self._worker.answer(now[self.message]))


def program(case: Case, hub: Hub) -> Program:
    """The reactors of a case: messages arrive a microstep later, answers at the same tag."""
    center = _HubReactor(hub, case.workers, case.rounds)
    workers = [_WorkerReactor(index, case.worker(index)) for index in range(case.workers)]
    asked = [connect(center.message, worker.message, 0.0) for worker in workers]
    answered = [connect(worker.out, port) for worker, port in zip(workers, center.answers, strict=True)]
    return Program([center, *workers], [*asked, *answered])


def on_reactors(case: Case, hub: Hub) -> None:
    """All rounds on threads."""
    reactor.run(program(case, hub), case.threads)


def _serve(pipe: Connection, make: Callable[[int], Worker], index: int) -> None:
    """A worker's process: answer messages until the pipe is closed."""
    worker = make(index)
    pipe.send(None)
    try:
        while True:
            pipe.send(worker.answer(pipe.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _received(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise RuntimeError(f"a worker gave no answer within {DEADLINE_S:.0f} s")
    return pipe.recv()


def on_processes(case: Case, hub: Hub) -> None:
    """All rounds with a process for each worker, which ends with this one."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for index in range(case.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, case.worker, index), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join, 10)
            pipes.append(ours)
        for pipe in pipes:
            stack.callback(pipe.close)  # all close before the first process is waited for
            _received(pipe)  # it is ready
        for _ in range(case.rounds):
            message = hub.message()
            for pipe in pipes:
                pipe.send(message)
            hub.take([_received(pipe) for pipe in pipes])


@contextmanager
def ray_cluster(workers: int) -> Iterator[None]:
    """A cluster of Ray on this machine, with a processor for each worker."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def on_ray(case: Case, hub: Hub) -> None:
    """All rounds with an actor for each worker."""
    import ray

    make: Any = ray.remote(case.worker.func)
    actors = [make.remote(*case.worker.args, index) for index in range(case.workers)]
    try:
        for _ in range(case.rounds):
            message = ray.put(hub.message())
            hub.take(ray.get([actor.answer.remote(message) for actor in actors], timeout=DEADLINE_S))
    finally:
        for actor in actors:
            ray.kill(actor)


RUN: Mapping[str, Callable[[Case, Hub], None]] = {"reactor": on_reactors, "processes": on_processes, "ray": on_ray}


def measured(arm: str, case: Case, judged_steps: int = 20_000) -> dict[str, Any]:
    """One run of a case: the median time of a round after the first, and the network with its reward."""
    hub = _Timed(case.hub())
    RUN[arm](case, hub)
    rounds_s = [after - before for before, after in itertools.pairwise(hub.ends_s)]
    found: dict[str, Any] = {"round_ms": 1e3 * statistics.median(rounds_s)}
    if case.sleep_s:
        found["overhead_ms"] = max(found["round_ms"] - 1e3 * case.sleep_s, 1e-3)
    if isinstance(hub.hub, Learner):
        found |= {"network": hub.hub.digest(), "reward": Blackjack(judged_steps, 1_000).reward(hub.hub.weights)}
    return found


# --- Results


def compared(results: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """The times of a round of each arm, and their ratios to those of reactors."""
    key = "overhead_ms" if "overhead_ms" in next(iter(results.values()))[0] else "round_ms"
    times = {arm: [run[key] for run in runs] for arm, runs in results.items()}
    found: dict[str, Any] = {key: {arm: spread(those) for arm, those in times.items()}}
    if "reactor" in times:
        others = {arm: those for arm, those in times.items() if arm != "reactor"}
        found["over_reactor"] = {arm: ratio(those, times["reactor"]) for arm, those in others.items()}
    runs = [run for those in results.values() for run in those]
    if "network" in runs[0]:
        found |= {"equal": len({run["network"] for run in runs}) == 1, "reward": runs[0]["reward"]}
    return found


def growth(by_case: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The overhead at the last size over that at the first, by arm."""
    first, *_, last = (found["overhead_ms"] for found in by_case.values())
    return {arm: last[arm]["median"] / first[arm]["median"] for arm in first}


def main() -> None:
    """Alternate the arms for every case, and print the results."""
    parser = arguments("reactors compared with processes and Ray")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be repeated (default: all)")
    parser.add_argument("--arms", default=",".join(ARMS), help="separated by commas")
    options, started = parser.parse_args(), time.monotonic()
    arms = [arm for arm in ARMS if arm in options.arms.split(",")]
    if "ray" in arms and importlib.util.find_spec("ray") is None:
        say("Ray is not installed; its arm is left out")
        arms.remove("ray")
    rounds = options.rounds or (1 if options.quick else 3)
    runs = Runs("reactor", {"quick": options.quick, "arms": arms}, options.runs_file, options.resume)
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        if "ray" in arms:
            stack.enter_context(ray_cluster(16))
        for part in options.only or PARTS:
            result[part] = {}
            for case in cases(part, options.quick):
                made = {arm: partial(measured, arm, case) for arm in arms}
                named = {f"{part} {case.name} {arm}": measure for arm, measure in made.items()}
                found = runs.alternate(named, rounds)
                result[part][case.name] = compared(dict(zip(arms, found.values(), strict=True)))
            if part == "sizes":
                result["growth"] = growth(result[part])
            if part == "q_learning":
                result["random_reward"] = Blackjack(20_000, 1_000).reward(None)
    result["versions"] = {name: metadata.version(name) for name in ("numpy", "gymnasium", *arms) if name in _INSTALLED}
    finish(result, command=" ".join(["python -m benchmarks.reactor", *sys.argv[1:]]), started=started)


_INSTALLED = ("numpy", "gymnasium", "ray")

if __name__ == "__main__":
    main()
