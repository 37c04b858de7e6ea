"""Waits of a run's process, once they last, and states of its rollouts. It writes both to `activity.json`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from trackway.system.waits import Waits
from trackway.trainer.run_state.folder import Activity, RunFolder

REPORT_EVERY_S = 1.0
PATIENCE_S = 2.0
"""Shorter waits are not written."""

logger = logging.getLogger("trackway.trainer")


@dataclass
class ActivityReport:
    """The sources of the file."""

    waits: Waits = field(default_factory=Waits)
    account: Callable[[], dict[str, int]] = dict
    """The rollouts by state. Nothing until the run is built."""

    def activity(self) -> Activity:
        """Waits that last, and the rollouts as they are now."""
        return Activity(waits=self.waits.current(PATIENCE_S), rollouts=self.account())


@asynccontextmanager
async def reported(folder: RunFolder) -> AsyncIterator[ActivityReport]:
    """Keeps the run's file up to date for the duration of the block. Afterwards it has the rollouts and no wait."""
    report = ActivityReport()
    reporting = asyncio.create_task(_report(folder, report))
    try:
        yield report
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        with suppress(OSError):
            await asyncio.to_thread(folder.write_activity, Activity(rollouts=report.account()))


async def _report(folder: RunFolder, report: ActivityReport) -> None:
    written: Activity | None = None
    while True:
        current = report.activity()
        if current != written:
            try:
                await asyncio.to_thread(folder.write_activity, current)
                written = current
            except OSError as error:
                logger.debug("the activity of the run cannot be written: %s", error)
        await asyncio.sleep(REPORT_EVERY_S)
