"""Parameters as a flat dict by dotted names ("layers.00.attn.q"), initialized, or read from the folder of a model.

They are derived from the abstract state of `layers.Decoder`: shapes, dtypes and logical axes are declared only there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PRNGKeyArray

from jaxroll.config import Config, ModelConfig
from jaxroll.errors import ConfigError, DataError
from jaxroll.kernels import quantised
from jaxroll.kernels.quantised import Quantised
from jaxroll.models import folders, hf_config, moe
from jaxroll.models.families import ModelSpec
from jaxroll.models.folders import Converted, Index, Tensors, TensorShape, spec
from jaxroll.models.hf_config import names, of_experts
from jaxroll.models.layers import Block, Decoder
from jaxroll.sharding import Layout, Rules, placed_once, replicated, sharding

Params = dict[str, jax.Array]
Held = dict[str, Any]  # parameters in an engine: arrays, some quantized, and with the key DRAFT those of a draft model
DRAFT = "draft"


def abstract(spec: ModelSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype (float32) by name, sorted; nothing is allocated."""
    _, variables = _blueprint(spec)
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in variables.items()}


def served(spec: ModelSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """As `abstract`, but in the compute dtype (routers in float32), for an engine."""
    # Every use of a parameter casts it to the compute dtype first, so the results are bitwise equal, and bfloat16
    # parameters take half the memory. Routers compute in float32.
    dtype = jnp.dtype(spec.compute_dtype)
    return {
        name: leaf if moe.is_router(name) else jax.ShapeDtypeStruct(leaf.shape, dtype)
        for name, leaf in abstract(spec).items()
    }


def logical_axes(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The logical axes by name, as the module declares them."""
    _, variables = _blueprint(spec)
    return {name: variable.get_metadata("logical") for name, variable in variables.items()}


def shardings(spec: ModelSpec, mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
    """The sharding of every parameter by name, on this mesh under these rules."""
    axes = logical_axes(spec)
    return {name: sharding(mesh, axes[name], rules, leaf.shape) for name, leaf in abstract(spec).items()}


def init(spec: ModelSpec, key: PRNGKeyArray, mesh: Mesh, rules: Rules) -> Params:
    """Fresh parameters, created sharded; their values do not depend on the mesh."""
    where, prefix = shardings(spec, mesh, rules), "layers.{:02d}."
    of_layer = ((name, where[prefix.format(0) + name]) for name in _block_blueprint(spec)[1])
    rest = ((name, sharding) for name, sharding in where.items() if not name.startswith("layers."))
    everywhere = replicated(mesh)
    create, outer = _creators(spec, tuple(of_layer), tuple(rest), everywhere)
    found, drawn = {}, jax.device_put(np.uint32(1), everywhere)  # the embedding draws first
    for number in range(spec.layers):
        layer, drawn = create(key, drawn)
        found |= {prefix.format(number) + name: value for name, value in layer.items()}
    found |= outer(key, drawn)
    return {name: found[name] for name in where}


@functools.lru_cache(maxsize=32)
def _creators(
    spec: ModelSpec,
    of_layer: tuple[tuple[str, NamedSharding], ...],
    rest: tuple[tuple[str, NamedSharding], ...],
    everywhere: NamedSharding,
) -> tuple[Callable[..., tuple[Params, jax.Array]], Callable[..., Params]]:
    """The programs that create a layer and the parameters outside the layers, the same for all models of one shape."""
    # One program creates every layer: a program for all of them compiles in a time that grows with their number.
    create = jax.jit(functools.partial(_created, Block, spec), out_shardings=(dict(of_layer), everywhere))
    return create, jax.jit(functools.partial(_outer, spec), out_shardings=dict(rest))


def module(spec: ModelSpec, params: Mapping[str, jax.Array | Quantised]) -> Decoder:
    """The decoder with `params`; ValueError names missing or unknown parameters, and wrong shapes."""
    return _merged(*_blueprint(spec), params)


def _merged(
    graph: nnx.GraphDef, variables: dict[str, nnx.Variable], params: Mapping[str, jax.Array | Quantised]
) -> Decoder:
    _check(variables, params)
    filled = {name: variable.replace(params[name]) for name, variable in variables.items()}
    state = nnx.from_flat_state([(_path(name), variable) for name, variable in filled.items()])
    return nnx.merge(graph, state)


def outside(spec: ModelSpec, params: Mapping[str, jax.Array | Quantised]) -> Decoder:
    """The decoder with `params` but without its layers, whose parameters are left out."""
    graph, variables = _blueprint(spec, 0)
    found = {name: value for name, value in params.items() if not name.startswith(("layers.", f"{_LOOP}."))}
    return _merged(graph, variables, found)


def block(spec: ModelSpec, values: Mapping[str, jax.Array | Quantised]) -> Block:
    """One layer of the decoder with `values` by name without the layer's prefix ("attn.q")."""
    graph, variables = _block_blueprint(spec)
    state = [(_path(name), variable.replace(values[name])) for name, variable in variables.items()]
    return nnx.merge(graph, nnx.from_flat_state(state))


def block_axes(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The logical axes of one layer's parameters by name without the layer's prefix."""
    return {name: variable.get_metadata("logical") for name, variable in _block_blueprint(spec)[1].items()}


def _created(
    kind: Callable[[ModelSpec, nnx.Rngs], nnx.Module], spec: ModelSpec, key: PRNGKeyArray, drawn: jax.Array
) -> tuple[Params, jax.Array]:
    """The fresh parameters of a module by name, from draw number `drawn` on, and the number of the draw after them."""
    rngs = nnx.Rngs(params=key)
    rngs.params.count[...] = drawn
    variables = _named(nnx.state(kind(spec, rngs), nnx.Param))
    return {name: variable[...] for name, variable in variables.items()}, rngs.params.count[...]


def _outer(spec: ModelSpec, key: PRNGKeyArray, drawn: jax.Array) -> Params:
    """The fresh parameters outside the layers: the embedding has the first draw, the head that after the layers."""
    outside = functools.partial(Decoder, layers=0)
    first, _ = _created(outside, spec, key, jnp.zeros_like(drawn))
    return _created(outside, spec, key, drawn - 1)[0] | {"embed": first["embed"]}


@functools.lru_cache(maxsize=32)
def _blueprint(spec: ModelSpec, layers: int | None = None) -> tuple[nnx.GraphDef, dict[str, nnx.Variable]]:
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(spec, nnx.Rngs(params=0), layers)), nnx.Param)
    return graph, _named(state)


@functools.lru_cache(maxsize=32)
def _block_blueprint(spec: ModelSpec) -> tuple[nnx.GraphDef, dict[str, nnx.Variable]]:
    graph, state = nnx.split(nnx.eval_shape(lambda: Block(spec, nnx.Rngs(params=0))), nnx.Param)
    return graph, _named(state)


def _named(state: nnx.State) -> dict[str, nnx.Variable]:
    return dict(sorted((_name(path), variable) for path, variable in nnx.to_flat_state(state)))


def _name(path: tuple[Any, ...]) -> str:
    """The name "layers.00.attn.q" for ("layers", 0, "attn", "q"); a norm's name leaves out its `scale`."""
    parts = path[:-1] if path[-1] == "scale" else path
    return ".".join(f"{part:02d}" if isinstance(part, int) else part for part in parts)


def _path(name: str) -> tuple[str | int, ...]:
    parts = tuple(int(part) if part.isdigit() else part for part in name.split("."))
    return (*parts, "scale") if str(parts[-1]).endswith("norm") else parts


def _check(variables: Mapping[str, nnx.Variable], params: Mapping[str, jax.Array | Quantised]) -> None:
    missing, unknown = sorted(variables.keys() - params.keys()), sorted(params.keys() - variables.keys())
    if missing or unknown:
        raise ValueError(f"parameters do not fit the model: missing {missing}, unknown {unknown}")
    for name, variable in variables.items():
        if params[name].shape != variable.shape:
            raise ValueError(f"parameter {name} has shape {params[name].shape}, the model declares {variable.shape}")


# --- Layers in a loop: their parameters are stacked, and a program has one layer of every kind
#
# A model whose layers have windows in a pattern has a stack for each layer of the pattern.

_LOOP = "loop"


def stacked(
    spec: ModelSpec,
    params: Mapping[str, jax.Array],
    layout: Layout | None,
    merged: Callable[[str, jax.Array], jax.Array] | None = None,
) -> Params:
    """The parameters of the layers in the loop: "loop.00.attn.q" has those of the first layer of every period.

    Matrices are cast to the compute dtype before, as at their use; routers compute in float32. With `merged`, each
    stack is replaced by `merged(its name, itself)` before it is cast.
    """
    axes, dtype = block_axes(spec), jnp.dtype(spec.compute_dtype)

    def cast(name: str, value: jax.Array) -> jax.Array:
        return value.astype(dtype) if len(axes[name]) > 1 and not moe.is_router(name) else value

    if merged is None:
        return stacks(spec, params, layout, axes, before=cast)
    return stacks(
        spec, params, layout, axes, after=lambda full, value: cast(full.split(".", 2)[2], merged(full, value))
    )


def stacks(
    spec: ModelSpec,
    values: Mapping[str, jax.Array],
    layout: Layout | None,
    axes: Mapping[str, tuple[str | None, ...]],
    before: Callable[[str, jax.Array], jax.Array] | None = None,
    after: Callable[[str, jax.Array], jax.Array] | None = None,
) -> Params:
    """The arrays of the layers in the loop, stacked: "loop.00.attn.q" for the name "attn.q" of `axes` (logical axes).

    Each array is changed by `before(name, array)`, each stack by `after(full name, stack)`.
    """

    def one(at: int, name: str) -> jax.Array:
        numbers = range(at, layers_in_loop(spec), spec.period)
        leaves = [values[f"layers.{number:02d}.{name}"] for number in numbers]
        found = jnp.stack([before(name, leaf) for leaf in leaves] if before else leaves)
        found = after(f"{_LOOP}.{at:02d}.{name}", found) if after else found
        return found if layout is None else layout.constrain(found, ("layers", *axes[name]))

    return {f"{_LOOP}.{at:02d}.{name}": one(at, name) for at in range(spec.period) for name in axes}


def unstacked(spec: ModelSpec, values: Mapping[str, jax.Array]) -> Params:
    """`values` with the arrays of `stacked` divided, by the names of parameters."""
    found = {}
    for name, value in values.items():
        start, _, rest = name.partition(".")
        at, _, of_layer = rest.partition(".")
        if start != _LOOP:
            found[name] = value
            continue
        found |= {f"layers.{n * spec.period + int(at):02d}.{of_layer}": value[n] for n in range(value.shape[0])}
    return dict(sorted(found.items()))


def layers_in_loop(spec: ModelSpec) -> int:
    """The number of layers in the loop: those of whole periods."""
    return spec.layers // spec.period * spec.period


def in_layer(names: Iterable[str]) -> list[str]:
    """The names in a layer ("attn.q") of the arrays that `names` ("layers.00.attn.q") are."""
    first = "layers.00."
    return [name.removeprefix(first) for name in names if name.startswith(first)]


def in_loop(spec: ModelSpec, number: int, names: Iterable[str] | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """By name in a layer ("attn.q"): the names of the arrays of layer `number`, and of the stacks they are in.

    `names` are those in a layer; None: the model's parameters.
    """
    names = block_axes(spec) if names is None else names
    return (
        {name: f"layers.{number:02d}.{name}" for name in names},
        {name: f"{_LOOP}.{number % spec.period:02d}.{name}" for name in names},
    )


def of_cycles(spec: ModelSpec, stacks: Mapping[str, jax.Array | Quantised]) -> list[Held]:
    """The stacks by name in a layer ("attn.q"), for every layer of a period."""
    return [{name: stacks[f"{_LOOP}.{at:02d}.{name}"] for name in block_axes(spec)} for at in range(spec.period)]


def outside_loop(spec: ModelSpec, params: Mapping[str, jax.Array]) -> Params:
    """Those of `params` that are not of a layer in the loop."""
    inside = {full for number in range(layers_in_loop(spec)) for full in in_loop(spec, number)[0].values()}
    return {name: value for name, value in params.items() if name not in inside}


def held(spec: ModelSpec, params: Mapping[str, jax.Array], layout: Layout | None) -> Held:
    """The parameters as an engine holds them: with the layers in a loop (`spec.scan`) stacked, and with the matrices of
    the layers quantized (`spec.weight_dtype`), a scale for every output.
    """
    found = outside_loop(spec, params) | stacked(spec, params, layout) if spec.scan else dict(params)
    if not spec.weight_dtype:
        return dict(found)
    return {
        name: quantised.columns(value, spec.weight_dtype, inputs) if (inputs := _inputs(name)) else value
        for name, value in found.items()
    }


def _inputs(name: str) -> tuple[int, ...]:
    """The axes that a product sums over, of a parameter that is quantized; empty for others."""
    *start, kind = name.split(".")
    if start[-1:] not in (["attn"], ["mlp"]) or kind not in _MATRICES:
        return ()
    first = int(start[0] == _LOOP)  # after the axis of the layers
    return tuple(range(first, first + _MATRICES[kind]))


_MATRICES = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}  # with the number of input axes


def held_shardings(spec: ModelSpec, mesh: Mesh, rules: Rules) -> dict[str, Any]:
    """The sharding of every array of `held`."""
    where, axes = logical_axes(spec), block_axes(spec)
    shapes = jax.eval_shape(functools.partial(held, spec, layout=None), abstract(spec))

    def of(name: str) -> Any:
        logical = where[name] if name in where else ("layers", *axes[name.split(".", 2)[2]])
        found, inputs = shapes[name], _inputs(name)
        if not isinstance(found, Quantised):
            return sharding(mesh, logical, rules, found.shape)
        outputs = tuple(axis for at, axis in enumerate(logical) if at not in inputs)
        both = (found.values, logical), (found.scales, outputs)
        return Quantised(*(sharding(mesh, names, rules, array.shape) for array, names in both))  # pyright: ignore[reportArgumentType]

    return {name: of(name) for name in shapes}


def abstract_held(spec: ModelSpec, mesh: Mesh, rules: Rules) -> dict[str, Any]:
    """The arrays of `held` of what an engine is served, as ShapeDtypeStructs with shardings."""
    shapes = jax.eval_shape(functools.partial(held, spec, layout=None), served(spec))
    place = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)  # noqa: E731
    found = jax.tree.map(place, shapes, held_shardings(spec, mesh, rules))
    return found | ({DRAFT: abstract_held(spec.draft, mesh, rules)} if spec.draft else {})


def draft_model(config: Config, spec: ModelSpec, mesh: Mesh, rules: Rules) -> Params | None:
    """The parameters of `spec.draft`, from its folder, as an engine is served them; None without a draft model."""
    if (draft := spec.draft) is None:
        return None
    with folders.of_draft(config.sampler.draft_model):
        values = weights(ModelConfig(path=config.sampler.draft_model), draft)
    where = shardings(draft, mesh, rules)
    return {
        name: placed_once(np.asarray(values[name], leaf.dtype), where[name]) for name, leaf in served(draft).items()
    }


# --- Weights of an imported model: read from a folder (see `folders`), and conversion between layouts

__all__ = ["leaves", "names", "of_experts", "spec", "stored", "weights"]


def key(config: Config) -> PRNGKeyArray:
    """The random key of a run's initial parameters."""
    return jax.random.key(config.run.seed)


def weights(config: ModelConfig, model: ModelSpec) -> Mapping[str, np.ndarray]:
    """The parameters in the folder `config.path`, float32 by flat name; each (or a slice of it) is read on access.

    ConfigError, before any is read, when a tensor is missing, unexpected or has a wrong shape.
    """
    raw = leaves(Path(config.path), model)
    return Converted(
        raw,
        lambda name: np.asarray(raw[name], np.float32),
        lambda name, index: np.asarray(raw.slice_of(name, index), np.float32),
    )


def leaves(folder: Path, model: ModelSpec) -> Converted:
    """As `weights`, from a folder of either kind, but in the stored dtype."""
    tensors, shapes = folders.weight_tensors(folder), abstract(model)
    model = folders.as_stored(folder, model)
    fresh = shapes.keys() - abstract(model).keys()  # biases of routers, which start at 0
    try:
        stored(folder, model, tensors)
    except DataError as error:
        reason, remedy = str(error), "Give a folder whose weights are those of its config.json."
        raise ConfigError("model.path", str(folder), reason, remedy) from error

    def slice_of(ours: str, index: Index) -> np.ndarray:
        at = shapes[ours].shape
        if ours in fresh:
            return np.zeros(at, np.float32)[index]
        return tensors[ours][index] if folders.is_ours(folder) else leaf(model, ours, at, tensors.__getitem__, index)

    return Converted(shapes, lambda ours: slice_of(ours, (slice(None),) * len(shapes[ours].shape)), slice_of)


def stored(folder: Path, model: ModelSpec, tensors: Tensors) -> dict[str, TensorShape]:
    """The stored dtype and JaxRoll's shape of every parameter; DataError when one does not match `model`."""
    if wrong := folders.weights_error(folder, model, tensors):
        raise DataError(wrong)
    ours, found = folders.is_ours(folder), {}
    for own_name, leaf in abstract(model).items():
        if not ours:
            found[own_name] = TensorShape(_stored_dtype(model, own_name, leaf.shape, tensors), leaf.shape)
            continue
        held = tensors.leaf(own_name)
        if held.shape != leaf.shape:
            raise DataError(f"array {own_name!r} has shape {held.shape}; this model needs {leaf.shape}")
        found[own_name] = TensorShape(held.dtype, leaf.shape)
    return found


# --- Conversion between Hugging Face's and JaxRoll's layouts: pure functions of numpy arrays
#
# Hugging Face's linear weights are [out, in] with heads and head dimension in one axis; JaxRoll's are
# [in, heads, head_dim]. The dtype is kept. `ours` is JaxRoll's name of a parameter, `at` its shape.


def _stored_dtype(model: ModelSpec, ours: str, at: tuple[int, ...], tensors: Tensors) -> np.dtype:
    """The dtype of the tensors of the parameter `ours`; DataError when a shape does not match or dtypes differ."""
    held = {theirs: tensors.leaf(theirs) for theirs in names(model, ours)}
    for theirs, leaf in held.items():
        _check_shape(ours, at[1:] if of_experts(ours) else at, theirs, leaf.shape)
    dtypes = {leaf.dtype for leaf in held.values()}
    if len(dtypes) > 1:
        raise DataError(f"the tensors of {ours!r} have several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    return dtypes.pop()


def imported(spec: ModelSpec, tensor: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    """JaxRoll's parameters (float32) from `tensor(Hugging Face name)`; DataError for a missing or misshapen tensor."""
    shapes = abstract(spec)
    return {ours: np.asarray(leaf(spec, ours, at.shape, tensor), np.float32) for ours, at in shapes.items()}


def exported(spec: ModelSpec, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face's tensors by name, contiguous, in the dtype of `values`."""
    return {
        theirs_name: theirs(ours, part)
        for ours in abstract(spec)
        for theirs_name, part in parts(spec, ours, np.asarray(values[ours])).items()
    }


def parts(spec: ModelSpec, ours: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """The slices of the parameter `ours` that are Hugging Face tensors of their own, by their names there."""
    return dict(zip(names(spec, ours), value if of_experts(ours) else (value,), strict=True))


def leaf(
    spec: ModelSpec,
    ours: str,
    at: tuple[int, ...],
    tensor: Callable[[str], np.ndarray],
    index: Index | None = None,
) -> np.ndarray:
    """The parameter `ours` of shape `at`, or its slice `index`, contiguous; DataError for a misshapen tensor, too.

    Of memory-mapped tensors it reads only what is in the slice.
    """
    index = index or (slice(None),) * len(at)
    if not of_experts(ours):
        return np.ascontiguousarray(_one(ours, at, hf_config.name(spec, ours), tensor)[index])
    wanted, made = names(spec, ours)[index[0]], None
    for expert, theirs in enumerate(wanted):  # one expert in memory at a time, in addition to the whole
        value = _one(ours, at[1:], theirs, tensor)[index[1:]]
        made = np.empty((len(wanted), *value.shape), value.dtype) if made is None else made
        made[expert] = value
    assert made is not None
    return made


def _one(ours: str, at: tuple[int, ...], theirs: str, tensor: Callable[[str], np.ndarray]) -> np.ndarray:
    """The tensor `theirs` in our layout: a view."""
    try:
        value = np.asarray(tensor(theirs))
    except KeyError as error:
        raise DataError(f"the checkpoint has no tensor {theirs!r}, which {ours!r} is read from") from error
    _check_shape(ours, at, theirs, value.shape)
    return (value.T if _transposed(ours) else value).reshape(at)


def _check_shape(ours: str, at: tuple[int, ...], theirs: str, found: tuple[int, ...]) -> None:
    """Raise DataError when the shape `found` of the Hugging Face tensor is not that of the parameter `ours`."""
    if found != shape(ours, at):
        raise DataError(f"tensor {theirs!r} has shape {found}; {ours!r} of this model needs {shape(ours, at)}")


def shape(ours: str, at: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the Hugging Face tensor of the parameter `ours` with shape `at`; [out, in] for a linear weight."""
    if ours.endswith("_bias"):
        return (math.prod(at),)
    if not _transposed(ours):
        return at
    inputs = at[:-1] if ours.endswith(".attn.o") else at[:1]
    return math.prod(at) // math.prod(inputs), math.prod(inputs)


def theirs(ours: str, value: np.ndarray) -> np.ndarray:
    """The Hugging Face tensor of the parameter `ours`, contiguous."""
    rows, *columns = shape(ours, value.shape)
    return np.ascontiguousarray(value.reshape(*columns, rows).T if _transposed(ours) else value.reshape(rows, *columns))


def _transposed(ours: str) -> bool:
    return not (ours == "embed" or ours.endswith(("norm", "_bias")))
