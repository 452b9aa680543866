"""How long things lately took: means over the last few, by which the core knows who is slow."""

from __future__ import annotations

_HOLDERS_KEPT = 1000  # samplers whose speed is remembered


def lately(before_s: float, now_s: float) -> float:
    """The mean of the last few durations, the newest being `now_s`; `before_s` 0 says that it is the first."""
    return now_s if before_s == 0.0 else 0.8 * before_s + 0.2 * now_s


def note(durations: dict[str, float], name: str, took_s: float) -> None:
    """Remember that something of `name` took so long; who was not heard of for longest is forgotten."""
    durations[name] = lately(durations.pop(name, 0.0), took_s)
    while len(durations) > _HOLDERS_KEPT:
        del durations[next(iter(durations))]
