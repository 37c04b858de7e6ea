"""Feedback on MLflow traces: what is sent, when it is sent again, and what a real server makes of it."""

import os
import time
import uuid
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from trackway.learner.filtering import FilteredBatch, TrainStatus
from trackway.system.waits import Backoff
from trackway.tracing.local_mlflow import client as local_mlflow
from trackway.trainer.delivery import feedback_queue
from trackway.trainer.delivery.feedback_queue import Assessment, FeedbackQueue
from trackway.trainer.delivery.jobs import Later
from trackway.trainer.delivery.mlflow_api import ASSESSMENTS, MlflowApi
from trackway.trainer.delivery.mlflow_run import MlflowFeedback, assessment_body
from trackway.trainer.traces.run import training_feedback, validation_feedback

STEP = [Assessment("t" * 32, "a" * 16, {"reward": 1.0, "fate": "used"})]
NOT_ARRIVED = (404, "RESOURCE_DOES_NOT_EXIST: no such trace")


class Server:
    """The routes of MLflow that feedback needs; answers each request with the next of these."""

    def __init__(self, *answers: tuple[int, str], missing: list[str] | None = None) -> None:
        """`missing` makes it the server of a local database, which lacks these traces at the first request."""
        self.received: list[tuple[str, dict]] = []
        self._missing = missing
        self._answers = list(answers)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/api/3.0/mlflow/traces/{trace_id}/assessments")
        async def create(trace_id: str, request: Request) -> JSONResponse:
            self.received.append((trace_id, (await request.json())["assessment"]))
            status, message = self._answers.pop(0) if self._answers else (200, "")
            return JSONResponse({"message": message}, status)

        if self._missing is not None:

            @app.post(ASSESSMENTS)
            async def create_together(request: Request) -> dict[str, list[str]]:
                self.received.append(("together", await request.json()))
                missing, self._missing = self._missing, []
                return {"missing": missing or []}

        @app.post("/api/2.0/mlflow/traces/link-to-run")
        async def link(request: Request) -> JSONResponse:
            body = await request.json()
            self.received.append((body["run_id"], body))
            status, message = self._answers.pop(0) if self._answers else (200, "")
            return JSONResponse({"message": message}, status)

        return app


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback_queue, "BACKOFF", Backoff(0.02, 0.1))


@pytest.fixture
def queue(tmp_path: Path) -> FeedbackQueue:
    return FeedbackQueue(tmp_path / "feedback")


def send(queue: FeedbackQueue, uri: str, deadline_s: float = 30.0, run_id: str | None = None) -> list[str]:
    """Until nothing waits; why something was lost."""
    api, lost = MlflowApi(uri), list[str]()
    feedback = MlflowFeedback(api, deadline_s)
    end = time.monotonic() + 60
    while queue.waiting:
        assert time.monotonic() < end, "something still waits"
        try:
            sent = queue.send(lambda assessments: feedback.send(assessments, run_id))
        except Later:
            time.sleep(0.02)
        else:
            lost += [sent.reason] * sent.lost if sent else []
    api.close()
    return lost


def test_each_value_is_an_assessment_of_the_trace(serving, queue: FeedbackQueue):
    server = Server()
    queue.push(STEP)
    with serving(server.app()) as uri:
        lost = send(queue, uri)

    assert [(trace, body["assessment_name"], body["feedback"]) for trace, body in server.received] == [
        (f"tr-{'t' * 32}", "reward", {"value": 1.0}),
        (f"tr-{'t' * 32}", "fate", {"value": "used"}),
    ]
    assert {body["source"]["source_id"] for _, body in server.received} == {"trackway.trainer"}
    assert lost == []


@pytest.mark.parametrize(
    "answer", [NOT_ARRIVED, (404, "no such route"), (401, "who?"), (429, ""), (500, ""), (503, "")]
)
def test_what_may_succeed_later_is_sent_again_under_the_same_id(serving, queue: FeedbackQueue, answer):
    server = Server((200, ""), answer, (500, "constraint violation"))
    queue.push(STEP)
    with serving(server.app()) as uri:
        lost = send(queue, uri)

    sent = [(body["assessment_name"], body["assessment_id"]) for _, body in server.received]
    assert [name for name, _ in sent] == ["reward", "fate", "reward", "fate"]
    assert sent[:2] == sent[2:] and sent[0] != sent[1]
    assert lost == []


def test_a_value_that_is_refused_is_lost_alone_and_not_sent_again(serving, queue: FeedbackQueue):
    server = Server((400, "no"))
    queue.push(STEP)
    with serving(server.app()) as uri:
        lost = send(queue, uri)

    assert [body["assessment_name"] for _, body in server.received] == ["reward", "fate"]
    assert lost == [f'feedback reward for trace {"t" * 32}: MLflow answered HTTP 400: {{"message":"no"}}']


@pytest.mark.parametrize("collisions", [1, 4])
def test_traces_that_mlflow_links_itself_at_the_same_moment_are_linked_all_the_same(
    serving, queue: FeedbackQueue, collisions: int
):
    constraint = "(sqlite3.IntegrityError) UNIQUE constraint failed: entity_associations.source_type, ..."
    server = Server(*[(400, constraint)] * collisions)
    queue.push([Assessment("t" * 32, "", {}, link=True), Assessment("u" * 32, "", {}, link=True)])
    with serving(server.app()) as uri:
        lost = send(queue, uri, run_id="r")

    assert server.received == [("r", {"trace_ids": [f"tr-{'t' * 32}", f"tr-{'u' * 32}"], "run_id": "r"})] * (
        collisions + 1
    )
    assert lost == []


def test_links_that_mlflow_refuses_are_counted_and_not_sent_again(serving, queue: FeedbackQueue):
    server = Server((400, "no such run"))
    queue.push([Assessment("t" * 32, "", {}, link=True)])
    with serving(server.app()) as uri:
        lost = send(queue, uri, run_id="r")

    assert (len(server.received), len(lost)) == (1, 1) and "traces are not linked to the run" in lost[0]


def test_a_value_that_is_not_finite_is_said_in_words(serving, queue: FeedbackQueue):
    server = Server()
    queue.push([Assessment("t" * 32, "a" * 16, {"advantage": float("nan"), "reward": float("-inf")})])
    with serving(server.app()) as uri:
        send(queue, uri)

    assert [body["feedback"]["value"].lower() for _, body in server.received] == ["nan", "-infinity"]


def test_a_local_server_takes_many_values_at_once(serving, queue: FeedbackQueue):
    traces = [Assessment(f"{number:032x}", "a" * 16, {"reward": 1.0, "fate": "used"}) for number in range(150)]
    queue.push(traces)
    server = Server(missing=[f"tr-{0:032x}"])
    with serving(server.app()) as uri:
        lost = send(queue, uri)

    assert lost == []
    assert [
        sorted({(value["trace_id"], value["assessment_name"]) for value in body["assessments"]})
        for _, body in server.received
    ] == [
        sorted((f"tr-{trace.trace_id}", name) for trace in traces for name in ("reward", "fate")),
        [(f"tr-{0:032x}", "fate"), (f"tr-{0:032x}", "reward")],
    ]


def test_a_ground_truth_is_an_expectation_and_costs_no_request_of_a_trained_trajectory(serving, queue: FeedbackQueue):
    server = Server()
    queue.push([Assessment("t" * 32, "", {"reward": 1.0, "fate": "used", "ground_truth": "42"})])
    queue.push([Assessment("v" * 32, "", {"reward": 1.0, "ground_truth": "42"})])
    with serving(server.app()) as uri:
        lost = send(queue, uri)

    sent = [(trace[3], body["assessment_name"], body.get("expectation")) for trace, body in server.received]
    assert sent == [
        ("t", "reward", None),
        ("t", "fate", None),
        ("v", "reward", None),
        ("v", "ground_truth", {"value": "42"}),
    ]
    assert "feedback" not in server.received[-1][1] and lost == []


@pytest.fixture(scope="module", params=["MLflow's own server", "a local database"])
def server_uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real server."""
    if request.param == "MLflow's own server":
        return request.getfixturevalue("mlflow_server")
    return local_mlflow.server_uri(f"sqlite:///{tmp_path_factory.mktemp('local')}/mlflow.db", linger_s=5)


@pytest.mark.slow
def test_a_real_server_keeps_each_value_once_and_finds_traces_by_it(
    server_uri: str, traced_services, queue: FeedbackQueue
):
    from mlflow import MlflowClient

    client = MlflowClient(server_uri)
    experiment = client.create_experiment(f"feedback-{uuid.uuid4().hex}")
    services = traced_services(server_uri, experiment)
    made = [services.trajectory(1, n) for n in range(3)]
    services.close()
    step = FilteredBatch(made, [TrainStatus.USED, TrainStatus.USED, TrainStatus.ERROR])
    for _ in range(2):
        queue.push(training_feedback(step, [0.7, -0.7]))
    lost = send(queue, server_uri)

    def found(filter_string: str) -> set[str]:
        traces = client.search_traces(locations=[experiment], filter_string=filter_string)
        return {trace.info.trace_id.removeprefix("tr-") for trace in traces}

    ids = [trajectory.trace_id for trajectory in made]
    stored = client.get_trace(f"tr-{ids[0]}").info.assessments or []
    assert lost == []
    assert sorted((assessment.name, assessment.feedback.value) for assessment in stored if assessment.feedback) == [
        ("advantage", 0.7),
        ("fate", "used"),
        ("reward", 1.0),
    ]
    assert found("feedback.fate = 'used'") == set(ids[:2])
    assert found("feedback.fate = 'dropped_failed'") == {ids[2]}
    assert found("feedback.advantage > 0") == {ids[0]}


@pytest.mark.slow
def test_a_real_server_finds_traces_by_their_ground_truth(
    request: pytest.FixtureRequest, server_uri: str, traced_services, queue: FeedbackQueue
):
    from mlflow import MlflowClient

    client = MlflowClient(server_uri)
    experiment = client.create_experiment(f"feedback-{uuid.uuid4().hex}")
    services = traced_services(server_uri, experiment)
    made = [services.trajectory(1, n).model_copy(update={"ground_truth": "42"}) for n in range(2)]
    services.close()
    queue.push(training_feedback(FilteredBatch(made[:1], [TrainStatus.USED]), [0.7]))
    queue.push(validation_feedback(made[1:]))
    lost = send(queue, server_uri)

    filter_string = "expectation.ground_truth = '42'"
    found = client.search_traces(locations=[experiment], filter_string=filter_string)
    is_local = request.node.callspec.params["server_uri"] == "a local database"
    expected = made if is_local else made[1:]
    assert {trace.info.trace_id for trace in found} == {f"tr-{trajectory.trace_id}" for trajectory in expected}
    [truth] = [stored for stored in found[0].info.assessments or [] if stored.expectation]
    assert (truth.name, truth.expectation.value, lost) == ("ground_truth", "42", [])


@pytest.mark.slow
@pytest.mark.parametrize("server_uri", ["a local database"], indirect=True)
def test_a_local_database_stores_a_batch_and_names_missing_traces(server_uri: str, traced_services):
    from mlflow import MlflowClient

    client = MlflowClient(server_uri)
    services = traced_services(server_uri, client.create_experiment(f"feedback-{uuid.uuid4().hex}"))
    arrived = services.trajectory(1, 0).trace_id
    services.close()
    api, missing = MlflowApi(server_uri), os.urandom(16).hex()
    values = [
        assessment_body(trace_id, name, value)
        for trace_id in (arrived, missing)
        for name, value in (("reward", 1.0), ("fate", "used"))
    ]

    assert [api.assess_together(values), api.assess_together(values[:2])] == [{missing}, set()]
    api.close()
    stored = client.get_trace(f"tr-{arrived}").info.assessments or []
    assert sorted((stored.name, stored.feedback.value) for stored in stored if stored.feedback) == [
        ("fate", "used"),
        ("reward", 1.0),
    ]


@pytest.mark.slow
def test_a_trace_that_never_arrives_costs_its_feedback_and_nothing_else(
    server_uri: str, traced_services, queue: FeedbackQueue
):
    from mlflow import MlflowClient

    client = MlflowClient(server_uri)
    services = traced_services(server_uri, client.create_experiment(f"feedback-{uuid.uuid4().hex}"))
    arrived = services.trajectory(1, 0)
    services.close()
    values = {"reward": 1.0, "fate": "used"}
    queue.push([Assessment(os.urandom(16).hex(), "", values), Assessment(arrived.trace_id or "", "", values)])

    lost = send(queue, server_uri, deadline_s=0.5)

    stored = client.get_trace(f"tr-{arrived.trace_id}").info.assessments or []
    assert (len(lost), len(stored)) == (2, 2)
    assert lost[0].startswith("no such trace: MLflow ")
