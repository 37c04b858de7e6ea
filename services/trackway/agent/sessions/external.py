"""An agent of the user's own as a program or a Python function, which calls the model through its session.

It is given OPENAI_BASE_URL and OPENAI_API_KEY (and Anthropic's two), TRACEPARENT, and the row as JSON on its standard
input. It is bounded in number, time, memory and output, and its whole process group is ended with it. What it runs is a
setting of the service, never part of a request.
"""

import asyncio
import contextlib
import inspect
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import cast

from trackway.agent.context import AgentContext
from trackway.agent.episode import Episode
from trackway.agent.loop import register
from trackway.agent.sessions.loop import SessionAgent
from trackway.agent.sessions.session import Session
from trackway.agent.settings import ExternalSettings
from trackway.agent.toolbox import Toolbox
from trackway.agent.waits import waits_for
from trackway.serving.own_code import loading
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.sessions.session import SessionAccess
from trackway.wire.trajectory import StopReason

AgentFunction = Callable[[SessionAccess, Sample], Awaitable[float | None] | float | None]
"""Runs the agent for a row, and may return its score; a plain function runs in a thread."""

_SECRET = re.compile(r"TRACKWAY_|.*(KEY|TOKEN|SECRET|PASSWORD)")
"""Variables of this service that a program is not given."""
_READ_BYTES = 65_536
_MESSAGE_CHARS = 2_000


@register("external")
class ExternalAgent(SessionAgent):
    """Own program: started for each rollout, calls the model by a base URL (setting `external`)."""

    def __init__(self, services: AgentContext) -> None:
        super().__init__(services)
        if services.settings.external is not None:
            self.bounds = services.settings.external.bounds

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        """One run of the program, once another may run."""
        slots = self.services.sessions.programs
        with waits_for("a free slot of the setting external.max_running", episode.deadline):
            await slots.acquire()
        try:
            return await super().converse(episode, toolbox)
        finally:
            slots.release()

    async def attend(self, session: Session) -> None:
        """Run it to its end. Raises AGENT_FAILED when it fails, INVALID_REQUEST when none is configured."""
        settings, access = self.services.settings.external, self.services.sessions.access(session)
        if settings is None:
            message = "agent_name external: expected a program in the agent service's setting `external`, got none"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, f"{message}; set external.command or external.function")
        with waits_for("its own agent", session.episode.deadline):
            if settings.function is not None:
                score = await called(function_of(settings.function), access, session.episode.sample)
                if score is not None:
                    session.episode.set_reward(float(score))
            else:
                await self._run(settings, access, session.episode)

    async def _run(self, settings: ExternalSettings, access: SessionAccess, episode: Episode) -> None:
        process = await asyncio.create_subprocess_exec(
            *bounded(settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=settings.folder,
            env=environment(os.environ, settings, access),
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            reading = asyncio.create_task(_last(process.stdout, settings.max_output_bytes, episode))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read the row
                process.stdin.write(episode.sample.model_dump_json().encode())
                await process.stdin.drain()
            process.stdin.close()
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        await reading
        if code != 0:
            message = f"expected the agent's program {settings.command[0]!r} to exit with 0, got {code}; it said last:"
            raise TrackwayError(
                ErrorCode.AGENT_FAILED, f"{message} {episode.log[-_MESSAGE_CHARS:].strip() or 'nothing'}"
            )


async def _last(output: asyncio.StreamReader, most_bytes: int, episode: Episode) -> None:
    """Keep the end of the output as the episode's log."""
    kept = b""
    while part := await output.read(_READ_BYTES):
        kept = (kept + part)[-most_bytes:]
        episode.log = kept.decode(errors="replace")


def bounded(settings: ExternalSettings) -> list[str]:
    """The command, started by a shell that limits its address space where a limit is set."""
    if settings.max_memory_bytes is None:
        return settings.command
    return ["/bin/sh", "-c", f'ulimit -v {settings.max_memory_bytes // 1024} && exec "$@"', "sh", *settings.command]


def environment(own: Mapping[str, str], settings: ExternalSettings, access: SessionAccess) -> dict[str, str]:
    """The program's variables: the service's without its secrets, the settings', and how to reach the model."""
    kept = {name: value for name, value in own.items() if _SECRET.match(name.upper()) is None}
    traced = {} if access.traceparent is None else {"TRACEPARENT": access.traceparent}
    return {
        **kept,
        **settings.environment,
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": access.api_key,
        # The OpenAI Agents SDK posts its traces, with the key, to its maker's address whatever the base URL.
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        **traced,
    }


def function_of(place: str) -> AgentFunction:
    """The function at `module:name`. Raises OwnCodeError when its module cannot be imported."""
    module, _, name = place.partition(":")
    with loading(f"setting external.function, {place!r}"):
        return cast(AgentFunction, getattr(import_module(module), name))


async def called(function: AgentFunction, access: SessionAccess, sample: Sample) -> float | None:
    """The score that the function returns. Raises AGENT_FAILED for an exception of its own."""
    try:
        if inspect.iscoroutinefunction(function):
            return await function(access, sample)
        return cast("float | None", await asyncio.to_thread(function, access, sample))
    except Exception as error:
        message = f"expected the agent's function to return, it raised {type(error).__name__}: {error}"
        raise TrackwayError(ErrorCode.AGENT_FAILED, message[:_MESSAGE_CHARS]) from error
