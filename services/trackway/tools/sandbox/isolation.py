"""Checks once whether code can be isolated on this machine."""

import asyncio
import logging
import shutil
import sys

from trackway.tools.sandbox.interpreter import Interpreter, SandboxFailedError
from trackway.tools.sandbox.launcher import Launcher
from trackway.tools.sandbox.settings import SandboxSettings

logger = logging.getLogger("trackway.tools")

_PROBE_TIMEOUT_S = 20.0
_REMEDY = (
    "`apt-get install bubblewrap`, and let this process make namespaces (an ordinary user needs the sysctls "
    "user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1 on Debian and "
    "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; a container needs an unmasked /proc and a seccomp "
    "profile that permits unshare, mount and sethostname); "
    "or set allow_unsandboxed=true to run code with this service's own rights"
)


class SandboxUnavailableError(RuntimeError):
    """Code cannot be isolated on this machine. The message says what is missing and the remedy."""


async def launcher_for(settings: SandboxSettings) -> Launcher:
    """A tested launcher, which isolates code unless isolation is unavailable and not required.

    SandboxUnavailableError when code cannot be isolated here. ValueError when `settings.python` is no interpreter.
    """
    if sys.platform != "linux":
        raise SandboxUnavailableError(f"expected Linux, whose namespaces and limits hold code back, got {sys.platform}")
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        problem = "expected bubblewrap (`bwrap`) on PATH, got none"
    else:
        launcher = await asyncio.to_thread(Launcher, settings, bwrap)
        try:
            await _probe(launcher)
            return launcher
        except SandboxFailedError as error:
            problem = f"expected bubblewrap to isolate a process, got: {error}"
    if not settings.allow_unsandboxed:
        raise SandboxUnavailableError(f"code cannot be isolated: {problem}; {_REMEDY}")
    logger.warning("code runs with this service's own rights to files, network and processes: %s", problem)
    launcher = await asyncio.to_thread(Launcher, settings, None)
    await _probe(launcher)
    return launcher


async def _probe(launcher: Launcher) -> None:
    interpreter = Interpreter(launcher)
    try:
        outcome = await interpreter.run("6 * 7", _PROBE_TIMEOUT_S)
    finally:
        await interpreter.stop()
    if outcome.text != "42\n":
        raise SandboxFailedError(outcome.text)
