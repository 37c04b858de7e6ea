"""Limits around a tool's code: argument checks, concurrency, time limit (TOOL_TIMEOUT), and errors as TOOL_FAILED.

Arguments are checked against the tool's JSON schema, with error messages that help a model.

Each call runs in its own task. At its deadline, or when its caller leaves, it is cancelled and gets a short grace
period. A call that then still runs (a thread cannot be stopped) keeps its slot until it ends, but its caller gets the
error. A tool that blocks must use a thread (`trackway.tools.in_thread`): a blocked event loop cannot be interrupted.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from jsonschema_rs import Draft202012Validator, FancyRegexOptions, ValidationError
from pydantic import JsonValue

from trackway.serving.user_code import contained, described, failure_of, outcome_of, raised_at
from trackway.system.waits import FairSlots
from trackway.tools.base import BaseTool, ToolInputError, ToolLimits
from trackway.tools.core.instances import free_within
from trackway.wire.base import well_formed
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ExecuteRequest, ToolResult

MAX_MESSAGE_CHARS = 1000
"""Maximum characters of an error: a wrong value may be long, and the message becomes an observation."""

MAX_PROBLEMS = 10
"""Maximum problems in an error."""

MAX_EXPLAINED_VALUES = 1000
"""Arguments with more values than this get only their first problem reported."""

_COMPOSING = {"allOf", "anyOf", "oneOf", "if", "$ref"}

# A pattern takes linear time, unless it has look-around or a back-reference: it then fails after this many steps.
_PATTERNS = FancyRegexOptions(backtrack_limit=10_000)


class ArgumentCheck:
    """The compiled parameter schema of one tool. Unknown arguments are refused unless the schema allows them.

    The arguments come from a parsed request, which nests at most 255 deep. A recursive schema takes over 10,000.
    ValueError when the schema itself is not a valid JSON schema.
    """

    def __init__(self, schema: ToolSchema) -> None:
        function = schema.function
        self._tool = function.name
        self._known = sorted(properties_of(function.parameters))
        # In a composed schema the names are in its parts, which only "unevaluated" covers.
        closed = "unevaluatedProperties" if _COMPOSING & set(function.parameters) else "additionalProperties"
        parameters = {"type": "object", closed: False, **function.parameters}
        if elsewhere := [ref for ref in _references(parameters) if not ref.startswith("#")]:
            raise ValueError(f"tool {self._tool!r}: expected $ref within the schema, got {elsewhere[0]!r}; copy it in")
        try:
            self._validator = Draft202012Validator(parameters, pattern_options=_PATTERNS, offline=True)
        except ValidationError as error:
            raise ValueError(f"tool {self._tool!r}: expected a JSON schema, got: {error.message}") from error

    def __call__(self, arguments: dict[str, JsonValue]) -> None:
        """Raises ToolInputError that names the wrong arguments."""
        if problems := self._problems(arguments):
            message = f"{self._tool}: {'; '.join(problems)}; expected arguments: {', '.join(self._known)}"
            raise ToolInputError(message[:MAX_MESSAGE_CHARS], tool=self._tool)

    def _problems(self, arguments: dict[str, JsonValue]) -> list[str]:
        try:
            self._validator.validate(arguments)
        except ValidationError as first:
            small = sum(1 for _ in islice(_values(arguments), MAX_EXPLAINED_VALUES)) < MAX_EXPLAINED_VALUES
            errors = self._validator.iter_errors(arguments) if small else [first]
            return [self._text(error, arguments) for error in islice(errors, MAX_PROBLEMS)]
        except UnicodeEncodeError:
            return ["expected whole characters, got half of one (a lone surrogate)"]
        return []

    def _text(self, error: ValidationError, arguments: dict[str, JsonValue]) -> str:
        if error.schema_path == ["additionalProperties"]:
            unknown = sorted(arguments.keys() - set(self._known))
            return f"unknown argument: {', '.join(repr(name) for name in unknown)}"
        if error.instance_path:
            return f"argument '{'.'.join(str(part) for part in error.instance_path)}': {error.message}"
        if error.schema_path[-1] == "required":
            return f"missing argument: {error.message}"
        return error.message


def _values(value: JsonValue) -> Iterator[JsonValue]:
    yield value
    for part in _parts(value):
        yield from _values(part)


def _parts(value: JsonValue) -> Iterable[JsonValue]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def properties_of(parameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The parameter names of a schema."""
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _references(schema: JsonValue) -> Iterator[str]:
    """All `$ref`s of a schema. An external one would be fetched."""
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


logger = logging.getLogger("trackway.tools")

R = TypeVar("R")


class LimitedTool:
    """A tool with its limits and its methods. Runs share its slots fairly: each call names its run."""

    def __init__(self, tool: BaseTool, limits: ToolLimits) -> None:
        self.tool = tool
        self.limits = limits.narrowed(tool.config)
        self._check = ArgumentCheck(tool.tool_schema)
        self._slots = FairSlots(self.limits.tool_concurrency)
        self._stopping: dict[str, asyncio.Task[object]] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def create(self, instance_id: str, create_kwargs: dict[str, JsonValue], run: str) -> None:
        """Create the state of an instance."""
        if self._inherits("create"):
            return
        await self._run("create", run, instance_id, lambda: self.tool.create(instance_id, **create_kwargs))

    async def execute(self, instance_id: str, request: ExecuteRequest, run: str) -> ToolResult:
        """Run a call with checked arguments; truncates its text to the limit."""
        arguments = self._coerced(request.arguments)
        self._check(arguments)

        async def call() -> ToolResult:
            return _valid(await self.tool.execute(instance_id, arguments, **request.execute_kwargs))

        result = await self._run("execute", run, instance_id, call)
        if len(result.text) <= self.limits.max_output_chars:
            return result
        return result.model_copy(update={"text": capped(result.text, self.limits.max_output_chars)})

    async def reward(self, instance_id: str, calc_reward_kwargs: dict[str, JsonValue], run: str) -> float:
        """The reward of an instance over all its calls."""
        if self._inherits("calc_reward"):
            return 0.0

        async def call() -> float:
            return _finite(await self.tool.calc_reward(instance_id, **calc_reward_kwargs))

        return await self._run("calc_reward", run, instance_id, call)

    async def release(self, instance_id: str, release_kwargs: dict[str, JsonValue]) -> None:
        """Release an instance: without waiting for a slot, and to the end even when the caller leaves."""
        if self._inherits("release"):
            return
        work = self._task(lambda: self.tool.release(instance_id, **release_kwargs))
        ending = asyncio.create_task(self._outcome("release", instance_id, work))
        self._releases.add(ending)
        ending.add_done_callback(self._releases.discard)
        await asyncio.shield(ending)

    def still_running(self, instance_id: str) -> asyncio.Task[object] | None:
        """The instance's cancelled call that is still running."""
        work = self._stopping.get(instance_id)
        return work if work is not None and not work.done() else None

    def _coerced(self, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            return self.tool.coerce(arguments)
        except TrackwayError:
            raise
        except BaseException as error:
            raise self._error_of("coerce", error) from error

    def _inherits(self, method: str) -> bool:
        """Return whether the tool inherits the method from BaseTool, where it does nothing."""
        return getattr(type(self.tool), method) is getattr(BaseTool, method)

    async def _run(self, method: str, run: str, instance_id: str, call: Callable[[], Awaitable[R]]) -> R:
        await free_within(self.limits.wait_timeout_s, self._slots.acquire(run), f"tool {self.tool.name!r}")
        work = self._task(call)
        work.add_done_callback(lambda _: self._slots.release(run))
        return await self._outcome(method, instance_id, work)

    def _task(self, call: Callable[[], Awaitable[R]]) -> asyncio.Task[R]:
        async def run() -> R:
            return await contained(call())

        return asyncio.create_task(run())

    async def _outcome(self, method: str, instance_id: str, work: asyncio.Task[R]) -> R:
        try:
            done = await ended_within(self.limits.call_timeout_s, work)
        except asyncio.CancelledError:
            await self._stop(instance_id, work)
            raise
        if not done:
            await self._stop(instance_id, work)
            raise self._too_slow(method)
        try:
            return outcome_of(work)
        except TrackwayError:
            raise
        except Exception as error:
            raise self._error_of(method, error) from error

    async def _stop(self, instance_id: str, work: asyncio.Task[R]) -> None:
        def ended(work: asyncio.Task[R]) -> None:
            self._stopping.pop(instance_id, None)
            if not work.cancelled():
                work.exception()  # retrieve the exception, or asyncio warns

        self._stopping[instance_id] = work
        work.add_done_callback(ended)
        work.cancel()
        await ended_within(self.limits.stop_timeout_s, work)

    def _too_slow(self, method: str) -> TrackwayError:
        message = (
            f"tool {self.tool.name!r}: expected {method} to end within {self.limits.call_timeout_s:g} s; "
            "ask for less at once, or raise call_timeout_s"
        )
        return TrackwayError(ErrorCode.TOOL_TIMEOUT, message, tool=self.tool.name)

    def _error_of(self, method: str, error: BaseException) -> TrackwayError:
        """The error for the caller. The traceback is logged here, since it does not cross the process."""
        logger.error("tool %r failed in %s", self.tool.name, method, exc_info=error)
        message = f"tool {self.tool.name!r} failed in {method}: {described(failure_of(error))}"
        place = raised_at(error)  # not in the message, which the model reads
        detail = {"raised_at": place} if place else {}
        return TrackwayError(ErrorCode.TOOL_FAILED, message, tool=self.tool.name, **detail)


async def ended_within(seconds: float, work: asyncio.Task[R]) -> bool:
    """Return whether the task ends in time. It is not cancelled. (`asyncio.wait` costs more.)"""
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def wake(*_: object) -> None:
        if not over.done():
            over.set_result(None)

    work.add_done_callback(wake)
    timer = loop.call_later(seconds, wake)
    try:
        await over
    finally:
        timer.cancel()
        work.remove_done_callback(wake)
    return work.done()


def _valid(result: ToolResult) -> ToolResult:
    if not isinstance(result, ToolResult):
        raise TypeError(f"expected execute to return a ToolResult, got {result!r}")
    for number in (result.reward, *result.metrics.values()):
        _finite(number)
    if all(map(str.isascii, (result.text, *result.metrics))):
        return result
    # A lone surrogate, as in truncated text, cannot be sent.
    metrics = {well_formed(name): value for name, value in result.metrics.items()}
    return result.model_copy(update={"text": well_formed(result.text), "metrics": metrics})


def _finite(number: float) -> float:
    # Such a reward is useless for training, and the tool's name is known here.
    if not math.isfinite(number):
        raise ValueError(f"expected finite rewards and metrics, got {number}")
    return number


def capped(text: str, max_chars: int) -> str:
    """The first `max_chars` characters, and a marker with the number of missing ones."""
    missing = len(text) - max_chars
    return text if missing <= 0 else f"{text[:max_chars]}[truncated {missing} characters]"
