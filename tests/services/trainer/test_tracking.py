"""The MLflow run against a real server."""

import threading
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from trackway.trainer.background import Background
from trackway.trainer.tracking import MlflowRun, MlflowSink, Tracking, open_mlflow
from trackway.wire.trainer import MetricsRow

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
def test_a_weave_that_is_away_does_not_take_mlflows_time(run: MlflowRun):
    gate = threading.Event()
    tracking = Tracking(run, Background("mlflow"), Background("weave"))
    tracking.weave.submit(lambda: gate.wait(30))

    tracking.close("FINISHED", 5.0)
    gate.set()

    assert client(run).get_run(run.run_id).info.status == "FINISHED"
    assert tracking.mlflow.dropped == 0


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_mlflow_run(run: MlflowRun):
    run.log_params({f"key{number}": number for number in range(150)})
    run.finish("KILLED")

    again = MlflowRun(run.uri, client(run).get_experiment(run.experiment_id).name, "run", run.run_id)

    stored = client(run).get_run(run.run_id)
    assert (again.run_id, again.experiment_id, again.is_new) == (run.run_id, run.experiment_id, False)
    assert (stored.info.status, len(stored.data.params)) == ("RUNNING", 150)


@pytest.mark.slow
def test_traces_of_several_processes_belong_to_the_run_by_the_header_alone(run: MlflowRun, traced_services):
    services = traced_services(run.uri, run.experiment_id, run.run_id)
    made = [services.trajectory(step, n) for step in (1, 2) for n in range(60)]  # more roots than one link call takes
    services.close()

    linked = client(run).search_traces(locations=[run.experiment_id], run_id=run.run_id, max_results=200)

    assert {trace.info.trace_id for trace in linked} == {f"tr-{one.trace_id}" for one in made}
    [tree] = [trace for trace in linked if trace.info.trace_id == f"tr-{made[0].trace_id}"]
    assert sorted((span.name, str(span.get_attribute("agentic.service"))) for span in tree.data.spans) == [
        ("chat tiny", "rollout"),
        ("execute_tool calculator", "tools"),
        ("trajectory", "agent"),
        ("turn 0", "agent"),
    ]


@pytest.mark.slow
def test_traces_in_an_experiment_of_their_own_still_belong_to_the_run(run: MlflowRun, traced_services):
    other = run.experiment(f"traces-{uuid.uuid4().hex}")
    services = traced_services(run.uri, other, run.run_id)
    made = services.trajectory(1, 0)
    services.close()

    linked = client(run).search_traces(locations=[run.experiment_id, other], run_id=run.run_id)

    assert (other != run.experiment_id, run.experiment(client(run).get_experiment(other).name)) == (True, other)
    assert [(one.info.trace_id, one.info.experiment_id) for one in linked] == [(f"tr-{made.trace_id}", other)]


def client(run: MlflowRun) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient(run.uri)
