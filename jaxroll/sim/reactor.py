"""Reactors: a fixed graph of reactions, whose results depend neither on the number of threads nor on their speed.

A reactor has state, ports and reactions. A reaction is a method that is called when one of its triggers has a value: an
input, an action of the reactor, or its start. It may read other inputs, change the state, set outputs and schedule
actions. Two rules fix the order of all calls:

- Values have tags (time, microstep), and a program finishes one tag before it begins the next. A value that is sent
  with a delay arrives at a later time; with a delay of 0 s it arrives one microstep later.
- Without a delay it arrives at the same tag. A reaction is therefore called after the reactions that may set its
  inputs, and after the earlier reactions of its reactor, with which it shares state. The longest such chain is its
  level. Reactions of one level share nothing, so that all of them can run at once; the next level waits for them.

`Program` checks the graph. `run` executes it on threads, as fast as they are. `play` executes it on an event loop,
where a tag begins when the loop's clock shows its time; under `network.VirtualTimeLoop` that is the virtual clock.

Values are passed by reference: neither sender nor receiver may change them later. A recorded execution checks that.

The model is that of M. Lohstroh et al., "Toward a Lingua Franca for Deterministic Concurrent Systems", ACM TECS 2021;
J. Kwok et al. run reinforcement learning on it (arXiv 2312.04704).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from jaxroll.envs.threads import Threads
from jaxroll.errors import ConfigError, DataError

T = TypeVar("T")
REACTION_S = 900.0  # a reaction that takes longer on a thread of an event loop is an error


class Tag(NamedTuple):
    """Logical time: nanoseconds since the start, and the number of the step at this time."""

    time_ns: int
    microstep: int = 0

    def after(self, delay_ns: int) -> Tag:
        """The tag at which a value arrives that is sent at this one with a delay."""
        return Tag(self.time_ns + delay_ns) if delay_ns else Tag(self.time_ns, self.microstep + 1)


def _ns(delay_s: float, key: str) -> int:
    if not (isinstance(delay_s, int | float) and math.isfinite(delay_s) and delay_s >= 0):
        raise ConfigError(key, delay_s, "a delay is a number of seconds", "Set it to 0 or more.")
    return round(delay_s * 1e9)


# --- Reactors


@dataclass(frozen=True, eq=False)
class Port(Generic[T]):
    """A place for one value of a class per tag. `name` begins with the name of its reactor."""

    reactor: Reactor
    name: str
    kind: type[T]


class Input(Port[T]):
    """A port that one connection sets."""


class Output(Port[T]):
    """A port that reactions of its reactor set."""


class Action(Port[T]):
    """A message of a reactor to itself at a later tag."""


@dataclass(frozen=True, eq=False)
class Reaction:
    """A method of a reactor with the ports that it uses. `triggers` are read, too."""

    name: str
    body: Callable[[Moment], None]
    triggers: tuple[Port[Any], ...]
    reads: tuple[Port[Any], ...]
    sets: tuple[Port[Any], ...]


class Reactor:
    """State with ports and reactions. A subclass declares them in its constructor, after calling this one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ports: list[Port[Any]] = []
        self.reactions: list[Reaction] = []  # in the order of their calls at one tag
        self.start = self._declare(Input, "start", object)  # has a value at the first tag

    def input(self, name: str, kind: type[T]) -> Input[T]:
        """Declare an input for values of the class `kind`."""
        return self._declare(Input, name, kind)

    def output(self, name: str, kind: type[T]) -> Output[T]:
        """Declare an output for values of the class `kind`."""
        return self._declare(Output, name, kind)

    def action(self, name: str, kind: type[T]) -> Action[T]:
        """Declare an action with values of the class `kind`."""
        return self._declare(Action, name, kind)

    def _declare(self, port: Callable[[Reactor, str, type[T]], Any], name: str, kind: type[T]) -> Any:
        full = f"{self.name}.{name}"
        if not isinstance(kind, type):
            raise ConfigError(full, kind, "values are checked by their class", "Give a class, such as int or object.")
        if any(one.name == full for one in self.ports):
            raise ConfigError(full, kind.__name__, "the reactor has a port of this name", "Give it another name.")
        self.ports.append(made := port(self, full, kind))
        return made

    def reaction(
        self,
        body: Callable[[Moment], None],
        on: Sequence[Port[Any]],
        reads: Sequence[Port[Any]] = (),
        sets: Sequence[Port[Any]] = (),
    ) -> None:
        """Declare that `body` is called at tags at which one of `on` has a value. `sets` includes actions."""
        name = f"{self.name}.{body.__name__}"
        if not on:
            raise ConfigError(name, "on=()", "nothing would trigger it", "Name an input, an action or `start`.")
        for port in (*on, *reads, *sets):
            if port.reactor is not self:
                remedy = "Give the reactor a port of its own and connect the two."
                raise ConfigError(name, port.name, f"this port belongs to {port.reactor.name}", remedy)
        for port in (*on, *reads):
            if isinstance(port, Output):
                raise ConfigError(name, port.name, "a reaction reads no output", "Keep the value in the state.")
        for port in sets:
            if isinstance(port, Input):
                raise ConfigError(name, port.name, "a reaction sets no input", "Set an output and connect it.")
        self.reactions.append(Reaction(name, body, tuple(on), tuple(reads), tuple(sets)))


class Moment:
    """One call of a reaction: the values that it sees at `tag`, and what it sets.

    Other reactions see its outputs when the level is finished, so that reactions need no locks.
    """

    def __init__(self, tag: Tag, reaction: Reaction, level: int, values: dict[Port[Any], Any]) -> None:
        self.tag, self.reaction, self.level, self._values = tag, reaction, level, values
        self.outputs: dict[Output[Any], Any] = {}
        self.scheduled: list[tuple[Action[Any], int, Any]] = []
        self.stopped = False
        self.error: BaseException | None = None

    def has(self, port: Port[Any]) -> bool:
        """True if an input or action has a value at this tag."""
        if port not in self.reaction.triggers and port not in self.reaction.reads:
            raise ConfigError(self.reaction.name, port.name, "it reads an undeclared port", "Name it in `reads`.")
        return port in self._values

    def __getitem__(self, port: Port[T]) -> T:
        """The value of an input or action. DataError if it has none at this tag (see `has`)."""
        if not self.has(port):
            raise DataError(f"{self.reaction.name} reads {port.name}, which has no value at {self.tag}")
        return self._values[port]

    def set(self, port: Output[T], value: T) -> None:
        """Send `value` on the connections of an output."""
        self._check(port, value)
        if port in self.outputs:
            raise DataError(f"{self.reaction.name} sets {port.name} twice at {self.tag}")
        self.outputs[port] = value

    def schedule(self, action: Action[T], value: T, delay_s: float = 0.0) -> None:
        """Give an action of this reactor a value, `delay_s` later; 0: one microstep later."""
        self._check(action, value)
        self.scheduled.append((action, _ns(delay_s, action.name), value))

    def stop(self) -> None:
        """End the program after this tag."""
        self.stopped = True

    def _check(self, port: Port[Any], value: Any) -> None:
        if port not in self.reaction.sets:
            raise ConfigError(self.reaction.name, port.name, "it sets an undeclared port", "Name it in `sets`.")
        if not isinstance(value, port.kind):
            given, kind = type(value).__name__, port.kind.__name__
            raise DataError(f"{self.reaction.name} sets {port.name} to a {given}; its class is {kind}")

    def react(self) -> None:
        """Call the reaction; keep its exception in `error`."""
        try:
            self.reaction.body(self)
        except BaseException as error:  # noqa: BLE001 - the scheduler raises it on its own thread
            error.add_note(f"in reaction {self.reaction.name} at {self.tag}")
            self.error = error


# --- Programs


@dataclass(frozen=True)
class Connection:
    """`source` sets `target`, at the same tag or, with a delay, at a later one."""

    source: Output[Any]
    target: Input[Any]
    delay_ns: int | None


def connect(source: Output[T], target: Input[T], after_s: float | None = None) -> Connection:
    """A connection without a delay, or with one of `after_s`; 0 is one microstep, which allows a cycle."""
    return Connection(source, target, None if after_s is None else _ns(after_s, f"{source.name} to {target.name}"))


class Program:
    """Reactors and their connections. ConfigError if they are no program: see `_check_ports` and `_levels`.

    `levels` has the level of each reaction by name.
    """

    def __init__(self, reactors: Sequence[Reactor], connections: Sequence[Connection]) -> None:
        self.reactors = tuple(reactors)
        self.reactions = [reaction for reactor in reactors for reaction in reactor.reactions]
        _check_names([reactor.name for reactor in reactors], "reactor")
        _check_names([reaction.name for reaction in self.reactions], "reaction")
        self._check_ports(connections)
        self._targets: dict[Port[Any], list[Connection]] = defaultdict(list)
        for connection in connections:
            self._targets[connection.source].append(connection)
        self._triggered: dict[Port[Any], list[int]] = defaultdict(list)
        for index, reaction in enumerate(self.reactions):
            for port in reaction.triggers:
                self._triggered[port].append(index)
        self._level = self._levels()
        self.levels = {one.name: level for one, level in zip(self.reactions, self._level, strict=True)}

    def _check_ports(self, connections: Sequence[Connection]) -> None:
        """Raise ConfigError for a port of another program, another class, with two sources, or that nothing sets."""
        ports = [port for reactor in self.reactors for port in reactor.ports]
        known, sources = set(ports), {}
        for one in connections:
            for port in (one.source, one.target):
                if port not in known:
                    raise ConfigError(port.name, "unknown", "its reactor is not in the program", "Add the reactor.")
            if not issubclass(one.source.kind, one.target.kind):
                reason = f"{one.source.name} sends {one.source.kind.__name__}"
                raise ConfigError(one.target.name, one.target.kind.__name__, reason, "Give both the same class.")
            if other := sources.get(one.target):
                remedy = "Declare an input for each source."
                raise ConfigError(one.target.name, one.source.name, f"it already gets values from {other}", remedy)
            if one.target is one.target.reactor.start:
                raise ConfigError(one.target.name, one.source.name, "only the start sets it", "Declare an input.")
            sources[one.target] = one.source.name
        used = {port for one in self.reactions for port in (*one.triggers, *one.reads)}
        made = {port for one in self.reactions for port in one.sets}
        for port in ports:
            if isinstance(port, Input) and port is not port.reactor.start and port not in sources:
                raise ConfigError(port.name, "unconnected", "nothing sets this input", "Connect an output to it.")
            if isinstance(port, Output | Action) and port not in made:
                raise ConfigError(port.name, "unset", "no reaction sets it", "Name it in the `sets` of a reaction.")
            if isinstance(port, Input | Action) and port is not port.reactor.start and port not in used:
                raise ConfigError(port.name, "unread", "no reaction reads it", "Name it in `on` or `reads`.")

    def _levels(self) -> list[int]:
        """The level of each reaction, from 0. ConfigError for a cycle without a delay."""
        before: list[set[int]] = [set() for _ in self.reactions]  # reactions that must be called before
        readers: dict[Port[Any], list[int]] = defaultdict(list)
        for index, reaction in enumerate(self.reactions):
            for port in {*reaction.triggers, *reaction.reads}:
                readers[port].append(index)
        first = 0
        for reactor in self.reactors:
            for index in range(first + 1, first + len(reactor.reactions)):
                before[index].add(index - 1)
            first += len(reactor.reactions)
        for index, reaction in enumerate(self.reactions):
            for port in reaction.sets:
                for one in self._targets[port]:
                    if one.delay_ns is None:
                        for reader in readers[one.target]:
                            before[reader].add(index)
        levels: dict[int, int] = {}
        while len(levels) < len(before):
            ready = [i for i, those in enumerate(before) if i not in levels and those <= levels.keys()]
            if not ready:
                raise self._cycle({i: those - levels.keys() for i, those in enumerate(before) if i not in levels})
            levels |= {i: 1 + max((levels[j] for j in before[i]), default=-1) for i in ready}
        return [levels[index] for index in range(len(before))]

    def _cycle(self, before: dict[int, set[int]]) -> ConfigError:
        """The error for reactions that wait for one another; each of `before` has an earlier one."""
        path = [min(before)]
        while path.count(path[-1]) < 2:
            path.append(min(before[path[-1]]))
        cycle = [self.reactions[index].name for index in reversed(path[path.index(path[-1]) :])]
        remedy = "Give one of the connections between them a delay, at least after_s=0."
        return ConfigError("program", " → ".join(cycle), "a cycle without a delay has no first reaction", remedy)

    def execution(self, until_s: float, record: Callable[[Event], None] | None) -> Iterator[list[Moment]]:
        """The calls of one level after the other, for a scheduler that makes them before it takes the next.

        Ends when no value is left, with `Moment.stop`, or before the first tag after `until_s`. `record` gets an event
        for each call, in an order that does not depend on the scheduler. Raises the first error of a level, and with
        `record` DataError for a value that was changed after it was sent.
        """
        mail = _Mail(record is not None)
        for one in self.reactors:
            mail.send(Tag(0), one.start, None)
        while mail.tags and mail.tags[0].time_ns <= until_s * 1e9:
            tag = heapq.heappop(mail.tags)
            present, stopped = mail.values[tag], False
            mail.check(tag, [])
            called = {index for port in present for index in self._triggered[port]}
            due = [(self._level[index], index) for index in called]
            heapq.heapify(due)
            while due:
                level, moments = due[0][0], []
                while due and due[0][0] == level:
                    moments.append(Moment(tag, self.reactions[heapq.heappop(due)[1]], level, present))
                yield moments
                mail.check(tag, moments)
                for moment in moments:
                    if moment.error is not None:
                        raise moment.error
                    if record is not None:
                        record(Event.of(moment))
                    stopped |= moment.stopped
                    for port in self._sent(moment, mail):
                        for index in self._triggered[port]:
                            if index not in called:
                                called.add(index)
                                heapq.heappush(due, (self._level[index], index))
            mail.drop(tag)
            if stopped:
                return

    def _sent(self, moment: Moment, mail: _Mail) -> Iterator[Port[Any]]:
        """Send what a call has set; the ports that have a value at its tag already."""
        tag = moment.tag
        for action, delay_ns, value in moment.scheduled:
            mail.send(tag.after(delay_ns), action, value)
        for port, value in moment.outputs.items():
            for one in self._targets[port]:
                if one.delay_ns is not None:
                    mail.send(tag.after(one.delay_ns), one.target, value)
                elif one.target in mail.values[tag]:
                    raise DataError(f"{port.name} is set by two reactions at {tag}")
                else:
                    mail.send(tag, one.target, value)
                    yield one.target


class _Mail:
    """Values by tag and port. `checked`: a value must be as it was when it was sent."""

    def __init__(self, checked: bool) -> None:
        self.values: dict[Tag, dict[Port[Any], Any]] = {}
        self.tags: list[Tag] = []  # a heap
        self._checked, self._digests = checked, dict[tuple[Tag, Port[Any]], str]()

    def send(self, tag: Tag, port: Port[Any], value: Any) -> None:
        while port in self.values.get(tag, {}):  # two sent at different microsteps with one delay
            tag = tag.after(0)
        if tag not in self.values:
            heapq.heappush(self.tags, tag)
        self.values.setdefault(tag, {})[port] = value
        if self._checked:
            self._digests[tag, port] = digest(value)

    def drop(self, tag: Tag) -> None:
        for port in self.values.pop(tag):
            self._digests.pop((tag, port), None)

    def check(self, tag: Tag, moments: Sequence[Moment]) -> None:
        """Raise DataError for a value of `tag` that was changed, during these calls or at an earlier tag."""
        for port, value in self.values[tag].items() if self._checked else ():
            if digest(value) != self._digests[tag, port]:
                names = " or ".join(moment.reaction.name for moment in moments) or "a reaction of an earlier tag"
                raise DataError(f"{names} changed the value of {port.name} at {tag} after it was sent; change a copy")


def _check_names(names: Sequence[str], what: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError("program", name, f"two {what}s have this name", "Give one of them another name.")


# --- Schedulers


def run(
    program: Program, threads: int = 1, until_s: float = math.inf, record: Callable[[Event], None] | None = None
) -> None:
    """Execute `program` on `threads` threads, of which this is one, without waiting for the time of tags.

    See `Program.execution`. A program can be executed once: its reactors have state.
    """
    if not (isinstance(threads, int) and threads >= 1):
        raise ConfigError("threads", threads, "no thread would call the reactions", "Set it to 1 or more.")
    with ThreadPoolExecutor(max(1, threads - 1), "reaction") as pool:
        for moments in program.execution(until_s, record):
            left = deque(moments)
            helpers = [pool.submit(_react, left) for _ in range(min(threads, len(moments)) - 1)]
            _react(left)
            for helper in helpers:
                helper.result()


def _react(left: deque[Moment]) -> None:
    """Make calls until none is left; other threads do the same."""
    while True:
        try:
            moment = left.popleft()
        except IndexError:
            return
        moment.react()


async def play(
    program: Program,
    threads: Threads | None = None,
    until_s: float = math.inf,
    record: Callable[[Event], None] | None = None,
) -> None:
    """Execute `program` on the running event loop; a tag begins when the loop's clock has advanced by its time.

    Reactions are called on `threads`, or in place. A `VirtualTimeLoop` needs `OrderedThreads`.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    for moments in program.execution(until_s, record):
        wait_s = start_s + moments[0].tag.time_ns * 1e-9 - loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if threads is None:
            _react(deque(moments))
        else:
            await asyncio.gather(*(threads.call(one.react, REACTION_S, one.reaction.name) for one in moments))


# --- Traces


class Event(NamedTuple):
    """One call in a trace, and a digest of what it set. Equal traces mean equal calls with equal results."""

    tag: Tag
    level: int
    reaction: str
    digest: str

    @classmethod
    def of(cls, moment: Moment) -> Event:
        """The event of a finished call. DataError for a value without a digest."""
        outputs = [(port.name, value) for port, value in moment.outputs.items()]
        scheduled = [(action.name, delay_ns, value) for action, delay_ns, value in moment.scheduled]
        return cls(moment.tag, moment.level, moment.reaction.name, digest((outputs, scheduled)))


def digest(value: Any) -> str:
    """A digest of a value's type and all of its bits. DataError if it is of another class than `_add` lists."""
    state = hashlib.blake2b(digest_size=8)
    _add(state, value)
    return state.hexdigest()


def _add(state: Any, value: Any) -> None:
    """Add a value to a digest: its type and all of its bits."""
    state.update(f"<{type(value).__name__}".encode())
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        state.update(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        state.update(repr(value).encode())
    elif isinstance(value, tuple | list):
        for item in value:
            _add(state, item)
    elif isinstance(value, dict):
        _add(state, list(value.items()))
    elif dataclasses.is_dataclass(value):
        _add(state, [getattr(value, field.name) for field in dataclasses.fields(value)])
    else:
        remedy = "send numbers, text, arrays, lists, dicts or dataclasses of them, or run without `record`"
        raise DataError(f"a {type(value).__name__} has no digest: {remedy}")
    state.update(b">")
