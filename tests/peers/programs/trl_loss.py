"""For .venv-trl: the losses of TRL's GRPOTrainer on given trajectories, with gradients.

python trl_loss.py MODEL BATCH.npz CASES.json OUT.npz

BATCH has left-padded prompts, right-padded completions, their masks and advantages, and for `old`, `behaviour` and
`reference` the differences of log-probs to those of the model. A case is a dict of `GRPOConfig` fields; `_cap` bounds
importance weights π_old/π_b as TRL's mode token_truncate does. `GRPOTrainer._compute_loss` runs unmodified. OUT has for
each case the log-probs, the loss, its gradient by the log-probs, and that by the embedding. The last line on stdout
names TRL's version.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset


def trainer_of(folder: str, case: dict, scratch: str) -> trl.GRPOTrainer:
    """A trainer of the model in `folder`, whose optimizer steps have one micro-batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    beta = case.pop("beta", 0.0)
    config = trl.GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_generations=4,
        disable_dropout=True,
        **case,
    )
    made = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    made.beta, made.current_gradient_accumulation_steps = beta, 1
    made.model.train()
    return made


def loss_of(trainer: trl.GRPOTrainer, batch: dict[str, np.ndarray], cap: float | None) -> dict[str, np.ndarray]:
    """The loss of `batch` and its gradients."""
    inputs = {name: torch.tensor(batch[name]) for name in batch if name.startswith(("prompt_", "completion_"))}
    inputs |= {"advantages": torch.tensor(batch["advantages"]), "tool_mask": torch.tensor(batch["tool_mask"])}
    inputs["num_items_in_batch"] = (inputs["completion_mask"] * inputs["tool_mask"]).sum()
    seen, forward = [], trainer._get_per_token_logps_and_entropies

    def recorded(*arguments, **named):
        found = forward(*arguments, **named)
        logps = found[0]
        logps.retain_grad()
        seen.append(logps)
        fixed = {name: logps.detach() + torch.tensor(batch[name]) for name in ("old", "behaviour", "reference")}
        inputs["old_per_token_logps"], inputs["ref_per_token_logps"] = fixed["old"], fixed["reference"]
        ratio = torch.exp(fixed["old"] - fixed["behaviour"])
        inputs["importance_sampling_ratio"] = ratio if cap is None else torch.clamp(ratio, max=cap)
        return found

    trainer._get_per_token_logps_and_entropies = recorded
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = cap is not None
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    embedding = trainer.model.get_input_embeddings().weight
    assert seen[0].grad is not None and embedding.grad is not None
    found = {"logps": seen[0].detach(), "loss": loss.detach(), "grad": seen[0].grad, "embedding": embedding.grad}
    return {name: value.numpy() for name, value in found.items()}


def main() -> None:
    folder, batch, cases, out = sys.argv[1:]
    torch.set_num_threads(1)
    given, found = dict(np.load(batch)), {}
    for name, case in json.loads(Path(cases).read_text()).items():
        cap = case.pop("_cap", None)
        with tempfile.TemporaryDirectory() as scratch:
            results = loss_of(trainer_of(folder, case, scratch), given, cap)
        found |= {f"{name}/{key}": value for key, value in results.items()}
    np.savez(out, **found)
    print(json.dumps({"trl": trl.__version__, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
