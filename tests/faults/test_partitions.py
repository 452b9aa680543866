"""Fault 9, partitions: a role cut off from the store for longer than a lease, in one direction or both.

Nothing that was acknowledged is lost, no group is trained twice, and the store names the peer that it waits for. The
last tests cut a sampler, and an evaluator, off from the learner's weights only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.tcp_proxy import Proxy
from jaxroll.errors import EXIT_INTERRUPTED
from tests.harness.cluster.cluster import Cluster
from tests.harness.cluster.criteria import Row, judge
from tests.harness.cluster.real_roles import World
from tests.harness.cluster.short_leases import LEASE_S, SMALL, store_of
from tests.harness.cluster.weights_proxy import Courier

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.timeout(300)]
STALL_S = 1.0


def started(run: Cluster, proxy: Proxy, who: str, folder: Path) -> None:
    """Start a learner and a sampler, `who` behind the proxy, and wait until they have trained two steps."""
    run.until((run.run_dir / "store.addr").exists, "the store")
    address = proxy.address_file(folder, run.run_dir)
    run.learner(address_file=address if who == "learner" else None)
    run.sampler("sampler-0", seed=1, work_s=0.1, address_file=address if who == "sampler" else None)
    run.until_acked(2)


def named(run: Cluster, who: str) -> bool:
    """True if the store reports that it waits for the peer that is cut off."""
    return any(name.startswith(who) for name in run.status()["waits"])


@pytest.mark.parametrize("direction", ["both", "up", "down"])
@pytest.mark.parametrize("who", ["sampler", "learner"])
def test_a_partition_longer_than_a_lease_is_named_and_heals(
    tmp_path: Path, note: Callable[[Row], None], who: str, direction: str
) -> None:
    rules = (f"store.stall_s={STALL_S}", "store.stall_abort_s=600")
    with Cluster(tmp_path / "run", *SMALL, *rules) as run, Proxy(store_of(run)) as proxy:
        started(run, proxy, who, tmp_path / "cut")
        proxy.partition(direction)
        cut_s = time.monotonic()
        run.until(lambda: time.monotonic() - cut_s >= 2 * LEASE_S, "twice the lease time")
        at = run.until(lambda: run.acked() if named(run, who) else None, f"the store to name the {who}")
        proxy.heal()
        run.until_acked(at + 2)
        assert run.learners()[0].stop() == 0
        note(judge(run, f"9 {who} cut off, {direction}", 1, went_on_from=at))


@pytest.mark.parametrize("who", ["sampler", "learner"])
def test_a_partition_that_does_not_heal_ends_the_run_with_the_missing_peer(tmp_path: Path, who: str) -> None:
    rules = (f"store.stall_s={STALL_S}", "store.stall_abort_s=8", "schedule.straggler_deadline_s=4")
    with Cluster(tmp_path / "run", *SMALL, *rules) as run, Proxy(store_of(run)) as proxy:
        started(run, proxy, who, tmp_path / "cut")
        proxy.partition()
        status = run.until(lambda: (s := run.status())["closed"] and s, "the end of the run")
        assert "stalled" in status["closed"] and who in status["closed"], status["closed"]
        assert status["conservation_residual"] == 0
        other = run.samplers()[0] if who == "learner" else run.learners()[0]
        run.until(lambda: not other.alive, f"the end of {other.name}")
        assert other.process.returncode == 0


ALPHA, CUT_AT, STEPS = 2, 3, 20


@pytest.mark.timeout(600)
@pytest.mark.parametrize("direction", ["both", "up", "down"])
def test_a_sampler_without_new_weights_goes_on_within_the_age_bound_and_then_waits(
    tmp_path: Path, note: Callable[[Row], None], direction: str
) -> None:
    """Only the weights are cut off, with real roles: the sampler leases, renews and puts as before."""
    small = {
        "learner__micro_batch_rows": 2,
        "task__env": "tests.harness.envs.faulty:coin",
        "transfer__channel": "tcp",  # through the courier
        "transfer__deadline_s": 3,
        "store__lease_s": 4,
        "store__rpc_deadline_s": 3,
        "store__stall_s": STALL_S,
    }
    shape = {"schedule__alpha": ALPHA, "schedule__steps": STEPS}
    with (
        World(tmp_path / "run", **small, **shape) as run,
        Courier(run.tap) as carrier,
        Proxy(lambda: carrier.upstream) as proxy,
    ):
        carrier.address = proxy.address  # the sampler receives this as the learner's address
        run.learner()
        run.sampler()
        run.until_step(CUT_AT)
        proxy.partition(direction)
        cut_s, moved_s, seen = time.monotonic(), time.monotonic(), issued(run)

        def stopped() -> bool:
            """True if no group was issued for twice a lease's time."""
            nonlocal moved_s, seen
            if (now := issued(run)) != seen:
                moved_s, seen = time.monotonic(), now
            return time.monotonic() - moved_s >= 2 * run.config.store.lease_s

        run.until(stopped, "the end of the groups that α admits with the old weights")
        assert time.monotonic() - cut_s >= 2 * run.config.store.lease_s
        held, at = newest_version(run), run.step_rows()[-1]["step"]
        assert CUT_AT < at == held + ALPHA + 1 < STEPS, "the sampler made fewer or more groups than the bound allows"
        assert all(process.poll() is None for process in run.processes.values()), run.logs()
        said = run.events("sampler-0")
        assert [text for text in said if text.startswith(f"weights 0.{at}: ")], said
        assert any("waiting for: samplers have leased" in text for text in run.events("store")), run.events("store")
        proxy.heal()
        assert run.ended("learner") == 0, run.logs()
        assert run.ended("sampler-0") == 0, run.logs()
        assert f"weights 0.{at}: fetched at attempt" in " ".join(run.events("sampler-0"))
        swapped = swapped_versions(run)
        assert swapped[swapped.index(held) + 1] == at, f"after {held} the newest version follows: {swapped}"
        assert max(row["age_max"] for row in run.step_rows()) == ALPHA
        note(run.judge(f"9 weights cut off, {direction}", 1))


EVERY = 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("direction", ["both", "up", "down"])
@pytest.mark.parametrize("peer", ["store", "learner"])
def test_an_evaluator_that_is_cut_off_delays_no_role_and_goes_on_with_the_newest_version(
    tmp_path: Path, note: Callable[[Row], None], peer: str, direction: str
) -> None:
    """All roles are real. Cut off from the learner's weights it reports that; cut off from the store it cannot.

    The cut lasts until twice the lease time is over and the others have trained four versions that it would have
    evaluated.
    """
    changes = {
        "evaluator__every": EVERY,
        "evaluator__slots": 8,
        "task__heldout_items": 8,
        "transfer__channel": "tcp",
        "transfer__deadline_s": 2,
        "store__lease_s": 4,
        "store__rpc_deadline_s": 3,
        "schedule__steps": 1000,
    }
    with World(tmp_path / "run", **changes) as run, Courier(run.tap, "evaluator") as carrier:
        target = (lambda: carrier.upstream) if peer == "learner" else (lambda: run.tap.address)
        with Proxy(target) as proxy:
            if peer == "learner":
                carrier.address = proxy.address
            run.learner()
            run.sampler()
            run.evaluator(proxy.address if peer == "store" else "")
            run.until(lambda: len(evaluated(run)) >= 2, "two evaluations", 400.0)
            proxy.partition(direction)
            cut_s, at, before = time.monotonic(), last_step(run), evaluated(run)
            if peer == "learner":
                cut_off = lambda: any(text.startswith("weights 0.") for text in run.events("evaluator"))  # noqa: E731
                run.until(cut_off, "the evaluator to report that it gets no weights")
            run.until(lambda: time.monotonic() - cut_s >= 2 * run.config.store.lease_s, "twice the lease time")
            run.until_step(at + 4 * EVERY)
            during = evaluated(run)
            assert len(during) <= len(before) + 1, f"it was not cut off: {before}, then {during}"
            assert all(process.poll() is None for process in run.processes.values()), run.logs()
            assert proxy.held, "nothing was sent on the link"
            at = last_step(run)
            proxy.heal()
            run.until(lambda: max(evaluated(run)) >= at, "an evaluation of a version from after the cut")
            done = evaluated(run)
            assert done == sorted(set(done)), "it evaluated a version again, or an old one after a new one"
            assert {step for step in done if step > during[-1]}.isdisjoint(range(during[-1] + 1, at - EVERY)), done
            for name in ("evaluator", "sampler-0", "learner"):
                run.processes[name].terminate()
                assert run.ended(name) in (0, EXIT_INTERRUPTED), run.logs()
        note(run.judge(f"9 evaluator cut from the {peer}, {direction}", 1, survived=f"{last_step(run)} steps"))


def evaluated(run: World) -> list[int]:
    """The steps of the versions that the evaluator has reported, in that order."""
    run.step_rows()
    return [row["step"] for row in run.rows if row["kind"] == "eval"]


def last_step(run: World) -> int:
    """The newest trained step."""
    return max((row["step"] for row in run.step_rows()), default=0)


def issued(run: World) -> int:
    """Groups so far."""
    return run.query("SELECT COUNT(*) FROM groups")[0][0]


def swapped_versions(run: World) -> list[int]:
    """The steps of the versions that the sampler has swapped in."""
    run.step_rows()
    rows = (
        row for row in run.rows if row["kind"] == "span" and row["what"] == "weight_swap" and row["role"] == "sampler-0"
    )
    return [int(row["version"].partition(".")[2]) for row in rows]


def newest_version(run: World) -> int:
    """The step of the sampler's current version."""
    return swapped_versions(run)[-1]
