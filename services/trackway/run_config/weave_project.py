"""The Weave project of a run's traces, including its entity."""

from pydantic import SecretStr

from trackway.run_config.models import RunConfig
from trackway.tracing import TracingSettings
from trackway.tracing.export.weave import full_project
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tracing import TraceBackend


def weave_project(config: RunConfig, key: SecretStr | None = None) -> str | None:
    """`entity/project` of the run's traces in Weave, or None when no entity is known and Weave is not a trace backend.

    The entity may be looked up with the API key (see `full_project`): `key`, or else WANDB_API_KEY.

    Raises:
        TrackwayError: INVALID_REQUEST when Weave is a trace backend and no entity is known.
    """
    project, is_wanted = config.trace_project, TraceBackend.WEAVE in config.actor_rollout_ref.rollout.trace.backend
    full = full_project(project, (key or TracingSettings().weave_api_key) if is_wanted else None)
    if is_wanted and full is None:
        message = (
            f"actor_rollout_ref.rollout.trace.project_name: expected entity/project for Weave, got {project!r}; "
            "add the entity, or set WANDB_ENTITY in the environment of the trainer service"
        )
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    return full
