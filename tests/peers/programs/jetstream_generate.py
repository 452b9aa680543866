"""For .venv-jetstream: JetStream's own test engine, driven by its own calls. Its tokens can be worked out by hand.

The engine doubles the prompt at prefill; every step yields sum(prefill) + sum(generated) / 2.
"""

import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jetstream.engine import engine_api, mock_engine

PROMPT, SLOT, STEPS = [2, 65, 66], 1, 3


def main() -> None:
    """Prefill a prompt, insert it into a slot, generate tokens, and print them."""
    engine = mock_engine.TestEngine(batch_size=2, cache_length=16, weight=2.0)
    assert isinstance(engine, engine_api.Engine)
    params, state = engine.load_params(), engine.init_decode_state()
    prefix = engine.prefill(params=params, padded_tokens=jnp.array(PROMPT, jnp.float32), true_length=len(PROMPT))
    state = engine.insert(prefix, state, slot=SLOT)
    tokens = []
    for _ in range(STEPS):
        state, result = engine.generate(params, state)
        tokens.append(int(result.get_result_at_slot(SLOT).tokens[0, 0]))
    print(json.dumps({"tokens": tokens, "slots": engine.max_concurrent_decodes, "jax": jax.__version__}))


if __name__ == "__main__":
    main()
