"""A session that runs for long keeps no more than its models' newest state, its checkpoints and what is open."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.services.trainer.calls.requests import request_of
from tests.services.trainer.tinker.conftest import Api
from tests.services.trainer.tinker.test_routes import Caller, calling, message
from trackway.clients.weights import WeightStore
from trackway.trainer.calls.log import RequestLog
from trackway.trainer.calls.protobuf import schema
from trackway.trainer.calls.results import Result, Results
from trackway.trainer.tinker import sampling, sessions
from trackway.wire.weights import policy_url

pytestmark = pytest.mark.slow


@pytest.fixture
def caller(url: str) -> Iterator[Caller]:
    with calling(url) as caller:
        yield caller


def forward_backward(caller: Caller, model_id: str, seq_id: int) -> httpx.Response:
    request = schema().ForwardBackwardRequest.FromString(
        request_of([([1] * 500, {"target_tokens": [2] * 500})], "cross_entropy")
    )
    request.model_id, request.seq_id = model_id, seq_id
    headers = {"content-type": "application/x-protobuf"}
    return caller.http.post("forward_backward", content=request.SerializeToString(), headers=headers)


def step(caller: Caller, model_id: str, number: int) -> None:
    """A forward_backward and an optim_step, whose results are fetched."""
    forward_backward(caller, model_id, 2 * number + 1)
    caller.optim_step(model_id, 2 * number + 2)
    for seq_id in (2 * number + 1, 2 * number + 2):
        answer = caller.http.post("retrieve_future", json={"request_id": f"{model_id}:{seq_id}"})
        assert answer.status_code == 200, answer.text


def seq_ids(api: Api, session: str) -> list[int]:
    return sorted(call.seq_id for _, call, _ in RequestLog(api.outputs / session / "calls").read())


def test_the_log_keeps_what_is_not_in_the_newest_state(api: Api, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "COMPACT_BYTES", 20_000)
    with api.served() as url, calling(url) as caller:
        session = caller.session()
        model_id = caller.model(session)
        for number in range(10):
            step(caller, model_id, number)
        caller.result(caller.post("save_weights", {"model_id": model_id, "seq_id": 21, "path": "ck1"})["request_id"])
        for number in range(11, 30):
            forward_backward(caller, model_id, 2 * number)
            caller.optim_step(model_id, 2 * number + 1)
            caller.result(f"{model_id}:{2 * number + 1}")
        left = seq_ids(api, session)
        again = forward_backward(caller, model_id, 2)
    with api.served() as url, calling(url) as caller:
        listed = caller.http.get(f"training_runs/{model_id}/checkpoints").json()["checkpoints"]
        future = caller.optim_step(model_id, 60)
        assert caller.result(future["request_id"]) == {"metrics": {"grad_norm": 1.0}}
    assert left[:2] == [0, 21] and left[2] > 40 and len(left) < 14
    assert again.json()["request_id"] == f"{model_id}:2"
    assert [checkpoint["checkpoint_id"] for checkpoint in listed] == ["weights/ck1"]
    assert api.runs.executed == [f"{model_id}:{seq_id}" for seq_id in (*range(22), *range(22, 61))]


def test_a_log_grows_again_before_it_is_read_whole(api: Api, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "COMPACT_BYTES", 10_000)
    api.runs.frozen = True
    with api.served() as url, calling(url) as caller:
        session = caller.session()
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8}}
        model_id = caller.post("create_model", body)["model_id"]
        for seq_id in range(1, 20):
            forward_backward(caller, model_id, seq_id)
    assert seq_ids(api, session) == [*range(20)]


def test_fetched_results_go_with_a_later_step_and_others_beyond_their_bound(
    caller: Caller, api: Api, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sessions, "KEPT_RESULTS", 2)
    model_id = caller.model(session := caller.session())
    results = Results(api.outputs / session / "calls")
    caller.result(caller.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "ck1"})["request_id"])
    for seq_id in (2, 3, 5):
        forward_backward(caller, model_id, seq_id)
    for seq_id in (4, 6, 7):
        caller.optim_step(model_id, seq_id)
    for seq_id in (2, 4, 6, 7):  # 3 and 5 are not fetched
        caller.http.post("retrieve_future", json={"request_id": f"{model_id}:{seq_id}"})
    assert results.seq_ids(model_id) == [0, 1, 3, 5, 6, 7]
    assert "which was fetched before" in message(caller.result(f"{model_id}:2", status=404))
    monkeypatch.setattr(sessions, "MAX_RESULTS", 3)
    caller.result(caller.optim_step(model_id, 8)["request_id"])
    assert results.seq_ids(model_id) == [0, 1, 7, 8]


def published(api: Api, weights: str, session: str, number: int) -> str:
    """A policy that the run's process published for request `number`, whose result is there."""
    name = f"{session}.0.s{number}"
    folder = Path(policy_url(weights, name))
    folder.mkdir(parents=True)
    (folder / "latest.json").write_text(json.dumps({"version": 1, "run": session, "path": "1"}))
    result = {"type": "save_weights_for_sampler", "sampling_session_seq_id": number, "policy": name, "version": 0}
    Results(api.outputs / session / "calls").write(
        f"{session}:train:0:{number}", Result("json", json.dumps(result).encode())
    )
    return name


def test_an_unnamed_snapshot_goes_when_later_ones_replaced_it_and_no_sample_uses_it(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weights = str(tmp_path / "weights")
    used: set[str] = set()
    monkeypatch.setattr(sessions, "KEPT_SNAPSHOTS", 2)
    monkeypatch.setattr(sampling.Draws, "samplers", lambda self: used)
    with api.served(weights_url=weights) as url, calling(url) as caller:
        session = caller.session()
        model_id = caller.model(session)
        used.add(f"{session}:sample:2")
        for number in range(1, 6):
            published(api, weights, session, number)
            body = {"model_id": model_id, "seq_id": number, "sampling_session_seq_id": number}
            api.runs.executed.append(f"{model_id}:{number}")  # its result is there
            caller.post("save_weights_for_sampler", body)
        caller.result(caller.optim_step(model_id, 6)["request_id"])
        left = WeightStore(weights).policies()
        refused = caller.asample(f"{session}:sample:1", status=404)
        used.clear()
        caller.result(caller.optim_step(model_id, 7)["request_id"])
    with api.served(weights_url=weights) as url, calling(url) as caller:
        again = caller.asample(f"{session}:sample:3", status=404)
        shown = caller.http.get(f"sessions/{session}").json()["sampler_ids"]
    assert left == [f"{session}.0.s{number}" for number in (2, 4, 5)]
    assert WeightStore(weights).policies() == [f"{session}.0.s{number}" for number in (4, 5)]
    assert "the newest 4 unnamed ones stay" in message(refused) and message(again) == message(refused).replace(
        ":1", ":3"
    )
    assert shown == [f"{session}:sample:{number}" for number in (4, 5)]
