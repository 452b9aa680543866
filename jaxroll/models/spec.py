"""One decoder as data: its sizes, and the options in which model families differ. No JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxroll.config import Config, MeshConfig
from jaxroll.config.derived import episode_tokens
from jaxroll.config.rules import MAX_MEMBER_MB, TOKEN_BYTES
from jaxroll.errors import ConfigError

_DTYPES = ("float32", "bfloat16")
# Recomputed in the backward pass: nothing; whole layers; layers except products with parameters.
Remat = Literal["none", "layer", "dots"]
Activation = Literal["silu", "gelu"]  # gelu: the tanh approximation
Stretch = Literal["linear", "llama3", "yarn"]
_MOST_LAYERS, _MOST = 4096, 1 << 24  # limits of layers and of other sizes, against damaged or hostile files
_MOST_EXPERTS = 65_535  # choices are recorded as 16-bit numbers
SIZES = ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "hidden")


@dataclass(frozen=True)
class RopeScaling:
    """Lower rotary frequencies, for contexts that are `factor` times longer than the `context` of pretraining.

    `linear` divides every frequency by `factor`. The others divide the frequencies that turn less than `low` times
    within `context`, keep those that turn more than `high` times, and interpolate between: `llama3` by that number,
    `yarn` by index (Peng et al., arXiv 2309.00071). Cos and sin are multiplied by `attention_factor`.
    """

    kind: Stretch
    factor: float
    context: int = 0
    low: float = 1.0
    high: float = 4.0
    attention_factor: float = 1.0
    truncate: bool = True  # yarn: the indices at which interpolation begins and ends are whole

    def __post_init__(self) -> None:
        if self.kind not in get_args(Stretch):
            raise ConfigError("model.rope_scaling", self.kind, "unknown", f"Known: {', '.join(get_args(Stretch))}.")
        for key in ("factor", "low", "high", "attention_factor"):
            check_number(f"model.rope_scaling.{key}", getattr(self, key))
        check_flag("model.rope_scaling.truncate", self.truncate)
        if self.kind != "linear":
            check_size("model.rope_scaling.context", self.context)
            if self.low >= self.high:
                raise ConfigError("model.rope_scaling.low", self.low, f"must be less than high = {self.high}")


@dataclass(frozen=True)
class ModelSpec:
    """One decoder. Query head n reads key-value head n // (heads / kv_heads); `hidden` is the gated MLP's inner width.

    The defaults are Qwen3's architecture. `windows` holds for each layer the number of tokens that a query sees, itself
    included (0: all before it); empty if every layer sees all.
    """

    name: str
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tied_embeddings: bool = True
    qk_norm: bool = True
    compute_dtype: str = "float32"
    remat: Remat = "none"  # what the backward pass recomputes instead of storing
    scan: bool = False  # the learner compiles one layer and loops over all
    value_head: bool = False  # of a critic: one number per token instead of logits
    family: str = "qwen3"  # see `families`: names and config.json of the parameters' files
    attention_bias: bool = False  # of queries, keys and values
    activation: Activation = "silu"  # of the gate
    rope_scaling: RopeScaling | None = None
    windows: tuple[int, ...] = ()
    local_rope_theta: float = 0.0  # layers with a window: their base, without scaling (0: as the other layers)
    post_norms: bool = False  # attention and MLP are normed before they are added, too
    norm_offset: bool = False  # norms multiply by 1 + scale
    scaled_embeddings: bool = False  # multiplied by √width
    query_scalar: float = 0.0  # scores are divided by its root (0: by that of head_dim)
    logit_softcap: float = 0.0  # c: logits become c·tanh(logits / c) (0: as they are)
    # Mixture of experts (0: one MLP per layer); `hidden` is then the inner width of each expert.
    experts: int = 0
    experts_per_token: int = 0
    normalized_gates: bool = True  # the weights of a token's experts are divided by their sum
    router_bias: bool = False  # the logits that choose experts, but not their weights, have a bias of each expert

    def __post_init__(self) -> None:
        # A model.json holds lists and objects.
        if isinstance(self.windows, list):
            object.__setattr__(self, "windows", tuple(self.windows))
        if isinstance(self.rope_scaling, dict):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        for key in SIZES:
            check_size(f"model.{key}", getattr(self, key), key)
        for key in ("rope_theta", "norm_eps"):
            check_number(f"model.{key}", getattr(self, key))
        for key in ("local_rope_theta", "query_scalar", "logit_softcap"):
            if getattr(self, key) != 0:
                check_number(f"model.{key}", getattr(self, key))
        for key in _FLAGS:
            check_flag(f"model.{key}", getattr(self, key))
        if not isinstance(self.name, str) or self.remat not in get_args(Remat):
            kinds = ", ".join(get_args(Remat))
            raise ConfigError("model", (self.name, self.remat), "invalid name or remat", f"remat is one of {kinds}.")
        if self.activation not in get_args(Activation):
            known = ", ".join(get_args(Activation))
            raise ConfigError("model.activation", self.activation, "unknown activation", f"Known: {known}.")
        if self.heads % self.kv_heads:
            raise ConfigError("model.kv_heads", self.kv_heads, f"does not divide the {self.heads} query heads")
        if self.head_dim % 2:
            raise ConfigError("model.head_dim", self.head_dim, "rotary embedding rotates pairs", "Use an even number.")
        if self.compute_dtype not in _DTYPES:
            raise ConfigError("model.dtype", self.compute_dtype, "unknown dtype", f"Known: {', '.join(_DTYPES)}.")
        self._check_windows()
        self._check_experts()

    def _check_windows(self) -> None:
        if self.windows and len(self.windows) != self.layers:
            reason = f"holds {len(self.windows)} windows for {self.layers} layers"
            raise ConfigError("model.windows", self.windows, reason)
        for window in self.windows:
            if window != 0:
                check_size("model.windows", window)

    def _check_experts(self) -> None:
        if self.experts == 0 == self.experts_per_token:
            if self.router_bias:
                raise ConfigError("model.router_bias", True, f"{self.name} has no experts", "Set it to False.")
            return
        for key in ("experts", "experts_per_token"):
            check_size(f"model.{key}", getattr(self, key), key)
        if not self.experts_per_token <= self.experts < _MOST_EXPERTS:
            reason = f"a token has {self.experts_per_token} experts"
            raise ConfigError("model.experts", self.experts, reason, f"Use at least as many and below {_MOST_EXPERTS}.")

    @property
    def each_window(self) -> tuple[int, ...]:
        """The window of every layer; 0 for a layer without one."""
        return self.windows or (0,) * self.layers

    @property
    def period(self) -> int:
        """The length of the pattern of windows: layer i has the window of layer i + period."""
        windows = self.each_window
        return next(n for n in range(1, self.layers + 1) if windows[n:] == windows[: self.layers - n])

    @property
    def narrowest(self) -> int:
        """The smallest window of any layer; 0 if no layer has one."""
        return min((window for window in self.windows if window), default=0)

    @property
    def query_factor(self) -> float:
        """The factor of queries before attention, which divides scores by √head_dim."""
        return math.sqrt(self.head_dim / self.query_scalar) if self.query_scalar else 1.0


_FLAGS = (
    "tied_embeddings", "qk_norm", "value_head", "scan", "attention_bias", "post_norms", "norm_offset",
    "scaled_embeddings", "normalized_gates", "router_bias",
)  # fmt: skip


def check_size(key: str, value: Any, size: str = "") -> None:
    """Raise ConfigError unless `value` is a whole number from 1 to the limit of `size`."""
    most = _MOST_LAYERS if size == "layers" else _MOST
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(key, value, f"must be at least 1, and a whole number of at most {most}")


def check_number(key: str, value: Any) -> None:
    """Raise ConfigError unless `value` is a number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:  # NaN is refused, too
        raise ConfigError(key, value, "must be a number between 0 and 1e30")


def check_flag(key: str, value: Any) -> None:
    """Raise ConfigError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(key, value, "must be true or false")


def check_mesh(spec: ModelSpec, mesh: MeshConfig, key: str = "mesh") -> None:
    """Raise ConfigError when the mesh does not divide the model evenly."""
    # The rules would replicate such an axis, which is correct but not what a mesh is for. Key-value heads and
    # vocabulary may be replicated (fewer key-value heads than devices is common); query heads and hidden may not.
    for axis, size, what, count in (
        ("tensor", mesh.tensor, "query heads", spec.heads),
        ("sequence", mesh.sequence, f"query heads of each of {mesh.tensor} tensor shards", spec.heads // mesh.tensor),
        ("tensor", mesh.tensor, "hidden units", spec.hidden),
        ("fsdp", mesh.fsdp, "of width", spec.width),
        ("expert", mesh.expert, "experts", spec.experts or 1),
    ):
        if count % size:
            fits = [n for n in range(1, size) if count % n == 0]
            raise ConfigError(
                f"{key}.{axis}", size, f"does not divide the {count} {what} of {spec.name}", f"Use one of {fits}."
            )


def check_routing(spec: ModelSpec, config: Config) -> None:
    """Raise ConfigError for options of experts with a model that has none, and for records too large for the store."""
    learner = config.learner
    for key, value, off in (("routing_replay", learner.routing_replay, False), ("router_loss", learner.router_loss, 0)):
        if value != off and not spec.experts:
            raise ConfigError(f"learner.{key}", value, f"{spec.name} has no experts", f"Set it to {off}.")
    if spec.router_bias and learner.router_bias_rate and learner.lora_rank:
        raise ConfigError("learner.router_bias_rate", learner.router_bias_rate,
                          "with adapters the parameters of routers are frozen", "Set it to 0.")  # fmt: skip
    if not learner.routing_replay:
        return
    a_token = TOKEN_BYTES + spec.layers * spec.experts_per_token * (1 if spec.experts < 255 else 2)
    limit_mb = min(MAX_MEMBER_MB, config.store.max_message_mb)
    if episode_tokens(config) * a_token > limit_mb * 2**20:
        reason = f"{episode_tokens(config)} tokens of {a_token} bytes exceed the {limit_mb} MB of a member in the store"
        raise ConfigError("learner.routing_replay", True, reason,
                          f"Let an episode have at most {limit_mb * 2**20 // a_token} tokens.")  # fmt: skip


def parameter_count(spec: ModelSpec) -> int:
    """The number of parameters, computed from the sizes without JAX."""
    attention = spec.width * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads) + 2 * spec.head_dim * spec.qk_norm
    attention += spec.head_dim * (spec.heads + 2 * spec.kv_heads) * spec.attention_bias
    norms = (4 if spec.post_norms else 2) * spec.width
    router = (spec.width + spec.router_bias) * spec.experts
    layer = attention + 3 * spec.width * spec.hidden * (spec.experts or 1) + router + norms
    head = spec.width if spec.value_head else 0 if spec.tied_embeddings else spec.vocab_size * spec.width
    return spec.layers * layer + spec.vocab_size * spec.width + head + spec.width


def active_parameter_count(spec: ModelSpec) -> int:
    """The number of parameters that one token is multiplied with: of all experts only its own count."""
    idle = spec.experts - spec.experts_per_token
    return parameter_count(spec) - spec.layers * 3 * spec.width * spec.hidden * idle
