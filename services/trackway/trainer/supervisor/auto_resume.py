"""Auto-resume of runs whose service or machine was lost: of sessions always, of others with `resume_interrupted`."""

import asyncio
import logging

from pydantic import SecretStr

from trackway.clients import CallPolicy, ServiceClient
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.supervisor.manager import RunManager
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunInfo

CHECK_INTERVAL_S = 3.0
"""Interval between checks for an interrupted run."""

_READY_POLICY = CallPolicy.question(5.0)

logger = logging.getLogger("trackway.trainer")


async def resume_periodically(
    runs: RunManager,
    token: SecretStr | None = None,
    every_s: float = CHECK_INTERVAL_S,
    *,
    sessions_only: bool = False,
) -> None:
    """Check for an interrupted run now and every `every_s` seconds. Each reason for waiting is logged once."""
    last_logged = ""
    while True:
        try:
            await resume_interrupted(runs, token, sessions_only=sessions_only)
            last_logged = ""
        except TrackwayError as error:
            if error.message != last_logged:
                logger.warning("an interrupted run cannot be resumed yet: %s", error)
            last_logged = error.message
        except Exception:
            logger.exception("the check for interrupted runs failed; next check in %s s", every_s)
        await asyncio.sleep(every_s)


async def resume_interrupted(
    runs: RunManager, token: SecretStr | None = None, *, sessions_only: bool = False
) -> RunInfo | None:
    """Resume the newest interrupted run, or session, that can be resumed. None when there is none.

    Raises TrackwayError while the services are not ready, and the newest run's error when no run can be resumed.
    """
    names = runs.interrupted(sessions_only)
    if not names:
        return None
    await _services_ready(runs.services, token)
    failures: dict[str, Exception] = {}
    for name in names:
        try:
            info = await runs.resume(name, by_itself=True)
        except Exception as error:
            failures[name] = error
        else:
            for newer, error in failures.items():
                logger.warning("run %s was interrupted and cannot be resumed: %s", newer, error)
            logger.warning("run %s was interrupted and is resumed automatically (restart %s)", name, info.restarts)
            return info
    raise failures[names[0]]


async def _services_ready(services: ServiceUrls, token: SecretStr | None) -> None:
    """Raise TrackwayError unless all services are ready: without them the run would fail at its first step."""
    for url in services.traced.values():
        await ServiceClient(url, policy=_READY_POLICY, token=token).send("GET", "/ready")
