"""Bodies of the Tinker protocol in protobuf: training requests that clients send, and the results that they fetch.

The field numbers are those of the public SDK (tinker 0.38). The messages are built from the table below, so that no
generated code is needed. Everything else in the protocol is JSON (`server`).

N tokens of one datum: its input tokens x₀ … x_{N−1}, and the targets, of which target i is predicted from x₀ … xᵢ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from jaxroll.errors import DataError
from jaxroll.protocols import Completion, SamplingParams

# Each line: the message, then `number name type` of its fields. `*` marks repeated fields; other types are messages.
_TABLE = """
SampleResponse        1 sequences SampledSequence*  2 prompt_logprobs bytes
SampledSequence       1 stop_reason int32  2 tokens bytes  3 logprobs bytes
Tensor                1 dense bytes  2 sparse_csr SparseCsr  3 dtype int32  4 shape int64*
SparseCsr             1 values bytes
BatchedTensor         1 data bytes  2 offsets bytes  3 dtype int32  4 trailing_shape int64*
ArrayRecord           1 type_tag string  2 fields RecordField*  3 num_datums int64
RecordField           1 key string  2 value BatchedTensor
ForwardBackwardOutput 1 loss_fn_output_type string  2 loss_fn_outputs ArrayRecord*  3 metrics Metric*
Metric                1 key string  2 value double
ForwardBackwardRequest 1 model_id string  2 seq_id int32  3 data Datum*  4 loss_fn string  6 forward_only bool \
                      7 loss_fn_config_v2 Setting*
Setting               1 key string  2 value SettingValue
SettingValue          1 number double  2 text string
Datum                 1 model_input Chunk*  2 loss_fn_inputs LossInput*
LossInput             1 key string  2 value Tensor
Chunk                 1 encoded_text Text
Text                  1 tokens bytes
"""
_PACKAGE = "jaxroll_tinker"
_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}  # by their number on the wire
_STOP, _LENGTH = 0, 1


def _classes() -> dict[str, Any]:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for line in _TABLE.strip().replace("\\\n", "").splitlines():
        name, *words = line.split()
        made = file.message_type.add(name=name)
        for number, field, kind in zip(words[::3], words[1::3], words[2::3], strict=True):
            one = made.field.add(name=field, number=int(number))
            one.label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            plain = kind.rstrip("*")
            if plain[0].isupper():
                one.type, one.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{plain}"
            else:
                one.type = getattr(kinds, f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name], pool)


_MESSAGES = {name.rpartition(".")[2]: kind for name, kind in _classes().items()}


@dataclass(frozen=True)
class Datum:
    """One sequence: `tokens` (int32 [N]) and the tensors of its loss by name, each [N]."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ForwardBackward:
    """A request for the log-probs of `data` and, unless `forward_only`, the gradients of the loss `loss`."""

    loss: str
    settings: Mapping[str, float]
    forward_only: bool
    data: Sequence[Datum]


def opened(body: bytes) -> Any:
    """The message ForwardBackwardRequest in `body`, with `model_id` and `seq_id`. DataError if it is not one."""
    asked = _MESSAGES["ForwardBackwardRequest"]()
    try:
        asked.ParseFromString(body)
    except message.DecodeError as error:
        raise DataError(f"the body is not a ForwardBackwardRequest: {error}") from error
    return asked


def forward_backward(asked: Any) -> ForwardBackward:
    """The request in an `opened` message. DataError for contents that this server cannot train on."""
    settings = {}
    for one in asked.loss_fn_config_v2:
        if one.value.text:
            raise DataError(f"loss_fn_config.{one.key} = {one.value.text!r}: a number is needed")
        settings[one.key] = one.value.number
    data = [_datum(one, number) for number, one in enumerate(asked.data)]
    return ForwardBackward(asked.loss_fn, settings, asked.forward_only, data)


def _datum(given: Any, number: int) -> Datum:
    if any(not chunk.HasField("encoded_text") for chunk in given.model_input):
        raise DataError(
            f"datum {number}: its model_input holds something else than tokens, which this model cannot read"
        )
    texts = [np.frombuffer(chunk.encoded_text.tokens, "<i4") for chunk in given.model_input]
    tokens = np.concatenate([np.zeros(0, np.int32), *texts]).astype(np.int32)
    inputs = {one.key: _tensor(one.value, f"datum {number}: {one.key}") for one in given.loss_fn_inputs}
    for name, value in inputs.items():
        if value.shape != tokens.shape:
            raise DataError(
                f"datum {number}: {name} has shape {list(value.shape)}, but model_input has {len(tokens)} "
                "tokens: give one number for each"
            )
    return Datum(tokens, inputs)


def _tensor(given: Any, name: str) -> np.ndarray:
    if given.HasField("sparse_csr"):
        raise DataError(f"{name} is a sparse tensor: give one target for each token")
    if (dtype := _DTYPES.get(given.dtype)) is None or len(given.dense) % dtype.itemsize:
        raise DataError(f"{name} has the unknown dtype {given.dtype}, or is cut off")
    flat, shape = np.frombuffer(given.dense, dtype), tuple(given.shape)
    if shape and np.prod(shape) != flat.size:
        raise DataError(f"{name} has {flat.size} numbers, and the shape {list(shape)}")
    return flat.reshape(shape) if shape else flat


def trained(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """The result of a ForwardBackward: for each datum its arrays by name (float32 [N]), and metrics by name."""
    record = _MESSAGES["ArrayRecord"](type_tag="ArrayRecord", num_datums=len(outputs))
    for name in outputs[0] if outputs else ():
        arrays = [np.ascontiguousarray(one[name], "<f4") for one in outputs]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
        field = record.fields.add(key=name)
        field.value.data, field.value.offsets = b"".join(array.tobytes() for array in arrays), offsets.tobytes()
        field.value.dtype = 1
    found = _MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record])
    for name, value in metrics.items():
        found.metrics.add(key=name, value=value)
    return found.SerializeToString()


def sampled(completions: Sequence[Completion], prompt_logprobs: np.ndarray) -> bytes:
    """The result of a sampling request; `prompt_logprobs` has one number for each token of the prompt, or none."""
    found = _MESSAGES["SampleResponse"]()
    for one in completions:
        found.sequences.add(
            stop_reason=_STOP if one.finish == "stop" else _LENGTH,
            tokens=np.asarray(one.tokens, "<i4").tobytes(),
            logprobs=np.asarray(one.logprobs, "<f4").tobytes(),
        )
    if len(prompt_logprobs):
        found.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    return found.SerializeToString()


# --- sampling requests, which are JSON


def sampling(body: Mapping[str, Any], context: int, eos: int) -> tuple[np.ndarray, SamplingParams]:
    """The prompt (int32 [P]) and the parameters of a sampling request; `context` tokens for prompt and answer.

    DataError for what this server does not have.
    """
    for name in (
        "topk_prompt_logprobs",
        "topk_sample_logprobs",
        "target_prompt_logprobs",
        "prompt_alt_tokens_k",
        "prompt_logprobs_last_n",
        "record_stability_info",
    ):
        if body.get(name):
            raise DataError(f"{name} is not available here; prompt_logprobs is")
    chunks = body.get("prompt", {}).get("chunks", [])
    if any(chunk.get("type") != "encoded_text" for chunk in chunks):
        raise DataError("the prompt holds something else than tokens, which this model cannot read")
    prompt = np.array([token for chunk in chunks for token in chunk["tokens"]], np.int32)
    if not len(prompt):
        raise DataError("the prompt is empty")
    params, room = body.get("sampling_params", {}), context - len(prompt)
    wanted = params.get("max_tokens")
    if room < 1 or (wanted is not None and not 1 <= wanted <= room):
        raise DataError(f"max_tokens = {wanted}: {len(prompt)} tokens of the prompt leave room for {room} here")
    stop = params.get("stop")
    stops = [stop] if isinstance(stop, str) else list(stop or [])
    texts = tuple(one for one in stops if isinstance(one, str))
    ids = tuple(one for one in stops if isinstance(one, int))
    # `stop` replaces the end-of-sequence token when it names tokens; strings are added to it.
    seed = params.get("seed")
    found = SamplingParams(
        wanted or room,
        float(params.get("temperature", 1.0)),
        max(int(params.get("top_k", -1)), 0),
        float(params.get("top_p", 1.0)),
        ids or (eos,),
        stop_strings=texts,
        ignore_eos=stop == [],
        seed=None if seed is None else int(seed) % 2**31,
    )
    return prompt, found
