"""Calls of tools as Prometheus sees them."""

import pytest

from trackway.tools.app import create_app

pytestmark = pytest.mark.anyio


async def test_calls_are_counted_by_tool_and_result_and_instances_while_they_live(running) -> None:
    async with running(create_app()) as client:
        for expression in ("1 + 1", "2 + 2", "1 +"):
            await client.post("/tools/calculator/execute", json={"arguments": {"expression": expression}})
        made = (await client.post("/instances", json={"tool": "calculator"})).json()["instance_id"]
        await client.post(f"/instances/{made}/execute", json={"arguments": {"wrong": 1}})
        lines = (await client.get("/metrics")).text.splitlines()

    assert {line for line in lines if line.startswith(("trackway_tool_calls", "trackway_tool_instances"))} == {
        'trackway_tool_calls_total{result="ok",tool="calculator"} 2.0',
        'trackway_tool_calls_total{result="invalid_request",tool="calculator"} 2.0',
        "trackway_tool_instances 1.0",
    }
    duration = 'gen_ai_execute_tool_duration_seconds_count{error_type="%s",gen_ai_operation_name="execute_tool",'
    for error_type in ("", "invalid_request"):
        assert duration % error_type + 'gen_ai_tool_name="calculator"} 2.0' in lines
