"""Generation over real gRPC: an actor's requests when samplers die, swap weights or refuse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from jaxroll.errors import DataError, InfraError, StaleClient, Unauthorized
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Version, VersionRun
from jaxroll.rpc import protocol
from jaxroll.rpc.client import RawClient
from jaxroll.rpc.server import RawServer
from jaxroll.serving import service
from jaxroll.serving.service import Samplers

DEADLINE_S = 30.0
PARAMS = SamplingParams(5, 0.5, stop_tokens=(2,), seed=7)
PROMPT = np.arange(3, 9, dtype=np.int32)
V0, V1, V2 = Version(0, 0), Version(0, 1), Version(1, 1)


def run(job) -> None:
    asyncio.run(asyncio.wait_for(job, DEADLINE_S))


class Weights:
    """Weights that the test swaps. `reported` is the version that callers receive."""

    def __init__(self, version: Version | None) -> None:
        self.version = self.reported = version
        self._changed = asyncio.Event()

    def swap(self, version: Version | None) -> None:
        self.version = self.reported = version
        self._changed.set()

    async def other_than(self, known: Version | None, wait_s: float) -> Version | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self.reported == known:
                    self._changed.clear()
                    await self._changed.wait()
        return self.reported


class Engine:
    """Draws tokens that tell prompt and key apart, once `go` is set."""

    def __init__(self) -> None:
        self.go, self.busy = asyncio.Event(), asyncio.Semaphore(0)
        self.go.set()
        self.asked: list[tuple] = []
        self.aborted = 0
        self.error: Exception | None = None

    async def generate(self, prompt, key: GenerationKey, params: SamplingParams, *, keep: bool = False) -> Completion:
        self.asked.append((prompt.tolist(), key, params, keep))
        self.busy.release()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            self.busy.release()
            raise
        if self.error is not None:
            raise self.error
        return drawn(prompt, key)


def drawn(prompt: np.ndarray, key: GenerationKey) -> Completion:
    """The completion of every engine for this prompt and key."""
    tokens = np.array([key.group, key.member, int(prompt.sum())], np.int32)
    logprobs = np.nextafter(np.array([-0.1, -1e-30, -7.0], np.float32), np.float32(0)) * np.float32(1 + key.member)
    return Completion(tokens, logprobs, (VersionRun(V0, 1), VersionRun(V1, 2)), "length")


class Sampler:
    """One served engine, which can end and start again on another port."""

    def __init__(self, folder: Path, name: str, version: Version | None = V0) -> None:
        self.file, self.engine, self.weights = folder / f"{name}.addr", Engine(), Weights(version)
        self.service = service.RunService(self.engine, self.weights, run_id="run", config_digest="digest")
        self._server: RawServer | None = None

    async def start(self) -> None:
        self._server = RawServer(
            service.SERVICE,
            self.service.methods(),
            secret="secret",
            max_message_bytes=2**20,
            calls_per_connection=protocol.GENERATIONS_PER_CONNECTION,
        )
        port = self._server.bind("127.0.0.1", 0)
        await self._server.start()
        self.file.write_text(f"127.0.0.1:{port}\n")

    async def die(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None


def client(address: Path, *, token: str = "secret", config: str = "digest", of_run: str = "run") -> RawClient:
    raw = RawClient(
        service.SERVICE,
        address,
        role="actor",
        name="actor-0",
        token=token,
        patience_s=0.0,
        max_message_bytes=2**20,
        config_digest=config,
    )
    raw.run_id = of_run
    return raw


@contextlib.asynccontextmanager
async def served(
    folder: Path, *versions: Version | None, replicate: str = "together"
) -> AsyncIterator[tuple[list[Sampler], Samplers, list[str]]]:
    """Samplers that are up, one for each version, and the actor's view of them."""
    samplers = [Sampler(folder, f"sampler-{i}", version) for i, version in enumerate(versions)]
    said: list[str] = []
    known = Samplers({s.file.stem: client(s.file) for s in samplers}, replicate, said.append)
    for sampler in samplers:
        await sampler.start()
    before = asyncio.all_tasks()
    following = asyncio.ensure_future(known.follow())
    try:
        yield samplers, known, said
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await known.close()
        for sampler in samplers:
            await sampler.die()
        if left := asyncio.all_tasks() - before:  # those of gRPC end by themselves
            _, left = await asyncio.wait(left, timeout=DEADLINE_S / 3)
        assert not left, f"tasks are left behind: {left}"


def same(found: Completion, wanted: Completion) -> bool:
    bits = lambda c: (c.tokens.dtype, c.tokens.tobytes(), c.logprobs.dtype, c.logprobs.tobytes())  # noqa: E731
    return bits(found) == bits(wanted) and (found.versions, found.finish) == (wanted.versions, wanted.finish)


def test_a_completion_arrives_as_the_engine_delivered_it(tmp_path: Path) -> None:
    async def job() -> None:
        async with served(tmp_path, V0) as ((sampler,), known, _):
            with known.group(V0).conversation() as proxy:
                for key in (GenerationKey(4, 1), GenerationKey(4, 2, 9)):
                    found = await proxy.generate(PROMPT, key, PARAMS, keep=key.salt == 9)
                    assert same(found, drawn(PROMPT, key))
            assert sampler.engine.asked == [
                (PROMPT.tolist(), GenerationKey(4, 1), PARAMS, False),
                (PROMPT.tolist(), GenerationKey(4, 2, 9), PARAMS, True),
            ]
            assert sampler.service.served == 2

    run(job())


def test_a_request_that_no_sampler_can_serve_is_a_data_error(tmp_path: Path) -> None:
    async def job() -> None:
        async with served(tmp_path, V0) as ((sampler,), known, _):
            sampler.engine.error = DataError("the prompt is empty")
            with known.group(V0).conversation() as proxy, pytest.raises(DataError, match="the prompt is empty"):
                await proxy.generate(PROMPT, GenerationKey(0, 0), PARAMS)
            assert len(sampler.engine.asked) == 1, "it was asked again"

    run(job())


def test_a_cancelled_episode_aborts_its_request_in_the_sampler(tmp_path: Path) -> None:
    async def job() -> None:
        async with served(tmp_path, V0) as ((sampler,), known, _):
            sampler.engine.go.clear()
            with known.group(V0).conversation() as proxy:
                asking = asyncio.ensure_future(proxy.generate(PROMPT, GenerationKey(0, 0), PARAMS))
                await sampler.engine.busy.acquire()
                assert (sampler.service.open, known.conversations()) == (1, {"sampler-0": 1})
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
                await sampler.engine.busy.acquire()
            assert sampler.engine.aborted == 1
            assert known.conversations() == {"sampler-0": 0}

    run(job())


def test_a_request_of_a_dead_sampler_is_made_at_another_one_and_its_conversation_stays_there(tmp_path: Path) -> None:
    async def job() -> None:
        async with served(tmp_path, V0, V0) as ((first, second), known, _):
            first.engine.go.clear()
            await known.has(V0)
            key, group = GenerationKey(3, 1), known.group(V0)
            while len(known._at(V0)) < 2:
                await known._changed.wait()
            with group.conversation() as proxy:
                asking = asyncio.ensure_future(proxy.generate(PROMPT, key, PARAMS, keep=True))
                await first.engine.busy.acquire()
                await first.die()
                assert same(await asking, drawn(PROMPT, key))
                assert known.repeated >= 1
                longer = np.append(PROMPT, 1).astype(np.int32)
                assert same(await proxy.generate(longer, key, PARAMS), drawn(longer, key))
                assert [asked[0] for asked in second.engine.asked] == [PROMPT.tolist(), longer.tolist()]

    run(job())


def test_a_request_waits_for_its_only_sampler_to_come_back_somewhere_else(tmp_path: Path) -> None:
    async def job() -> None:
        async with served(tmp_path, V0) as ((sampler,), known, said):
            sampler.engine.go.clear()
            with known.group(V0).conversation() as proxy:
                asking = asyncio.ensure_future(proxy.generate(PROMPT, GenerationKey(3, 1), PARAMS))
                await sampler.engine.busy.acquire()
                await sampler.die()
                while known._at(V0):
                    await known._changed.wait()
                assert any("cannot be reached" in words for words in said)
                sampler.engine.go.set()
                await sampler.start()
                assert same(await asking, drawn(PROMPT, GenerationKey(3, 1)))
                assert known.conversations() == {"sampler-0": 1}

    run(job())


def test_nothing_is_drawn_below_the_version_that_was_leased_for(tmp_path: Path) -> None:
    async def job() -> None:
        async with served(tmp_path, V0, V1, None) as ((old, new, without), known, _):
            assert await known.newer_than(V0) == V1
            with known.group(V1).conversation() as proxy:
                for member in range(3):
                    await proxy.generate(PROMPT, GenerationKey(0, member), PARAMS)
            assert (len(old.engine.asked), len(new.engine.asked)) == (0, 3)
            with known.group(V2).conversation() as proxy:
                asking = asyncio.ensure_future(proxy.generate(PROMPT, GenerationKey(0, 9), PARAMS))
                waiting = asyncio.ensure_future(known.newer_than(V1))
                old.weights.swap(V2)
                assert await waiting == V2
                await asking
            assert [key.member for _, key, _, _ in old.engine.asked] == [9]
            assert without.engine.asked == []

    run(job())


def test_a_sampler_refuses_requests_for_newer_weights_than_it_has(tmp_path: Path) -> None:
    async def job() -> None:
        async with served(tmp_path, V1) as ((sampler,), known, _):
            assert await known.newer_than(None) == V1
            sampler.weights.version = V0  # without a report to callers
            with known.group(V1).conversation() as proxy:
                asking = asyncio.ensure_future(proxy.generate(PROMPT, GenerationKey(0, 0), PARAMS))
                while known.repeated < 2:
                    await asyncio.sleep(0.01)
                assert sampler.engine.asked == []
                sampler.weights.swap(V1)
                await asking

    run(job())


def test_as_many_requests_as_episodes_are_under_way_at_once(tmp_path: Path) -> None:
    """Twice as many as `CALLS_PER_CONNECTION` allows other services, and one more."""
    count = 2 * protocol.CALLS_PER_CONNECTION + 1

    async def job() -> None:
        async with served(tmp_path, V0) as ((sampler,), known, _):
            sampler.engine.go.clear()
            group = known.group(V0)
            proxies = [group.conversation() for _ in range(count)]
            asking = [
                asyncio.ensure_future(proxy.generate(PROMPT, GenerationKey(0, member), PARAMS))
                for member, proxy in enumerate(proxies)
            ]
            for _ in range(count):
                await sampler.engine.busy.acquire()
            sampler.engine.go.set()
            found = await asyncio.gather(*asking)
            assert all(same(one, drawn(PROMPT, GenerationKey(0, m))) for m, one in enumerate(found))

    run(job())


def test_unknown_callers_are_refused(tmp_path: Path) -> None:
    async def job() -> None:
        sampler = Sampler(tmp_path, "sampler-0")
        await sampler.start()
        try:
            for words, kind in (
                ({"token": "guess"}, Unauthorized),
                ({"of_run": "other"}, StaleClient),
                ({"config": "x"}, Unauthorized),
            ):
                raw = client(sampler.file, **words)
                for method in ("Generate", "Version"):
                    with pytest.raises(kind):
                        await raw.call(method, b"", 5.0)
                await raw.close()
            assert sampler.engine.asked == []
        finally:
            await sampler.die()

    run(job())


async def until(seen: Callable[[], object]) -> None:
    """Return when `seen()` is true; `run` bounds the wait."""
    while not seen():
        await asyncio.sleep(0.01)


def test_a_sampler_that_joins_gets_conversations_and_one_that_is_removed_gets_none(tmp_path: Path) -> None:
    async def job() -> None:
        async with served(tmp_path, V0) as ((first,), known, _):
            await until(lambda: known.is_reachable("sampler-0"))
            joins = Sampler(tmp_path, "sampler-7", V1)
            await joins.start()
            known.add("sampler-7", client(joins.file))
            assert known.names == {"sampler-0", "sampler-7"}
            assert await known.newer_than(V0) == V1  # those who wait for newer weights wake up, too
            with known.group(V1).conversation() as proxy:
                await proxy.generate(PROMPT, GenerationKey(4, 1), PARAMS)
            known.remove("sampler-0")
            assert known.names == {"sampler-7"}
            with known.group(V0).conversation() as proxy:
                await proxy.generate(PROMPT, GenerationKey(4, 2), PARAMS)
            assert (len(first.engine.asked), len(joins.engine.asked)) == (0, 2)
            waiting = asyncio.ensure_future(known.has(V0))
            known.remove("sampler-7")
            await asyncio.sleep(0)
            assert not waiting.done() and known.conversations() == {}
            waiting.cancel()
            await joins.die()

    run(job())


def test_a_sampler_that_leaves_finishes_its_requests_and_refuses_others(tmp_path: Path) -> None:
    async def job() -> None:
        async with served(tmp_path, V0, V0) as ((leaves, stays), known, said):
            await until(lambda: len(known._at(V0)) == 2)
            leaves.engine.go.clear()
            with known.group(V0).conversation() as first, known.group(V0).conversation() as second:
                slow = asyncio.ensure_future(first.generate(PROMPT, GenerationKey(4, 1), PARAMS))
                await leaves.engine.busy.acquire()
                drained = asyncio.ensure_future(leaves.service.drain())
                await asyncio.wait_for(until(lambda: not known.is_reachable("sampler-0")), service.WAIT_S / 2)
                assert any("leaves the run" in words for words in said)
                assert same(
                    await second.generate(PROMPT, GenerationKey(4, 2), PARAMS), drawn(PROMPT, GenerationKey(4, 2))
                )
                assert stays.service.served == 1 and not drained.done()
                late = client(leaves.file)
                with pytest.raises(InfraError, match="leaves the run"):
                    await late.call("Generate", b"", 5.0)
                await late.close()
                leaves.engine.go.set()
                assert same(await slow, drawn(PROMPT, GenerationKey(4, 1)))
                await drained

    run(job())
