"""A Python interpreter that keeps its variables between calls, with a deadline and monitoring.

Requests and replies go over a private socket, whose other end is in repl.py. `launcher_for` checks once whether code
can be isolated on this machine.
"""

import asyncio
import codecs
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import struct
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass

from trackway.tools.sandbox.launcher import Launcher
from trackway.tools.sandbox.process import InterpreterProcess, SandboxSettings
from trackway.tools.sandbox.repl import BROKEN, READY


class BoundedOutput:
    """Keeps the first and the last characters, with a marker for the number of omitted ones."""

    def __init__(self, max_chars: int) -> None:
        self._half = max_chars // 2
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._head = ""
        self._tail = ""
        self._chars = 0
        self.bytes_read = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes of UTF-8 text. They may end within a character."""
        self.bytes_read += len(data)
        text = self._decoder.decode(data)
        room = self._half - len(self._head)
        self._head += text[:room]
        self._tail = (self._tail + text[room:])[-self._half :]
        self._chars += len(text)

    def text(self) -> str:
        """The kept text, with the marker if something is omitted."""
        left_out = self._chars - len(self._head) - len(self._tail)
        marker = f"\n[... {left_out} characters left out ...]\n" if left_out else ""
        return f"{self._head}{marker}{self._tail}"


_ANSWERS = {b"y": True, b"n": False}


class _ChannelError(Exception):
    """The other end is closed, or its data is invalid: code in the sandbox can write to it."""


async def ready(channel: socket.socket) -> None:
    """Wait for the interpreter's first message."""
    await _answer(channel, READY)


async def ask(channel: socket.socket, code: str) -> bool:
    """Run a cell of code. Returns whether it raised nothing."""
    token = secrets.token_bytes(len(READY))
    data = code.encode("utf-8", "surrogatepass")
    try:
        await asyncio.get_running_loop().sock_sendall(channel, struct.pack(">I", len(data)) + token + data)
    except OSError as error:
        raise _ChannelError("it closed its channel") from error
    return await _answer(channel, token)


async def _answer(channel: socket.socket, token: bytes) -> bool:
    heard = b""
    while len(heard) <= len(token):
        try:
            more = await asyncio.get_running_loop().sock_recv(channel, len(token) + 1 - len(heard))
        except OSError as error:
            raise _ChannelError("it closed its channel") from error
        if not more:
            raise _ChannelError("it closed its channel")
        heard += more
    if heard[:-1] != token or heard[-1:] not in _ANSWERS:
        raise _ChannelError("it wrote into its channel")
    return _ANSWERS[heard[-1:]]


MAX_OUTPUT_BYTES = 16 << 20
"""Maximum output of a call. Reading more would cost the service too much time."""
_READ_BYTES = 1 << 16
_BUSY_WATCH_S, _IDLE_WATCH_S = 0.1, 2.0
_OWN_END_S = 1.0
"""Seconds to wait for the exit status of an interpreter that has closed its channel."""
_KILLED_END_S = 10.0
_POLL_S = 0.005


class _SandboxFailedError(RuntimeError):
    """No interpreter could be started. The message has its output."""


@dataclass(frozen=True)
class CellResult:
    """The result of a call.

    text: what it printed, with the value of its last expression, its traceback, and why the interpreter exited.
    succeeded: the code raised nothing.
    """

    text: str
    succeeded: bool


class Interpreter:
    """Starts its process at the first call, and again at the call after one that ended it.

    The caller must not run calls concurrently. Between calls all processes of a sandbox are stopped: processes and
    threads that a call leaves behind run only during later calls.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._process: InterpreterProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._burial: asyncio.Task[None] | None = None
        self._excess: str | None = None
        self._cut_off = False

    async def run(self, code: str, timeout_s: float) -> CellResult:
        """Run a cell of code. _SandboxFailedError when no interpreter starts, OVERLOADED at the maximum."""
        output = BoundedOutput(self._launcher.settings.output_chars)
        if self._process is not None and (status := self._process.popen.poll()) is not None:
            return await self._lost(output, f"{self._why(status)}, between two calls; this code did not run")
        try:
            async with asyncio.timeout(timeout_s):
                process = self._process or await self._started(output)
                process.go_on()
                self._watch_every(_BUSY_WATCH_S, process)
                with self._collected(process, output):
                    succeeded = await ask(process.channel, code)
        except TimeoutError:
            return await self._lost(output, f"the call ran longer than {timeout_s:g} s")
        except _ChannelError as error:
            assert self._process is not None
            status = await _exit_status(self._process, _OWN_END_S)
            return await self._lost(output, str(error) if status is None else self._why(status))
        except BaseException:
            self._cut_off = self._process is not None
            await self.stop()
            raise
        process.pause()
        self._watch_every(_IDLE_WATCH_S, process, paused=True)
        return CellResult(output.text(), succeeded)

    async def stop(self) -> None:
        """Kill the interpreter and all its processes. Returns when all have exited."""
        if self._process is not None:
            await self._end(self._process)
        elif self._burial is not None:
            await asyncio.shield(self._burial)

    async def _started(self, output: BoundedOutput) -> InterpreterProcess:
        self._excess = None
        self._process = process = self._launcher.launch()
        if self._cut_off:
            output.feed(b"[a fresh interpreter: the last call was cut off, and its variables are lost]\n")
            self._cut_off = False
        with self._collected(process, output):
            try:
                await ready(process.channel)
            except _ChannelError as error:
                await _exit_status(process, _OWN_END_S)
                _drain(process, output)
                raise _SandboxFailedError(f"expected a Python interpreter to start, got: {output.text()}") from error
        process.ready()
        return process

    async def _lost(self, output: BoundedOutput, reason: str) -> CellResult:
        """The call's output, with the reason why its interpreter has ended or is killed."""
        assert self._process is not None
        await self._end(self._process, output)
        printed = output.text()
        newline = "\n" if printed and not printed.endswith("\n") else ""
        note = f"[the interpreter ended: {reason}; its variables are lost, the next call starts a fresh one]"
        return CellResult(f"{printed}{newline}{note}", succeeded=False)

    def _why(self, status: int) -> str:
        return f"the code used {self._excess}" if self._excess else _named(status)

    async def _end(self, process: InterpreterProcess, output: BoundedOutput | None = None) -> None:
        self._process = None
        if self._watch is not None:
            self._watch.cancel()
        process.kill()
        # The caller may be cancelled here; the cleanup must not.
        self._burial = asyncio.create_task(self._bury(process, output))
        await asyncio.shield(self._burial)

    async def _bury(self, process: InterpreterProcess, output: BoundedOutput | None) -> None:
        await _exit_status(process, _KILLED_END_S)
        if output is not None:
            _drain(process, output)
        self._launcher.bury(process)

    @contextlib.contextmanager
    def _collected(self, process: InterpreterProcess, output: BoundedOutput) -> Iterator[None]:
        """Collects the code's output in `output` while the block runs; then reads what is left."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            data = os.read(process.output, _READ_BYTES)
            output.feed(data)
            if output.bytes_read > MAX_OUTPUT_BYTES:
                self._excess = f"more than {MAX_OUTPUT_BYTES >> 20} MB of output"
                process.kill()
            if not data or self._excess:
                loop.remove_reader(process.output)

        loop.add_reader(process.output, read)
        try:
            yield
            _drain(process, output)
        finally:
            loop.remove_reader(process.output)

    def _watch_every(self, interval_s: float, process: InterpreterProcess, paused: bool = False) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.create_task(self._watched(interval_s, process, paused))

    async def _watched(self, interval_s: float, process: InterpreterProcess, paused: bool) -> None:
        while process.popen.poll() is None and self._excess is None:
            await asyncio.sleep(interval_s)
            if paused:
                process.pause()  # processes that escaped by forking, or were continued by such a process
            self._excess = self._excess or process.excess(self._launcher.settings)
        process.kill()


def _drain(process: InterpreterProcess, output: BoundedOutput) -> None:
    """Read the pipe's current content. Threads and forks may print forever."""
    (waiting,) = struct.unpack("i", fcntl.ioctl(process.output, termios.FIONREAD, b"\0" * 4))
    if waiting:
        output.feed(os.read(process.output, waiting))


async def _exit_status(process: InterpreterProcess, timeout_s: float) -> int | None:
    """The exit status, or None. Waits for the exit of all its processes, or for `timeout_s`."""
    end = asyncio.get_running_loop().time() + timeout_s
    while not process.ended and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(_POLL_S)
    return process.popen.returncode


def _named(status: int) -> str:
    """bubblewrap returns 128 + n for signal n, Popen -n."""
    if status == BROKEN:
        return "the code broke what the interpreter needs to answer"
    number = -status if status < 0 else status - 128
    if number in set(signal.Signals):
        return f"it was ended by {signal.Signals(number).name}"
    return f"it exited with status {status}"


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
        except _SandboxFailedError as error:
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
        raise _SandboxFailedError(outcome.text)
