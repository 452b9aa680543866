"""The folder from which both arms of benchmarks/grpo start: a model, its weights, and questions."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from benchmarks.engine.our_arm import SPEC
from benchmarks.grpo.work import END, FIRST, TURN, Work, batch, text
from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.models import hf_config, params

QUESTIONS = 4000
_OWN, _NEXT, _REST = 1.5, 3.0, 0.1  # scales of a token's own link, of the next link, and of random weights


def prepare(folder: Path, work: Work) -> None:
    """Write weights.npz (our names), the same as a checkpoint (Hugging Face's), questions.jsonl, and one batch."""
    weights = planted(work)
    np.savez(folder / "weights.npz", allow_pickle=False, **weights)
    save_file(params.exported(SPEC, weights), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config.to_huggingface(SPEC, "float32")))
    with (folder / "questions.jsonl").open("w") as file:
        for number in range(QUESTIONS):
            letters = np.arange(work.links) * work.choices + number % work.choices
            file.write(json.dumps({"question": text(work.question(number)), "answer": text(letters)}) + "\n")
    batch(work).save(folder / "batch.npz")


def planted(work: Work) -> dict[str, np.ndarray]:
    """Random weights, most of them scaled down, in which every link of the chain predicts the next one.

    A token's embedding marks its link on a separate axis; a hidden unit of the first layer reads that axis and writes
    the next link's. Within a link the letters remain about equally likely.
    """
    made = params.init(SPEC, jax.random.key(0), sharding.build(MeshConfig()), sharding.SAMPLER)
    weights = {name: np.array(leaf) for name, leaf in made.items()}
    for name in weights:
        if name.endswith(("attn.o", "mlp.down")):
            weights[name] *= _REST
    end, turn = work.links, work.links + 1  # axes: one per link, then the end's, then the turn's
    link = np.full(SPEC.vocab_size, -1)
    link[FIRST : FIRST + work.letters] = np.arange(work.letters) // work.choices
    link[END], link[TURN] = end, turn
    embed, axes = weights["embed"], work.links + 2
    embed[:, :axes] = 0
    known = np.flatnonzero(link >= 0)
    embed[known, link[known]] = _OWN
    gate, up, down = (weights[f"layers.00.mlp.{part}"] for part in ("gate", "up", "down"))
    size = (
        SPEC.width**0.5
    )  # length of a token's own axis after the norm, about: it has nearly all of the token's length
    gate[:, :axes], up[:, :axes], down[:axes] = 0, 0, 0
    for at in range(axes):
        gate[at, at] = up[at, at] = 1
        if at != end:
            down[at, 0 if at == turn else at + 1] = _NEXT * _OWN / size**2
    return weights
