"""For .venv-tunix: google-tunix's GRPO learner and its agentic one, the peer of benchmarks/grpo.

    python -m benchmarks.grpo.tunix_arm FOLDER WORK-AS-JSON OPTIONS-AS-JSON

The command `loss` computes one batch with the loss function of its trainer; `run N` trains N steps and ends. With
`apart` rollouts have their own device (and a copy of the weights); the agentic learner then runs `ahead` steps ahead,
with `at_once` concurrent episodes. Every call of the sampler has its own seed: with the peer's fixed seed all members
of an agentic group are equal.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.rl import common, rl_cluster
from tunix.rl.agentic import agentic_grpo_learner
from tunix.rl.agentic.environments import base_environment
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from benchmarks.engine.tunix_arm import model
from benchmarks.engine.work import answering
from benchmarks.grpo.work import (
    BETAS,
    BOS,
    END,
    FIRST,
    GROUP,
    GROUPS,
    LEARNING_RATE,
    MAX_NORM,
    PAD,
    TURN,
    VOCABULARY,
    Batch,
    Work,
)
from benchmarks.learner.tunix_arm import ours

SETTLING = 5  # steps that are not counted
_NEVER = VOCABULARY - 1  # no answer has this token
Role = rl_cluster.Role


class Numbers:
    """A tokenizer by tunix's protocol whose text is ids."""

    def encode(self, text: str, **_) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids, **_) -> str:
        return " ".join(str(int(each)) for each in ids)

    def pad_id(self) -> int:
        return PAD

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return END


class Chat:
    """Messages as text: the model's messages end with the end token, and each request includes the turn token."""

    def parse(self, messages, add_generation_prompt: bool = False, is_first_msg: bool = False) -> str:
        words = []
        for message in messages:
            if message["role"] != "system":
                words.append(str(np.asarray(message["content"]).reshape(-1)[0]))
                words += [str(END)] if message["role"] == "assistant" else []
        return " ".join(words)


def reward(work: Work, prompt: str, answer: str) -> float:
    """The reward of an answer to a prompt, both as text."""
    question = np.array(prompt.split()[1:-1], int) - FIRST
    return work.reward(question, np.array([int(word) - FIRST for word in answer.split() if int(word) >= FIRST], int))


class Links(base_environment.BaseTaskEnv):
    """An environment with the work's number of turns, each with its latency."""

    def __init__(self, single_example: dict[str, Any], work: Work, **kwargs: Any) -> None:
        super().__init__(task=single_example, max_steps=work.turns, **kwargs)
        self._work = work

    def _initial_observation(self) -> dict[str, Any]:
        return self.task

    def _step_impl(self, action: Any) -> base_environment.EnvStepResult:
        time.sleep(self._work.latency_s)
        answer = getattr(action, "action", action)
        paid = reward(self._work, str(np.asarray(self.task["prompts"]).reshape(-1)[0]), answer) / self._work.turns
        done = self.step_count >= self._work.turns
        return base_environment.EnvStepResult(f"{FIRST} {TURN}" if not done else {}, paid, done, {})


def cache_tokens(work: Work) -> int:
    """Cache tokens per row: a later turn's prompt is the whole conversation, padded to a power of two."""
    last = work.prompt_tokens + work.conversation_tokens - work.answer_tokens
    room = last if work.turns == 1 else 1 << (last - 1).bit_length()
    return max(work.prompt_tokens, room) + work.conversation_tokens


def meshes(apart: bool) -> tuple[Mesh, Mesh]:
    """(mesh of the actor, mesh of rollouts)."""
    devices = jax.devices()
    return tuple(Mesh(np.array([[devices[at]]]), ("fsdp", "tp")) for at in (0, int(apart)))


def cluster(folder: Path, work: Work, options: dict[str, Any], steps: int) -> rl_cluster.RLCluster:
    """The peer's actor and sampler with the folder's weights; prompts and cache as long as needed."""
    actor, rollout = meshes(options["apart"])
    with actor:
        qwen = model(folder)
    sizes = ("mini_batch_size", "train_micro_batch_size", "compute_logps_micro_batch_size")
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adam(LEARNING_RATE, *BETAS)),
        eval_every_n_steps=10**9,
        max_steps=steps,
        **(dict.fromkeys(sizes, GROUPS) if agentic(options) else {}),
    )
    sampling = base_rollout.RolloutConfig(
        max_tokens_to_generate=work.conversation_tokens,
        max_prompt_length=work.prompt_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        kv_cache_size=cache_tokens(work),
        return_logprobs=True,
        eos_tokens=[END] if agentic(options) else [_NEVER],
    )
    config = rl_cluster.ClusterConfig(
        role_to_mesh={Role.ACTOR: actor, Role.ROLLOUT: rollout, Role.REFERENCE: actor},
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=training,
        rollout_config=sampling,
    )
    return rl_cluster.RLCluster(actor=qwen, tokenizer=Numbers(), cluster_config=config)


def agentic(options: dict[str, Any]) -> bool:
    """True if it is the agentic learner."""
    return "at_once" in options


def learner(made: rl_cluster.RLCluster, work: Work, options: dict[str, Any]) -> Any:
    """The peer's learner over a cluster."""
    settings: dict[str, Any] = {
        "num_generations": GROUP,
        "num_iterations": 1,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_agg_mode": "token-mean",
    }
    if agentic(options):
        config = agentic_grpo_learner.GRPOConfig(
            max_response_length=work.conversation_tokens,
            max_concurrency=options["at_once"],
            off_policy_steps=options["ahead"],
            **settings,
        )
        return agentic_grpo_learner.GRPOLearner(
            rl_cluster=made, chat_parser=Chat(), algo_config=config, env_class=Links, env_kwargs={"work": work}
        )

    def judged(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        time.sleep(work.latency_s)
        return [reward(work, *pair) for pair in zip(prompts, completions, strict=True)]

    return grpo_learner.GRPOLearner(rl_cluster=made, reward_fns=judged, algo_config=grpo_learner.GRPOConfig(**settings))


class Arm:
    """The peer's learner with our weights."""

    def __init__(self, folder: Path, work: Work, options: dict[str, Any], steps: int) -> None:
        self.work, self.options, self.steps = work, options, steps
        self.ends: list[float] = []
        self.advantages: list[float] = []
        self.tokens: list[int] = []
        self.cluster = cluster(folder, work, options, steps)
        self.learner = learner(self.cluster, work, options)
        self._watch()

    def _watch(self) -> None:
        """Give every call of the sampler its own seed, and note the ends of steps and their examples."""
        generate, update, seeds = self.cluster.rollout.generate, self.cluster.update_actor, itertools.count(1)

        def seeded(prompts: Any, config: Any, **kwargs: Any) -> Any:
            return generate(prompts, dataclasses.replace(config, seed=next(seeds)), **kwargs)

        def updated(examples: Any, *args: Any, **kwargs: Any) -> Any:
            result = update(examples, *args, **kwargs)
            self.ends.append(time.time())
            examples = examples if isinstance(examples, list) else [examples]
            self.tokens.append(sum(int(np.asarray(each.completion_mask).sum()) for each in examples))
            self.advantages.append(float(np.mean([np.abs(np.asarray(each.advantages)).mean() for each in examples])))
            return result

        self.cluster.rollout.generate, self.cluster.update_actor = seeded, updated

    def loss(self, folder: Path) -> dict[str, float]:
        """The loss of the folder's batch, computed by the race's trainer; the gradients go to peer.npz."""
        batch, trainer = Batch.load(folder / "batch.npz"), self.cluster.actor_trainer
        given = jnp.asarray(np.load(folder / "behaviour.npy")) if agentic(self.options) else None
        example = common.TrainExample(
            prompt_ids=jnp.asarray(batch.prompts),
            prompt_mask=jnp.ones(batch.prompts.shape, bool),
            completion_ids=jnp.asarray(batch.said),
            completion_mask=jnp.asarray(batch.mask, jnp.int32),
            advantages=jnp.asarray(batch.advantages),
            ref_per_token_logps=None,
            old_per_token_logps=given,
        )
        both = nnx.value_and_grad(trainer.loss_fn, has_aux=True)
        (value, _), grads = both(trainer.model, **trainer.gen_model_input_fn(example))
        found = {ours(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(grads)}
        np.savez(folder / "peer.npz", allow_pickle=False, **found)
        return {"loss": float(value)}

    def run(self) -> dict[str, float]:
        """Train; only the steps after the first few count."""
        count = GROUPS * (self.steps + self.options.get("ahead", 0) + 2)
        texts = [" ".join(map(str, self.work.prompt(number))) for number in range(count)]
        source = grain.MapDataset.source(texts).batch(GROUPS).map(lambda rows: {"prompts": rows})
        began = time.time()
        self.learner.train(source)
        settling = min(SETTLING, len(self.ends) // 2)
        counted, seconds = len(self.ends) - settling, self.ends[-1] - self.ends[settling - 1]
        return {
            "samples_per_s": GROUPS * GROUP * counted / seconds,
            "steps": counted,
            "seconds": seconds,
            "tokens_a_sample": float(np.mean(self.tokens)) / (GROUPS * GROUP),
            "advantage": float(np.mean(self.advantages)),
            "whole_s": time.time() - began,
        }


def main() -> None:
    """Answer."""
    say = answering()
    folder, work = Path(sys.argv[1]), Work(**json.loads(sys.argv[2]))
    options = json.loads(sys.argv[3])
    say({"ready": True})
    for line in sys.stdin:
        what, _, steps = line.strip().partition(" ")
        arm = Arm(folder, work, options, int(steps or 1))
        say(arm.loss(folder) if what == "loss" else arm.run())
        if what == "run":
            os._exit(0)  # the peer's learner leaves threads running


if __name__ == "__main__":
    assert jax.default_backend() == "cpu"
    main()
