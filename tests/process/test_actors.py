"""Actors: the members are the same as without actors, also when an actor or its sampler is killed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import psutil
import pytest

from tests.harness.envs.slow_reward import TAKES_S
from tests.harness.train_process import START_S, Train, assert_sound

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
ACTORS = ("actor-0", "actor-1")
WORDS = (
    "--config.sft.steps=0",
    "--config.evaluator.every=0",
    "--config.supervisor.backoff_s=0.1",
    f"--config.placement.actors={len(ACTORS)}",
)
SETTLED_S = 1.0
Held = dict[tuple[int, int], int]  # (group, member) → attempt


def actor(train: Train, name: str) -> psutil.Process:
    """The process of an actor that has started."""
    index = name.partition("-")[2]
    deadline, pause = time.monotonic() + START_S, threading.Event()
    while time.monotonic() < deadline:
        for process in train.children():
            try:
                if process.cmdline()[1:5] == ["-m", "jaxroll", "actor", f"--index={index}"]:
                    return process
            except (psutil.Error, IndexError):
                continue
        pause.wait(0.05)
    pytest.fail(f"no {name} came up\n{train.logs()}", pytrace=False)


def leases(train: Train, holder: str) -> Held:
    """The members that `holder` has leased, with their attempts."""
    sql = f"SELECT group_id, member, attempt FROM leases WHERE holder = '{holder}'"
    return {(group, member): attempt for group, member, attempt in train.query(sql)}


def asking(rows: list[dict], names: tuple[str, ...], since: float) -> bool:
    """True if all episodes of the actors wait for the sampler, by their rows from after `since`.

    An episode counts from its first request until it is scored: choose `since` that much later than the stop.
    """
    last = {row["role"]: row for row in rows if row["kind"] == "stats" and row["t"] > since}
    said = [(row["samplers"]["sampler-0"], row["members_in_flight"]) for name, row in last.items() if name in names]
    return (
        len(said) == len(names) and all(seated == playing for seated, playing in said) and sum(p for _, p in said) > 0
    )


def settled(look: Callable[[], dict[str, Held]]) -> dict[str, Held]:
    """The value of `look` once it has not changed for a while: puts sent before a stop may still be in flight.

    For holders that continue to play it never settles; then the last value counts.
    """
    seen, since = look(), time.monotonic()
    deadline, pause = since + 10 * SETTLED_S, threading.Event()
    while time.monotonic() < min(deadline, since + SETTLED_S):
        pause.wait(SETTLED_S / 20)
        if (now := look()) != seen:
            seen, since = now, time.monotonic()
    return seen


def killed_at_work(train: Train, victim: psutil.Process, *holders: str, asked: bool = False) -> dict[str, Held]:
    """Kill `victim` while all `holders` have leases (if `asked`: while all wait for an answer); return the leases."""
    held: dict[str, Held] = {}
    while not (held and all(held.values())):  # until() has the deadline
        victim.send_signal(signal.SIGCONT)
        train.until(lambda rows: all(leases(train, holder) for holder in holders), f"work of {', '.join(holders)}")
        victim.send_signal(signal.SIGSTOP)  # once the store has its puts, its leases no longer change
        if asked:
            asked_since = partial(asking, names=holders, since=time.time() + 2 * TAKES_S)
            train.until(asked_since, "requests of all that is held")
        held = settled(lambda: {holder: leases(train, holder) for holder in holders})
    victim.send_signal(signal.SIGKILL)
    return held


def finished(train: Train) -> dict[tuple[int, int], tuple[int, str]]:
    """(attempt, holder) of every member that was put."""
    rows = train.query("SELECT group_id, member, attempt, holder FROM members WHERE digest <> ''")
    return {(group, member): (attempt, holder) for group, member, attempt, holder in rows}


@pytest.mark.soak
def test_a_run_of_actors_is_the_run_of_its_sampler(tmp_path) -> None:
    """With α = 0 the seed determines everything: groups, members and losses are equal bit for bit."""
    words = (*WORDS, "--config.task.env=tests.harness.envs.dense_reward:dense_reward", "--config.schedule.alpha=0")
    found = {}
    for name, more in (("actors", ()), ("sampler", ("--config.placement.actors=0",))):
        with Train(tmp_path / name, *words, *more) as train:
            assert train.finish() == 0, train.logs()
            assert_sound(train, steps=3, alpha=0)
            members = train.query("SELECT group_id, member, attempt, digest FROM members ORDER BY group_id, member")
            losses = [(row["loss"], row["grad_norm"]) for row in train.rows if row["kind"] == "step"]
            assert any(norm for _, norm in losses), "nothing was learned, so all versions have equal weights"
            found[name] = members, losses, {holder for _, holder in finished(train).values()}
            if name == "actors":
                assert_actors_are_told_of(train)
    assert found["actors"][:2] == found["sampler"][:2]
    assert (found["actors"][2], found["sampler"][2]) == (set(ACTORS), {"sampler-0"})


def assert_actors_are_told_of(train: Train) -> None:
    """Assert that actors report the metrics of episodes, and the sampler those of the requests that it served."""
    last = {row["role"]: row for row in train.rows if row["kind"] == "stats"}
    assert set(last) == {*ACTORS, "sampler-0"}
    episodes = sum(last[name]["episodes"] for name in ACTORS)
    assert episodes >= 3 * 16 and last["sampler-0"]["requests_served"] >= episodes
    assert all(last[name]["failed"] == {} and last[name]["samplers"].keys() == {"sampler-0"} for name in ACTORS)
    assert sum(len(row["rows"]) for row in train.rows if row["kind"] == "members") >= episodes


@pytest.mark.soak
def test_a_run_survives_the_kill_of_an_actor_and_of_its_sampler_in_mid_episode(free_run_dir) -> None:
    words = (
        *WORDS,
        "--config.task.env=tests.harness.envs.slow_reward:slow_reward",
        "--config.schedule.steps=12",
        "--config.schedule.in_flight_window=full",
        "--config.store.lease_s=20",
    )
    with Train(free_run_dir, *words) as train:
        train.until_step(2)
        orphans = killed_at_work(train, actor(train, "actor-0"), "actor-0")["actor-0"]
        train.until_step(4)
        waiting = killed_at_work(train, train.role("sampler"), *ACTORS, asked=True)
        assert train.finish() == 0, train.logs()
        assert_sound(train, steps=12, alpha=1)
        assert train.report()["restarts"] == 2
        done = finished(train)
        again = {key: done[key][0] for key, attempt in orphans.items() if key in done}
        assert again and all(attempt > orphans[key] for key, attempt in again.items()), "no member was sampled again"
        held = {key: (attempt, holder) for holder, leased in waiting.items() for key, attempt in leased.items()}
        kept = {key: done[key] for key in held if key in done}
        assert kept and kept == {key: held[key] for key in kept}, "a member was lost with the sampler"
        assert train.query("SELECT kind, error FROM failures") == []
        assert sum(row.get("requests_retried", 0) for row in train.rows if row["kind"] == "stats") > 0, (
            "no actor had a request"
        )
