"""The Weave project of a run's traces, with its entity."""

from pydantic import SecretStr

from trackway.tracing import TracingSettings
from trackway.tracing.export.weave import full_project
from trackway.trainer.config.models import RunConfig
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tracing import TraceBackend


def weave_project(config: RunConfig, key: SecretStr | None = None) -> str | None:
    """`entity/project` of the run's traces in Weave; None when nothing says it and Weave is not asked for by name.

    The API key, which may have to tell the entity (see `full_project`), is `key` or stands in WANDB_API_KEY.

    Raises:
        TrackwayError: INVALID_REQUEST when Weave is wanted and nothing names an entity.
    """
    project, is_wanted = config.trace_project, TraceBackend.WEAVE in config.actor_rollout_ref.rollout.trace.backend
    full = full_project(project, (key or TracingSettings().weave_api_key) if is_wanted else None)
    if is_wanted and full is None:
        message = (
            f"actor_rollout_ref.rollout.trace.project_name: expected entity/project for Weave, got {project!r}; "
            "write it so, or set WANDB_ENTITY in the environment of the trainer service"
        )
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return full
