"""From a prompt of the pipeline to a rewarded member: real tasks, real tokenizer, real scoring process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from jaxroll.config import Config
from jaxroll.data import sources
from jaxroll.data.tasks import PromptPipeline
from jaxroll.envs import registry
from jaxroll.protocols import Completion, GenerationKey, SamplingParams
from jaxroll.records import Finished, Grant, Version, VersionRun
from jaxroll.rewards.scoring_pool import ScoringPool
from jaxroll.rollout.episode import RolloutManager
from jaxroll.text.tokenizers import CharTokenizer
from tests.harness.rollout_proxy import run_group

pytestmark = pytest.mark.process


class Speller:
    """A proxy that spells the word of the prompt backward; `change` spoils the tokens of some members."""

    def __init__(self, tokenizer: CharTokenizer, change: dict[int, Callable[[list[int]], list[int]]]) -> None:
        self._tokenizer, self._change = tokenizer, change

    async def generate(
        self, prompt: np.ndarray, key: GenerationKey, params: SamplingParams, *, keep: bool = False
    ) -> Completion:
        tokens = [*reversed(prompt.tolist()[1:-1]), self._tokenizer.eos_id]
        tokens = self._change.get(key.member, lambda same: same)(tokens)
        finish = "stop" if tokens[-1] in params.stop_tokens else "length"
        count = len(tokens)
        return Completion(
            np.array(tokens, np.int32), np.zeros(count, np.float32), (VersionRun(Version(0, 0), count),), finish
        )


def test_only_the_right_word_that_ends_is_paid() -> None:
    config = Config()
    tasks = list(itertools.islice(PromptPipeline(config), 25))
    tokenizer = CharTokenizer(sources.alphabet(config.task))
    a = tokenizer.encode("a")[0]
    proxy = Speller(
        tokenizer,
        {
            1: lambda ids: ids[:-1],  # right, without the end
            2: lambda ids: [*ids[:-1], a, ids[-1]],  # right, and one letter more
            3: lambda ids: [*ids[:-1], tokenizer.pad_id, ids[-1]],  # right, and a token that is no letter
        },
    )

    async def rollouts() -> dict[tuple[int, int], Finished]:
        pool = ScoringPool(1)
        pool.start()
        manager = RolloutManager(
            proxy, lambda name: registry.create(name, pool, config.task), tokenizer, SamplingParams(max_tokens=12)
        )
        found: dict[tuple[int, int], Finished] = {}

        async def keep(member) -> None:
            assert isinstance(member.outcome, Finished), member.outcome
            found[member.group, member.member] = member.outcome

        try:
            async with asyncio.timeout(120):
                grants = (Grant(g, task, ((0, 0), (1, 0), (2, 0), (3, 0)), 30.0) for g, task in enumerate(tasks))
                await asyncio.gather(*(run_group(manager, grant, keep) for grant in grants))
        finally:
            pool.close()
        return found

    found = asyncio.run(rollouts())
    assert len(found) == 100
    for (group, member), outcome in found.items():
        assert outcome.reward == (1.0 if member == 0 else 0.0), (tasks[group], member, outcome)
        assert outcome.reward_parts["truncated"] == (1.0 if member == 1 else 0.0)
    # Partial credit of 0.8 and more was on offer.
    assert max(found[g, 2].reward_parts["raw_score"] for g in range(25)) > 0.79
