"""The waits of a run's process, which it writes to `waits.json` once they last."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from trackway.system.waits import Waits
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.health import Wait

REPORT_EVERY_S = 1.0
PATIENCE_S = 2.0
"""Shorter waits are not written."""

logger = logging.getLogger("trackway.trainer")


@asynccontextmanager
async def reported(folder: RunFolder, waits: Waits) -> AsyncIterator[None]:
    """Keeps the file of the run's waits up to date for the duration of the block; it has none afterwards."""
    reporting = asyncio.create_task(_report(folder, waits))
    try:
        yield
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        with suppress(OSError):
            await asyncio.to_thread(folder.write_waits, [])


async def _report(folder: RunFolder, waits: Waits) -> None:
    written: list[Wait] | None = None
    while True:
        current = waits.current(PATIENCE_S)
        if current != written:
            try:
                await asyncio.to_thread(folder.write_waits, current)
                written = current
            except OSError as error:
                logger.debug("the waits of the run cannot be written: %s", error)
        await asyncio.sleep(REPORT_EVERY_S)
