"""The way to an inference server: one that runs already, or a child process of this one."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trackway.rollout.engines.remote.http import EngineHttp
from trackway.rollout.engines.remote.server_process import SideProcess
from trackway.rollout.settings import RolloutSettings
from trackway.system import free_port
from trackway.wire.errors import ErrorCode, TrackwayError

_HEALTH_S = 0.25


def check_server(settings: RolloutSettings) -> None:
    """Raises INVALID_REQUEST for settings with neither a running server nor an interpreter to start one with."""
    if settings.engine_url is None and settings.engine_python is None:
        message = f"expected engine_python or engine_url for engine={settings.engine}, got neither; set one of them"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)


def prepared(
    settings: RolloutSettings, command: Callable[[int], Sequence[str]], environment: Callable[[Path], Mapping[str, str]]
) -> tuple[SideProcess, EngineHttp]:
    """A server process that is not started yet, and its client.

    `command` takes the server's port, and `environment` a folder for the server alone.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = Path(tempfile.gettempdir()) / f"trackway-{settings.engine}-{settings.replica}.log"
    folder = Path(tempfile.mkdtemp(prefix=f"trackway-{settings.engine}-"))
    process = SideProcess(command(port), environment(folder), settings.engine_log or log, url, folder)
    return process, EngineHttp(url, process.settle)


async def healthy(http: EngineHttp) -> bool:
    """True once the server responds. Raises TrackwayError before."""
    await http.get("/health", timeout_s=5.0)
    return True


async def found(http: EngineHttp, within_s: float) -> None:
    """Wait for a running server to respond. Raises UNAVAILABLE."""
    try:
        async with asyncio.timeout(within_s):
            while not await _answers(http):
                await asyncio.sleep(_HEALTH_S)
    except TimeoutError:
        message = f"expected a server at {http.base_url}, got no healthy one; start it, or fix engine_url"
        raise TrackwayError(ErrorCode.UNAVAILABLE, message) from None


async def _answers(http: EngineHttp) -> bool:
    try:
        return await healthy(http)
    except TrackwayError:
        return False
