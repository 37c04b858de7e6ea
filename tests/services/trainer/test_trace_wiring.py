"""Which parts a run's traces are built from, by configuration."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trackway.tracing import TracingSettings
from trackway.tracing.context import active_tracing, install
from trackway.trainer.background import Background
from trackway.trainer.config import RunConfig, compose
from trackway.trainer.mapping import trace_target
from trackway.trainer.mlflow_feedback import MlflowFeedback
from trackway.trainer.run_folder import RunFolder
from trackway.trainer.run_traces import RunTraces
from trackway.trainer.settings import ServiceUrls
from trackway.trainer.trace_wiring import open_traces, run_target
from trackway.trainer.tracking import MlflowRun, Tracking
from trackway.trainer.weave import WeaveFeedback
from trackway.wire.tracing import TraceBackend

TRACE = "actor_rollout_ref.rollout.trace"
SETTINGS = TracingSettings.model_validate(
    {"mlflow_uri": None, "weave_api_key": "key", "weave_url": "http://127.0.0.1:9", "otlp_endpoint": None}
)


def configured(backend: str, *overrides: str) -> RunConfig:
    return compose([f"{TRACE}.backend={backend}", f"{TRACE}.project_name=me/p", *overrides])


@pytest.fixture
def opened(tmp_path: Path) -> Iterator:
    """Builds the traces of a run without MLflow; what it opened is closed after the test."""
    made: list[tuple[RunTraces, Tracking]] = []

    def build(config: RunConfig, run: MlflowRun | None = None, settings: TracingSettings = SETTINGS) -> RunTraces:
        folder = RunFolder(tmp_path / "outputs" / "run")
        folder.create(config, ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="/w"))
        tracking = Tracking(run, Background("mlflow"), Background("weave"))
        traces = open_traces(folder, config, run_target(config, run), settings, tracking)
        made.append((traces, tracking))
        return traces

    yield build
    for traces, tracking in made:
        tracking.close("FINISHED", 10)
        for one in traces.feedback:
            one.close()
        if traces.tracing is not None:
            traces.tracing.shutdown(1)
    install(None)


def test_a_run_without_a_backend_and_without_mlflow_traces_nothing_itself(opened):
    traces = opened(compose([]))

    assert (traces.tracing, list(traces.feedback), traces.summary()) == (None, [], None)
    assert active_tracing() is None


def test_a_run_with_a_backend_traces_under_the_trainers_name(opened):
    traces = opened(configured("weave"))

    assert active_tracing() is traces.tracing is not None
    assert traces.tracing.settings.usable == [TraceBackend.WEAVE]
    assert [type(one) for one in traces.feedback] == [WeaveFeedback]


def test_feedback_goes_nowhere_when_it_is_off_or_nobody_keeps_it(opened):
    assert opened(configured("weave", "trackway.feedback=false")).feedback == []


def test_a_collector_keeps_no_feedback(opened):
    assert opened(configured("otlp")).feedback == []


def test_an_mlflow_that_is_away_gets_its_experiment_by_name():
    assert run_target(configured("mlflow"), None).mlflow_experiment_id == "name:me%2Fp"
    assert run_target(configured("weave"), None).mlflow_experiment_id is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("null", [MlflowFeedback]),
        ("mlflow", [MlflowFeedback]),
        ("[mlflow,weave]", [MlflowFeedback, WeaveFeedback]),
        ("weave", [WeaveFeedback]),
    ],
)
def test_feedback_goes_where_the_traces_go(opened, mlflow_server: str, backend: str, expected: list[type]):
    traces = opened(configured(backend), MlflowRun(mlflow_server, "wiring", "run"))

    assert [type(one) for one in traces.feedback] == expected
    assert traces.tracing.settings.mlflow_uri == mlflow_server


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["otlp", "mlflow"])
def test_feedback_goes_to_the_mlflow_behind_a_collector(opened, mlflow_server: str, backend: str):
    collector = {"otlp_endpoint": "http://127.0.0.1:9", "collected": [TraceBackend.MLFLOW]}
    settings = SETTINGS.model_copy(update=collector)

    traces = opened(configured(backend), MlflowRun(mlflow_server, "wiring", "run"), settings)

    assert [type(one) for one in traces.feedback] == [MlflowFeedback]
    assert traces.tracing.settings.sent_to([TraceBackend.MLFLOW]) == (TraceBackend.OTLP,)


@pytest.mark.slow
def test_traces_belong_to_the_run_in_its_experiment_or_one_of_their_own(mlflow_server: str):
    run = MlflowRun(mlflow_server, "wiring", "run")

    same = run_target(compose([f"{TRACE}.backend=mlflow", "trainer.project_name=wiring"]), run)
    other = run_target(configured("mlflow"), run)

    assert (same.mlflow_experiment_id, same.mlflow_run_id) == (run.experiment_id, run.run_id)
    assert (other.mlflow_experiment_id, other.mlflow_run_id) == (run.experiment("me/p"), run.run_id)
    assert other.mlflow_experiment_id != run.experiment_id
    assert same == trace_target(compose([f"{TRACE}.backend=mlflow"]), run.experiment_id, run.run_id)
