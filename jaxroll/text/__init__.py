"""Text: tokenizers and chat templates. Works without JAX.

Read `tokenizers` first (the tokenizer that a config names, and the character tokenizer). `hf` reads tokenizers of
Hugging Face folders, `chat` their chat templates; `template_bounds` limits what a template may compute.
"""
