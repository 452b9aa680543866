"""The decoder lowered for GPUs on a machine without one: every device's program calls the kernels.

Nothing here is compiled or has run on a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxroll import sharding
from jaxroll.config import MeshConfig
from jaxroll.models import cache, families, params, transformer
from jaxroll.sharding import Layout

SPEC = dataclasses.replace(families.spec("tiny"), layers=1, compute_dtype="bfloat16", remat="layer")
LAYOUT = Layout(sharding.build(MeshConfig(data=2, tensor=2)), sharding.SAMPLER)
B, T, S = 4, 384, 8
TARGET = "jax._src.pallas.triton.gpu_info"
TRITON, CUDNN, SQUARE = "__gpu$xla.gpu.triton", "__cudnn$fmhaSoftmax", f"x{T}x{T}x"


@pytest.fixture(autouse=True)
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "platform", lambda mesh=None: "gpu")
    if importlib.util.find_spec(TARGET):  # from jax 0.12 on Triton's lowering asks which GPU it is for
        monkeypatch.setattr(f"{TARGET}.get_device_kind", lambda: "NVIDIA H100")


def whole_numbers(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.int32)


def lowered(function, *args) -> str:
    return jax.jit(function).trace(params.abstract(SPEC), *args).lower(lowering_platforms=("cuda",)).as_text()


def total(attention: str, *args) -> jax.Array:
    return jnp.sum(transformer.forward(SPEC, *args, layout=LAYOUT, attention=attention).astype(jnp.float32))


def test_packed_rows_are_tritons() -> None:
    rows = whole_numbers(B, T)
    fused, plain = (lowered(jax.grad(partial(total, name)), rows, rows, rows) for name in ("triton", "xla"))
    assert fused.count(TRITON) == 4  # forward, again for the backward pass, and two of that
    assert SQUARE not in fused
    assert SQUARE in plain, "the pattern would be found"


def test_prompts_are_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    # The library is asked for its version while the program is made; here the test answers for it.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
    text = lowered(prefill, whole_numbers(B, T), whole_numbers(B))
    assert text.count(CUDNN) == 1
    assert SQUARE not in text


def test_without_cudnn_it_is_an_error_and_no_other_kernel() -> None:
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        lowered(prefill, whole_numbers(B, T // 2), whole_numbers(B))  # not of the shape that is traced above


def prefill(*args):
    return transformer.prefill(SPEC, *args, layout=LAYOUT, attention="cudnn")


def test_a_decode_step_is_tritons() -> None:
    pool = cache.abstract(SPEC, 2, 16, 32, LAYOUT.mesh, sharding.SAMPLER)

    def decode(*args):
        return transformer.decode(SPEC, *args, layout=LAYOUT, attention="pallas")

    text = lowered(decode, pool, whole_numbers(S), whole_numbers(S), whole_numbers(S, 3))
    assert text.count(TRITON) == 1
