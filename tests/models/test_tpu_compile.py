"""The tiny model's programs compile ahead of time for a TPU v5e of four chips, on a machine without one.

The compiles run in a child process: libtpu reads its environment once, when it is loaded.
"""

import importlib.util
import json
import platform
import subprocess
import sys

import pytest

from jaxroll.offline import aot

CHILD = """
import dataclasses, json, sys
import jax, jax.numpy as jnp
from jaxroll.config import MeshConfig
from jaxroll.math.logprob import token_logprobs
from jaxroll.models import cache, families, params, transformer
from jaxroll.offline import aot
from jaxroll.sharding import rules

spec = families.spec("tiny")
mesh = aot.topology_mesh(MeshConfig(fsdp=2, tensor=2), "v5e:2x2")
shapes = params.abstract(spec)

def loss(values, tokens, positions, segments):
    layout = rules.Layout(mesh, rules.LEARNER)
    hidden = transformer.forward(spec, values, tokens, positions, segments, layout=layout)
    return -jnp.mean(token_logprobs(transformer.logits(spec, values, hidden), tokens, 1.0))

def gradient():
    weights = params.shardings(spec, mesh, rules.LEARNER)
    rows = aot.abstract([jax.ShapeDtypeStruct((8, 128), jnp.int32)] * 3,
                        jax.NamedSharding(mesh, rules.batch_spec(rules.LEARNER)))
    step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, weights))
    return aot.compiled("gradient", step, aot.abstract(shapes, weights), *rows)

def decode():
    values = aot.abstract(shapes, params.shardings(spec, mesh, rules.SAMPLER))
    held = cache.abstract(spec, 32, 32, mesh, rules.SAMPLER)
    slots = aot.abstract([jax.ShapeDtypeStruct((32,), jnp.int32)] * 2,
                         rules.sharding(mesh, ("slots",), rules.SAMPLER, (32,)))
    layout = rules.Layout(mesh, rules.SAMPLER)
    step = jax.jit(lambda *args: transformer.decode(spec, *args, layout=layout), donate_argnums=1)
    return aot.compiled("decode", step, values, held, *slots)

for program, cost in (gradient(), decode()):
    row = dataclasses.asdict(cost) | {"peak_bytes": cost.peak_bytes, "devices": mesh.devices.flat[0].device_kind}
    print(json.dumps(row | {"all_reduces": program.as_text().count("all-reduce")}))
"""

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason=f"libtpu has no wheel for {platform.system()} {platform.machine()} here: nothing to compile with",
)


@needs_libtpu
@pytest.mark.process
def test_gradient_and_decode_compile_for_a_v5e():
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=aot.tpu_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    gradient, decode = (json.loads(line) for line in child.stdout.splitlines() if line.startswith("{"))
    assert (gradient["name"], decode["name"]) == ("gradient", "decode")
    assert "v5" in gradient["devices"]
    parameter_bytes = 529_472 * 4
    # A quarter of the parameters and three int32 [4, 128] rows a device; TPU layouts pad small arrays.
    assert parameter_bytes / 4 < gradient["argument_bytes"] < parameter_bytes / 2
    assert gradient["peak_bytes"] < 64e6
    # Forward and backward multiply every parameter with 4 rows of 128 tokens 3 times, half of them on each chip.
    assert gradient["flops"] > 6 * 529_472 * 8 * 128 / 4
    # The donated cache is updated in place: 3 layers, 16 of 32 slots, 32 tokens, 1 of 2 heads, 32 wide, twice.
    assert decode["alias_bytes"] >= 3 * 16 * 32 * 1 * 32 * 4 * 2
    assert decode["output_bytes"] - decode["alias_bytes"] < 64 * 1024
    assert gradient["all_reduces"] and decode["all_reduces"]
