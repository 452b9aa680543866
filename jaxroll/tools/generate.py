"""`jaxroll generate`: answers of a run's newest weights, by an engine in this process."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxroll import sharding as layouts
from jaxroll.config import Config, RoleArgs
from jaxroll.config.derived import longest_prompt
from jaxroll.config.section_rules import opening_messages
from jaxroll.data import sources
from jaxroll.engine.engine import Engine, EngineConfig
from jaxroll.errors import ConfigError
from jaxroll.learner import critic, lora, weights
from jaxroll.learner import state as states
from jaxroll.learner.checkpoint import Checkpoints
from jaxroll.learner.lora import Lora
from jaxroll.models import families, params
from jaxroll.models import params as pretrained
from jaxroll.protocols import GenerationKey, SamplingParams, Tokenizer
from jaxroll.records import Message, Version
from jaxroll.run_paths import RunPaths
from jaxroll.serving.engine_thread import EngineHost, EngineProxy
from jaxroll.text import tokenizers

OFFLINE_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Trained:
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


def load(config: Config, run_dir: Path, *, slots: int, max_tokens: int, penalties: bool = False) -> Trained:
    """Load the newest weights of the run in `run_dir` into an engine with `slots`; ConfigError if there are none."""
    text = tokenizers.build(config.tokenizer, sources.alphabet(config.task))
    spec = pretrained.spec(config.model, text.vocab_size)
    mesh = layouts.build(config.learner.mesh)
    values, version, source = newest_params(config, spec, run_dir, layouts.Layout(mesh, layouts.LEARNER))
    where = params.shardings(spec, mesh, layouts.SAMPLER)
    placed = jax.device_put(values, where)
    engine_config = EngineConfig.of_requests(config, slots, longest_prompt(config) + max_tokens, penalties=penalties)
    engine = Engine(spec, mesh, layouts.SAMPLER, engine_config, decode=text.decode)
    # stdout is for the answers alone
    engine.warmup(placed, functools.partial(print, file=sys.stderr, flush=True))
    engine.swap(version, placed)
    return Trained(config, text, EngineHost(engine), version, source, spec, where)


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
    trained: Trained, play: Callable[[EngineProxy], Awaitable[None]], limit_s: float | None = OFFLINE_LIMIT_S
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


async def _played(trained: Trained, play: Callable[[EngineProxy], Awaitable[None]], limit_s: float | None) -> None:
    async with asyncio.timeout(limit_s):
        await play(EngineProxy(trained.host, asyncio.get_running_loop()))


# --- `jaxroll generate RUN PROMPT…`: answers of a run's newest weights


def main(args: RoleArgs, options: argparse.Namespace) -> int:
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
        (model.tokenizer.eos_id,),
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
                text = model.tokenizer.decode([t for t in completion.tokens.tolist() if t != model.tokenizer.eos_id])
                print(f"{prompt} -> {text}" + ("" if completion.finish == "stop" else f"  [{completion.finish}]"))

    ask(model, play)
    return 0
