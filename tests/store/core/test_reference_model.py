"""The store's pure core under tens of thousands of random operations, against a reference model.

`world.py` draws the operations, `checked_store.py` performs them on the core and a simulated log, and
`reference.py` says after each which answers the contract allows. `planted_bugs*.py` prove that it looks.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.harness.planted_bugs.selection import BUGS
from tests.harness.store_model.books import Broken
from tests.harness.store_model.checked_store import first_broken, shortened
from tests.harness.store_model.world import World

# Every planted bug is found within as many operations as each commit runs.
OPERATIONS, SOAK_OPERATIONS = 50_000, 5_000_000
A_RUN = 500  # operations drawn for one run; it needs some more to end
SHOWN = 20  # operations
RARE = {  # the first seed, counted from 0, whose run shows the bug; if it no longer does, all are searched
    "alpha_off_by_one_at_the_claim": 13,
    "bounds_of_the_band_are_inside": 10,
    "buffer_of_groups_ignored": 10,
    "claims_do_not_forgive_failures": 5,
    "data_failure_repeats_its_key": 12,
    "expired_group_not_issued_again": 13,
    "failed_member_goes_back_to_its_holder": 17,
    "failed_member_is_left_to_holders_that_are_gone": 9,
    "failed_member_rests_though_another_holder_is_there": 32,
    "fork_trains_prompts_twice": 159,
    "future_version_accepted": 14,
    "groups_are_not_judged": 10,
    "head_skipped": 10,
    "holders_that_are_away_count_as_present": 277,
    "holders_that_are_not_ready_yet_are_forgotten": 5,
    "last_batch_delivered_against_the_policy": 41,
    "limit_of_rejections_is_not_counted_anew": 10,
    "older_version_published": 26,
    "put_acknowledged_before_it_is_on_disk": 7,
    "redundancy_outside_the_window": 7,
    "rejected_groups_still_count_as_outstanding": 10,
    "rejections_are_never_too_many": 32,
    "rewind_keeps_tokens_of_the_dead_lineage": 22,
    "second_learner_beside_the_first": 5,
    "slow_leases_end_outside_the_next_batch": 760,  # beyond the runs of a commit
    "stragglers_are_not_judged": 12,
    "token_of_an_ended_lineage_accepted": 25,
    "trimmed_one_claim_too_many": 5,
    "unreliable_holder_keeps_its_work": 18,
}
REACHED = """
    trimmed, stale, lineage, surplus, dead, last_batch, rewinds, forks, crashes, shrunk, masked, narrowed, slow,
    resting, on trial, avoided, unreliable,
    filtered, stopped by the filter, aborted, shared, moved,
    Lease Leases, Lease NoCredit, Lease StaleClient, Lease Closed, Renew tuple, Release None, Tick None,
    PutMember OK, PutMember SURPLUS, PutMember Fenced, PutMember Conflict, PutMember StaleClient,
    failed PutMember OK, failed PutMember SURPLUS, failed PutMember Fenced, failed PutMember Conflict,
    ClaimStep Batch, ClaimStep NotReady, ClaimStep StaleClient, ClaimStep Closed, Begin Version, Begin StaleClient,
    Publish None, Publish StaleClient, Ack None, Ack StaleClient, Durable None, Durable StaleClient,
    EndData None, Close None, Open None, Arrive None
"""


def played(operations: int, first_seed: int = 0) -> Counter[str]:
    """Counts of events in random runs of `operations` in all; fails at the first mistake with a short reproduction."""
    happened: Counter[str] = Counter()
    for seed in itertools.count(first_seed):
        if happened["operations"] >= operations:
            break
        world = World(seed, A_RUN)
        try:
            world.run()
        except Broken as error:
            pytest.fail(reproduction(seed, world, error), pytrace=False)
        happened.update(runs=1, operations=world.store.done)
        happened.update(what_happened(world))
    return happened


def what_happened(world: World) -> Counter[str]:
    """Counts of each answer to each request, and of each ending."""
    ref, core = world.store.ref, world.store.core.state
    found = world.store.answered + ref.ended
    found.update(rewinds=len(ref.lines) - 1, forks=len(ref.forks), masked=ref.tokens_masked, shrunk=core.shrunk)
    found.update(crashes=sum(operation[0] == "crash" for operation in world.operations))
    found.update({"stopped by the filter": ref.stopped, "aborted": core.aborted_members, "shared": ref.dealt})
    found.update({"moved": ref.moved, "avoided": ref.avoided, "ended as slow": ref.ended_as_slow})
    found.update(narrowed=world.store.narrowed)
    return found


def reproduction(seed: int, world: World, error: Broken) -> str:
    """The seed, the settings, the operations that were enough, and what they broke."""
    least = shortened(world.rules, world.operations)
    found = first_broken(world.rules, least)
    kind = f"{len(least)} operations are enough" if found else "only the world shows it; the last operations were"
    lines = [f"seed {seed}, {world.store.done} operations: {error}", f"{world.rules}", f"{kind}:"]
    lines += [f"  {operation}" for operation in least[-SHOWN:]]
    return "\n".join([*lines, *([f"which breaks: {found[1]}"] if found else [])])


def first_seen(name: str, *likely: int) -> tuple[int, int, World, Broken]:
    """After how many operations, and with which seed, a mistake is seen; the `likely` seeds come before all others."""
    used = 0
    for seed in itertools.chain(likely, itertools.count()):
        world = World(seed, A_RUN)
        try:
            world.run()
        except Broken as error:
            return used + world.store.done, seed, world, error
        used += world.store.done
        if used >= 2 * OPERATIONS:  # the rarest bug takes 74,000
            break
    pytest.fail(f"{name} is not found within {used} operations")


def assert_reached(happened: Counter[str]) -> None:
    """The generator reaches what it is for; otherwise the run says little."""
    names = [name.strip() for name in REACHED.split(",")]
    rare = {name: happened[name] for name in names if happened[name] < 5}
    assert not rare, f"hardly ever happened: {rare}"


@pytest.mark.timeout(900)
def test_no_promise_is_broken_in_50_000_random_operations(capsys: pytest.CaptureFixture[str]) -> None:
    happened = played(OPERATIONS)
    with capsys.disabled():
        print("\n" + ", ".join(f"{happened[what]} {what}" for what in ("operations", "runs", "crashes", "rewinds")))
    assert_reached(happened)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_promise_is_broken_in_5_000_000_random_operations() -> None:
    assert_reached(played(SOAK_OPERATIONS, first_seed=10**6))


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With its seed in `RARE` first, where only a few of the runs from seed 0 on show it."""
    BUGS[name].plant(monkeypatch)
    used, _, _, error = first_seen(name, *([RARE[name]] if name in RARE else []))
    assert not isinstance(error.__cause__, TypeError | AttributeError | NameError), "the bug itself is broken"
    with capsys.disabled():
        print(f"\n{used} operations: {name} ({BUGS[name].promise}) is seen as {str(error)[:80]}")


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name, seed in RARE.items() if seed < 2 * OPERATIONS // A_RUN])
def test_a_rare_bug_is_found_by_the_runs_of_a_commit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name].plant(monkeypatch)
    used, *_ = first_seen(name)
    assert used < 3 * OPERATIONS


def test_a_mistake_is_shown_with_the_few_operations_that_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS["trimmed_at_the_ack"].plant(monkeypatch)
    _, seed, world, error = first_seen("trimmed_at_the_ack")
    least = shortened(world.rules, world.operations)
    kinds = [type(operation[1]).__name__ for operation in least if operation[0] == "ask"]
    assert kinds[-1] == "Ack"
    assert {"Begin", "Publish", "Lease", "PutMember", "ClaimStep", "Ack"} <= set(kinds)
    assert len(kinds) <= 20
    shown = reproduction(seed, world, error)
    assert f"seed {seed}" in shown
    assert f"{len(least)} operations are enough" in shown
    assert str(world.rules) in shown
