"""Adapters that travel by themselves: engines compute with what they would have been sent merged."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import config as configs
from jaxroll import sharding
from jaxroll.config import MeshConfig, TransferConfig
from jaxroll.learner import lora
from jaxroll.learner.trainer import Trainer
from jaxroll.models import families, params
from jaxroll.records import Version
from jaxroll.roles import build
from jaxroll.transfer.ends import FetchedParameters, Publisher, Receiver

CONFIG = configs.parse(
    {
        "model": {"size": "nano"},
        "learner": {
            "mesh": {"fsdp": 2},
            "micro_batch_rows": 4,
            "row_tokens": 64,
            "lora_rank": 4,
            "lora_publish": "adapters",
        },
    }
)
SAMPLER = sharding.Layout(sharding.build(MeshConfig(tensor=2)), sharding.SAMPLER)


def stirred(adapters: dict[str, jax.Array], seed: int) -> dict[str, jax.Array]:
    """Adapters as a step might leave them, where they lie."""
    chance = np.random.default_rng(seed)
    return {
        name: jax.device_put(chance.normal(0, 0.1, leaf.shape).astype(np.float32), leaf.sharding)
        for name, leaf in adapters.items()
    }


@pytest.mark.parametrize(
    ("dtype", "compute"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_an_engine_gets_the_same_from_adapters_as_from_merged_parameters(tmp_path, dtype, compute):
    spec = families.spec("nano", vocab_size=32, compute_dtype=compute)
    trainer = Trainer(CONFIG, spec, sharding.build(CONFIG.learner.mesh), sharding.LEARNER, key=jax.random.key(1))
    receiver, base = Receiver(TransferConfig()), trainer.base_digest()
    whole = FetchedParameters(receiver, params.shardings(spec, SAMPLER.mesh, SAMPLER.rules), params.served(spec))
    adapted = build.AdaptedParameters(receiver, spec, SAMPLER, trainer.lora, dtype)
    sizes = []
    with (
        Publisher(TransferConfig(dtype=dtype), tmp_path) as merged,
        Publisher(TransferConfig(), tmp_path) as alone,
    ):
        alone.freeze(Version(0, 0), trainer.base)
        for version in (Version(0, 0), Version(0, 1), Version(0, 2)):
            trainer.state = dataclasses.replace(trainer.state, params=stirred(trainer.state.params, version.step))
            assert trainer.publishable_params() is trainer.state.params
            staged = asyncio.run(adapted.fetch(alone.publish(version, trainer.publishable_params())))
            sizes.append(staged.fetched_bytes)
            merged_staged = asyncio.run(whole.fetch(merged.publish(version, trainer.params())))
            found, wanted = adapted.place(staged), whole.place(merged_staged)
            assert found.keys() == wanted.keys() == params.abstract(spec).keys()
            for name, leaf in wanted.items():
                assert found[name].dtype == leaf.dtype == jnp.dtype(compute) and found[name].sharding == leaf.sharding
                # One unit in the last place: the product may be summed in another order on another mesh.
                assert_close(found[name], leaf, jnp.finfo(dtype).eps)
                np.testing.assert_array_equal(leaf, leaf.astype(dtype).astype(compute))
                np.testing.assert_array_equal(found[name], found[name].astype(dtype).astype(compute), err_msg="rounded")
            moved = max(float(jnp.abs(found[n] - trainer.base[n].astype(compute)).max()) for n in ("layers.00.attn.q",))
            assert moved > 0.01, "the adapters change nothing"
    of_base, of_adapters = (
        4 * sum(leaf.size for leaf in leaves.values())
        for leaves in (params.abstract(spec), lora.abstract(spec, trainer.lora))
    )
    assert sizes == [of_base + of_adapters, of_adapters, of_adapters]
    assert lora.digest(trainer.base) == base == trainer.base_digest()


def assert_close(found: jax.Array, wanted: jax.Array, eps: float) -> None:
    a, b = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
    np.testing.assert_allclose(a, b, rtol=eps, atol=1e-6)


def test_merged_parameters_are_what_is_published_unless_adapters_are_asked_for():
    config = dataclasses.replace(CONFIG, learner=dataclasses.replace(CONFIG.learner, lora_publish="merged"))
    spec = families.spec("nano", vocab_size=32)
    trainer = Trainer(config, spec, sharding.build(config.learner.mesh), sharding.LEARNER, key=jax.random.key(1))
    assert trainer.publishable_params().keys() == params.abstract(spec).keys() and not trainer.sends_adapters
