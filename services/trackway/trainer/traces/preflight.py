"""Check before a run starts that every service can send spans to the run's trace backends.

An unreachable service does not fail the check: the run itself waits for its services.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from pydantic import SecretStr

from trackway.clients import CallPolicy, ServiceClient
from trackway.run_config import RunConfig
from trackway.run_config.models import weave_project
from trackway.tracing import TracingSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Health
from trackway.wire.trajectory import TraceBackend

logger = logging.getLogger("trackway.trainer")

_HEALTH_POLICY = CallPolicy.question(5.0, attempts=2)
_NOTHING_SET = TracingSettings(mlflow_uri=None, weave_api_key=None, otlp_endpoint=None)


async def check_backends(
    config: RunConfig, services: Mapping[str, str], trainer: TracingSettings, token: SecretStr | None = None
) -> None:
    """Check the backends of each service (name -> URL) and of this one. Services that do not answer are logged.

    Raises:
        TrackwayError: INVALID_REQUEST naming each service, backend and remedy, and a missing Weave entity.
    """
    wanted = config.actor_rollout_ref.rollout.trace.backend
    if not wanted:
        return
    usable = {"trainer": trainer.usable, **await _usable_by_service(services, token)}
    if config.trackway.mlflow_uri:
        usable["trainer"] = [*usable["trainer"], TraceBackend.MLFLOW]
    problems = [
        problem
        for service, backends in usable.items()
        for problem in unusable(wanted, backends, f"the {service} service")
    ]
    problems += await asyncio.to_thread(without_entity, config, trainer.weave_api_key)
    refuse(problems)


def unusable(wanted: Iterable[TraceBackend], usable: Sequence[str], sender: str) -> list[str]:
    """A sentence with the remedy for each wanted backend that `sender` cannot send spans to."""
    return [
        f"{_NOTHING_SET.missing(backend)} in the environment of {sender}, and restart it"
        for backend in wanted
        if backend not in usable
    ]


def without_entity(config: RunConfig, key: SecretStr | None = None) -> list[str]:
    """A sentence with the remedy if Weave is a trace backend and its project has no entity."""
    try:
        weave_project(config, key)
    except TrackwayError as error:
        return [error.message]
    return []


def refuse(problems: Sequence[str]) -> None:
    """Raise TrackwayError(INVALID_REQUEST) with all the problems, if there are any."""
    if problems:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, "; ".join(problems))


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
