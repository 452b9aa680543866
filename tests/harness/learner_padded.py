"""Reference gradients of samples with one padded row per sample."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.models import transformer


class Padded:
    """Samples in one row each, without the packer: log π of trained tokens [N, 32], 0 elsewhere, in one program."""

    def __init__(self, spec, samples):
        shape = (len(samples), 32)
        self.tokens, self.segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self.mask, self.behaviour = np.zeros(shape, bool), np.zeros(shape, np.float32)
        for row, sample in enumerate(samples):
            n = len(sample.tokens)
            self.tokens[row, :n], self.segments[row, :n] = sample.tokens, 1
            self.mask[row, :n], self.behaviour[row, :n] = sample.mask, sample.behaviour
        self.advantage = np.array([sample.advantage for sample in samples], np.float32)
        self.spec = spec
        self.logprobs = jax.jit(self._logprobs)

    def _logprobs(self, params):
        positions = np.broadcast_to(np.arange(32), self.tokens.shape)
        hidden = transformer.forward(self.spec, params, *map(jnp.asarray, (self.tokens, positions, self.segments)))
        log_all = jax.nn.log_softmax(transformer.logits(self.spec, params, hidden))
        logp = jnp.take_along_axis(log_all[:, :-1], self.tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.where(self.mask, jnp.pad(logp, ((0, 0), (1, 0))), 0.0)
