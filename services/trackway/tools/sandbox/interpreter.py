"""A Python interpreter that keeps its variables from call to call, within a deadline and under a watch."""

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass

from trackway.tools.sandbox.channel import ChannelError, ask, ready
from trackway.tools.sandbox.launcher import Launcher
from trackway.tools.sandbox.output import BoundedOutput
from trackway.tools.sandbox.process import InterpreterProcess
from trackway.tools.sandbox.repl import BROKEN

MAX_OUTPUT_BYTES = 16 << 20
"""More output in one call ends the interpreter: to read it takes this service's time."""
_READ_BYTES = 1 << 16
_BUSY_WATCH_S, _IDLE_WATCH_S = 0.1, 2.0
_OWN_END_S = 1.0
"""Seconds that an interpreter with a closed channel may take to end by itself, so that its exit status is known."""
_KILLED_END_S = 10.0
_POLL_S = 0.005


class SandboxFailedError(RuntimeError):
    """No interpreter could be started; the message has what was heard of it."""


@dataclass(frozen=True)
class Outcome:
    """How a call ended.

    text: what it printed, with the value of its last expression, its traceback, and why the interpreter ended.
    succeeded: the code raised nothing.
    """

    text: str
    succeeded: bool


class Interpreter:
    """Its process starts with the first call, and anew with the call after one that ended it.

    Calls run one after another, which the caller ensures. Between two calls all processes of a sandbox are stopped:
    what a call leaves running, threads included, runs only during later calls.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._process: InterpreterProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._burial: asyncio.Task[None] | None = None
        self._excess: str | None = None
        self._cut_off = False

    async def run(self, code: str, timeout_s: float) -> Outcome:
        """One cell of code. SandboxFailedError when no interpreter starts, OVERLOADED when too many live."""
        output = BoundedOutput(self._launcher.settings.output_chars)
        if self._process is not None and (status := self._process.popen.poll()) is not None:
            return await self._lost(output, f"{self._why(status)}, between two calls; this code did not run")
        try:
            async with asyncio.timeout(timeout_s):
                process = self._process or await self._started(output)
                process.go_on()
                self._watch_every(_BUSY_WATCH_S, process)
                with self._heard(process, output):
                    succeeded = await ask(process.channel, code)
        except TimeoutError:
            return await self._lost(output, f"the call ran longer than {timeout_s:g} s")
        except ChannelError as error:
            assert self._process is not None
            status = await _gone(self._process, _OWN_END_S)
            return await self._lost(output, str(error) if status is None else self._why(status))
        except BaseException:
            self._cut_off = self._process is not None
            await self.stop()
            raise
        process.pause()
        self._watch_every(_IDLE_WATCH_S, process, paused=True)
        return Outcome(output.text(), succeeded)

    async def stop(self) -> None:
        """End the interpreter and everything that it started; returns when none of it lives."""
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
        with self._heard(process, output):
            try:
                await ready(process.channel)
            except ChannelError as error:
                await _gone(process, _OWN_END_S)
                _drain(process, output)
                raise SandboxFailedError(f"expected a Python interpreter to start, got: {output.text()}") from error
        process.ready()
        return process

    async def _lost(self, output: BoundedOutput, reason: str) -> Outcome:
        """What the call printed, and why its interpreter ended or is ended now."""
        assert self._process is not None
        await self._end(self._process, output)
        printed = output.text()
        newline = "\n" if printed and not printed.endswith("\n") else ""
        note = f"[the interpreter ended: {reason}; its variables are lost, the next call starts a fresh one]"
        return Outcome(f"{printed}{newline}{note}", succeeded=False)

    def _why(self, status: int) -> str:
        return f"the code used {self._excess}" if self._excess else _named(status)

    async def _end(self, process: InterpreterProcess, output: BoundedOutput | None = None) -> None:
        self._process = None
        if self._watch is not None:
            self._watch.cancel()
        process.kill()
        # Whoever waits here may be cancelled; what is left to do is not.
        self._burial = asyncio.create_task(self._bury(process, output))
        await asyncio.shield(self._burial)

    async def _bury(self, process: InterpreterProcess, output: BoundedOutput | None) -> None:
        await _gone(process, _KILLED_END_S)
        if output is not None:
            _drain(process, output)
        self._launcher.bury(process)

    @contextlib.contextmanager
    def _heard(self, process: InterpreterProcess, output: BoundedOutput) -> Iterator[None]:
        """What the code prints goes to `output`, inside the block as it comes; then what is there already."""
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
                process.pause()  # what escaped by forking, or was continued by what did
            self._excess = self._excess or process.excess(self._launcher.settings)
        process.kill()


def _drain(process: InterpreterProcess, output: BoundedOutput) -> None:
    """Read what is in the pipe now; threads and forks may go on printing for ever."""
    (waiting,) = struct.unpack("i", fcntl.ioctl(process.output, termios.FIONREAD, b"\0" * 4))
    if waiting:
        output.feed(os.read(process.output, waiting))


async def _gone(process: InterpreterProcess, timeout_s: float) -> int | None:
    """The exit status, None while it has none; waits until nothing of it lives, or for `timeout_s`."""
    end = asyncio.get_running_loop().time() + timeout_s
    while not process.ended and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(_POLL_S)
    return process.popen.returncode


def _named(status: int) -> str:
    """bubblewrap says 128 + n for signal n, Popen says -n."""
    if status == BROKEN:
        return "the code broke what the interpreter needs to answer"
    number = -status if status < 0 else status - 128
    if number in set(signal.Signals):
        return f"it was ended by {signal.Signals(number).name}"
    return f"it exited with status {status}"
