"""The settings of a run: the config, with what differs from the defaults set off, and what it ran on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxroll import config as configs
from jaxroll.report.formats import UNKNOWN, mesh, moment, number
from jaxroll.report.markup import Markup, tag
from jaxroll.report.record import Run


def settings_table(run: Run) -> Markup:
    """The config, folded away."""
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
        return mesh(value) if set(value) == {"data", "fsdp", "tensor"} else ", ".join(map(str, value.items()))
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
