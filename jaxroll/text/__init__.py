"""Text to token ids and back: tokenizers and chat templates. Works without JAX."""
