"""Sections from the log: invariants, groups, events, settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxroll import config as configs
from jaxroll.report.figures.checks import Check, checks
from jaxroll.report.figures.record import Run
from jaxroll.report.figures.summary import of_kind
from jaxroll.report.formats import UNKNOWN, duration, known, mesh, moment, number
from jaxroll.report.page.svg import NOTHING, Markup, View, card, tag

Row = dict[str, Any]
EVENTS_SHOWN = 400
GROUP_STATES = {
    "PENDING": "issued, not leased", "LEASED": "being sampled", "READY": "complete, not claimed",
    "CLAIMED": "claimed, not trained", "ACKED": "trained", "TRIMMED": "trained, in a durable checkpoint",
    "EXPIRED": "ended untrained", "DEAD": "broken: a member failed too often",
}  # fmt: skip


def promises(view: View) -> Markup:
    """The invariants and their result in this run."""
    rows = [_check_row(check) for check in checks(view.figures, view.run.config)]
    return card("Invariants", "Measured in this run.", tag("table", *rows, class_="checks"))


def _check_row(check: Check) -> Markup:
    class_, sign = {True: ("ok", "✓"), False: ("no", "✗"), None: ("open", "·")}[check.holds]
    name = tag("td", check.name, tag("span", check.meaning, class_="hint"))
    bound = tag("td", check.bound, class_="muted")
    return tag("tr", tag("td", sign, class_=class_), name, tag("td", check.found), bound)


def groups(view: View) -> Markup:
    """The states of the issued groups, and the last failures."""
    history = view.run.history
    if not history.groups_by_state:
        return NOTHING
    counted = [(name, n) for name in GROUP_STATES if (n := history.groups_by_state.get(name))]
    rows = [_row(GROUP_STATES[name], number(n)) for name, n in counted]
    rows += [_row(f"… because: {reason}", number(n)) for reason, n in (history.reasons or {}).items()]
    parts = [tag("table", *rows, class_="facts")]
    if history.failures:
        failed = [_row(f"{f.group}.{f.member}", f.kind, _foreign(f.error)) for f in history.failures]
        words = f"failed members: {number(history.failed_members)}, the latest here"
        parts.append(tag("details", tag("summary", words), tag("div", tag("table", *failed), class_="scroll")))
    return card("States of the groups", "From the store's log.", *parts)


def events(view: View) -> Markup:
    """Restarts, compilations and other events."""
    rows = [
        (row["t"], str(row.get("role", "")), words)
        for row in view.run.rows
        if known(row.get("t")) and (words := _event_words(row))
    ]
    rows += [(a, "run", f"paused for {duration(b - a)}, then was resumed") for a, b in view.clock.pauses]
    if not rows:
        return NOTHING
    deaths = [(row["t"], "supervisor", _event_words(row)) for row in of_kind(view.run.rows, "restart")]
    folded = tag(
        "details", tag("summary", f"all {number(len(rows))}"), _event_table(view, sorted(rows)[-EVENTS_SHOWN:])
    )
    return card("Events", "", *([_event_table(view, deaths)] if deaths else []), folded)


def _event_table(view: View, rows: Sequence[tuple[float, str, str]]) -> Markup:
    written = [_row(duration(max(0.0, view.clock(t))), role, _foreign(words)) for t, role, words in rows]
    return tag("div", tag("table", *written, class_="events"), class_="scroll")


EVENT_WORDS: Mapping[str, Callable[[Row], str]] = {
    "restart": lambda row: f"{row.get('who')} (pid {row.get('pid')}) ended with {row.get('code')}; started again",
    "event": lambda row: str(row.get("text", "")),
    "compile": lambda row: f"{row.get('what')}: {duration(row['seconds'])}" if known(row.get("seconds")) else "",
}


def _event_words(row: Row) -> str:
    words = EVENT_WORDS.get(str(row.get("kind")))
    return words(row) if words else ""


def settings(view: View) -> Markup:
    """The machine and the config."""
    return card("Settings", "", machine_table(view.run), settings_table(view.run))


def _row(*cells: object) -> Markup:
    return tag("tr", *(tag("td", cell) for cell in cells))


def _foreign(words: str) -> Markup:
    """Text from outside: escaped, and without effect on the direction of the line."""
    return tag("bdi", words, class_="mono")


# --- settings: the config, with changed values marked, and the machine


def settings_table(run: Run) -> Markup:
    """The config, collapsed."""
    defaults = configs.to_dict(configs.Config())
    changed = sum(value != _at(defaults, room, name) for room, name, value in pairs(run.config))
    rooms = [_room(room, values, defaults) for room, values in run.config.items() if isinstance(values, Mapping)]
    summary = f"Config ({number(changed)} values differ from the defaults)"
    return tag("details", tag("summary", summary), tag("div", *rooms, class_="config"))


def machine_table(run: Run) -> Markup:
    """Commit, versions, devices."""
    return tag("div", *(_pair(name, value, False) for name, value in machine(run)), class_="config")


def machine(run: Run) -> Iterator[tuple[str, str]]:
    """(name, value) of what the run ran on."""
    about = run.about
    yield "made", moment(run.created_s)
    yield "command", " ".join(map(str, about.get("argv") or ())) or UNKNOWN
    yield "commit", str(about.get("commit") or UNKNOWN)[:13]
    yield "system", str(about.get("system") or UNKNOWN)
    yield "cores", str(about.get("cores") or UNKNOWN)
    yield "python", str(about.get("python") or UNKNOWN)
    for name, version in (about.get("versions") or {}).items():
        yield str(name), str(version)
    for role, found in (about.get("devices") or {}).items():
        if isinstance(found, Mapping):
            yield str(role), ", ".join(_written(value) for value in found.values())


def pairs(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(room, key, value) of every setting."""
    for room, values in config.items():
        for name, value in values.items() if isinstance(values, Mapping) else ():
            yield room, name, value


def _at(defaults: Mapping[str, Any], room: str, name: str) -> Any:
    return (defaults.get(room) or {}).get(name)


def _room(room: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Markup:
    rows = [_pair(name, _written(value), value != _at(defaults, room, name)) for name, value in values.items()]
    return tag("section", tag("h3", room), *rows)


def _pair(name: str, value: str, changed: bool) -> Markup:
    return tag(
        "div", tag("span", name), tag("span", value, class_="mono"), class_="pair changed" if changed else "pair"
    )


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            mesh(value) if set(value) - {"expert"} == {"data", "fsdp", "tensor"} else ", ".join(map(str, value.items()))
        )
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
