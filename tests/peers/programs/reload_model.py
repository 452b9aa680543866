"""For .venv-torch: load a checkpoint with transformers and save it again.

python reload_model.py FOLDER OUT
"""

import json
import sys
from pathlib import Path

import torch
import transformers


def main() -> None:
    """Write OUT in files of a few kB; the last line has the loaded dtype and the number of files."""
    folder, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    model.save_pretrained(out, max_shard_size="9KB")
    print(
        json.dumps(
            {
                "dtype": str(model.dtype),
                "missing": sorted(loading["missing_keys"]),
                "kind": type(model).__name__,
                "unexpected": sorted(loading["unexpected_keys"]),
                "tied": model.config.tie_word_embeddings,
                "files": len(list(out.glob("*.safetensors"))),
            }
        )
    )


if __name__ == "__main__":
    main()
