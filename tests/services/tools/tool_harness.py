"""A tool server in this process, its clock in the test's hand, and helpers that wait on a condition."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.services.tools.faulty_tool import FaultyTool
from trackway.tools.core.instances import InstanceTable
from trackway.tools.core.server import ToolServer
from trackway.wire.tools import CreateInstance, ExecuteRequest


@dataclass
class FakeClock:
    """Seconds that pass only when a test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ToolHarness:
    """A server with its parts within reach."""

    server: ToolServer
    table: InstanceTable
    clock: FakeClock
    faulty: FaultyTool

    async def made(self, tool: str = "faulty", session_id: str | None = None, **create_kwargs: str) -> str:
        """The id of a new instance."""
        creation = CreateInstance(tool=tool, session_id=session_id, create_kwargs={**create_kwargs})
        return (await self.server.create(creation)).instance_id

    async def call(self, instance_id: str, mode: str = "ok") -> str:
        """The text of one call of the faulty tool."""
        return (await self.server.execute(instance_id, ExecuteRequest(arguments={"mode": mode}))).text


Make = Callable[..., ToolHarness]
