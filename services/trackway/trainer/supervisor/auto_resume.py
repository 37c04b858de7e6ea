"""Going on by itself with a run whose service or machine went away under it; only when `resume_interrupted` says so."""

import asyncio
import logging

from pydantic import SecretStr

from trackway.clients import CallPolicy, ServiceClient
from trackway.trainer.settings import ServiceUrls
from trackway.trainer.supervisor.manager import RunManager
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunInfo

LOOK_S = 3.0
"""Pause between two looks for an interrupted run."""

_ASK = CallPolicy(connect_s=2.0, read_s=5.0, total_s=5.0, attempts=1)

logger = logging.getLogger("trackway.trainer")


async def resume_for_ever(runs: RunManager, token: SecretStr | None = None, every_s: float = LOOK_S) -> None:
    """Look for an interrupted run at once and every `every_s` seconds; why one cannot go on yet is logged once."""
    said = ""
    while True:
        try:
            await resume_interrupted(runs, token)
            said = ""
        except TrackwayError as error:
            if error.message != said:
                logger.warning("an interrupted run waits: %s", error)
            said = error.message
        except Exception:
            logger.exception("looking for interrupted runs failed; next look in %s s", every_s)
        await asyncio.sleep(every_s)


async def resume_interrupted(runs: RunManager, token: SecretStr | None = None) -> RunInfo | None:
    """Resume the newest run that may go on and can; None when no run may.

    TrackwayError while the services are not ready; the newest run's own error when none of them can.
    """
    names = runs.interrupted()
    if not names:
        return None
    await _services_ready(runs.services, token)
    refused: dict[str, Exception] = {}
    for name in names:
        try:
            info = await runs.resume(name, by_itself=True)
        except Exception as error:
            refused[name] = error
        else:
            for newer, error in refused.items():
                logger.warning("run %s was interrupted and cannot go on: %s", newer, error)
            logger.warning("run %s was interrupted and goes on by itself (restart %s)", name, info.restarts)
            return info
    raise refused[names[0]]


async def _services_ready(services: ServiceUrls, token: SecretStr | None) -> None:
    """A run whose services are not there would fail at its first step."""
    for url in services.traced.values():
        await ServiceClient(url, policy=_ASK, token=token).send("GET", "/ready")
