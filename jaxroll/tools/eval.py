"""`jaxroll eval RUN`: greedy accuracy of a run's newest weights on the held-out items."""

from __future__ import annotations

from jaxroll.config import RoleArgs
from jaxroll.config.derived import episode_tokens
from jaxroll.data import tasks as heldout
from jaxroll.envs import registry
from jaxroll.envs.executors.choice import Executors
from jaxroll.protocols import SamplingParams
from jaxroll.rollout import manager as evaluation
from jaxroll.rollout.episode import bounds_of
from jaxroll.rollout.manager import RolloutManager
from jaxroll.serving.engine_thread import EngineProxy
from jaxroll.tools import generate


def main(args: RoleArgs) -> int:
    """Print the accuracy over all held-out items; return 0."""
    config = args.config
    pool = registry.scoring_pool(config, args.run_dir)
    pool.start()
    try:
        slots = config.evaluator.slots
        max_tokens = episode_tokens(config) - config.task.max_prompt_tokens
        model = generate.load(config, args.run_dir, slots=slots, max_tokens=max_tokens)
        sampling = SamplingParams(config.sampling.max_tokens, 0.0, 0, 1.0, (model.tokenizer.eos_id,))
        tasks = heldout.tasks(config)

        async def play(proxy: EngineProxy) -> None:
            executors, bounds = Executors(pool, config), bounds_of(config)
            manager = RolloutManager(proxy, executors.create, model.tokenizer, sampling, bounds=bounds)
            try:
                results = await evaluation.scores(manager, tasks, model.tokenizer, model.version, permits=2 * slots)
            finally:
                await executors.close()
            share = evaluation.accuracy(results) or 0.0
            print(f"{model.source}: {100 * share:.1f} % of {len(results)} held-out items right")

        generate.ask(model, play)
    finally:
        pool.close()
    return 0
