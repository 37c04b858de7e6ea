"""The MLflow run against a real server."""

import json
import os
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from trackway.trainer.background import Background
from trackway.trainer.feedback import Feedback
from trackway.trainer.tracking import MlflowRun, MlflowSink, open_mlflow
from trackway.wire.trainer import MetricsRow
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory

if TYPE_CHECKING:
    from mlflow import MlflowClient


def test_without_a_uri_mlflow_is_off_and_says_so(monkeypatch, caplog):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    caplog.set_level("INFO", "trackway.trainer")

    assert open_mlflow(None, "project", "run", None) is None
    assert "MLflow is off: set trackway.mlflow_uri" in caplog.text


@pytest.fixture
def run(mlflow_server: str) -> Iterator[MlflowRun]:
    yield MlflowRun(mlflow_server, f"project-{uuid.uuid4().hex}", "run")


@pytest.mark.slow
def test_a_server_that_does_not_answer_switches_mlflow_off(monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    assert open_mlflow("http://127.0.0.1:9", "project", "run", None) is None
    assert "MLflow is off: MlflowException at http://127.0.0.1:9" in caplog.text


@pytest.mark.slow
def test_metrics_arrive_under_names_that_mlflow_allows(run: MlflowRun):
    background = Background("test")

    MlflowSink(run, background).log(
        MetricsRow(step=3, data={"val-core/openai/gsm8k/acc/mean@1": 0.5, "actor/lr": 1e-6})
    )
    background.close(30)

    history = client(run).get_metric_history(run.run_id, "val-core/openai/gsm8k/acc/mean_at_1")
    assert [(point.step, point.value) for point in history] == [(3, 0.5)]


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_mlflow_run(run: MlflowRun):
    run.log_params({f"key{number}": number for number in range(150)})
    run.finish("KILLED")

    again = MlflowRun(run.uri, client(run).get_experiment(run.experiment_id).name, "run", run.run_id)

    stored = client(run).get_run(run.run_id)
    assert (again.run_id, again.experiment_id, again.is_new) == (run.run_id, run.experiment_id, False)
    assert (stored.info.status, len(stored.data.params)) == ("RUNNING", 150)


@pytest.mark.slow
def test_traces_that_arrive_later_are_linked_and_carry_reward_and_advantage(run: MlflowRun):
    background = Background("test")
    trace_ids = [os.urandom(16).hex() for _ in range(101)]
    feedback = Feedback(run, background, patience_s=30)

    feedback.record([trajectory(trace_id) for trace_id in trace_ids], [0.7] * 101)
    for trace_id in trace_ids:
        export(run, trace_id)
    background.close(120)

    linked = client(run).search_traces(locations=[run.experiment_id], run_id=run.run_id, max_results=200)
    stored = client(run).get_trace(f"tr-{trace_ids[0]}").info.assessments
    values = [(one.name, one.feedback.value) for one in stored if one.feedback is not None]
    assert {trace.info.trace_id for trace in linked} == {f"tr-{trace_id}" for trace_id in trace_ids}
    assert sorted(values) == [("advantage", 0.7), ("reward", 1.0)]
    assert (background.failed, background.dropped) == (0, 0)


@pytest.mark.slow
def test_a_trace_that_never_arrives_costs_its_feedback_and_nothing_else(run: MlflowRun):
    background = Background("test")

    Feedback(run, background, patience_s=1).record([trajectory(os.urandom(16).hex())], [0.7])
    background.close(60)

    assert background.failed == 2


def client(run: MlflowRun) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(run.uri)


def trajectory(trace_id: str) -> Trajectory:
    return Trajectory(
        id="run/1/0/0",
        session_id="session",
        tags=Tags(experiment_name="run", step=1, sample_index=0, rollout_n=0),
        agent_name="tool_agent",
        data_source="openai/gsm8k",
        reward=Reward(score=1.0),
        stop_reason=StopReason.ANSWERED,
        trace_id=trace_id,
    )


def export(run: MlflowRun, trace_id: str) -> None:
    """Send a trace of one root span, as an agent's exporter would."""
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add()
    span.trace_id, span.span_id, span.name = bytes.fromhex(trace_id), os.urandom(8), "trajectory"
    span.start_time_unix_nano, span.end_time_unix_nano = 1_700_000_000_000_000_000, 1_700_000_001_000_000_000
    span.attributes.add(key="mlflow.spanOutputs").value.string_value = json.dumps({"reward": 1.0})
    answer = httpx.post(
        f"{run.uri}/v1/traces",
        content=request.SerializeToString(),
        headers={"content-type": "application/x-protobuf", "x-mlflow-experiment-id": run.experiment_id},
    )
    answer.raise_for_status()
