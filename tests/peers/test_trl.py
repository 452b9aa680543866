"""Losses and gradients against TRL's GRPOTrainer, on the same model and trajectories.

The differences in definition are listed in docs/algorithms.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll import sharding
from jaxroll.algorithms import registry
from jaxroll.config import ModelConfig
from jaxroll.config.derived import settled
from jaxroll.learner import minibatch, packing, step
from jaxroll.learner.minibatch import Sample
from jaxroll.learner.step import PROXIMAL, REFERENCE, Recipe
from jaxroll.learner.trainer import TrainingPrograms
from jaxroll.models import params as model_params
from jaxroll.sharding import Layout

pytestmark = [pytest.mark.soak, pytest.mark.process, pytest.mark.timeout(300)]
MODEL = Path(__file__).parents[1] / "golden" / "qwen3" / "tied"
N, PROMPT, ANSWER, VOCAB = 4, 6, 12, 280
TOKEN, SEQUENCE = {"epsilon": 0.2, "epsilon_high": 0.28}, {"epsilon": 3e-2, "epsilon_high": 4e-2}
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "correction": "decoupled", "correction_cap": 1e6}

# name: (our keys of `learner`, TRL's keys of GRPOConfig)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"aggregation": "seq_mean_token_mean"}, {"loss_type": "grpo"}),
    "bnpo": ({"aggregation": "token_mean"}, {"loss_type": "bnpo"}),
    "dapo": ({"algorithm": "dapo", "aggregation": "token_mean"}, {"loss_type": "dapo"}),
    "dr_grpo": ({"algorithm": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "dual clip": ({"aggregation": "token_mean", "dual_clip": 1.4}, {"loss_type": "bnpo", "delta": 1.4}),
    "gspo": (
        {"algorithm": "gspo", "clip_low": 3e-2, "clip_high": 4e-2},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **SEQUENCE},
    ),
    "corrected": (
        {"aggregation": "token_mean", "correction_cap": 1.1},
        {"loss_type": "bnpo", "_cap": 1.1},
    ),
    "cispo": (
        {"algorithm": "cispo", "clip_low": 1.0, "clip_high": 0.1, "correction": "auto", "correction_cap": 0.0},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "kl k3": (
        {"aggregation": "token_mean", "kl_coef": 0.3, "kl_estimator": "k3", "reference": "init"},
        {"loss_type": "bnpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "kl k2": (
        {"aggregation": "token_mean", "kl_coef": 0.3, "kl_estimator": "k2", "reference": "init"},
        {"loss_type": "bnpo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
}
STALE, FRESH = ("corrected",), ("kl k3", "kl k2")  # the others: π_b is π_prox, but not π_θ


def trajectories(case: str) -> dict[str, np.ndarray]:
    """Four answers of unequal lengths, with text of an environment inside, good and bad, clipped and not."""
    chance = np.random.default_rng(7)
    lengths, prompts = np.array([12, 5, 9, 7]), np.array([6, 3, 4, 6])
    completion = (np.arange(ANSWER) < lengths[:, None]).astype(np.int64)
    tools = np.ones((N, ANSWER), np.int64)
    tools[0, 4:7] = tools[2, 2:4] = 0
    drift = chance.normal(scale=0.25, size=(3, N, ANSWER)).astype(np.float32)
    if case in FRESH:
        drift[:2] = 0
    elif case not in STALE:
        drift[1] = drift[0]
    return {
        "prompt_ids": chance.integers(4, VOCAB, (N, PROMPT)),
        "completion_ids": chance.integers(4, VOCAB, (N, ANSWER)),
        "prompt_mask": (np.arange(PROMPT) >= PROMPT - prompts[:, None]).astype(np.int64),
        "completion_mask": completion,
        "tool_mask": tools,
        "advantages": np.array([1.3, -0.7, -1.1, 0.4], np.float32),
        "old": drift[0],
        "behaviour": drift[1],
        "reference": drift[2],
    }


def ours(case: str, given: dict[str, np.ndarray], logps: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss, its gradient by the log-probs [N, ANSWER], and by the embedding, by the learner's own functions."""
    config = configs.parse(
        {
            "model": {"path": str(MODEL)},
            "tokenizer": {"kind": "hf", "path": str(MODEL)},
            "schedule": {"alpha": 1.0, "group_size": N},
            "sampling": {"max_tokens": ANSWER},
            "learner": CLIP | CASES[case][0] | {"row_tokens": 32, "micro_batch_rows": 4},
        }
    )
    spec = model_params.spec(ModelConfig(path=str(MODEL)), vocab_size=VOCAB)
    made = Recipe.of(config, spec, Layout(sharding.build(config.learner.mesh), sharding.LEARNER))
    samples, streams = [], {name: [] for name in (PROXIMAL, REFERENCE)}
    for row in range(N):
        shown, drawn = given["prompt_mask"][row] > 0, given["completion_mask"][row] > 0
        prompt, answer = given["prompt_ids"][row][shown], given["completion_ids"][row][drawn]
        mask = np.concatenate([np.zeros(len(prompt), bool), given["tool_mask"][row][drawn] > 0])
        along = lambda values: np.concatenate([np.zeros(len(prompt)), values[drawn]]).astype(np.float32)  # noqa: B023, E731
        samples.append(
            Sample(
                np.concatenate([prompt, answer]).astype(np.int32),
                mask,
                np.where(mask, along(logps[row] + given["behaviour"][row]), np.float32(0)),
                np.zeros(len(mask), np.int32),
                int(mask.sum()),
                True,
                0.0,
                advantage=float(given["advantages"][row]),
            )
        )
        streams[PROXIMAL].append(along(logps[row] + given["old"][row]))
        streams[REFERENCE].append(along(logps[row] + given["reference"][row]))
    algorithm = registry.build(config.learner)
    weighted = minibatch.weighted(samples, settled(config.learner).aggregation, algorithm, ANSWER)
    (batch,) = packing.pack(weighted, 32, (4,))
    placed = {name: jax.numpy.asarray(array) for name, array in batch.streams.items()}
    placed |= {name: jax.numpy.asarray(packing.spread(batch, values)) for name, values in streams.items()}
    params = {name: jax.numpy.asarray(value) for name, value in model_params.weights(config.model, spec).items()}
    grads, seen = step.gradients(made, params, placed)
    ours_logps = TrainingPrograms(made)._logprobs(params, placed)

    def of_logprobs(logprobs: jax.Array) -> jax.Array:
        tokens = step.Tokens(
            logprobs,
            placed[PROXIMAL],
            placed["behaviour"],
            placed[REFERENCE],
            *(placed[name] for name in ("advantage", "mask", "segment_ids", "ages")),
        )
        return jax.numpy.sum(jax.numpy.where(placed["mask"], placed["weight"] * made.token_loss(tokens).loss, 0.0))

    by_sample = packing.gathered([batch], [np.asarray(jax.grad(of_logprobs)(ours_logps))], N)
    by_logps = np.zeros((N, ANSWER), np.float32)
    for row, values in enumerate(by_sample):
        answer = int(given["completion_mask"][row].sum())
        by_logps[row, :answer] = values[-answer:]
    return float(np.sum(seen["loss"])), by_logps, np.asarray(grads["embed"])


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that returns TRL's results by case; all cases with the same trajectories run in one process."""
    folder, known = tmp_path_factory.mktemp("trl"), {}

    def results(peer: Any, case: str) -> dict[str, np.ndarray]:
        if case not in known:
            kind = next((of for of in (STALE, FRESH) if case in of), None)
            alike = kind or [name for name in CASES if name not in STALE + FRESH]
            batch, cases, out = (folder / f"{case}.{suffix}" for suffix in ("batch.npz", "json", "out.npz"))
            np.savez(batch, **trajectories(case))
            chosen = {name: TOKEN | {"max_completion_length": ANSWER} | CASES[name][1] for name in alike}
            cases.write_text(json.dumps(chosen | {n: c | {"temperature": 1.0} for n, c in chosen.items()}))
            said = peer("trl", "trl_loss.py", str(MODEL), str(batch), str(cases), str(out))
            assert said["trl"] == "1.16.0", "not the pinned version"
            found = np.load(out)
            for name in alike:
                known[name] = {key: found[f"{name}/{key}"] for key in ("logps", "loss", "grad", "embedding")}
        return known[case]

    return results


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_trl(case: str, peer, theirs) -> None:
    want = theirs(peer, case)
    given = trajectories(case)
    loss, by_logps, by_embedding = ours(case, given, want["logps"])
    if case != "kl k2":  # its value is another estimator's
        assert loss == pytest.approx(float(want["loss"]), rel=1e-5, abs=1e-6)
    trained = (given["completion_mask"] * given["tool_mask"]) > 0
    np.testing.assert_allclose(by_logps, np.where(trained, want["grad"], 0.0), rtol=0, atol=1e-6)
    scale = float(np.abs(want["embedding"]).max())
    np.testing.assert_allclose(by_embedding, want["embedding"][: len(by_embedding)], rtol=0, atol=1e-5 * scale)
    assert np.abs(want["grad"][trained]).max() > 1e-2
