"""`jaxroll generate RUN "prompt" …`: what a run's newest weights answer."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

from jaxroll.config import RoleArgs
from jaxroll.protocols import GenerationKey, SamplingParams
from jaxroll.records import Message

if TYPE_CHECKING:
    from jaxroll.serving.engine_thread import EngineProxy


def main(args: RoleArgs) -> int:
    """Print one answer (or `--samples`) per prompt; 0."""
    from jaxroll.tools import trained  # loads JAX, which `arguments` does without

    options = arguments(args)
    model = trained.load(
        args.config, args.run_dir, slots=options.slots, max_tokens=options.max_tokens,
        penalties=options.repetition_penalty != 1,
    )  # fmt: skip
    print(f"weights: {model.source}")
    params = SamplingParams(
        options.max_tokens, options.temperature, options.top_k, options.top_p, (model.tokenizer.eos_id,),
        min_p=options.min_p, repetition_penalty=options.repetition_penalty, stop_strings=tuple(options.stop),
        ignore_eos=options.ignore_eos, seed=options.seed,
    )  # fmt: skip

    async def play(proxy: EngineProxy) -> None:
        for number, prompt in enumerate(options.prompts):
            ids = np.asarray(model.tokenizer.render((Message("user", prompt),)), np.int32)
            for sample in range(options.samples):
                completion = await proxy.generate(ids, GenerationKey(number, sample), params)
                text = model.tokenizer.decode([t for t in completion.tokens.tolist() if t != model.tokenizer.eos_id])
                print(f"{prompt} -> {text}" + ("" if completion.finish == "stop" else f"  [{completion.finish}]"))

    trained.ask(model, play)
    return 0


def arguments(args: RoleArgs) -> argparse.Namespace:
    """The words after RUN; ends the program (2) where they are wrong."""
    parser = argparse.ArgumentParser(prog="jaxroll generate RUN", description=__doc__)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end the answer at this text")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens whatever is drawn")
    parser.add_argument("--seed", type=int, help="instead of the run's")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=args.config.sampling.max_tokens)
    parser.add_argument("--slots", type=int, default=8)
    return parser.parse_args(args.rest)
