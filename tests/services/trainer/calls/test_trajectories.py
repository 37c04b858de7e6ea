"""The data of a step as the fit loop's files: trajectories with their tokens, and the learner's values of them."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.services.trainer.calls.requests import request_of
from tests.services.trainer.calls.sessions import LORA, LR, Session
from trackway.trainer.calls.protobuf import schema
from trackway.trainer.run_state.trajectories import read_trajectories

pytestmark = pytest.mark.slow


def test_a_step_has_a_trajectory_for_each_datum_with_the_sample_that_it_names(tmp_path: Path, tiny_model: Path) -> None:
    session = Session(tmp_path, tiny_model)
    session.call(0, "create_model", {"lora_config": LORA})
    data = []
    for last, advantage in ((9, 1.0), (8, -0.5)):
        logprobs, advantages = [0.0, -2.0, -3.0, -4.0], [0.0, advantage, 0.0, advantage]
        inputs = {"target_tokens": [4, 5, 6, last], "logprobs": logprobs, "advantages": advantages}
        data.append(([3, 4, 5, 6], inputs))
    wide = ([3], {"target_tokens": [[4, 5]], "weights": [[1.0, 1.0]]})
    session.call(1, "forward_backward", body=request_of(data, "importance_sampling", samples=["q:0", "q:1"]))
    session.call(2, "forward_backward", body=request_of([wide], "cross_entropy"))
    session.call(3, "optim_step", LR)
    session.call(4, "optim_step", LR)
    session.run()

    first, second = read_trajectories(tmp_path / "session" / "trajectories" / "step_1.parquet")
    assert (first.id, second.id) == ("session/1/0/0", "session/1/0/1")
    assert (first.session_id, second.session_id) == ("q:0", "q:1")
    assert (second.prompt_ids, second.response_ids, second.response_mask) == ([3, 4], [5, 6, 8], [1, 0, 1])
    assert second.response_logprobs == [-2.0, -3.0, -4.0]
    assert (second.data_source, second.reward) == ("importance_sampling", None)
    values = pq.read_table(tmp_path / "session" / "token_values" / "step_1.parquet").to_pylist()
    output = schema().ForwardBackwardOutput.FromString(session.result(1).body)
    learner = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, np.float32).reshape(2, 4)
    for row, advantage, logprobs in zip(values, (1.0, -0.5), learner.tolist(), strict=True):
        assert row["advantages"] == pytest.approx([advantage, math.nan, advantage], nan_ok=True, abs=0)
        assert row["logprobs"] == pytest.approx([logprobs[1], math.nan, logprobs[3]], nan_ok=True, abs=0)
    assert [row["kept"] for row in values] == [[True, False, True]] * 2
    assert json.loads(session.result(4).body)["metrics"]["tokens"] == 0
    assert not (tmp_path / "session" / "trajectories" / "step_2.parquet").exists()
