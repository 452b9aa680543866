"""`jaxroll eval RUN`: accuracy of a run's newest weights on its held-out sets, with intervals and by source."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxroll.config import Config, RoleArgs
from jaxroll.config.derived import episode_tokens
from jaxroll.data import tasks as heldout
from jaxroll.envs import registry
from jaxroll.envs.executors import Executors
from jaxroll.errors import ConfigError, one_line
from jaxroll.records import Task
from jaxroll.report.summary import wilson
from jaxroll.rollout import episode
from jaxroll.rollout import manager as rollouts
from jaxroll.rollout.manager import RolloutManager, Score
from jaxroll.serving.agents import Agents
from jaxroll.serving.engine_thread import EngineProxy
from jaxroll.tools import generate


def main(args: RoleArgs, options: argparse.Namespace) -> int:
    """Print the figures of each held-out set and return 0. `options` are those of the command line."""
    check_options(args.config, options)
    with contextlib.redirect_stdout(sys.stderr):  # environments may print, and stdout may be read as JSON
        source, found = evaluated(args, options)
    if options.json:
        print(json.dumps({"weights": source, "sets": found}))
    else:
        print(f"weights: {source}", *(line for name in found for line in lines(name, found[name])), sep="\n")
    return 0


def evaluated(args: RoleArgs, options: argparse.Namespace) -> tuple[str, dict[str, dict[str, Any]]]:
    """The description of the weights, and the figures of each held-out set by name."""
    config, found = args.config, {}
    sets = chosen(heldout.evaluated(config), options.set)
    pool = registry.scoring_pool(config, args.run_dir)
    pool.start()
    try:
        slots = config.evaluator.slots
        max_tokens = episode_tokens(config) - config.task.max_prompt_tokens
        model = generate.load(config, args.run_dir, slots=slots, max_tokens=max_tokens)
        sampling = episode.sampling_params(config, model.tokenizer, options.temperature)

        async def play(proxy: EngineProxy) -> None:
            executors, bounds = Executors(pool, config), episode.bounds_of(config)
            agents = Agents(pool, config.task)
            player = agents.play if config.task.agent else episode.run
            manager = RolloutManager(proxy, executors.create, model.tokenizer, sampling, bounds=bounds, play=player)
            first = 0
            try:
                for name, tasks in sets.items():
                    samples = [
                        await rollouts.scores(
                            manager,
                            tasks,
                            model.tokenizer,
                            model.version,
                            permits=2 * slots,
                            sample=sample,
                            first=first,
                        )
                        for sample in range(options.samples)
                    ]
                    found[name] = figures(samples, options.k)
                    first += len(tasks)  # so that no two sets draw with the same keys
            finally:
                await executors.close()
                await agents.close()

        generate.ask(model, play)
        return model.source, found
    finally:
        pool.close()


def check_options(config: Config, options: argparse.Namespace) -> None:
    """Raise ConfigError for options that contradict each other, and for sets that the config does not have."""
    known = (heldout.HELDOUT, *config.evaluator.sets)
    for name in options.set:
        if name not in known:
            raise ConfigError("--set", name, "there is no such held-out set", f"Use {', '.join(known)}.")
    if options.samples < 1:
        raise ConfigError("--samples", options.samples, "each item needs an answer", "Give 1 or more.")
    for k in options.k:
        if not 1 <= k <= options.samples:
            raise ConfigError("--k", k, f"pass@{k} needs as many samples", f"Add --samples={max(k, 1)} or more.")
    if options.samples > 1 and options.temperature <= 0:
        raise ConfigError(
            "--temperature",
            options.temperature,
            "several greedy answers are all the same",
            "Set it above 0, for example to 1.",
        )


def chosen(sets: Mapping[str, tuple[Task, ...]], names: Sequence[str]) -> dict[str, tuple[Task, ...]]:
    """The sets with these names, or all that have items."""
    return {name: tasks for name, tasks in sets.items() if tasks and (not names or name in names)}


def figures(samples: Sequence[Sequence[Score]], ks: Sequence[int]) -> dict[str, Any]:
    """Figures of one set: items and answers that count, accuracy or mean@n and pass@k with intervals, by source.

    `samples` has one list of scores per repetition. With one repetition the accuracy has a Wilson interval.
    """
    found = rollouts.counts(samples)
    figures: dict[str, Any] = {"items": len(samples[0]), "scored": len(found)}
    if not found:
        return figures
    if len(samples) == 1:
        share = rollouts.mean([c for _, c in found])
        figures["accuracy"] = [share, *wilson(share, len(found))]
    else:
        figures |= {name: list(values) for name, values in rollouts.table(found, ks).items()}
    places = range(len(samples[0]))
    by_source = rollouts.grouped(places, lambda place: str(samples[0][place].task.args().get("source", "")))
    sources = {
        name: rollouts.counts([[one[place] for place in at] for one in samples]) for name, at in by_source.items()
    }
    if sources:
        figures["sources"] = {
            name: [rollouts.mean([c / n for n, c in each]), len(each)] for name, each in sources.items() if each
        }
    return figures


def lines(name: str, found: Mapping[str, Any]) -> list[str]:
    """The figures of one set as text, one line per figure."""
    shown = [
        f"{name}: {key} {100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f}) of {found['scored']} items"
        for key, (share, low, high) in ((key, value) for key, value in found.items() if isinstance(value, list))
    ]
    shown += [
        f"{name}, {one_line(source, 60)}: {100 * share:.1f} % of {count} items"
        for source, (share, count) in found.get("sources", {}).items()
    ]
    return shown or [f"{name}: no item could be scored"]
