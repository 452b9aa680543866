"""Memory that callers can make the server hold: budgets, wrong sizes, stalled bodies, many callers. Virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.rpc import intake as intakes
from jaxroll.rpc import protocol
from jaxroll.rpc.intake import Busy, Credit, Intake, MalformedBody, RefusalThrottle, TooManyCalls

PIECE = protocol.PIECE_BYTES
LIMIT = 4 * PIECE


def pieces(*sizes: int, then: Awaitable | None = None) -> Callable[[], Awaitable[bytes]]:
    """A `read` that gives pieces of these sizes, then the end of the stream (or waits for `then`)."""
    left = list(sizes)

    async def read():
        if not left and then is not None:
            await then
        return bytes(left.pop(0)) if left else object()

    return read


def run(job):
    return asyncio.run(asyncio.wait_for(job, 60.0))


@given(
    declared=st.sampled_from(
        (None, 0, 1, 100, PIECE - 1, PIECE, PIECE + 1, PIECE + 100, 2 * PIECE, 3 * PIECE - 1, LIMIT, LIMIT + 1, 2**40)
    ),
    sizes=st.lists(st.sampled_from((0, 1, 100, PIECE - 1, PIECE)), max_size=7),
)
def test_what_comes_is_what_was_declared_or_it_is_refused(declared: int | None, sizes: list[int]) -> None:
    """At most a piece more than declared is held, and afterwards nothing."""

    async def body() -> int:
        intake = Intake(LIMIT)
        read, given_out = pieces(*sizes), []
        peak = 0

        async def watched():
            nonlocal peak
            piece = await read()
            given_out.append(len(piece) if isinstance(piece, bytes) else 0)
            peak = max(peak, sum(given_out))
            assert sum(given_out) <= max(declared or 0, PIECE) + PIECE
            assert intake.held_bytes >= min(sum(given_out), declared or PIECE)
            return piece

        try:
            async with intake.body(watched, declared, 5.0) as data:
                assert intake.held_bytes == len(data)
                assert declared is None or len(data) == declared
                return len(data)
        except MalformedBody:
            wanted = declared is None or declared <= LIMIT
            assert not wanted or not _fits(declared, sizes)
            return -1
        finally:
            assert intake.held_bytes == 0

    got = run(body())
    if got >= 0:
        assert got <= LIMIT


def _fits(declared: int | None, sizes: list[int]) -> bool:
    """True if the pieces are those an honest client sends for a body of `declared` bytes."""
    if declared is None:
        return bool(sizes)
    honest = [PIECE] * (declared // PIECE) + ([declared % PIECE] if declared % PIECE or not declared else [])
    return sizes[: len(honest)] == honest


def test_a_body_too_large_is_refused_unread() -> None:
    async def refused() -> None:
        async def read() -> bytes:
            raise AssertionError("it was read")

        with pytest.raises(MalformedBody, match=rf"{LIMIT + 1} bytes; the limit is {LIMIT}"):
            async with Intake(LIMIT).body(read, LIMIT + 1, 5.0):
                pass

    run(refused())


def test_large_bodies_wait_for_room_in_order_and_small_ones_pass_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intakes, "_POLL_S", 0.01)

    async def crowd() -> list[str]:
        intake, order, leave = Intake(LIMIT), [], asyncio.Event()

        async def one(name: str, size: int) -> None:
            count, rest = divmod(size, PIECE)
            async with intake.body(pieces(*[PIECE] * count, *([rest] if rest else [])), size, 30.0):
                order.append(name)
                await leave.wait()

        jobs = []
        for i in range(4):  # two have room
            jobs.append(asyncio.ensure_future(one(f"large {i}", LIMIT)))
            await asyncio.sleep(0)
        jobs.append(asyncio.ensure_future(one("small", 100)))
        while len(order) < 3:
            await asyncio.sleep(0.001)
        assert order == ["large 0", "large 1", "small"]
        assert intake.held_bytes == 2 * LIMIT + 100
        leave.set()
        await asyncio.gather(*jobs)
        assert intake.held_bytes == 0
        return order

    assert run(crowd())[3:] == ["large 2", "large 3"]


def test_a_body_that_stops_coming_makes_room_for_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intakes, "STALLED_S", 0.05)
    monkeypatch.setattr(intakes, "_POLL_S", 0.01)

    async def stalls() -> None:
        intake, never = Intake(LIMIT), asyncio.Event()

        async def loris() -> None:
            async with intake.body(pieces(PIECE, then=never.wait()), LIMIT, 30.0):
                raise AssertionError("it never ended")

        jobs = [asyncio.ensure_future(loris()) for _ in range(2)]
        await asyncio.sleep(0)
        async with intake.body(pieces(*[PIECE] * 4), LIMIT, 10.0) as body:
            assert len(body) == LIMIT
        for result in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(result, Busy) and "stalled" in str(result)
        assert intake.held_bytes == 0

    monkeypatch.setattr(intakes, "READ_S", 1000.0)
    run(stalls())


def test_a_put_without_room_within_the_deadline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intakes, "_POLL_S", 0.01)

    async def full() -> None:
        intake = Intake(LIMIT)
        async with (
            intake.body(pieces(*[PIECE] * 4), LIMIT, 5.0),
            intake.body(pieces(*[PIECE] * 4), LIMIT, 5.0),
        ):
            with pytest.raises(Busy, match="try again"):
                async with intake.body(pieces(*[PIECE] * 4), LIMIT, 0.05):
                    pass
            assert intake.held_bytes == 2 * LIMIT

    run(full())


# --- the refusal throttle


def test_the_first_refusals_are_recorded_at_once_and_the_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def knocks() -> list[int]:
        reported: list[tuple[str, str, str]] = []
        throttle, held = RefusalThrottle(lambda *words: reported.append(words)), []

        async def hold(left_s: float) -> None:
            held.append(len(reported))

        monkeypatch.setattr(throttle, "hold", hold)
        for i in range(50):
            await throttle.delay_refusal("peer", f"sampler:{i}", "no valid token", 10.0)
        assert len(reported) == throttle.refusals == 50 and reported[7] == ("peer", "sampler:7", "no valid token")
        return held

    held = run(knocks())
    assert held[0] >= 20 and len(held) >= 25


def test_thousands_of_refused_callers_do_not_call_more_often_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delays of refusals at one moment spread until the rate is kept, or the callers would give up."""

    async def delays_s(refused: int, left_s: float) -> list[float]:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        monkeypatch.setattr(intakes.asyncio, "sleep", sleep)
        throttle = RefusalThrottle()
        for _ in range(refused):
            await throttle.hold(left_s)
        return slept

    few, many, impatient = (
        run(delays_s(count, left_s)) for count, left_s in ((100, 20.0), (8_000, 20.0), (8_000, 5.0))
    )
    assert min(few) >= intakes.HOLD_S and max(few) <= 2 * intakes.HOLD_S
    per_s = [sum(second <= delay < second + 1 for delay in many) for second in range(17)]
    assert max(per_s[5:]) <= 1.01 * intakes.DELAYED_PER_S and 15.9 < max(many) <= 16.0, per_s
    assert max(impatient) <= 4.0 and max(sum(a <= one < a + 0.1 for one in impatient) for a in (3.0, 3.8)) < 800


def test_polls_are_counted_by_connection_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "POLLS_PER_CONNECTION", 2)
    monkeypatch.setattr(protocol, "MAX_POLLS", 3)
    monkeypatch.setattr(protocol, "POLLS_ASSURED", 0)
    throttle = RefusalThrottle()
    with throttle.poll("a"), throttle.poll("b"):
        with throttle.poll("a"):
            for peer in ("a", "c"):  # one has two, all have three
                with pytest.raises(TooManyCalls), throttle.poll(peer):
                    pass
        with throttle.poll("c"):
            pass
    assert not throttle._polls


def test_each_connection_is_assured_of_some_polls_however_many_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for one sampler: its waits for leases, weights, cancellations and moves of members."""
    assert protocol.POLLS_ASSURED >= 4
    monkeypatch.setattr(protocol, "MAX_POLLS", 32)
    throttle = RefusalThrottle()
    with contextlib.ExitStack() as held:
        for place in range(32):
            held.enter_context(throttle.poll(f"crowd-{place // protocol.POLLS_PER_CONNECTION}"))
        for _ in range(protocol.POLLS_ASSURED):
            held.enter_context(throttle.poll("sampler"))
        with pytest.raises(TooManyCalls), throttle.poll("sampler"):
            pass
    assert not throttle._polls
    with throttle.poll("sampler"):
        pass


@given(st.lists(st.floats(0.0, 5.0), max_size=200))
def test_credit_is_never_more_than_the_burst_and_the_rate(gaps: list[float]) -> None:
    credit, now_s, taken = Credit(5.0, 2.0), 100.0, []
    for gap in gaps:
        now_s += gap
        if credit.take(now_s):
            taken.append(now_s)
    for i, first in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= 5.0 + (taken[j] - first) * 2.0 + 1e-6
