"""The rim around a tool's own code: free place, deadline, and its crashes turned into TOOL_FAILED.

A call is never cut short by anything else than its deadline or its caller; the instance stays usable afterwards. A tool
that blocks must do so in a thread (`anyio.to_thread.run_sync`): the deadline cannot interrupt a blocked event loop.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import JsonValue

from trackway.tools.arguments import ArgumentCheck
from trackway.tools.base import BaseTool, ToolLimits
from trackway.tools.instances import acquired
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ExecuteRequest, ToolResult

logger = logging.getLogger("trackway.tools")

R = TypeVar("R")


class GuardedTool:
    """One tool within its limits; the methods are the tool's own four."""

    def __init__(self, tool: BaseTool, limits: ToolLimits) -> None:
        self.tool = tool
        self.limits = limits.narrowed(tool.config)
        self._check = ArgumentCheck(tool.tool_schema)
        self._places = asyncio.Semaphore(self.limits.tool_concurrency)

    async def create(self, instance_id: str, create_kwargs: dict[str, JsonValue]) -> None:
        """Make the state of an instance."""
        await self._run("create", lambda: self.tool.create(instance_id, **create_kwargs))

    async def execute(self, instance_id: str, request: ExecuteRequest) -> ToolResult:
        """One call with checked arguments; its text within the cap."""
        arguments = self.tool.coerce(request.arguments)
        self._check(arguments)
        result = await self._run(
            "execute", lambda: self._valid(self.tool.execute(instance_id, arguments, **request.execute_kwargs))
        )
        return result.model_copy(update={"text": capped(result.text, self.limits.max_output_chars)})

    async def reward(self, instance_id: str) -> float:
        """The reward of an instance's whole life."""
        return await self._run("calc_reward", lambda: self._finite(self.tool.calc_reward(instance_id)))

    async def release(self, instance_id: str) -> None:
        """Forget an instance."""
        await self._run("release", lambda: self.tool.release(instance_id))

    async def _run(self, method: str, call: Callable[[], Awaitable[R]]) -> R:
        what = f"tool {self.tool.name!r}"
        async with acquired(self._places, self.limits.wait_timeout_s, what):
            deadline = asyncio.timeout(self.limits.call_timeout_s)
            try:
                async with deadline:
                    return await call()
            except TrackwayError:
                raise
            except Exception as error:
                if deadline.expired():
                    message = (
                        f"{what}: expected {method} to end within {self.limits.call_timeout_s:g} s; "
                        "ask for less at once, or raise call_timeout_s"
                    )
                    raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message, tool=self.tool.name) from error
                # The traceback stays here: it does not cross the process.
                logger.exception("%s failed in %s", what, method)
                message = f"{what} failed in {method}: {type(error).__name__}: {error}"
                raise TrackwayError(ErrorCode.TOOL_FAILED, message, tool=self.tool.name) from error

    async def _valid(self, outcome: Awaitable[ToolResult]) -> ToolResult:
        result = await outcome
        if not isinstance(result, ToolResult):
            raise TypeError(f"expected execute to return a ToolResult, got {result!r}")
        for number in (result.reward, *result.metrics.values()):
            _require_finite(number)
        return result

    async def _finite(self, outcome: Awaitable[float]) -> float:
        reward = await outcome
        _require_finite(reward)
        return reward


def _require_finite(number: float) -> None:
    # JSON has no NaN: it would reach the client as null.
    if not math.isfinite(number):
        raise ValueError(f"expected finite rewards and metrics, got {number}")


def capped(text: str, max_chars: int) -> str:
    """The first `max_chars` characters, and a marker that says how many are missing."""
    missing = len(text) - max_chars
    return text if missing <= 0 else f"{text[:max_chars]}[truncated {missing} characters]"
