"""Reactors: equal traces on any number of threads, the order of levels and tags, and the checks of a graph."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from jaxroll.errors import ConfigError, DataError
from jaxroll.sim import network, reactor
from jaxroll.sim.network import OrderedThreads
from jaxroll.sim.reactor import Action, Event, Moment, Port, Program, Reactor, Tag, connect, digest

DEADLINE_S = 20.0

# --- The same trace for any number and speed of threads


class Mixer(Reactor):
    """Mixes what arrives into its state, and sends the state; acts by itself every `every_s`."""

    def __init__(self, name: str, inputs: int, every_s: float, pause: Callable[[], None]) -> None:
        super().__init__(name)
        self.state, self._every_s, self._pause = np.arange(3.0), every_s, pause
        self.inputs = [self.input(f"in{number}", np.ndarray) for number in range(inputs)]
        self.out, self.again = self.output("out", np.ndarray), self.action("again", int)
        self.reaction(self.tick, on=[self.start, self.again], sets=[self.again])
        self.reaction(self.mix, on=[self.again, *self.inputs], sets=[self.out])

    def tick(self, now: Moment) -> None:
        self._pause()
        self.state = self.state + 1.0
        now.schedule(self.again, now.tag.time_ns, self._every_s)

    def mix(self, now: Moment) -> None:
        self._pause()
        for number, port in enumerate(self.inputs):
            if now.has(port):
                self.state = np.tanh(self.state * (1.1 + number) + now[port])
        now.set(self.out, self.state)


def mixers(seed: int, pause: Callable[[], None] = lambda: None) -> Program:
    """A random program of eight reactors: connections forwards have any delay or none, those backwards have a delay."""
    chance = random.Random(seed)
    made, connections = [], []
    for number in range(8):
        made.append(Mixer(f"m{number}", chance.randint(1, 3), chance.choice((0.001, 0.002)), pause))
    for number, target in enumerate(made):
        for port in target.inputs:
            sender = chance.randrange(8)
            delay_s = chance.choice((None, None, 0.0, 0.001) if sender < number else (0.001, 0.003))
            connections.append(connect(made[sender].out, port, delay_s))
    return Program(made, connections)


def sleepy() -> None:
    if (chance := random.SystemRandom()).random() < 0.2:
        time.sleep(chance.uniform(0.0, 0.0002))


def trace(program: Program, threads: int, until_s: float) -> list[Event]:
    reactor.run(program, threads, until_s, (found := []).append)
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
def test_traces_are_equal_for_any_number_and_speed_of_threads(seed: int) -> None:
    """20 repetitions on 1, 2 and 4 threads each, with random sleeps; the first one has none."""
    expected = trace(mixers(seed), 1, 0.003)
    assert len(expected) >= 40 and len({event.digest for event in expected}) >= 20
    assert len({event.level for event in expected}) > 2
    for threads in (1, 2, 4) * 20:
        assert trace(mixers(seed, sleepy), threads, 0.003) == expected


def test_another_program_has_another_trace() -> None:
    assert trace(mixers(0), 1, 0.004) != trace(mixers(1), 1, 0.004)


def test_calls_are_made_in_the_order_of_tags_and_levels_and_once() -> None:
    program = mixers(0)
    found = trace(program, 2, 0.01)
    assert [(event.tag, event.level) for event in found] == sorted((event.tag, event.level) for event in found)
    assert all(event.level == program.levels[event.reaction] for event in found)
    assert max(Counter((event.tag, event.reaction) for event in found).values()) == 1
    assert max(event.tag.time_ns for event in found) == 10_000_000 and max(e.tag.microstep for e in found) > 0


def on_virtual_clock(program: Program, threads: int, until_s: float, found: list[Event]) -> float:
    """Execute on a virtual clock; the result is the clock's time at the end."""

    async def job() -> float:
        await reactor.play(program, OrderedThreads(threads) if threads else None, until_s, found.append)
        return asyncio.get_running_loop().time()

    return network.run(job())


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_the_virtual_clock_gives_the_trace_of_threads(threads: int) -> None:
    """Regardless of the time that reactions take, the clock shows the time of the last tag at the end."""
    end_s = on_virtual_clock(mixers(1, sleepy), threads, 5.0e-3, found := [])
    assert found == trace(mixers(1), 1, 5.0e-3) and end_s == pytest.approx(5.0e-3)


@pytest.mark.parametrize("clock", [False, True])
def test_reactions_of_one_level_run_at_once(clock: bool) -> None:
    meeting = threading.Barrier(2)
    program = Program([Source(name, 1, lambda: [meeting.wait(DEADLINE_S)]) for name in "ab"], [])
    if clock:
        on_virtual_clock(program, 2, 1.0, [])
    else:
        reactor.run(program, 2)
    assert not meeting.broken, "with one call at a time the barrier breaks"


# --- The control: the same program, whose reactors take messages as they arrive


class Source(Reactor):
    """Sends `value` at the start."""

    def __init__(self, name: str, value: int, pause: Callable[[], object] = lambda: None) -> None:
        super().__init__(name)
        self._value, self._pause, self.out = value, pause, self.output("out", int)
        self.reaction(self.send, on=[self.start], sets=[self.out])

    def send(self, now: Moment) -> None:
        self._pause()
        now.set(self.out, self._value)


class Sum(Reactor):
    """Adds what arrives to three times the total: the order matters."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.total, self.left, self.right = 0, self.input("left", int), self.input("right", int)
        self.reaction(self.add, on=[self.left, self.right])

    def add(self, now: Moment) -> None:
        for port in (self.left, self.right):
            if now.has(port):
                self.total = 3 * self.total + now[port]


def adding(pause: Callable[[], None] = lambda: None) -> tuple[Sum, Program]:
    made = Source("one", 1, pause), Source("two", 2, pause)
    total = Sum("sum")
    return total, Program([*made, total], [connect(made[0].out, total.left), connect(made[1].out, total.right)])


def run_freely(program: Program, after: Mapping[str, str]) -> None:
    """Execute as actors: a thread and a mailbox each; a message is handled when it arrives.

    A delay that is injected into a reaction of `after` lasts until the other reaction has been called.
    """
    boxes = {one: queue.SimpleQueue[tuple[Port, object] | None]() for one in program.reactors}
    called = {one.name: threading.Event() for one in program.reactions}
    left, lock, over = len(boxes), threading.Lock(), threading.Event()

    def count(change: int) -> None:
        nonlocal left
        with lock:
            left += change
            if not left:
                over.set()

    def act(one: Reactor) -> None:
        while (message := boxes[one].get(timeout=DEADLINE_S)) is not None:
            for reaction in one.reactions:
                if message[0] not in reaction.triggers:
                    continue
                if reaction.name in after:
                    called[after[reaction.name]].wait(DEADLINE_S)
                moment = Moment(Tag(0), reaction, 0, {message[0]: message[1]})
                reaction.body(moment)
                called[reaction.name].set()
                for port, value in moment.outputs.items():
                    for connection in program._targets[port]:
                        count(1)
                        boxes[connection.target.reactor].put((connection.target, value))
            count(-1)

    threads = [threading.Thread(target=act, args=[one], daemon=True) for one in program.reactors]
    for one, thread in zip(program.reactors, threads, strict=True):
        boxes[one].put((one.start, None))
        thread.start()
    assert over.wait(DEADLINE_S)
    for box in boxes.values():
        box.put(None)
    for thread in threads:
        thread.join(DEADLINE_S)


@pytest.mark.parametrize(("slow", "freely"), [("two.send", 3 * 1 + 2), ("one.send", 3 * 2 + 1)])
def test_actors_diverge_where_reactors_do_not(slow: str, freely: int) -> None:
    """The slower source decides the total of free-running actors. Reactors take left, then right, at any speed."""
    total, program = adding()
    run_freely(program, {slow: "sum.add"})
    assert total.total == freely
    for threads in (1, 2, 4):
        total, program = adding(sleepy)
        reactor.run(program, threads)
        assert total.total == 3 * 1 + 2


# --- Tags


class Timer(Reactor):
    """Schedules an action after each of `delays_s` at once, and notes when each comes."""

    def __init__(self, delays_s: Sequence[float]) -> None:
        super().__init__("timer")
        self.seen: list[tuple[Tag, int]] = []
        self._delays_s, self.later = delays_s, self.action("later", int)
        self.reaction(self.begin, on=[self.start], sets=[self.later])
        self.reaction(self.note, on=[self.later])

    def begin(self, now: Moment) -> None:
        for number, delay_s in enumerate(self._delays_s):
            now.schedule(self.later, number, delay_s)

    def note(self, now: Moment) -> None:
        self.seen.append((now.tag, now[self.later]))
        if now[self.later] == 9:
            now.stop()


def test_tags_by_hand() -> None:
    """Values of equal tags wait a microstep each, in the order in which they were sent; 0.1 + 0.2 s are 0.3 s."""
    reactor.run(Program([timer := Timer([0.3, 0.0, 0.1, 0.3])], []))
    assert timer.seen == [(Tag(0, 1), 1), (Tag(10**8), 2), (Tag(3 * 10**8), 0), (Tag(3 * 10**8, 1), 3)]
    assert Tag(10**8, 5).after(2 * 10**8) == Tag(3 * 10**8) and Tag(7, 2).after(0) == Tag(7, 3)


def test_a_program_ends_at_its_stop_or_its_time() -> None:
    reactor.run(Program([timer := Timer([0.1 * number for number in range(12)])], []))
    assert [number for _, number in timer.seen] == list(range(10)), "the one with number 9 stops it"
    reactor.run(Program([timer := Timer([0.1, 0.2, 0.3])], []), until_s=0.2)
    assert [number for _, number in timer.seen] == [0, 1]


# --- Checks


class Node(Reactor):
    """Passes a value on."""

    def __init__(self, name: str, kind: type = int, sent: type = int) -> None:
        super().__init__(name)
        self.inp, self.out, self.unused = self.input("in", kind), self.output("out", sent), None
        self.reaction(self.forward, on=[self.inp], sets=[self.out])

    def forward(self, now: Moment) -> None:
        now.set(self.out, now[self.inp])


def ring(*delays_s: float | None) -> Program:
    nodes = [Node(f"n{number}") for number in range(len(delays_s))]
    pairs = zip(nodes, [*nodes[1:], nodes[0]], delays_s, strict=True)
    return Program(nodes, [connect(a.out, b.inp, delay_s) for a, b, delay_s in pairs])


def test_levels_are_the_longest_chains() -> None:
    assert ring(None, None, 0.0).levels == {"n0.forward": 0, "n1.forward": 1, "n2.forward": 2}
    assert ring(0.0, 0.0, 1.0).levels == {"n0.forward": 0, "n1.forward": 0, "n2.forward": 0}
    assert adding()[1].levels == {"one.send": 0, "two.send": 0, "sum.add": 1}
    assert Program([Timer([])], []).levels == {"timer.begin": 0, "timer.note": 1}, "they share state"


def test_a_cycle_without_a_delay_is_named() -> None:
    with pytest.raises(ConfigError, match=r"n0\.forward → n1\.forward → n2\.forward → n0\.forward.*after_s=0"):
        ring(None, None, None)
    source, first, last = Source("source", 1), Node("first"), Node("last")
    with pytest.raises(ConfigError, match=r"first\.forward → first\.forward"):
        Program([source, first, last], [connect(first.out, first.inp), connect(first.out, last.inp)])


def refused(*nodes: Reactor, connections: Sequence[reactor.Connection] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        Program(nodes, connections)
    return str(caught.value)


def test_graphs_that_are_no_program_are_refused() -> None:
    source, node, other = Source("source", 1), Node("node"), Source("other", 1)
    text = Node("text", str, str)
    assert "node.in = 'unconnected'" in refused(source, node)
    assert "two reactors" in refused(source, Source("source", 2))
    assert "its reactor is not in the program" in refused(source, connections=[connect(source.out, node.inp)])
    both = [connect(source.out, node.inp), connect(other.out, node.inp)]
    assert "already gets values from source.out" in refused(source, other, node, connections=both)
    wrong = refused(source, text, connections=[reactor.Connection(source.out, text.inp, None)])
    assert "text.in = 'str': source.out sends int" in wrong
    silent = Source("silent", 1)
    silent.output("more", int)
    assert "silent.more = 'unset'" in refused(silent)
    deaf = Source("deaf", 1)
    port = deaf.input("more", int)
    assert "deaf.more = 'unread'" in refused(source, deaf, connections=[connect(source.out, port)])
    assert "only the start" in refused(source, other, connections=[connect(source.out, other.start)])


def test_reactions_that_cannot_be_are_refused() -> None:
    one, node = Source("one", 1), Node("node")
    with pytest.raises(ConfigError, match="nothing would trigger it"):
        one.reaction(one.send, on=[])
    with pytest.raises(ConfigError, match="belongs to node"):
        one.reaction(one.send, on=[one.start], sets=[node.out])
    with pytest.raises(ConfigError, match="reads no output"):
        one.reaction(one.send, on=[one.out])
    with pytest.raises(ConfigError, match="sets no input"):
        node.reaction(node.forward, on=[node.inp], sets=[node.inp])
    with pytest.raises(ConfigError, match="a port of this name"):
        one.output("out", int)
    with pytest.raises(ConfigError, match="Give a class"):
        one.output("list", list[int])
    delays_s: list[Any] = [-1.0, float("nan"), float("inf"), "0"]
    for delay_s in delays_s:
        with pytest.raises(ConfigError, match="0 or more"):
            connect(one.out, node.inp, delay_s)
    counts: list[Any] = [0, "4", 1.5]
    for threads in counts:
        with pytest.raises(ConfigError, match="1 or more"):
            reactor.run(adding()[1], threads)


class Calls(Reactor):
    """A reaction that is given."""

    def __init__(self, name: str, body: Callable[[Calls, Moment], None]) -> None:
        super().__init__(name)
        self._body, self.out, self.more = body, self.output("out", int), self.output("more", int)
        self.later: Action[int] = self.action("later", int)
        self.reaction(self.act, on=[self.start], sets=[self.out])
        self.reaction(self.rest, on=[self.later], sets=[self.more, self.later])

    def act(self, now: Moment) -> None:
        self._body(self, now)

    def rest(self, now: Moment) -> None: ...


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (lambda one, now: now.set(one.out, "text"), DataError, r"sets bad\.out to a str; its class is int"),
        (lambda one, now: now.set(one.more, 1), ConfigError, "it sets an undeclared port"),
        (lambda one, now: now.schedule(one.later, 1), ConfigError, "it sets an undeclared port"),
        (lambda one, now: now[one.later], ConfigError, "it reads an undeclared port"),
        (lambda one, now: [now.set(one.out, 1), now.set(one.out, 2)], DataError, "twice"),
    ],
)
def test_reactions_that_break_their_declaration_fail(
    body: Callable[[Calls, Moment], None], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        reactor.run(Program([Calls("bad", body)], []))
    assert any("in reaction bad.act" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_error_of_a_level_is_raised_whichever_was_earlier(threads: int) -> None:
    fast = threading.Event()

    def fail(one: Calls, now: Moment) -> None:
        if threads == 2 and one.name == "first":
            assert fast.wait(DEADLINE_S)
        fast.set()
        raise ValueError(one.name)

    with pytest.raises(ValueError, match="first"):
        reactor.run(Program([Calls("first", fail), Calls("second", fail)], []), threads)


class Opaque(Reactor):
    """Sends what has no digest."""

    def __init__(self) -> None:
        super().__init__("opaque")
        self.out = self.output("out", object)
        self.reaction(self.send, on=[self.start], sets=[self.out])

    def send(self, now: Moment) -> None:
        now.set(self.out, threading.Event())


def test_a_value_without_a_digest_is_refused_in_a_trace_only() -> None:
    reactor.run(Program([Opaque()], []))
    with pytest.raises(DataError, match=r"an? Event has no digest"):
        trace(Program([Opaque()], []), 1, 1.0)


class Changing(Reactor):
    """Sends an array to `Changed`, and changes it later."""

    def __init__(self, later_s: float) -> None:
        super().__init__("changing")
        self._array, self._later_s = np.zeros(2), later_s
        self.out, self.later = self.output("out", np.ndarray), self.action("later", int)
        self.reaction(self.send, on=[self.start], sets=[self.out, self.later])
        self.reaction(self.change, on=[self.later])

    def send(self, now: Moment) -> None:
        now.set(self.out, self._array)
        now.schedule(self.later, 1, self._later_s)

    def change(self, now: Moment) -> None:
        self._array += 1.0


class Changed(Reactor):
    """Adds to the array that it gets, or to a copy."""

    def __init__(self, in_place: bool) -> None:
        super().__init__("changed")
        self._in_place, self.inp = in_place, self.input("in", np.ndarray)
        self.reaction(self.take, on=[self.inp])

    def take(self, now: Moment) -> None:
        array = now[self.inp] if self._in_place else now[self.inp].copy()
        array += 1.0


def changing(later_s: float, in_place: bool, after_s: float | None) -> Program:
    sender, receiver = Changing(later_s), Changed(in_place)
    return Program([sender, receiver], [connect(sender.out, receiver.inp, after_s)])


def test_a_recorded_execution_names_the_reaction_that_changes_a_value() -> None:
    for later_s, after_s in ((0.0, None), (0.2, 0.1)):
        assert len(trace(changing(later_s, False, after_s), 2, 1.0)) == 3, "it is changed after its tag"
    with pytest.raises(DataError, match=r"changed\.take changed the value of changed\.in"):
        trace(changing(1.0, True, None), 1, 1.0)
    with pytest.raises(DataError, match="a reaction of an earlier tag changed"):
        trace(changing(0.1, False, 0.2), 1, 1.0)
    with pytest.raises(DataError, match=r"^changing\.change changed the value"):
        trace(changing(0.1, False, 0.1), 1, 1.0)
    reactor.run(changing(0.1, True, 0.2))


@dataclass
class Pair:
    left: object
    right: object


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", b"1"),
        ((1, (2,)), ((1, 2),)),
        ([1], (1,)),
        ({"a": 1}, {"a": 2}),
        (Pair(1, 2), Pair(2, 1)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.arange(6).reshape(2, 3), np.arange(6).reshape(3, 2).T),
    ],
)
def test_values_that_differ_have_different_digests(one: object, other: object) -> None:
    assert digest(one) == digest(one) != digest(other)
