"""For .venv-torch: write a small random Qwen3 with transformers, and what PyTorch makes of some tokens.

    python write_qwen3.py FOLDER tied|untied

FOLDER gets config.json, model.safetensors, and expected.npz: tokens int32 [B, T], logits float32 [B, T, V], and the
greedy continuation of each row, int32 [B, N].
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

ROWS, LENGTH, NEW_TOKENS, VOCAB = 3, 24, 12, 64


def model(tied: bool) -> transformers.Qwen3ForCausalLM:
    """Weights large enough that attention is not flat; norms away from 1, so that each of them matters."""
    torch.manual_seed(7)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied, rope_theta=10_000.0, rms_norm_eps=1e-6,
        max_position_embeddings=128, initializer_range=0.3, attn_implementation="eager", dtype="float32",
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    made = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn_like(parameter))
    return made


@torch.no_grad()
def main() -> None:
    """Write the folder."""
    folder, tied = Path(sys.argv[1]), sys.argv[2] == "tied"
    torch.set_num_threads(1)
    qwen = model(tied)
    qwen.save_pretrained(folder, safe_serialization=True)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = qwen(tokens).logits
    greedy = qwen.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW_TOKENS)
    continued = greedy[:, LENGTH:].numpy().astype(np.int32)
    arrays = {"tokens": tokens.numpy().astype(np.int32), "logits": logits.numpy(), "greedy": continued}
    np.savez(folder / "expected.npz", **arrays)
    size = sum(parameter.numel() for parameter in qwen.parameters())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**versions, "parameters": size, "logits_std": float(logits.std())}))


if __name__ == "__main__":
    main()
