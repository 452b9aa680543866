"""Segments of prompt and answer tokens for claims."""

from __future__ import annotations

import numpy as np

from jaxroll.records import Segment


def prompt(tokens: np.ndarray) -> Segment:
    return Segment(tokens.astype(np.int32), np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.float32))


def answer(tokens: np.ndarray, logprobs: np.ndarray) -> Segment:
    return Segment(tokens.astype(np.int32), np.ones(len(tokens), np.uint8), logprobs.astype(np.float32))
