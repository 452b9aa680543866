"""One episode: token truth, masks, versions, rewards, and its limits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll import wire
from jaxroll.config import Config, LearnerConfig
from jaxroll.errors import DataError, DeadlineExceeded, InfraError
from jaxroll.protocols import Completion, GenerationKey, SamplingParams, StepResult
from jaxroll.records import MAX_EXTRACTED_CHARS, Finished, Message, Task, Version, VersionRun
from jaxroll.rollout import episode
from jaxroll.text.tokenizers import CharTokenizer

TOKENIZER = CharTokenizer("abcdefghij")
TASK = Task(0, (Message("user", "abc"),), "single_turn", "{}", 7, "h")
KEY = GenerationKey(group=4, member=2, salt=1)
SAMPLING = SamplingParams(max_tokens=6)
V3, V4 = Version(0, 3), Version(0, 4)
BOS, EOS, TURN = TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.turn_id


def completion(text: str, finish: str = "stop", versions: tuple[VersionRun, ...] | None = None) -> Completion:
    ids = TOKENIZER.encode(text) + ([EOS] if finish == "stop" else [])
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return Completion(np.array(ids, np.int32), logprobs, versions or (VersionRun(V3, len(ids)),), finish)


@dataclass
class FakeProxy:
    """Returns the listed completions in order and records its requests."""

    completions: list[Completion | BaseException]
    asked: list[tuple[list[int], GenerationKey, SamplingParams]] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        assert prompt.dtype == np.int32
        self.kept.append(keep)
        self.asked.append((prompt.tolist(), key, params))
        found = self.completions[len(self.asked) - 1]
        if isinstance(found, BaseException):
            raise found
        return found


@dataclass
class FakeEnv:
    """Returns the listed results in order."""

    results: list[StepResult | BaseException]
    step_limit_s: float = 10.0
    heard: list[str] = field(default_factory=list)
    seed: int | None = None
    closed: int = 0

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        self.seed = seed
        return task.messages

    async def step(self, answer: str) -> StepResult:
        self.heard.append(answer)
        found = self.results[len(self.heard) - 1]
        if isinstance(found, BaseException):
            raise found
        return found

    async def close(self) -> None:
        self.closed += 1


RIGHT = StepResult(done=True, reward=1.0, reward_parts={"raw_score": 1.0})


def run(env: FakeEnv, proxy: FakeProxy, **more: object) -> Finished:
    return asyncio.run(
        episode.run(TASK, KEY, env=env, proxy=proxy, tokenizer=TOKENIZER, sampling=SAMPLING, **more)  # type: ignore[arg-type]
    )


def test_one_turn() -> None:
    env, proxy = FakeEnv([RIGHT]), FakeProxy([completion("cba")])
    finished = run(env, proxy)
    question, answer = finished.segments
    assert question.tokens.tolist() == [BOS, 4, 5, 6, TURN]
    assert answer.tokens.tolist() == [6, 5, 4, EOS]
    assert question.loss_mask.tolist() == [0] * 5 and answer.loss_mask.tolist() == [1] * 4
    assert question.logprobs.tolist() == [0.0] * 5 and answer.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert (finished.finish, finished.reward) == ("stop", 1.0)
    assert finished.reward_parts == {"raw_score": 1.0, "truncated": 0.0}
    assert finished.versions == (VersionRun(V3, 4),)
    assert env.heard == ["cba"], "the stop token is no part of the answer"
    assert env.seed == TASK.seed
    asked = [([BOS, 4, 5, 6, TURN], KEY, SamplingParams(max_tokens=6, stop_tokens=(EOS,)))]
    assert proxy.asked == asked
    assert b"extracted" not in wire.encode(finished), "without extraction the bytes are those of earlier versions"


def test_the_environment_is_given_the_tokens_of_the_answer_and_its_extract_is_recorded() -> None:
    env = FakeEnv([msgspec.structs.replace(RIGHT, extracted="b" * 5000)])
    env.answer_tokens = 0  # type: ignore[attr-defined]
    finished = run(env, FakeProxy([completion("abc")]))
    assert env.answer_tokens == 4, "the end of sequence included"  # type: ignore[attr-defined]
    assert finished.extracted == "b" * MAX_EXTRACTED_CHARS
    assert wire.decode(wire.encode(finished), Finished).extracted == finished.extracted


def test_arrays_have_their_declared_types() -> None:
    for segment in run(FakeEnv([RIGHT]), FakeProxy([completion("cba")])).segments:
        assert (segment.tokens.dtype, segment.loss_mask.dtype, segment.logprobs.dtype) == (
            np.dtype(np.int32),
            np.dtype(np.uint8),
            np.dtype(np.float32),
        )


def test_a_right_answer_that_does_not_end_gets_nothing_and_is_not_scored() -> None:
    env = FakeEnv([RIGHT])
    finished = run(env, FakeProxy([completion("cba", finish="length")]))
    assert (finished.finish, finished.reward) == ("length", 0.0)
    assert finished.reward_parts == {"truncated": 1.0}
    assert finished.segments[1].tokens.tolist() == [6, 5, 4]
    assert env.heard == []


def test_special_tokens_inside_an_answer_are_part_of_what_the_environment_hears() -> None:
    ids = [6, TOKENIZER.pad_id, 5, 4, EOS]
    odd = Completion(np.array(ids, np.int32), np.zeros(5, np.float32), (VersionRun(V3, 5),), "stop")
    env = FakeEnv([StepResult(done=True)])
    run(env, FakeProxy([odd]))
    assert env.heard[0] != "cba" and len(env.heard[0]) == 4


def test_several_turns_are_one_unbroken_context() -> None:
    env = FakeEnv([StepResult(done=False, messages=(Message("tool", "de"),)), RIGHT])
    proxy = FakeProxy(
        [
            completion("a", versions=(VersionRun(V3, 2),)),
            completion("bc", versions=(VersionRun(V3, 1), VersionRun(V4, 2))),
        ]
    )
    finished = run(env, proxy)
    first, second = [BOS, 4, 5, 6, TURN], [7, 8, TURN]
    assert [s.tokens.tolist() for s in finished.segments] == [first, [4, EOS], second, [5, 6, EOS]]
    assert [s.loss_mask.max() for s in finished.segments] == [0, 1, 0, 1]
    assert [asked[0] for asked in proxy.asked] == [first, [*first, 4, EOS, *second]]
    assert finished.versions == (VersionRun(V3, 3), VersionRun(V4, 2)), "runs of one version are joined"
    assert (finished.finish, finished.reward) == ("done", 1.0)


@given(st.lists(st.integers(0, 15), max_size=20))
def test_sampled_ids_are_never_tokenised_again(ids: list[int]) -> None:
    """Sampled tokens, also those that no text encodes to, are stored unchanged and are in the next turn's prompt."""
    ids = [*[i for i in ids if i != EOS], EOS]
    odd = Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), (VersionRun(V3, len(ids)),), "stop")
    proxy = FakeProxy([odd, completion("a")])
    finished = run(FakeEnv([StepResult(done=False, messages=(Message("user", "b"),)), RIGHT]), proxy)
    assert finished.segments[1].tokens.tolist() == ids
    assert proxy.asked[1][0][5 : 5 + len(ids)] == ids


def test_an_endless_conversation_is_cut_and_unpaid() -> None:
    more = StepResult(done=False, messages=(Message("user", "b"),), reward=0.7)
    finished = run(FakeEnv([more] * 3), FakeProxy([completion("a")] * 3), bounds=episode.Bounds(turns=3))
    assert (finished.finish, finished.reward, finished.reward_parts["truncated"]) == ("length", 0.0, 1.0)
    assert len(finished.segments) == 6


def test_what_is_computed_is_kept_for_the_next_turn_where_there_can_be_one() -> None:
    more = StepResult(done=False, messages=(Message("user", "b"),))
    for declared, bounds, expected in (
        (3, episode.Bounds(), [True, True, False]),
        (9, episode.Bounds(turns=2), [True, False]),
        (1, episode.Bounds(), [False]),
        (80, episode.Bounds(), [True] * 79 + [False]),  # more than an environment has that declares nothing
    ):
        env, proxy = FakeEnv([more] * 80), FakeProxy([completion("a")] * 80)
        env.max_turns = declared  # type: ignore[attr-defined]
        assert run(env, proxy, bounds=bounds).finish == "length"
        assert proxy.kept == expected


def test_a_conversation_ends_where_its_tokens_do() -> None:
    """5 tokens shown, 2 sampled, 2 shown, 2 sampled: a limit of 11 leaves no third turn."""
    more = StepResult(done=False, messages=(Message("user", "b"),), reward=0.7)
    for tokens, asked in ((8, [3]), (9, [4]), (10, [5, 1]), (11, [6, 2]), (13, [6, 4]), (15, [6, 6, 2])):
        env, proxy = FakeEnv([more] * 9), FakeProxy([completion("a")] * 9)
        finished = run(env, proxy, bounds=episode.Bounds(tokens=tokens))
        assert [params.max_tokens for _, _, params in proxy.asked] == asked
        assert (finished.finish, finished.reward, finished.reward_parts) == ("length", 0.0, {"truncated": 1.0})
        assert sum(len(segment.tokens) for segment in finished.segments) <= 5 + 4 * len(asked)
        assert finished.segments[-1].loss_mask.all(), "an unanswered message is not part of the sample"
    with pytest.raises(DataError, match="first message alone has 5 tokens"):
        run(FakeEnv([more]), FakeProxy([completion("a")]), bounds=episode.Bounds(tokens=5))


def test_a_conversation_ends_where_the_learner_has_no_room_for_it() -> None:
    """5 tokens shown, 4 of which may be packed separately: then a row of 6 has room for 5 more, otherwise for 1."""
    more = StepResult(done=False, messages=(Message("user", "b"),), reward=0.7)
    for apart, row, asked in ((4, 6, [5, 1]), (3, 6, [1]), (4, 60, [6, 6, 6, 2]), (0, 60, [6, 6, 6, 2])):
        proxy = FakeProxy([completion("a")] * 9)
        bounds = episode.Bounds(tokens=19, row_tokens=row, prompt_tokens=apart)
        run(FakeEnv([more] * 9), proxy, bounds=bounds)
        assert [params.max_tokens for _, _, params in proxy.asked] == asked
    assert episode.Bounds().most(5) == 0 and episode.Bounds(tokens=9).most(5) == 9
    learner = LearnerConfig(row_tokens=13, shared_prompt_tokens=15)
    bounds = episode.bounds_of(Config(learner=learner))
    assert [bounds.most(first) for first in (1, 5, 16, 17)] == [13, 17, 28, 13]


def test_other_stop_tokens_are_kept() -> None:
    proxy = FakeProxy([Completion(np.array([4, 9], np.int32), np.zeros(2, np.float32), (VersionRun(V3, 2),), "stop")])
    env = FakeEnv([RIGHT])
    sampling = SamplingParams(max_tokens=6, stop_tokens=(9,))
    asyncio.run(episode.run(TASK, KEY, env=env, proxy=proxy, tokenizer=TOKENIZER, sampling=sampling))
    assert proxy.asked[0][2].stop_tokens == (9, EOS)
    assert env.heard == ["a"]


BROKEN = {
    "aborted": Completion(np.array([4], np.int32), np.zeros(1, np.float32), (VersionRun(V3, 1),), "abort"),
    "log-probs missing": Completion(
        np.array([4, EOS], np.int32), np.zeros(1, np.float32), (VersionRun(V3, 2),), "stop"
    ),
    "versions missing": Completion(np.array([4, EOS], np.int32), np.zeros(2, np.float32), (VersionRun(V3, 1),), "stop"),
    "nan": Completion(np.array([4, EOS], np.int32), np.full(2, np.nan, np.float32), (VersionRun(V3, 2),), "stop"),
    "no stop token": Completion(np.array([4, 5], np.int32), np.zeros(2, np.float32), (VersionRun(V3, 2),), "stop"),
    "stop and empty": Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), "stop"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_completion_that_does_not_hold_together_is_the_machines_fault(what: str) -> None:
    env = FakeEnv([RIGHT])
    with pytest.raises(InfraError):
        run(env, FakeProxy([BROKEN[what]]))
    assert env.heard == []


class Hangs(FakeEnv):
    """An environment in which one of the calls hangs."""

    where = "step"

    async def reset(self, task: Task, seed: int) -> tuple[Message, ...]:
        if self.where == "reset":
            await asyncio.Event().wait()
        return await super().reset(task, seed)

    async def step(self, answer: str) -> StepResult:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_hanging_environment_is_a_data_error_within_its_limit(where: str) -> None:
    env = Hangs([], step_limit_s=0.05)
    env.where = where
    with pytest.raises(DataError, match=f"{where} took longer than 0.05 s"):
        run(env, FakeProxy([completion("a")]))


def test_a_hanging_proxy_is_the_machines_fault() -> None:
    class Silent(FakeProxy):
        async def generate(self, *args: object, **more: object) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        run(FakeEnv([]), Silent([]), bounds=episode.Bounds(generation_s=0.05))
    with pytest.raises(InfraError, match="timed out"):
        run(FakeEnv([]), FakeProxy([TimeoutError("of its own")]))


@pytest.mark.parametrize(
    "result",
    [StepResult(done=False), StepResult(done=True, reward=float("nan")), StepResult(done=True, reward=float("inf"))],
    ids=["not done, nothing to say", "nan", "inf"],
)
def test_an_environment_that_makes_no_sense_is_a_data_error(result: StepResult) -> None:
    with pytest.raises(DataError):
        run(FakeEnv([result]), FakeProxy([completion("a"), completion("a")]))


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_completion_without_a_token_is_the_failure_of_the_engine(finish: str) -> None:
    """An empty sampled segment would be taken for a shown one."""
    empty = Completion(np.array([], np.int32), np.array([], np.float32), (), finish)
    again = StepResult(done=False, messages=(Message("user", "a"),))
    with pytest.raises(InfraError, match="without a token"):
        run(FakeEnv([again]), FakeProxy([completion("cba"), empty]))
