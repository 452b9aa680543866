"""Fault 9: a partition between sampler and store of twice the lease time; messages that are cut off or late."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.faults.tcp_proxy import Proxy
from tests.harness.cluster.cluster import Cluster
from tests.harness.cluster.criteria import Row, acknowledged, judge
from tests.harness.cluster.short_leases import LEASE_S, SMALL, store_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_9_a_partition_of_twice_the_lease_time_heals(tmp_path: Path, note: Callable[[Row], None]) -> None:
    """The other sampler takes over the leases; late puts of the partitioned one are refused, not lost or doubled."""
    with Cluster(tmp_path / "run", *SMALL) as run, Proxy(store_of(run)) as proxy:
        learner = run.learner()
        run.until((run.run_dir / "store.addr").exists, "the store")
        address = proxy.address_file(tmp_path / "parted", run.run_dir)
        parted = run.sampler("sampler-0", seed=1, work_s=0.3, address_file=address)
        run.sampler("sampler-1", seed=2, work_s=0.3)
        run.until(lambda: parted.said("put"), "a put of the sampler that will be partitioned")
        run.until_acked(2)
        held: set[tuple] = set()
        while not held:  # on a slow machine it may have put all of it meanwhile
            proxy.heal()
            granted = len(parted.said("lease"))
            run.until(lambda granted=granted: any(row["keys"] for row in parted.said("lease")[granted:]), "new work")
            proxy.partition()
            held = {tuple(key) for row in parted.said("lease") for key in row["keys"]} - {*acknowledged(parted.rows)}
        began, at = time.monotonic(), run.acked()
        run.until(lambda: run.query("SELECT COUNT(*) FROM log WHERE kind = 'lease_ended'") > [(0,)], "ended leases")
        run.until(lambda: time.monotonic() - began >= 2 * LEASE_S, "twice the lease time")
        run.until_acked(at + 2)
        proxy.heal()
        healed = time.monotonic()
        back = lambda: [r for r in parted.said("put") if r["at_s"] > healed and r["answer"] == "OK"]  # noqa: E731
        run.until(back, "a put after the partition")
        at = run.acked()
        run.until_acked(at + 2)
        assert learner.stop() == 0
        late = [row["answer"] for row in parted.said("put") if row["at_s"] > healed and tuple(row["key"]) in held]
        assert late.count("OK") < len(held), "puts of both samplers were accepted for the same leases"
        assert set(late) - {"OK"} or parted.said("lost"), "it was not notified that it had lost its leases"
        timed_out = [row for row in parted.said("rpc") if row["outcome"] == "AioRpcError"]
        assert timed_out, "no call ran into its deadline: there was no partition"
        note(judge(run, "9 partition of twice the lease time", 1, went_on_from=at))


def test_9_cut_and_late_messages_change_nothing(tmp_path: Path, note: Callable[[Row], None]) -> None:
    """Thirty connections are cut during a put, on a connection that is also slow."""
    with Cluster(tmp_path / "run", *SMALL) as run, Proxy(store_of(run)) as proxy:
        learner = run.learner()
        run.until((run.run_dir / "store.addr").exists, "the store")
        address = proxy.address_file(tmp_path / "cut", run.run_dir)
        sampler = run.sampler("sampler-0", tokens_low=3000, tokens_high=6000, address_file=address)
        run.until(lambda: sampler.said("put"), "the first put")
        proxy.delay(0.002)
        for cut in range(30):
            sent = len(sampler.said("put"))
            proxy.cut_after(20_000 + 1_111 * cut)
            run.until(lambda cut=cut: proxy.cuts > cut, "a cut")
            run.until(lambda sent=sent: len(sampler.said("put")) > sent, "a put after the cut")
        at = run.acked()
        run.until_acked(at + 1)
        assert learner.stop() == 0
        assert {row["answer"] for row in sampler.said("put")} <= {"OK", "SURPLUS", "Fenced"}
        note(judge(run, "9 messages cut in the middle", proxy.cuts, went_on_from=at))
