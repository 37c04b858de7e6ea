"""Protobuf of Tinker's `forward_backward`, by the schema that the `tinker` package ships.

Needs numpy and protobuf, and neither torch nor the SDK: the service checks requests with it before it keeps them.
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from math import isfinite, prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from trackway.wire.errors import ErrorCode, TrackwayError

if TYPE_CHECKING:
    from tinker.proto import tinker_public_pb2 as pb

Array = NDArray[Any]

MAX_TARGETS = 64
"""Most target tokens at a place of a datum."""
MAX_DATA = 8192
"""Most data of a request."""


class LossSpec(NamedTuple):
    """Inputs and options of a loss by Tinker's names."""

    inputs: tuple[str, ...] = ("logprobs", "advantages")
    """Inputs besides `target_tokens`, one number for each token."""
    options: Mapping[str, float] = {}
    """Options of `loss_fn_config` and their defaults."""
    is_weighted: bool = False
    """True if it takes `weights`, which default to 1, and several targets for each token."""


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES = {
    "cross_entropy": LossSpec((), is_weighted=True),
    "importance_sampling": LossSpec(),
    "ppo": LossSpec(options=_CLIP),
    "cispo": LossSpec(options=_CLIP),
    "dro": LossSpec(options={"beta": 0.05}),
    "gspo": LossSpec(("logprobs", "advantages", "sequence_ratio_mask"), _CLIP),
}
"""Losses by the name of `loss_fn` (https://tinker-docs.thinkingmachines.ai/tinker/losses)."""


class Datum(NamedTuple):
    """A sequence of N input tokens, each of which predicts its targets."""

    tokens: Array
    """[N] int64."""
    targets: Array
    """[N] or [N, K] int64."""
    inputs: dict[str, Array]
    """[N] float64 each by name; `weights` as the targets."""
    samples: list[str]
    """Ids of the sampled sequences that the datum names, in order."""


class ForwardBackward(NamedTuple):
    """A request for the gradient of a loss."""

    data: list[Datum]
    loss_fn: str
    options: dict[str, float]
    """Every option of the loss."""
    forward_only: bool
    """True if no gradient is wanted."""


@cache
def schema() -> ModuleType:
    """The module `tinker.proto.tinker_public_pb2`, without the SDK around it, which imports torch.

    Raises INVALID_REQUEST where the `tinker` package is not installed.
    """
    package = importlib.util.find_spec("tinker")
    if package is None or not package.submodule_search_locations:
        message = "Tinker's API: expected the package tinker where the trainer runs, found none"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; pip install 'trackway[tinker]'")
    name, file = "tinker_public_pb2", Path(package.submodule_search_locations[0], "proto", "tinker_public_pb2.py")
    spec = importlib.util.spec_from_file_location(f"trackway_{name}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decode(body: bytes) -> ForwardBackward:
    """Read a ForwardBackwardRequest. Raises INVALID_REQUEST with what was expected.

    Token ids are not compared with a vocabulary.
    """
    request = schema().ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise _refused("forward_backward", "protobuf of ForwardBackwardRequest", str(error), "use the SDK") from error
    spec = LOSSES.get(request.loss_fn)
    if spec is None:
        remedy = "take one of them, or forward_backward_custom"
        raise _refused("loss_fn", f"one of {', '.join(LOSSES)}", _shown(request.loss_fn), remedy)
    if not 1 <= len(request.data) <= MAX_DATA:
        raise _refused("data", f"1 to {MAX_DATA} data", str(len(request.data)), "divide them over several calls")
    data = [_datum(datum, spec, f"data[{place}]") for place, datum in enumerate(request.data)]
    return ForwardBackward(data, request.loss_fn, _options(request, spec), request.forward_only)


def encode(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """Write a ForwardBackwardOutput: float32 logprobs of each datum, [N] or [N, K], and metrics."""
    output = schema().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for shape, values in groupby(logprobs, lambda array: array.shape[1:]):
        arrays = [np.ascontiguousarray(array, dtype="<f4") for array in values]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.data, field.offsets = b"".join(array.tobytes() for array in arrays), offsets.tobytes()
        field.dtype = schema().DTYPE_FLOAT32
        field.trailing_shape.extend(shape)
    return output.SerializeToString(deterministic=True)


def _options(request: "pb.ForwardBackwardRequest", spec: LossSpec) -> dict[str, float]:
    given: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        given[name] = value.number if value.HasField("number") else value.text
    options = dict(spec.options)
    for name, value in given.items():
        what = f"loss_fn_config.{_shown(name)[:64]}"
        if name not in options:
            known = ", ".join(options) or "none"
            raise _refused(what, f"options of {request.loss_fn} ({known})", "another", "leave it out")
        if isinstance(value, str) or not isfinite(value) or value < 0:
            raise _refused(what, "a finite number of at least 0", _shown(str(value)), "correct it")
        options[name] = value
    return options


def _datum(datum: "pb.Datum", spec: LossSpec, where: str) -> Datum:
    chunks: list[Array] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise _refused(f"{where}.model_input", "chunks of tokens", "another kind", "give tokens alone")
        chunks.append(_numbers(chunk.encoded_text.tokens, "<i4", f"{where}.model_input"))
    tokens = np.concatenate(chunks).astype(np.int64) if chunks else np.zeros(0, np.int64)
    if not len(tokens):
        raise _refused(f"{where}.model_input", "at least one token", "none", "leave the datum out")
    allowed = {"target_tokens", *spec.inputs, *(["weights"] if spec.is_weighted else [])}
    if unknown := sorted(datum.loss_fn_inputs.keys() - allowed):
        what = f"{where}.loss_fn_inputs"
        raise _refused(what, f"inputs from {', '.join(sorted(allowed))}", _shown(unknown[0]), "leave it out")
    if missing := sorted({"target_tokens", *spec.inputs} - datum.loss_fn_inputs.keys()):
        raise _refused(f"{where}.loss_fn_inputs", " and ".join(missing), "none", "add what is missing")
    length = len(tokens)
    targets = _tensor(datum.loss_fn_inputs["target_tokens"], length, f"{where}.target_tokens", spec.is_weighted)
    shape = targets.shape
    if targets.dtype.kind != "i":
        raise _refused(f"{where}.target_tokens", "whole numbers", "floats", "send them as int64")
    inputs: dict[str, Array] = {}
    for name in sorted(datum.loss_fn_inputs.keys() - {"target_tokens"}):
        value = _tensor(datum.loss_fn_inputs[name], length, f"{where}.{name}", name == "weights")
        if value.shape != shape:
            raise _refused(f"{where}.{name}", f"the shape {[*shape]} of target_tokens", f"{[*value.shape]}", "match it")
        if not np.isfinite(value).all():
            raise _refused(f"{where}.{name}", "finite numbers", "NaN or infinity", "leave the datum out")
        inputs[name] = value.astype(np.float64)
    if spec.is_weighted and "weights" not in inputs:
        inputs["weights"] = np.ones(shape)
    if (tokens < 0).any() or (targets < 0).any():
        raise _refused(where, "token ids of at least 0", "a negative one", "weight such tokens with 0 instead")
    spans = (*datum.model_input_spans, *datum.loss_fn_input_spans)
    sampled = dict.fromkeys(span.sampled_tokens.sequence_id for span in spans if span.HasField("sampled_tokens"))
    return Datum(tokens, targets.astype(np.int64), inputs, [*sampled])


def _tensor(tensor: "pb.Tensor", length: int, where: str, may_have_columns: bool) -> Array:
    """[N] or [N, K] of a dense tensor, or of a sparse one with zeros where it has no value."""
    types = {schema().DTYPE_FLOAT32: "<f4", schema().DTYPE_INT64: "<i8", schema().DTYPE_INT32: "<i4"}
    dtype = types.get(tensor.dtype)
    if dtype is None:
        raise _refused(where, "float32, int64 or int32", f"the type {tensor.dtype}", "convert it")
    shape = tuple(tensor.shape)
    if tensor.HasField("sparse_csr"):
        _check_shape(shape, length, where, may_have_columns)
        return _dense(tensor.sparse_csr, shape, dtype, where)
    values = _numbers(tensor.dense, dtype, where)
    shape = shape or values.shape
    _check_shape(shape, length, where, may_have_columns)
    if prod(shape) != len(values):
        raise _refused(where, f"{prod(shape)} numbers for the shape {[*shape]}", f"{len(values)}", "match them")
    return values.reshape(shape)


def _check_shape(shape: tuple[int, ...], length: int, where: str, may_have_columns: bool) -> None:
    fits = shape == (length,) or (may_have_columns and len(shape) == 2 and shape[0] == length)
    if not fits or (len(shape) == 2 and not 1 <= shape[1] <= MAX_TARGETS):
        wanted = f"[{length}]" + (f" or [{length}, K] with K up to {MAX_TARGETS}" if may_have_columns else "")
        raise _refused(where, f"the shape {wanted}", f"{[*shape]}", "give a number for each input token")


def _dense(csr: "pb.SparseCsr", shape: tuple[int, ...], dtype: str, where: str) -> Array:
    values, columns = _numbers(csr.values, dtype, where), _numbers(csr.col_indices, "<i8", where)
    starts = _numbers(csr.crow_indices, "<i8", where)
    rows, width = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
    counts = np.diff(starts)
    fits = len(starts) == rows + 1 and starts[0] == 0 and starts[-1] == len(columns) == len(values)
    if not fits or (counts < 0).any() or (columns < 0).any() or (columns >= width).any():
        raise _refused(where, f"a CSR tensor of {rows} rows and {width} columns", "other indices", "correct them")
    dense = np.zeros((rows, width), dtype)
    dense[np.repeat(np.arange(rows), counts), columns] = values
    return dense.reshape(shape)


def _numbers(data: bytes, dtype: str, where: str) -> Array:
    if len(data) % np.dtype(dtype).itemsize:
        raise _refused(where, f"whole numbers of {np.dtype(dtype).itemsize} bytes", f"{len(data)} bytes", "correct it")
    return np.frombuffer(data, dtype)


def _refused(where: str, expected: str, got: str, remedy: str) -> TrackwayError:
    return TrackwayError(ErrorCode.INVALID_REQUEST, f"{where}: expected {expected}, got {got}; {remedy}")


def _shown(text: str) -> str:
    return ascii(text[:64])
