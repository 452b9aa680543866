"""Models that clients train: forward and backward passes, optimizer steps, and their states on disk.

Everything runs on one JAX thread (`loop_thread.DeviceThread`). Models with adapters share the frozen parameters
of the base model; each has its own adapters, moments and gradients. A model trained whole has its own parameters.

R rows, T tokens of a row. The datums of a request are packed into rows (`learner.packing`), in micro-batches of a few
shapes. T is a power of two, so that a training loop with many lengths compiles few programs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jaxroll import disk
from jaxroll import sharding as layouts
from jaxroll.algorithms import advantages, losses
from jaxroll.config import Config
from jaxroll.config.derived import model_folder, request_tokens
from jaxroll.config.schema import LORA_TARGETS
from jaxroll.data import sources
from jaxroll.errors import ConfigError, DataError
from jaxroll.kernels import choice
from jaxroll.learner import lora, packing, peft, step, weights
from jaxroll.learner import state as states
from jaxroll.learner.lora import Lora
from jaxroll.models import folders, transformer
from jaxroll.models import params as model_params
from jaxroll.models.families import ModelSpec
from jaxroll.models.folders import TensorShape
from jaxroll.protocols import Tokenizer
from jaxroll.text import tokenizers
from jaxroll.tinker.messages import Datum, ForwardBackward

ALPHA = 32.0  # the adapters' product is multiplied by ALPHA / rank, as Tinker's documentation says
SHORTEST = 128  # tokens of the shortest row
ABOUT, STATE = "about.json", "state.safetensors"
_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
Params = dict[str, jax.Array]


# --- losses: sums over tokens, as the public documentation of Tinker defines them
#
# Gradients flow through `logprob` only. Weights are 1 where the client sends none.


@dataclass(frozen=True)
class Terms:
    """Per-token inputs of a loss, float32 [R, T]; `segments` (int32) numbers the datums of a row from 1."""

    logprob: Float[Array, "R T"]
    behaviour: Float[Array, "R T"]
    advantages: Float[Array, "R T"]
    weights: Float[Array, "R T"]
    segments: Array


jax.tree_util.register_dataclass(Terms)
Loss = Callable[[Terms, Mapping[str, Any]], Array]


def _cross_entropy(terms: Terms, _: Mapping[str, Any]) -> Array:
    return -terms.weights * terms.logprob


def _importance_sampling(terms: Terms, _: Mapping[str, Any]) -> Array:
    return -terms.weights * losses.ratio(terms.logprob, terms.behaviour) * terms.advantages


def _ppo(terms: Terms, settings: Mapping[str, Any]) -> Array:
    ratio = losses.ratio(terms.logprob, terms.behaviour)
    bounded = jnp.clip(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -terms.weights * jnp.minimum(ratio * terms.advantages, bounded * terms.advantages)


def _cispo(terms: Terms, settings: Mapping[str, Any]) -> Array:
    ratio = jax.lax.stop_gradient(losses.ratio(terms.logprob, terms.behaviour))
    bounded = jnp.clip(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -terms.weights * bounded * terms.logprob * terms.advantages


def _dro(terms: Terms, settings: Mapping[str, Any]) -> Array:
    distance = losses.log_ratio(terms.logprob, jax.lax.stop_gradient(terms.behaviour))
    return -terms.weights * (terms.logprob * terms.advantages - 0.5 * settings["beta"] * jnp.square(distance))


def _gspo(terms: Terms, settings: Mapping[str, Any]) -> Array:
    mask = (terms.segments > 0) & (terms.weights > 0)
    ratio = losses.mean_sequence_ratio(terms.logprob, terms.behaviour, mask, terms.segments)
    bounded = jnp.clip(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])
    count = jnp.maximum(advantages.totals(mask.astype(jnp.float32), terms.segments), 1.0)
    gain = jnp.minimum(ratio * terms.advantages, bounded * terms.advantages)
    return -jnp.where(mask, gain / count, 0.0)  # one term for each sequence, divided among its tokens


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_POLICY = ("target_tokens", "logprobs", "advantages")


@dataclass(frozen=True)
class LossKind:
    """A loss: its function, the tensors that each datum needs, and its settings with their defaults."""

    loss: Loss
    needs: tuple[str, ...]
    settings: Mapping[str, float]


LOSSES: Mapping[str, LossKind] = {
    "cross_entropy": LossKind(_cross_entropy, ("target_tokens",), {}),
    "importance_sampling": LossKind(_importance_sampling, _POLICY, {}),
    "ppo": LossKind(_ppo, _POLICY, _CLIP),
    "cispo": LossKind(_cispo, _POLICY, _CLIP),
    "dro": LossKind(_dro, _POLICY, {"beta": 0.05}),
    "gspo": LossKind(_gspo, _POLICY, _CLIP),
}
INTS = ("tokens", "positions", "segments", "targets")  # streams of every program, int32 [R, T]
_STREAMS = {"logprobs": "behaviour", "advantages": "advantages", "weights": "weights"}


# --- one model


@dataclass
class ClientModel:
    """A model of one client: trained parameters (all, or adapters), Adam's state, and gradients since the last step.

    `number` distinguishes the models of this server, `saves` counts published weights. After a failed pass `broken` is
    its reason: the next optimizer step is refused, because its gradients would be incomplete.
    """

    number: int
    lora: Lora | None
    params: Params
    moments: Any
    grads: Params | None = None
    steps: int = 0
    saves: int = 0
    broken: str = ""


class Trainer:
    """The base model on the learner's mesh, and the models that clients train. Call it on the JAX thread."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.config = config
        self.text, self.spec = tokenizer(config)
        mesh = layouts.build(config.learner.mesh)
        self.layout = layout = layouts.Layout(mesh, layouts.LEARNER)
        self.base = initial(config, run_dir, layout)
        self.context = request_tokens(config)
        self._buckets = packing.learner_buckets(config.learner)
        self._rows = NamedSharding(mesh, layouts.batch_spec(layout.rules))
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._made = 0

    # --- creation

    def create(self, rank: int | None, seed: int, *, attention: bool = True, mlp: bool = True) -> ClientModel:
        """A fresh model: adapters of `rank` on the chosen parts, or with None all parameters of the base model."""
        if rank is None:
            # Copied: a step donates its parameters.
            return self._fresh(None, jax.tree.map(jnp.copy, self.base))
        parts = {"attn": attention, "mlp": mlp}
        targets = tuple(name for name in LORA_TARGETS if parts[name.partition(".")[0]])
        if rank < 1 or not targets:
            raise DataError(f"lora_config: rank {rank} with {len(targets)} adapted parameters; both need at least 1")
        adapters = Lora(rank, ALPHA, targets)
        return self._fresh(adapters, lora.init(self.spec, self.layout, adapters, jax.random.key(seed)))

    def _fresh(self, adapters: Lora | None, params: Params) -> ClientModel:
        self._made += 1
        moments = jax.jit(_adam(0.9, 0.95, 1e-12).init, out_shardings=self._moment_shardings(adapters))(params)
        return ClientModel(self._made, adapters, params, moments)

    def shardings(self, adapters: Lora | None) -> Mapping[str, NamedSharding]:
        """The shardings of a model's trained parameters."""
        if adapters:
            return lora.shardings(self.spec, self.layout, adapters)
        return model_params.shardings(self.spec, self.layout.mesh, self.layout.rules)

    def _moment_shardings(self, adapters: Lora | None) -> Any:
        where, everywhere = dict(self.shardings(adapters)), layouts.replicated(self.layout.mesh)
        return cast(Any, optax.ScaleByAdamState)(count=everywhere, mu=where, nu=where)

    # --- passes

    def run(self, model: ClientModel, asked: ForwardBackward) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """The log-probs of every datum, and metrics; adds the gradients to the model's unless `forward_only`.

        DataError for datums that the loss cannot use; `model.broken` then says so.
        """
        try:
            kind, settings = self._checked(asked)
            return self._run(model, asked, kind, settings)
        except Exception as error:
            if not asked.forward_only:
                model.broken = str(error)
            if not isinstance(error, DataError):
                model.grads = None  # they may have been donated
            raise

    def _checked(self, asked: ForwardBackward) -> tuple[LossKind, dict[str, float]]:
        kind = LOSSES.get(asked.loss)
        if kind is None:
            raise DataError(f"loss_fn = {asked.loss!r}: this server has {', '.join(LOSSES)}")
        if unknown := sorted(set(asked.settings) - set(kind.settings)):
            known = ", ".join(kind.settings) or "none"
            raise DataError(f"loss_fn_config.{unknown[0]} is no setting of {asked.loss} (it has: {known})")
        for number, datum in enumerate(asked.data):
            self._check_datum(asked.loss, kind, number, datum)
        return kind, {**kind.settings, **asked.settings}

    def _check_datum(self, loss: str, kind: LossKind, number: int, datum: Datum) -> None:
        length = len(datum.tokens)
        if not 1 <= length <= self.context:
            raise DataError(f"datum {number} has {length} tokens; this server takes 1 to {self.context}")
        if missing := [name for name in kind.needs if name not in datum.inputs]:
            raise DataError(f"datum {number} lacks {missing[0]}, which {loss} needs")
        if unknown := sorted(set(datum.inputs) - {*kind.needs, "weights"}):
            raise DataError(f"datum {number} has {unknown[0]}, which {loss} does not use")
        for name, ids in (("model_input", datum.tokens), ("target_tokens", datum.inputs["target_tokens"])):
            if ids.min() < 0 or ids.max() >= self.spec.vocab_size:
                raise DataError(
                    f"datum {number}: {name} has ids outside of 0..{self.spec.vocab_size - 1}, the vocabulary"
                )
        for name in datum.inputs.keys() & _STREAMS.keys():
            if not np.isfinite(datum.inputs[name]).all():
                raise DataError(f"datum {number}: {name} has numbers that are not finite")

    def _run(
        self, model: ClientModel, asked: ForwardBackward, kind: LossKind, settings: Mapping[str, float]
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        base = self.base if model.lora else {}
        given = {name: jnp.float32(value) for name, value in settings.items()}
        found: list[dict[str, np.ndarray]] = [{} for _ in asked.data]
        grads = None if asked.forward_only else model.grads
        pending, total = [], 0.0
        for rows, streams in self._packed(asked.data):
            placed = layouts.placed(streams, self._rows)
            if asked.forward_only:
                done = self._program("forward", model.lora, asked.loss)(model.params, base, placed, given)
            else:
                grads = grads or self._program("zeros", model.lora)()
                grads, *done = self._program("backward", model.lora, asked.loss)(
                    model.params, base, grads, placed, given
                )
            pending.append((rows, done))
        for rows, (logprobs, elementwise) in pending:
            logprobs, elementwise = layouts.fetched(logprobs), layouts.fetched(elementwise)
            for row, placed_here in enumerate(rows):
                for datum, start, length in placed_here:
                    here = (row, slice(start, start + length))
                    found[datum] = {"logprobs": logprobs[here], "elementwise_loss": elementwise[here]}
                    total += float(elementwise[here].sum(dtype=np.float64))
        if not asked.forward_only:
            model.grads = grads
        return found, {"loss:sum": total}

    def _packed(self, data: Sequence[Datum]) -> list[tuple[list[list[tuple[int, int, int]]], dict[str, np.ndarray]]]:
        """Micro-batches: for each row the (datum, start, length) in it, and the streams [R, T]."""
        if not data:
            return []
        lengths = [len(datum.tokens) for datum in data]
        tokens = SHORTEST
        while tokens < max(lengths):
            tokens *= 2
        bins, batches = packing.first_fit_decreasing(lengths, tokens), []
        for count in packing.split_rows(len(bins), self._buckets):
            taken, bins = bins[:count], bins[count:]
            ints = {
                name: np.zeros((count, tokens), np.int32) for name in ("tokens", "positions", "segments", "targets")
            }
            floats = {name: np.zeros((count, tokens), np.float32) for name in _STREAMS.values()}
            rows = []
            for row, members in enumerate(taken):
                start, here = 0, []
                for segment, number in enumerate(members, start=1):
                    datum, length = data[number], lengths[number]
                    span = (row, slice(start, start + length))
                    ints["tokens"][span], ints["positions"][span] = datum.tokens, np.arange(length)
                    ints["segments"][span], ints["targets"][span] = segment, datum.inputs["target_tokens"]
                    floats["weights"][span] = 1.0
                    for name, stream in _STREAMS.items():
                        if name in datum.inputs:
                            floats[stream][span] = datum.inputs[name]
                    here.append((number, start, length))
                    start += length
                rows.append(here)
            batches.append((rows, ints | floats))
        return batches

    # --- optimizer steps

    def step(self, model: ClientModel, params: Mapping[str, float]) -> dict[str, float]:
        """One Adam step with the gradients since the last one, and its metrics.

        DataError if there are none, or if the pass that should have made some of them failed: those are discarded.
        """
        if model.broken:
            reason, model.broken, model.grads = model.broken, "", None
            raise DataError(f"a forward_backward of this step failed, so its gradients are discarded: {reason}")
        if model.grads is None:
            raise DataError("there are no gradients: call forward_backward before optim_step")
        values = np.array([params[name] for name in _ADAM], np.float32)
        if not np.isfinite(values).all():
            raise DataError("adam_params: every number must be finite")
        grads, model.grads = model.grads, None
        apply = self._program("apply", model.lora)
        model.params, model.moments, norm = apply(model.params, model.moments, grads, values)
        model.steps += 1
        return {"grad_norm:mean": float(norm)}

    # --- programs, compiled when a shape is first used

    def _program(self, name: str, adapters: Lora | None, loss: str = "") -> Callable[..., Any]:
        key = (name, adapters, loss)
        if key not in self._programs:
            where = self.shardings(adapters)
            if name == "zeros":
                shapes = lora.abstract(self.spec, adapters) if adapters else model_params.abstract(self.spec)
                zeros = {one: functools.partial(jnp.zeros, leaf.shape, jnp.float32) for one, leaf in shapes.items()}
                made = jax.jit(lambda: {one: make() for one, make in zeros.items()}, out_shardings=dict(where))
            elif name == "apply":
                out = (dict(where), self._moment_shardings(adapters), layouts.replicated(self.layout.mesh))
                made = jax.jit(_applied, donate_argnums=(0, 1), out_shardings=out)
            elif name == "backward":
                backward = functools.partial(self._backward, adapters, LOSSES[loss].loss)
                made = jax.jit(backward, donate_argnums=2, out_shardings=(dict(where), self._rows, self._rows))
            else:
                forward = functools.partial(self._terms, adapters, LOSSES[loss].loss)
                made = jax.jit(forward, out_shardings=(self._rows, self._rows))
            self._programs[key] = made
        return self._programs[key]

    def _terms(
        self, adapters: Lora | None, loss: Loss, params: Params, base: Params, streams: Params, settings: Params
    ) -> tuple[Array, Array]:
        """log π and the loss of every token, 0 where there is none."""
        model = lora.merged(self.spec, self.layout, adapters, base, params) if adapters else params
        logprob = target_logprobs(self.config, self.spec, self.layout, model, streams)
        given = {name: streams[name] for name in (*_STREAMS.values(), "segments")}
        terms = Terms(logprob, **given)
        here = streams["segments"] > 0
        return jnp.where(here, logprob, 0.0), jnp.where(here, loss(terms, settings), 0.0)

    def _backward(
        self,
        adapters: Lora | None,
        loss: Loss,
        params: Params,
        base: Params,
        grads: Params,
        streams: Params,
        settings: Params,
    ) -> tuple[Params, Array, Array]:
        def total(trained: Params) -> tuple[Array, tuple[Array, Array]]:
            logprobs, elementwise = self._terms(adapters, loss, trained, base, streams, settings)
            return elementwise.sum(), (logprobs, elementwise)

        new, done = jax.grad(total, has_aux=True)(params)
        return jax.tree.map(jnp.add, grads, new), *done

    # --- states on disk

    def save(self, model: ClientModel, folder: Path, *, whole: bool, about: Mapping[str, Any]) -> None:
        """Write the parameters into `folder`, with `whole` and Adam's state. Adapters alone are in PEFT's format."""
        described = {**about, "lora": model.lora and asdict(model.lora), "steps": model.steps, "whole": whole}
        with weights.written_whole(folder) as draft:
            disk.replace_text(draft / ABOUT, json.dumps(described, indent=1))
            if not whole and model.lora:
                held = {name: layouts.fetched(value) for name, value in model.params.items()}
                base = str(model_folder(self.config) or "")
                peft.write(draft, _learner(self.config, model.lora), self.spec, held, np.dtype(np.float32), base)
                return
            arrays = dict(model.params)
            if whole:
                arrays |= {f"mu/{name}": value for name, value in model.moments.mu.items()}
                arrays |= {f"nu/{name}": value for name, value in model.moments.nu.items()}
            leaves = {name: TensorShape(np.dtype(np.float32), value.shape) for name, value in arrays.items()}
            folders.write(draft / STATE, leaves, lambda name: np.asarray(layouts.fetched(arrays[name])))

    def load(self, folder: Path, *, optimizer: bool, into: ClientModel | None = None) -> ClientModel:
        """A model (or `into`) with the parameters in `folder`, and Adam's state if `optimizer`. DataError otherwise."""
        about = self.about(folder)
        adapters = Lora(**{**about["lora"], "targets": tuple(about["lora"]["targets"])}) if about["lora"] else None
        if optimizer and not about["whole"]:
            raise DataError(f"{folder.name} holds weights for sampling, without the optimizer's state")
        if into is not None and into.lora != adapters:
            raise DataError(f"the weights are those of {adapters or 'all parameters'}, the model trains {into.lora}")
        held = self._held(folder, adapters, whole=about["whole"])
        where = self.shardings(adapters)
        params = {name: layouts.placed_once(np.asarray(held[name], np.float32), where[name]) for name in where}
        fresh = self._fresh(adapters, params)
        if into is not None:
            self._made -= 1
            fresh = replace(fresh, number=into.number, saves=into.saves)
        if optimizer:
            mu, nu = (
                {
                    name: layouts.placed_once(np.asarray(held[f"{part}/{name}"], np.float32), where[name])
                    for name in where
                }
                for part in ("mu", "nu")
            )
            count = layouts.placed_once(np.array(about["steps"], np.int32), layouts.replicated(self.layout.mesh))
            fresh.moments, fresh.steps = optax.ScaleByAdamState(count, mu, nu), about["steps"]
        return fresh

    def _held(self, folder: Path, adapters: Lora | None, *, whole: bool) -> Mapping[str, np.ndarray]:
        if whole or adapters is None:
            return folders.opened(folder / STATE)
        try:
            return peft.read(replace(_learner(self.config, adapters), lora_path=str(folder)), self.spec)
        except ConfigError as error:
            raise DataError(str(error)) from error

    def about(self, folder: Path) -> dict[str, Any]:
        """The description that `save` wrote; DataError if the folder holds none."""
        try:
            return disk.read_json(folder / ABOUT)
        except OSError as error:
            raise DataError(f"there are no weights {folder.parent.name}/{folder.name} on this server") from error


def _learner(config: Config, adapters: Lora) -> Any:
    return replace(
        config.learner, lora_rank=adapters.rank, lora_alpha=adapters.alpha, lora_targets=adapters.targets, lora_path=""
    )


def tokenizer(config: Config) -> tuple[Tokenizer, ModelSpec]:
    """The tokenizer and the model of `config`."""
    text = tokenizers.build(config.tokenizer, sources.alphabet(config.task))
    return text, model_params.spec(config.model, text.vocab_size)


def initial(config: Config, run_dir: Path, layout: layouts.Layout) -> Params:
    """The parameters of the base model on the devices of `layout`: the warm start's, `model.path`'s, or fresh ones."""
    _, spec = tokenizer(config)
    values = weights.initial(config, run_dir, spec)
    if values is None:
        return model_params.init(spec, model_params.key(config), layout.mesh, layout.rules)
    return states.placed(values, spec, layout)


def target_logprobs(
    config: Config, spec: ModelSpec, layout: layouts.Layout, params: Params, streams: Mapping[str, Any]
) -> Float[Array, "R T"]:
    """log π at temperature 1 of each token of `streams["targets"]`, given the tokens up to its own position."""
    tokens, segments = streams["tokens"], streams["segments"]
    site = choice.Site(
        spec,
        layouts.platform(layout.mesh),
        layout.mesh.shape["tensor"] * layout.mesh.shape["sequence"],
        tokens.shape[1],
    )
    attention = choice.choose("packed", config.learner.attention, site)
    hidden, _ = transformer.forward_with_load(
        spec, params, tokens, streams["positions"], segments, layout=layout, attention=attention.name
    )
    # `token_terms` predicts a token from the hidden state before it; here every target has its own position.
    shifted = jnp.roll(hidden, -1, axis=1)
    return step.token_terms(spec, layout, 1.0, params, shifted, streams["targets"], config.learner.logits_mb).logprob


def _adam(beta1: Any, beta2: Any, eps: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(beta1, beta2, eps)


def _applied(params: Params, moments: Any, grads: Params, values: Array) -> tuple[Params, Any, Array]:
    """The parameters and moments after one step of Adam with decoupled weight decay, and the gradients' norm.

    `values` are those of `_ADAM`, so that another learning rate compiles nothing.
    """
    rate, beta1, beta2, eps, decay, clip = values
    norm = optax.tree.norm(grads)
    scale = jnp.where((clip > 0) & (norm > clip), clip / jnp.maximum(norm, 1e-30), 1.0)
    grads = jax.tree.map(lambda grad: grad * scale, grads)
    updates, moments = _adam(beta1, beta2, eps).update(grads, moments)
    return jax.tree.map(lambda p, u: p - rate * (u + decay * p), params, updates), moments, norm
