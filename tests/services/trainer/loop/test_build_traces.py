"""Which parts a run's traces are built from, by configuration."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from trackway.run_config import RunConfig, compose
from trackway.tracing import TracingSettings
from trackway.tracing.span_handle import active_tracing, install
from trackway.trainer.delivery import Tracking, open_tracking
from trackway.trainer.delivery.feedback_queue import QueuedFeedback
from trackway.trainer.loop.build_traces import open_traces, run_target, weave_url
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.traces.run import RunTraces
from trackway.wire.trajectory import TraceBackend

TRACE = "actor_rollout_ref.rollout.trace"
SETTINGS = TracingSettings.model_validate(
    {"mlflow_uri": None, "weave_api_key": "key", "weave_url": "http://127.0.0.1:9", "otlp_endpoint": None}
)


def configured(backend: str, *overrides: str) -> RunConfig:
    return compose([f"{TRACE}.backend={backend}", f"{TRACE}.project_name=me/p", *overrides])


def run_folder(tmp_path: Path, config: RunConfig) -> RunFolder:
    folder = RunFolder(tmp_path / "outputs" / "run")
    folder.create(config, ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="/w"))
    return folder


def kept_by(traces: RunTraces) -> list[str]:
    """Who gets feedback."""
    return [feedback.backend for feedback in traces.feedback if isinstance(feedback, QueuedFeedback)]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Builds the traces of a run; what it opened is closed after the test."""
    monkeypatch.setattr("trackway.trainer.delivery.jobs.CLOSING_RETRY_S", 0.1)
    made: list[tuple[RunTraces, Tracking]] = []

    def build(config: RunConfig, mlflow: str | None = None, settings: TracingSettings = SETTINGS) -> RunTraces:
        folder = run_folder(tmp_path, config)
        tracking = open_tracking(folder, config, mlflow)
        traces = open_traces(folder, config, run_target(config, tracking.run), settings, tracking)
        made.append((traces, tracking))
        return traces

    yield build
    for traces, tracking in made:
        tracking.close("FINISHED", 10)
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
    assert kept_by(traces) == ["weave"]


def test_feedback_goes_nowhere_when_it_is_off_or_nobody_keeps_it(opened):
    assert opened(configured("weave", "trackway.feedback=false")).feedback == []


def test_a_collector_keeps_no_feedback(opened):
    assert opened(configured("otlp")).feedback == []


@pytest.mark.parametrize(
    ("backend", "expected"), [("weave", "https://w.test/me/p"), ("otlp", "https://w.test/me/p"), ("mlflow", None)]
)
def test_a_run_has_the_page_of_the_weave_project_that_gets_its_traces(
    monkeypatch: pytest.MonkeyPatch, backend: str, expected: str | None
) -> None:
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    collector = {"otlp_endpoint": "http://127.0.0.1:9", "collected": [TraceBackend.WEAVE]}
    settings = SETTINGS.model_copy(update={"weave_url": "https://w.test/traces", **collector})

    assert weave_url(run_target(configured(backend), None), settings) == expected


def test_an_mlflow_that_is_away_gets_its_experiment_by_name():
    assert run_target(configured("mlflow"), None).mlflow_experiment_id == "name:me%2Fp"
    assert run_target(configured("weave"), None).mlflow_experiment_id is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("null", ["mlflow"]),
        ("mlflow", ["mlflow"]),
        ("[mlflow,weave]", ["mlflow", "weave"]),
        ("weave", ["weave"]),
    ],
)
def test_feedback_goes_where_the_traces_go(opened, mlflow_server: str, backend: str, expected: list[str]):
    traces = opened(configured(backend), mlflow_server)

    assert kept_by(traces) == expected
    assert (traces.links is not None) is ("mlflow" in expected)  # though the spans carry the run's id
    assert traces.tracing.settings.mlflow_uri == mlflow_server


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["otlp", "mlflow"])
def test_feedback_goes_to_the_mlflow_behind_a_collector(opened, mlflow_server: str, backend: str):
    collector = {"otlp_endpoint": "http://127.0.0.1:9", "collected": [TraceBackend.MLFLOW]}
    settings = SETTINGS.model_copy(update=collector)

    traces = opened(configured(backend), mlflow_server, settings)

    assert kept_by(traces) == ["mlflow"]
    assert traces.tracing.settings.sent_to([TraceBackend.MLFLOW]) == (TraceBackend.OTLP,)


def test_while_mlflow_is_away_traces_wait_to_be_linked_to_the_run(opened, tmp_path: Path):
    traces = opened(configured("mlflow"), "http://127.0.0.1:9")
    with traces.step(1):
        pass

    queue = RunFolder(tmp_path / "outputs" / "run").path / "tracking" / "mlflow_feedback"
    [link] = [json.loads(line) for file in queue.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert (traces.target.mlflow_run_id, traces.target.mlflow_experiment_id) == (None, "name:me%2Fp")
    assert (len(link["trace_id"]), link["values"], link["link"]) == (32, {}, True)


@pytest.mark.slow
def test_traces_belong_to_the_run_in_its_experiment_or_one_of_their_own(mlflow_server: str, tmp_path: Path):
    config = compose([f"{TRACE}.backend=mlflow", "trainer.project_name=wiring"])
    tracking = open_tracking(run_folder(tmp_path, config), config, mlflow_server)
    run = tracking.run
    assert run is not None

    same, other_target = run_target(config, run), run_target(configured("mlflow"), run)
    tracking.close("FINISHED", 30.0)

    assert same.mlflow_experiment_id == run.experiment_id is not None
    assert same.mlflow_run_id == run.run_id is not None
    assert (other_target.mlflow_experiment_id, other_target.mlflow_run_id) == ("name:me%2Fp", run.run_id)
