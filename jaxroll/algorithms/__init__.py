"""Algorithms: advantages, policy-gradient losses, token sampling and log-probabilities, as pure functions of arrays.

Read `registry` first (an algorithm by name, and how to add one), then `losses` and `advantages`. `tokens` defines the
per-token inputs of a loss and the weights that aggregate it; `sampling` draws tokens and computes their log-probs.
"""
