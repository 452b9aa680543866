"""First and last sections of the page: result, figures, curve, answers; invariants, groups, events, settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxroll import config as configs
from jaxroll.report import plots
from jaxroll.report.formats import UNKNOWN, duration, known, mesh, moment, number, percent
from jaxroll.report.plots import NOTHING, Markup, PlottedRun, card, figures_row, legend, raw, tag
from jaxroll.report.record import Check, Run, checks, restart_words
from jaxroll.report.summary import of_kind, state_of


def header(view: PlottedRun) -> Markup:
    """Name, state, the one result, and the setting."""
    run = view.run
    state = state_of(run)
    badge = tag("span", state, class_=f"state {state}")
    simulated = tag("span", "simulated (S)", class_="state") if run.is_simulated else NOTHING
    title = tag("div", tag("b", run.name), badge, simulated, moment(run.created_s), class_="title")
    return tag("header", title, _result(view.figures), _lead(run, view.figures))


def _result(f: Mapping[str, Any]) -> Markup:
    if f["accuracy_start"] is None:
        return tag("h1", tag("span", "not evaluated yet", class_="from"))
    if f["eval_steps"][0] == f["eval_steps"][1]:
        return tag("h1", percent(f["accuracy_start"]))
    parts = [
        tag("span", percent(f["accuracy_start"]), class_="from"),
        tag("span", "→", class_="arrow"),
        tag("span", percent(f["accuracy_end"])),
    ]
    if words := plots.gain_words(f):
        parts.append(tag("span", words, class_=f"gain {_verdict(f['accuracy_gain_low'], f['accuracy_gain_high'])}"))
    return tag("h1", *parts)


def _verdict(low: float, high: float) -> str:
    """True if the interval lies above 0, below 0, or around it."""
    return "up" if low > 0 else "down" if high < 0 else "even"


def _lead(run: Run, f: Mapping[str, Any]) -> Markup:
    model, task = run.config.get("model") or {}, run.config.get("task") or {}
    items = f" on {number(f['heldout_items'])} questions" if f["heldout_items"] else ""
    return tag(
        "p",
        f"Held-out accuracy{items} of ",
        tag("b", task.get("name") or task.get("source") or "a task"),
        ", model ",
        tag("b", model.get("size", UNKNOWN)),
        ", trained by asynchronous RL at ",
        tag("b", f"α = {f['alpha']:g}"),
        ": the sampler (",
        tag("b", mesh(f["sampler_mesh"])),
        ") and the learner (",
        tag("b", mesh(f["learner_mesh"])),
        ") are processes with meshes of their own.",
        class_="lead",
    )


def key_figures(view: PlottedRun) -> Markup:
    """The most important figures."""
    f = view.figures
    rewards = f"{number(f['reward_first'], 2)} → {number(f['reward_last'], 2)}"
    row = figures_row(
        (f"{number(f['steps'])} / {number(f['steps_wanted'])}", "steps trained"),
        (duration(f["seconds"]), "from warm start to report"),
        (percent(f["overlap"]), "of the learner's compute time overlaps useful decoding"),
        (f"{number(f['age_mean'], 2)} / {number(f['age_max'])}", "age of trained tokens, mean / largest"),
        (number(f["tokens_per_s"]), "decoded tokens per second"),
        (number(f["samples_per_s"]), "trained samples per second"),
        (rewards if known(f["reward_first"]) else UNKNOWN, "training reward, first → last 10 steps"),
        (number(f["restarts"]), "processes died and were started again"),
    )
    return tag("section", row, class_="card flush")


def learning(view: PlottedRun) -> Markup:
    """Reward and accuracy over steps and over time."""
    if not (view.steps or view.evals):
        return NOTHING
    keys = legend(
        ("reward", "training reward: each step, and its moving mean"),
        ("heldout", "held-out accuracy, greedy, with 95 % intervals"),
    )
    by_step = plots.learning(view.steps, view.evals, lambda row: row["step"], "step")
    since = "minutes since the run began, warm start included"
    by_time = plots.learning(view.steps, view.evals, view.minutes, since)
    both = tag("div", tag("div", by_step), tag("div", by_time), class_="two")
    return card("Learning", "Held-out questions are never trained on.", keys, both)


def before_and_after(view: PlottedRun) -> Markup:
    """The same questions at the first and the last evaluation."""
    found = questions(view.evals)
    if not found:
        return NOTHING
    hint = "The same held-out questions, answered greedily at the first and at the last evaluation."
    return card("Before and after", hint, table(found, view.evals[0]["step"], view.evals[-1]["step"]))


# --- answers to the same held-out questions at the first and at the last evaluation

Row = dict[str, Any]


@dataclass(frozen=True)
class ShownAnswer:
    """One text and whether it was right."""

    text: str
    ok: bool
    extracted: str | None = None  # the part that was scored; None: all of it


@dataclass(frozen=True)
class ShownPrompt:
    """A prompt with its answers; `expected` is empty if the task has none."""

    prompt: str
    expected: str
    before: ShownAnswer
    after: ShownAnswer | None


def questions(evals: Sequence[Row]) -> list[ShownPrompt]:
    """The examples of the first evaluation, each with its answer at the last one when that is another."""
    if not evals:
        return []
    later = {_place(example): example for example in _examples(evals[-1])} if len(evals) > 1 else {}
    return [
        ShownPrompt(
            str(example.get("prompt", "")),
            str(example.get("answer") or ""),
            _answer(example),
            _answer(later[_place(example)]) if _place(example) in later else None,
        )
        for example in _examples(evals[0])
    ]


def _examples(row: Row) -> list[dict]:
    return [example for example in row.get("examples") or () if isinstance(example, dict)]


def _place(example: dict) -> str:
    return str(example.get("prompt", ""))


def _answer(example: dict) -> ShownAnswer:
    extracted = example.get("extracted")
    return ShownAnswer(
        str(example.get("text", "")), bool(example.get("ok")), None if extracted is None else str(extracted)
    )


def table(found: Sequence[ShownPrompt], first_step: int, last_step: int) -> Markup:
    """The questions side by side, right and wrong by color and sign."""
    if not found:
        return raw("")
    head = ["question", f"at step {first_step}"] + ([f"at step {last_step}"] if found[0].after else [])
    rows = [tag("tr", tag("td", _prompt(q)), tag("td", _cell(q.before)), *_after(q)) for q in found]
    headings = tag("tr", *(tag("th", words) for words in head))
    return tag("div", tag("table", headings, *rows, class_="answers"), class_="scroll")


def _prompt(question: ShownPrompt) -> Markup:
    expected = [tag("div", "answer: ", tag("bdi", question.expected, class_="mono"), class_="hint")]
    return tag("div", tag("bdi", question.prompt, class_="mono"), *(expected if question.expected else []))


def _after(question: ShownPrompt) -> list[Markup]:
    return [tag("td", _cell(question.after))] if question.after else []


def _cell(answer: ShownAnswer) -> Markup:
    words, mark = answer.text or "(nothing)", "right" if answer.ok else "wrong"
    text = tag("bdi", words, class_=f"mono {mark}", title=mark)
    if answer.extracted is None or answer.extracted == answer.text:
        return text
    return tag("div", text, tag("div", "scored: ", tag("bdi", answer.extracted or "(nothing)"), class_="hint"))


# --- Sections from the log: invariants, groups, events, settings

EVENTS_SHOWN = 400
GROUP_STATES = {
    "PENDING": "issued, not leased", "LEASED": "being sampled", "READY": "complete, not claimed",
    "CLAIMED": "claimed, not trained", "ACKED": "trained", "TRIMMED": "trained, in a durable checkpoint",
    "EXPIRED": "ended untrained", "DEAD": "broken: a member failed too often",
}  # fmt: skip


def promises(view: PlottedRun) -> Markup:
    """The invariants and their result in this run."""
    rows = [_check_row(check) for check in checks(view.figures, view.run.config)]
    return card("Invariants", "Measured in this run.", tag("table", *rows, class_="checks"))


def _check_row(check: Check) -> Markup:
    class_, sign = {True: ("ok", "✓"), False: ("no", "✗"), None: ("open", "·")}[check.holds]
    name = tag("td", check.name, tag("span", check.meaning, class_="hint"))
    bound = tag("td", check.bound, class_="muted")
    return tag("tr", tag("td", sign, class_=class_), name, tag("td", check.found), bound)


def groups(view: PlottedRun) -> Markup:
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


def events(view: PlottedRun) -> Markup:
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


def _event_table(view: PlottedRun, rows: Sequence[tuple[float, str, str]]) -> Markup:
    written = [_row(duration(max(0.0, view.clock(t))), role, _foreign(words)) for t, role, words in rows]
    return tag("div", tag("table", *written, class_="events"), class_="scroll")


EVENT_WORDS: Mapping[str, Callable[[Row], str]] = {
    "restart": lambda row: (
        f"{row.get('process')}{f' (pid {pid})' if (pid := row.get('pid')) else ''} {restart_words(row)}"
    ),
    "event": lambda row: str(row.get("text", "")),
    "compile": lambda row: f"{row.get('what')}: {duration(row['seconds'])}" if known(row.get("seconds")) else "",
}


def _event_words(row: Row) -> str:
    words = EVENT_WORDS.get(str(row.get("kind")))
    return words(row) if words else ""


def settings(view: PlottedRun) -> Markup:
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
