"""Evaluator role: held-out accuracy at fixed weight versions, while training goes on.

It has a small engine of its own, so that a version stays in it for a whole evaluation and no sampler waits. Every
`evaluator.every` steps, and at the first and the last one, it fetches the newest weights, answers all held-out items
`evaluator.samples` times and reports one row. The store's limiter does not count its requests.

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
from jaxroll.config.parsing import HELDOUT, samples_of
from jaxroll.data import tasks
from jaxroll.envs.executors import count_cause
from jaxroll.errors import InfraError, TransferError
from jaxroll.records import Relay, Task, Version, VersionRef
from jaxroll.rewards.parts import counts, truth_or_empty
from jaxroll.roles import session as sessions
from jaxroll.roles.weights import RoleLog
from jaxroll.rollout import episode
from jaxroll.rollout.episode import sampling_params

PUBLISHED_WAIT_S = 10.0
EXAMPLES = 8
FETCH_TRIES, FETCH_PAUSE_S = 50, 0.2


def main(args: RoleArgs) -> int:
    """Evaluate until the last step's weights are scored; the exit code."""
    return sessions.main(role_spec(args.config), args)


def compile_programs(args: RoleArgs, progress: RoleLog) -> None:
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
        self.manager = session.manager(sampling_params(self.config, self.tokenizer, self.config.evaluator.temperature))
        self._faults_reported: Counter[str] = Counter()
        self.sets = sets
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
        t0, first, scored = unix_s(), 0, dict[str, Repeated]()
        for name, found in self.sets.items():
            scored[name] = await episode.scores(
                self.manager,
                found,
                self.tokenizer,
                version,
                permits=2 * self.config.evaluator.slots,
                samples=samples_of(self.config, name),
                first=first,
            )
            first += len(found)  # so that no two sets draw with the same keys
        results = scored.pop(HELDOUT)
        sets = {name: {**figures(other), "correct": marks(other)} for name, other in scored.items()}
        failed = _failures_by_cause([results, *scored.values()])
        t1 = unix_s()
        self.session.executors.threads.note_leftover(await self.manager.judged_threads())
        faults = self.manager.env_calls.faults + self.session.executors.processes.faults
        faults -= self._faults_reported
        self._faults_reported += faults
        places = episode.grouped(range(len(results[0])), lambda at: str(results[0][at].task.args().get("source", "")))
        sources = {label: figures([[one[at] for at in items] for one in results]) for label, items in places.items()}
        examples = [
            {
                "prompt": score.task.messages[-1].content,
                "answer": truth_or_empty(score.task.args()),
                "text": score.text,
                "ok": score.right,
            }
            | ({} if score.extracted is None else {"extracted": score.extracted})
            for score in results[0][:EXAMPLES]
        ]
        return (
            {
                "t": t1,
                "role": self.session.role,
                "kind": "eval",
                "step": version.step,
                "lineage": version.lineage,
                "correct": marks(results),
                **figures(results),
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


Repeated = Sequence[Sequence[episode.Score]]  # a list of scores, in order of the items, for each repetition


def _failures_by_cause(sets: Sequence[Repeated]) -> dict[str, Counter[str]]:
    """The number of failed answers by kind and cause."""
    found: dict[str, Counter[str]] = {}
    for score in (score for results in sets for one in results for score in one if score.failed):
        count_cause(found.setdefault(score.failed, Counter()), score.text)
    return found


def figures(results: Repeated) -> dict[str, Any]:
    """`n` items with a pinned answer and their accuracy: the mean over items of the share of right answers, or None.

    With several repetitions also their number, and `solved`: the share of the items with a right answer.
    """
    found = counts(results)
    accuracy = sum(right / pinned for pinned, right in found) / len(found) if found else None
    several = {"samples": len(results), "solved": sum(c > 0 for _, c in found) / len(found) if found else None}
    return {"accuracy": accuracy, "n": len(found)} | (several if len(results) > 1 else {})


def marks(results: Repeated) -> str:
    """One character per answer, those of an item one after the other: 1 right, 0 wrong, - not pinned."""
    return "".join(
        "01"[answer.right] if answer.pinned else "-" for answers in zip(*results, strict=True) for answer in answers
    )


def mean_parts(results: Repeated) -> dict[str, float]:
    """The mean of every reward part over the pinned answers."""
    counted = [score.parts for one in results for score in one if score.pinned]
    names = sorted({name for found in counted for name in found})
    return {name: sum(found.get(name, 0.0) for found in counted) / len(counted) for name in names}
