"""Goldens of the model families, for .venv-torch: what transformers computes with small random models.

    python write_families.py FOLDER

FOLDER/VARIANT holds, for every variant:

    config.json    as `save_pretrained` writes it
    expected.npz   tokens int32 [B, T], logits float32 [B, T, V], greedy int32 [B, N]: the continuation of each row

and for every family of CHATS a tokenizer with a chat template, chats.json: conversations rendered by transformers, and

    scores.json    of a model for sequence classification with one label: its config.json, conversations that end with
                   an answer as ids (rendered as TRL renders them), and their scores

The weights are not stored: `tensor` computes each one from its Hugging Face name and shape. They are large enough that
attention is not flat; norms are away from their neutral value, and windows and the contexts of stretched RoPE are
shorter than the rows. `tests/models/test_family_goldens.py` compares; `make soak` writes the goldens again.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS, LENGTH, NEW_TOKENS, VOCAB = 2, 24, 8, 72
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10.0, "factor": 4.0, "original_max_position_embeddings": 16}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
# The class's name, and the arguments of its config.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"rope_parameters": _DEFAULT, "tie_word_embeddings": True}),
    "qwen2_yarn_windows": ("Qwen2", {
        "rope_parameters": _YARN, "tie_word_embeddings": False, "use_sliding_window": True, "sliding_window": 6,
        "max_window_layers": 1,
    }),
    "qwen3": ("Qwen3", {"rope_parameters": _YARN | {"truncate": False}, "head_dim": 8, "tie_word_embeddings": False}),
    "qwen3_moe": ("Qwen3Moe", {
        "rope_parameters": _DEFAULT | {"rope_theta": 100.0}, "head_dim": 8, "tie_word_embeddings": False,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": False,
    }),
    "llama": ("Llama", {"rope_parameters": _LLAMA3, "head_dim": 8, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"rope_parameters": _DEFAULT, "head_dim": 8, "sliding_window": 7, "rms_norm_eps": 1e-3}),
    "mistral_no_window": ("Mistral", {"rope_parameters": _DEFAULT, "head_dim": 6, "sliding_window": None}),
    "gemma3_text": ("Gemma3", {
        "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 20, "final_logit_softcapping": 5.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
        },
    }),
}  # fmt: skip


def tensor(name: str, shape: tuple[int, ...], *, offset: bool = False) -> np.ndarray:
    """The float32 weights of this name: normal, from a seed that is the CRC-32 of the name.

    The deviation is 1/√in for matrices and 0.2 for biases; norms are 0.2 around 1, or around 0 with `offset`.
    """
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return 0.2 * noise + np.float32(0 if offset else 1)
    if len(shape) == 1:
        return np.float32(0.2) * noise
    return np.float32(1.5 if "embed" not in name else 1.0) * noise / np.float32(np.sqrt(shape[-1]))


# --- conversations: formats like those of the families' chat models

CONVERSATIONS: list[list[tuple[str, str]]] = [
    [("user", "sun")],
    [("system", "Be brief."), ("user", "  Spell this word: sun\n")],
    [("user", "one"), ("assistant", "eno"), ("user", "two")],
]
_DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}\n"
)
_CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
_INST = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message.role == 'system' %}{%- set ns.system = message.content + '\\n\\n' %}
{%- elif message.role == 'user' %}{{- '[INST] ' + (ns.system if loop.last else '') + message.content + '[/INST]' }}
{%- else %}{{- ' ' + message.content | trim + eos_token }}{%- endif %}
{%- endfor %}"""
_TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
{%- set first = messages[0]['content'] + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate') }}
{%- endif -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
# Per family: pad, bos, eos, further special tokens, whether the tokenizer adds bos to plain text, the template.
CHATS: dict[str, tuple[str, str | None, str, list[str], bool, str]] = {
    "qwen2": ("<|endoftext|>", None, "<|im_end|>", ["<|im_start|>"], False, _DEFAULT_SYSTEM + _CHATML),
    "qwen3": ("<|endoftext|>", None, "<|im_end|>", ["<|im_start|>"], False, _CHATML),
    "qwen3_moe": ("<|endoftext|>", None, "<|im_end|>", ["<|im_start|>"], False, _CHATML),
    "llama": ("<|finetune_right_pad_id|>", "<|begin_of_text|>", "<|eot_id|>",
              ["<|start_header_id|>", "<|end_header_id|>"], True, _HEADERS),
    "mistral": ("<unk>", "<s>", "</s>", ["[INST]", "[/INST]"], True, _INST),
    "gemma3_text": ("<pad>", "<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"], True, _TURNS),
}  # fmt: skip


def write_chats(folder: Path, family: str) -> None:
    """A byte-level tokenizer of the family's special tokens, and every conversation rendered by transformers."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    pad, bos, eos, more, adds_bos, template = CHATS[family]
    special = [pad, *([bos] if bos else []), eos, *more]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted("abcdefghijklmnopqrstuvwxyz BSIN.\n_:")
    # Few bytes: the conversations need no others.
    letters = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(one)[0][0] for one in alphabet]
    trainer = trainers.BpeTrainer(vocab_size=0, special_tokens=special, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    if adds_bos and bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    named = {"pad_token": pad, "eos_token": eos, "additional_special_tokens": more} | (
        {"bos_token": bos} if bos else {}
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **named)
    fast.save_pretrained(folder)
    if family == "gemma3_text":  # whose turns end with another token than its texts
        ends = [fast.convert_tokens_to_ids(token) for token in (eos, "<end_of_turn>")]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n")
    rows = []
    for turns in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in turns]
        text = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = fast.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        rows.append({"messages": messages, "text": text, "ids": ids})
    (folder / "chats.json").write_text(json.dumps(rows, indent=1) + "\n")


def tensors(made: Any) -> Iterator[tuple[str, Any]]:
    """The parameters as views by their names in a file, which has one matrix per expert; the model stacks them."""
    for key, parameter in made.named_parameters():
        stem, _, last = key.rpartition(".")
        if not stem.endswith(".experts"):
            yield key, parameter
            continue
        for expert, one in enumerate(parameter):
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for name, part in zip(names, one.chunk(len(names)), strict=True):
                yield f"{stem}.{expert}.{name}.weight", part


def model(variant: str) -> Any:
    """The variant's model of transformers, float32, with the weights of `tensor`."""
    import torch
    import transformers

    name, options = VARIANTS[variant]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = config_class(**(SIZES | options), attn_implementation="eager")
    made = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in tensors(made):
            parameter.copy_(torch.from_numpy(tensor(key, tuple(parameter.shape), offset=name == "Gemma3")))
    return made


def write_scores(folder: Path, variant: str) -> None:
    """The scores of the variant's reward model for every conversation with an answer, in one padded batch."""
    import torch
    import transformers

    name, options = VARIANTS[variant]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    config = config_class(**(SIZES | options), attn_implementation="eager", num_labels=1)
    kind = f"{name}{'Text' if name == 'Gemma3' else ''}ForSequenceClassification"
    made = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for key, parameter in tensors(made):
            parameter.copy_(torch.from_numpy(tensor(key, tuple(parameter.shape), offset=name == "Gemma3")))
    text = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for turns in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in [*turns, ("assistant", "nus")]]
        rows.append(text.apply_chat_template(messages, tokenize=False))
    batch = text(rows, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        scores = made(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    ids = [row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    made.save_pretrained(folder / "model")
    found = {
        "config": json.loads((folder / "model" / "config.json").read_text()),
        "tensors": {key: list(parameter.shape) for key, parameter in tensors(made)},
        "ids": ids,
        "scores": scores.tolist(),
    }
    shutil.rmtree(folder / "model")
    (folder / "scores.json").write_text(json.dumps(found, indent=1) + "\n")


def write(folder: Path, variant: str) -> dict[str, Any]:
    """One variant's files."""
    import torch

    made = model(variant)
    made.config.save_pretrained(folder)
    if variant in CHATS:
        write_chats(folder, variant)
        write_scores(folder, variant)
    tokens = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = made(tokens).logits
        made.generation_config.eos_token_id = None  # every continuation is as long as the others
        asked = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "max_new_tokens": NEW_TOKENS}
        greedy = made.generate(tokens, **asked)
    continued = greedy[:, LENGTH:].numpy().astype(np.int32)
    np.savez(folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy(), greedy=continued)
    return {"parameters": sum(p.numel() for p in made.parameters()), "logits_std": float(logits.std())}


def main() -> None:
    """Write all variants; the last line describes them."""
    import torch
    import transformers

    torch.set_num_threads(1)
    written = {variant: write(Path(sys.argv[1]) / variant, variant) for variant in VARIANTS}
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, **written}))


if __name__ == "__main__":
    main()
