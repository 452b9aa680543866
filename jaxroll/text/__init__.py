"""Text: tokenizers and chat templates. Works without JAX.

Read `tokenizers` first (the tokenizer that a config names: of characters, or of a Hugging Face folder with its chat
template). `template_bounds` limits what a template may compute.
"""
