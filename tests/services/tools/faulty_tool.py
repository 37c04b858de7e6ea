"""A tool that fails on demand, loaded by import path: `tests.services.tools.faulty_tool:FaultyTool`."""

import asyncio
import sys
import threading

from pydantic import JsonValue

from trackway.tools import BaseTool, in_thread
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.tools import ToolResult


class FaultyTool(BaseTool):
    """`mode`: ok answers `ok <n>` with the count of finished calls, sleep never ends, block does not even stop."""

    default_schema = ToolSchema(
        function=FunctionSchema(
            name="faulty",
            description="Fails on demand.",
            parameters={
                "type": "object",
                "properties": {
                    "mode": {
                        "type": "string",
                        "enum": ["ok", "raise", "sleep", "block", "exit", "cancel", "long", "nan"],
                    }
                },
                "required": ["mode"],
            },
        )
    )

    def __init__(self, config: dict[str, JsonValue], tool_schema: ToolSchema) -> None:
        super().__init__(config, tool_schema)
        self.calls: dict[str, int] = {}
        self.started = 0
        self.running = 0
        self.most_running = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.unblock = threading.Event()
        self.given: dict[str, dict[str, JsonValue]] = {}

    async def create(self, instance_id: str, /, **create_kwargs: JsonValue) -> None:
        if create_kwargs.get("broken"):
            raise OSError("no room")
        self.calls[instance_id] = 0

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        self.started += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
            return await self._answer(instance_id, str(arguments["mode"]))
        finally:
            self.running -= 1

    async def _answer(self, instance_id: str, mode: str) -> ToolResult:
        if mode == "raise":
            raise ZeroDivisionError("asked to fail")
        if mode == "sleep":
            await asyncio.Event().wait()
        if mode == "block":
            await in_thread(lambda: self.unblock.wait(60))
        if mode == "exit":
            sys.exit(3)
        if mode == "cancel":
            raise asyncio.CancelledError
        if mode == "nan":
            return ToolResult(text="nan", reward=float("nan"))
        self.calls[instance_id] += 1
        return ToolResult(text="x" * 100 if mode == "long" else f"ok {self.calls[instance_id]}", reward=0.5)

    async def calc_reward(self, instance_id: str, /, **kwargs: JsonValue) -> float:
        self.given["calc_reward"] = kwargs
        return float(self.calls[instance_id])

    async def release(self, instance_id: str, /, **release_kwargs: JsonValue) -> None:
        self.given["release"] = release_kwargs
        await self.gate.wait()
        del self.calls[instance_id]


class PreparedTool(FaultyTool):
    """Says in `heard` when it starts and closes; a broken one cannot start."""

    def __init__(self, name: str, heard: list[str], broken: bool = False) -> None:
        assert self.default_schema is not None
        function = self.default_schema.function.model_copy(update={"name": name})
        super().__init__({}, ToolSchema(function=function))
        self.heard, self.broken = heard, broken

    async def start(self) -> None:
        self.heard.append(f"start {self.name}")
        if self.broken:
            raise OSError(f"{self.name} has no index")

    async def close(self) -> None:
        self.heard.append(f"close {self.name}")
