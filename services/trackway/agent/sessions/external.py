"""An agent of the user's own, as a program, container, Python function or URL: it calls the model through its session.

A program is given OPENAI_BASE_URL and OPENAI_API_KEY (and Anthropic's two), TRACEPARENT, and the row as JSON on its
standard input. It is bounded in number, time, memory and output, and all its processes are ended with it, also when
this service is killed. What runs is a setting of the service, never part of a request.

A container has two command lines: one runs it, one removes it whatever became of it. They name variables, whose values
come from the container engine's own environment, so that no key is in a list of processes.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from asyncio.subprocess import PIPE, STDOUT, Process, SubprocessStreamProtocol
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import ClassVar, SupportsFloat, cast

import httpx
from pydantic import ValidationError

from trackway.agent.context import AgentContext
from trackway.agent.episode import Episode, waits_for
from trackway.agent.loop import register
from trackway.agent.sessions.loop import SessionAgent
from trackway.agent.sessions.session import Session, SessionEpisode
from trackway.agent.settings import AgentSettings, ContainerSettings, ExternalSettings
from trackway.agent.toolbox import Toolbox
from trackway.clients import shared_http
from trackway.serving.user_code import OwnCodeError, UserCodeExit, described, failure_of, loading
from trackway.system.process import Experimental, warn_experimental
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorCode, TrackwayError, shortened
from trackway.wire.service import REQUEST_TIMEOUT
from trackway.wire.sessions import ExternalReply, ExternalRollout, SessionAccess
from trackway.wire.trajectory import StopReason

_ENGINES = ("podman", "docker")


def run_command(container: ContainerSettings, name: str, variables: Iterable[str]) -> list[str]:
    """Runs the image as the container `name` with these variables. The row comes on its standard input."""
    return [
        *(_engine(container.engine), "run", "--rm", "--interactive", "--init", f"--name={name}"),
        f"--network={container.network}",
        *(f"--env={variable}" for variable in variables),
        *container.options,
        container.image,
        *container.command,
    ]


def remove_command(container: ContainerSettings, name: str) -> list[str]:
    """Ends and removes the container. Docker's goes on when the process that ran it is killed."""
    return [_engine(container.engine), "rm", "--force", name]


def _engine(wanted: str | None) -> str:
    """The engine's program. INVALID_REQUEST when there is none."""
    names = _ENGINES if wanted is None else (wanted,)
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        message = f"external.container: expected {' or '.join(names)} on the agent service's PATH, got none; install it"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    if Path(found).name == "docker":
        warn_experimental(Experimental.DOCKER)
    return found


AgentFunction = Callable[[SessionAccess, Sample], Awaitable[float | None] | float | None]
"""Runs the agent for a row, and may return its score. A plain function runs in a thread."""

logger = logging.getLogger("trackway.agent")

_ALLOWED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|LANG|LANGUAGE|LC_\w+|TMPDIR|XDG_\w+|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV"
    r"|OMP_NUM_THREADS|(HTTPS?|ALL|NO)_PROXY|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|NODE_EXTRA_CA_CERTS"
    r"|DOCKER_(HOST|CONTEXT|CONFIG|CERT_PATH|TLS_VERIFY)|CONTAINER_HOST|CONTAINERS_\w*CONF|DBUS_SESSION_BUS_ADDRESS"
    r"|OTEL_EXPORTER_OTLP_(TRACES_)?(ENDPOINT|PROTOCOL)",
    re.IGNORECASE,
)
"""Variables of this service that a program is given, by their names."""
_CREDENTIALS = re.compile(r"://[^/\s@]*@")
"""In the value of such a variable: a URL with a password or a token."""
NO_TELEMETRY = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",  # it posts traces, with the session's key, whatever the base URL
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
}
"""Variables that switch off what frameworks send to their makers by default."""
IMPORT_S = 120.0
"""Longest import of a function's module."""
_imports: dict[str, "Future[AgentFunction]"] = {}
"""Imports in progress, by `module:name`."""
_READ_BYTES = 65_536
_GUARD = Path(__file__).with_name("program_guard.py")
_PROBE_S = 20.0
_GUARD_S = 5.0
"""Longest wait for the guard, which gives the processes two seconds to end."""
_CLEANUP_S = 10.0
"""Longest time that the guard gives a cleanup."""
_MESSAGE_CHARS = 2_000
_MAX_REPLY_BYTES = 65_536
"""Most bytes of a URL's answer without its log."""
_JSON_BYTES = 6
"""Most bytes of JSON for one of the log."""


@register("external")
class ExternalAgent(SessionAgent):
    """Own program: started for each rollout, calls the model by a base URL (setting `external`)."""

    external_name: ClassVar[str] = ""
    """Its name in the setting `external_agents`. Empty for the setting `external`."""

    def __init__(self, services: AgentContext) -> None:
        super().__init__(services)
        settings = services.settings
        self.external = settings.external_agents.get(self.external_name) if self.external_name else settings.external
        if self.external is not None:
            self.bounds, self.formats = self.external.bounds, self.external.formats

    async def converse(self, episode: Episode, toolbox: Toolbox) -> StopReason:
        """One run of the program, once another may run. Raises INVALID_REQUEST when none is configured."""
        if self.external is None:
            message = "expected a program in the agent service's setting `external`, got none"
            raise TrackwayError(
                ErrorCode.INVALID_REQUEST,
                f"agent_name {self.agent_name}: {message}; set external.command, external.function or external.url",
            )
        slots = self.services.sessions.programs[self.external_name]
        with waits_for("a free slot of the setting external.max_running", episode.deadline):
            await slots.acquire()
        try:
            return await super().converse(episode, toolbox)
        finally:
            slots.release()

    async def attend(self, session: Session) -> None:
        """Run it to its end. Raises AGENT_FAILED when it fails."""
        settings, sessions, episode = self.external, self.services.sessions, session.episode
        assert settings is not None
        access = sessions.access_here(session) if settings.is_on_this_host else sessions.access(session)
        with waits_for("its own agent", episode.deadline):
            score = None
            if settings.function is not None:
                function = await imported(settings.function, IMPORT_S)
                score = await called(function, access, episode.sample)
            elif settings.url is not None:
                reply = await posted(shared_http(), settings.url, settings, access, episode)
                score, episode.log = reply.score, reply.log[-settings.max_output_bytes :]
            else:
                await run_program(settings, access, episode)
            if score is not None:
                episode.set_reward(score)


def register_external(settings: AgentSettings) -> None:
    """Register each agent of the setting `external_agents` as `external:NAME`; warn if programs see other processes."""
    agents = [*settings.external_agents.values(), *([settings.external] if settings.external is not None else [])]
    if any(agent.command and agent.hides_processes for agent in agents):
        can_hide_processes()
    for name in settings.external_agents:
        description = f"Own agent {name!r} of the setting `external_agents`."
        own = type("ExternalAgent", (ExternalAgent,), {"external_name": name, "__doc__": description})
        register(f"external:{name}")(own)


async def run_program(settings: ExternalSettings, access: SessionAccess, episode: SessionEpisode) -> None:
    """Run the command, or the container, to its end, and end all its processes with it.

    Raises AGENT_FAILED unless it exits with 0.
    """
    loop = asyncio.get_running_loop()
    program = program_of(settings, access)
    held, holding = os.pipe()
    # A file and not a pipe: a program that ends at once does not break a write, under uvloop a RuntimeError.
    with open(holding, "wb", buffering=0) as owner, tempfile.TemporaryFile() as row:
        try:
            row.write(episode.sample.model_dump_json(exclude_none=True).encode())
            row.seek(0)
            if settings.folder is not None and not settings.folder.is_dir():
                message = (
                    f"external.folder: expected a folder, got {str(settings.folder)!r}; create it or correct the path"
                )
                raise TrackwayError(ErrorCode.AGENT_FAILED, message)
            transport, protocol = await loop.subprocess_exec(
                lambda: SubprocessStreamProtocol(_READ_BYTES, loop),
                *guarded(program, held),
                stdin=row,
                stdout=PIPE,
                stderr=STDOUT,
                cwd=settings.folder,
                env=environment(os.environ, settings, access),
                start_new_session=True,
                pass_fds=(held,),
            )
        except OSError as error:
            message = f"expected the agent's program {program.name!r} to start, got {type(error).__name__}: {error}"
            raise TrackwayError(ErrorCode.AGENT_FAILED, f"{message}; correct the setting `external`") from error
        finally:
            os.close(held)
        process = Process(transport, protocol, loop)
        assert process.stdout is not None
        reading = asyncio.create_task(_last(process.stdout, settings.max_output_bytes, episode))
        try:
            code = await process.wait()
        finally:
            try:
                owner.close()
                await _ended(process, _GUARD_S + program.cleanup_s)
                await _read_up(reading)
            finally:
                reading.cancel()
                transport.close()  # a process that could not be ended may hold its pipes open
    if code != 0:
        message = f"expected the agent's program {program.name!r} to exit with 0, got {code}; it said last:"
        raise TrackwayError(ErrorCode.AGENT_FAILED, f"{message} {episode.log[-_MESSAGE_CHARS:].strip() or 'nothing'}")


@dataclass(frozen=True)
class Program:
    """Program that a rollout runs."""

    name: str
    """For messages."""
    command: list[str]
    cleanup: list[str] = field(default_factory=list[str])
    """A command that ends what may be left."""
    cleanup_s: float = 0.0
    """Longest time of the cleanup."""
    hides_processes: bool = False
    """True if it sees its own processes only."""


def program_of(settings: ExternalSettings, access: SessionAccess) -> Program:
    """The command, or one that runs the container. INVALID_REQUEST without a container engine."""
    if settings.container is None:
        hides = settings.hides_processes and can_hide_processes()
        return Program(settings.command[0], settings.command, hides_processes=hides)
    name = f"trackway-{access.session_id}"
    own = {name: value for name, value in os.environ.items() if name in settings.variables}
    run = run_command(settings.container, name, environment(own, settings, access))
    return Program(settings.container.image, run, remove_command(settings.container, name), _CLEANUP_S)


def guarded(program: Program, owner: int) -> list[str]:
    """The command below its guard, which ends it when the pipe `owner` is closed; the command alone elsewhere."""
    if sys.platform != "linux":
        return program.command
    guard = [sys.executable, "-I", "-S", str(_GUARD), str(owner)]
    return [*guard, json.dumps(program.cleanup), str(int(program.hides_processes)), *program.command]


@cache
def can_hide_processes() -> bool:
    """Return whether this host gives a program a PID namespace. Tried once, with a warning if it does not."""
    got = f"{sys.platform}, not Linux"
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", ""]
        held, holding = os.pipe()
        try:
            probe = guarded(Program("probe", command, hides_processes=True), held)
            ended = subprocess.run(probe, pass_fds=(held,), timeout=_PROBE_S, capture_output=True, check=False)
            if ended.returncode == 0:
                return True
            got = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        except subprocess.TimeoutExpired as error:
            got = str(error)
        finally:
            os.close(held)
            os.close(holding)
    logger.warning(
        "expected PID namespaces for the programs of external agents, got %s: a program can read other processes' "
        "environments in /proc; allow namespaces (a container needs CAP_SYS_ADMIN or user namespaces), or use "
        "external.container",
        got,
    )
    return False


async def _ended(process: Process, guard_s: float) -> None:
    """Wait until the guard has ended all processes. Kill the process group where it does not.

    asyncio's `wait` also waits for the pipes, which a process that could not be ended may hold open.
    """
    if sys.platform == "linux":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(guard_s):
                await process.wait()
                return
    if process.returncode is not None:
        return  # its number may be another process's by now
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GUARD_S):
            await process.wait()


async def _read_up(reading: "asyncio.Task[None]") -> None:
    """Wait for the rest of the output. A process that could not be ended may hold it open."""
    await asyncio.wait({reading}, timeout=_GUARD_S)
    reading.cancel()


async def posted(
    http: httpx.AsyncClient, url: str, settings: ExternalSettings, access: SessionAccess, episode: SessionEpisode
) -> ExternalReply:
    """The answer of the URL to one rollout. It has until the trajectory's deadline. Raises AGENT_FAILED."""
    rollout = ExternalRollout(**dict(access), sample=episode.sample)
    headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
    headers |= {"content-type": "application/json", REQUEST_TIMEOUT: f"{episode.deadline.remaining:.3f}"}
    if access.traceparent is not None:
        headers["traceparent"] = access.traceparent
    try:
        body = rollout.model_dump_json(exclude_none=True)
        timeout_s = episode.deadline.remaining
        async with http.stream("POST", url, content=body, headers=headers, timeout=timeout_s) as answer:
            reply = await _read(answer, url, _MAX_REPLY_BYTES + _JSON_BYTES * settings.max_output_bytes)
        if not answer.is_success:
            text = reply.decode(errors="replace")
            raise TrackwayError(ErrorCode.AGENT_FAILED, _misses(url, f"HTTP {answer.status_code}: {text}"))
        return ExternalReply.model_validate_json(reply or b"{}")
    except httpx.TransportError as error:
        raise TrackwayError(ErrorCode.AGENT_FAILED, _misses(url, f"{type(error).__name__}: {error}")) from error
    except ValidationError as error:
        raise TrackwayError(ErrorCode.AGENT_FAILED, _misses(url, str(error))) from error


async def _read(answer: httpx.Response, url: str, most_bytes: int) -> bytes:
    """The body. AGENT_FAILED when it is longer."""
    body = bytearray()
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > most_bytes:
            raise TrackwayError(ErrorCode.AGENT_FAILED, _misses(url, f"more than {most_bytes} bytes; shorten the log"))
    return bytes(body)


def _misses(url: str, got: str) -> str:
    return f"expected an answer of 200 with a score, or {{}}, from the agent at {url}, got {got}"[:_MESSAGE_CHARS]


async def _last(output: asyncio.StreamReader, most_bytes: int, episode: SessionEpisode) -> None:
    """Keep the end of the output as the episode's log."""
    kept = b""
    while part := await output.read(_READ_BYTES):
        kept = (kept + part)[-most_bytes:]
        episode.log = kept.decode(errors="replace")


def environment(own: Mapping[str, str], settings: ExternalSettings, access: SessionAccess) -> dict[str, str]:
    """The program's variables: allowed ones of the service's, the settings', and how to reach the model."""
    kept = {
        name: value
        for name, value in own.items()
        if name in settings.variables or (_ALLOWED.fullmatch(name) and _CREDENTIALS.search(value) is None)
    }
    traced = {} if access.traceparent is None else {"TRACEPARENT": access.traceparent}
    return {
        **kept,
        **NO_TELEMETRY,
        **settings.environment,
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": access.api_key,
        **traced,
    }


def function_of(place: str) -> AgentFunction:
    """The function at `module:name`, imported without telemetry. Raises AGENT_FAILED when there is none."""
    module, _, name = place.partition(":")
    for variable, value in NO_TELEMETRY.items():
        os.environ.setdefault(variable, value)
    try:
        with loading(f"external.function: expected a function at {place!r}, it cannot be loaded"):
            function = getattr(import_module(module), name)
    except (OwnCodeError, UserCodeExit) as error:
        raise TrackwayError(ErrorCode.AGENT_FAILED, f"{error}; correct the setting, or the module") from error
    if not callable(function):
        got = f"external.function: expected a function at {place!r}, got {shortened(repr(function), 200)}"
        raise TrackwayError(ErrorCode.AGENT_FAILED, f"{got}; correct the setting")
    return cast(AgentFunction, function)


async def imported(place: str, within_s: float) -> AgentFunction:
    """The function at `module:name`, imported in a thread while the service goes on. Raises AGENT_FAILED.

    Rollouts that wait for the same function share a thread: one that imports cannot be stopped.
    """
    importing = _imports.get(place)
    if importing is None:
        importing = _imports[place] = Future[AgentFunction]()
        threading.Thread(target=_import, args=(place, importing), name=f"import {place}", daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(importing)), within_s)
    except TimeoutError:
        module = place.partition(":")[0]
        message = f"external.function: expected the import of {module!r} to take at most {within_s:g} s, it still runs"
        remedy = "move what takes long at its top level into the function"
        raise TrackwayError(ErrorCode.AGENT_FAILED, f"{message}; {remedy}") from None


def _import(place: str, importing: "Future[AgentFunction]") -> None:
    try:
        function = function_of(place)
    except BaseException as error:
        del _imports[place]
        importing.set_exception(failure_of(error))
    else:
        del _imports[place]
        importing.set_result(function)


async def called(function: AgentFunction, access: SessionAccess, sample: Sample) -> float | None:
    """The score that the function returns. Raises AGENT_FAILED for an exception of its own, or another value."""
    try:
        if inspect.iscoroutinefunction(function):
            score = await function(access, sample)
        else:
            score = await asyncio.to_thread(function, access, sample)
            score = await score if inspect.isawaitable(score) else score
    except (Exception, SystemExit) as error:
        message = f"expected the agent's function to return, it raised {described(error)}"
        raise TrackwayError(ErrorCode.AGENT_FAILED, message[:_MESSAGE_CHARS]) from error
    if score is None or isinstance(score, SupportsFloat):
        return None if score is None else float(score)
    message = f"expected the agent's function to return its score, a number, or None, got {shortened(repr(score), 200)}"
    raise TrackwayError(ErrorCode.AGENT_FAILED, f"{message}; return one of them")
