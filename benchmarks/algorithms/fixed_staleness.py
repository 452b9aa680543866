"""One learner and one engine in a loop of exact staleness: step n trains on answers of the weights of step n − α.

This isolates the effect of staleness on a loss from the effects of scheduling: nothing overlaps, nothing is lost, every
claim has the same size, and a seed gives the same questions at every α. Private to benchmarks/algorithms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import sharding
from jaxroll.config import Config, LearnerConfig
from jaxroll.data import sources, tasks
from jaxroll.data.tasks import Candidates, SkippedItem
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.engine.requests import Request, Result
from jaxroll.learner import weights
from jaxroll.learner.trainer import Trainer
from jaxroll.models import params as model_params
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Claim, ClaimedGroup, Finished, Member, Segment, Task, Version, VersionRun
from jaxroll.text import tokenizers
from jaxroll.tools import sft

SLOTS, PREFILL_ROWS, CHUNK = 64, 8, 4


class Question(NamedTuple):
    """A question and its right answer."""

    task: Task
    answer: str


class Bench:
    """The parts that all runs share: questions, the warm start, an engine, a compiled trainer for each algorithm."""

    def __init__(self, config: Config, folder: Path, say) -> None:
        self.config, self._say = config, say
        self.text = tokenizers.build(config.tokenizer, sources.alphabet(config.task))
        self.spec = model_params.spec(config.model, self.text.vocab_size)
        self.mesh = sharding.build(config.learner.mesh)
        if not folder.is_dir():
            sft.train(config, folder, say)
        self.warm = weights.load(folder)
        self.candidates = Candidates(config)
        self.heldout = [self._question(task.index, frozenset()) for task in tasks.tasks(config, self.candidates)]
        self.kept_aside = tasks.hashes(question.task for question in self.heldout if question)
        self._engine_config = EngineConfig(
            slots=SLOTS,
            prefill_rows=PREFILL_ROWS,
            decode_chunk=CHUNK,
            seed=0,
            max_tokens=config.task.max_prompt_tokens + config.sampling.max_tokens,
            prefill_buckets=config.sampler.prefill_buckets,
        )
        self.engine = self._judge = self.engine_of()
        self._shardings = model_params.shardings(self.spec, self.mesh, sharding.SAMPLER)
        self.engine.warmup(self.placed(self.warm), say)
        self._versions, self._trainers = 0, {}

    def engine_of(self, **options: Any) -> Engine:
        """An engine of the benchmark's sizes with these options (`EngineConfig`); its programs are not compiled yet."""
        return Engine(self.spec, self.mesh, sharding.SAMPLER, replace(self._engine_config, **options))

    def placed(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """A copy of `params` in the engine's sharding, because the learner donates its own."""
        copies = {name: jnp.array(value, copy=True) for name, value in params.items()}
        return jax.device_put(copies, self._shardings)

    def trainer(self, learner: LearnerConfig) -> Trainer:
        """The trainer of an algorithm, compiled once, at the warm start."""
        if learner not in self._trainers:
            config = replace(self.config, learner=learner)
            made = Trainer(config, self.spec, self.mesh, sharding.LEARNER, key=jax.random.key(0))
            made.warmup(self._say)
            self._trainers[learner] = made
        self._trainers[learner].set_params(self.warm)
        return self._trainers[learner]

    def questions(self, seed: int) -> Iterator[Question]:
        """Training questions without end, different for every seed, none of them held out."""
        span = self.candidates.ranges.train
        for index in np.random.default_rng(seed).permutation(len(span)):
            if question := self._question(span[int(index)], self.kept_aside):
                yield question
        raise RuntimeError("the training range is used up: raise schedule.steps")

    def _question(self, index: int, without: frozenset[str]) -> Question | None:
        found = self.candidates.trainable(index, without, taught=True)
        return None if isinstance(found, SkippedItem) else Question(found.task, found.worked[-1].content)

    def answered(
        self,
        params: Mapping[str, Any],
        questions: Sequence[Question],
        size: int,
        temperature: float,
        salt: int,
        engine: Engine | None = None,
    ) -> list[list[Result]]:
        """`size` answers of the weights `params` to each question, by `engine` or the current one."""
        engine = engine or self.engine
        self._versions += 1
        engine.swap(Version(0, self._versions), dict(params))
        wanted = SamplingParams(self.config.sampling.max_tokens, temperature, 0, 1.0, (self.text.eos_id,))
        results: dict[int, Result] = {}
        for number, question in enumerate(questions):
            prompt = np.array(self.text.render(question.task.messages), np.int32)
            for member in range(size):
                id = number * size + member
                request = Request(id, prompt, GenerationKey(number, member, salt), wanted)
                engine.add(request, lambda result, id=id: results.update({id: result}))
        while engine.step():
            pass
        return [[results[number * size + member] for member in range(size)] for number in range(len(questions))]

    def right(self, result: Result, question: Question) -> bool:
        """True if the answer ended by itself and is right."""
        ids, finish = result.completion.tokens.tolist(), result.completion.finish
        return finish == "stop" and self.text.decode(ids[:-1]) == question.answer

    def accuracy(self, params: Mapping[str, Any]) -> float:
        """Held-out share of right greedy answers, by an engine without options: so does the evaluator of a run."""
        asked = [question for question in self.heldout if question]
        found = self.answered(params, asked, 1, 0.0, 0, self._judge)
        return float(np.mean([self.right(one[0], question) for one, question in zip(found, asked, strict=True)]))


def run(bench: Bench, learner: LearnerConfig, alpha: int, seed: int, steps: int) -> dict[str, Any]:
    """Accuracy before and after `steps` steps at staleness `alpha`, and metrics of the last half of the steps."""
    trainer, config = bench.trainer(learner), bench.config
    history, rows = deque([bench.placed(trainer.state.params)], maxlen=alpha + 1), []
    before, questions = bench.accuracy(history[-1]), bench.questions(seed)
    for step in range(steps):
        asked = [next(questions) for _ in range(config.schedule.groups_per_step)]
        salt = (seed * 100_003 + step + 1) % 2**31
        results = bench.answered(history[0], asked, config.schedule.group_size, config.sampling.temperature, salt)
        rows.append(trainer.train(_claim(bench, step, max(step - alpha, 0), asked, results)))
        history.append(bench.placed(trainer.state.params))
    late = rows[len(rows) // 2 :]
    return {
        "before": before,
        "after": bench.accuracy(history[-1]),
        "reward_last": float(np.mean([row["reward_mean"] for row in rows[-10:]])),
        **{name: _mean(late, name) for name in ("ess", "clip_share", "kl_behaviour", "logprob_delta", "entropy")},
        "ratio_max": max((row["ratio_max"] for row in late if row["ratio_max"] is not None), default=None),
        "by_age": {
            age: {
                name: _mean(of_age, name) for name in ("reward", "ess", "clip_share", "kl_behaviour", "logprob_delta")
            }
            for age in sorted({age for row in rows for age in row["by_age"]}, key=int)
            for of_age in [[row["by_age"][age] for row in rows if age in row["by_age"]]]
        },
        "age_max": max(row["age_max"] for row in rows),
        "rewards": [round(row["reward_mean"], 4) for row in rows],
    }


def _claim(bench: Bench, step: int, drawn_at: int, asked: Sequence[Question], results: list[list[Result]]) -> Claim:
    groups = []
    for number, (question, answers) in enumerate(zip(asked, results, strict=True)):
        prompt = np.array(bench.text.render(question.task.messages), np.int32)
        nothing = np.zeros(len(prompt), np.uint8)
        shown = Segment(prompt, nothing, nothing.astype(np.float32))
        members = tuple(
            Member(number, i, 0, _finished(shown, result, float(bench.right(result, question)), drawn_at))
            for i, result in enumerate(answers)
        )
        groups.append(ClaimedGroup(step * len(asked) + number, question.task, members))
    return Claim(step, 0, tuple(groups), shuffle_seed=step, replayed=False)


def _finished(shown: Segment, result: Result, reward: float, drawn_at: int) -> Finished:
    tokens = np.asarray(result.completion.tokens, np.int32)
    said = Segment(tokens, np.ones(len(tokens), np.uint8), np.asarray(result.completion.logprobs, np.float32))
    runs = (VersionRun(Version(0, drawn_at), len(tokens)),)
    return Finished((shown, said), result.completion.finish, reward, {}, runs)


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return float(np.mean(values)) if values else None
