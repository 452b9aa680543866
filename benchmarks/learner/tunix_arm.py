"""For .venv-tunix: google-tunix's GRPO train step, an arm of benchmarks/learner.

    python -m benchmarks.learner.tunix_arm FOLDER CASE tunix

Its own trainer and loss function, jitted as it does, its graph cached; one batch padded to its own longest answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.rl import algo_core, common, trainer
from tunix.rl.grpo import grpo_learner
from tunix.sft import peft_trainer

from benchmarks.engine.tunix_arm import model
from benchmarks.learner.work import BETAS, LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Arm, Batch, serve

_PAD, _END = 0, -1  # no prompt and no answer has the token 0; none ends early
_NAMES = {
    ("input_layernorm", "w"): "attn_norm", ("post_attention_layernorm", "w"): "mlp_norm",
    ("attn", "q_proj", "w"): "attn.q", ("attn", "k_proj", "w"): "attn.k", ("attn", "v_proj", "w"): "attn.v",
    ("attn", "o_proj", "w"): "attn.o", ("attn", "q_norm", "w"): "attn.q_norm", ("attn", "k_norm", "w"): "attn.k_norm",
    ("mlp", "gate_proj", "kernel"): "mlp.gate", ("mlp", "up_proj", "kernel"): "mlp.up",
    ("mlp", "down_proj", "kernel"): "mlp.down",
}  # fmt: skip


def ours(path: tuple[Any, ...]) -> str:
    """Our name of the peer's parameter."""
    if path[0] == "layers":
        return f"layers.{int(path[1]):02d}.{_NAMES[tuple(path[2:])]}"
    return {"embedder": "embed", "final_norm": "final_norm"}[path[0]]


def made(folder: Path, batch: Batch) -> Arm:
    """The peer's trainer with our weights."""
    qwen = model(folder)
    config = grpo_learner.GRPOConfig(
        num_generations=2, num_iterations=1, beta=0.0, epsilon=0.2, loss_agg_mode="sequence-mean-token-mean"
    )
    config.temperature = 1.0  # their learner sets it from the rollout config
    decays = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    updates = optax.chain(
        optax.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE, *BETAS, weight_decay=WEIGHT_DECAY, mask=decays)
    )

    def loss(model: nnx.Module, train_example: common.TrainExample, algo_config: Any) -> Any:
        return algo_core.grpo_loss_fn(model, train_example, algo_config, pad_id=_PAD, eos_id=_END)

    inputs = lambda example: {"train_example": example, "algo_config": config}  # noqa: E731
    training = peft_trainer.TrainingConfig(eval_every_n_steps=10**9, max_steps=10**9)
    theirs = trainer.Trainer(qwen, updates, training, dict)
    theirs.with_loss_fn(loss, has_aux=True).with_gen_model_input_fn(inputs)
    train_step, _ = theirs.jit_train_and_eval_step(cache_nnx_graph=True)

    def example() -> common.TrainExample:
        return common.TrainExample(
            prompt_ids=jnp.asarray(batch.prompts),
            prompt_mask=jnp.ones(batch.prompts.shape, bool),
            completion_ids=jnp.asarray(batch.answers),
            completion_mask=jnp.asarray(batch.mask, jnp.int32),
            advantages=jnp.asarray(batch.advantages),
            ref_per_token_logps=None,
            old_per_token_logps=None,
        )

    def gradients() -> dict[str, np.ndarray]:
        grads, _ = nnx.grad(loss, has_aux=True)(qwen, example(), config)
        return {ours(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(grads)}

    def step() -> float:
        value, _, norm = train_step(example())
        norm.block_until_ready()
        return float(value)

    return Arm(gradients, step)


if __name__ == "__main__":
    assert jax.default_backend() == "cpu"
    serve(made)
