"""Feedback on MLflow traces: what is sent, when it is sent again, and what a real server makes of it."""

import os
import socket
import time
import uuid

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from trackway.trainer.background import Background
from trackway.trainer.fate import Fate, Sorted
from trackway.trainer.feedback import Assessment, training_feedback
from trackway.trainer.mlflow_feedback import MlflowFeedback

STEP = [Assessment("t" * 32, "a" * 16, {"reward": 1.0, "fate": "used"})]


class Server:
    """The one route of MLflow that feedback needs; answers each request with the next of these."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.received: list[tuple[str, dict]] = []
        self._answers = list(answers)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/api/3.0/mlflow/traces/{trace_id}/assessments")
        async def create(trace_id: str, request: Request) -> JSONResponse:
            self.received.append((trace_id, (await request.json())["assessment"]))
            status, message = self._answers.pop(0) if self._answers else (200, "")
            return JSONResponse({"message": message}, status)

        return app


def send(uri: str, patience_s: float = 0.0, assessments: list[Assessment] = STEP) -> Background:
    background = Background("mlflow")
    feedback = MlflowFeedback(uri, background, patience_s)
    feedback.submit(assessments)
    background.close(30)
    feedback.close()
    return background


def test_each_value_is_an_assessment_of_the_trace(serving):
    server = Server()
    with serving(server.app()) as uri:
        background = send(uri)

    assert [(trace, one["assessment_name"], one["feedback"]) for trace, one in server.received] == [
        (f"tr-{'t' * 32}", "reward", {"value": 1.0}),
        (f"tr-{'t' * 32}", "fate", {"value": "used"}),
    ]
    assert {one["source"]["source_id"] for _, one in server.received} == {"trackway.trainer"}
    assert background.failed == 0


@pytest.mark.parametrize("status", [404, 429, 500, 503])
def test_what_may_succeed_later_is_sent_again_under_the_same_id(serving, status: int):
    server = Server((200, ""), (status, "not now"), (500, "constraint violation"))
    with serving(server.app()) as uri:
        background = send(uri, patience_s=30)

    sent = [(one["assessment_name"], one["assessment_id"]) for _, one in server.received]
    assert [name for name, _ in sent] == ["reward", "fate", "reward", "fate"]
    assert sent[:2] == sent[2:] and sent[0] != sent[1]
    assert background.failed == 0


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_refusal_is_counted_and_not_sent_again(serving, caplog, status: int):
    server = Server((status, "no"))
    with serving(server.app()) as uri:
        background = send(uri, patience_s=30)

    assert (len(server.received), background.failed) == (1, 1)
    assert f"feedback reward for trace {'t' * 32}: HTTP {status}" in caplog.text


def test_a_server_that_is_away_is_waited_for(serving):
    server, background = Server(), Background("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    feedback = MlflowFeedback(f"http://127.0.0.1:{port}", background, patience_s=30)
    feedback.submit(STEP)
    wait_for_waiting(background, 1)
    with serving(server.app(), port):
        background.close(20)
    feedback.close()

    assert (len(server.received), background.failed) == (2, 0)


def wait_for_waiting(background: Background, jobs: int) -> None:
    end = time.monotonic() + 20
    while background.waiting < jobs:
        assert time.monotonic() < end, "the jobs did not have to wait"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_real_server_keeps_each_value_once_and_finds_traces_by_it(mlflow_server: str, traced_services):
    from mlflow import MlflowClient

    client = MlflowClient(mlflow_server)
    experiment = client.create_experiment(f"feedback-{uuid.uuid4().hex}")
    services, background = traced_services(mlflow_server, experiment, delay_s=3600.0), Background("mlflow")
    made = [services.trajectory(1, n) for n in range(3)]
    step = Sorted(made, [Fate.USED, Fate.USED, Fate.DROPPED_FAILED])

    feedback = MlflowFeedback(mlflow_server, background, patience_s=60)
    feedback.submit(training_feedback(step, [0.7, -0.7]))
    wait_for_waiting(background, 3)
    services.close()
    feedback.submit(training_feedback(step, [0.7, -0.7]))
    background.close(60)
    feedback.close()

    def found(filter_string: str) -> set[str]:
        traces = client.search_traces(locations=[experiment], filter_string=filter_string)
        return {trace.info.trace_id.removeprefix("tr-") for trace in traces}

    ids = [one.trace_id for one in made]
    stored = client.get_trace(f"tr-{ids[0]}").info.assessments or []
    assert (background.failed, background.dropped) == (0, 0)
    assert sorted((one.name, one.feedback.value) for one in stored if one.feedback) == [
        ("advantage", 0.7),
        ("fate", "used"),
        ("reward", 1.0),
    ]
    assert found("feedback.fate = 'used'") == set(ids[:2])
    assert found("feedback.fate = 'dropped_failed'") == {ids[2]}
    assert found("feedback.advantage > 0") == {ids[0]}


@pytest.mark.slow
def test_a_trace_that_never_arrives_costs_its_feedback_and_nothing_else(mlflow_server: str):
    lost = Assessment(os.urandom(16).hex(), os.urandom(8).hex(), {"reward": 1.0, "fate": "used"})

    assert send(mlflow_server, 1.0, [lost]).failed == 1
