"""Check before a run starts that every service can send spans to the run's trace backends.

An unreachable service does not fail the check: the run itself waits for its services.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from pydantic import SecretStr

from trackway.clients import CallPolicy, ServiceClient
from trackway.tracing import TracingSettings
from trackway.trainer.config import RunConfig
from trackway.trainer.config.weave_project import weave_project
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import Health
from trackway.wire.tracing import TraceBackend

logger = logging.getLogger("trackway.trainer")

_HEALTH_POLICY = CallPolicy(connect_s=2.0, read_s=5.0, total_s=5.0, attempts=2)
_NOTHING_SET = TracingSettings(mlflow_uri=None, weave_api_key=None, otlp_endpoint=None)


async def check_backends(
    config: RunConfig, services: Mapping[str, str], trainer: TracingSettings, token: SecretStr | None = None
) -> None:
    """Check the backends of each service (name -> URL) and of this one; services that do not answer are logged.

    Raises:
        TrackwayError: INVALID_REQUEST naming service, backend and remedy.
    """
    wanted = config.actor_rollout_ref.rollout.trace.backend
    if not wanted:
        return
    await asyncio.to_thread(weave_project, config, trainer.weave_api_key)
    usable = {"trainer": trainer.usable, **await _usable_by_service(services, token)}
    if config.trackway.mlflow_uri:
        usable["trainer"] = [*usable["trainer"], TraceBackend.MLFLOW]
    for service, backends in usable.items():
        require(wanted, backends, f"the {service} service")


def require(wanted: Sequence[TraceBackend], usable: Sequence[str], sender: str) -> None:
    """Raise TrackwayError(INVALID_REQUEST) for the first backend that `sender` cannot send to."""
    for backend in wanted:
        if backend not in usable:
            message = f"{_NOTHING_SET.missing(backend)} in the environment of {sender}, and restart it"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message, backend=backend.value)


async def _usable_by_service(services: Mapping[str, str], token: SecretStr | None) -> dict[str, list[str]]:
    answers = await asyncio.gather(*(_usable(name, url, token) for name, url in services.items()))
    return {name: backends for name, backends in zip(services, answers, strict=True) if backends is not None}


async def _usable(name: str, url: str, token: SecretStr | None) -> list[str] | None:
    try:
        health = await ServiceClient(url, policy=_HEALTH_POLICY, token=token).call("GET", "/health", reply=Health)
    except TrackwayError as error:
        logger.warning("the trace backends of the %s service are unknown, as it did not answer: %s", name, error)
        return None
    return health.trace_backends
