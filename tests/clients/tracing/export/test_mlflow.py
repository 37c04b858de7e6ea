"""Experiments by name against a real MLflow: made once by many at a time, found again, never guessed."""

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from mlflow import MlflowClient
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.clients.tracing.otlp_sink import running_sink
from trackway.tracing import Tracing, TracingSettings, rollout_trace_attr
from trackway.tracing.export.backends import MlflowEndpoint, experiment_by_name
from trackway.tracing.export.otlp import Batch, SendOutcome, encoded
from trackway.tracing.span_handle import activated

pytestmark = pytest.mark.slow


def batch(experiment: str) -> Batch:
    """One span for an experiment that is known by its name only."""
    exporter = InMemorySpanExporter()
    tracing = Tracing("test", TracingSettings(backends=[]), exporter, root_operations=True)
    with activated(tracing), rollout_trace_attr(step=1):
        pass
    tracing.shutdown()
    spans = exporter.get_finished_spans()
    return Batch({"x-mlflow-experiment-id": experiment_by_name(experiment)}, encoded(spans), len(spans))


@pytest.fixture
def endpoint(mlflow_server: str) -> Iterator[MlflowEndpoint]:
    endpoint = MlflowEndpoint(TracingSettings(mlflow_uri=mlflow_server))
    yield endpoint
    endpoint.close()


def test_many_workers_that_name_a_new_experiment_at_once_make_one(mlflow_server: str) -> None:
    name = f"größe/{uuid.uuid4().hex}"
    workers = [MlflowEndpoint(TracingSettings(mlflow_uri=mlflow_server)) for _ in range(16)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(MlflowEndpoint.post, workers, [batch(name) for _ in workers]))
    for worker in workers:
        worker.close()
    assert [answer.verdict for answer in answers] == [SendOutcome.TAKEN] * 16, answers
    found = MlflowClient(mlflow_server).search_experiments(filter_string=f"name = '{name}'")
    assert len(found) == 1


def test_a_collector_before_mlflow_is_told_the_id_of_an_experiment_that_was_named(mlflow_server: str) -> None:
    name = f"collected-{uuid.uuid4().hex}"
    with running_sink() as collector:
        changes = {"mlflow_uri": mlflow_server, "otlp_endpoint": collector.url, "collected": ["mlflow"]}
        endpoint = MlflowEndpoint(TracingSettings.model_validate(changes))
        assert endpoint.post(batch(name)).verdict is SendOutcome.TAKEN
        endpoint.close()
    [request] = collector.arrived
    experiment = MlflowClient(mlflow_server).get_experiment_by_name(name)
    assert experiment is not None and request.headers["x-mlflow-experiment-id"] == experiment.experiment_id


def test_an_experiment_that_is_gone_is_looked_up_again(endpoint: MlflowEndpoint) -> None:
    """As when somebody deleted the database and a new server stands at the old address."""
    name = f"gone-{uuid.uuid4().hex}"
    assert endpoint.post(batch(name)).verdict is SendOutcome.TAKEN
    endpoint._experiments = dict.fromkeys(endpoint._experiments, "987654321")
    answer = endpoint.post(batch(name))
    assert answer.verdict is SendOutcome.TAKEN, answer


def test_spans_for_a_deleted_experiment_wait_until_it_is_restored(endpoint: MlflowEndpoint, mlflow_server: str) -> None:
    name = f"deleted-{uuid.uuid4().hex}"
    client = MlflowClient(mlflow_server)
    experiment = client.create_experiment(name)
    client.delete_experiment(experiment)
    answer = endpoint.post(batch(name))
    assert (answer.verdict, "DeletedExperiment" in answer.reason) == (SendOutcome.LATER, True)
    client.restore_experiment(experiment)
    assert endpoint.post(batch(name)).verdict is SendOutcome.TAKEN
