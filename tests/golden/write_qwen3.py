"""Goldens of Qwen3, for .venv-torch: small random models of transformers, with their outputs for some inputs.

    python write_qwen3.py FOLDER

FOLDER/tied, FOLDER/untied and FOLDER/moe are checkpoints as `save_pretrained` writes them, with tokenizer and chat
template.
In addition to each checkpoint's files:

    expected.npz   tokens int32 [B, T], logits float32 [B, T, V], greedy int32 [B, N]: the continuation of each row
    chats.json     conversations, and the result of apply_chat_template for each: text and ids

In all models heads · head_dim ≠ width, keys are grouped, and norms are away from 1; their RoPE bases and ε differ from
the defaults enough to show. `tied` is float32 in several files, `untied` bfloat16 in one, `moe` a mixture of experts.
`tests/models/test_golden.py` says what must agree, `make soak` writes them again and compares.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROWS, LENGTH, NEW_TOKENS, VOCAB = 2, 20, 10, 288
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SIZES = {"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2, "head_dim": 16}
VARIANTS = {
    "tied": {
        "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "dtype": "float32",
    },
    "untied": {
        "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": False, "rms_norm_eps": 3e-2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "dtype": "bfloat16",
    },
    "moe": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "dtype": "float32",
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
    },
}  # fmt: skip
SHARD = {"tied": "60KB", "untied": "10MB", "moe": "10MB"}
CLASSES = {"moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM)}
DENSE = (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)

# Roles, tools, thoughts that are dropped, JSON, loops with memory: what chat templates of the field do.
TEMPLATE = """{%- if tools is not none %}
{{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(users=0) %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('the system speaks first') }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<result>' + (message.content | tojson) + '</result>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{{- message.content.split('</think>')[-1].lstrip('\\n') }}
{{- '<|im_end|>\\n' }}
{%- endgeneration %}
{%- else %}
{%- set seen.users = seen.users + 1 %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if seen.users > 1 %}
{{- '(' ~ seen.users ~ ')' }}
{%- endif %}
{%- endif %}
"""
CONVERSATIONS = [
    [("user", "sun")],
    [("system", "Be brief."), ("user", "  Spell this word backward: sun\n")],
    [("user", "one"), ("assistant", "<think>\nhm</think>\n\neno"), ("user", "two")],
    [("user", "look"), ("assistant", "call"), ("tool", '{"wörd": "<a> & \'b\'"}'), ("tool", "2"), ("user", "and?")],
]


def model(variant: str) -> transformers.PreTrainedModel:
    """Weights large enough that attention is not flat; norms away from 1, so that each of them matters."""
    torch.manual_seed(7)
    made_config, made_model = CLASSES.get(variant, DENSE)
    config = made_config(
        **SIZES,
        **VARIANTS[variant],
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=2,
        pad_token_id=0,
        attn_implementation="eager",
    )
    made = made_model(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn_like(parameter))
    return made.to(getattr(torch, VARIANTS[variant]["dtype"]))


def write_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE trained on a few words, with the template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "Spell this word backward: sun"] * 10, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return fast


def chats(tokenizer: transformers.PreTrainedTokenizerFast) -> list[dict]:
    """Every conversation with its rendering by transformers."""
    rows = []
    for turns in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in turns]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        rows.append({"messages": messages, "text": text, "ids": ids})
    return rows


@torch.no_grad()
def write(folder: Path, variant: str) -> dict:
    """One variant; logits and continuations are computed in float32 from the weights as stored in the files."""
    qwen = model(variant)
    qwen.save_pretrained(folder, max_shard_size=SHARD[variant])
    (folder / "chats.json").write_text(json.dumps(chats(write_tokenizer(folder)), indent=1) + "\n")
    # From the files, not by .float(): casting a model to bfloat16 also rounds its RoPE frequencies permanently.
    qwen = CLASSES.get(variant, DENSE)[1].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = qwen(tokens).logits
    qwen.generation_config.eos_token_id = None  # every continuation is as long as the others
    greedy = qwen.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW_TOKENS)
    continued = greedy[:, LENGTH:].numpy().astype(np.int32)
    np.savez(folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy(), greedy=continued)
    return {"parameters": sum(p.numel() for p in qwen.parameters()), "logits_std": float(logits.std())}


def main() -> None:
    """Write all variants; the last line says what they are."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    said = {variant: write(folder / variant, variant) for variant in VARIANTS}
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, **said}))


if __name__ == "__main__":
    main()
