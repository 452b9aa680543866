"""Samplers that die or leave during an answer, in virtual time: others continue it. The real loops run unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxroll import wire
from jaxroll.config import Config
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Finished, Member, Version, VersionRun
from jaxroll.roles.sampler import SamplerLoops
from jaxroll.sim.network import LATENCY_S, Network, run
from jaxroll.sim.world import TOKENIZER, MemoryLog
from jaxroll.store.core import events as ev
from jaxroll.store.log.replay import replay_log
from tests.harness.virtual_run import Behaviour, DelayEngine, VirtualRun
from tests.roles.test_joins_and_leaves import small

LETTERS = TOKENIZER.encode("ab ")
Draw = Callable[[GenerationKey, np.ndarray], list[int]]  # the answer to a prompt
FLUSH, TOKEN_S = 8, 0.1


def config(flush_tokens: int = FLUSH, **changes: object) -> Config:
    made = small(**changes)
    return replace(
        made,
        sampling=replace(made.sampling, max_tokens=64),
        learner=replace(made.learner, row_tokens=128),
        sampler=replace(made.sampler, slots=4, flush_tokens=flush_tokens),
    )


def text(key: GenerationKey) -> list[int]:
    """The answer that these random keys draw."""
    draw = random.Random(f"{key.group}/{key.member}/{key.salt}")
    return [draw.choice(LETTERS) for _ in range(draw.randint(10, 60))] + [TOKENIZER.eos_id]


@dataclass
class Generation:
    """An answer, or a part of one: tokens [start, end) were sampled by engine `by`."""

    key: GenerationKey
    by: int
    tokens: list[int]  # the whole answer
    prompt: int  # tokens of the conversation before it
    start: int
    end: int
    finished: bool = False
    versions: list[Version] = field(default_factory=list)
    sent: int = 0
    on_tokens: Callable[[Completion], None] | None = None


class TokenEngine(DelayEngine):
    """Samples one token after the other. The log-prob of a token is minus the number of its engine."""

    def __init__(self, number: int, slots: int, made: list[Generation], draw: Draw | None = None) -> None:
        super().__init__(Behaviour(), slots)
        self._number, self._made, self._running = number, made, list[Generation]()
        self._draw = draw or (lambda key, prompt: text(key))
        self.paused: str | None = None
        self.drawn_s = list[float]()  # the time of each token

    async def generate(
        self,
        prompt: np.ndarray,
        key: GenerationKey,
        params: SamplingParams,
        *,
        keep: bool = False,
        before: Completion | None = None,
        on_tokens: Callable[[Completion], None] | None = None,
        piece_tokens: int = 1,
        may_sample: Callable[[int], int] | None = None,
    ) -> Completion:
        tokens, known = self._draw(key, prompt), 0 if before is None else len(before.tokens)
        async with self._slots:
            assert before is None or before.tokens.tolist() == tokens[:known]
            this = Generation(key, self._number, tokens, len(prompt), known, known, sent=known, on_tokens=on_tokens)
            self._made.append(this)
            self._running.append(this)
            try:
                while this.end < len(tokens):
                    await asyncio.sleep(TOKEN_S)
                    while self.paused is not None or (may_sample is not None and may_sample(this.end) == 0):
                        await asyncio.sleep(TOKEN_S / 4)
                    self.drawn_s.append(asyncio.get_running_loop().time())
                    assert self._version is not None
                    this.versions.append(self._version)
                    this.end += 1
                    if this.end - this.sent >= piece_tokens and this.end < len(tokens):
                        self._pass_on(this)
            finally:
                self._running.remove(this)
        this.finished = True
        new = self._completion(this, this.start)
        if before is None:
            return new
        logprobs = np.concatenate([before.logprobs, new.logprobs])
        return Completion(np.array(tokens, np.int32), logprobs, (*before.versions, *new.versions), "stop")

    async def flush(self) -> None:
        for this in self._running:
            self._pass_on(this)

    def _pass_on(self, this: Generation) -> None:
        if this.on_tokens is not None and this.end > this.sent:
            this.on_tokens(self._completion(this, this.sent))
            this.sent = this.end

    def _completion(self, this: Generation, start: int) -> Completion:
        tokens = np.array(this.tokens[start : this.end], np.int32)
        runs: list[VersionRun] = []
        for version in this.versions[start - this.start :]:
            same = runs.pop().count if runs and runs[-1].version == version else 0
            runs.append(VersionRun(version, same + 1))
        return Completion(tokens, np.full(len(tokens), -float(this.by), np.float32), tuple(runs), "stop")


class Fleet:
    """Samplers that die and leave at random; the first is replaced at once, so that the run goes on."""

    def __init__(self, at: VirtualRun, seed: int, draw: Draw | None = None) -> None:
        self._draw = draw
        self.at, self.chance, self.made, self.born = at, random.Random(seed), list[Generation](), 0
        self.alive: list[int] = []
        self.engines: dict[int, TokenEngine] = {}
        self.left: set[int] = set()
        self.ends = 0

    def join(self) -> None:
        index, self.born = self.born, self.born + 1
        self.engines[index] = engine = TokenEngine(index, self.at.config.sampler.slots, self.made, self._draw)
        self.at.start_engine(f"sampler-{index}", engine, lambda session: SamplerLoops(session).run())
        self.alive.append(index)

    async def trouble(self, ends: int) -> None:
        while self.ends < ends:
            await asyncio.sleep(self.chance.uniform(0.5, 6.0))
            name = f"sampler-{(index := self.alive.pop(self.chance.randrange(len(self.alive))))}"
            if self.chance.random() < 0.5:
                self.engines[index].paused = "killed"  # its tasks end one after the other
                await self.at.kill(name)
            else:
                self.at.sessions[name].request_stop(at_once=True)
                self.left.add(index)
            self.ends += 1
            self.join()


async def played(
    made: Config, folder: Path, seed: int, ends: int, latency_s: float = LATENCY_S
) -> tuple[Fleet, list[Member], dict[str, Any]]:
    """A run with `ends` deaths and leaves: the fleet, the stored members, the store's status at the end."""
    at = VirtualRun(made, folder)
    at.network = Network(latency_s)
    at.store._log = MemoryLog(keep_bytes=2**30)
    async with at:
        fleet = Fleet(at, seed)
        for _ in range(2):
            fleet.join()
        learner = at.learner(train_s=1.0)
        trouble = asyncio.ensure_future(fleet.trouble(ends))
        assert await learner == 0
        trouble.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await trouble
        found = replay_log(at.store._log.connection)
        assert not found.violations, found.violations
        assert at.store.sql("SELECT COUNT(*) FROM partials JOIN groups ON group_id = id WHERE ended_unix_s > 0") == [
            (0,)
        ]
        members = [wire.decode(body, Member) for (body,) in at.store.sql("SELECT body FROM payloads")]
        return fleet, members, at.store.status()


def parts(made: list[Generation]) -> dict[tuple[int, int], list[Generation]]:
    """The generations of each member, in order."""
    found: dict[tuple[int, int], list[Generation]] = defaultdict(list)
    for one in made:
        found[one.key.group, one.key.member].append(one)
    return found


@pytest.mark.parametrize("latency_s", [LATENCY_S, 8 * TOKEN_S])  # a call to the store takes twice as long
@pytest.mark.parametrize(
    "seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20) if seed != 3)]
)
def test_answers_go_on_elsewhere_and_at_most_one_flush_is_sampled_again(
    tmp_path: Path, seed: int, latency_s: float
) -> None:
    fleet, members, status = run(played(config(), tmp_path, seed, ends=12, latency_s=latency_s))
    assert fleet.ends == 12 and status["conservation_residual"] == 0 and not status["expired"].get("stale")
    by_member = parts(fleet.made)
    moved = tokens = 0
    for one in members:
        assert isinstance(one.outcome, Finished)
        answer = one.outcome.segments[-1]
        played_by = by_member[one.group, one.member]
        assert answer.tokens.tolist() == text(played_by[0].key), "not the answer of an undisturbed run"
        made = [-float(part.by) for part in played_by for _ in range(part.end)]
        for before, after in itertools.pairwise(played_by):
            most = 1 if before.by in fleet.left and latency_s == LATENCY_S else FLUSH
            assert before.end - after.start <= most, "more than one flush is sampled again"
            moved, tokens = moved + (after.start > 0), tokens + after.start
            kept = answer.logprobs[: after.start]
            assert set(kept.tolist()) <= set(made) and (kept[before.start :] == -float(before.by)).all(), (
                "flushed tokens are not kept verbatim"
            )
    # Where the store answers late, most members are at their beginning when their sampler ends.
    least_moved, least_tokens = (3, 40) if latency_s == LATENCY_S else (1, 8)
    assert moved > least_moved and tokens > least_tokens
    assert status["members_resumed"] >= moved


def test_without_flushes_members_start_again(tmp_path: Path) -> None:
    fleet, members, status = run(played(config(flush_tokens=0), tmp_path, 0, ends=12))
    assert members and all(one.start == 0 for one in fleet.made)
    assert status["members_resumed"] == status["tokens_flushed"] == 0
    lost = sum(one.end for one in fleet.made if not one.finished)
    saved, _, _ = run(played(config(), tmp_path / "b", 0, ends=12))
    again = sum(
        max(0, before.end - after.start)
        for same in parts(saved.made).values()
        for before, after in itertools.pairwise(same)
    )
    assert again < lost / 2, f"{again} tokens are sampled twice, without flushes {lost}"


def test_the_store_may_die_with_flushes_that_it_acknowledged(tmp_path: Path) -> None:
    """Its log is on disk before it answers puts, but not before it answers flushes: the sampler sends those again."""

    async def job() -> None:
        async with VirtualRun(config(), tmp_path) as at:
            fleet = Fleet(at, 1)
            fleet.join()
            learner = at.learner(train_s=1.0)
            for _ in range(4):
                await asyncio.sleep(2.0)
                while at.store.sql("SELECT kind FROM log ORDER BY position DESC LIMIT 1") != [("flushed",)]:
                    await asyncio.sleep(0.01)
                event = wire.decode(at.store.sql("SELECT body FROM log ORDER BY position DESC LIMIT 1")[0][0], ev.Event)
                await at.store.stop()
                place = (event.group, event.member, event.start)
                delete = at.store._log.connection.execute
                delete("DELETE FROM partials WHERE group_id = ? AND member = ? AND start = ?", place)
                delete("DELETE FROM log WHERE position = (SELECT MAX(position) FROM log)")
                await asyncio.sleep(0.2)
                at.store.start()
            await asyncio.sleep(1.0)
            await at.kill("sampler-0")
            fleet.join()
            assert await learner == 0
            assert not (found := replay_log(at.store._log.connection)).violations, found.violations
            assert at.store.status()["members_resumed"] > 0
            for same in parts(fleet.made).values():
                for before, after in itertools.pairwise(same):
                    assert before.end - after.start <= FLUSH, "the lost flush was not sent again"

    run(job())
