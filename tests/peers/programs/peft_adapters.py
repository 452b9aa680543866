"""For .venv-trl: adapters of PEFT on a model of transformers, and the logits with them.

    python peft_adapters.py write FOLDER ADAPTERS [MODULE ...]
    python peft_adapters.py read FOLDER ADAPTERS

FOLDER is the base model. `write` makes random adapters for these modules and saves them into ADAPTERS, `read` loads
them from there. Both read ADAPTERS.tokens.npy, int [B, T], and write ADAPTERS.logits.npy, float32 [B, T, V].
"""

import json
import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

RANK, ALPHA = 3, 6


def main() -> None:
    """The last line has PEFT's version and the number of adapted weights."""
    verb, base, adapters, *modules = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    if verb == "write":
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules, task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:  # B begins at 0
                    parameter.copy_(0.3 * torch.randn_like(parameter))
        adapted.save_pretrained(adapters)
    else:
        adapted = peft.PeftModel.from_pretrained(model, adapters)
    with torch.no_grad():
        logits = adapted.eval()(torch.from_numpy(np.load(f"{adapters}.tokens.npy")).long()).logits
    np.save(Path(f"{adapters}.logits.npy"), logits.numpy())
    count = sum("lora_A" in name for name, _ in adapted.named_parameters())
    print(json.dumps({"peft": peft.__version__, "adapted": count}))


if __name__ == "__main__":
    main()
