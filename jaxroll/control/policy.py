"""What follows when a process ends: pure decisions of the supervisor.

A process that dies is started again after a back-off that doubles; a long life forgives earlier deaths. Exit code 0
means "my work is done", `errors.EXIT_CONFIG` means "starting me again will not help", `errors.EXIT_CLOSED` that the
store closed the run, `errors.EXIT_WORN` "start me again, as often as I ask".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxroll.config import SupervisorConfig
from jaxroll.config.rules import LEADERS
from jaxroll.errors import EXIT_CLOSED, EXIT_CONFIG, EXIT_WORN

FORGIVEN_AFTER_S = 300.0


@dataclass(frozen=True)
class Lives:
    """The past of one process: deaths that are not forgiven, and restarts altogether."""

    deaths: int = 0
    restarts: int = 0


@dataclass(frozen=True)
class Done:
    """The process ended as it should."""


@dataclass(frozen=True)
class Restart:
    """Start it again after `delay_s`."""

    delay_s: float
    lives: Lives


@dataclass(frozen=True)
class GiveUp:
    """End the run, because of `reason`."""

    reason: str


Verdict = Done | Restart | GiveUp


def after_exit(name: str, code: int, lived_s: float, lives: Lives, config: SupervisorConfig) -> Verdict:
    """What to do about process `name`, which ended with `code` (negative: killed by that signal) after `lived_s`."""
    if code == 0:
        return Done()
    if code == EXIT_CONFIG:
        return GiveUp(f"{name} refused its configuration")
    if code == EXIT_CLOSED:
        return GiveUp("the store closed the run") if name in LEADERS else Done()
    if code == EXIT_WORN:
        return Restart(config.backoff_s, replace(lives, restarts=lives.restarts + 1))
    lives = replace(lives, deaths=1 if lived_s >= FORGIVEN_AFTER_S else lives.deaths + 1)
    if lives.deaths > config.max_restarts:
        return GiveUp(f"{name} died {lives.deaths} times, the last time {how(code)} (supervisor.max_restarts = "
                      f"{config.max_restarts})")  # fmt: skip
    delay_s = min(config.backoff_s * 2 ** (lives.deaths - 1), config.backoff_max_s)
    return Restart(delay_s, replace(lives, restarts=lives.restarts + 1))


def how(code: int) -> str:
    """The exit code in words."""
    if code == EXIT_WORN:
        return f"with exit code {code}, worn out by environments that hang in its threads"
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"
