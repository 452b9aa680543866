"""For .venv-torch: write a small Gemma 3 of text and images with random weights, and its logits for text.

python write_images.py FOLDER
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

TEXT = {
    "vocab_size": 72, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 64,
}  # fmt: skip
IMAGES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}


def main() -> None:
    """Write the checkpoint and expected.npz; the last line has the names of some tensors."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = transformers.Gemma3Config(
        text_config=TEXT,
        vision_config=IMAGES,
        mm_tokens_per_image=4,
        image_token_index=70,
        boi_token_index=69,
        eoi_token_index=68,
        attn_implementation="eager",
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    tokens = torch.randint(3, 68, (2, 16))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2 if "norm" in name else 1.0 / parameter.shape[-1] ** 0.5)
        logits = model(tokens, token_type_ids=torch.zeros_like(tokens)).logits
    model.save_pretrained(folder)
    np.savez(folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())
    print(json.dumps(sorted(name for name, _ in model.named_parameters())[:3]))


if __name__ == "__main__":
    main()
