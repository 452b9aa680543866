"""The choice of the attention implementation, made once before anything is compiled. No JAX.

There are three uses: `packed` rows of a training batch, fresh prompts of a `prefill`, and one more token over the
`paged` cache. Each has a key in the config. `auto` selects the fused kernel of the platform if it supports the shapes,
otherwise the XLA implementation, and reports the reason. Any other value is used or refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from jaxroll.errors import ConfigError

Use = Literal["packed", "prefill", "paged"]
AUTO, XLA, DENSE = "auto", "xla", "dense"
DENSE_TOKENS = 192  # for up to this many tokens, reading a contiguous cache costs less than gathering pages
BLOCK = 128  # tokens per block of the fused kernels; shorter rows would be padded to it
KEYS: Mapping[Use, str] = {
    "packed": "learner.attention",
    "prefill": "sampler.prefill_attention",
    "paged": "sampler.paged_attention",
}

WINDOWED = ("splash",)  # kernels that take sliding windows
_TPU_LANES = 128
_TRITON_HEADS = (16, 32, 64, 128)  # its tiles have powers of two
_CUDNN_HEADS = 128  # the largest that every GPU generation supports
_PLATFORMS = {
    "splash": ("tpu",),
    "triton": ("gpu",),
    "cudnn": ("gpu",),
    "pallas": ("tpu", "gpu"),
    DENSE: ("cpu", "gpu", "tpu"),
}
_SUITED: Mapping[tuple[Use, str], str] = {
    ("packed", "tpu"): "splash",
    ("packed", "gpu"): "triton",
    ("prefill", "tpu"): "splash",
    ("prefill", "gpu"): "cudnn",
    ("paged", "tpu"): "pallas",
    ("paged", "gpu"): "pallas",
    ("paged", "cpu"): DENSE,
}


class Heads(Protocol):
    """The attention heads of a model."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def compute_dtype(self) -> str: ...
    @property
    def narrowest(self) -> int: ...  # the smallest sliding window; 0 if no layer has one
    @property
    def scan(self) -> bool: ...  # layers are in a loop
    @property
    def kv_dtype(self) -> str: ...  # of quantized pages; empty: the compute dtype


@dataclass(frozen=True)
class Site:
    """The conditions of a choice: the model, its devices, and the tokens of a row (for `paged`: of a page).

    `platform` is cpu, gpu or tpu, or empty if it is not known yet. `tensor` devices share the heads. A slot holds up to
    `longest` tokens (0: not known yet). `limited`: the cache has fewer pages than all slots can need.
    """

    model: Heads
    platform: str
    tensor: int
    tokens: int
    longest: int = 0
    limited: bool = False


@dataclass(frozen=True)
class Choice:
    """The chosen implementation, and the reason."""

    name: str = XLA
    reason: str = "by default"

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


UNASKED = Choice()


@dataclass(frozen=True)
class EngineChoices:
    """The choices of an engine."""

    prefill: Choice = UNASKED
    paged: Choice = UNASKED

    def names(self) -> dict[str, str]:
        """The name of the implementation for each use."""
        return {"prefill": self.prefill.name, "paged": self.paged.name}

    def described(self) -> dict[str, str]:
        """Each use with its choice, as text."""
        return {"prefill": str(self.prefill), "paged": str(self.paged)}


PLAIN = EngineChoices()


def choose(use: Use, wanted: str, site: Site) -> Choice:
    """The choice for `wanted` at `site`; ConfigError if `wanted` names an implementation that cannot work there."""
    if wanted == XLA:
        return Choice(XLA, "as configured")
    if wanted != AUTO:
        check(use, wanted, site)
        return Choice(wanted, "as configured")
    suited = _SUITED.get((use, site.platform))
    if suited is None:
        return Choice(XLA, f"no fused kernel on {site.platform}")
    obstacle = _obstacle(use, suited, site)
    if suited == DENSE and site.longest > DENSE_TOKENS:
        obstacle = f"requests have up to {site.longest} tokens, and it reads all slots up to the longest one"
    return Choice(XLA, f"no {suited}: {obstacle}") if obstacle else Choice(suited, f"auto on {site.platform}")


def check(use: Use, wanted: str, site: Site) -> None:
    """Raise ConfigError if `wanted` cannot work at `site` (with an unknown platform: on no platform)."""
    obstacle = "" if wanted in (AUTO, XLA) else _obstacle(use, wanted, site)
    if obstacle:
        raise ConfigError(KEYS[use], wanted, obstacle, "Set it to 'xla', or to 'auto', which reports its choice.")


def check_quantised(weight_dtype: str, experts: int) -> None:
    """Raise ConfigError if the weights of a model with this many experts cannot be quantized."""
    if weight_dtype and experts:
        reason = "the model has experts, whose weights would be dequantized for each step, those not chosen included"
        remedy = "Set it to ''; sampler.kv_dtype works with experts."
        raise ConfigError("sampler.weight_dtype", weight_dtype, reason, remedy)


def _obstacle(use: Use, name: str, site: Site) -> str:
    """The reason that `name` cannot serve `use` at `site`; empty when it can."""
    model = site.model
    if use == "paged" and model.kv_dtype:
        return f"it does not read quantized pages, and sampler.kv_dtype is {model.kv_dtype}"
    if name == DENSE and model.scan:
        return "layers are in a loop (sampler.scan_layers), which would copy its cache of every layer"
    if name == DENSE:
        return (
            "it needs memory for the longest request in every slot, but sampler.cache_pages or memory_fraction limit it"
            if site.limited
            else ""
        )
    if site.platform and site.platform not in _PLATFORMS[name]:
        return f"it is a kernel for {' and '.join(_PLATFORMS[name])}, and this is {site.platform}"
    if model.compute_dtype != "bfloat16":
        return f"it multiplies in bfloat16 and model.dtype is {model.compute_dtype}"
    if model.heads % site.tensor or model.kv_heads % site.tensor:
        heads = f"{model.heads} query and {model.kv_heads} key-value heads"
        return f"{heads} cannot be divided evenly over {site.tensor} devices"
    if use != "paged" and site.tokens < BLOCK:
        return f"rows have {site.tokens} tokens and it computes blocks of {BLOCK}"
    longest = site.longest if use == "paged" else site.tokens
    if model.narrowest and name not in WINDOWED and not 0 < longest <= model.narrowest:
        tokens = f"rows of {longest} tokens" if longest else "rows of unknown length"
        return f"it has no sliding windows, and the model's window of {model.narrowest} tokens cuts {tokens}"
    return _unsupported_shape(use, name, site)


def _unsupported_shape(use: Use, name: str, site: Site) -> str:
    """The shape that a kernel does not support, as a message; empty if it supports all."""
    head, tokens = site.model.head_dim, site.tokens
    tpu, gpu = site.platform == "tpu", site.platform == "gpu"
    if (name == "splash" or (name == "pallas" and tpu)) and head % _TPU_LANES:
        return f"a TPU has {_TPU_LANES} lanes and a head {head} numbers"
    if (name == "triton" or (name == "pallas" and gpu)) and head not in _TRITON_HEADS:
        return f"heads have {head} numbers and it takes {', '.join(map(str, _TRITON_HEADS))}"
    if name == "cudnn" and (head % 8 or head > _CUDNN_HEADS):
        return f"heads have {head} numbers and it takes multiples of 8 up to {_CUDNN_HEADS}"
    if use == "paged" and tpu and tokens % 8:
        return f"pages have {tokens} tokens and it takes multiples of 8"
    if use == "paged" and gpu and (tokens < 16 or tokens & (tokens - 1)):
        return f"pages have {tokens} tokens and it takes powers of two from 16 on"
    return ""
