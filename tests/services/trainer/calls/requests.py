"""Requests as the SDK sends them."""

from collections.abc import Mapping, Sequence

import numpy as np

from trackway.trainer.calls.protobuf import schema

Values = Sequence[float] | Sequence[Sequence[float]]
INTEGERS = ("target_tokens",)


def request_of(
    data: Sequence[tuple[Sequence[int], Mapping[str, Values]]],
    loss_fn: str,
    options: Mapping[str, float] | None = None,
    forward_only: bool = False,
    samples: Sequence[str] = (),
) -> bytes:
    """A ForwardBackwardRequest of input tokens and loss inputs. `samples` are the sampled sequence of each datum."""
    pb = schema()
    request = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=1, loss_fn=loss_fn, forward_only=forward_only)
    for name, value in (options or {}).items():
        request.loss_fn_config[name] = value
        request.loss_fn_config_v2[name].number = value
    for place, (tokens, inputs) in enumerate(data):
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, values in inputs.items():
            array = np.asarray(values, np.int64 if name in INTEGERS else np.float32)
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = array.tobytes(), pb.DTYPE_INT64 if name in INTEGERS else pb.DTYPE_FLOAT32
            tensor.shape.extend(array.shape)
        if samples:
            span = datum.model_input_spans.add().sampled_tokens
            span.sequence_id, span.length = samples[place], len(tokens)
    return request.SerializeToString()
