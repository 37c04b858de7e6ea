"""A tool server in this process, with its clock in the test's hand."""

import asyncio

import pytest

from tests.services.tools.faulty_tool import FaultyTool
from tests.services.tools.tool_harness import FakeClock, Make, ToolHarness
from trackway.tools.base import ToolLimits
from trackway.tools.core.instances import InstanceTable
from trackway.tools.core.server import ToolServer
from trackway.tools.loading import load_tools
from trackway.tools.sandbox import SandboxSettings, SandboxUnavailableError, launcher_for


@pytest.fixture
def make_rig() -> Make:
    """`make_rig(max_instances=..., config=..., **limits)`."""

    def make(max_instances: int = 8, config: dict[str, float] | None = None, **limits: float) -> ToolHarness:
        clock = FakeClock()
        faulty = FaultyTool.default({**(config or {})})
        tools = [*load_tools(["calculator", "calc_gsm8k_reward"], [], {}), faulty]
        table = InstanceTable("replica0", max_instances, ttl_s=60.0, clock=clock)
        return ToolHarness(ToolServer(tools, ToolLimits.model_validate(limits), table), table, clock, faulty)

    return make


@pytest.fixture
def harness(make_rig: Make) -> ToolHarness:
    return make_rig()


@pytest.fixture(scope="session")
def isolation() -> None:
    """Skips where code cannot be isolated, and says why."""
    try:
        asyncio.run(launcher_for(SandboxSettings()))
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
