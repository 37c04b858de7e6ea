"""A slow calculator that keeps an instance for each trajectory: `tests.cluster.slow_calculator:SlowCalculator`.

It paces a run by the clock and not by the machine, and calls are on their way whenever a node dies.
"""

import asyncio

from pydantic import JsonValue

from trackway.tools.builtin.calculator import CalculatorTool
from trackway.wire.tools import ToolResult

SECONDS = 3.0


class SlowCalculator(CalculatorTool):
    """The demo's calculator, slower."""

    stateless = False

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """The value as text, after a while."""
        await asyncio.sleep(SECONDS)
        return await super().execute(instance_id, arguments, **execute_kwargs)
