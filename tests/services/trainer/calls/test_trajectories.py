"""The data of a step as the fit loop's files: trajectories with their tokens, and the learner's values of them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.services.trainer.calls.requests import request_of
from tests.services.trainer.calls.sessions import LORA, LR, Session
from trackway.trainer.calls.protobuf import schema
from trackway.trainer.calls.results import digest_of
from trackway.trainer.delivery.feedback_queue import Assessment
from trackway.trainer.run_state.trajectories import read_trajectories

pytestmark = pytest.mark.slow


def test_a_step_has_a_trajectory_for_each_datum_with_the_sample_that_it_names(tmp_path: Path, tiny_model: Path) -> None:
    session = Session(tmp_path, tiny_model)
    session.call(0, "create_model", {"lora_config": LORA})
    data = []
    for last, advantage in ((9, 1.0), (8, -0.5), (8, 0.0)):
        logprobs, advantages = [0.0, -2.0, 0.0, -4.0], [0.0, advantage, 0.0, advantage]
        inputs = {"target_tokens": [4, 5, 6, last], "logprobs": logprobs, "advantages": advantages}
        data.append(([3, 4, 5, 6], inputs))
    wide = ([3], {"target_tokens": [[4, 5]], "weights": [[1.0, 1.0]]})
    root, traced = f"00-{1:032x}-{2:016x}-01", f"00-{3:032x}-{4:016x}-01"
    body = request_of(data, "importance_sampling", samples=["q:0", "q:1", "q:2"])
    links = {"q:0": traced, "q:1": traced.removesuffix("1") + "0"}
    session.call(1, "forward_backward", body=body, links=links, traceparent=root)
    session.call(2, "forward_backward", body=request_of([wide], "cross_entropy"))
    session.call(3, "optim_step", LR)
    session.call(4, "optim_step", LR)
    linked = list[Assessment]()

    class Links:
        def submit(self, assessments: Sequence[Assessment]) -> None:
            linked.extend(assessments)

    session.driver(Links()).advance(lambda: False)

    first, second, flat = read_trajectories(tmp_path / "session" / "trajectories" / "step_1.parquet")
    prompt = digest_of("[3, 4]")[:10]
    assert [found.id for found in (first, second, flat)] == [f"session/1/{prompt}/{n}" for n in range(3)]
    assert [found.session_id for found in (first, second, flat)] == ["q:0", "q:1", "q:2"]
    assert (first.trace_id, first.span_id) == (f"{3:032x}", f"{4:016x}") and second.trace_id is None
    assert (flat.trace_id, flat.span_id) == (f"{1:032x}", f"{2:016x}")  # of the request
    assert (second.prompt_ids, second.response_ids, second.response_mask) == ([3, 4], [5, 6, 8], [1, 0, 1])
    links = [(found.trace_id, found.values, found.link) for found in linked]
    assert links == [(f"{3:032x}", {}, True), (f"{1:032x}", {}, True)]
    assert second.response_logprobs == [-2.0, 0.0, -4.0]
    assert (flat.prompt_ids, flat.response_mask) == ([3, 4], [1, 0, 1])
    assert (second.data_source, second.reward) == ("importance_sampling", None)
    values = pq.read_table(tmp_path / "session" / "token_values" / "step_1.parquet").to_pylist()
    output = schema().ForwardBackwardOutput.FromString(session.result(1).body)
    learner = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, np.float32).reshape(3, 4)
    for row, advantage, logprobs in zip(values, (1.0, -0.5, 0.0), learner.tolist(), strict=True):
        assert row["advantages"] == pytest.approx([advantage, math.nan, advantage], nan_ok=True, abs=0)
        assert row["logprobs"] == pytest.approx([logprobs[1], math.nan, logprobs[3]], nan_ok=True, abs=0)
    assert [row["kept"] for row in values] == [[True, False, True]] * 3
    assert json.loads(session.result(4).body)["metrics"]["tokens"] == 0
    assert not (tmp_path / "session" / "trajectories" / "step_2.parquet").exists()
