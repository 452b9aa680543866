"""A small cluster with short leases, for tests that cut connections."""

from __future__ import annotations

from collections.abc import Callable

from tests.harness.cluster.cluster import Cluster

LEASE_S = 2.0
SMALL = (
    "schedule.groups_per_step=3",
    "schedule.group_size=4",
    "schedule.alpha=1",
    "schedule.steps=1000",
    f"store.lease_s={LEASE_S}",
    "store.rpc_deadline_s=1",
)


def store_of(run: Cluster) -> Callable[[], str]:
    """A function for the store's present address."""
    return lambda: (run.run_dir / "store.addr").read_text().strip()
