"""Pure JAX functions of arrays: log-probabilities, sampling, and the parts of a policy-gradient loss."""
