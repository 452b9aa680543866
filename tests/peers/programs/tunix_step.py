"""For .venv-tunix: GRPO steps of google-tunix on a random Qwen3 of some 60,000 parameters, colocated, on the CPU.

    python tunix_step.py STEPS

The last line has the mean reward of each step and whether the parameters changed.
"""

import json
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import grain.python as grain
import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

VOCAB, PROMPT, NEW_TOKENS, PROMPTS, GROUP = 64, 8, 8, 4, 4
REWARDED = range(16, 32)


class NumberWords:
    """A tokenizer by tunix's protocol in which token 7 is the word n7."""

    def encode(self, text: str, **_) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids, **_) -> str:
        return " ".join(f"n{int(i)}" for i in ids)

    def pad_id(self) -> int:
        return 0

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2


class Prompts(grain.RandomAccessDataSource):
    """Prompts of random words; item i is a function of i."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> str:
        return NumberWords().decode(np.random.default_rng(index).integers(16, VOCAB, PROMPT - 1))


def main() -> None:
    """Train STEPS steps and print the rewards."""
    steps, rewards = int(sys.argv[1]), []
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=VOCAB,
        embed_dim=32,
        hidden_dim=64,
        num_heads=2,
        head_dim=16,
        num_kv_heads=1,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    with mesh:
        actor = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    before = jax.tree.map(np.array, nnx.state(actor, nnx.Param))

    def reward(prompts, completions, **_) -> list[float]:
        hits = [np.mean([i in REWARDED for i in NumberWords().encode(text)] or [0.0]) for text in completions]
        rewards.append(float(np.mean(hits)))
        return [float(hit) for hit in hits]

    cluster = rl_cluster.RLCluster(actor=actor, tokenizer=NumberWords(), cluster_config=cluster_config(mesh, steps))
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=reward,
        algo_config=grpo_learner.GRPOConfig(num_generations=GROUP, num_iterations=1, beta=0.0, epsilon=0.2),
    )
    batches = grain.MapDataset.source(Prompts(PROMPTS * steps)).batch(PROMPTS)
    learner.train(batches.map(lambda texts: {"prompts": texts}))
    trained = nnx.state(cluster.actor_trainer.model, nnx.Param)
    moved = jax.tree.map(lambda old, new: float(np.abs(old - np.asarray(new)).max()), before, trained)
    print(json.dumps({"rewards": rewards, "moved": max(jax.tree.leaves(moved)), "jax": jax.__version__}))


def cluster_config(mesh: jax.sharding.Mesh, steps: int) -> rl_cluster.ClusterConfig:
    """Settings with all roles on one mesh and tunix's own ("vanilla") sampler."""
    training = rl_cluster.RLTrainingConfig(actor_optimizer=optax.adam(1e-3), eval_every_n_steps=10**9, max_steps=steps)
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=NEW_TOKENS,
        max_prompt_length=PROMPT,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        kv_cache_size=PROMPT + NEW_TOKENS,
        return_logprobs=True,
    )
    roles = dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT, rl_cluster.Role.REFERENCE), mesh)
    return rl_cluster.ClusterConfig(
        role_to_mesh=roles,
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=training,
        rollout_config=rollout,
    )


if __name__ == "__main__":
    main()
