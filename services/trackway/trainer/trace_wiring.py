"""Builds what a run needs for its traces: where they go, the worker's own tracing, budget, feedback, counts."""

from trackway.serving.app import span_counts
from trackway.tracing import Tracing, TracingSettings
from trackway.tracing.mlflow_endpoint import experiment_by_name
from trackway.trainer.config import RunConfig
from trackway.trainer.feedback import TraceFeedback
from trackway.trainer.mapping import trace_target
from trackway.trainer.mlflow_feedback import MlflowFeedback
from trackway.trainer.run_folder import RunFolder
from trackway.trainer.run_traces import RunTraces
from trackway.trainer.span_accounts import SpanAccounts
from trackway.trainer.step_trace import StepTrace
from trackway.trainer.trace_budget import Ledger, TraceBudget
from trackway.trainer.tracking import MlflowRun, Tracking
from trackway.trainer.weave import WeaveFeedback
from trackway.wire.health import SpanCounts
from trackway.wire.tracing import TraceBackend, TraceTarget

LEDGER = "trace_bytes.json"
"""In the outputs folder: the bytes of the day, of all its runs."""


def run_target(config: RunConfig, run: MlflowRun | None) -> TraceTarget:
    """Where the run's traces go; their MLflow experiment is made when there is none. Blocking.

    While MLflow is away the experiment is said by its name, which becomes an id when the spans arrive.
    """
    if run is None:
        wanted = TraceBackend.MLFLOW in config.actor_rollout_ref.rollout.trace.backend
        return trace_target(config, experiment_by_name(config.trace_project) if wanted else None)
    own = config.trace_project == config.trainer.project_name
    experiment = run.experiment_id if own else run.experiment(config.trace_project)
    return trace_target(config, experiment, run.run_id)


def open_traces(
    folder: RunFolder, config: RunConfig, target: TraceTarget, settings: TracingSettings, tracking: Tracking
) -> RunTraces:
    """The run's traces. When it names a backend or MLflow is on, the trainer itself traces from now on."""
    tracing = None
    if target.backends or tracking.run is not None:
        # The experiment's and the run's ids are those of the run's own server.
        uri = tracking.run.uri if tracking.run else settings.mlflow_uri
        tracing = Tracing("trainer", settings.model_copy(update={"mlflow_uri": uri}))
        tracing.install()
    return RunTraces(
        target=target,
        own=StepTrace(config.trace_experiment, target),
        budget=TraceBudget(Ledger(folder.path.parent / LEDGER), config.trackway.trace_bytes_per_day),
        accounts=SpanAccounts(folder.services().traced, lambda: _counts(tracing), folder.info().traces),
        tracing=tracing,
        feedback=_feedback(config, target, settings, tracking) if config.trackway.feedback else [],
    )


def _counts(tracing: Tracing | None) -> SpanCounts:
    return SpanCounts() if tracing is None else span_counts(tracing.stats())


def _feedback(
    config: RunConfig, target: TraceTarget, settings: TracingSettings, tracking: Tracking
) -> list[TraceFeedback]:
    """MLflow when the run is there and its traces are, Weave when they go there and its key is here."""
    found: list[TraceFeedback] = []
    patience_s = config.trackway.feedback_deadline_s
    is_there = not target.backends or TraceBackend.MLFLOW in settings.kept_by(target.backends)
    if tracking.run is not None and is_there:
        found.append(MlflowFeedback(tracking.run.uri, tracking.mlflow, patience_s))
    key, project = settings.weave_api_key, target.weave_project
    if TraceBackend.WEAVE in target.backends and key is not None and project is not None:
        found.append(WeaveFeedback(settings.weave_url, project, key, tracking.weave, patience_s))
    return found
