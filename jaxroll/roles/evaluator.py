"""The evaluator role: held-out accuracy on pinned versions while training goes on.

It owns a small engine, so a version stays pinned for a whole evaluation and nobody's training tokens wait for it; its
permits are its own, the store's limiter never sees it. Every `evaluator.every` steps (and at the first and the last) it
takes the newest snapshot, answers all held-out items greedily, and reports one row. Threads: see
`jaxroll.roles.session`. It waits for snapshots only.
"""

from __future__ import annotations

import asyncio
import json

from jaxroll.clock import unix_s
from jaxroll.config import Config, RoleArgs
from jaxroll.data import tasks
from jaxroll.errors import InfraError, TransferError
from jaxroll.protocols import SamplingParams
from jaxroll.records import Version, VersionRef
from jaxroll.roles import session as sessions
from jaxroll.rollout import manager

SNAPSHOT_WAIT_S = 10.0
EXAMPLES = 8
TRIES, TRY_AGAIN_S = 50, 0.2
HELDOUT_FILE = "heldout.json"


def main(args: RoleArgs) -> int:
    """Evaluate until the last step's weights are scored."""
    return sessions.main(part(args.config), args)


def part(config: Config) -> sessions.RoleSpec:
    """What the evaluator plays."""
    return sessions.RoleSpec(
        "evaluator", lambda session: EvaluatorLoops(session).run(),
        mesh=config.evaluator.mesh, slots=config.evaluator.slots, flip="keep_kv",
    )  # fmt: skip


class EvaluatorLoops:
    """One evaluation after another."""

    def __init__(self, session: sessions.EngineSession) -> None:
        self.session, self.config = session, session.config
        self.tokenizer = session.parts.tokenizer
        eos = (self.tokenizer.eos_id,)
        self.manager = session.manager(SamplingParams(self.config.sampling.max_tokens, 0.0, 0, 1.0, eos))
        self.tasks = tasks.tasks(self.config)
        hashes = json.dumps([task.question_hash for task in self.tasks])
        (session.args.run_dir / HELDOUT_FILE).write_text(
            hashes, encoding="utf-8"
        )  # the report checks that none was trained on

    async def run(self) -> None:
        """Every due version, until the last."""
        held: Version | None = None
        due, last, failures = 0, self.config.schedule.steps, 0
        while held is None or held.step < last:
            snapshot = await self.session.store.published(held, SNAPSHOT_WAIT_S)
            if snapshot is None:
                continue
            step = snapshot.version.step
            if step >= due or step == last:
                if not await self._bring(snapshot):
                    failures += 1
                    if failures > TRIES:
                        raise InfraError(f"the weights of version {snapshot.version} could not be had")
                    await asyncio.sleep(TRY_AGAIN_S)
                    continue
                failures = 0
                await self.session.store.published(snapshot.version)  # the learner stays until we hold the last
                self.session.add_row(await self._row(snapshot.version))
                due = step - step % self.config.evaluator.every + self.config.evaluator.every
            held = snapshot.version

    async def _bring(self, snapshot: VersionRef) -> bool:
        try:
            await self.session.parts.follower.bring(snapshot)
        except TransferError as error:  # superseded while we were busy: the next one will do
            self.session.progress(f"weights {snapshot.version}: {error}")
            return False
        return True

    async def _row(self, version: Version) -> dict:
        t0 = unix_s()
        permits = 2 * self.config.evaluator.slots
        results = await manager.scores(self.manager, self.tasks, self.tokenizer, version, permits=permits)
        t1 = unix_s()
        examples = [
            {"prompt": score.task.messages[-1].content, "answer": manager.expected(score.task), "text": score.text,
             "ok": score.right}
            for score in results[:EXAMPLES]
        ]  # fmt: skip
        return {
            "t": t1, "role": self.session.role, "kind": "eval", "step": version.step, "lineage": version.lineage,
            "accuracy": manager.accuracy(results), "correct": manager.marks(results),
            "n": sum(score.pinned for score in results), "reward_parts": manager.parts(results),
            "t0": t0, "t1": t1, "seconds": t1 - t0, "examples": examples,
        }  # fmt: skip
