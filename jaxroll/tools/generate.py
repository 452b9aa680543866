"""`jaxroll generate`, `eval` and `serve`: a run's newest weights in an engine of this process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import random
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxroll import lifeline
from jaxroll import sharding as layouts
from jaxroll.config import Config, RoleArgs
from jaxroll.config.derived import episode_tokens, longest_prompt, request_tokens
from jaxroll.config.parsing import opening_messages, samples_of
from jaxroll.data import sources
from jaxroll.data import tasks as heldout
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.envs import registry
from jaxroll.envs.executors import Executors
from jaxroll.errors import ConfigError, one_line
from jaxroll.learner import critic, lora, weights
from jaxroll.learner import state as states
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.lora import Lora
from jaxroll.models import families, folders, params
from jaxroll.models import params as pretrained
from jaxroll.protocols import GenerationKey, SamplingParams, Tokenizer
from jaxroll.records import Message, Task, Version
from jaxroll.report.summary import wilson
from jaxroll.rewards.parts import counts
from jaxroll.rollout import episode
from jaxroll.rollout.episode import RolloutManager, Score
from jaxroll.rpc import http, protocol
from jaxroll.run_paths import RunPaths
from jaxroll.serving import http_answers, http_requests, http_server, weight_updates
from jaxroll.serving.agents import Agents
from jaxroll.serving.engine_thread import EngineHost, EngineProxy
from jaxroll.text import tokenizers
from jaxroll.text.tokenizers import end_ids

OFFLINE_LIMIT_S = 3600.0


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its engine. `source` describes the weights; `version` is 0.0 without a checkpoint."""

    config: Config
    tokenizer: Tokenizer
    host: EngineHost
    version: Version
    source: str
    spec: families.ModelSpec
    where: Mapping[str, jax.sharding.Sharding]  # of the parameters

    @property
    def size_bytes(self) -> int:
        """The size of the parameters in float32."""
        return 4 * families.parameter_count(self.spec)

    def read(self, folder: Path) -> Mapping[str, np.ndarray]:
        """The parameters of this model in another folder, read on access; ConfigError if they are another model's."""
        return pretrained.weights(dataclasses.replace(self.config.model, path=str(folder)), self.spec)

    def use(self, version: Version, values: Mapping[str, np.ndarray]) -> Future[None]:
        """Give the engine other parameters, between two steps; done when it has them and may still finish requests."""
        return self.host.call(lambda: self.host.engine.swap(version, jax.device_put(dict(values), dict(self.where))))


def load(config: Config, run_dir: Path, *, slots: int, max_tokens: int, penalties: bool = False) -> LoadedModel:
    """Load the newest weights of the run in `run_dir` into an engine with `slots`; ConfigError if there are none."""
    text = tokenizers.build(config.tokenizer, sources.alphabet(config.task))
    spec = pretrained.spec(config.model, text.vocab_size)
    config = _without_lost_draft(config)
    with_draft, mesh = folders.with_draft(config.sampler, spec), layouts.build(config.learner.mesh)
    values, version, source = newest_params(config, spec, run_dir, layouts.Layout(mesh, layouts.LEARNER))
    where = params.shardings(spec, mesh, layouts.SAMPLER)
    placed = jax.device_put(values, where)
    engine_config = EngineConfig.of_requests(config, slots, longest_prompt(config) + max_tokens, penalties=penalties)
    draft = params.draft_model(config, with_draft, mesh, layouts.SAMPLER)
    engine = Engine(with_draft, mesh, layouts.SAMPLER, engine_config, decode=text.decode, draft=draft)
    # stdout is for the answers alone
    engine.warmup(placed, functools.partial(print, file=sys.stderr, flush=True))
    engine.swap(version, placed)
    return LoadedModel(config, text, EngineHost(engine), version, source, spec, where)


def _without_lost_draft(config: Config) -> Config:
    """`config` without a draft model whose folder is not there any more: no token depends on it."""
    if not (folder := config.sampler.draft_model) or Path(folder).is_dir():
        return config
    print(f"without the draft model: there is no folder {folder}", file=sys.stderr)
    return dataclasses.replace(config, sampler=dataclasses.replace(config.sampler, draft_model="", draft_tokens=0))


def newest_params(
    config: Config, spec: families.ModelSpec, run_dir: Path, layout: layouts.Layout
) -> tuple[states.Params, Version, str]:
    """The parameters of the newest checkpoint, the warm start or `model.path`, with their version and description.

    ConfigError when there are none.
    """
    checkpoints = Checkpoints(RunPaths(run_dir).checkpoints, config.learner.checkpoints_kept)
    latest = checkpoints.latest()
    if latest is not None:
        transform, adapters = states.build(config.learner).transform, Lora.of(config.learner)
        base = _initial_params(config, spec, run_dir, layout) if adapters else {}
        digest = lora.digest(base) if adapters else ""
        held = states.abstract(spec, layout, transform, adapters)
        held = dataclasses.replace(held, critic=critic.abstract(config.learner, spec, layout))
        state, _ = checkpoints.restore(latest, held, digest)
        values = lora.merged(spec, layout, adapters, base, state.params) if adapters else state.params
        return values, latest, f"checkpoint {latest}"
    folder = weights.initial_folder(config, run_dir)
    if folder is None:
        reason = "has neither checkpoints nor a warm start"
        raise ConfigError("RUN", str(run_dir), reason, "Train first: jaxroll train.")
    source = "the warm start" if folder == RunPaths(run_dir).warm_start else str(folder)
    values = _initial_params(config, spec, run_dir, layout)
    if (adapters := Lora.of(config.learner)) is not None and config.learner.lora_path:
        given = lora.starting(config.learner, spec, layout, adapters, jax.random.key(0))
        values, source = lora.merged(spec, layout, adapters, values, given), f"{source} with {config.learner.lora_path}"
    return values, Version(0, 0), source


def _initial_params(config: Config, spec: families.ModelSpec, run_dir: Path, layout: layouts.Layout) -> states.Params:
    """The parameters that the run starts from (see `weights.initial`), on the devices of `layout`."""
    values = weights.initial(config, run_dir, spec)
    if values is None:
        return params.init(spec, params.key(config), layout.mesh, layout.rules)
    return states.placed(values, spec, layout)


def ask(
    trained: LoadedModel, play: Callable[[EngineProxy], Awaitable[None]], limit_s: float | None = OFFLINE_LIMIT_S
) -> None:
    """Run `play` on an event loop in another thread while this thread runs the engine; raise the error of `play`.

    TimeoutError after `limit_s`, unless it is None.
    """
    failure: list[BaseException] = []

    def run_loop() -> None:
        try:
            asyncio.run(_played(trained, play, limit_s))
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            failure.append(error)
        finally:
            trained.host.stop()

    thread = threading.Thread(target=run_loop, name="asking", daemon=True)
    thread.start()
    trained.host.run()
    thread.join(timeout=10)
    if failure:
        raise failure[0]


async def _played(trained: LoadedModel, play: Callable[[EngineProxy], Awaitable[None]], limit_s: float | None) -> None:
    async with asyncio.timeout(limit_s):
        await play(EngineProxy(trained.host, asyncio.get_running_loop()))


# --- `jaxroll generate RUN PROMPT…`: answers of a run's newest weights


def generate(args: RoleArgs, options: argparse.Namespace) -> int:
    """Print one answer (or `--samples`) per prompt and return 0. `options` are those of the command line."""
    max_tokens = args.config.sampling.max_tokens if options.max_tokens is None else options.max_tokens
    model = load(
        args.config,
        args.run_dir,
        slots=options.slots,
        max_tokens=max_tokens,
        penalties=options.repetition_penalty != 1,
    )
    print(f"weights: {model.source}")
    params = SamplingParams(
        max_tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        end_ids(model.tokenizer),
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        stop_strings=tuple(options.stop),
        ignore_eos=options.ignore_eos,
        seed=options.seed,
    )

    async def play(proxy: EngineProxy) -> None:
        for number, prompt in enumerate(options.prompts):
            messages = (*opening_messages(args.config.task), Message("user", prompt))
            ids = np.asarray(model.tokenizer.render(messages, tools=args.config.task.tools), np.int32)
            for sample in range(options.samples):
                completion = await proxy.generate(ids, GenerationKey(number, sample), params)
                text = model.tokenizer.decode([t for t in completion.tokens.tolist() if t not in params.stop_tokens])
                print(f"{prompt} -> {text}" + ("" if completion.finish == "stop" else f"  [{completion.finish}]"))

    ask(model, play)
    return 0


# --- `jaxroll eval RUN`: accuracy of a run's newest weights on its held-out sets, with intervals and by source


def evaluate(args: RoleArgs, options: argparse.Namespace) -> int:
    """Print the figures of each held-out set and return 0. `options` are those of the command line."""
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
        temperature = config.evaluator.temperature if options.temperature is None else options.temperature
        max_tokens = episode_tokens(config) - config.task.max_prompt_tokens
        model = load(config, args.run_dir, slots=slots, max_tokens=max_tokens)
        sampling = episode.sampling_params(config, model.tokenizer, temperature)

        async def play(proxy: EngineProxy) -> None:
            executors = Executors(pool, config)
            agents = Agents(pool, config.task)
            player = agents.play if config.task.agent else episode.run
            manager = RolloutManager(
                proxy,
                executors.create,
                model.tokenizer,
                sampling,
                bounds=episode.bounds_of(config),
                own_bounds=episode.own_bounds(config),
                play=player,
            )
            first = 0
            try:
                for name, tasks in sets.items():
                    samples = await episode.scores(
                        manager,
                        tasks,
                        model.tokenizer,
                        model.version,
                        permits=2 * slots,
                        samples=samples_of(config, name, samples=options.samples, temperature=temperature),
                        first=first,
                    )
                    found[name] = figures(samples, options.k)
                    first += len(tasks)  # so that no two sets draw with the same keys
            finally:
                await executors.close()
                await agents.close()

        ask(model, play)
        return model.source, found
    finally:
        pool.close()


def chosen(sets: Mapping[str, tuple[Task, ...]], names: Sequence[str]) -> dict[str, tuple[Task, ...]]:
    """The sets with these names, or all that have items."""
    return {name: tasks for name, tasks in sets.items() if tasks and (not names or name in names)}


def figures(samples: Sequence[Sequence[Score]], ks: Sequence[int]) -> dict[str, Any]:
    """Figures of one set: items and answers that count, accuracy or mean@n and pass@k with intervals, by source.

    `samples` has one list of scores per repetition. With one repetition the accuracy has a Wilson interval.
    """
    found = counts(samples)
    figures: dict[str, Any] = {"items": len(samples[0]), "scored": len(found)}
    if not found:
        return figures
    if len(samples) == 1:
        share = mean([c for _, c in found])
        figures["accuracy"] = [share, *wilson(share, len(found))]
    else:
        figures |= {name: list(values) for name, values in table(found, ks).items()}
    places = range(len(samples[0]))
    by_source = episode.grouped(places, lambda place: str(samples[0][place].task.args().get("source", "")))
    sources = {name: counts([[one[place] for place in at] for one in samples]) for name, at in by_source.items()}
    if sources:
        figures["sources"] = {
            name: [mean([c / n for n, c in each]), len(each)] for name, each in sources.items() if each
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


# --- `jaxroll serve`: the newest weights of a run, or a model's folder, behind OpenAI's HTTP interface


def serve(args: RoleArgs, options: argparse.Namespace) -> int:
    """Serve until a stop signal and return 0. `options` are those of the command line."""
    paths = args.paths
    of_run = paths.run_file.exists()
    secret = protocol.load_secret(args.run_dir) if of_run else None
    token_file = (
        Path(options.token_file)
        if options.token_file
        else (paths.http_token if of_run else http.user_token_file(paths.http_token.name))
    )
    token = http.token(None if options.token_file else secret, token_file)
    with http.listen(options.host, options.port, insecure=options.insecure) as listening:
        return _serve(args, options, listening, token, token_file)


def _serve(args: RoleArgs, options: argparse.Namespace, listening: socket.socket, token: str, token_file: Path) -> int:
    config = args.config
    context = request_tokens(config) if options.context is None else options.context
    model = load(config, args.run_dir, slots=options.slots, max_tokens=context - longest_prompt(config))
    engine = model.host.engine
    url = http.address(options.host, listening)
    name = options.name or args.run_dir.name

    stop = Future[None]()
    lifeline.on_stop(lambda: stop.done() or stop.set_result(None))

    def version() -> Version:
        return engine.version or model.version

    async def play(proxy: EngineProxy) -> None:
        updates = weight_updates.WeightUpdates(model.read, model.use, version, 2 * model.size_bytes)
        room = http_requests.EngineLimits(context, model.tokenizer)
        served = http_answers.Served(
            name,
            proxy,
            room,
            version,
            engine.stats,
            engine.latencies.percentiles,
            options.slots + options.queue,
            options.slots,
            engine.weight_swap,
        )
        front = http_server.FrontEnd(served, token, weight_updates.routes(updates))
        serving = asyncio.ensure_future(http.serve(front.app, listening))
        print(f"weights: {model.source}")
        print(f"serves {name} on {url}/v1, token in {token_file}", flush=True)
        await asyncio.wait([serving, asyncio.wrap_future(stop)], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        updates.discard()

    ask(model, play, limit_s=None)
    return 0


# --- accuracy of evaluated tasks: pass@k, mean@n, intervals. Pure

RESAMPLES = 1000


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate 1 − C(n−c, k)/C(n, k) of the chance that one of k samples is right, given c right of n.

    Source: Chen et al. 2021, arXiv 2107.03374, 2.1. ValueError unless 1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {c} right among {n} samples is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean(values: Sequence[float]) -> float:
    """The mean; ValueError for no values."""
    if not values:
        raise ValueError("the mean of no values is not defined")
    return math.fsum(values) / len(values)


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean of `values`, by resampling items (Efron 1979); the same for equal seeds."""
    draw = random.Random(seed)
    means = sorted(mean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]


def table(found: Sequence[tuple[int, int]], ks: Sequence[int]) -> dict[str, tuple[float, float, float]]:
    """(estimate, low, high) of mean@n and of pass@k for each k, over items with (n, c); with 95 % bootstrap intervals.

    An item with fewer than k answers that count is left out of pass@k.
    """
    most = max(n for n, _ in found)
    rows: dict[str, list[float]] = {f"mean@{most}": [c / n for n, c in found]}
    rows |= {f"pass@{k}": [pass_at_k(n, c, k) for n, c in found if n >= k] for k in ks}
    return {name: (mean(values), *bootstrap(values)) for name, values in rows.items() if values}
