"""Weights on simulated links: shared bandwidths, and the relay tree of the store with its failures."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxroll import config as configs
from jaxroll.policy.routing import LEARNER
from jaxroll.sim import costs, network, simulate
from jaxroll.sim.costs import Cluster, Law, LearnerCosts, RoleFailure, SamplerCosts, TransferCosts, Workload
from jaxroll.sim.network import BEGIN_S, Links

SIZE = 10.0  # bytes of the weights; every sender and receiver has 1 byte/s
SHARED = TransferCosts(size_bytes=SIZE, bytes_per_s=1.0, sender_bytes_per_s=1.0)


def fetched(links: Links, *receivers: tuple[str, list[str], float], lost: tuple[str, float] = ("", 0.0)) -> Any:
    """The seconds at which the receivers (name, relays, start) have the weights, and the bytes of each source."""

    async def job() -> dict[str, tuple[float, dict[str, int]]]:
        loop = asyncio.get_running_loop()

        async def one(name: str, relays: list[str], start_s: float) -> tuple[float, dict[str, int]]:
            await asyncio.sleep(start_s)
            found = await links.fetch(name, 1, relays)
            return loop.time(), {each.source: each.size_bytes for each in found.sources}

        if lost[0]:
            loop.call_later(lost[1], links.lose, lost[0])
        names = [name for name, *_ in receivers if name != lost[0]]
        jobs = {name: asyncio.ensure_future(one(name, *rest)) for name, *rest in receivers}
        return {name: await jobs[name] for name in names}

    return run(job())


def run(job: Coroutine[Any, Any, Any]) -> Any:
    return network.run(job, 1000.0)


def times(found: Any) -> dict[str, Any]:
    return {name: pytest.approx(at_s, abs=1e-6) for name, (at_s, _) in found.items()}


def test_receivers_share_the_bandwidth_of_their_sender() -> None:
    found = fetched(Links(SHARED), ("a", [], 0.0), ("b", [], 5.0))
    # a has 5 bytes when b begins; then both take half: a needs 10 s for the rest, b has 5 bytes by then.
    assert times(found) == {"a": 15.0, "b": 20.0}


def test_without_a_senders_bandwidth_receivers_take_their_own() -> None:
    alone = replace(SHARED, sender_bytes_per_s=float("inf"), latency_s=0.5)
    assert times(fetched(Links(alone), ("a", [], 0.0), ("b", [], 5.0))) == {"a": 10.5, "b": 15.5}


def test_a_relay_passes_on_what_it_has_while_it_receives_the_rest() -> None:
    links = Links(SHARED)
    found = fetched(links, ("a", [], 0.0), ("b", ["a"], 0.0), ("c", ["b"], 4.0))
    assert times(found) == {"a": 10.0, "b": 10.0, "c": 14.0}
    assert links.sent == {LEARNER: pytest.approx(SIZE), "a": pytest.approx(SIZE), "b": pytest.approx(SIZE)}


def test_a_receiver_goes_on_with_the_learner_when_its_relay_is_lost() -> None:
    links = Links(SHARED)
    found = fetched(links, ("a", [], 0.0), ("b", ["a"], 0.0), lost=("a", 4.0))
    assert times(found) == {"b": 10.0}
    assert found["b"][1] == {"a": 4, LEARNER: 6} and links.sent[LEARNER] == pytest.approx(SIZE)


def test_a_relay_that_does_not_begin_is_left_after_a_while() -> None:
    found = fetched(Links(SHARED), ("b", ["absent"], 0.0))
    assert times(found) == {"b": BEGIN_S + SIZE} and found["b"][1] == {LEARNER: 10}


def test_a_transfer_that_is_shorter_than_the_clock_can_show_ends() -> None:
    """After 10⁶ s the clock shows differences of 10⁻¹⁰ s; a rest of fewer seconds would never arrive."""
    quick = TransferCosts(size_bytes=1e6, bytes_per_s=1e9, sender_bytes_per_s=1e9)

    async def job() -> list[Any]:
        await asyncio.sleep(1e6)
        links = Links(quick)
        names = [f"s{number}" for number in range(9)]
        relays = [[], *([names[number // 2]] for number in range(8))]
        return await asyncio.gather(*(links.fetch(name, 1, of) for name, of in zip(names, relays, strict=True)))

    assert [one.fetched_bytes for one in network.run(job(), 2e6)] == pytest.approx([1e6] * 9, rel=1e-3)


def test_a_learner_that_is_lost_keeps_nobody_waiting() -> None:
    assert times(fetched(Links(SHARED), ("a", [], 0.0), ("b", ["a"], 0.0), lost=(LEARNER, 4.0))) == {
        "a": 10.0,
        "b": 10.0,
    }


# --- Whole runs: the store plans the tree

CLUSTER = Cluster(
    sampler=SamplerCosts(step_overhead_s=0.1),
    learner=LearnerCosts(step_overhead_s=1.0),
    transfer=TransferCosts(size_bytes=16e9, bytes_per_s=8e9, sender_bytes_per_s=8e9),
    workload=Workload(answer_tokens=Law(mean=10)),
    rpc_s=0.0001,
)


def rows(samplers: int, relay: str, cluster: Cluster = CLUSTER) -> list[Any]:
    made = configs.parse(
        {
            "schedule": {"steps": 12, "groups_per_step": 8, "group_size": 4, "alpha": 0.0},
            "sampler": {"count": samplers, "slots": 8, "decode_chunk": 1},
            "sampling": {"max_tokens": 16},
            "task": {"max_prompt_tokens": 32},
            "transfer": {"channel": "tcp", "relay": relay},
        }
    )
    return simulate.simulated_rows(costs.checked(made), cluster, Path(), keep=False)


def copies(found: list[Any]) -> float:
    """The copies that the learner sent for a version, in the mean over the steps."""
    sent = [row["weights_sent_bytes"] for row in found if row.get("kind") == "step"]
    return (sent[-1] - sent[0]) / (len(sent) - 1) / CLUSTER.transfer.size_bytes


def slowest_s(found: list[Any]) -> float:
    return max(row["t1"] - row["t0"] for row in found if row.get("kind") == "span" and row.get("what") == "fetch")


@pytest.mark.parametrize("samplers", [2, 8])
def test_with_the_stores_relay_tree_the_learner_sends_one_copy(samplers: int) -> None:
    alone, tree = rows(samplers, "none"), rows(samplers, "tree")
    assert copies(alone) == pytest.approx(samplers, rel=0.01) and copies(tree) == pytest.approx(1.0, rel=0.01)
    assert slowest_s(alone) == pytest.approx(2.0 * samplers, rel=0.01)
    assert slowest_s(tree) <= 2.0 * 2.01  # a relay has two receivers


def test_a_run_with_relays_goes_on_when_samplers_and_the_learner_are_lost() -> None:
    """A fetch takes 2 to 4 s after each step of 2 s, so that many of the losses interrupt one."""
    roles = ["sampler-0", "sampler-1", "learner", "sampler-2"]
    failures = tuple(RoleFailure(5.0 + 3.1 * number, roles[number % 4], 0.5) for number in range(12))
    found = rows(4, "tree", replace(CLUSTER, failures=failures))
    assert {row["step"] for row in found if row.get("kind") == "step"} == set(range(1, 13))
    sources = [row["sources"] for row in found if row.get("kind") == "span" and row.get("what") == "fetch"]
    assert any(len(of) > 1 for of in sources), "none went on with another source"
