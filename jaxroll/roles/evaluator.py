"""Evaluator role: held-out accuracy at fixed weight versions, while training goes on.

It has a small engine of its own, so that a version stays in it for a whole evaluation and no sampler waits. Every
`evaluator.every` steps, and at the first and the last one, it fetches the newest weights, answers all held-out items
greedily and reports one row. The store's limiter does not count its requests.

Threads: the main thread runs JAX; this module runs on the asyncio loop thread (`jaxroll.roles.session`).
Tasks: one evaluation after the other.
Waits for: published weights.
Stops: after evaluating the last step's weights, when the run is closed, or on SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxroll import disk
from jaxroll.clock import unix_s
from jaxroll.config import Config, RoleArgs
from jaxroll.config.derived import is_evaluated, next_evaluation
from jaxroll.config.parsing import HELDOUT
from jaxroll.data import tasks
from jaxroll.envs.executors import count_cause
from jaxroll.errors import InfraError, TransferError
from jaxroll.records import Relay, Task, Version, VersionRef
from jaxroll.rewards.parts import truth_or_empty
from jaxroll.roles import session as sessions
from jaxroll.roles.weights import Progress
from jaxroll.rollout import episode
from jaxroll.rollout.episode import sampling_params

PUBLISHED_WAIT_S = 10.0
EXAMPLES = 8
FETCH_TRIES, FETCH_PAUSE_S = 50, 0.2


def main(args: RoleArgs) -> int:
    """Evaluate until the last step's weights are scored; the exit code."""
    return sessions.main(role_spec(args.config), args)


def compile_programs(args: RoleArgs, progress: Progress) -> None:
    """Compile the evaluator's programs into the compilation cache."""
    sessions.compile_engine(role_spec(args.config), args.config, progress)


def role_spec(config: Config) -> sessions.RoleSpec:
    """The evaluator as a role with an engine."""
    return sessions.RoleSpec(
        "evaluator",
        lambda session: _play(session, config),
        mesh=config.evaluator.mesh,
        slots=config.evaluator.slots,
        weight_swap="keep_kv",
    )


async def _play(session: sessions.EngineSession, config: Config) -> None:
    # not on the loop: making the items can take longer than a loop may be blocked
    sets = await asyncio.to_thread(tasks.evaluated, config)
    await EvaluatorLoops(session, sets).run()


class EvaluatorLoops:
    """The sequence of evaluations."""

    def __init__(self, session: sessions.EngineSession, sets: Mapping[str, Sequence[Task]]) -> None:
        self.session, self.config = session, session.config
        self.tokenizer = session.parts.tokenizer
        self.manager = session.manager(sampling_params(self.config, self.tokenizer, 0.0))
        self._faults_reported: Counter[str] = Counter()
        self.tasks, self.sets = sets[HELDOUT], {name: found for name, found in sets.items() if name != HELDOUT}
        hashes = json.dumps([task.question_hash for found in sets.values() for task in found])
        # the report checks that no held-out item was trained on
        disk.replace_text(session.args.paths.heldout, hashes)

    async def run(self) -> None:
        """Evaluate every version that is due, until the last. InfraError if its weights cannot be fetched."""
        held: Version | None = None
        due = failures = 0
        while True:
            reply = await self.session.store.announced(held, PUBLISHED_WAIT_S, relay=self.session.parts.follower.relay)
            ref = reply.ref
            if ref is None:
                continue
            step = ref.version.step
            evaluated = is_evaluated(self.config, step, due)
            if evaluated:
                if not await self._fetch(ref, reply.relays):
                    failures += 1
                    if failures > FETCH_TRIES:
                        raise InfraError(f"the weights of version {ref.version} could not be fetched")
                    await asyncio.sleep(FETCH_PAUSE_S)
                    continue
                failures = 0
                await self.session.store.published(ref.version)  # the learner waits until this role has the last one
                # At once: the learner keeps this version's checkpoint until its value is stored or another one is held.
                await self.session.store.report([await self._row(ref.version)])
            held, following = ref.version, next_evaluation(self.config, step)
            if following is None:
                return
            due = following if evaluated else due

    async def _fetch(self, ref: VersionRef, relays: Sequence[Relay]) -> bool:
        """True if the weights are in the engine; they may be replaced by newer ones during the fetch."""
        try:
            await self.session.parts.follower.load(ref, relays)
        except TransferError as error:
            self.session.progress(f"weights {ref.version}: {error}")
            return False
        return True

    async def _row(self, version: Version) -> dict:
        t0 = unix_s()
        permits = 2 * self.config.evaluator.slots
        results = await episode.scores(self.manager, self.tasks, self.tokenizer, version, permits=permits)
        others = {
            name: await episode.scores(self.manager, found, self.tokenizer, version, permits=permits)
            for name, found in self.sets.items()
        }
        sets = {name: _figures(scored) for name, scored in others.items()}
        failed = _failures_by_cause([results, *others.values()])
        t1 = unix_s()
        self.session.executors.threads.note_leftover(await self.manager.judged_threads())
        faults = self.manager.env_calls.faults + self.session.executors.processes.faults
        faults -= self._faults_reported
        self._faults_reported += faults
        by_source = episode.grouped(results, lambda score: str(score.task.args().get("source", "")))
        sources = {label: _figures(scored) for label, scored in by_source.items()}
        examples = [
            {
                "prompt": score.task.messages[-1].content,
                "answer": truth_or_empty(score.task.args()),
                "text": score.text,
                "ok": score.right,
            }
            | ({} if score.extracted is None else {"extracted": score.extracted})
            for score in results[:EXAMPLES]
        ]
        return (
            {
                "t": t1,
                "role": self.session.role,
                "kind": "eval",
                "step": version.step,
                "lineage": version.lineage,
                "accuracy": accuracy(results),
                "correct": marks(results),
                "n": sum(score.pinned for score in results),
                "reward_parts": mean_parts(results),
                "t0": t0,
                "t1": t1,
                "seconds": t1 - t0,
                "examples": examples,
            }
            | ({"sets": sets} if sets else {})
            | ({"sources": sources} if sources else {})
            | ({"failed_by_cause": failed} if failed else {})
            | ({"env_faults": dict(faults)} if faults else {})
        )


def _failures_by_cause(scored: Sequence[Sequence[episode.Score]]) -> dict[str, Counter[str]]:
    """The number of failed items by kind and cause."""
    found: dict[str, Counter[str]] = {}
    for score in (score for results in scored for score in results if score.failed):
        count_cause(found.setdefault(score.failed, Counter()), score.text)
    return found


def _figures(results: Sequence[episode.Score]) -> dict[str, Any]:
    return {"accuracy": accuracy(results), "n": sum(score.pinned for score in results)}


def accuracy(results: Sequence[episode.Score]) -> float | None:
    """Fraction of right answers among the pinned items; None without any."""
    counted = [score.right for score in results if score.pinned]
    return sum(counted) / len(counted) if counted else None


def marks(results: Sequence[episode.Score]) -> str:
    """One character per item: 1 right, 0 wrong, - not pinned."""
    return "".join("01"[score.right] if score.pinned else "-" for score in results)


def mean_parts(results: Sequence[episode.Score]) -> dict[str, float]:
    """The mean of every reward part over the pinned items."""
    counted = [score.parts for score in results if score.pinned]
    names = sorted({name for found in counted for name in found})
    return {name: sum(found.get(name, 0.0) for found in counted) / len(counted) for name in names}
