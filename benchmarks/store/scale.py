"""Cost of a member in the core of the store, by the number of samplers: processor time and function calls.

    python -m benchmarks.store.scale [--quick] [--rounds=N] [--samplers=N ...] [--members=N] [--whole] [--only=WORLD]

Scripted samplers and a learner on virtual time ask the state machine of the store (`Core`), which decides as in a run;
there is no network, no disk and no model. The learner asks for a claim that is not ready again when a group has become
complete, and a sampler that was refused when a claim or new weights may have made room, as the store's service wakes
them. Two worlds:

- `wide`: each sampler has room for eight members, and a step has half as many groups of eight as there are samplers.
- `fixed`: a step has 64 groups of eight, 512 members, and samplers share the room for three steps.

`core_us` is the processor time of the core for a member, `all_us` that of the whole loop. `calls` is the number of
function calls of the core for a member, from a run of their own under `cProfile`: they do not depend on the load of
the machine. `requests` are those of a member: the samplers' share of work decides about them. `growth` compares the
most samplers with the fewest. `--whole` plays 100 samplers, 1,000 steps and 512 members a step once, in processor
minutes. Class P, one core. The last line is one JSON object.
"""

from __future__ import annotations

import cProfile
import heapq
import itertools
import pstats
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.lib.report import Runs, arguments, finish, say, spread
from jaxroll.errors import NotReady, StoreRefusal
from jaxroll.policy.limiter import AgeLimiter
from jaxroll.records import Task, Version, VersionRef, VersionRun
from jaxroll.store.core import events as ev
from jaxroll.store.core.admission import Settings
from jaxroll.store.core.machine import Core

ALPHA, SIZE, GROUPS, SLOTS = 2.0, 8, 64, 8
TRAIN_S, SWAP_S, TICK_S = 4.0, 0.1, 1.0
WORLDS = ("wide", "fixed")
AIM = 1.2


@dataclass(frozen=True)
class World:
    """Samplers with slots; groups of a step; steps."""

    samplers: int
    slots: int
    groups: int
    steps: int

    @property
    def members(self) -> int:
        """The members that are trained."""
        return self.steps * self.groups * SIZE


def world(name: str, samplers: int, members: int) -> World:
    """A world with about so many members in all, and at least two steps."""
    groups = max(4, samplers // 2) if name == "wide" else GROUPS
    room = SLOTS if name == "wide" else -(-3 * GROUPS * SIZE // samplers)
    return World(samplers, room, groups, max(2, members // (groups * SIZE)))


class Play:
    """One run on virtual time. `profile` counts the calls of the core."""

    def __init__(self, world: World, profile: cProfile.Profile | None = None) -> None:
        self.world, self.now_s, self.core_s, self.requests, self._profile = world, 0.0, 0.0, 0, profile
        limits = AgeLimiter(ALPHA, world.groups)
        self._core = Core(Settings(limits, SIZE, world.steps, lease_s=1e6, straggler_deadline_s=1e6))
        self._random, self._order = random.Random(0), itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._free, self._refused = [world.slots] * world.samplers, dict.fromkeys(range(world.samplers))
        self._version, self._wanted = Version(0, 0), 0  # of the samplers; the step that the learner waits for, or −1

    def _ask(self, request: ev.Request) -> Any:
        self.requests += 1
        if self._profile is not None:
            self._profile.enable()
        before_s = time.thread_time()
        decision = self._core.handle(request, self.now_s)
        self.core_s += time.thread_time() - before_s
        if self._profile is not None:
            self._profile.disable()
        return decision.reply

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._order), act))

    def play(self) -> None:
        """Until all steps are trained."""
        self._ask(ev.Begin("learner", None))
        self._publish(Version(0, 0))
        self._tick()
        state = self._core.state
        while state.acked < self.world.steps:
            self.now_s, _, act = heapq.heappop(self._due)
            act()

    def _tick(self) -> None:
        self._ask(ev.Tick())
        self._later(TICK_S, self._tick)

    def _publish(self, version: Version) -> None:
        self._ask(ev.Publish("learner", VersionRef(version, "tcp", "here", "digest")))
        self._later(SWAP_S, partial(self._swap, version))

    def _swap(self, version: Version) -> None:
        self._version = version
        self._wake()

    def _wake(self) -> None:
        """Let the samplers ask that were refused."""
        waiting, self._refused = [*self._refused], {}
        for sampler in waiting:
            self._lease(sampler)

    def _lease(self, sampler: int) -> None:
        while (room := self._free[sampler]) > 0:
            state, name = self._core.state, f"sampler-{sampler}"
            first = state.next_ordinal
            tasks = (Task(i, (), "env", "{}", 0, str(i)) for i in range(first, first + room // SIZE + 1))
            prompts = tuple((task, b"%d" % (task.index + 1)) for task in tasks)
            reply = self._ask(ev.Lease(name, name, self._version, room, str(next(self._order)), prompts))
            if isinstance(reply, StoreRefusal):
                self._refused[sampler] = None
                return
            for grant in reply.grants:
                for member, attempt in grant.members:
                    self._free[sampler] -= 1
                    put = partial(self._put, sampler, (grant.group, member, attempt), self._version)
                    self._later(self._random.lognormvariate(1.0, 0.6), put)

    def _put(self, sampler: int, key: ev.Key, version: Version) -> None:
        self._ask(ev.PutMember(*key, f"{key}", 1000, (VersionRun(version, 100),)))
        self._free[sampler] += 1
        if self._wanted >= 0 and (group := self._core.state.find(key[0])) is not None and group.ready:
            self._claim()
        self._lease(sampler)

    def _claim(self) -> None:
        step = self._wanted
        if isinstance(self._ask(ev.ClaimStep("learner", 0, step)), NotReady):
            return
        self._wanted = -1
        self._later(TRAIN_S, partial(self._trained, step))
        self._wake()

    def _trained(self, step: int) -> None:
        self._publish(Version(0, step + 1))
        self._ask(ev.Ack("learner", Version(0, step)))
        self._ask(ev.Durable("learner", Version(0, step + 1)))
        if step + 1 < self.world.steps:
            self._wanted = step + 1
            self._claim()
        self._wake()


def measured(one: World) -> dict[str, Any]:
    """Microseconds of processor time and requests of a member."""
    play, before_s = Play(one), time.thread_time()
    play.play()
    all_s = time.thread_time() - before_s
    per = 1e6 / one.members
    return {"core_us": play.core_s * per, "all_us": all_s * per, "requests": play.requests / one.members}


def counted(one: World) -> dict[str, Any]:
    """Function calls of the core for a member."""
    profile = cProfile.Profile()
    Play(one, profile).play()
    return {"calls": pstats.Stats(profile).total_calls / one.members}  # type: ignore[attr-defined]


def main() -> int:
    """All worlds, alternating, or the whole run."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--samplers", type=int, action="append", help="repeatable (default: 10, 100, 1000)")
    parser.add_argument("--members", type=int, default=12_000, help="of each run, about")
    parser.add_argument("--only", choices=WORLDS, help="one world")
    parser.add_argument("--whole", action="store_true", help="100 samplers, 1,000 steps, 512 members a step")
    chosen, started = parser.parse_args(), time.monotonic()
    command = " ".join(["python", *sys.orig_argv[1:]])
    if chosen.whole:
        one = world("fixed", 100, 1000 * GROUPS * SIZE)
        found = measured(one)
        minutes = found["all_us"] * one.members / 60e6
        finish(
            {"class": "P", "whole": found, "members": one.members, "processor_minutes": minutes},
            command=command,
            started=started,
        )
        return 0
    numbers = chosen.samplers or ([4, 40] if chosen.quick else [10, 100, 1000])
    members, rounds = (256, 1) if chosen.quick else (chosen.members, chosen.rounds or 3)
    names = [chosen.only] if chosen.only else WORLDS
    arms = {f"{name} {number}": world(name, number, members) for name in names for number in numbers}
    runs = Runs("store.scale", {"members": members}, chosen.runs_file, chosen.resume)
    results = runs.alternate({arm: partial(measured, one) for arm, one in arms.items()}, rounds)
    rows: dict[str, dict[str, Any]] = {}
    for arm, one in arms.items():
        row = {key: spread([each[key] for each in results[arm]]) for key in ("core_us", "all_us", "requests")}
        rows[arm] = row | counted(one) | {"members": one.members}
        say(f"{arm}: {rows[arm]}")
    few, many = min(numbers), max(numbers)
    growth = {
        name: {
            "core_us": rows[f"{name} {many}"]["core_us"]["median"] / rows[f"{name} {few}"]["core_us"]["median"],
            "calls": rows[f"{name} {many}"]["calls"] / rows[f"{name} {few}"]["calls"],
            "aim": AIM,
        }
        for name in names
    }
    finish({"class": "P", "rounds": rounds, "rows": rows, "growth": growth}, command=command, started=started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
