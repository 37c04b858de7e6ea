"""Before a run starts: can every service send spans to the backends that the run wants?

A service that cannot be asked is no obstacle: the run itself waits for its services.
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

_ASK = CallPolicy(connect_s=2.0, read_s=5.0, total_s=5.0, attempts=2)
_NOTHING_SET = TracingSettings(mlflow_uri=None, weave_api_key=None, otlp_endpoint=None)


async def check_backends(
    config: RunConfig, services: Mapping[str, str], own: TracingSettings, token: SecretStr | None = None
) -> None:
    """Ask each service (name -> URL) and this one what they can send to; logs those that did not answer.

    Raises:
        TrackwayError: INVALID_REQUEST naming service, backend and remedy.
    """
    wanted = config.actor_rollout_ref.rollout.trace.backend
    if not wanted:
        return
    await asyncio.to_thread(weave_project, config, own.weave_api_key)
    usable = {"trainer": own.usable, **await _ask_all(services, token)}
    if config.trackway.mlflow_uri:
        usable["trainer"] = [*usable["trainer"], TraceBackend.MLFLOW]
    for service, backends in usable.items():
        require(wanted, backends, f"the {service} service")


def require(wanted: Sequence[TraceBackend], usable: Sequence[str], who: str) -> None:
    """Raises TrackwayError(INVALID_REQUEST) for the first backend that `who` cannot send to."""
    for backend in wanted:
        if backend not in usable:
            message = f"{_NOTHING_SET.missing(backend)} in the environment of {who}, and start that again"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message, backend=backend.value)


async def _ask_all(services: Mapping[str, str], token: SecretStr | None) -> dict[str, list[str]]:
    answers = await asyncio.gather(*(_ask(name, url, token) for name, url in services.items()))
    return {name: found for name, found in zip(services, answers, strict=True) if found is not None}


async def _ask(name: str, url: str, token: SecretStr | None) -> list[str] | None:
    try:
        health = await ServiceClient(url, policy=_ASK, token=token).call("GET", "/health", reply=Health)
    except TrackwayError as error:
        logger.warning("the %s service could not be asked where it can send traces: %s", name, error)
        return None
    return health.trace_backends
