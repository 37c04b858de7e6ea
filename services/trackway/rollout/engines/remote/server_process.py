"""An inference server as a child process: started, monitored, and stopped with all its children.

    process = SideProcess([python, "-m", "server", "--port", "8123"], {"OMP_NUM_THREADS": "1"}, log, url)
    await process.start(healthy, deadline_s=600)   # ENGINE_FAILED when it exits, UNAVAILABLE on time-out
    process.check()                                # UNAVAILABLE with the end of its log once it has exited
    await process.stop()

The server runs under `process_guard.py`, which kills it and its children even when this process gets SIGKILL.
"""

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import httpx

from trackway.system import log_tail, without_secrets
from trackway.wire.errors import ErrorCode, TrackwayError

_GUARD = Path(__file__).with_name("process_guard.py")
_POLL_S = 0.05
_HEALTH_S = 0.25
_GUARD_LINGER_S = 5.0
_LOG_END_BYTES = 2000
# Variables that point to our packages would break the server's interpreter.
_OURS = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"})


class SideProcess:
    """One server process. `env` is added to our environment without secrets, `folder` is removed after its end.

    The programs beside its interpreter are first on PATH, as in an activated environment: vLLM looks for `ninja` there.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, url: str, folder: Path | None = None
    ) -> None:
        self.command, self.log, self.url, self._folder = list(command), log, url, folder
        own = {name: value for name, value in without_secrets(os.environ).items() if name not in _OURS}
        beside = [str(Path(command[0]).absolute().parent)] if os.sep in command[0] else []
        self._env = {**own, "PATH": os.pathsep.join([*beside, own.get("PATH", os.defpath)]), **env}
        self._guard: subprocess.Popen[bytes] | None = None
        self._status: int | None = None

    @property
    def alive(self) -> bool:
        """Return whether the server is running."""
        return self._guard is not None and not self._ended(self._guard)

    def check(self) -> None:
        """Raises UNAVAILABLE with the end of the log when the server has exited."""
        if not self.alive:
            raise TrackwayError(ErrorCode.UNAVAILABLE, self._story("expected a running server, got its exit"))

    async def settle(self, within_s: float = 1.0) -> None:
        """Do `check` after a moment: a dying server closes its connections before its exit is visible."""
        end = time.monotonic() + within_s
        while self.alive and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        self.check()

    async def start(self, healthy: Callable[[], Awaitable[bool]], deadline_s: float) -> None:
        """Start the server and wait until `healthy` returns true. An error of `healthy` counts as false.

        Raises:
            TrackwayError: ENGINE_FAILED when it exited, UNAVAILABLE on time-out, after which it is stopped.
        """
        self._spawn()
        try:
            async with asyncio.timeout(deadline_s):
                await self._until(healthy)
        except TimeoutError:
            story = self._story(f"expected a healthy server within {deadline_s:g} s, got none; raise engine_start_s")
            await self.stop(grace_s=1.0)
            raise TrackwayError(ErrorCode.UNAVAILABLE, story) from None
        except BaseException:
            await self.stop(grace_s=1.0)
            raise

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stop the server and its children: TERM, then KILL after the grace period. Waits for exit. Idempotent."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        if guard.poll() is None:
            _write(guard, f"{grace_s}\n")
        deadline = time.monotonic() + grace_s + _GUARD_LINGER_S
        while guard.poll() is None:
            if time.monotonic() > deadline:
                guard.kill()
            await asyncio.sleep(_POLL_S)
        _close(guard)

    def _spawn(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log.write(b"$ " + shlex.join(self.command).replace("\n", "\\n").encode() + b"\n")
            log.flush()
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), str(self._folder or ""), *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._env,
                start_new_session=True,
            )
        assert self._guard.stdout is not None
        os.set_blocking(self._guard.stdout.fileno(), False)

    async def _until(self, healthy: Callable[[], Awaitable[bool]]) -> None:
        while True:
            if not self.alive:
                message = "expected a healthy server, got its exit; see the cause in its log"
                raise TrackwayError(ErrorCode.ENGINE_FAILED, self._story(message))
            with contextlib.suppress(TrackwayError, httpx.HTTPError, OSError):
                if await healthy():
                    return
            await asyncio.sleep(_HEALTH_S)

    def _ended(self, guard: "subprocess.Popen[bytes]") -> bool:
        if self._status is None:
            assert guard.stdout is not None
            status = guard.stdout.read(16)  # None: open and empty
            if status is not None:
                self._status = int(status) if status else guard.wait()
        return self._status is not None

    def _story(self, what: str) -> str:
        status = "" if self._status is None else f" with status {self._status}"
        end = log_tail(self.log, lines=30, max_bytes=_LOG_END_BYTES)
        return f"{self.command[0]} at {self.url}: {what}{status}. The end of {self.log}:\n{end}"


def _write(guard: "subprocess.Popen[bytes]", line: str) -> None:
    assert guard.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it exited meanwhile
        guard.stdin.write(line.encode())
        guard.stdin.flush()


def _close(guard: "subprocess.Popen[bytes]") -> None:
    for pipe in (guard.stdin, guard.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
