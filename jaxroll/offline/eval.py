"""`jaxroll eval RUN`: held-out accuracy of a run's newest weights, greedy."""

from __future__ import annotations

from jaxroll.config import RoleArgs
from jaxroll.data import heldout
from jaxroll.engine.host import EngineProxy
from jaxroll.envs import registry
from jaxroll.envs.scoring import ScoringPool
from jaxroll.offline import trained
from jaxroll.protocols import SamplingParams
from jaxroll.rollout import evaluation
from jaxroll.rollout.manager import RolloutManager


def main(args: RoleArgs) -> int:
    """Print the accuracy over all held-out items; 0."""
    config = args.config
    pool = ScoringPool(config.sampler.scoring_workers, modules=registry.scorer_modules(config.task.env))
    pool.start()
    try:
        slots = config.evaluator.slots
        model = trained.load(config, args.run_dir, slots=slots, max_tokens=config.sampling.max_tokens)
        sampling = SamplingParams(config.sampling.max_tokens, 0.0, 0, 1.0, (model.tokenizer.eos_id,))
        tasks = heldout.tasks(config)

        async def play(proxy: EngineProxy) -> None:
            manager = RolloutManager(
                proxy, lambda name: registry.create(name, pool, config.task), model.tokenizer, sampling
            )
            results = await evaluation.scores(manager, tasks, model.tokenizer, model.version, permits=2 * slots)
            share = evaluation.accuracy(results) or 0.0
            print(f"{model.source}: {100 * share:.1f} % of {len(results)} held-out items right")

        trained.ask(model, play)
    finally:
        pool.close()
    return 0
