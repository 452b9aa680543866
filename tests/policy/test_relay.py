"""The relay tree: the source of each receiver when others join, die, are slow or cannot serve."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxroll.policy.routing import COPIES, LEARNER, Receiver, RelayTree, assign, slow, sources

SITES = st.sampled_from(["", "", "", "east", "west"])
RATES = st.sampled_from([None, None, 9e8, 1e9, 1.1e9, 1e8])
RECEIVERS = st.lists(st.tuples(st.booleans() | st.just(True), SITES, RATES), min_size=1, max_size=24).map(
    lambda rows: [Receiver(f"sampler-{n}", *row) for n, row in enumerate(rows)]
)


def names(receivers: list[Receiver]) -> list[str]:
    return [one.name for one in receivers]


def fed_by_learner(assigned: dict[str, str]) -> int:
    return list(assigned.values()).count(LEARNER)


def assert_reaches_the_learner(assigned: dict[str, str], holding: set[str]) -> None:
    for name in assigned:
        seen = [name]
        while seen[-1] not in holding and (source := assigned[seen[-1]]) != LEARNER:
            assert source not in seen, f"{name} waits for itself: {seen}"
            seen.append(source)


@settings(max_examples=100, deadline=None)
@given(RECEIVERS)
def test_all_are_reached_from_at_most_two_copies(receivers: list[Receiver]) -> None:
    assigned = assign(receivers, names(receivers))
    late, serving = slow(receivers), {one.name: one.serves for one in receivers}
    assert assigned.keys() == set(names(receivers))
    assert_reaches_the_learner(assigned, set())
    if any(serving.values()):
        assert fed_by_learner(assigned) <= COPIES
        good = [name for name in serving if serving[name] and name not in late]
        relays = set(assigned.values()) - {LEARNER}
        assert all(serving[relay] for relay in relays)
        assert not good or not relays & late, "a slow receiver holds up no other while there is a fast one"
    for one in receivers:
        found = sources(one.name, receivers, assigned)
        assert found[-1] == LEARNER and found[0] == assigned[one.name] and len(set(found)) == len(found)
        assert one.name not in found


@settings(max_examples=100, deadline=None)
@given(RECEIVERS, st.lists(st.tuples(st.sampled_from(["ask", "hold", "die"]), st.integers(0, 23)), max_size=80))
def test_no_one_waits_for_itself_whatever_the_order_of_calls_deaths_and_retries(receivers, steps) -> None:
    """Also if every receiver uses any of its sources, not only the first."""
    alive, holding, assigned = dict.fromkeys(names(receivers)), set(), {}
    edges: dict[str, tuple[str, ...]] = {}
    for what, number in steps:
        name = f"sampler-{number % len(receivers)}"
        if what == "die":
            alive.pop(name, None)
            holding.discard(name)
            edges.pop(name, None)
        elif what == "hold" and name in edges:
            holding.add(name)
            edges[name] = ()
        elif what == "ask" and name not in holding:
            alive[name] = None
            living = [one for one in receivers if one.name in alive]
            assigned = assign(living, [name], assigned, holding)
            edges[name] = tuple(source for source in sources(name, living, assigned, holding) if source != LEARNER)
            assert all(source in alive for source in edges[name])
        assert_no_cycle(edges)


def assert_no_cycle(edges: dict[str, tuple[str, ...]]) -> None:
    left = {name: set(found) & edges.keys() for name, found in edges.items()}
    while free := [name for name, found in left.items() if not found]:
        left = {name: found - set(free) for name, found in left.items() if name not in free}
    assert not left, f"these may wait for one another: {left}"


def test_one_site_takes_one_copy_in_a_tree() -> None:
    assigned = assign(eight := [Receiver(f"sampler-{n}") for n in range(8)], names(eight))
    parents = [None if source == LEARNER else int(source[-1]) for source in assigned.values()]
    assert parents == [None, 0, 0, 1, 2, 1, 2, 3]
    assert sources("sampler-3", eight, assigned) == ("sampler-1", "sampler-2", LEARNER)
    assert sources("sampler-1", eight, assigned) == ("sampler-0", LEARNER), "who comes later may wait for it"


def test_each_of_two_sites_takes_one_copy_and_a_third_takes_it_from_them() -> None:
    receivers = [Receiver(f"sampler-{n}", site="abc"[n % 3]) for n in range(9)]
    assigned = assign(receivers, names(receivers))
    sites = {one.name: one.site for one in receivers}
    crossing = {name: source for name, source in assigned.items() if source == LEARNER or sites[name] != sites[source]}
    assert crossing == {"sampler-0": LEARNER, "sampler-1": LEARNER, "sampler-2": "sampler-0"}


def test_a_receiver_asks_its_own_site_first_and_a_late_site_a_holder() -> None:
    receivers = [Receiver("a", site="east"), Receiver("b", site="east"), Receiver("c", site="west")]
    assert assign(receivers, "abc") == {"a": LEARNER, "b": "a", "c": LEARNER}
    assert assign(receivers, "c", {"a": LEARNER, "b": "a"}, "ab")["c"] == "a"


def test_a_late_receiver_takes_it_from_the_holder_with_the_fewest_others() -> None:
    five = [Receiver(f"sampler-{n}") for n in range(5)]
    assigned = assign(five[:3], names(five[:3]))
    holding = set(names(five[:3]))
    assigned = assign(five[:4], ["sampler-3"], assigned, holding)
    assigned = assign(five, ["sampler-4"], assigned, holding)
    assert (assigned["sampler-3"], assigned["sampler-4"]) == ("sampler-0", "sampler-1")
    assert sources("sampler-4", five, assigned, holding) == ("sampler-1", "sampler-2", LEARNER)


def report(tree: RelayTree, name: str, address: str = "", fetched=None, failed=()) -> None:
    tree.report(name, address or f"{name}:1", "", fetched, failed)


def ask(tree: RelayTree, name: str, version: int, present: list[str], waiting=(), holding=()) -> list[str]:
    found = tree.sources(name, version, present=present, waiting=waiting, holding=holding)
    assert all(address.startswith(relay) for relay, address in found)
    return [relay for relay, _ in found]


def test_those_that_wait_are_assigned_at_once_and_a_repeated_call_gets_a_holder() -> None:
    tree, present = RelayTree(), ["a", "b", "c"]
    for name in present:
        report(tree, name)
    assert ask(tree, "c", 1, present, waiting=present) == ["a", "b"]
    assert ask(tree, "a", 1, present) == [], "the first that registered asks the learner, though not the first to call"
    assert ask(tree, "b", 1, present) == ["a"]
    assert ask(tree, "b", 1, present) == [], "c may wait for b"
    assert ask(tree, "b", 1, present, holding=["c"]) == ["c"]


def test_a_relay_that_failed_is_not_used_for_eight_versions_or_until_it_is_new() -> None:
    tree, present = RelayTree(), ["a", "b"]
    for name in present:
        report(tree, name)
    assert ask(tree, "b", 0, present, waiting=present) == ["a"]
    report(tree, "b", failed=["a"])
    firsts = []
    for version in range(1, 10):
        ask(tree, "a", version, present, waiting=present)
        firsts.append(ask(tree, "b", version, present))
    assert firsts == [[]] * 7 + [["a"]] * 2 and ask(tree, "a", 10, present, waiting=present) == []
    report(tree, "b", failed=["a"])
    report(tree, "a", address="a:2")
    assert tree.sources("b", 11, present=present, waiting=present, holding=()) == (("a", "a:2"),)


def test_a_slow_receiver_becomes_a_leaf_and_what_it_served_says_nothing_about_others() -> None:
    tree, present = RelayTree(), ["a", "b", "c", "d"]
    for name in present:
        report(tree, name)
    assert [ask(tree, name, 0, present, waiting=present) for name in present] == [[], ["a"], ["a", "b"], ["b", "c"]]
    report(tree, "b", fetched=("a", 1e9))
    report(tree, "c", fetched=("a", 1e9))
    report(tree, "a", fetched=(LEARNER, 1e8))
    report(tree, "d", fetched=("a", 1e8))
    assert [ask(tree, name, 1, present, waiting=present) for name in present] == [["c", "d"], [], ["b"], ["b", "c"]]


def test_a_receiver_that_left_is_skipped() -> None:
    tree = RelayTree()
    for name in ("a", "b", "c"):
        report(tree, name)
    assert ask(tree, "c", 1, ["b", "c"], waiting=["a", "b", "c"]) == ["b"]
