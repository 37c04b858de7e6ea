"""User code that would end its process, in every way that raises: tools as functions and as a class, and a scorer."""

import asyncio
import sys
from collections.abc import Iterator
from typing import NoReturn

from pydantic import JsonValue

from trackway.tools import BaseTool, FunctionSchema, ToolResult, ToolSchema, function_tool
from trackway.wire.reward import ScoreRequest, ScorerInfo
from trackway.wire.trajectory import Reward


class Halt(BaseException):
    """A user's own, which no `except Exception` sees."""


class Mute(Exception):
    """Its message cannot be read."""

    def __str__(self) -> str:
        sys.exit(9)


RAISED = {
    "exit": "it called sys.exit(3)",
    "interrupt": "it raised KeyboardInterrupt, which is not an Exception",
    "halt": "it raised Halt: now, which is not an Exception",
    "generator_exit": "it raised GeneratorExit, which is not an Exception",
    "cancel": "it cancelled itself",
    "mute": "Mute: (its message cannot be read: __str__ raised)",
}
"""Ways to misbehave, and what the caller reads of each."""

BY_TASKS = {
    "gathered": "it called sys.exit(3)",
    "waited_for": "it called sys.exit(3)",
    "task_cancel": "it cancelled itself",
}
"""Ways that need an event loop."""


def misbehave(how: str) -> NoReturn:
    if how == "exit":
        sys.exit(3)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "halt":
        raise Halt("now")
    if how == "generator_exit":
        raise GeneratorExit
    if how == "cancel":
        raise asyncio.CancelledError
    raise Mute


async def misbehave_by_tasks(how: str) -> None:
    async def leave() -> None:
        sys.exit(3)

    if how == "gathered":
        await asyncio.gather(leave(), asyncio.sleep(5))
    if how == "waited_for":
        await asyncio.wait_for(leave(), 60)
    if how == "task_cancel":
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(5)
    misbehave(how)


@function_tool
def in_thread(how: str) -> str:
    """Misbehave in a thread.

    Args:
        how: the way
    """
    misbehave(how)


@function_tool
async def on_loop(how: str) -> str:
    """Misbehave on the event loop.

    Args:
        how: the way
    """
    await misbehave_by_tasks(how)
    return "not reached"


@function_tool
def generated(how: str) -> Iterator[str]:
    """Misbehave while the result is read.

    Args:
        how: the way
    """
    yield "first"
    misbehave(how)


class Hooked(BaseTool):
    """Misbehaves in the hook that `create_kwargs` names; its other hooks work."""

    default_schema = ToolSchema(
        function=FunctionSchema(
            name="hooked",
            description="Misbehaves.",
            parameters={"type": "object", "properties": {"how": {"type": "string"}}},
        )
    )

    def __init__(self, config: dict[str, JsonValue], tool_schema: ToolSchema) -> None:
        super().__init__(config, tool_schema)
        self._hooks: dict[str, tuple[str, str]] = {}

    def coerce(self, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if "how" in arguments:
            misbehave(str(arguments["how"]))
        return arguments

    async def create(self, instance_id: str, /, **create_kwargs: JsonValue) -> None:
        self._hooks[instance_id] = str(create_kwargs["hook"]), str(create_kwargs["how"])
        self._reach("create", instance_id)

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        self._reach("execute", instance_id)
        return ToolResult(text="executed")

    async def calc_reward(self, instance_id: str, /, **kwargs: JsonValue) -> float:
        self._reach("calc_reward", instance_id)
        return 1.0

    async def release(self, instance_id: str, /, **release_kwargs: JsonValue) -> None:
        self._reach("release", instance_id)

    async def close(self) -> None:
        misbehave("exit")

    def _reach(self, hook: str, instance_id: str) -> None:
        chosen, how = self._hooks[instance_id]
        if hook == chosen:
            misbehave(how)


class ExitingScorer:
    """Scores 0.5, unless the method is a way to misbehave."""

    info = ScorerInfo(
        name="exiting", data_sources=["test/exiting"], methods=["half", *RAISED, *BY_TASKS], description="Misbehaves."
    )

    async def score(self, request: ScoreRequest, method: str) -> Reward:
        if method != "half":
            await misbehave_by_tasks(method)
        return Reward(score=0.5)
