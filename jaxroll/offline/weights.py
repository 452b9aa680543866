"""The folder format of weights, for the commands that read and write it; the format itself is the learner's."""

from __future__ import annotations

from jaxroll.learner.weights import load, model_spec, save, tokenizer

__all__ = ["load", "model_spec", "save", "tokenizer"]
