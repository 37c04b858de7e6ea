"""Builds what a run needs for its traces: where they go, the worker's own tracing, budget, feedback, counts."""

from trackway.run_config import RunConfig
from trackway.serving.app import span_counts
from trackway.tracing import Tracing, TracingSettings
from trackway.tracing.export.backends import experiment_by_name, project_url
from trackway.tracing.span_handle import install
from trackway.trainer.delivery import MlflowRun, Tracking
from trackway.trainer.delivery.feedback_queue import QueuedFeedback
from trackway.trainer.delivery.leftovers import weave_feedback
from trackway.trainer.loop.from_config import trace_target
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.traces.run import DailyTraceBytes, RunTraces, SpanAccounts, StepTrace, TraceBudget, TraceFeedback
from trackway.wire.service import SpanCounts
from trackway.wire.trajectory import TraceBackend, TraceTarget

LEDGER = "trace_bytes.json"
"""In the outputs folder: the trace bytes of the day, over all its runs."""


def run_target(config: RunConfig, run: MlflowRun | None) -> TraceTarget:
    """Destination of the run's traces.

    An MLflow experiment whose id is not known is given by name, and resolved when the spans arrive. The run's id is a
    header of the spans, so that MLflow links traces of which the trainer never hears. Those it knows are linked again
    by `RunTraces.links`, because MLflow stores spans and answers 200 when their link failed (database is locked).
    """
    if run is None:
        wanted = TraceBackend.MLFLOW in config.actor_rollout_ref.rollout.trace.backend
        return trace_target(config, experiment_by_name(config.trace_project) if wanted else None)
    own = config.trace_project == config.trainer.project_name
    experiment = run.experiment_id if own else None
    return trace_target(config, experiment or experiment_by_name(config.trace_project), run.run_id)


def open_traces(
    folder: RunFolder, config: RunConfig, target: TraceTarget, settings: TracingSettings, tracking: Tracking
) -> RunTraces:
    """The run's traces. When it names a backend or MLflow is on, the trainer itself traces from now on."""
    tracing = None
    if target.backends or tracking.run is not None:
        # The experiment's and the run's ids are those of the run's own server.
        uri = tracking.run.uri if tracking.run else settings.mlflow_uri
        tracing = Tracing("trainer", settings.model_copy(update={"mlflow_uri": uri}))
        install(tracing)
    return RunTraces(
        target=target,
        own=StepTrace(config.trace_experiment, target),
        budget=TraceBudget(DailyTraceBytes(folder.path.parent / LEDGER), config.trackway.trace_bytes_per_day),
        accounts=SpanAccounts(
            folder.services().traced,
            lambda: SpanCounts() if tracing is None else span_counts(tracing.stats()),
            folder.info().traces,
        ),
        tracing=tracing,
        feedback=_feedback(folder, target, settings, tracking) if config.trackway.feedback else [],
        links=mlflow_feedback(target, settings, tracking),
    )


def weave_url(target: TraceTarget, settings: TracingSettings) -> str | None:
    """Page of the Weave project that gets the traces, directly or by a collector. None without one."""
    backends, project = target.backends or settings.default_backends, target.weave_project or settings.weave_project
    if project is None or TraceBackend.WEAVE not in settings.kept_by(backends):
        return None
    return project_url(project, settings.weave_url)


def _feedback(
    folder: RunFolder, target: TraceTarget, settings: TracingSettings, tracking: Tracking
) -> list[TraceFeedback]:
    """MLflow if its traces go there. Weave if they go there and this process has its key."""
    mlflow = mlflow_feedback(target, settings, tracking)
    found: list[TraceFeedback] = [] if mlflow is None else [mlflow]
    weave = weave_feedback(folder, target.weave_project, settings) if TraceBackend.WEAVE in target.backends else None
    if weave is not None:
        found.append(QueuedFeedback(weave.name, weave.queue, tracking.deliver(weave)))
    return found


def mlflow_feedback(target: TraceTarget, settings: TracingSettings, tracking: Tracking) -> TraceFeedback | None:
    """MLflow's queue of feedback and links. None when MLflow is off, or the traces go elsewhere."""
    is_there = not target.backends or TraceBackend.MLFLOW in settings.kept_by(target.backends)
    if tracking.run is None or not is_there:
        return None
    return QueuedFeedback(tracking.run.name, tracking.run.queue, tracking.wake_mlflow)
