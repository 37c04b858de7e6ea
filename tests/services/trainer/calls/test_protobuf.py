"""Protobuf of forward_backward: as the SDK writes and reads it, and errors that name a place."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.services.trainer.calls.requests import request_of
from trackway.trainer.calls import protobuf
from trackway.trainer.calls.protobuf import decode, encode, schema
from trackway.wire.errors import ErrorCode, TrackwayError

GOOD = ([1, 2, 3], {"target_tokens": [2, 3, 4], "logprobs": [0.0, -1.0, -2.0], "advantages": [0.0, 1.0, 1.0]})


def test_a_request_is_read_with_defaults_of_its_loss() -> None:
    request = decode(request_of([GOOD, GOOD], "ppo", {"clip_high_threshold": 1.5}, True, ["a", "b"]))

    assert (request.loss_fn, request.forward_only) == ("ppo", True)
    assert request.options == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.5}
    assert [datum.tokens.tolist() for datum in request.data] == [[1, 2, 3]] * 2
    assert request.data[0].targets.tolist() == [2, 3, 4]
    assert {name: values.tolist() for name, values in request.data[0].inputs.items()} == {
        "logprobs": [0.0, -1.0, -2.0],
        "advantages": [0.0, 1.0, 1.0],
    }
    assert [datum.samples for datum in request.data] == [["a"], ["b"]]


def test_weights_of_cross_entropy_are_1_by_default() -> None:
    [datum] = decode(request_of([([1, 2], {"target_tokens": [2, 3]})], "cross_entropy")).data
    assert datum.inputs["weights"].tolist() == [1.0, 1.0]


def with_inputs(**inputs: Any) -> tuple[list[int], dict[str, Any]]:
    given = {**GOOD[1], **inputs}
    return GOOD[0], {name: values for name, values in given.items() if values is not None}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: b"\xff\xff", "forward_backward: expected protobuf of ForwardBackwardRequest"),
        (
            lambda: request_of([GOOD], "stable_reinforce"),
            "one of cross_entropy, importance_sampling, ppo, cispo, dro, gspo, got 'stable_reinforce'",
        ),
        (lambda: request_of([], "ppo"), "data: expected 1 to 8192 data, got 0"),
        (lambda: request_of([GOOD], "ppo", {"beta": 1.0}), "loss_fn_config.'beta': expected options of ppo"),
        (
            lambda: request_of([GOOD], "ppo", {"clip_low_threshold": float("nan")}),
            "loss_fn_config.'clip_low_threshold': expected a finite number of at least 0, got 'nan'",
        ),
        (lambda: request_of([([], {})], "ppo"), r"data\[0\].model_input: expected at least one token, got none"),
        (
            lambda: request_of([GOOD, with_inputs(logprobs=None)], "ppo"),
            r"data\[1\].loss_fn_inputs: expected logprobs, got none",
        ),
        (
            lambda: request_of([([1], {"target_tokens": [1]})], "cross_entropy", {"clip_low_threshold": 0.8}),
            r"loss_fn_config.'clip_low_threshold': expected options of cross_entropy \(none\), got another",
        ),
        (
            lambda: request_of([with_inputs()], "ppo", {"value_clip": 0.2}),
            r"expected options of ppo \(clip_low_threshold, clip_high_threshold\), got another",
        ),
        (
            lambda: request_of([with_inputs(mask=[1.0, 1.0, 1.0])], "ppo"),
            r"data\[0\].loss_fn_inputs: expected inputs from advantages, logprobs, target_tokens, got 'mask'",
        ),
        (
            lambda: request_of([with_inputs(advantages=[1.0])], "ppo"),
            r"data\[0\].advantages: expected the shape \[3\], got \[1\]",
        ),
        (
            lambda: request_of([with_inputs(advantages=[1.0, float("inf"), 0.0])], "ppo"),
            r"data\[0\].advantages: expected finite numbers, got NaN or infinity",
        ),
        (
            lambda: request_of([with_inputs(target_tokens=[[1, 2], [1, 2], [1, 2]])], "ppo"),
            r"data\[0\].target_tokens: expected the shape \[3\], got \[3, 2\]",
        ),
        (
            lambda: request_of([([1], {"target_tokens": [[1] * 65]})], "cross_entropy"),
            r"target_tokens: expected the shape \[1\] or \[1, K\] with K up to 64, got \[1, 65\]",
        ),
        (lambda: request_of([with_inputs(target_tokens=[2, 3, -1])], "ppo"), "expected token ids of at least 0"),
        (lambda: sparse([1, 0, 1], [0, 1]), r"data\[0\].weights: expected a CSR tensor of 2 rows and 3 columns"),
        (lambda: sparse([0, 1, 2], [0, 3]), r"data\[0\].weights: expected a CSR tensor of 2 rows and 3 columns"),
        (lambda: sparse([0, 1, 2**62], [0, 1]), r"data\[0\].weights: expected a CSR tensor of 2 rows and 3 columns"),
    ],
)
def test_a_request_that_cannot_be_computed_is_refused_with_its_place(make: Callable[[], bytes], message: str) -> None:
    with pytest.raises(TrackwayError, match=message) as raised:
        decode(make())
    assert raised.value.code is ErrorCode.INVALID_REQUEST


def sparse(starts: list[int], columns: list[int]) -> bytes:
    """A request of two tokens with three targets each, whose weights are sparse."""
    request = schema().ForwardBackwardRequest()
    targets = {"target_tokens": [[1, 2, 3], [4, 5, 6]]}
    request.ParseFromString(request_of([([1, 2], targets)], "cross_entropy"))
    weights = request.data[0].loss_fn_inputs["weights"]
    weights.sparse_csr.values = np.array([0.5, 2.0], np.float32).tobytes()
    weights.sparse_csr.crow_indices = np.array(starts, np.int64).tobytes()
    weights.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()
    weights.dtype = schema().DTYPE_FLOAT32
    weights.shape.extend([2, 3])
    return request.SerializeToString()


def test_a_sparse_tensor_has_zeros_elsewhere() -> None:
    [datum] = decode(sparse([0, 1, 2], [2, 0])).data
    assert datum.inputs["weights"].tolist() == [[0.0, 0.0, 0.5], [2.0, 0.0, 0.0]]


@pytest.mark.slow
def test_the_sdk_writes_what_is_read_and_reads_what_is_written() -> None:
    """In a process of its own, since the SDK starts threads."""
    program = """
import numpy as np, torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from trackway.trainer.calls.protobuf import decode, encode

span = types.SampledProvenanceSpan(sequence_id="q1", length=3)
targets, weights = torch.tensor([[2, 5], [3, 6], [4, 7]]), torch.tensor([[0., 1.], [.5, 0.], [0., 0.]])
inputs = {"target_tokens": targets, "weights": weights}
datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
datum = datum.with_provenance([span], [span])
sent = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
request = types.ForwardBackwardRequest(forward_backward_input=sent, model_id="m", seq_id=1)
read = decode(forward_backward_request_to_proto(request).SerializeToString())
[found] = read.data
# The SDK leaves cells without a weight out of its sparse targets.
assert (found.inputs["weights"] == [[0, 1], [.5, 0], [0, 0]]).all(), found
assert found.targets[0, 1] == 5 and found.targets[1, 0] == 3 and found.samples == ["q1"]

written = [np.array([-1.5, -2.5], np.float32), np.array([[-1, -2]], np.float32), np.array([-3], np.float32)]
output = deserialize_forward_backward_output(encode(written, {"loss:sum": 2.5}))
assert output.metrics == {"loss:sum": 2.5}
for array, fields in zip(written, output.loss_fn_outputs, strict=True):
    assert fields["logprobs"].shape == list(array.shape)
    assert (np.asarray(fields["logprobs"].data) == array.ravel()).all()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_the_schema_is_read_without_torch() -> None:
    program = (
        "import sys; from trackway.trainer.calls.protobuf import encode; encode([], {}); "
        "sys.exit('torch' in sys.modules or 'tinker' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf.importlib.util, "find_spec", lambda name: None)
    schema.cache_clear()
    with pytest.raises(TrackwayError, match=r"pip install 'trackway\[tinker\]'"):
        encode([], {})
    monkeypatch.undo()
    schema.cache_clear()
