"""Live view of a run: a table on a terminal, plain lines elsewhere, with output at least every ten seconds.

Both views keep a `Status`; both also write TensorBoard events, since every metrics row passes here.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, Group
from rich.live import Live
from rich.measure import Measurement
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from jaxroll.control import run_dir as run_dirs
from jaxroll.control.supervisor import ProcessView
from jaxroll.metrics import Scalars, TensorBoardTracker, Tracker
from jaxroll.report import activity
from jaxroll.report.activity import Bottleneck
from jaxroll.run_paths import RunPaths, lives_in, names_of_learner

SILENCE_S = 8.0
EVENTS_SHOWN = 4
_TERMINALS_OF_LINES = ("", "dumb", "unknown")  # values of TERM


class LiveView:
    """Common to both views: folds rows into the status, writes TensorBoard events and the devices into run.json."""

    def __init__(self, run_dir: Path, of_steps: int, *, now: Callable[[], float] = time.time) -> None:
        self._run_dir, self._now = run_dir, now
        self.status = Status(of_steps)
        self._events: TensorBoardTracker | None = None
        self.tensorboard, self.aliases = True, dict[str, str]()
        self.trackers: Sequence[Tracker] = ()
        self.events_lost = 0  # metrics rows that could not be written as TensorBoard events

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take new metric rows."""
        for row in rows:
            if row.get("kind") == "devices":
                run_dirs.note_devices(self._run_dir, str(row.get("role")), row)
            self._tensorboard(row)
            for tracker in self.trackers:
                tracker.log(row)
            line = self.status.take(row)
            if line:
                self._line(line, row)

    def tick(self, processes: Sequence[ProcessView]) -> None:
        """Called about ten times a second."""

    def say(self, text: str) -> None:
        """Show a message that stays."""

    def close(self) -> None:
        """Close files and release the terminal."""
        if self._events is not None:
            self._events.close()
        for tracker in self.trackers:
            tracker.close()

    def _tensorboard(self, row: dict[str, Any]) -> None:
        if not self.tensorboard or row.get("kind") not in Scalars.SHOWN:
            return
        try:
            if self._events is None:
                self._events = TensorBoardTracker(RunPaths(self._run_dir).tensorboard, self.aliases)
            self._events.log(row)
        except OSError as error:
            self.events_lost += 1
            if self.events_lost == 1:
                folder = RunPaths(self._run_dir).tensorboard
                self.say(f"{folder}: {error.strerror}. TensorBoard events are lost until they can be written.")

    def _line(self, line: str, row: dict[str, Any]) -> None:
        """Show the line of a row."""


class PlainView(LiveView):
    """Lines for a pipe, a notebook or a log; after a while without events, a line names what the run waits for."""

    def __init__(
        self, run_dir: Path, of_steps: int, *, out: TextIO | None = None, now: Callable[[], float] = time.time
    ):
        super().__init__(run_dir, of_steps, now=now)
        self._out = out or sys.stdout
        self._last_print_s = now()
        self._bottleneck = ""  # the part that was named last

    def tick(self, processes: Sequence[ProcessView]) -> None:
        """Print the current activity if nothing was printed for `SILENCE_S`."""
        if self._now() - self._last_print_s >= SILENCE_S:
            self.say(f"… {self.status.doing(self._now(), processes)}")

    def say(self, text: str) -> None:
        """One line."""
        print(text, file=self._out, flush=True)
        self._last_print_s = self._now()

    def _line(self, line: str, row: dict[str, Any]) -> None:
        self.say(line)
        if (found := self.status.bottleneck) and found.part != self._bottleneck:
            self._bottleneck = found.part
            self.say(f"bottleneck: {found.text()}")


class TableView(LiveView):
    """A table of the latest steps, the latest events, and a spinner with the current activity."""

    def __init__(
        self, run_dir: Path, of_steps: int, *, console: Console | None = None, now: Callable[[], float] = time.time
    ):
        super().__init__(run_dir, of_steps, now=now)
        self._console = console or Console()
        self._recent: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._spinner = Spinner("dots", "starting")
        self._live = Live(self._render(), console=self._console, refresh_per_second=4)
        self._live.start()

    def tick(self, processes: Sequence[ProcessView]) -> None:
        """Redraw."""
        self._spinner.update(text=self.status.doing(self._now(), processes))
        self._live.update(self._render())

    def say(self, text: str) -> None:
        """Show a message above the table, where it stays."""
        self._live.console.print(Text(text))

    def close(self) -> None:
        """Leave the last table on the screen."""
        self._spinner.update(text="")
        self._live.update(self._render())
        self._live.stop()
        super().close()

    def _line(self, line: str, row: dict[str, Any]) -> None:
        if row.get("kind") != "step":
            self._recent.append(line)

    def _render(self) -> Group:
        table = Table(
            title=str(self._run_dir),
            title_style="dim",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for heading in HEADINGS[:-1]:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column(HEADINGS[-1])  # the only column that gives way where the terminal is narrow
        for line in self.status.steps:
            *numbers, waits = line.cells(self.status.of_steps)
            table.add_row(*numbers, _OneLine(waits))
        limit = [f"bottleneck: {self.status.bottleneck.text()}"] if self.status.bottleneck else []
        return Group(
            *([table] if self.status.steps else []),
            *(Text(text) for text in limit),
            *(Text(text, style="dim") for text in self._recent),
            self._spinner,
        )


class _OneLine:
    """A text on one line, cut between two words where it is too long, so that no number is shown in part."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, len(self._text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        text, width = self._text, options.max_width
        if len(text) > width:
            text = text[: text.rfind(" ", 0, width - 1) + 1] + "…"
        yield Text(text, no_wrap=True, overflow="crop")


def open_view(run_dir: Path, config: Mapping[str, Any]) -> LiveView:
    """The table on a terminal that can move its cursor, lines elsewhere; `config` is the run's, as in `run.json`."""
    of_steps = config["schedule"]["steps"]
    table = sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in _TERMINALS_OF_LINES
    view = TableView(run_dir, of_steps) if table else PlainView(run_dir, of_steps)
    view.status.config = config
    return view


# --- state of a run for display: folded from metrics rows and process states. Pure

STEPS_KEPT = 12
RATES_KEPT = 5
STEPS_MEASURED, STEPS_BETWEEN, ROWS_KEPT = 20, 5, 4000  # for the bottleneck: it is measured again after some steps


@dataclass(frozen=True)
class StepLine:
    """One trained step as shown: rates are None until the first report."""

    step: int
    reward: float | None
    accuracy: float | None  # the newest held-out score at that moment
    accuracy_step: int | None
    tokens_per_s: float | None
    age_mean: float | None
    age_max: float | None
    seconds: float | None
    waits: str

    def cells(self, of_steps: int) -> tuple[str, ...]:
        """The row of the table; a dash where nothing is known."""
        held = "-" if self.accuracy is None else f"{100 * self.accuracy:.1f} % @{self.accuracy_step}"
        age = "-" if self.age_mean is None else f"{self.age_mean:.2f} / {_number(self.age_max, '.0f')}"
        return (
            f"{self.step}/{of_steps}",
            _number(self.reward, ".3f"),
            held,
            _number(self.tokens_per_s, ",.0f"),
            age,
            _number(self.seconds, ".2f"),
            self.waits or "-",
        )

    def text(self, of_steps: int) -> str:
        """The row as one plain line."""
        step, reward, held, rate, age, seconds, waits = self.cells(of_steps)
        return (
            f"step {step}  reward {reward}  held-out {held}  {rate} tokens/s  age {age}  {seconds} s/step  "
            f"waits: {waits}"
        )


HEADINGS = ("step", "reward", "held-out", "tokens/s", "age / max", "s/step", "waiting for")


@dataclass
class Status:
    """The displayed state of a run: `take` updates it, `doing` describes it."""

    of_steps: int
    config: Mapping[str, Any] | None = None  # of the run, as a dict; without it no bottleneck is named
    bottleneck: Bottleneck | None = None
    steps: deque[StepLine] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    running: dict[tuple[str, str], float] = field(default_factory=dict)  # (role, what) → unix time it began
    _lines: dict[str, tuple[str, float]] = field(default_factory=dict)  # role → its newest event, and when
    _rates: dict[str, deque[float]] = field(default_factory=dict)
    _stalled_role: str = ""  # the role whose newest report of a stall is not over
    _waits: dict[str, str] = field(default_factory=dict)  # who is being waited for → why
    _accuracy: tuple[float, int] | None = None
    _last_step_t: float | None = None
    _recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=ROWS_KEPT))
    _supervised: set[str] = field(default_factory=set)  # names of the supervisor's processes, which it reports itself

    def take(self, row: Mapping[str, Any]) -> str | None:
        """Update from one row; return the plain line to print for it, if any."""
        role = str(row.get("role"))
        if row.get("kind") in ("step", "stats", "span", "store"):
            self._recent.append(dict(row))
        if row.get("kind") in ("step", "eval", "restart", "compile"):
            self._lines.pop(role, None)  # its reported activity is over
        if row.get("kind") == "step":
            self._lines.pop(self._stalled_role, None)  # a step ends the stall that the store reported
            self._stalled_role = ""
        match row.get("kind"):
            case "step":
                return self._step(row)
            case "eval":
                return self._eval(row)
            case "stats":
                rates = self._rates.setdefault(role, deque(maxlen=RATES_KEPT))
                rates.append(row.get("tokens_per_s") or 0.0)
            case "store":
                self._waits = {str(who): str(why) for who, why in (row.get("waits") or {}).items()}
            case "compile":
                return self._compile(row)
            case "event" if row.get("what") in ("join", "leave"):
                if row.get("what") == "leave":
                    self.forget(role)
                is_known = any(self._lives_in(role, name) for name in self._supervised)
                return None if is_known else f"{role}: {row.get('text')}"
            case "event":
                self._lines[role] = (str(row.get("text")), float(row.get("t") or 0.0))
                if row.get("what") == "stall":
                    self._stalled_role = role
                elif self._stalled_role == role:
                    self._stalled_role = ""
                return f"{role}: {row.get('text')}"
            case "restart":
                self.forget(str(row.get("process")))
        return None

    def _lives_in(self, role: str, process: str) -> bool:
        return lives_in(role, process, names_of_learner(self.config or {}))

    def forget(self, process: str) -> None:
        """Forget the activity of a dead process."""
        self.running = {key: t for key, t in self.running.items() if not self._lives_in(key[0], process)}
        for known in (self._rates, self._lines):
            for role in [role for role in known if self._lives_in(role, process)]:
                del known[role]

    def doing(self, now_unix_s: float, processes: Sequence[ProcessView]) -> str:
        """One sentence about the run's current activity; never empty."""
        self._supervised = {p.name for p in processes}
        leaving = [f"{p.name} ({p.seconds:.0f} s)" for p in processes if p.state == "stopping"]
        if leaving:
            return f"stopping {', '.join(leaving)}"
        parts = [f"{role}: {what}, {max(0.0, now_unix_s - t):.0f} s" for (role, what), t in self.running.items()]
        busy = {role for role, _ in self.running}
        parts += [
            f"{role}: {text}, {max(0.0, now_unix_s - t):.0f} s"
            for role, (text, t) in self._lines.items()
            if role not in busy and any(self._lives_in(role, p.name) and p.state == "running" for p in processes)
        ]
        parts += [f"{p.name} died, starts again soon" for p in processes if p.state == "backoff"]
        parts += [f"waiting for {p.name}, {p.seconds:.0f} s" for p in processes if p.state == "starting"]
        parts += [f"waiting for {who} ({why})" for who, why in self._waits.items()]
        if self.steps and self.steps[-1].step >= self.of_steps:
            parts.insert(0, "all steps are trained")
        elif self._last_step_t is not None:
            parts.insert(0, f"step {self.steps[-1].step + 1}, {max(0.0, now_unix_s - self._last_step_t):.0f} s")
        if not parts:
            ages = [f"{p.name} ({p.seconds:.0f} s)" for p in processes if p.state == "running"]
            parts = [f"waiting for the first report of {', '.join(ages)}" if ages else "starting"]
        return "; ".join(parts[:4])

    def _step(self, row: Mapping[str, Any]) -> str:
        accuracy, at = self._accuracy or (None, None)
        ended, begun = row.get("t1") or row.get("t"), self._last_step_t
        seconds = ended - begun if ended is not None and begun is not None else row.get("train_s")
        self._last_step_t = ended
        line = StepLine(
            int(row.get("step", 0)),
            row.get("reward_mean"),
            accuracy,
            at,
            self._tokens_per_s(),
            row.get("age_mean"),
            row.get("age_max"),
            seconds,
            self._wait_text(row),
        )
        self.steps.append(line)
        if self.config is not None and line.step % STEPS_BETWEEN == 0:
            self.bottleneck = activity.bottleneck(activity.latest(list(self._recent), STEPS_MEASURED), self.config)
        return line.text(self.of_steps)

    def _tokens_per_s(self) -> float | None:
        """The sum over all samplers, each averaged over its last reports."""
        return sum(sum(rates) / len(rates) for rates in self._rates.values()) if self._rates else None

    def _wait_text(self, row: Mapping[str, Any]) -> str:
        wait_s = row.get("wait_s") or 0.0
        parts = [f"groups, {wait_s:.1f} s"] if wait_s >= 0.05 else []
        return "; ".join(parts + [f"{who} ({why})" for who, why in self._waits.items()])

    def _eval(self, row: Mapping[str, Any]) -> str | None:
        if row.get("accuracy") is None:
            return None
        self._accuracy = (float(row["accuracy"]), int(row.get("step", 0)))
        return f"held-out accuracy at step {self._accuracy[1]}: {100 * self._accuracy[0]:.1f} % of {row.get('n', '?')}"

    def _compile(self, row: Mapping[str, Any]) -> str | None:
        key = (str(row.get("role")), str(row.get("what")))
        if row.get("state") == "start":
            self.running[key] = float(row.get("t", 0.0))
            return None
        self.running.pop(key, None)
        return f"{key[0]}: {key[1]} took {row.get('seconds') or 0.0:.1f} s"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
